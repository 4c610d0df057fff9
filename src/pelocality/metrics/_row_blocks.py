"""Blocks of rows that fit the cache, and the sums over each of their rows in torch.

For row i the published symmetry compares m = min(i, n-1-i) pairs, d_k = |A[i,i-k] - A[i,i+k]|, k = 1..m. Two strided
views that run along the diagonal give the d of a whole block of rows, so nothing is gathered and the working memory is
one block, whatever n.
"""

import itertools
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance

INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
# Elements of attention in one block: about the size of a core's cache, or enough to occupy a GPU.
_BUDGET = {"cpu": 1 << 19, "cuda": 1 << 25}
_MAX_HEIGHT = 64


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


def rows_measured(block: Tensor, first: int, stop: int) -> Tensor:
    """Return the rows first..stop-1 of a block of `rows_needed`."""
    skip = first - rows_needed(first, stop, block.shape[-1]).start
    return block[:, skip : skip + stop - first]


def measure_block(
    block: Tensor, first: int, stop: int, pairs: bool, tolerance: Tolerance
) -> tuple[Tensor, float, list[Tensor]]:
    """Return total, smallest and the other sums of `RowStatistics` for the rows first..stop-1 of `rows_needed`."""
    block = block.to(torch.promote_types(block.dtype, torch.float32))
    rows = rows_measured(block, first, stop)
    # the sign bit (a negative weight, or -0.0, which is accepted) as integers, which compare several times faster
    signed = rows.numel() and rows.view(INTEGER[rows.dtype]).amin().item() < 0
    total, smallest, sums = rows.sum(-1), rows.amin().item() if signed else 0.0, [locality_sums(rows, first)]
    if pairs and 0 < first < block.shape[-1] - 1:
        sums += PairedBlock(block, first, stop).compare(tolerance)
    elif pairs:
        sums += [torch.zeros_like(total)] * 3
    return total, smallest, sums


def locality_sums(rows: Tensor, first: int) -> Tensor:
    """Return sum_j A_ij / 2^|i-j| of consecutive rows, (batch, rows, n) -> (batch, rows)."""
    decay, band = decay_band(first, first + rows.shape[-2], rows)
    return (rows[..., band] * decay).sum(-1)


def decay_band(first: int, stop: int, like: Tensor) -> tuple[Tensor, slice]:
    """Return 2^-|i-j| for the rows first..stop-1, and the columns near enough for it to matter."""
    reach = 64 if like.dtype == torch.float64 else 32  # beyond, 2^-|i-j| is below the precision's eps
    low, high = max(0, first - reach), min(like.shape[-1], stop + reach)
    i, j = torch.arange(first, stop, device=like.device), torch.arange(low, high, device=like.device)
    return torch.exp2(-(i[:, None] - j).abs().to(like.dtype)), slice(low, high)


class PairedBlock:
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
        bits = d.view(INTEGER[d.dtype])  # non-negative floats sort like their bits
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
