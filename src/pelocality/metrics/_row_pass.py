"""One pass over the rows of attention, block by block, that computes the sums behind the published metrics.

``_row_blocks`` computes them in torch; where numba is installed, ``_row_pass_numba`` computes the same row by row.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pelocality._transforms import transformed
from pelocality.metrics._ratio import ratio
from pelocality.metrics._row_blocks import (
    INTEGER,
    PairedBlock,
    decay_band,
    locality_sums,
    measure_block,
    row_blocks,
    rows_measured,
    rows_needed,
)
from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance, check_rows

logger = logging.getLogger(__name__)
_EMPTY = torch.empty(0)
HAS_NUMBA = importlib.util.find_spec("numba") is not None


class RowStatistics(NamedTuple):
    """Sums over every row of (batch, n, n); each tensor is (batch, n), the last three are empty unless asked for.

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


def validated_statistics(flat: Tensor, tolerance: Tolerance | None = None, *, pairs: bool = True) -> RowStatistics:
    """Return `row_statistics`, after checking that the rows are distributions."""
    statistics = row_statistics(flat, tolerance, pairs=pairs)
    check_rows(statistics.total, statistics.smallest, flat)
    return statistics


def row_statistics(flat: Tensor, tolerance: Tolerance | None = None, *, pairs: bool = True) -> RowStatistics:
    """Measure every row of (batch, n, n) in one pass, differentiably.

    Args:
        flat: (batch, n, n), float; not modified.
        tolerance: Up to which a row counts as constant; None: that of flat's dtype.
        pairs: Also compare left with right.

    Returns:
        Sums in float32 or float64, on the same device.
    """
    tolerance, weights = tolerance or Tolerance.for_dtype(flat.dtype), flat.detach()
    if _is_compiled(flat):
        found = _measure_compiled(weights, 0, pairs, tolerance)
    else:
        found = _measure_in_blocks(weights, pairs, tolerance)
    if transformed(flat):
        sums = _differentiable_sums(flat, found.irregularity if pairs else None)
    elif flat.requires_grad and torch.is_grad_enabled():
        sums = _Differentiable.apply(flat, found, pairs)  # type: ignore[no-untyped-call]
    else:
        return found
    return RowStatistics(found.total, found.smallest, *sums)


def block_statistics(block: Tensor, first: int, stop: int, tolerance: Tolerance) -> RowStatistics:
    """Measure the rows first..stop-1 of larger matrices, without gradients.

    Args:
        block: (batch, rows, n), the rows that `rows_needed` names.
        first: First row measured; all rows lie in one block of `row_blocks`.
        stop: End of the rows measured, exclusive.
        tolerance: Up to which a row counts as constant.

    Returns:
        Sums, each (batch, stop - first).
    """
    if _is_compiled(block):
        return _measure_compiled(rows_measured(block, first, stop), first, True, tolerance)
    total, smallest, sums = measure_block(block, first, stop, True, tolerance)
    return RowStatistics(total, smallest, *sums)


def _is_compiled(flat: Tensor) -> bool:
    fits = flat.device.type == "cpu" and flat.dtype in INTEGER and HAS_NUMBA and not transformed(flat)
    return fits and _numba_loads()


@functools.cache
def _numba_loads() -> bool:
    """Return whether the compiled pass can be loaded; if not, say why once and measure in torch."""
    try:
        importlib.import_module("pelocality.metrics._row_pass_numba")
    except Exception as error:  # numba cannot write its cache, or does not fit the installed numpy
        logger.warning("numba cannot be used, metrics are computed in torch: %s", error)
        return False
    return True


def _measure_compiled(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    from pelocality.metrics._row_pass_numba import measure_rows

    total, smallest, *rest = measure_rows(rows, first, pairs, tolerance.base, tolerance.per_nat, ABSOLUTE_FLOOR)
    return RowStatistics(total, smallest.amin().item() if smallest.numel() else 0.0, *rest)


def _measure_in_blocks(flat: Tensor, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    n, smallest = flat.shape[-1], 0.0
    dtype = torch.promote_types(flat.dtype, torch.float32)
    sums = torch.empty(5 if pairs else 2, *flat.shape[:2], dtype=dtype, device=flat.device)
    for matrices, first, stop in row_blocks(len(flat), n, flat.device):
        block = flat[matrices, rows_needed(first, stop, n)]
        total, least, of_block = measure_block(block, first, stop, pairs, tolerance)
        smallest = min(smallest, least)
        for out, values in zip(sums[:, matrices, first:stop], (total, *of_block), strict=True):
            out.copy_(values)
    return RowStatistics(sums[0], smallest, *sums[1:])


class _Differentiable(torch.autograd.Function):
    """The sums of a row pass, with a backward pass that needs one gradient tensor and the memory of one block."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, found: RowStatistics, pairs: bool) -> tuple[Tensor, ...]:
        ctx.save_for_backward(flat, found.irregularity)
        return found.sums[: 4 if pairs else 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        flat, irregularity = ctx.saved_tensors
        to_locality, *to_compared = grads
        if torch.is_grad_enabled():  # create_graph=True
            sums = _differentiable_sums(flat, irregularity if to_compared else None)
            return *torch.autograd.grad(sums, flat, grads, create_graph=True), None, None
        n = flat.shape[-1]
        gradient = torch.zeros(flat.shape, dtype=to_locality.dtype, device=flat.device)
        for matrices, first, stop in row_blocks(len(flat), n, flat.device):
            here, rows = (matrices, slice(first, stop)), rows_needed(first, stop, n)
            decay, band = decay_band(first, stop, gradient)
            gradient[matrices, first:stop, band] += to_locality[here][..., None] * decay
            if to_compared and 0 < first < n - 1:
                into = PairedBlock(gradient[matrices, rows], first, stop)
                block = PairedBlock(flat[matrices, rows].to(gradient.dtype), first, stop)
                block.add_gradient(into, irregularity[here], *(to[here] for to in to_compared))
        return gradient.to(flat.dtype), None, None


def _differentiable_sums(flat: Tensor, irregularity: Tensor | None) -> list[Tensor]:
    """Return the sums in operations of autograd, given the irregularity of all rows; None: locality alone."""
    weights = flat.to(torch.promote_types(flat.dtype, torch.float32))
    locality, n = locality_sums(weights, 0), flat.shape[-1]
    if irregularity is None:
        return [locality]
    i, k = torch.arange(n, device=flat.device)[:, None], torch.arange(1, max(2, (n + 1) // 2), device=flat.device)
    valid = k <= torch.minimum(i, n - 1 - i)  # (n, K)
    columns = [j.clamp(0, n - 1).expand(*flat.shape[:-1], -1) for j in (i - k, i + k)]
    left, right = (torch.where(valid, weights.gather(-1, j), 0) for j in columns)
    d = (left - right).abs()
    low, high = torch.where(valid, d, 2).amin(-1), d.amax(-1)
    excess = torch.where(valid, d - low[..., None], 0).sum(-1)
    constant = irregularity == 0
    compared = torch.where(constant, 0, excess / torch.where(constant, 1, high - low))
    return [locality, compared, d.sum(-1), (left + right).sum(-1)]
