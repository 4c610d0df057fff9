"""One pass over the rows of attention, block by block, that computes the sums behind the published metrics.

For row i the published symmetry compares m = min(i, n-1-i) pairs, d_k = |A[i,i-k] - A[i,i+k]|, k = 1..m. Two strided
views that run along the diagonal give the d of a whole block of rows, so nothing is gathered and the working memory is
one block, whatever n. Where numba is installed, ``_row_pass_numba`` computes the same row by row.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pelocality._transforms import transformed
from pelocality.metrics._ratio import ratio
from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance, check_rows

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
# Elements of attention in one block: about the size of a core's cache, or enough to occupy a GPU.
_BUDGET = {"cpu": 1 << 19, "cuda": 1 << 25}
_MAX_HEIGHT = 64
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
    """

    total: Tensor
    smallest: float
    locality: Tensor
    irregularity: Tensor = _EMPTY
    difference: Tensor = _EMPTY
    paired: Tensor = _EMPTY

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sums of which the metrics are made: locality, irregularity, difference and paired."""
        return self.locality, self.irregularity, self.difference, self.paired

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return locality, symmetry and relative asymmetry of each matrix, each (batch,)."""
        return pool_sums(self.locality.shape[-1], *(values.sum(-1) for values in self.sums))


def pool_sums(
    n: int, locality: Tensor, irregularity: Tensor, difference: Tensor, paired: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return locality, symmetry and relative asymmetry from the sums of `RowStatistics` over all n rows."""
    pairs = (n - 1) ** 2 // 4
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
        return _measure_compiled(_rows_measured(block, first, stop), first, True, tolerance)
    return _measure_block(block, first, stop, True, tolerance)


def row_blocks(batch: int, n: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """Cut (batch, n, n) into blocks (matrices, first row, end row) that fit the cache.

    Args:
        batch: Number of matrices.
        n: Number of positions.
        device: Where they are.

    Yields:
        Blocks, all rows of some matrices before the next ones. No block crosses the middle row, after which the number
        of pairs falls, and the first and the last row, which have no pairs, are blocks of their own.
    """
    height = _MAX_HEIGHT // 2 if n <= 1024 else _MAX_HEIGHT
    depth = max(1, _BUDGET.get(device.type, 1 << 25) // (height * n))
    ends = sorted({0, 1, (n + 1) // 2, max(1, n - 1), n})
    for b in range(0, max(1, batch), depth):
        for low, high in itertools.pairwise(ends):
            for i in range(low, high, height):
                yield slice(b, min(b + depth, batch)), i, min(i + height, high)


def rows_needed(first: int, stop: int, n: int) -> slice:
    """Return the rows that the pairs of first..stop-1 are read from: these, and one before or after them."""
    if not 0 < first < n - 1:
        return slice(first, stop)
    return slice(first - 1, stop) if 2 * stop <= n + 1 else slice(first, stop + 1)


def _rows_measured(block: Tensor, first: int, stop: int) -> Tensor:
    """Return the rows first..stop-1 of a block of `rows_needed`."""
    skip = first - rows_needed(first, stop, block.shape[-1]).start
    return block[:, skip : skip + stop - first]


def _is_compiled(flat: Tensor) -> bool:
    return flat.device.type == "cpu" and flat.dtype in _INTEGER and HAS_NUMBA and not transformed(flat)


def _measure_compiled(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    from pelocality.metrics._row_pass_numba import measure_rows

    total, smallest, *rest = measure_rows(rows, first, pairs, tolerance.base, tolerance.per_nat, ABSOLUTE_FLOOR)
    return RowStatistics(total, smallest.amin().item() if smallest.numel() else 0.0, *rest)


def _measure_in_blocks(flat: Tensor, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    n, smallest = flat.shape[-1], 0.0
    dtype = torch.promote_types(flat.dtype, torch.float32)
    sums = torch.empty(5 if pairs else 2, *flat.shape[:2], dtype=dtype, device=flat.device)
    for matrices, first, stop in row_blocks(len(flat), n, flat.device):
        found = _measure_block(flat[matrices, rows_needed(first, stop, n)], first, stop, pairs, tolerance)
        smallest = min(smallest, found.smallest)
        for out, values in zip(sums[:, matrices, first:stop], (found.total, *found.sums), strict=False):
            out.copy_(values)
    return RowStatistics(sums[0], smallest, *sums[1:])


def _measure_block(block: Tensor, first: int, stop: int, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    """Measure the rows first..stop-1 in torch, as `block_statistics`."""
    block = block.to(torch.promote_types(block.dtype, torch.float32))
    rows = _rows_measured(block, first, stop)
    # the sign bit (a negative weight, or -0.0, which is accepted) as integers, which compare several times faster
    signed = rows.numel() and rows.view(_INTEGER[rows.dtype]).amin().item() < 0
    sums = rows.sum(-1), rows.amin().item() if signed else 0.0, _locality(rows, first)
    if not pairs:
        return RowStatistics(*sums)
    if not 0 < first < block.shape[-1] - 1:
        return RowStatistics(*sums, *[torch.zeros_like(sums[0])] * 3)
    return RowStatistics(*sums, *_PairedBlock(block, first, stop).compare(tolerance))


def _locality(rows: Tensor, first: int) -> Tensor:
    """Return sum_j A_ij / 2^|i-j| of consecutive rows, (batch, rows, n) -> (batch, rows)."""
    decay, band = _decay_band(first, first + rows.shape[-2], rows)
    return (rows[..., band] * decay).sum(-1)


def _decay_band(first: int, stop: int, like: Tensor) -> tuple[Tensor, slice]:
    """Return 2^-|i-j| for the rows first..stop-1, and the columns near enough for it to matter."""
    reach = 64 if like.dtype == torch.float64 else 32  # beyond, 2^-|i-j| is below the precision's eps
    low, high = max(0, first - reach), min(like.shape[-1], stop + reach)
    i, j = torch.arange(first, stop, device=like.device), torch.arange(low, high, device=like.device)
    return torch.exp2(-(i[:, None] - j).abs().to(like.dtype)), slice(low, high)


class _PairedBlock:
    """The pairs of rows first..stop-1, all in one half of the matrix, as (batch, rows, K) with K the most pairs.

    A row with m < K pairs reads beyond its end, into the row before or after it, which the block therefore includes.
    These invalid pairs lie in the columns from min_pairs on and are set to 0.
    """

    def __init__(self, block: Tensor, first: int, stop: int):
        n, height = block.shape[-1], stop - first
        upper = 2 * stop <= n + 1
        max_pairs = stop - 1 if upper else n - 1 - first
        self.min_pairs = max_pairs - height + 1
        # (rows, columns from min_pairs on): rows gain pairs in the upper half of a matrix and lose them in the lower
        valid = torch.ones(height, height - 1, device=block.device, dtype=block.dtype).tril(-1)
        self.valid = valid if upper else valid.flip(0)
        self.penalty = 4 * (1 - self.valid)  # above any d
        weights, diagonal = block.flatten(1), (first - rows_needed(first, stop, n).start) * n + first
        # A[i, i-K..i-1] and A[i, i+1..i+K]: one row further down and one column further right is n + 1 weights on
        self.left, self.right = (
            weights[:, start:].unfold(-1, max_pairs, n + 1)[:, :height]
            for start in (diagonal - max_pairs, diagonal + 1)
        )

    def zero_invalid(self, window: Tensor) -> Tensor:
        """Set the invalid pairs to 0, in place."""
        window[..., self.min_pairs :].mul_(self.valid)
        return window

    def compare(self, tolerance: Tolerance) -> tuple[Tensor, Tensor, Tensor]:
        """Return irregularity, difference and paired mass of every row, each (batch, rows)."""
        d = self.zero_invalid(self.left.flip(-1))
        left = d.sum(-1)
        self.zero_invalid(d.sub_(self.right))
        paired = 2 * left - d.sum(-1)
        difference = d.abs_().sum(-1)
        bits = d.view(_INTEGER[d.dtype])  # non-negative floats sort like their bits
        high = bits.amax(-1).view(d.dtype)
        d[..., self.min_pairs :].add_(self.penalty)
        low = bits.amin(-1).view(d.dtype)
        spread = high - low
        # The subtraction loses digits where the spread is small beside the differences, and only where it is small
        # beside the tolerance can a row be constant: recompute such blocks without cancellation.
        least = 2 * max(ABSOLUTE_FLOOR, tolerance.base + tolerance.per_nat)
        if bool((spread < torch.clamp(high / 16, min=least)).any()):
            return self.irregularity(low, spread, tolerance), difference, paired
        return (difference - (self.min_pairs + self.valid.sum(-1)) * low) / spread, difference, paired

    def irregularity(self, low: Tensor, spread: Tensor, tolerance: Tolerance) -> Tensor:
        """Return sum_k (d_k - min d) / R of every row without cancellation; 0 where the row counts as constant."""
        excess = self.zero_invalid(self.left.flip(-1).sub_(self.right).abs_().sub_(low[..., None])).sum(-1)
        sides = [self.zero_invalid(side) for side in (self.left.flip(-1), self.right.clone())]
        largest = torch.maximum(*(side.amax(-1) for side in sides))
        for side in sides:
            side[..., self.min_pairs :].add_(self.penalty)
        return tolerance.irregularity(excess, spread, largest, torch.minimum(*(side.amin(-1) for side in sides)))

    def add_gradient(self, into: Self, c: Tensor, to_irregularity: Tensor, *to_compared: Tensor) -> None:
        """Add the gradients of irregularity, difference and paired mass to the same block of a gradient.

        With c = (sum d - m min d) / R:  dc/dd_k = 1/R, and at the smallest d besides (c - m)/R, at the largest
        -c/R, split over ties; 0 where the row counts as constant. Elsewhere c is at least 1.
        """
        to_difference, to_paired = (to[..., None] for to in to_compared)
        signed = self.zero_invalid(self.left.flip(-1).sub_(self.right))
        d = signed.abs()
        high = d.amax(-1)
        d[..., self.min_pairs :].add_(self.penalty)
        low = d.amin(-1)
        is_low, is_high = d == low[..., None], d == high[..., None]
        slope = torch.where(c == 0, 0, to_irregularity / torch.where(c == 0, 1, high - low))  # upstream / R
        at_low, at_high = (
            slope * (c - self.min_pairs - self.valid.sum(-1)) / is_low.sum(-1),
            -slope * c / is_high.sum(-1),
        )
        to_d = slope[..., None] + to_difference + torch.where(is_low, at_low[..., None], 0)
        to_d += torch.where(is_high, at_high[..., None], 0)
        to_d *= signed.sign_()  # 0 for invalid pairs
        paired = self.zero_invalid(to_paired.expand(to_d.shape).clone())
        into.right += paired - to_d
        into.left += paired.add_(to_d).flip(-1)


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
            decay, band = _decay_band(first, stop, gradient)
            gradient[matrices, first:stop, band] += to_locality[here][..., None] * decay
            if to_compared and 0 < first < n - 1:
                into = _PairedBlock(gradient[matrices, rows], first, stop)
                block = _PairedBlock(flat[matrices, rows].to(gradient.dtype), first, stop)
                block.add_gradient(into, irregularity[here], *(to[here] for to in to_compared))
        return gradient.to(flat.dtype), None, None


def _differentiable_sums(flat: Tensor, irregularity: Tensor | None) -> list[Tensor]:
    """Return the sums in operations of autograd, given the irregularity of all rows; None: locality alone."""
    weights = flat.to(torch.promote_types(flat.dtype, torch.float32))
    locality, n = _locality(weights, 0), flat.shape[-1]
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
