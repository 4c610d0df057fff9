"""The metrics of each word's or text's matrix, measured while a model runs."""

from typing import Any

import torch
from torch import Tensor

from pelocality import metrics
from pelocality._distributed import gathered
from pelocality.metrics._row_pass import row_statistics
from pelocality.metrics.published import measurement
from pelocality.positions import Positions

PUBLISHED = ("locality", "symmetry", "relative_asymmetry")
CAUSAL = ("past_locality", "adjusted_locality", "mean_distance", "sink_rate", "window")
"""What is shown of causal attention, on which symmetry says nothing."""


def hides_future(visible: Tensor) -> bool:
    """Return whether no query sees a later key; visible (..., n, n)."""
    n = visible.shape[-1]
    return n > 1 and not bool(visible.reshape(-1, n, n).any(0).triu(1).any())


def sample_metrics(
    attention: Tensor, visible: Tensor, mask: Tensor | None = None, positions: Positions | None = None
) -> dict[str, Tensor]:
    """Return metrics of attention (batch, head, n, n) whose rows sum to 1, each (batch, head).

    Args:
        attention: The weights.
        visible: The keys that each query sees, (batch, n, n).
        mask: The tokens that count, (batch, n); None: all.
        positions: Where they lie; None for a line.
    """
    values: dict[str, Tensor] = dict(vars(measurement(attention, mask=mask, positions=positions)))
    if hides_future(visible):
        for name in causal_metrics(positions):
            more: dict[str, Any] = {} if name == "sink_rate" else {"positions": positions}
            more |= {"visible": visible[:, None]} if name == "adjusted_locality" else {}
            values[name] = getattr(metrics, name)(attention, mask=mask, **more)
    return values


def causal_metrics(positions: Positions | None) -> tuple[str, ...]:
    """Return `CAUSAL`, without those that need a past where positions have none."""
    return CAUSAL if positions is None or positions.has_directions else CAUSAL[1:]


def metrics_with_sink(weights: Tensor) -> dict[str, Tensor]:
    """Return the published metrics of weights (batch, head, n, n) as they are: rows sum to 1 less the sink's share."""
    values = row_statistics(weights.reshape(-1, *weights.shape[-2:])).pooled()
    return {
        f"{name}_with_sink": value.reshape(weights.shape[:2]) for name, value in zip(PUBLISHED, values, strict=True)
    }


def stacked(batches: dict[int, dict[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the values of all samples of all processes by name, each (sample, layer, head).

    Names that a layer or a batch lacks are left out, such as past locality where layers differ in causality.

    Args:
        batches: What this process measured, by the number of the batch and by layer, (batch, head) each.
    """
    found = dict(sorted(pair for part in gathered([batches]) for pair in part.items()))
    whole = [[layers[place] for place in sorted(layers)] for layers in found.values()]
    every = [values for layers in whole for values in layers]
    return {
        name: torch.cat([torch.stack([values[name] for values in layers], 1) for layers in whole])
        for name in (every[0] if every else ())
        if all(name in values for values in every)
    }
