"""From a number per distance to a number per pair of positions, with a backward pass that only adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Toeplitz(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(line: Tensor, query_length: int) -> Tensor:
        return line.unfold(-1, line.shape[-1] - query_length + 1, 1).flip(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.query_length = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # rows laid out every q + k elements and read back every q + k - 1 shift by one each: diagonals become columns
        queries = ctx.query_length
        keys = gradient.shape[-1]
        laid_out = torch.nn.functional.pad(gradient.flip(-2), (0, queries)).flatten(-2)
        shifted = laid_out[..., : queries * (queries + keys - 1)]
        return shifted.reshape(*gradient.shape[:-2], queries, queries + keys - 1).sum(-2), None


def toeplitz(line: Tensor, query_length: int) -> Tensor:
    """Lay a line of numbers out so that every diagonal of the matrix holds one of them.

        M_ij = line[j - i + q - 1]

    Args:
        line: (..., q + k - 1), the distance furthest in the past first.
        query_length: q.

    Returns:
        (..., q, k).
    """
    matrix: Tensor = _Toeplitz.apply(line, query_length)  # type: ignore[no-untyped-call]
    return matrix
