"""Scores of pairs of positions: laid out from a number per distance, and shared out into attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# A mask of numbers hides a key from here down: there exp gives 0 in float64 too (it ends at -745), with room for logits
# that stand above; bfloat16 holds the usual -1e4 as -9984.
HIDDEN = -1e3


def toeplitz(line: Tensor, query_length: int, rows: Tensor | None = None) -> Tensor:
    """Lay a line of numbers out so that every diagonal of the matrix holds one of them.

        M_ij = line[j - i + q - 1] rows[i]

    Args:
        line: (heads or 1, q + k - 1), the distance furthest in the past first.
        query_length: q.
        rows: What each row is multiplied by, (heads or 1, q); None: nothing.

    Returns:
        (heads or 1, q, k).
    """
    if rows is not None:
        heads = max(len(line), len(rows))
        line, rows = line.expand(heads, -1), rows.expand(heads, -1)
    if torch.compiler.is_compiling():
        matrix = _tiled(line, query_length)
        return matrix if rows is None else matrix * rows[..., None]
    result: Tensor = _Toeplitz.apply(line, rows, query_length)  # type: ignore[no-untyped-call]
    return result


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Share attention out among the keys that are there; a query that sees none gets zeros, never NaN.

    Args:
        logits: (..., query, key).
        visible: Broadcastable to it, True where a query sees a key; None: it sees all.

    Returns:
        (..., query, key).
    """
    if visible is not None:
        logits = torch.where(visible, logits, -torch.inf)
    blind = logits.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.where(blind, 0, torch.where(blind, 0, logits).softmax(-1))


def mirrored(line: Tensor, query_length: int) -> Tensor:
    """Read a line of numbers as `toeplitz` lays it out, the last query first: then nothing is copied.

    Args:
        line: (heads or 1, q + k - 1).
        query_length: q.

    Returns:
        (heads or 1, q, k), a view: do not write into it.
    """
    return line.unfold(-1, line.shape[-1] - query_length + 1, 1)


def laid_out(line: Tensor, query_length: int, rows: Tensor | None = None) -> Tensor:
    """Do what `toeplitz` does, without a gradient of its own.

    Args:
        line: (heads or 1, q + k - 1).
        query_length: q.
        rows: (heads or 1, q); None: nothing.

    Returns:
        (heads or 1, q, k), nobody else's.
    """
    matrix = mirrored(line, query_length).flip(-2)
    return matrix if rows is None else matrix.mul_(rows[..., None])


def fold(gradient: Tensor, line: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of what `toeplitz` laid out, from that of the matrix or of some of its rows.

    Args:
        gradient: (heads, q, k).
        line: (heads, q + k - 1), what those rows read of the line.
        rows: (heads, q); None: nothing.

    Returns:
        For the line, (heads, q + k - 1), and for the rows, (heads, q), or None.
    """
    if rows is None:
        return _diagonal_sums(gradient), None
    return _diagonal_sums(gradient * rows[..., None]), (gradient * laid_out(line, gradient.shape[1])).sum(-1)


def blocks(queries: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Part a matrix into blocks of rows; on a CPU small enough to stay in its cache.

    Args:
        queries: q.
        keys: k.
        device: Where the matrix is.

    Yields:
        Which rows, and which part of the line of `toeplitz` they read.
    """
    step = 64 if device.type == "cpu" else 512
    for first in range(0, queries, step):
        stop = min(first + step, queries)
        yield slice(first, stop), slice(queries - stop, queries - first + keys - 1)


class _Toeplitz(torch.autograd.Function):
    """`toeplitz` in one pass each way; backward neither keeps nor makes anything of the matrix's size."""

    @staticmethod
    def forward(line: Tensor, rows: Tensor | None, query_length: int) -> Tensor:
        return laid_out(line, query_length, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, int], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        line, rows = ctx.saved_tensors
        for_line = torch.zeros_like(line)
        for_rows: list[Tensor] = []
        for part, window in blocks(gradient.shape[1], gradient.shape[2], gradient.device):
            line_sums, row_sums = fold(gradient[:, part], line[:, window], None if rows is None else rows[:, part])
            for_line[:, window] += line_sums
            for_rows += [] if row_sums is None else [row_sums]
        return for_line, torch.cat(for_rows, -1) if for_rows else None, None


def _tiled(line: Tensor, query_length: int) -> Tensor:
    """The same out of views alone, which a compiler fuses, forward and backward, and which have no length baked in."""
    heads, width = line.shape
    if width == 1:
        return line[:, None]
    # the line over and over, read in rows one shorter than it is: each row starts one earlier
    tiles = line[:, None].expand(heads, query_length + 1, width).reshape(heads, -1)
    rows = tiles[:, query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.reshape(heads, query_length, width - 1)[..., : width - query_length + 1]


def _diagonal_sums(block: Tensor) -> Tensor:
    """(heads, q, k) -> (heads, q + k - 1), the diagonal furthest in the past first."""
    heads, rows, keys = block.shape
    width = rows + keys - 1
    # laid out every width - 1 elements and read back every width, the rows shift by one each: diagonals are columns
    sheared = block.new_zeros(heads, rows * width)
    sheared.as_strided(block.shape, (rows * width, max(width - 1, 1), 1), rows - 1).copy_(block)
    return sheared.view(heads, rows, width).sum(1)
