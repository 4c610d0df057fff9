"""From a number per distance to a number per pair of positions, and gradients back, in one pass each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Toeplitz(torch.autograd.Function):
    """`toeplitz`, with a backward pass several times faster than that of unfold and flip."""

    @staticmethod
    def forward(line: Tensor, query_length: int) -> Tensor:
        return _laid_out(line, query_length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return diagonal_sums(gradient), None


def toeplitz(line: Tensor, query_length: int) -> Tensor:
    """Lay a line of numbers out so that every diagonal of the matrix holds one of them.

        M_ij = line[j - i + q - 1]

    Args:
        line: (heads, q + k - 1), the distance furthest in the past first.
        query_length: q.

    Returns:
        (heads, q, k).
    """
    if torch.compiler.is_compiling():
        return _laid_out(line, query_length)
    matrix: Tensor = _Toeplitz.apply(line, query_length)  # type: ignore[no-untyped-call]
    return matrix


def _laid_out(line: Tensor, query_length: int) -> Tensor:
    return line.unfold(-1, line.shape[-1] - query_length + 1, 1).flip(-2)


def diagonal_sums(matrix: Tensor) -> Tensor:
    """Sum a matrix along its diagonals.

    Args:
        matrix: (heads, q, k).

    Returns:
        (heads, q + k - 1), the diagonal furthest in the past first.
    """
    heads, queries, keys = matrix.shape
    sums = matrix.new_zeros(heads, queries + keys - 1)
    step = 64 if matrix.device.type == "cpu" else 512  # on a CPU a block and its sheared copy stay in the cache
    for first in range(0, queries, step):
        block = matrix[:, first : first + step]
        rows, width = block.shape[1], block.shape[1] + keys - 1
        # laid out every width - 1 elements and read back every width, the rows shift by one each: diagonals are columns
        sheared = matrix.new_zeros(heads, rows * width)
        sheared.as_strided(block.shape, (rows * width, max(width - 1, 1), 1), rows - 1).copy_(block)
        start = queries - first - rows
        sums[:, start : start + width] += sheared.view(heads, rows, width).sum(1)
    return sums
