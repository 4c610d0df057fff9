"""Locality and symmetry of real position tables: a language model's, and ViT's grid as the known limit.

    python examples/measure_tables.py                           # all-MiniLM-L6-v2's first 64 rows
    python examples/measure_tables.py pe_matrices               # GPT-2's, and ViT's

Prints Markdown tables. The folder holds gpt2_wpe_first64.npy (64, 768) and vit_tiny_patch16_224_pos_qk.npz, whose
pos_embed (197, 192) is one class token and a 14 x 14 grid, with the query and key weights of three layers.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from measure_model import packaged_model
from transformers import AutoModel

from pelocality import adjusted_locality, direction_balance, measure, position_weights

HEADS = 3  # of ViT-tiny
SIDE = 14  # its grid of patches
HEADER = "| {} | locality | adjusted | symmetry | relative asymmetry | direction |\n|---|---:|---:|---:|---:|---:|"


def row(name: str, weights: torch.Tensor) -> str:
    """The measures of one matrix, or their mean over heads."""
    m = measure(weights)
    values = (m.locality, adjusted_locality(weights), m.symmetry, m.relative_asymmetry, direction_balance(weights))
    return f"| {name} | " + " | ".join(f"{value.mean():.3f}" for value in values) + " |"


def by_head(weight: np.ndarray) -> np.ndarray:
    """(d, d) of a torch.nn.Linear -> W (heads, d, d_head)."""
    return weight.T.reshape(len(weight), HEADS, -1).transpose(1, 0, 2)


def mean_at(weights: torch.Tensor, step: int) -> float:
    """Mean attention at a distance of `step` along the line of patches."""
    return torch.diagonal(weights, step, dim1=-2, dim2=-1).mean().item()


def of_text(name: str, table: np.ndarray) -> None:
    """Measure a table (64, d) of positions in text."""
    print(HEADER.format(f"{name}, positions 0 to 63"))
    print(row(f"dot product / sqrt({table.shape[1]})", position_weights(table)))
    print(row("dot product", position_weights(table, temperature=1.0)))
    print(row("cosine", position_weights(table, similarity="cosine")))
    print(row("cosine / 0.1", position_weights(table, similarity="cosine", temperature=0.1)))
    print(row("cosine / 0.1, positions 1 to 63", position_weights(table[1:], similarity="cosine", temperature=0.1)))
    print(row("*uniform*", torch.full((64, 64), 1 / 64)))


def of_grid(folder: Path) -> None:
    """Measure ViT's positions, a grid of patches, as if they stood in a line."""
    vit = np.load(folder / "vit_tiny_patch16_224_pos_qk.npz")
    patches = vit["pos_embed"].reshape(-1, vit["pos_embed"].shape[-1])[-SIDE * SIDE :]
    print("\n" + HEADER.format("ViT-tiny, 196 patches read as a line"))
    for layer in (0, 5, 11):
        query, key = (by_head(vit[f"L{layer}_{part}_weight"]) for part in "qk")
        print(row(f"layer {layer}, mean of {HEADS} heads", position_weights(patches, query, key)))
    cosine = position_weights(patches, similarity="cosine", temperature=0.1)
    print(row("cosine / 0.1", cosine))
    print(row("*uniform*", torch.full((SIDE * SIDE,) * 2, 1 / SIDE**2)))
    steps = ", ".join(f"{step}: {mean_at(cosine, step):.4f}" for step in (1, 2, 7, 13, 14, 15, 28))
    print(f"\nmean attention (cosine / 0.1) by distance along the line: {steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="the packaged all-MiniLM-L6-v2 if left out")
    folder = parser.parse_args().folder
    if folder is None:
        model = AutoModel.from_pretrained(packaged_model())
        of_text("all-MiniLM-L6-v2", model.embeddings.position_embeddings.weight[:64].detach().numpy())
    else:
        of_text("GPT-2", np.load(folder / "gpt2_wpe_first64.npy"))
        of_grid(folder)


if __name__ == "__main__":
    main()
