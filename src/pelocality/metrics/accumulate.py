"""Means over batches as torchmetrics classes: updated batch by batch, summed over processes.

States are sums and counts, so batches may be uneven. Under ``torch.distributed`` (torchrun, accelerate, Lightning)
torchmetrics synchronises them on ``compute()``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from pelocality._checks import count, on_float64_device
from pelocality.metrics._inputs import Attention, leading_shape, map_matrices, unwrap
from pelocality.metrics._masks import Mask, token_flags
from pelocality.metrics.structure import crop


class _Mean(Metric):
    """A metric of torchmetrics that a failed batch leaves as it was."""

    full_state_update = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add the matrices of a batch as ``update`` does, and return their own mean.

        After an error or an interrupt the state is as before.
        """
        # clones, as some settings add in place
        before = {name: each.clone() if isinstance(each, Tensor) else each for name, each in vars(self).items()}
        try:
            return super().forward(*args, **kwargs)
        except BaseException:  # torchmetrics resets the state first, and reads it back only from a batch that succeeds
            vars(self).update(before)
            raise


class MeanOver(_Mean):
    """Average any metric of this library over all matrices it is updated with.

        mean over matrices of metric(A)

    Args:
        metric: A function (..., n, n) -> (...) with ``mask=``, such as ``metrics.locality``: one number per matrix.
        shape: Trailing axes to keep apart, such as (layers, heads), or the size of one; all others are averaged over.
        **kwargs: For ``torchmetrics.Metric``.

    Note:
        Every matrix counts equally, whether its text is long or short. A matrix whose value is NaN (such as symmetry of
        fewer than three tokens) is left out of the mean. The mean of symmetries is not the symmetry of the mean matrix,
        which is usually larger. To measure the mean matrix, accumulate a `MeanAttention`.

    Examples:
        >>> from pelocality.metrics import locality, relative_asymmetry
        >>> mean = MeanOver(locality)
        >>> mean.update(torch.eye(8))
        >>> mean.update(torch.full((8, 8), 1 / 8))
        >>> mean.compute()
        tensor(0.6564, dtype=torch.float64)
        >>> by_head = MeanOver(relative_asymmetry, shape=(12,))
        >>> by_head.update(torch.full((8, 12, 16, 16), 1 / 16))  # (batch, head, n, n)
        >>> by_head.compute().shape
        torch.Size([12])
    """

    total: Tensor
    count: Tensor

    def __init__(self, metric: Callable[..., Tensor], shape: int | Sequence[int] = (), **kwargs: Any):
        super().__init__(**kwargs)
        self.metric, self.shape = metric, _sizes(shape)
        # float64: a float32 sum over a corpus loses precision
        self.add_state("total", torch.zeros(self.shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(self.shape, dtype=torch.int64), dist_reduce_fx="sum")
        # a MetricCollection treats metrics whose states are equal after the first batch as duplicates
        self.add_state("function", torch.tensor(list(id(metric).to_bytes(8))), dist_reduce_fx="max")

    def update(self, attention: Attention, mask: Mask | None = None) -> None:
        """Add the matrices of a batch.

        Args:
            attention: (..., *shape, n, n), or what a model returns: a tuple with (batch, head, n, n) for each layer, or
                the output that holds the tuple. The tuple counts as (batch, layer, head, n, n).
            mask: (batch, n), or as for `metrics.locality`; batch are the axes before ``shape``.

        Raises:
            TypeError: As for the metric.
            ValueError: As for the metric, the metric does not return one number per matrix, such as `metrics.measure`,
                the axes do not end with ``shape``, or layers have no batch axis.
        """
        values = self.metric(attention, mask=_place_mask(mask, attention, self.shape))
        given = getattr(values, "shape", type(values).__name__)
        if given != (shape := leading_shape(attention)):
            raise ValueError(f"metric must return one number per matrix, {shape}, got {given}")
        values = on_float64_device(_flatten_to(self.shape, _batch_first(attention, values).detach()))
        counted = ~values.isnan()
        self.total += torch.where(counted, values, 0).sum(0, dtype=torch.float64)
        self.count += counted.sum(0)

    def compute(self) -> Tensor:
        """Return the mean over all batches and processes.

        Returns:
            (*shape), NaN where no matrix counted.
        """
        return self.total / self.count

    def __repr__(self) -> str:
        name = getattr(self.metric, "__name__", repr(self.metric))
        return f"{type(self).__name__}({name}, shape={self.shape})"


class MeanAttention(_Mean):
    """Average the attention matrix itself over batches and processes.

        M_ij = mean of A_ij over the sequences that have a token i

    The symmetry of a mean is not the mean of symmetries, and a mean matrix can be plotted and measured by every metric.

    Args:
        length: Longest sequence n expected; the state is (*shape, n, n).
        shape: Axes to keep apart, such as (layers, heads), or the size of one; all others are averaged over.
        **kwargs: For ``torchmetrics.Metric``.

    Examples:
        >>> from pelocality.metrics import locality
        >>> mean = MeanAttention(length=8)
        >>> mean.update(torch.eye(8))
        >>> mean.update(torch.full((8, 8), 1 / 8))
        >>> locality(mean.compute())
        tensor(0.6564)
    """

    total: Tensor
    count: Tensor
    eps: Tensor

    def __init__(self, length: int, shape: int | Sequence[int] = (), **kwargs: Any):
        super().__init__(**kwargs)
        self.length, self.shape = count("length", length), _sizes(shape)
        self.add_state("total", torch.zeros(*self.shape, length, length, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(length, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("eps", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="max")  # the coarsest input's

    def update(self, attention: Attention, mask: Mask | None = None) -> None:
        """Add the matrices of a batch, each shifted so that its first counting token is token 0.

        Args:
            attention: As for `MeanOver.update`.
            mask: As for `MeanOver.update`; padding is left out and rows renormalised.

        Raises:
            TypeError: As for `metrics.locality`.
            ValueError: As for `MeanOver.update`, or a mask that differs between layers or heads that are kept apart.
            RuntimeError: A sequence is longer than ``length``.
        """
        if getattr(attention, "positions", None) is not None:
            raise ValueError("MeanAttention would lose the positions of the result; give its .attention")
        mask = _place_mask(mask, attention, self.shape)
        matrices = map_matrices(attention, lambda each: crop(each.weights), mask=mask, layout="matrix")
        matrices = on_float64_device(_batch_first(attention, matrices, trailing=2).detach())
        matrices = _flatten_to(self.shape, matrices, trailing=2)
        tokens = ~matrices.diagonal(dim1=-2, dim2=-1).isnan()
        tokens = tokens.reshape(len(tokens), math.prod(self.shape), tokens.shape[-1])
        if bool((tokens != tokens[:, :1]).any()):
            raise ValueError(f"mask must be the same for all of shape={self.shape}, one per sequence: (batch, n)")
        present = tokens[:, 0]
        m = int(present.any(0).sum())
        self.total[..., :m, :m] += matrices[..., :m, :m].nan_to_num(0).sum(0, dtype=torch.float64)
        self.count[:m] += present[:, :m].sum(0)
        self.eps = self.eps.clamp(min=torch.finfo(matrices.dtype).eps)

    def compute(self) -> Tensor:
        """Return the mean matrix over all batches and processes.

        Returns:
            (*shape, m, m) with m the longest sequence seen; rows sum to 1. Summed in float64 and returned in the dtype
            of the input, by whose rounding `symmetry` judges it; half precision as float32.
        """
        m = int((self.count > 0).sum())
        dtype = torch.float32 if self.eps > torch.finfo(torch.float64).eps else torch.float64
        return (self.total[..., :m, :m] / self.count[:m, None]).to(dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, shape={self.shape})"


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the axes that are kept apart; a number is that of one axis."""
    return tuple(count("shape", size) for size in (shape if isinstance(shape, Sequence) else [shape]))


def _place_mask(mask: Mask | None, attention: Attention, shape: tuple[int, ...]) -> Mask | None:
    """Return a mask of the axes before several of ``shape`` with size 1 for those; any other as it is."""
    batch_axes = getattr(unwrap(attention), "ndim", 0) - len(shape) - 2  # none in a tuple of layers
    if mask is None or len(shape) < 2 or batch_axes < 1:  # an axis of shape may be omitted, such as heads
        return mask
    flags = token_flags(mask)
    if flags.ndim != batch_axes + 1:
        return mask
    return flags.reshape(*flags.shape[:-1], *[1] * len(shape), flags.shape[-1])


def _batch_first(attention: Attention, values: Tensor, trailing: int = 0) -> Tensor:
    """Return the values of a tuple of layers, (layer, batch, ..., *rest), as (batch, layer, ..., *rest)."""
    if not isinstance(unwrap(attention), list | tuple):
        return values
    if values.ndim - trailing < 2:
        raise ValueError("each layer must have a batch axis, (batch, head, n, n), got (n, n); use torch.stack(layers)")
    return values.movedim(0, 1)


def _flatten_to(shape: tuple[int, ...], values: Tensor, trailing: int = 0) -> Tensor:
    """Reshape (..., *shape, *rest) to (-1, *shape, *rest), where rest has `trailing` axes."""
    end = values.ndim - trailing
    if values.shape[end - len(shape) : end] != shape:
        given = ", ".join(map(str, (*values.shape[:end], "n", "n")))
        raise ValueError(f"attention of shape ({given}) does not end with (*shape, n, n), shape={shape}; change shape=")
    return values.reshape(-1, *shape, *values.shape[end:])
