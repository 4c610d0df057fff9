"""One pass over the rows of attention that computes the sums behind the published metrics.

For row i the published symmetry compares m = min(i, n-1-i) pairs, d_k = |A[i,i-k] - A[i,i+k]|, k = 1..m.

`row_formula` says in torch what is computed, differentiably. Two engines compute the same without any tensor between,
with the gradient in closed form: ``_row_pass_numba`` on a CPU, ``_row_pass_triton`` on a GPU.
"""

import functools
import importlib
import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pelocality._transforms import transformed
from pelocality.metrics._tolerance import Tolerance, row_faults

logger = logging.getLogger(__name__)
_EMPTY = torch.empty(0)
_ENGINES = {"cpu": "numba", "cuda": "triton"}
# Weights that the formula is given at a time: about the size of a core's cache, or enough to occupy a GPU.
_BLOCK, _BLOCK_OF_GPU = 2**19, 2**26


class RowStatistics(NamedTuple):
    """Sums over every row of (batch, rows, n).

    Attributes:
        faults: By how much the row misses a sum of 1, and by how much its smallest weight is below 0, (2, batch, rows),
            see `check_rows`; without gradient.
        sums: `locality`, `irregularity`, `difference` and `paired`, (4, batch, rows), or locality alone.
        sides: The weight on the keys before and behind the query, (2, batch, rows), without gradient; with pairs.
        pairs: The number of pairs of each row, (n,), where it is not that of a line.
    """

    faults: Tensor
    sums: Tensor
    sides: Tensor = _EMPTY
    pairs: Tensor | None = None

    @property
    def locality(self) -> Tensor:
        """sum_j A_ij / 2^|i-j|."""
        return self.sums[0]

    @property
    def irregularity(self) -> Tensor:
        """c_i = sum_k (d_k - min d) / R, by how much the row lowers symmetry."""
        return self.sums[1]

    @property
    def difference(self) -> Tensor:
        """sum_k d_k."""
        return self.sums[2]

    @property
    def paired(self) -> Tensor:
        """sum_k A[i,i-k] + A[i,i+k]."""
        return self.sums[3]

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return locality, symmetry and relative asymmetry of each matrix, each (batch,)."""
        pairs = None if self.pairs is None else int(self.pairs.sum())
        return pool_sums(self.sums.shape[-1], self.sums.sum(-1), pairs)

    def symmetry_of_rows(self) -> Tensor:
        """Return the symmetry of each row, (batch, n), NaN for those without pairs."""
        position = torch.arange(self.sums.shape[-1], device=self.sums.device)
        return 1 - self.irregularity / (torch.minimum(position, position.flip(0)) if self.pairs is None else self.pairs)

    def one_sided(self) -> Tensor:
        """Return which matrices, (batch,), have weight on one side of their diagonal alone."""
        before, behind = (self.sides.sum(-1) > 0).unbind()
        return before ^ behind


def pool_sums(n: int, sums: Tensor, pairs: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return locality, symmetry and relative asymmetry, each (batch,).

    Args:
        n: The number of rows.
        sums: Those of `RowStatistics` over all rows, (4, batch).
        pairs: The number of pairs of all rows; None: that of n tokens on a line.
    """
    locality, irregularity, difference, paired = sums
    pairs = (n - 1) ** 2 // 4 if pairs is None else pairs
    symmetry = 1 - irregularity / pairs if pairs else irregularity + torch.nan
    return locality / n, symmetry, difference / (paired + (paired == 0))  # without paired weight there is no difference


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
        return RowStatistics(row_faults(rows), row_formula(rows, *settings), _sides(rows, first))
    engine = _engine(rows.device.type)
    measured = engine.measure_rows(rows.detach(), *settings)
    faults, sums, sides = measured[:2], measured[2:6], measured[6:]
    if rows.requires_grad and torch.is_grad_enabled():
        sums = _Differentiable.apply(rows, sums, engine, *settings)  # type: ignore[no-untyped-call]
    return RowStatistics(faults, sums, sides)


@functools.cache
def _engine(device: str) -> Any:
    """Return what measures rows on a type of device, without gradients, and what computes their gradient."""
    if device in _ENGINES:
        try:
            return importlib.import_module(f"pelocality.metrics._row_pass_{_ENGINES[device]}")
        except Exception as error:  # numba cannot write its cache or does not fit numpy, or there is no triton
            logger.warning("%s cannot be used, metrics are computed in torch: %s", _ENGINES[device], error)
    return _IN_TORCH


def _measure_in_blocks(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> Tensor:
    """Return faults, sums and sides of `RowStatistics`, (8, batch, rows), or (3, batch, rows) without pairs."""
    blocks = row_blocks(rows)
    sums = [row_formula(rows[:, block], first + block.start, pairs, tolerance) for block in blocks]
    sides = [_sides(rows[:, block], first + block.start) for block in blocks if pairs]
    return torch.cat([row_faults(rows), *(torch.cat(each, -1) for each in (sums, sides) if each)])


def row_blocks(rows: Tensor) -> list[slice]:
    """Return blocks of the rows, of all matrices, that the formula is given at a time."""
    batch, height, n = rows.shape
    size = max(1, (_BLOCK if rows.device.type == "cpu" else _BLOCK_OF_GPU) // max(1, batch * n))
    return [slice(start, min(start + size, height)) for start in range(0, height, size)]


def _gradient_in_blocks(
    rows: Tensor, gradients: Tensor, sums: Tensor, first: int, pairs: bool, tolerance: Tolerance
) -> Tensor:
    """Return the gradient of the formula, whose graph is kept only for further derivatives."""
    again = torch.is_grad_enabled()  # create_graph=True
    of_rows: list[Tensor] = []
    for block in row_blocks(rows):
        part = rows[:, block] if again else rows[:, block].detach().requires_grad_()
        with torch.enable_grad():
            of_block = row_formula(part, first + block.start, pairs, tolerance)
        of_rows += torch.autograd.grad(of_block, part, gradients[..., block], create_graph=again)
    return torch.cat(of_rows, 1)


_IN_TORCH = SimpleNamespace(measure_rows=_measure_in_blocks, row_gradient=_gradient_in_blocks)


class _Differentiable(torch.autograd.Function):
    """The sums of a row pass, with the gradient by its engine, and further derivatives by the formula."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sums: Tensor, engine: Any, *settings: Any) -> Tensor:
        ctx.save_for_backward(rows, sums)
        ctx.engine, ctx.settings = engine, settings
        return sums

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, sums = ctx.saved_tensors
        engine = _IN_TORCH if torch.is_grad_enabled() else ctx.engine
        return engine.row_gradient(rows, gradients, sums, *ctx.settings), None, None, None, None, None


def _sides(rows: Tensor, first: int) -> Tensor:
    """Return the weight on keys before and behind each query, (2, batch, rows), without gradient."""
    weights = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
    return torch.stack([weights.tril(first - 1).sum(-1), weights.triu(first + 1).sum(-1)])


def row_formula(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> Tensor:
    """Return the sums of `RowStatistics` by their definitions.

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
        return locality[None]
    middle = min(max((n - 1) // 2, first), stop - 1)  # the row with the most pairs
    k = torch.arange(1, 1 + max(1, min(middle, n - 1 - middle)), device=rows.device)
    exists = k <= torch.minimum(i, n - 1 - i)  # (rows, pairs)
    columns = (each.clamp(0, n - 1).expand(*weights.shape[:-1], -1) for each in (i - k, i + k))
    left, right = (torch.where(exists, weights.gather(-1, column), 0) for column in columns)  # (batch, rows, pairs)
    return torch.stack([locality, *compare_pairs(left, right, exists, tolerance.of_rows(weights))])


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
