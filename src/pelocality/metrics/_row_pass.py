"""One pass over the rows of attention that computes the sums behind the published metrics.

For row i the published symmetry compares m = min(i, n-1-i) pairs, d_k = |A[i,i-k] - A[i,i+k]|, k = 1..m.

`row_formula` says in torch what is computed, differentiably. On a CPU, ``_row_pass_numba`` computes the same row by row
without any tensor between.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pelocality._transforms import transformed
from pelocality.metrics._ratio import ratio
from pelocality.metrics._tolerance import Tolerance

logger = logging.getLogger(__name__)
_EMPTY = torch.empty(0)
# Weights that the formula is given at a time: about the size of a core's cache, or enough to occupy a GPU.
_BLOCK, _BLOCK_OF_GPU = 2**19, 2**23


class RowStatistics(NamedTuple):
    """Sums over every row of (batch, rows, n); each tensor is (batch, rows), the last three are empty unless asked for.

    Attributes:
        total: Sum of the row, without gradient.
        smallest: The smallest weight of all if one is negative, else 0.
        locality: sum_j A_ij / 2^|i-j|.
        irregularity: c_i = sum_k (d_k - min d) / R, by how much the row lowers symmetry.
        difference: sum_k d_k.
        paired: sum_k A[i,i-k] + A[i,i+k].
        pairs: The number of pairs of each row, (n,), where it is not that of a line.
    """

    total: Tensor
    smallest: float
    locality: Tensor
    irregularity: Tensor = _EMPTY
    difference: Tensor = _EMPTY
    paired: Tensor = _EMPTY
    pairs: Tensor | None = None

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sums of which the metrics are made: locality, irregularity, difference and paired."""
        return self.locality, self.irregularity, self.difference, self.paired

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return locality, symmetry and relative asymmetry of each matrix, each (batch,)."""
        pairs = None if self.pairs is None else int(self.pairs.sum())
        return pool_sums(self.locality.shape[-1], (values.sum(-1) for values in self.sums), pairs)

    def symmetry_of_rows(self) -> Tensor:
        """Return the symmetry of each row, (batch, n), NaN for those without pairs."""
        position = torch.arange(self.irregularity.shape[-1], device=self.irregularity.device)
        return 1 - self.irregularity / (torch.minimum(position, position.flip(0)) if self.pairs is None else self.pairs)


def pool_sums(n: int, sums: Iterable[Tensor], pairs: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return locality, symmetry and relative asymmetry, each (batch,).

    Args:
        n: The number of rows.
        sums: Locality, irregularity, difference and paired of `RowStatistics`, over all rows, (batch,) each.
        pairs: The number of pairs of all rows; None: that of n tokens on a line.
    """
    locality, irregularity, difference, paired = sums
    pairs = (n - 1) ** 2 // 4 if pairs is None else pairs
    symmetry = 1 - irregularity / pairs if pairs else irregularity + torch.nan
    return locality / n, symmetry, ratio(difference, paired)


def row_statistics(
    rows: Tensor, tolerance: Tolerance | None = None, *, pairs: bool = True, first: int = 0
) -> RowStatistics:
    """Measure rows of attention in one pass, differentiably.

    Args:
        rows: (batch, rows, n), float; the rows first, first + 1, ... of matrices. Not modified.
        tolerance: Up to which a row counts as constant; None: that of their dtype.
        pairs: Also compare left with right.
        first: The position of the first row.

    Returns:
        Sums in float32 or float64, on the same device.
    """
    settings = first, pairs, tolerance or Tolerance.for_dtype(rows.dtype)
    if transformed(rows):
        return RowStatistics(*_totals(rows.detach()), *row_formula(rows, *settings))
    total, smallest, *sums = _engine(rows.device.type)(rows.detach(), *settings)
    if rows.requires_grad and torch.is_grad_enabled():
        sums = _Differentiable.apply(rows, sums, *settings)  # type: ignore[no-untyped-call]
    return RowStatistics(total, smallest, *sums)


@functools.cache
def _engine(device: str) -> Callable[..., tuple[Any, ...]]:
    """Return what computes `RowStatistics` without gradients on a type of device: numba's pass, or the formula."""
    if device != "cpu":
        return _measure_in_blocks
    try:
        from pelocality.metrics._row_pass_numba import measure_rows
    except Exception as error:  # numba cannot write its cache, or does not fit the installed numpy
        logger.warning("numba cannot be used, metrics are computed in torch: %s", error)
        return _measure_in_blocks
    return measure_rows


def _measure_in_blocks(rows: Tensor, first: int, *settings: Any) -> tuple[Any, ...]:
    parts = [row_formula(rows[:, block], first + block.start, *settings) for block in _blocks(rows)]
    return *_totals(rows), *(torch.cat(each, -1) for each in zip(*parts, strict=True))


def _blocks(rows: Tensor) -> list[slice]:
    """Return blocks of the rows, of all matrices, that the formula is given at a time."""
    batch, height, n = rows.shape
    size = max(1, (_BLOCK if rows.device.type == "cpu" else _BLOCK_OF_GPU) // max(1, batch * n))
    return [slice(start, min(start + size, height)) for start in range(0, height, size)]


def _totals(rows: Tensor) -> tuple[Tensor, float]:
    """Return total and smallest of `RowStatistics`."""
    smallest = rows.amin().item() if rows.numel() else 0.0
    return rows.sum(-1, dtype=torch.promote_types(rows.dtype, torch.float32)), min(0.0, smallest)


class _Differentiable(torch.autograd.Function):
    """The sums of a row pass, with the gradient of the formula in blocks, whose graphs are not kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sums: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows)
        ctx.settings = settings
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (first, *settings) = ctx.saved_tensors, ctx.settings
        again = torch.is_grad_enabled()  # create_graph=True
        of_rows: list[Tensor] = []
        for block in _blocks(rows):
            part = rows[:, block] if again else rows[:, block].detach().requires_grad_()
            with torch.enable_grad():
                sums = row_formula(part, first + block.start, *settings)
            of_rows += torch.autograd.grad(sums, part, [each[:, block] for each in gradients], create_graph=again)
        return torch.cat(of_rows, 1), None, None, None, None


def row_formula(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> tuple[Tensor, ...]:
    """Return locality, irregularity, difference and paired of `RowStatistics` by their definitions; or locality alone.

    Args:
        rows: As for `row_statistics`.
        first: As for `row_statistics`.
        pairs: As for `row_statistics`.
        tolerance: Up to which a row counts as constant.
    """
    weights, n = rows.to(torch.promote_types(rows.dtype, torch.float32)), rows.shape[-1]
    stop = first + rows.shape[-2]
    i = torch.arange(first, stop, device=rows.device)[:, None]
    distance = (i - torch.arange(n, device=rows.device)).abs()
    locality = (weights * torch.exp2(-distance.to(weights.dtype))).sum(-1)
    if not pairs:
        return (locality,)
    middle = min(max((n - 1) // 2, first), stop - 1)  # the row with the most pairs
    k = torch.arange(1, 1 + max(1, min(middle, n - 1 - middle)), device=rows.device)
    exists = k <= torch.minimum(i, n - 1 - i)  # (rows, pairs)
    columns = (each.clamp(0, n - 1).expand(*weights.shape[:-1], -1) for each in (i - k, i + k))
    left, right = (torch.where(exists, weights.gather(-1, column), 0) for column in columns)  # (batch, rows, pairs)
    return locality, *compare_pairs(left, right, exists, tolerance)


def compare_pairs(left: Tensor, right: Tensor, exists: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor, Tensor]:
    """Return irregularity, difference and paired mass of every row, each (batch, rows).

    Args:
        left: The weight on the left of each pair, (batch, rows, pairs), 0 where there is none.
        right: The weight on its right.
        exists: Which pairs there are, (rows, pairs).
        tolerance: Up to which a row counts as constant.
    """
    d = (left - right).abs()
    low, high = torch.where(exists, d, 2).amin(-1), d.amax(-1)  # no weight is above 1
    excess = torch.where(exists, d - low[..., None], 0).sum(-1)
    smallest = torch.where(exists, torch.minimum(left, right).detach(), 2).amin(-1)
    largest = torch.maximum(left, right).detach().amax(-1)
    irregularity = tolerance.irregularity(excess, high - low, largest, smallest)
    return irregularity, d.sum(-1), (left + right).sum(-1)
