"""One pass over the rows of attention, block by block, that computes the sums behind the published metrics.

For row i the published symmetry compares m = min(i, n-1-i) pairs, d_k = |A[i,i-k] - A[i,i+k]|, k = 1..m. Two strided
views that run along the diagonal give the d of a whole block of rows, so nothing is gathered and the working memory is
one block, whatever n. Where numba is installed, ``_row_pass_numba`` computes the same row by row.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from pelocality.metrics._row_pass_autograd import plain_statistics
from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
# Elements of attention in one block: about the size of a core's cache, or enough to occupy a GPU.
_BUDGET = {"cpu": 1 << 18, "cuda": 1 << 25}
_MAX_HEIGHT = 64
_EMPTY = torch.empty(0)


@dataclass(frozen=True)
class RowStatistics:
    """Sums over every row of (batch, n, n); each tensor is (batch, n), the last three are empty unless asked for.

    Args:
        total: Sum of the row.
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


def row_statistics(flat: Tensor, *, pairs: bool = True, rtol: float | None = None) -> RowStatistics:
    """Measure every row of (batch, n, n) in one pass, differentiably.

    Args:
        flat: (batch, n, n), float; not modified.
        pairs: Also compare left with right.
        rtol: Relative range up to which a row counts as constant; None: see `Tolerance`.

    Returns:
        Sums in float32 or float64, on the same device.
    """
    tolerance = Tolerance.for_dtype(flat.dtype, rtol)
    forward = unpack_dual(flat).tangent is not None  # type: ignore[no-untyped-call]
    if forward or (flat.requires_grad and torch.is_grad_enabled()):
        smallest = min(0.0, flat.detach().amin().item()) if flat.numel() else 0.0
        differentiable: Callable[..., tuple[Tensor, ...]] = plain_statistics if forward else _Differentiable.apply
        total, *rest = differentiable(flat, pairs, tolerance)
        return RowStatistics(total, smallest, *rest)
    flat = flat.detach()
    if _is_compiled(flat):
        return _measure_compiled(flat, 0, pairs, tolerance)
    return _measure_in_blocks(flat, pairs, tolerance)


def block_statistics(block: Tensor, first: int, stop: int, *, rtol: float | None = None) -> RowStatistics:
    """Measure the rows first..stop-1 of larger matrices, without gradients.

    Args:
        block: (batch, rows, n), the rows that `rows_needed` names.
        first: First row measured; all rows lie in one block of `row_blocks`.
        stop: End of the rows measured, exclusive.
        rtol: As for `row_statistics`.

    Returns:
        Sums, each (batch, stop - first).
    """
    n = block.shape[-1]
    tolerance = Tolerance.for_dtype(block.dtype, rtol)
    skip = first - rows_needed(first, stop, n).start
    rows = block[:, skip : skip + stop - first]
    if _is_compiled(block):
        return _measure_compiled(rows, first, True, tolerance)
    sums = (rows.sum(-1), 0.0, _locality(rows, first))
    if not 0 < first < n - 1:
        return RowStatistics(*sums, *[torch.zeros_like(sums[0])] * 3)
    pairs = _PairedBlock(block, first, stop)
    low, high, difference, paired = pairs.compare()
    return RowStatistics(*sums, pairs.irregularity(low, high, tolerance), difference, paired)


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


def _is_compiled(flat: Tensor) -> bool:
    return flat.device.type == "cpu" and flat.dtype in _INTEGER and _numba_is_installed()


def _measure_compiled(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    from pelocality.metrics._row_pass_numba import measure_rows

    total, smallest, *rest = measure_rows(rows, first, pairs, tolerance.flat, tolerance.per_nat, ABSOLUTE_FLOOR)
    return RowStatistics(total, smallest.amin().item() if smallest.numel() else 0.0, *rest)


def _locality(rows: Tensor, first: int) -> Tensor:
    """Return sum_j A_ij / 2^|i-j| of consecutive rows, (batch, rows, n) -> (batch, rows)."""
    decay, band = _decay_band(first, first + rows.shape[-2], rows.shape[-1], rows)
    return (rows[..., band] * decay).sum(-1)


def _decay_band(first: int, stop: int, n: int, like: Tensor) -> tuple[Tensor, slice]:
    """Return 2^-|i-j| for the rows first..stop-1, and the columns near enough for it to matter."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    reach = 64 if dtype == torch.float64 else 32  # beyond, 2^-|i-j| is below the precision's eps
    low, high = max(0, first - reach), min(n, stop + reach)
    i, j = torch.arange(first, stop, device=like.device), torch.arange(low, high, device=like.device)
    return torch.exp2(-(i[:, None] - j).abs().to(dtype)), slice(low, high)


@cache
def _numba_is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def _measure_in_blocks(flat: Tensor, pairs: bool, tolerance: Tolerance) -> RowStatistics:
    """Compute the sums in torch."""
    n = flat.shape[-1]
    dtype = torch.promote_types(flat.dtype, torch.float32)
    smallest = 0.0
    blocks = list(row_blocks(len(flat), n, flat.device))
    sums = torch.zeros(6 if pairs else 2, *flat.shape[:2], dtype=dtype, device=flat.device)
    for matrices, first, stop in blocks:
        rows = flat[matrices, first:stop].to(dtype)
        # the sign bit (a negative weight, or -0.0, which is accepted) as integers, which compare several times faster
        if rows.numel() and rows.view(_INTEGER[dtype]).amin().item() < 0:
            smallest = min(smallest, rows.amin().item())
        out = sums[:, matrices, first:stop]
        out[0], out[1] = rows.sum(-1), _locality(rows, first)
        if pairs and 0 < first < n - 1:
            block = _PairedBlock(flat[matrices, rows_needed(first, stop, n)], first, stop)
            out[2], out[3], out[4], out[5] = block.compare()
    if not pairs:
        return RowStatistics(sums[0], smallest, sums[1])
    total, locality, low, high, difference, paired = sums
    position = torch.arange(n, device=flat.device, dtype=dtype)
    spread, excess = high - low, difference - torch.minimum(position, position.flip(0)) * low
    irregularity = torch.where(spread <= ABSOLUTE_FLOOR, 0, excess / torch.where(spread <= ABSOLUTE_FLOOR, 1, spread))
    # The subtraction loses digits where the spread is small beside the differences, and only where it is small beside
    # the tolerance can a row above the floor be constant: recompute such rows without cancellation.
    imprecise = (spread > ABSOLUTE_FLOOR) & (spread < torch.clamp(high / 16, min=2 * tolerance.maximum))
    if bool(imprecise.any()):
        for matrices, first, stop in blocks:
            here = (matrices, slice(first, stop))
            if bool(imprecise[here].any()):
                block = _PairedBlock(flat[matrices, rows_needed(first, stop, n)], first, stop)
                irregularity[here] = block.irregularity(low[here], high[here], tolerance)
    return RowStatistics(total, smallest, locality, irregularity, difference, paired)


class _PairedBlock:
    """The pairs of rows first..stop-1, all in one half of the matrix, as (batch, rows, K) with K the most pairs.

    A row with m < K pairs reads beyond its end, into the row before or after it, which the block therefore includes.
    These invalid pairs lie in the columns from min_pairs on and are set to 0.
    """

    def __init__(self, block: Tensor, first: int, stop: int):
        n, height = block.shape[-1], stop - first
        self.first, self.stop, self.dtype = first, stop, torch.promote_types(block.dtype, torch.float32)
        upper = 2 * stop <= n + 1
        self.max_pairs = stop - 1 if upper else n - 1 - first
        self.min_pairs = self.max_pairs - height + 1
        # (rows, columns from min_pairs on): rows gain pairs in the upper half of a matrix and lose them in the lower
        valid = torch.ones(height, height - 1, device=block.device, dtype=self.dtype).tril(-1)
        self.valid = valid if upper else valid.flip(0)
        self.penalty = 4 * (1 - self.valid)  # above any d
        self.left, self.right = self.windows(block)

    def windows(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of A[i, i-K..i-1] and A[i, i+1..i+K], each (batch, rows, K), given the `rows_needed`."""
        n = block.shape[-1]
        block = block.to(self.dtype)
        if block.stride(-1) != 1 or block.stride(-2) < n:
            block = block.contiguous()
        by_matrix, by_row, _ = block.stride()
        skip = self.first - rows_needed(self.first, self.stop, n).start
        size = (block.shape[0], self.stop - self.first, self.max_pairs)
        stride = (by_matrix, by_row + 1, 1)
        diagonal = block.storage_offset() + skip * by_row + self.first
        left = block.as_strided(size, stride, diagonal - self.max_pairs)
        right = block.as_strided(size, stride, diagonal + 1)
        return left, right

    def zero_invalid(self, window: Tensor) -> Tensor:
        """Set the invalid pairs to 0, in place."""
        window[..., self.min_pairs :].mul_(self.valid)
        return window

    def compare(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the smallest, largest and summed d and the paired mass of every row, each (batch, rows)."""
        d = self.zero_invalid(self.left.flip(-1))
        left = d.sum(-1)
        self.zero_invalid(d.sub_(self.right))
        paired = 2 * left - d.sum(-1)
        difference = d.abs_().sum(-1)
        bits = d.view(_INTEGER[d.dtype])  # non-negative floats sort like their bits
        high = bits.amax(-1).view(d.dtype)
        d[..., self.min_pairs :].add_(self.penalty)
        low = bits.amin(-1).view(d.dtype)
        return low, high, difference, paired

    def irregularity(self, low: Tensor, high: Tensor, tolerance: Tolerance) -> Tensor:
        """Return sum_k (d_k - min d) / R of every row without cancellation; 0 where the row counts as constant."""
        excess = self.zero_invalid(self.left.flip(-1).sub_(self.right).abs_().sub_(low[..., None])).sum(-1)
        return tolerance.irregularity(excess, high - low, *self.extremes())

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest weight among each row's pairs, each (batch, rows)."""
        sides = [self.zero_invalid(side) for side in (self.left.flip(-1), self.right.clone())]
        largest = torch.maximum(*(side.amax(-1) for side in sides))
        for side in sides:
            side[..., self.min_pairs :].add_(self.penalty)
        return largest, torch.minimum(*(side.amin(-1) for side in sides))

    def add_gradient(self, grad: Tensor, c: Tensor, weights: Sequence[Tensor]) -> None:
        """Add to the same rows of ``grad`` the gradients of irregularity, difference and paired mass.

        With c = (sum d - m min d) / R:  dc/dd_k = 1/R, and at the smallest d besides (c - m)/R, at the largest
        -c/R, split over ties; 0 where the row counts as constant. Elsewhere c is at least 1.
        """
        to_irregularity, to_difference, to_paired = weights
        signed = self.zero_invalid(self.left.flip(-1).sub_(self.right))
        d = signed.abs()
        high = d.amax(-1)
        d[..., self.min_pairs :].add_(self.penalty)
        low = d.amin(-1)
        is_low, is_high = d == low[..., None], d == high[..., None]
        constant = c == 0
        slope = torch.where(constant, 0, to_irregularity / torch.where(constant, 1, high - low))  # upstream / R
        m = self.min_pairs + self.valid.sum(-1)
        at_low = slope * (c - m) / is_low.sum(-1)
        at_high = -slope * c / is_high.sum(-1)
        to_d = (slope + to_difference)[..., None] + torch.where(is_low, at_low[..., None], 0)
        to_d += torch.where(is_high, at_high[..., None], 0)
        to_d *= signed.sign_()  # 0 for invalid pairs
        left, right = self.windows(grad)
        paired = self.zero_invalid(to_paired[..., None].expand(to_d.shape).clone())
        right += paired - to_d
        left += paired.add_(to_d).flip(-1)


class _Differentiable(torch.autograd.Function):
    """`_measure_in_blocks` with a backward pass that needs one gradient tensor and the memory of one block."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, pairs: bool, tolerance: Tolerance) -> tuple[Tensor, ...]:
        s = _measure_in_blocks(flat.detach(), pairs, tolerance)
        ctx.save_for_backward(flat, s.irregularity)
        ctx.pairs, ctx.tolerance = pairs, tolerance
        return (s.total, s.locality, s.irregularity, s.difference, s.paired)[: 5 if pairs else 2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        flat, irregularity = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            outputs = plain_statistics(flat, ctx.pairs, ctx.tolerance)
            return *torch.autograd.grad(outputs, flat, grads, create_graph=True), None, None
        n = flat.shape[-1]
        to_total, to_locality, *to_compared = grads
        grad = to_total[..., None].expand(flat.shape).contiguous()
        for matrices, first, stop in row_blocks(len(flat), n, flat.device):
            here, rows = (matrices, slice(first, stop)), rows_needed(first, stop, n)
            decay, band = _decay_band(first, stop, n, grad)
            grad[matrices, first:stop, band] += to_locality[here][..., None] * decay
            if ctx.pairs and 0 < first < n - 1:
                block = _PairedBlock(flat[matrices, rows], first, stop)
                block.add_gradient(grad[matrices, rows], irregularity[here], [to[here] for to in to_compared])
        return grad.to(flat.dtype), None, None
