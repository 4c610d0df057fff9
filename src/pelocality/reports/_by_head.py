"""What several parts of a report say and show: places of heads, distances in words, tables and figures by head."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pelocality.models import AveragedAttention
from pelocality.reports.contents import Chart, levels_of

_METRICS = ["locality", "adjusted_locality", "past_locality", "mean_distance", "direction_balance"]
_METRICS += ["relative_asymmetry", "sink_rate"]


def largest(values: Tensor) -> tuple[int, int]:
    """Return the place of the largest value of (layer, head)."""
    layer, head = divmod(int(values.nan_to_num(-torch.inf).argmax()), values.shape[1])
    return layer, head


def how_many(chosen: Tensor) -> str:
    """Return how many heads are chosen, in words."""
    return f"{int(chosen.sum()) or 'none'} of {chosen.numel()} heads"


def place_of(result: Any, layer: int, head: int) -> str:
    """Return the name of a head, by the model's layer numbers."""
    return f"layer {result.layers[layer]} head {head}"


def peak_distance(matrix: Tensor) -> int:
    """Return the distance, up to half the length away, with the largest mean attention of a matrix (n, n)."""
    half = max(1, matrix.shape[-1] // 2)
    means = [float(matrix.diagonal(k).mean()) for k in range(-half, half + 1)]
    return int(np.argmax(means)) - half


def away(distance: int) -> str:
    """Return a distance in words, such as "2 tokens back"."""
    if distance == 0:
        return "at the token itself"
    return f"{abs(distance)} token{'s' if abs(distance) > 1 else ''} {'ahead' if distance > 0 else 'back'}"


def towards(distance: int) -> str:
    """Return where a head attends, such as "to the next token"."""
    near = {-1: "to the previous token", 0: "to the token itself", 1: "to the next token"}
    return near.get(distance, f"to the token {away(distance)}")


def head_grid(layers: Sequence[int], values: Tensor, title: str, beside: Mapping[str, float]) -> Chart:
    """Return the figure of a number per layer and head, beside those of chance and of the twins."""
    heads = [str(head) for head in range(values.shape[1])]
    rows = [str(layer) for layer in layers]
    return Chart("grid", title, "head", "layer", heads, values.tolist(), rows, levels=levels_of(beside))


def head_points(
    layers: Sequence[int], x: Tensor, y: Tensor, title: str, x_title: str, y_title: str, **levels: float
) -> Chart:
    """Return the figure of two numbers per layer and head, the second beside those of chance and of the twins."""
    names = [f"layer {layer}" for layer in layers]
    return Chart("points", title, x_title, y_title, x, y, names, ordered=True, levels=levels_of(levels))


def head_frame(layers: Sequence[int], **columns: Tensor) -> pd.DataFrame:
    """Return a table with a row per layer and head."""
    heads_number = next(iter(columns.values())).shape[1]
    index = pd.MultiIndex.from_product([layers, range(heads_number)], names=["layer", "head"])
    return pd.DataFrame({name: each.flatten().tolist() for name, each in columns.items()}, index).reset_index()


def by_layer(result: AveragedAttention, on: str) -> dict[str, list[float]]:
    """Return metrics of the mean matrices by name, the mean over the heads of each layer."""
    names = _METRICS if result.positions is None else ["locality", "adjusted_locality"]
    frame = result.to_frame("layer", metrics=names)
    return {f"{on}: {name.replace('_', ' ')}": frame[f"{name}_of_mean"].tolist() for name in names}
