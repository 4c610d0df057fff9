"""The atlas: what the positions of models do that install from PyPI or were trained here, a row of numbers for each.

    python -m experiments.beyond.atlas                                                      # MiniLM
    python -m experiments.beyond.atlas --models minilm mpnet smollm2 --output docs/atlas    # rows of docs/atlas.md
    python -m experiments.beyond.atlas --runs runs/fixed-0 runs/bert-0 --output docs/atlas  # what pretrain.py trained

Writes a JSON file for each model, and prints the tables of docs/atlas.md from all that lie in the folder. The packages
of the models are those of `real_models.py`.
"""

import argparse
import json
from pathlib import Path

from safetensors.torch import load_model
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, logging

from experiments.runs import DATA, PACKAGES, last_complete_checkpoint, markdown, packaged
from experiments.small_models import make_model
from pelocality import SequenceModel
from pelocality.reports import Atlas, compare_models

NAMES = {"minilm": "all-MiniLM-L6-v2", "mpnet": "all-mpnet-base-v2", "smollm2": "SmolLM2-135M-Instruct"}
NUMBERS = {
    "words: adjusted locality": "adjusted locality, words",
    "text: adjusted locality": "adjusted locality, text",
    "words: relative asymmetry": "relative asymmetry, words",
    "position share": "position share",
    "sinks": "sinks",
    "influence own": "influence: own",
}


SMALL = "small "  # begins the names of models that were trained here


def trained(folder):
    """Return a model of `pretrain.py` with its tokenizer, named after the folder of its run, but for the seed."""
    flags = argparse.Namespace(**json.loads((folder / "run.json").read_text()))
    checkpoint = last_complete_checkpoint(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    model = make_model(flags, tokenizer)
    load_model(model, checkpoint / "model.safetensors")
    name = folder.name.rpartition("-")[0].replace("_", " ")
    return SequenceModel(model.eval(), name=SMALL + ("BERT, " + name if flags.family == "bert" else name)), tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PACKAGES, default=["minilm"])
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="folders of runs of pretrain.py, no --models")
    parser.add_argument("--output", type=Path, default=Path("outputs/atlas"), help="folder of the rows")
    parser.add_argument("--smoke", action="store_true", help="few words of few tokens, to see it run")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    texts = (DATA / "text.txt").read_text(encoding="utf-8").splitlines()[:6]
    options = {"length": 8, "words": 2, "texts": texts} if arguments.smoke else {}
    for folder in arguments.runs:
        compare_models([trained(folder)], arguments.output, **options)
    for name in arguments.models if not arguments.runs else ():
        model, tokenizer = packaged(name, AutoModelForCausalLM if name == "smollm2" else AutoModel)
        compare_models([(SequenceModel(model, name=NAMES[name]), tokenizer)], arguments.output, **options)
    atlas = Atlas.read(sorted(arguments.output.glob("*.json")))
    frame = atlas.to_frame()
    shown = frame[["model", "positions"]].join(frame[[*NUMBERS]].map("{:.3f}".format).rename(columns=NUMBERS))
    small = shown["model"].str.startswith(SMALL)
    print("\n\n".join(markdown(each) for each in (shown[~small], shown[small]) if len(each)))
    print("\n".join(f"\n{note}" for note in atlas.notes))


if __name__ == "__main__":
    main()
