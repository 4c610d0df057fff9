"""The atlas: what the positions of models do that install from PyPI, a row of numbers for each.

    python experiments/atlas.py                                                      # MiniLM
    python experiments/atlas.py --models minilm mpnet smollm2 --output docs/atlas    # the rows of docs/atlas.md

Writes a JSON file for each model, and prints the table of docs/atlas.md from all that lie in the folder. The packages
of the models are those of `real_models.py`.
"""

import argparse
from pathlib import Path

from real_models import PACKAGES, packaged
from runs import markdown
from transformers import AutoModel, AutoModelForCausalLM, logging

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PACKAGES, default=["minilm"])
    parser.add_argument("--output", type=Path, default=Path("outputs/atlas"), help="folder of the rows")
    parser.add_argument("--smoke", action="store_true", help="few words of few tokens, to see it run")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    options = {"length": 8, "words": 2} if arguments.smoke else {}
    for name in arguments.models:
        model, tokenizer = packaged(name, AutoModelForCausalLM if name == "smollm2" else AutoModel)
        compare_models([(SequenceModel(model, name=NAMES[name]), tokenizer)], arguments.output, **options)
    atlas = Atlas.read(sorted(arguments.output.glob("*.json")))
    frame = atlas.to_frame()
    numbers = frame[[*NUMBERS]].map("{:.3f}".format).rename(columns=NUMBERS)
    print(markdown(frame[["model", "positions"]].join(numbers)))
    print("\n".join(f"\n{note}" for note in atlas.notes))


if __name__ == "__main__":
    main()
