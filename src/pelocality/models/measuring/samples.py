"""The metrics of each word's or text's matrix, measured while a model runs."""

from typing import NamedTuple

import torch
from torch import Tensor

from pelocality import metrics
from pelocality.metrics.published import measurement
from pelocality.positions import Positions

PUBLISHED = ("locality", "symmetry", "relative_asymmetry")
CAUSAL = ("past_locality", "adjusted_locality", "mean_distance", "sink_rate", "window")
"""What is shown of causal attention, on which symmetry says nothing."""


def hides_future(visible: Tensor) -> bool:
    """Return whether no query sees a later key; visible (..., n, n)."""
    n = visible.shape[-1]
    return n > 1 and not bool(visible.reshape(-1, n, n).any(0).triu(1).any())


class Observed(NamedTuple):
    """Attention with what is known of it, as every metric accepts it.

    Attributes:
        attention: Weights whose rows sum to 1, (batch, head, n, n).
        visible: The keys that each query sees, (batch, n, n).
        precision: The precision in which the weights were computed, by whose rounding they are judged.
        positions: Where the tokens lie; None for a line.
    """

    attention: Tensor
    visible: Tensor
    precision: torch.dtype
    positions: Positions | None = None


def sample_metrics(observed: Observed) -> dict[str, Tensor]:
    """Return metrics of attention, each (batch, head)."""
    values: dict[str, Tensor] = dict(vars(measurement(observed)))
    if hides_future(observed.visible):
        values |= {name: getattr(metrics, name)(observed) for name in causal_metrics(observed.positions)}
    return values


def causal_metrics(positions: Positions | None) -> tuple[str, ...]:
    """Return `CAUSAL`, without those that need a past where positions have none."""
    return CAUSAL if positions is None or positions.has_directions else CAUSAL[1:]
