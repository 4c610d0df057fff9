"""The row pass of ``_row_pass`` on a GPU: the same sums and their gradient, a few rows in each program.

A program reads each weight of a row once, as the left or as the right one of a pair. With ``TRITON_INTERPRET=1`` in the
environment the same programs run on a CPU, slowly, for tests.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, OF_BFLOAT16, OF_FLOAT16, Tolerance

_FLOOR = tl.constexpr(ABSOLUTE_FLOOR)
_BASE_8, _BASE_11 = tl.constexpr(OF_BFLOAT16.base), tl.constexpr(OF_FLOAT16.base)  # of weights with 8 and 11 digits
_PER_NAT = tl.constexpr(OF_FLOAT16.per_nat)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
compiled = triton.jit(do_not_specialize=["rows", "first", "height"])


def measure_rows(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> Tensor:
    """Measure rows of attention; arguments and result as for ``_row_pass_numba.measure_rows``."""
    batch, height, n = rows.shape
    dtype = torch.promote_types(rows.dtype, torch.float32)
    measured = torch.empty(8 if pairs else 3, batch, height, dtype=dtype, device=rows.device)
    if rows.numel():
        grid, sizes = _sizes(batch * height, n, dtype)
        with torch.cuda.device_of(rows):
            _measure[grid](
                rows.contiguous(), measured, batch * height, first, height, n, *tolerance, PAIRS=pairs, **sizes
            )
    return measured


def row_gradient(rows: Tensor, gradients: Tensor, sums: Tensor, first: int, pairs: bool, _: Tolerance) -> Tensor:
    """Return the gradient of the rows; arguments as for ``_row_pass_numba.row_gradient``."""
    batch, height, n = rows.shape
    of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.numel():
        grid, sizes = _sizes(batch * height, n, sums.dtype)
        given = rows.contiguous(), sums.contiguous(), gradients.contiguous()
        with torch.cuda.device_of(rows):
            _differentiate[grid](*given, of_rows, batch * height, first, height, n, PAIRS=pairs, **sizes)
    return of_rows


def _sizes(rows: int, n: int, dtype: torch.dtype) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid, and how many rows and pairs a program reads at a time, on how many warps, in what precision."""
    block = min(1024, max(32, triton.next_power_of_2(n // 2)))
    height = max(1, 128 // block)
    warps = max(1, min(4, block // 256))
    precise = tl.float64 if dtype == torch.float64 else tl.float32
    grid = (triton.cdiv(rows, height),)
    return grid, {"HEIGHT": height, "BLOCK": block, "num_warps": warps, "PRECISION": precise}


@triton.jit
def _place(rows, first, height, n, HEIGHT: tl.constexpr):
    """Return the rows of this program, their positions and the number of their pairs, (HEIGHT, 1) each."""
    r = (tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    i = tl.where(r < rows, first + r % height, -n).to(tl.int32)  # a row beyond the last one has no keys
    return r, i, tl.maximum(tl.minimum(i, n - 1 - i), 0)


@triton.jit
def _pair(weights, r, i, k, n, PRECISION: tl.constexpr):
    """Return the weights k tokens before and behind token i, (HEIGHT, BLOCK) each, 0 beyond the ends."""
    own = weights + r * n + i
    left = tl.load(own - k, mask=k <= i, other=0.0).to(PRECISION)
    right = tl.load(own + k, mask=(k < n - i) & (i >= 0), other=0.0).to(PRECISION)
    return left, right


@triton.jit
def _last_digits(weight, LACKED: tl.constexpr):
    """Return the digits that a lower precision lacks, given how many of float32's it lacks."""
    if weight.dtype == tl.float64:
        return weight.to(tl.int64, bitcast=True) & ((1 << (LACKED + 29)) - 1)
    else:  # only one of them is compiled
        return weight.to(tl.int32, bitcast=True) & ((1 << LACKED) - 1)


@triton.jit
def _sum(values):
    """Return the sum over keys, (HEIGHT, 1)."""
    return tl.sum(values, 1)[:, None]


@triton.jit
def _max(values):
    """Return the largest one over keys, (HEIGHT, 1)."""
    return tl.max(values, 1)[:, None]


@compiled
def _measure(
    weights, out, rows, first, height, n, base, per_nat, GUESS: tl.constexpr,
    PAIRS: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r, i, m = _place(rows, first, height, n, HEIGHT)
    present = r < rows
    own = tl.load(weights + r * n + i, mask=present, other=0.0).to(PRECISION)
    zeros = tl.zeros([HEIGHT, BLOCK], PRECISION)
    before, behind, local, below, difference, paired = zeros, zeros, zeros, zeros, zeros, zeros
    high, low, largest = zeros, zeros + 4.0, zeros
    farthest = tl.max(tl.maximum(i, n - 1 - i) * present)
    for start in range(1, farthest + 1, BLOCK):
        k = (start + tl.arange(0, BLOCK))[None, :]
        left, right = _pair(weights, r, i, k, n, PRECISION)
        before += left
        behind += right
        local += (left + right) * tl.exp2(-k.to(PRECISION))
        below = tl.maximum(below, -tl.minimum(left, right))
        if PAIRS:
            d = tl.where(k <= m, tl.abs(left - right), 0.0)
            difference += d
            paired += tl.where(k <= m, left + right, 0.0)
            high, low = tl.maximum(high, d), tl.minimum(low, tl.where(k <= m, d, 4.0))
            largest = tl.maximum(largest, tl.where(k <= m, tl.maximum(left, right), 0.0))
    mass_before, mass_behind = _sum(before), _sum(behind)
    tl.store(out + r, tl.abs(mass_before + own + mass_behind - 1), mask=present)
    tl.store(out + rows + r, tl.maximum(_max(below), -own), mask=present)
    tl.store(out + 2 * rows + r, _sum(local) + own, mask=present)
    if PAIRS:
        lowest, highest, most = tl.min(low, 1)[:, None], _max(high), _max(largest)
        spread = highest - lowest
        excess = _sum(difference) - m * lowest
        constant = (spread <= _FLOOR) | (m == 0)
        # once more, from the cache, where the subtraction may have lost digits or the row may be constant
        widest = _BASE_8 + _PER_NAT if GUESS else base + per_nat
        doubtful = (spread < tl.maximum(highest / 16, widest * most)) & (m > 0)
        if tl.max(doubtful.to(tl.int32)) > 0:
            again, smallest = zeros, zeros + 4.0
            of_8, of_11 = _last_digits(zeros + own, 16), _last_digits(zeros + own, 13)
            for start in range(1, farthest + 1, BLOCK):
                k = (start + tl.arange(0, BLOCK))[None, :]
                left, right = _pair(weights, r, i, k, n, PRECISION)
                again += tl.where(k <= m, tl.abs(left - right) - lowest, 0.0)
                smallest = tl.minimum(smallest, tl.where(k <= m, tl.minimum(left, right), 4.0))
                if GUESS:
                    of_8 |= _last_digits(left, 16) | _last_digits(right, 16)
                    of_11 |= _last_digits(left, 13) | _last_digits(right, 13)
            excess = tl.where(doubtful, _sum(again), excess)
            nats = tl.log(tl.maximum(most, _TINY) / tl.maximum(tl.min(smallest, 1)[:, None], _TINY))
            relative = base + per_nat * tl.minimum(nats, 1.0)
            if GUESS:
                in_8, in_11 = _max(of_8) == 0, _max(of_11) == 0
                of_half = tl.where(in_8, _BASE_8, _BASE_11) + _PER_NAT * tl.minimum(nats, 1.0)
                relative = tl.where(in_11, of_half, relative)
            constant = constant | (spread <= relative * most)
        irregularity = tl.where(m == 2, 1.0, excess / tl.where(constant, 1.0, spread))  # two pairs have no gradient
        tl.store(out + 3 * rows + r, tl.where(constant, 0.0, irregularity), mask=present)
        tl.store(out + 4 * rows + r, _sum(difference), mask=present)
        tl.store(out + 5 * rows + r, _sum(paired), mask=present)
        tl.store(out + 6 * rows + r, mass_before, mask=present)
        tl.store(out + 7 * rows + r, mass_behind, mask=present)


@compiled
def _differentiate(
    weights, sums, gradients, out, rows, first, height, n,
    PAIRS: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows; ``_row_pass_numba._differentiate`` says by which formula."""
    r, i, m = _place(rows, first, height, n, HEIGHT)
    present = r < rows
    to_locality = tl.load(gradients + r, mask=present, other=0.0)
    zeros = tl.zeros([HEIGHT, BLOCK], PRECISION)
    if PAIRS:
        c = tl.load(sums + rows + r, mask=present, other=0.0)
        to_c = tl.load(gradients + rows + r, mask=present, other=0.0)
        to_difference = tl.load(gradients + 2 * rows + r, mask=present, other=0.0)
        to_paired = tl.load(gradients + 3 * rows + r, mask=present, other=0.0)
        low, high, at_low, at_high = zeros + 4.0, zeros, zeros, zeros
        most = tl.max(m)
        for start in range(1, most + 1, BLOCK):
            k = (start + tl.arange(0, BLOCK))[None, :]
            left, right = _pair(weights, r, i, k, n, PRECISION)
            d = tl.abs(left - right)
            low = tl.minimum(low, tl.where(k <= m, d, 4.0))
            high = tl.maximum(high, tl.where(k <= m, d, 0.0))
        lowest, highest = tl.min(low, 1)[:, None], _max(high)
        for start in range(1, most + 1, BLOCK):
            k = (start + tl.arange(0, BLOCK))[None, :]
            left, right = _pair(weights, r, i, k, n, PRECISION)
            d = tl.abs(left - right)
            at_low += tl.where((k <= m) & (d == lowest), 1.0, 0.0)
            at_high += tl.where((k <= m) & (d == highest), 1.0, 0.0)
        by_range = tl.where(c == 0, 0.0, to_c / tl.where(c == 0, 1.0, highest - lowest))
        more_low = by_range * (c - m) / tl.maximum(_sum(at_low), 1.0)
        more_high = -by_range * c / tl.maximum(_sum(at_high), 1.0)
    own = out + r * n + i
    for start in range(1, tl.max(tl.maximum(i, n - 1 - i) * present) + 1, BLOCK):
        k = (start + tl.arange(0, BLOCK))[None, :]
        both = zeros + to_locality * tl.exp2(-k.to(PRECISION))
        to_left = zeros
        if PAIRS:
            left, right = _pair(weights, r, i, k, n, PRECISION)
            d = tl.abs(left - right)
            slope = by_range + to_difference + tl.where(d == lowest, more_low, 0.0)
            slope += tl.where(d == highest, more_high, 0.0)
            sign = tl.where(left > right, 1.0, tl.where(left < right, -1.0, 0.0))
            to_left = tl.where(k <= m, slope * sign, 0.0)
            both += tl.where(k <= m, to_paired, 0.0)
        tl.store(own - k, both + to_left, mask=k <= i)
        tl.store(own + k, both - to_left, mask=(k < n - i) & present)
    tl.store(own, to_locality, mask=present)
