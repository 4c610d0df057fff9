"""Attention on a GPU whose bias is a Toeplitz matrix, read from its numbers by distance: no n x n tensor is made.

The weights are recomputed in the backward pass from the sum of each row, as in FlashAttention (Dao, 2023). All
logarithms in the kernels are of base 2. A program has a block of rows with the states x, and goes over the columns with
the states y. Rows are queries and columns are keys, except where a kernel computes the gradients of keys.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

_EDGE = tl.constexpr(128)  # numbers at each end of the table that blocks at the edges read, as many as their rows
SHIFTS, EXACT = 8, False  # as many numbers of the table as are read at once, and whether they are float32


@triton.jit
def _tile(states, pair, first, count, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the states (pairs, count, D) of a pair of batch and head from the first one on, 0 after the last."""
    row = first + tl.arange(0, BLOCK)[:, None]
    return tl.load(states + pair * count * D + row * D + tl.arange(0, D)[None], mask=row < count, other=0)


@triton.jit
def _bias(table, row, column, count, width, SHIFTS: tl.constexpr):
    """Return a tile of the matrix; line s of the table is shifted by s numbers, so that rows of tiles are aligned."""
    reverse = count - 1 - row + _EDGE
    return tl.load(table + reverse % SHIFTS * width + reverse // SHIFTS * SHIFTS + column).to(tl.float32)


@triton.jit
def _hide(logits, mask, row, column, rows, columns, by_row, by_column, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """Return the logits with -inf where a query does not see a key."""
    if MASKED:
        inside = (row < rows) & (column < columns)
        visible = tl.load(mask + row.to(tl.int64) * by_row + column * by_column, mask=inside, other=0)
        logits = tl.where(visible != 0, logits, -float("inf"))
    elif not EVEN:
        logits = tl.where(column < columns, logits, -float("inf"))
    return logits


@triton.jit
def _output(
    x, x_value, y, y_value, table, mask, sums, delta, out, out_value, scale, heads, rows, columns, width, by_table,
    by_batch, by_head, by_row, by_column, D: tl.constexpr, SHIFTS: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, and the logarithm of the sum of each row."""
    first, pair = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    table += pair % heads * by_table
    mask += pair // heads * by_batch + pair % heads * by_head
    index = first + tl.arange(0, ROWS)
    q = _tile(x, pair, first, rows, D, ROWS)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, D], tl.float32)
    last = tl.minimum(columns, first + ROWS + columns - rows) if CAUSAL else columns
    for start in range(0, last, COLUMNS):
        row, column = index[:, None], start + tl.arange(0, COLUMNS)[None]
        k = _tile(y, pair, start, columns, D, COLUMNS)
        logits = tl.dot(q, tl.trans(k)) * scale + _bias(table, row, column, rows, width, SHIFTS)
        logits = _hide(logits, mask, row, column, rows, columns, by_row, by_column, MASKED, EVEN)
        larger = tl.maximum(most, tl.max(logits, 1))
        reference = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(logits - reference[:, None])
        rescaled = tl.exp2(most - reference)
        total = total * rescaled + tl.sum(weights, 1)
        v = _tile(y_value, pair, start, columns, D, COLUMNS)
        mean = tl.dot(weights.to(v.dtype), v, mean * rescaled[:, None])
        most = larger
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    at = (pair * rows + index)[:, None] * D + tl.arange(0, D)[None]
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=(index < rows)[:, None])
    # the sum of a row whose keys are all hidden is stored as infinity, so that its weights are 0 in the backward pass
    tl.store(sums + pair * rows + index, tl.where(total == 0, float("inf"), most + tl.log2(total)), mask=index < rows)


@triton.jit
def _to_states(
    x, x_value, y, y_value, table, mask, sums, delta, out, out_value, scale, heads, rows, columns, width, by_table,
    by_batch, by_head, by_row, by_column, D: tl.constexpr, SHIFTS: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries, or of keys and values: then the queries are the columns."""
    first, pair = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    table += pair % heads * by_table
    mask += pair // heads * by_batch + pair % heads * by_head
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
    for start in range(start_at, last, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        states, value = _tile(y, pair, start, columns, D, COLUMNS), _tile(y_value, pair, start, columns, D, COLUMNS)
        logits = tl.dot(own, tl.trans(states)) * scale + _bias(table, index[:, None], other[None], rows, width, SHIFTS)
        logits = _hide(logits, mask, index[:, None], other[None], rows, columns, by_row, by_column, MASKED, EVEN)
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
    x, x_value, y, y_value, table, mask, sums, delta, out, out_value, scale, heads, rows, columns, width, by_table,
    by_batch, by_head, by_row, by_column, D: tl.constexpr, SHIFTS: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of the logits in the tiles along one diagonal, whose distances are the same."""
    pair = tl.program_id(1).to(tl.int64)
    mask += pair // heads * by_batch + pair % heads * by_head
    ahead = (tl.program_id(0) - (rows - 1) // ROWS) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], ahead + tl.arange(0, COLUMNS)[None]
    bias = _bias(table + pair % heads * by_table, row, column, rows, width, SHIFTS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.maximum(-ahead, 0), tl.minimum(rows, columns - ahead), ROWS):
        q, g = _tile(x, pair, start, rows, D, ROWS), _tile(x_value, pair, start, rows, D, ROWS)
        other = start + ahead
        k, v = _tile(y, pair, other, columns, D, ROWS), _tile(y_value, pair, other, columns, D, ROWS)
        logits = tl.dot(q, tl.trans(k)) * scale + bias
        logits = _hide(logits, mask, start + row, start + column, rows, columns, by_row, by_column, MASKED, EVEN)
        query = start + tl.arange(0, ROWS)
        norm = tl.load(sums + pair * rows + query, mask=query < rows, other=float("inf"))[:, None]
        mean = tl.load(delta + pair * rows + query, mask=query < rows, other=0)[:, None]
        total += tl.exp2(logits - norm) * (tl.dot(g, tl.trans(v)) - mean)
    distance, distances = column - row + rows - 1, rows + columns - 1
    out += pair % heads * (by_table > 0) * distances
    tl.atomic_add(out + distance, total, mask=(distance >= 0) & (distance < distances), sem="relaxed")


# kernel, rows and columns of a block, warps, stages
BLOCKS = {
    "output": (_output, 128, 64, 8, 2),
    "queries": (_to_states, 128, 64, 8, 2),
    "keys": (_to_states, 128, 64, 8, 2),
    "bias": (_to_bias, 64, 64, 4, 2),
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
        ctx.mask, ctx.options = mask, (scale, causal)
        ctx.save_for_backward(q, k, v, bias, output, sums)
        _launch("output", (q, q, k, v), _table(bias), mask, (sums, sums, output, output), *ctx.options)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, output, sums = ctx.saved_tensors
        g, mask, of_bias = gradient.contiguous(), ctx.mask, None
        rows = sums, (g.float() * output).sum(-1)
        table, across = _table(bias), _table(bias.flip(-1))
        of_q, of_k, of_v = (torch.empty_like(each) for each in (q, k, v))
        _launch("queries", (q, g, k, v), table, mask, (*rows, of_q, of_q), *ctx.options)
        _launch("keys", (k, v, q, g), across, None if mask is None else mask.mT, (*rows, of_k, of_v), *ctx.options)
        if ctx.needs_input_grad[3]:
            of_bias = torch.zeros_like(bias, dtype=torch.float32)
            _launch("bias", (q, g, k, v), table, mask, (*rows, of_bias, of_bias), *ctx.options)
            of_bias = of_bias.to(bias.dtype)
        return of_q, of_k, of_v, of_bias, None, None, None


def _table(bias: Tensor) -> Tensor:
    """Return the bias in base 2 with space at its ends, shifted by 0 and more numbers, (heads or 1, shifts, width)."""
    width = (bias.shape[-1] + 2 * _EDGE.value) // 16 * 16 + 16
    numbers = bias.detach().float() / math.log(2)
    if not EXACT:  # float16 is exact near the largest number, which is 0, and has a limit
        numbers = numbers - numbers.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        numbers = torch.where(numbers == -torch.inf, numbers, numbers.clamp(min=-65504)).half()
    table = pad(numbers, (_EDGE.value, width + SHIFTS - 1 - _EDGE.value - bias.shape[-1]))
    return table.unfold(-1, width, 1).contiguous()


def _launch(
    name: str, states: tuple[Tensor, ...], table: Tensor, mask: Any, own: tuple[Tensor, ...], scale: float, causal: bool
) -> None:
    x, _, y, _ = states
    (batch, heads, rows, D), columns = x.shape, y.shape[2]
    kernel, ROWS, COLUMNS, warps, stages = BLOCKS[name]
    seen = x if mask is None else mask.expand(batch, heads, rows, columns).view(torch.uint8)
    strides = [0] * 4 if mask is None else seen.stride()
    by_table, even = table.stride(0) if len(table) > 1 else 0, rows % 128 == columns % 128 == 0
    numbers = scale / math.log(2), heads, rows, columns, table.shape[-1], by_table, *strides
    constants = D, SHIFTS, mask is not None, causal, name == "keys", even, ROWS, COLUMNS
    blocks = triton.cdiv(rows, ROWS) + (triton.cdiv(columns, COLUMNS) - 1 if name == "bias" else 0)
    with torch.cuda.device_of(x):
        kernel[blocks, batch * heads](
            *states, table, seen, *own, *numbers, *constants, num_warps=warps, num_stages=stages
        )
