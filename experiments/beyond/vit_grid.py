"""How local and how symmetric are vision transformers on the grid of their patches?

    python -m experiments.beyond.vit_grid vit_tiny_patch16_224_pos_qk.npz --output runs
    python -m experiments.beyond.vit_grid --smoke

The file holds ViT-tiny's pos_embed (197, 192), one class token and a 14 x 14 grid, and the query and key weights of
three layers as L0_q_weight, L0_k_weight, L5_q_weight and so on. Their attention is measured on the grid, and beside
that as if the patches were a line. Then small vision transformers are trained on the 8 x 8 digits of scikit-learn, a
patch per pixel, with five kinds of positions, and their attention to test images is measured on the grid.

Predictions, written before the first run on the digits:

1. Training makes the learned table local on the grid: adjusted locality rises above that of the model without
   positions, which stays near that of the untrained one.
2. ALiBi on the grid reaches a higher accuracy than ALiBi along the line of patches, and both a higher one than no
   positions. The learned table and the table of displacements are within two points of ALiBi on the grid.
3. The relative asymmetry of ALiBi on the grid is below that of the learned table.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from experiments.runs import markdown
from pelocality import (
    ALiBi,
    DisplacementTable,
    PositionedEncoding,
    Positions,
    adjusted_locality,
    attach,
    locality,
    mean_distance,
    measure,
    plots,
    position_weights,
    text_average,
)
from pelocality.models import SequenceModel, identical_patches
from pelocality.statistics import t_interval

HEADS = 3  # of ViT-tiny
SIDE = 14  # of its grid of patches
LAYERS = (0, 5, 11)
GRID = Positions.grid(4, 4, before=1)  # of the digits
KINDS = {
    "learned table": None,
    "ALiBi on the grid": lambda: PositionedEncoding(ALiBi(4), GRID),
    "ALiBi along the line": lambda: PositionedEncoding(ALiBi(4), Positions(range(16), before=1)),
    "table of displacements": lambda: DisplacementTable(4, GRID),
    "none": lambda: DisplacementTable(4, GRID, learnable=False),  # zeros
}


def by_head(weight):
    """Split the weight (d, d) of a torch.nn.Linear into W (heads, d, d_head)."""
    return weight.T.reshape(len(weight), HEADS, -1).transpose(1, 0, 2)


def random_weights():
    """Return weights of ViT-tiny's shapes."""
    draw = np.random.default_rng(0).standard_normal
    weights = {f"L{layer}_{part}_weight": draw((192, 192)) for layer in LAYERS for part in "qk"}
    return weights | {"pos_embed": draw((1 + SIDE * SIDE, 192))}


def row(name, weights, positions):
    """Return the metrics of one matrix, or their mean over heads."""
    m = measure(weights, positions=positions)
    values = {"locality": m.locality, "adjusted": adjusted_locality(weights, positions=positions)}
    values |= {"symmetry": m.symmetry, "relative asymmetry": m.relative_asymmetry}
    values["distance"] = mean_distance(weights, positions=positions)
    return {"ViT-tiny, 196 patches": name} | {metric: f"{value.mean():.3f}" for metric, value in values.items()}


def tables_of_vit(vit, output):
    """Print the metrics of ViT-tiny's positions on the grid and along the line, and draw three of its matrices."""
    patches = vit["pos_embed"].reshape(-1, vit["pos_embed"].shape[-1])[-SIDE * SIDE :]
    matrices = {
        f"layer {layer}, mean of {HEADS} heads": position_weights(
            patches, *(by_head(vit[f"L{layer}_{part}_weight"]) for part in "qk")
        )
        for layer in LAYERS
    }
    matrices["cosine / 0.1"] = position_weights(patches, similarity="cosine", temperature=0.1)
    matrices["*uniform*"] = torch.full((SIDE * SIDE,) * 2, 1 / SIDE**2)
    grid = Positions.grid(SIDE, SIDE)
    for where, positions in (("on the grid", grid), ("along the line", None)):
        print(f"\n{where}:\n")
        print(markdown(pd.DataFrame([row(name, each, positions) for name, each in matrices.items()])))
    fig, axes = plt.subplots(1, 3, figsize=(11.4, 3.5), layout="constrained")
    plots.on_grid(matrices["cosine / 0.1"], positions=grid, query=5 * SIDE + 4, ax=axes[0], title="One patch's cosines")
    for ax, (layer, head) in zip(axes[1:], ((0, 0), (5, 2)), strict=True):
        attention = matrices[f"layer {layer}, mean of {HEADS} heads"][head]
        plots.on_grid(attention, positions=grid, ax=ax, title=f"Layer {layer}, head {head}: all patches")
    output.mkdir(parents=True, exist_ok=True)
    fig.savefig(output / "vit_grid.png", dpi=150)


def digits(seed):
    """Return images (n, 1, 8, 8) and labels to train on, and to test on."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = torch.tensor(found.target)[order]
    return (images[order][:1400], labels[:1400]), (images[order][1400:], labels[1400:])


def measured(model, images):
    """Return metrics of the attention to test images, the mean over layers, heads and images."""
    known = SequenceModel(model, inputs=identical_patches(2, channels=1))
    result = text_average(known, [{"pixel_values": images}], length=17, without_first=1, progress=False)
    values = {name: float(each.mean()) for name, each in result.per_sample.items()}
    found = {"locality": values["locality"], "adjusted": float(adjusted_locality(result).mean())}
    return found | {
        "relative asymmetry": values["relative_asymmetry"],
        "line": float(locality(result.attention).mean()),
    }


def train(kind, seed, epochs):
    """Train a vision transformer with one kind of positions, and measure it before and after."""
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, num_labels=10, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    (images, labels), (test_images, test_labels) = digits(seed)
    if KINDS[kind] is not None:
        table = [name for name, _ in model.named_parameters() if name.endswith("embeddings.position_embeddings")]
        names = [name.removeprefix("vit.") for name in table]
        attach(model, KINDS[kind](), example_inputs={"pixel_values": images[:2]}, disable=names)
    before = measured(model, test_images[:64])
    steps = -(-len(images) // 70) * epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for chosen in order.split(70):
            loss = model(pixel_values=images[chosen], labels=labels[chosen]).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = model(pixel_values=test_images).logits.argmax(-1) == test_labels
    after = measured(model, test_images[:64])
    row = {"positions": kind, "seed": seed, "accuracy": 100 * right.double().mean().item()}
    return row | {f"{name} before": value for name, value in before.items()} | after


def summary(table):
    """Return the mean over seeds of every kind with its t interval."""
    rows = []
    for kind, runs in table.groupby("positions", sort=False):
        found = {"positions": kind}
        for name in ("accuracy", "adjusted before", "adjusted", "relative asymmetry", "locality", "line"):
            values = torch.tensor(runs[name].to_numpy())
            low, high = t_interval(values) if len(runs) > 1 else (torch.nan, torch.nan)
            digits = 1 if name == "accuracy" else 3
            found[name] = f"{values.mean():.{digits}f} [{float(low):.{digits}f}, {float(high):.{digits}f}]"
        rows.append(found)
    return pd.DataFrame(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help=".npz with pos_embed and the query and key weights")
    parser.add_argument("--output", type=Path, default=Path("outputs/vit_grid"), help="folder of figure and table")
    parser.add_argument("--results", type=Path, help="print the table of a vit_digits.csv, train nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--smoke", action="store_true", help="random weights instead of a file, one step: to see it run"
    )
    arguments = parser.parse_args()
    if arguments.results:
        return print(markdown(summary(pd.read_csv(arguments.results))))
    if arguments.smoke == bool(arguments.file):
        parser.error("name either a file or --smoke")
    plt.switch_backend("agg")
    tables_of_vit(random_weights() if arguments.smoke else np.load(arguments.file), arguments.output)
    path = arguments.output / "vit_digits.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    seeds, epochs = ([0], 1) if arguments.smoke else (arguments.seeds, arguments.epochs)
    for kind in KINDS:
        for seed in seeds:
            if not any(row["positions"] == kind and row["seed"] == seed for row in rows):
                rows.append(train(kind, seed, epochs))
                pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g")
    print("\ndigits, test images:\n")
    print(markdown(summary(pd.DataFrame(rows))))
    return None


if __name__ == "__main__":
    main()
