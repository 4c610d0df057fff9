"""Toeplitz matrices, M_ij = b[j - i]: from one number per diagonal, and back."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_HEIGHT = 8  # rows summed in the precision of a matrix
# Rows of a gradient summed at a time: few enough for the cache of a CPU, or enough to occupy a GPU.
_ROWS, _ROWS_OF_GPU = 64, 1024


def toeplitz(by_distance: Tensor, query_length: int) -> Tensor:
    """Return the Toeplitz matrix with one number per diagonal.

        M_ij = by_distance[j - i + q - 1]

    Args:
        by_distance: (..., q + k - 1), the most negative distance first; (heads or 1, q + k - 1) while compiling.
        query_length: q.

    Returns:
        (..., q, k).
    """
    if torch.compiler.is_compiling():
        return _tiled(by_distance, query_length)
    if not (by_distance.requires_grad and torch.is_grad_enabled()):  # calling a `Function` takes long
        return _Toeplitz.forward(by_distance, query_length)
    return _Toeplitz.apply(by_distance, query_length)  # type: ignore[no-untyped-call]


def diagonals(column: Tensor, row: Tensor) -> Tensor:
    """Return a Toeplitz matrix by diagonal, from its first column (..., q) and row (..., k): (..., q + k - 1)."""
    # The first column upwards is j - i = -(q-1)..-1, the first row is 0..k-1.
    return torch.cat([column[..., 1:].flip(-1), row], dim=-1)


def row_sums(numbers: Tensor, queries: int | None = None) -> Tensor:
    """Sum along the rows of Toeplitz matrices, given by diagonal: (heads, q + k - 1) -> (heads, q); None: q = k."""
    queries = (numbers.shape[-1] + 1) // 2 if queries is None else queries
    keys = numbers.shape[-1] - queries + 1
    past = numbers[:, :keys].flip(-1).cumsum(-1)  # index m: distances -m to 0
    future = pad(numbers[:, keys:], (1, 0)).cumsum(-1)  # index m: distances 1 to m
    return past[:, keys - queries :] + future[:, :queries].flip(-1)


def diagonal_sums(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum along the diagonals, furthest past first: (..., q, k) -> (..., q + k - 1)."""
    queries, keys = matrix.shape[-2:]
    if extra := -queries % _HEIGHT:
        matrix = pad(matrix, (0, 0, extra, 0))
    # Few rows at a time stay in the precision of the matrix, because another one is a copy; then their sums follow.
    blocks = matrix.reshape(*matrix.shape[:-2], matrix.shape[-2] // _HEIGHT, _HEIGHT, keys)
    few = _shifted_sum(blocks, 1, torch.promote_types(matrix.dtype, torch.float32))
    return _shifted_sum(few.to(dtype or few.dtype), _HEIGHT)[..., : queries + keys - 1].to(dtype or matrix.dtype)


def _shifted_sum(rows: Tensor, shift: int, dtype: torch.dtype | None = None) -> Tensor:
    """Sum rows, each of which lies a shift to the right of the next: (..., r, w) -> (..., w + (r - 1) shift)."""
    number, width = rows.shape[-2:]
    width += (number - 1) * shift
    # read back in rows longer than the padded ones, rows move to the left, one by one
    padded = pad(rows, (width - rows.shape[-1], shift, 0, 1))
    padded = padded.reshape(*rows.shape[:-2], (number + 1) * (width + shift))
    longer = padded[..., : number * (width + 2 * shift)].reshape(*rows.shape[:-1], width + 2 * shift)
    return longer[..., :width].sum(-2, dtype=dtype)


class _Toeplitz(torch.autograd.Function):
    """`toeplitz` as a view and one copy, with a backward pass that sums blocks of rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(by_distance: Tensor, query_length: int) -> Tensor:
        return by_distance.unfold(-1, by_distance.shape[-1] - query_length + 1, 1).flip(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.query_length = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        queries, keys = gradient.shape[-2:]
        total = gradient.new_zeros(*gradient.shape[:-2], queries + keys - 1)
        rows = _ROWS if gradient.device.type == "cpu" else _ROWS_OF_GPU
        for first in range(0, queries, rows):
            stop = min(first + rows, queries)
            total = total + pad(diagonal_sums(gradient.narrow(-2, first, stop - first)), (queries - stop, first))
        return total, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return toeplitz(tangent, ctx.query_length)


def _tiled(by_distance: Tensor, query_length: int) -> Tensor:
    """Return `toeplitz` made of views, which a compiler fuses and which are not specialised to one length."""
    heads, width = by_distance.shape
    if query_length == 1:
        return by_distance[:, None]
    # The numbers are repeated and read in rows one shorter than themselves: each row starts one number earlier.
    tiles = by_distance[:, None].expand(heads, query_length + 1, width).reshape(heads, -1)
    rows = tiles[:, query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.reshape(heads, query_length, width - 1)[..., : width - query_length + 1]
