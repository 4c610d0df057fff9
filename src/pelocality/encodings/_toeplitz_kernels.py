"""Attention on a GPU whose bias is a Toeplitz matrix, read from its numbers by distance: no n x n tensor is made.

The weights are recomputed in the backward pass from the sum of each row, as in FlashAttention (Dao, 2023). All
logarithms in the kernels are of base 2. A program has a block of rows with the states x, and goes over the columns with
the states y. Rows are queries and columns are keys, except where a kernel computes the gradients of keys.

The bias is read in float16, relative to the largest number of its head: numbers near this one are nearly exact. Where a
query sees such numbers, the others have weights near 0. Where it sees none, because they are at distances that are
hidden or past an end of the sequence, its block is computed again with the bias in float32, which is slower to read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_SHIFTS = tl.constexpr(8)  # numbers of the table that are read at once
_EDGE = tl.constexpr(128)  # numbers at each end of the table that blocks at the edges read, as many as their rows
_FAR = tl.constexpr(-64.0)  # logarithm of the sum of a row below which float16 rounds weights by more than 1 percent


@triton.jit
def _shifted(bias, largest, numbers, table, length, width, FLIPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bias in base 2, less its largest number, in float32, and in float16 with line s shifted by s."""
    line, at = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, shift = line // _SHIFTS, line % _SHIFTS
    to = at + shift - _EDGE
    inside = (to >= 0) & (to < length)
    reference = tl.load(largest + head)
    reference = tl.where(tl.abs(reference) == float("inf"), 0.0, reference)
    number = tl.load(bias + head * length + (length - 1 - to if FLIPPED else to), mask=inside, other=reference)
    number = (number - reference) * 1.4426950408889634  # 1 / ln 2
    tl.store(numbers + head * length + to, number, mask=inside & (to == at - _EDGE))
    number = tl.where((number < -65504.0) & (number > -float("inf")), -65504.0, number)  # the limit of float16
    tl.store(table + line * width + at, number.to(tl.float16), mask=at < width)


@triton.jit
def _of_pair(table, numbers, mask, tables, heads, rows, columns, width, by_batch, by_head):
    """Return the pair of batch and head of a program, and where its bias and its mask begin."""
    pair = tl.program_id(1).to(tl.int64)
    table += pair % tables * _SHIFTS * width
    numbers += pair % tables * (rows + columns - 1)
    mask += pair // heads * by_batch + pair % heads * by_head
    return pair, table, numbers, mask


@triton.jit
def _tile(states, pair, first, count, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the states (pairs, count, D) of a pair of batch and head from the first one on, 0 after the last."""
    row = first + tl.arange(0, BLOCK)[:, None]
    return tl.load(states + pair * count * D + row * D + tl.arange(0, D)[None], mask=row < count, other=0)


@triton.jit
def _tile_bias(table, numbers, row, column, rows, columns, width, EXACT: tl.constexpr):
    """Return a tile of the matrix, whose rows are aligned in lines of the table, but not in numbers."""
    if EXACT:
        at = rows - 1 - row + column
        bias = tl.load(numbers + at, mask=(at >= 0) & (at < rows + columns - 1), other=0)
    else:
        reverse = rows - 1 - row + _EDGE
        bias = tl.load(table + reverse % _SHIFTS * width + reverse // _SHIFTS * _SHIFTS + column).to(tl.float32)
    return bias


@triton.jit
def _tile_logits(
    x, y, bias, mask, row, column, scale, rows, columns, by_row, by_column, MASKED: tl.constexpr, EVEN: tl.constexpr
):
    """Return the logits of a tile, with -inf where a query does not see a key."""
    logits = tl.dot(x, tl.trans(y)) * scale + bias
    if MASKED:
        inside = (row < rows) & (column < columns)
        visible = tl.load(mask + row.to(tl.int64) * by_row + column.to(tl.int64) * by_column, mask=inside, other=0)
        logits = tl.where(visible != 0, logits, -float("inf"))
    elif not EVEN:
        logits = tl.where(column < columns, logits, -float("inf"))
    return logits


@triton.jit
def _output(
    x, x_value, y, y_value, table, numbers, mask, sums, delta, least, out, out_value, scale, tables, heads, rows,
    columns, width, by_batch, by_head, by_row, by_column, D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    KEYS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, and the logarithm of the sum of each row."""
    pair, table, numbers, mask = _of_pair(table, numbers, mask, tables, heads, rows, columns, width, by_batch, by_head)
    first = tl.program_id(0) * ROWS
    index = first + tl.arange(0, ROWS)
    q = _tile(x, pair, first, rows, D, ROWS)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, D], tl.float32)
    norm = most
    last = tl.minimum(columns, first + ROWS + columns - rows) if CAUSAL else columns
    until = last
    for exact in tl.static_range(2):
        for start in tl.range(0, until, COLUMNS, num_stages=1 if exact else None):
            row, column = index[:, None], start + tl.arange(0, COLUMNS)[None]
            k = _tile(y, pair, start, columns, D, COLUMNS)
            bias = _tile_bias(table, numbers, row, column, rows, columns, width, exact)
            logits = _tile_logits(q, k, bias, mask, row, column, scale, rows, columns, by_row, by_column, MASKED, EVEN)
            larger = tl.maximum(most, tl.max(logits, 1))
            reference = tl.where(larger == -float("inf"), 0.0, larger)
            weights = tl.exp2(logits - reference[:, None])
            rescaled = tl.exp2(most - reference)
            total = total * rescaled + tl.sum(weights, 1)
            v = _tile(y_value, pair, start, columns, D, COLUMNS)
            mean = tl.dot(weights.to(v.dtype), v, mean * rescaled[:, None])
            most = larger
        # the sum of a row whose keys are all hidden is infinity, so that its weights are 0 in the backward pass
        norm = tl.where(total == 0, float("inf"), most + tl.log2(total))
        far = tl.min(tl.where(index < rows, norm, 0.0)) < _FAR
        until = tl.where(far, last, 0)
        most = tl.where(far, -float("inf"), most)  # The sums before are forgotten.
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    at = (pair * rows + index)[:, None] * D + tl.arange(0, D)[None]
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=(index < rows)[:, None])
    tl.store(sums + pair * rows + index, norm, mask=index < rows)


@triton.jit
def _to_states(
    x, x_value, y, y_value, table, numbers, mask, sums, delta, least, out, out_value, scale, tables, heads, rows,
    columns, width, by_batch, by_head, by_row, by_column, D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    KEYS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries, or of keys and values: then the queries are the columns."""
    pair, table, numbers, mask = _of_pair(table, numbers, mask, tables, heads, rows, columns, width, by_batch, by_head)
    first = tl.program_id(0) * ROWS
    index = first + tl.arange(0, ROWS)
    own, own_value = _tile(x, pair, first, rows, D, ROWS), _tile(x_value, pair, first, rows, D, ROWS)
    total = tl.zeros([ROWS, D], tl.float32)
    total_value = tl.zeros([ROWS, D], tl.float32)
    start_at, last = 0, columns
    if CAUSAL and KEYS:
        start_at = tl.maximum(first + columns - rows, 0) // COLUMNS * COLUMNS
    elif CAUSAL:
        last = tl.minimum(columns, first + ROWS + columns - rows)
    queries = columns if KEYS else rows
    far = tl.load(least + pair) < _FAR  # whether a query of this head sees far keys alone
    for exact in tl.static_range(2):
        until = tl.where(far, last, 0) if exact else tl.where(far, 0, last)
        for start in tl.range(start_at, until, COLUMNS, num_stages=1 if exact else None):
            other = start + tl.arange(0, COLUMNS)
            row, column = index[:, None], other[None]
            states, value = _tile(y, pair, start, columns, D, COLUMNS), _tile(y_value, pair, start, columns, D, COLUMNS)
            bias = _tile_bias(table, numbers, row, column, rows, columns, width, exact)
            logits = _tile_logits(
                own, states, bias, mask, row, column, scale, rows, columns, by_row, by_column, MASKED, EVEN
            )
            query = other if KEYS else index
            norm = tl.load(sums + pair * queries + query, mask=query < queries, other=float("inf"))
            mean = tl.load(delta + pair * queries + query, mask=query < queries, other=0)
            weights = tl.exp2(logits - (norm[None] if KEYS else norm[:, None]))
            slope = weights * (tl.dot(own_value, tl.trans(value)) - (mean[None] if KEYS else mean[:, None]))
            total = tl.dot(slope.to(own.dtype), states, total)
            if KEYS:
                total_value = tl.dot(weights.to(own.dtype), value, total_value)
    at = (pair * rows + index)[:, None] * D + tl.arange(0, D)[None]
    total *= scale * 0.6931471805599453  # ln 2
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(index < rows)[:, None])
    if KEYS:
        tl.store(out_value + at, total_value.to(out.dtype.element_ty), mask=(index < rows)[:, None])


@triton.jit
def _to_bias(
    x, x_value, y, y_value, table, numbers, mask, sums, delta, least, out, out_value, scale, tables, heads, rows,
    columns, width, by_batch, by_head, by_row, by_column, D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    KEYS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of the logits in the tiles along one diagonal, whose distances are the same."""
    distances = rows + columns - 1
    pair, table, numbers, mask = _of_pair(table, numbers, mask, tables, heads, rows, columns, width, by_batch, by_head)
    ahead = (tl.program_id(0) - (rows - 1) // ROWS) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], ahead + tl.arange(0, COLUMNS)[None]
    bias = _tile_bias(table, numbers, row, column, rows, columns, width, True)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.maximum(-ahead, 0), tl.minimum(rows, columns - ahead), ROWS):
        q, g = _tile(x, pair, start, rows, D, ROWS), _tile(x_value, pair, start, rows, D, ROWS)
        other = start + ahead
        k, v = _tile(y, pair, other, columns, D, ROWS), _tile(y_value, pair, other, columns, D, ROWS)
        logits = _tile_logits(
            q, k, bias, mask, start + row, start + column, scale, rows, columns, by_row, by_column, MASKED, EVEN
        )
        query = start + tl.arange(0, ROWS)
        norm = tl.load(sums + pair * rows + query, mask=query < rows, other=float("inf"))[:, None]
        mean = tl.load(delta + pair * rows + query, mask=query < rows, other=0)[:, None]
        total += tl.exp2(logits - norm) * (tl.dot(g, tl.trans(v)) - mean)
    distance = column - row + rows - 1
    out += pair % tables * distances
    tl.atomic_add(out + distance, total, mask=(distance >= 0) & (distance < distances), sem="relaxed")


# kernel, rows and columns of a block, warps, stages
_BLOCKS = {
    "output": (_output, 128, 64, 8, 3),
    "queries": (_to_states, 64, 64, 4, 2),
    "keys": (_to_states, 64, 32, 4, 3),
    "bias": (_to_bias, 64, 64, 4, 3),
}


class ToeplitzAttention(torch.autograd.Function):
    """``scaled_dot_product_attention`` with a bias by distance, (heads or 1, q + k - 1), and perhaps a mask.

    Queries, keys and values, (batch, heads, q or k, d), are in half precision, and d is a power of two from 16 to 128.
    With ``causal``, the bias is -inf in the future, and blocks there are left out.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        output, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.options = scale, causal
        ctx.save_for_backward(q, k, v, bias, mask, output, sums)
        _launch_attention("output", (q, q, k, v), _lines(bias), mask, (sums, sums, sums, output, output), *ctx.options)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, mask, output, sums = ctx.saved_tensors
        g, of_bias = gradient.contiguous(), None
        rows = sums, (g.float() * output).sum(-1), sums.amin(-1)
        lines, across = _lines(bias), _lines(bias, flipped=True)
        of_q, of_k, of_v = (torch.empty_like(each) for each in (q, k, v))
        _launch_attention("queries", (q, g, k, v), lines, mask, (*rows, of_q, of_q), *ctx.options)
        _launch_attention(
            "keys", (k, v, q, g), across, None if mask is None else mask.mT, (*rows, of_k, of_v), *ctx.options
        )
        if ctx.needs_input_grad[3]:
            of_bias = torch.zeros_like(bias, dtype=torch.float32)
            _launch_attention("bias", (q, g, k, v), lines, mask, (*rows, of_bias, of_bias), *ctx.options)
            of_bias = of_bias.to(bias.dtype)
        return of_q, of_k, of_v, of_bias, None, None, None


def _lines(bias: Tensor, flipped: bool = False) -> tuple[Tensor, Tensor]:
    """Return the bias as kernels read it: (heads or 1, shifts, width) with space at its ends, and in float32."""
    bias = bias.detach().float().contiguous()
    (heads, length), block = bias.shape, 1024
    width = (length + 2 * _EDGE.value) // 16 * 16 + 16
    table, numbers = bias.new_empty(heads, _SHIFTS.value, width, dtype=torch.float16), torch.empty_like(bias)
    with torch.cuda.device_of(bias):
        blocks = triton.cdiv(width, block), heads * _SHIFTS.value
        _shifted[blocks](bias, bias.amax(-1), numbers, table, length, width, flipped, block)
    return table, numbers


def _launch_attention(name: str, states: Any, lines: Any, mask: Any, own: Any, scale: float, causal: bool) -> None:
    x, _, y, _ = states
    (batch, heads, rows, D), columns = x.shape, y.shape[2]
    kernel, ROWS, COLUMNS, warps, stages = _BLOCKS[name]
    seen = x if mask is None else mask.expand(batch, heads, rows, columns).view(torch.uint8)
    strides = [0] * 4 if mask is None else seen.stride()
    even = rows % 128 == columns % 128 == 0
    sizes = scale / math.log(2), len(lines[0]), heads, rows, columns, lines[0].shape[-1], *strides
    constants = D, mask is not None, causal, name == "keys", even, ROWS, COLUMNS
    blocks = triton.cdiv(rows, ROWS) + (triton.cdiv(columns, COLUMNS) - 1 if name == "bias" else 0)
    with torch.cuda.device_of(x):
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": 128 if name == "output" and D < 128 else None}
        kernel[blocks, batch * heads](*states, *lines, seen, *own, *sizes, *constants, **options)
