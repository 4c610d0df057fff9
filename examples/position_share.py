"""How much of each head's attention on real text is position, pre-trained and untrained?

    python examples/position_share.py                           # the story in examples/data
    python examples/position_share.py my_text.txt --model bert-base-uncased

Reads one paragraph a line, prints the share per layer, and saves the grid of heads beside their locality.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from measure_model import packaged_model
from scipy.stats import spearmanr
from transformers import AutoConfig, AutoModel, AutoTokenizer, logging

from pelocality import locality, plots, position_share, positional_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ours = Path(__file__).with_name("data") / "text.txt"
    parser.add_argument("text", type=Path, nargs="?", default=ours, help="a text file, one paragraph a line")
    parser.add_argument("--model", help="hub name or local folder; the packaged all-MiniLM-L6-v2 if left out")
    parser.add_argument("--paragraphs", type=int, default=128, help="how many of at least 30 words to read")
    parser.add_argument("--length", type=int, default=128, help="tokens read of each")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the figure")
    arguments = parser.parse_args()
    logging.set_verbosity_error()

    source = arguments.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    with arguments.text.open(encoding="utf-8") as file:
        paragraphs = [line.strip() for line in file if len(line.split()) >= 30][: arguments.paragraphs]
    batches = [
        tokenizer(
            paragraphs[i : i + 16],
            padding=True,
            truncation=True,
            max_length=arguments.length,
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
        for i in range(0, len(paragraphs), 16)
    ]
    torch.manual_seed(0)
    trained = AutoModel.from_pretrained(source)
    shares = {
        "pre-trained": position_share(trained, batches),
        "random": position_share(AutoModel.from_config(AutoConfig.from_pretrained(source)), batches),
    }
    for name, share in shares.items():
        print(f"{name}\n{share}\n")

    share = shares["pre-trained"].share
    local = locality(positional_attention(trained, tokenizer, length=arguments.length))
    rank = spearmanr(share.flatten(), local.flatten()).statistic
    print(f"rank correlation of a head's share with its locality on identical words: {rank:.2f}")

    fig, (left, right) = plt.subplots(1, 2, figsize=(15, 4), layout="constrained")
    layers = shares["pre-trained"].layers
    plots.head_grid(share, layers=layers, ax=left, label="share of attention that position explains", limits=(0, 1))
    plots.head_grid(local, layers=layers, ax=right, label="locality on identical words")
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure = arguments.output / "position_share.png"
    fig.savefig(figure, dpi=130)
    print(f"figure: {figure}")


if __name__ == "__main__":
    main()
