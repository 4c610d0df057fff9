"""What do locality and symmetry over a line miss in ViT's positions, which form a grid?

    python experiments/vit_grid.py vit_tiny_patch16_224_pos_qk.npz

The file holds pos_embed (197, 192), one class token and a 14 x 14 grid, and the query and key weights of three layers
as L0_q_weight, L0_k_weight, L5_q_weight and so on. Prints a Markdown table, and attention by distance along the line.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from runs import markdown

from pelocality import adjusted_locality, direction_balance, measure, position_weights

HEADS = 3  # of ViT-tiny
SIDE = 14  # of its grid of patches
LAYERS = (0, 5, 11)


def by_head(weight: np.ndarray) -> np.ndarray:
    """Split the weight (d, d) of a torch.nn.Linear into W (heads, d, d_head)."""
    return weight.T.reshape(len(weight), HEADS, -1).transpose(1, 0, 2)


def random_weights() -> dict[str, np.ndarray]:
    """Return weights of ViT-tiny's shapes."""
    draw = np.random.default_rng(0).standard_normal
    weights = {f"L{layer}_{part}_weight": draw((192, 192)) for layer in LAYERS for part in "qk"}
    return weights | {"pos_embed": draw((1 + SIDE * SIDE, 192))}


def row(name: str, weights: torch.Tensor) -> dict[str, str]:
    """Return the metrics of one matrix, or their mean over heads."""
    m = measure(weights)
    values = {"locality": m.locality, "adjusted": adjusted_locality(weights), "symmetry": m.symmetry}
    values |= {"relative asymmetry": m.relative_asymmetry, "direction": direction_balance(weights)}
    return {"patches read as a line": name} | {metric: f"{value.mean():.3f}" for metric, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help=".npz with pos_embed and the query and key weights")
    parser.add_argument("--smoke", action="store_true", help="random weights instead of a file: to see it run")
    arguments = parser.parse_args()
    if arguments.smoke == bool(arguments.file):
        parser.error("name either a file or --smoke")
    vit = random_weights() if arguments.smoke else np.load(arguments.file)
    patches = vit["pos_embed"].reshape(-1, vit["pos_embed"].shape[-1])[-SIDE * SIDE :]
    rows = []
    for layer in LAYERS:
        query, key = (by_head(vit[f"L{layer}_{part}_weight"]) for part in "qk")
        rows.append(row(f"layer {layer}, mean of {HEADS} heads", position_weights(patches, query, key)))
    cosine = position_weights(patches, similarity="cosine", temperature=0.1)
    rows.append(row("cosine / 0.1", cosine))
    rows.append(row("*uniform*", torch.full((SIDE * SIDE,) * 2, 1 / SIDE**2)))
    print(markdown(pd.DataFrame(rows)))
    means = {step: torch.diagonal(cosine, step).mean() for step in (1, 2, 7, 13, 14, 15, 28)}
    steps = ", ".join(f"{step}: {mean:.4f}" for step, mean in means.items())
    print(f"\nmean attention (cosine / 0.1) by distance along the line: {steps}")


if __name__ == "__main__":
    main()
