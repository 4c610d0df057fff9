"""The row pass of ``_row_pass`` on a GPU: the same sums and their gradient, a few rows in each program.

A program reads each weight of a row once, as the left or as the right one of a pair. With ``TRITON_INTERPRET=1`` in the
environment the same programs run on a CPU, slowly, for tests.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, OF_BFLOAT16, OF_FLOAT16, ROW_SUM_TOLERANCE, Tolerance

_FLOOR = tl.constexpr(ABSOLUTE_FLOOR)
_BASE_8, _BASE_11 = tl.constexpr(OF_BFLOAT16.base), tl.constexpr(OF_FLOAT16.base)  # of weights with 8 and 11 digits
_PER_NAT = tl.constexpr(OF_FLOAT16.per_nat)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
compiled = triton.jit(do_not_specialize=["rows", "first", "height"])


def measure_rows(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> Tensor:
    """Measure rows of attention; arguments and result as for ``_row_pass_numba.measure_rows``."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    numbers = torch.empty(7 if pairs else 2, *rows.shape[:2], dtype=dtype, device=rows.device)
    _launch(_measure, _sizes(rows.shape[-1]), rows, numbers, first, pairs, *tolerance, ROW_SUM_TOLERANCE[rows.dtype])
    return numbers


def row_gradient(rows: Tensor, gradients: Tensor, numbers: Tensor, first: int, pairs: bool, _: Tolerance) -> Tensor:
    """Return the gradient of the rows; arguments as for ``_row_pass_numba.row_gradient``."""
    of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    given = numbers.contiguous(), gradients.contiguous()
    _launch(_differentiate, _gradient_sizes(rows.shape[-1]), rows, of_rows, first, pairs, *given)
    return of_rows


def _launch(
    function: Any, sizes: dict[str, int], rows: Tensor, out: Tensor, first: int, pairs: bool, *others: Any
) -> None:
    """Run enough programs for all rows, of a function that writes its result into a tensor."""
    batch, height, n = rows.shape
    if rows.numel():
        grid = (triton.cdiv(batch * height, sizes["HEIGHT"]),)
        with torch.cuda.device_of(rows):
            function[grid](rows.contiguous(), out, batch * height, first, height, n, pairs, *others, **sizes)


def _sizes(n: int) -> dict[str, int]:
    """Return how many rows and pairs a program measures at a time, on how many warps: the fastest ones on an H100."""
    block = 512 if n >= 4096 else min(256, max(32, triton.next_power_of_2(n // 2)))
    return {"HEIGHT": max(1, 128 // block), "BLOCK": block, "num_warps": 4 if n >= 4096 else 1}


def _gradient_sizes(n: int) -> dict[str, int]:
    """Return what `_sizes` does, for the gradient."""
    block = min(2048, max(64, triton.next_power_of_2(n // 4)))
    return {"HEIGHT": 1, "BLOCK": block, "num_warps": max(1, block // 256)}


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


@compiled
def _measure(
    weights, out, rows, first, height, n, PAIRS: tl.constexpr, base, per_nat, GUESS: tl.constexpr, rounding,
    HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PRECISION: tl.constexpr = out.dtype.element_ty
    IN_FLOAT64: tl.constexpr = out.dtype.element_ty == tl.float64
    BITS: tl.constexpr = tl.int64 if IN_FLOAT64 else tl.int32
    LACKED: tl.constexpr = 29 if IN_FLOAT64 else 0  # of the digits of float64, float32 lacks
    r, i, m = _place(rows, first, height, n, HEIGHT)
    present = r < rows
    own = tl.load(weights + r * n + i, mask=present, other=0.0).to(PRECISION)
    zeros = tl.zeros([HEIGHT, BLOCK], PRECISION)
    before, behind, local, least, difference, paired = zeros, zeros, zeros, zeros + own, zeros, zeros
    high, low, largest = zeros, zeros + 4.0, zeros
    farthest = tl.max(tl.maximum(i, n - 1 - i) * present)
    for start in range(1, farthest + 1, BLOCK):
        k = (start + tl.arange(0, BLOCK))[None, :]
        left, right = _pair(weights, r, i, k, n, PRECISION)
        before += left
        behind += right
        local += (left + right) * tl.exp2(-k.to(PRECISION))
        least = tl.minimum(least, tl.minimum(left, right))
        if PAIRS:
            d = tl.where(k <= m, tl.abs(left - right), 0.0)
            difference += d
            paired += tl.where(k <= m, left + right, 0.0)
            high, low = tl.maximum(high, d), tl.minimum(low, tl.where(k <= m, d, 4.0))
            largest = tl.maximum(largest, tl.where(k <= m, tl.maximum(left, right), 0.0))
    mass_before, mass_behind = tl.sum(before, 1, keep_dims=True), tl.sum(behind, 1, keep_dims=True)
    off = tl.abs(mass_before + own + mass_behind - 1)
    off = tl.where(tl.min(least, 1, keep_dims=True) < 0, float("inf"), tl.where(off <= rounding, 0.0, off))
    tl.store(out + r, off, mask=present)
    tl.store(out + rows + r, tl.sum(local, 1, keep_dims=True) + own, mask=present)
    if PAIRS:
        most, highest = tl.max(largest, 1, keep_dims=True), tl.max(high, 1, keep_dims=True)
        lowest = tl.min(low, 1, keep_dims=True)
        spread = highest - lowest
        excess = tl.sum(difference, 1, keep_dims=True) - m * lowest
        constant = (spread <= _FLOOR) | (m == 0)
        # once more, from the cache, where the subtraction may have lost digits or the row may be constant
        widest = _BASE_8 + _PER_NAT if GUESS else base + per_nat
        doubtful = (spread < tl.maximum(highest / 16, widest * most)) & (m > 0)
        if tl.max(doubtful.to(tl.int32)) > 0:
            again, smallest = zeros, zeros + 4.0
            digits = (zeros + own).to(BITS, bitcast=True)
            for start in range(1, farthest + 1, BLOCK):
                k = (start + tl.arange(0, BLOCK))[None, :]
                left, right = _pair(weights, r, i, k, n, PRECISION)
                again += tl.where(k <= m, tl.abs(left - right) - lowest, 0.0)
                smallest = tl.minimum(smallest, tl.where(k <= m, tl.minimum(left, right), 4.0))
                if GUESS:
                    digits |= left.to(BITS, bitcast=True) | right.to(BITS, bitcast=True)
            excess = tl.where(doubtful, tl.sum(again, 1, keep_dims=True), excess)
            nats = tl.log(tl.maximum(most, _TINY) / tl.maximum(tl.min(smallest, 1, keep_dims=True), _TINY))
            relative = base + per_nat * tl.minimum(nats, 1.0)
            if GUESS:
                in_8 = tl.max(digits & ((1 << (LACKED + 16)) - 1), 1, keep_dims=True) == 0
                in_11 = tl.max(digits & ((1 << (LACKED + 13)) - 1), 1, keep_dims=True) == 0
                of_half = tl.where(in_8, _BASE_8, _BASE_11) + _PER_NAT * tl.minimum(nats, 1.0)
                relative = tl.where(in_11, of_half, relative)
            constant = constant | (spread <= relative * most)
        irregularity = tl.where(m == 2, 1.0, excess / tl.where(constant, 1.0, spread))  # two pairs have no gradient
        tl.store(out + 2 * rows + r, tl.where(constant, 0.0, irregularity), mask=present)
        tl.store(out + 3 * rows + r, tl.sum(difference, 1, keep_dims=True), mask=present)
        tl.store(out + 4 * rows + r, tl.sum(paired, 1, keep_dims=True), mask=present)
        tl.store(out + 5 * rows + r, mass_before, mask=present)
        tl.store(out + 6 * rows + r, mass_behind, mask=present)


@compiled
def _differentiate(
    weights, out, rows, first, height, n, PAIRS: tl.constexpr, numbers, gradients,
    HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows; ``_row_pass_numba._differentiate`` says by which formula."""
    PRECISION: tl.constexpr = numbers.dtype.element_ty
    r, i, m = _place(rows, first, height, n, HEIGHT)
    present = r < rows
    to_locality = tl.load(gradients + rows + r, mask=present, other=0.0)
    zeros = tl.zeros([HEIGHT, BLOCK], PRECISION)
    if PAIRS:
        c = tl.load(numbers + 2 * rows + r, mask=present, other=0.0)
        to_c = tl.load(gradients + 2 * rows + r, mask=present, other=0.0)
        to_difference = tl.load(gradients + 3 * rows + r, mask=present, other=0.0)
        to_paired = tl.load(gradients + 4 * rows + r, mask=present, other=0.0)
        low, high, at_low, at_high = zeros + 4.0, zeros, zeros, zeros
        most = tl.max(m)
        for start in range(1, most + 1, BLOCK):
            k = (start + tl.arange(0, BLOCK))[None, :]
            left, right = _pair(weights, r, i, k, n, PRECISION)
            d = tl.abs(left - right)
            low = tl.minimum(low, tl.where(k <= m, d, 4.0))
            high = tl.maximum(high, tl.where(k <= m, d, 0.0))
        lowest, highest = tl.min(low, 1, keep_dims=True), tl.max(high, 1, keep_dims=True)
        for start in range(1, most + 1, BLOCK):
            k = (start + tl.arange(0, BLOCK))[None, :]
            left, right = _pair(weights, r, i, k, n, PRECISION)
            d = tl.abs(left - right)
            at_low += tl.where((k <= m) & (d == lowest), 1.0, 0.0)
            at_high += tl.where((k <= m) & (d == highest), 1.0, 0.0)
        by_range = tl.where(c == 0, 0.0, to_c / tl.where(c == 0, 1.0, highest - lowest))
        more_low = by_range * (c - m) / tl.maximum(tl.sum(at_low, 1, keep_dims=True), 1.0)
        more_high = -by_range * c / tl.maximum(tl.sum(at_high, 1, keep_dims=True), 1.0)
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
