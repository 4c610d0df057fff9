"""Metrics of any attention as a table: one row per matrix, one column per metric."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from pelocality import metrics as _metrics
from pelocality._checks import check_choice
from pelocality.metrics._inputs import Attention, leading_shape

_PUBLISHED = ("locality", "symmetry", "relative_asymmetry")


def to_frame(
    attention: Attention,
    metrics: str | Sequence[str] | Mapping[str, Callable[..., Tensor]] = _PUBLISHED,
    axes: Sequence[str] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Return metrics of any attention as a table.

    Args:
        attention: (..., n, n), or the tuple of attentions a model returns, as for `locality`. Results of
            ``positional_attention`` have a method ``to_frame``, with intervals.
        metrics: The name of a metric or several names, or functions of attention by column name.
        axes: Names of the leading axes. None: "layer" and "head" of (layer, head, n, n), otherwise "axis 0" and so on.
        **options: Further arguments for every metric that accepts them, such as ``mask=`` or ``positions=``.

    Returns:
        One row per matrix: the numbers of the matrix along the axes, then its metrics. Half precision as float32.

    Raises:
        TypeError: As for `locality`, or an option that no metric accepts.
        ValueError: As for the metrics, an unknown metric, a metric that does not return one number per matrix, or a
            number of names that is not the number of axes.

    Examples:
        >>> import torch
        >>> to_frame(torch.eye(8).expand(1, 2, 8, 8), ["locality", "entropy"])
           layer  head  locality  entropy
        0      0     0       1.0      0.0
        1      0     1       1.0      0.0
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    functions = dict(metrics) if isinstance(metrics, Mapping) else {name: _metric(name) for name in metrics}
    taken = {name: set(inspect.signature(function).parameters) for name, function in functions.items()}
    if unknown := set(options) - set().union(*taken.values()):
        raise TypeError(f"no metric of {', '.join(functions)} takes {', '.join(sorted(unknown))}")
    shape = leading_shape(attention)
    frame = axes_frame(shape, axes)
    for name, function in functions.items():
        value = function(attention, **{key: given for key, given in options.items() if key in taken[name]})
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if given != shape:
            raise ValueError(f"metrics must give one number per matrix, {shape}, but {name} gives {given}")
        frame[name] = value.detach().cpu().double().flatten().numpy()
    return frame


def axes_frame(shape: tuple[int, ...], axes: Sequence[str] | None) -> pd.DataFrame:
    """Return a table with a row per matrix, and its place along each leading axis."""
    names = ["layer", "head"] if len(shape) == 2 else [f"axis {axis}" for axis in range(len(shape))]
    names = names if axes is None else list(axes)
    if len(names) != len(shape):
        raise ValueError(f"axes must name the {len(shape)} leading axes of {shape}, got {names}")
    return pd.DataFrame(np.indices(shape).reshape(len(shape), math.prod(shape)).T, columns=names)


def _metric(name: str) -> Callable[..., Tensor]:
    """Return the metric of this name."""
    functions = {key: each for key, each in vars(_metrics).items() if inspect.isfunction(each)}
    known = {key: each for key, each in functions.items() if "attention" in inspect.signature(each).parameters}
    check_choice("metrics", name, known)
    return known[name]
