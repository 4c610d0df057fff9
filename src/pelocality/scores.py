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
    if rows is None:
        rows = line.new_ones(()).expand(query_length)
    result: Tensor = _Toeplitz.apply(line, rows)  # type: ignore[no-untyped-call]
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


class _Toeplitz(torch.autograd.Function):
    """`toeplitz` in one pass each way; backward neither keeps nor makes anything of the matrix's size."""

    @staticmethod
    def forward(line: Tensor, rows: Tensor) -> Tensor:
        matrix = _laid_out(line, rows.shape[-1])
        return matrix if _plain(rows) else matrix.mul_(rows[..., None])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        line, rows = ctx.saved_tensors
        queries, keys = gradient.shape[1:]
        for_line = torch.zeros_like(line)
        for_rows = []
        for part, window in _blocks(queries, keys, gradient.device):
            block = gradient[:, part]
            if not _plain(rows):
                if ctx.needs_input_grad[1]:
                    for_rows.append((block * _laid_out(line[:, window], block.shape[1])).sum(-1))
                block = block * rows[:, part, None]
            for_line[:, window] += _diagonal_sums(block)
        return for_line, torch.cat(for_rows, -1) if for_rows else None


def _plain(rows: Tensor) -> bool:
    return rows.ndim == 1  # nothing to multiply by, only the number of rows


def _laid_out(line: Tensor, query_length: int) -> Tensor:
    return line.unfold(-1, line.shape[-1] - query_length + 1, 1).flip(-2)


def _tiled(line: Tensor, query_length: int) -> Tensor:
    """The same out of views alone, which a compiler fuses, forward and backward, and which have no length baked in."""
    heads, width = line.shape
    if width == 1:
        return line[:, None]
    # the line over and over, read in rows one shorter than it is: each row starts one earlier
    tiles = line[:, None].expand(heads, query_length + 1, width).reshape(heads, -1)
    rows = tiles[:, query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.reshape(heads, query_length, width - 1)[..., : width - query_length + 1]


def _blocks(queries: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows, and which part of the line each reads; on a CPU small enough to stay in its cache."""
    step = 64 if device.type == "cpu" else 512
    for first in range(0, queries, step):
        stop = min(first + step, queries)
        yield slice(first, stop), slice(queries - stop, queries - first + keys - 1)


def _diagonal_sums(block: Tensor) -> Tensor:
    """(heads, q, k) -> (heads, q + k - 1), the diagonal furthest in the past first."""
    heads, rows, keys = block.shape
    width = rows + keys - 1
    # laid out every width - 1 elements and read back every width, the rows shift by one each: diagonals are columns
    sheared = block.new_zeros(heads, rows * width)
    sheared.as_strided(block.shape, (rows * width, max(width - 1, 1), 1), rows - 1).copy_(block)
    return sheared.view(heads, rows, width).sum(1)
