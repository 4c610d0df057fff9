"""One pass over the rows of attention that computes the sums behind the published metrics.

For row i the published symmetry compares m = min(i, n-1-i) pairs, d_k = |A[i,i-k] - A[i,i+k]|, k = 1..m.

`row_formula` says in torch what is computed, differentiably. Two engines compute the same without any tensor between,
with the gradient in closed form: ``_row_pass_numba`` on a CPU, ``_row_pass_triton`` on a GPU.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pelocality._transforms import transformed
from pelocality.metrics._tolerance import Tolerance, row_faults

logger = logging.getLogger(__name__)
_ENGINES = {"cpu": "numba", "cuda": "triton"}
# Weights that are measured at a time in torch: about the size of a core's cache, or enough to occupy a GPU.
_BLOCK, _BLOCK_OF_GPU = 2**19, 2**26


@dataclass
class RowStatistics:
    """Sums over every row of (batch, rows, n).

    Attributes:
        numbers: (7, batch, rows), or the first two of them alone:

            - by how much the row misses a sum of 1, see `row_faults`, without gradient
            - locality, sum_j A_ij / 2^|i-j|
            - irregularity c_i = sum_k (d_k - min d) / R, by how much the row lowers symmetry
            - difference, sum_k d_k
            - paired, sum_k A[i,i-k] + A[i,i+k]
            - the weight on the keys before and behind the query, without gradient
        pairs: The number of pairs of each row, (n,), where it is not that of a line.
    """

    numbers: Tensor
    pairs: Tensor | None = None

    @functools.cached_property
    def totals(self) -> Tensor:
        """The numbers summed over rows, (7, batch) or (2, batch), on the CPU: a GPU takes longer for a few numbers."""
        return self.numbers.sum(-1).cpu()

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return locality, symmetry and relative asymmetry of each matrix, each (batch,), on the CPU."""
        pairs = None if self.pairs is None else int(self.pairs.sum())
        return pool_sums(self.numbers.shape[-1], self.totals.unbind()[1:5], pairs)

    def symmetry_of_rows(self) -> Tensor:
        """Return the symmetry of each row, (batch, n), NaN for those without pairs."""
        position = torch.arange(self.numbers.shape[-1], device=self.numbers.device)
        return 1 - self.numbers[2] / (torch.minimum(position, position.flip(0)) if self.pairs is None else self.pairs)

    def one_sided(self, asymmetry: Tensor) -> bool:
        """Return whether a matrix, of this relative asymmetry, has weight on one side of its diagonal alone."""
        most = asymmetry > 0.999
        return bool(most.any()) and bool((most & ((self.totals[5] > 0) ^ (self.totals[6] > 0))).any())


def pool_sums(n: int, sums: Sequence[Tensor] | Tensor, pairs: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return locality, symmetry and relative asymmetry, each (batch,).

    Args:
        n: The number of rows.
        sums: Locality, irregularity, difference and paired of `RowStatistics` over all rows, each (batch,).
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
        return RowStatistics(row_formula(rows, *settings))
    if (engine := _engine(rows.device.type)) is not None:
        return RowStatistics(_Pass.apply(rows, engine, *settings))  # type: ignore[no-untyped-call]
    blocks = row_blocks(rows)
    parts = zip(blocks, torch.split(rows, blocks[0].stop, 1), strict=True)  # whose gradients are joined by one copy
    measured = [_Pass.apply(part, None, first + block.start, *settings[1:]) for block, part in parts]  # type: ignore[no-untyped-call]
    return RowStatistics(torch.cat(measured, -1))


@functools.cache
def _engine(device: str) -> Any:
    """Return the module that measures rows on a type of device and computes their gradient; None: the formula does."""
    if device not in _ENGINES:
        return None
    try:
        return importlib.import_module(f"pelocality.metrics._row_pass_{_ENGINES[device]}")
    except Exception as error:  # numba cannot write its cache or does not fit numpy, or there is no triton
        logger.warning("%s cannot be used, metrics are computed in torch: %s", _ENGINES[device], error)
        return None


class _Pass(torch.autograd.Function):
    """The numbers of rows by an engine or the formula, with the gradient, which the formula computes anew."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, engine: Any, *settings: Any) -> Tensor:
        numbers: Tensor = engine.measure_rows(rows, *settings) if engine else row_formula(rows, *settings)
        ctx.save_for_backward(rows, numbers)
        ctx.engine, ctx.settings = engine, settings
        return numbers

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, numbers = ctx.saved_tensors
        further = torch.is_grad_enabled()  # create_graph=True
        if ctx.engine and not further:
            return ctx.engine.row_gradient(rows, gradients, numbers, *ctx.settings), None, None, None, None
        with torch.enable_grad():
            again = row_formula(rows, *ctx.settings)
        return *torch.autograd.grad(again, rows, gradients, create_graph=further), None, None, None, None


def row_blocks(rows: Tensor) -> list[slice]:
    """Return blocks of the rows, of all matrices, that are measured at a time in torch."""
    batch, height, n = rows.shape
    size = max(1, (_BLOCK if rows.device.type == "cpu" else _BLOCK_OF_GPU) // max(1, batch * n))
    return [slice(start, min(start + size, height)) for start in range(0, height, size)]


def row_formula(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> Tensor:
    """Return the numbers of `RowStatistics` by their definitions; arguments as for `row_statistics`."""
    weights, n = rows.to(torch.promote_types(rows.dtype, torch.float32)), rows.shape[-1]
    stop = first + rows.shape[-2]
    i = torch.arange(first, stop, device=rows.device)[:, None]
    distance = (i - torch.arange(n, device=rows.device)).abs()
    faults, locality = row_faults(rows), (weights * torch.exp2(-distance.to(weights.dtype))).sum(-1)
    if not pairs:
        return torch.stack([faults, locality])
    middle = min(max((n - 1) // 2, first), stop - 1)  # the row with the most pairs
    k = torch.arange(1, 1 + max(1, min(middle, n - 1 - middle)), device=rows.device)
    exists = k <= torch.minimum(i, n - 1 - i)  # (rows, pairs)
    columns = (each.clamp(0, n - 1).expand(*weights.shape[:-1], -1) for each in (i - k, i + k))
    left, right = (torch.where(exists, weights.gather(-1, column), 0) for column in columns)  # (batch, rows, pairs)
    compared = compare_pairs(left, right, exists, tolerance.of_rows(weights))
    before, behind = (side.detach().sum(-1) for side in (weights.tril(first - 1), weights.triu(first + 1)))
    return torch.stack([faults, locality, *compared, before, behind])


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
