"""The metrics of each word's or text's matrix, measured while a model runs."""

from typing import Any

from torch import Tensor

from pelocality import metrics
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
    named = zip(PUBLISHED, row_statistics(weights.reshape(-1, *weights.shape[-2:])).pooled(), strict=True)
    return {f"{name}_with_sink": value.reshape(weights.shape[:2]) for name, value in named}
