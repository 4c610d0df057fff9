"""How does each metric depend on the decay and symmetry of an attenuated encoding?

    python -m experiments.beyond.attenuated_sweep
    python -m experiments.beyond.attenuated_sweep --length 512 --output docs/figures

Saves two figures: each metric against the decay w, one line per symmetry s, and against s, one line per w.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from pelocality import metrics
from pelocality.encodings import AttenuatedEncoding

METRICS = {
    "locality": metrics.locality,
    "adjusted locality": metrics.adjusted_locality,
    "past locality": metrics.past_locality,
    "published symmetry": metrics.symmetry,
    "relative asymmetry": metrics.relative_asymmetry,
    "direction balance": metrics.direction_balance,
    "mean distance (tokens)": metrics.mean_distance,
    "window of 90 % (tokens)": metrics.window,
    "half-life (tokens)": metrics.half_life,
    "entropy": metrics.entropy,
    "Toeplitz share": metrics.toeplitz_share,
    "asymmetry at distance 1": lambda weights: metrics.profile_asymmetry(weights)[..., 0],
}
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def sweep(decays: list[float], symmetries: list[float], length: int) -> torch.Tensor:
    """Return the weights of every pair, (decays, symmetries, length, length)."""
    pairs = torch.cartesian_prod(torch.tensor(decays), torch.tensor(symmetries))
    encoding = AttenuatedEncoding(len(pairs), pairs[:, 0], pairs[:, 1]).double()
    return encoding.weights(length).unflatten(0, (len(decays), len(symmetries)))


def figure(weights: torch.Tensor, x: list[float], lines: list[float], names: tuple[str, str]) -> plt.Figure:
    """Plot one panel per metric; weights (x, lines, length, length)."""
    fig, axes = plt.subplots(4, 3, figsize=(8.5, 9.4), layout="constrained", sharex=True)
    colours = plt.colormaps["viridis"](torch.linspace(0.05, 0.85, len(lines)).tolist())
    for (name, metric), axis in zip(METRICS.items(), axes.flat, strict=True):
        values = metric(weights)
        for column, (line, colour, dash) in enumerate(zip(lines, colours, DASHES, strict=False)):
            axis.plot(x, values[:, column], linestyle=dash, color=colour, lw=1.6, label=f"{names[1]} = {line:g}")
        axis.set_title(name, fontsize=10)
        axis.set_xscale("log", base=10 if names[0] == "w" else 2)
        if names[0] == "s":
            axis.set_xticks([2.0**k for k in range(-3, 4)], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
        if name.startswith("half-life"):
            axis.set_yscale("log")
        axis.grid(alpha=0.25, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel({"w": "decay w", "s": "symmetry s"}[names[0]])
    fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(lines), frameon=False)
    return fig


def main() -> None:
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=64, help="positions n")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the figures")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    many_w, few_w = torch.logspace(-4, 1, 41).tolist(), [0.001, 0.01, 0.1, 1.0]
    many_s, few_s = [2 ** (k / 8) for k in range(-24, 25)], [0.25, 0.5, 1.0, 2.0, 4.0]
    against_decay = figure(sweep(many_w, few_s, arguments.length), many_w, few_s, ("w", "s"))
    over_s = sweep(few_w, many_s, arguments.length).transpose(0, 1)
    against_symmetry = figure(over_s, many_s, few_w, ("s", "w"))
    for name, fig in (("attenuated_decay", against_decay), ("attenuated_symmetry", against_symmetry)):
        fig.savefig(arguments.output / f"{name}.png", dpi=110)
        print(f"figure: {arguments.output / name}.png")

    values = metrics.symmetry(over_s[:, few_w.index(0.1)])
    chosen = [many_s.index(2.0**k) for k in range(-3, 4)]
    print("published symmetry at w = 0.1, s = 1/8 ... 8:", [round(values[i].item(), 3) for i in chosen])


if __name__ == "__main__":
    main()
