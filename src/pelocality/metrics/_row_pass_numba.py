"""The row pass of ``_row_pass`` on a CPU: the same sums and their gradient, row by row, without any tensor between.

Two details make the compiler vectorise the loops: indices are cast to unsigned integers, and extremes are taken over
the bits of non-negative floats. A row of half precision is widened by its bits, in the cache.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, HALF, OF_BFLOAT16, OF_FLOAT16, ROW_SUM_TOLERANCE, Tolerance

unsigned = numba.uintp
compiled = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz", "contract"}, error_model="numpy")
_PART = 1 << 18  # weights that are worth a thread
_BASE_8, _BASE_11, _PER_NAT = OF_BFLOAT16.base, OF_FLOAT16.base, OF_FLOAT16.per_nat  # of 8 and 11 digits


def measure_rows(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> Tensor:
    """Measure rows of attention, on as many threads as torch uses.

    Args:
        rows: (batch, rows, n), on the CPU; consecutive rows of each matrix.
        first: Position of the first row.
        pairs: Also compare left with right.
        tolerance: Up to which a row counts as constant.

    Returns:
        The numbers of `RowStatistics`, (7, batch, rows), or (2, batch, rows) without pairs.
    """
    batch, height, _n = rows.shape
    weights = _in_numpy(rows)
    measured, rounding = np.zeros((7 if pairs else 2, batch * height), weights[-1].dtype), ROW_SUM_TOLERANCE[rows.dtype]
    _in_threads(_measure, rows, *weights, first, height, pairs, *tolerance, rounding, measured)
    return torch.from_numpy(measured).reshape(len(measured), batch, height)


def row_gradient(rows: Tensor, gradients: Tensor, numbers: Tensor, first: int, pairs: bool, _: Tolerance) -> Tensor:
    """Return the gradient of the rows, (batch, rows, n).

    Args:
        rows: As for `measure_rows`.
        gradients: The gradient of the numbers, in their shape.
        numbers: Those of `RowStatistics`.
        first: Position of the first row.
        pairs: Whether left was compared with right.
    """
    weights = _in_numpy(rows)
    given = (each.detach().reshape(len(each), -1).contiguous().numpy() for each in (numbers, gradients))
    of_rows = np.empty((numbers[0].numel(), rows.shape[-1]), weights[-1].dtype)
    _in_threads(_differentiate, rows, *weights, first, rows.shape[1], pairs, *given, of_rows)
    return torch.from_numpy(of_rows).reshape(rows.shape).to(rows.dtype)


def _in_numpy(rows: Tensor) -> tuple[Any, ...]:
    """Return the rows, (batch * rows, n), as floats or as bits of half precision, and whether those are of bfloat16,

    a number of the type of the bits of a sum, and 2^-k as far as it matters beside 1.
    """
    flat = rows.detach().flatten(0, 1).contiguous()
    floats = np.empty((0, 0), np.float32) if flat.dtype in HALF else flat.numpy()
    halves = flat.view(torch.uint16).numpy() if flat.dtype in HALF else np.empty((0, 0), np.uint16)
    reach, integer = (64, np.int64) if flat.dtype == torch.float64 else (32, np.int32)
    decay = np.exp2(-np.arange(reach + 1.0)).astype(floats.dtype)
    return floats, halves, flat.dtype == torch.bfloat16, np.empty(0, integer), decay


def _in_threads(function: Callable[..., None], rows: Tensor, *arguments: Any) -> None:
    """Call a function on parts of the rows."""
    threads = min(torch.get_num_threads(), 1 + rows.numel() // _PART)
    bounds = np.linspace(0, rows.shape[0] * rows.shape[1], threads + 1).astype(int).tolist()
    if threads == 1:
        return function(*arguments, *bounds)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start, stop: function(*arguments, start, stop), bounds[:-1], bounds[1:]))
    return None


@compiled
def _row(floats, halves, bfloat16, r, row, bits):
    """Return a row and its bits; of half precision widened into the given memory, which both share."""
    if not halves.size:
        return floats[r], floats[r].view(bits.dtype)
    half = halves[r]
    if bfloat16:
        for j in range(half.size):
            bits[j] = np.int32(half[j]) << np.int32(16)
        return row, bits
    for j in range(half.size):
        digits = np.int32(half[j])
        bits[j] = ((digits & np.int32(0x7FFF)) << np.int32(13)) | ((digits & np.int32(0x8000)) << np.int32(16))
    scale, largest = np.float32(2.0**112), np.float32(65504)  # what the exponents of float16 lack; its largest number
    for j in range(half.size):
        value = row[j] * scale
        row[j] = value if abs(value) <= largest else np.float32(np.nan)
    return row, bits


@compiled
def _measure(
    floats, halves, bfloat16, integers, decay, first, height, pairs, base, per_nat, guess, rounding, out, start, stop
):
    n, zero, tiny = max(floats.shape[1], halves.shape[1]), decay.dtype.type(0), np.finfo(decay.dtype).tiny
    buffer, d = np.empty(n, decay.dtype), np.empty(n // 2 + 3, decay.dtype)
    bits, d_bits = buffer.view(integers.dtype), d.view(integers.dtype)
    widest = _BASE_8 + _PER_NAT if guess else base + per_nat
    for r in range(start, stop):
        row, row_bits = _row(floats, halves, bfloat16, r, buffer, bits)
        i = first + r % height
        m = min(i, n - 1 - i)
        before, behind, sign = zero, zero, row_bits[i]
        for j in range(i):
            before += row[j]
            sign = min(sign, row_bits[j])
        for j in range(i + 1, n):
            behind += row[unsigned(j)]
            sign = min(sign, row_bits[unsigned(j)])
        off = abs(before + row[i] + behind - 1)
        if not off <= rounding:
            out[0, r] = off
        if sign < 0 and row.min() < 0:  # the sign bit: a negative weight, or -0.0, which is accepted
            out[0, r] = np.inf
        local = row[i]
        for k in range(1, min(decay.size - 1, i) + 1):
            local += decay[unsigned(k)] * row[unsigned(i - k)]
        for k in range(1, min(decay.size - 1, n - 1 - i) + 1):
            local += decay[unsigned(k)] * row[unsigned(i + k)]
        out[1, r] = local
        if not pairs:
            continue
        out[5, r], out[6, r] = before, behind
        if m == 0:
            continue
        difference, paired = zero, zero
        for k in range(m):
            left, right = row[unsigned(i - 1 - k)], row[unsigned(i + 1 + k)]
            d[k] = abs(left - right)
            paired += left + right
        low_bits, high_bits = d_bits[0], d_bits[0]
        for k in range(m):
            low_bits = min(low_bits, d_bits[k])
            high_bits = max(high_bits, d_bits[k])
            difference += d[k]
        most_bits = row_bits[unsigned(i - 1)]
        for k in range(m):
            most_bits = max(most_bits, max(row_bits[unsigned(i - m + k)], row_bits[unsigned(i + 1 + k)]))
        d_bits[m], d_bits[m + 1], d_bits[m + 2] = low_bits, high_bits, most_bits
        low, high, largest = d[m], d[m + 1], max(tiny, d[m + 2])
        spread, excess = high - low, difference - m * low
        constant = spread <= ABSOLUTE_FLOOR
        # the subtraction loses digits where the spread is small beside the differences, and only where it is small
        # beside the weights can a row be constant
        if spread < max(high / 16, widest * largest):
            excess = zero
            for k in range(m):
                excess += d[k] - low
            least_bits = row_bits[unsigned(i - 1)]
            for k in range(m):
                least_bits = min(least_bits, min(row_bits[unsigned(i - m + k)], row_bits[unsigned(i + 1 + k)]))
            d_bits[m] = least_bits
            nats = min(1.0, np.log(largest / max(d[m], tiny)))
            relative = base + per_nat * nats
            if guess:
                digits = row_bits[0]
                for j in range(n):
                    digits |= row_bits[j]
                lacked = (row_bits.itemsize - 4) * 29 // 4  # digits of float64 beyond those of float32
                if digits & ((1 << (13 + lacked)) - 1) == 0:
                    eight = digits & ((1 << (16 + lacked)) - 1) == 0
                    relative = (_BASE_8 if eight else _BASE_11) + _PER_NAT * nats
            constant = constant or spread <= relative * largest
        if not constant:
            out[2, r] = excess / spread if m > 2 else 1  # exactly, or the gradient of two pairs would not be 0
        out[3, r] = difference
        out[4, r] = paired


@compiled
def _differentiate(
    floats, halves, bfloat16, integers, decay, first, height, pairs, numbers, gradients, out, start, stop
):
    """With c = (sum d - m min d) / R:  dc/dd_k = 1/R, and at the smallest d besides (c - m)/R, at the largest -c/R,

    split over ties; 0 where the row counts as constant, c = 0. Elsewhere c is at least 1.
    """
    n, zero = out.shape[1], decay.dtype.type(0)
    buffer, d, to_left = np.empty(n, decay.dtype), np.empty(n // 2 + 1, decay.dtype), np.empty(n // 2 + 2, decay.dtype)
    bits, d_bits, to_left_bits = buffer.view(integers.dtype), d.view(integers.dtype), to_left.view(integers.dtype)
    positive = np.iinfo(integers.dtype).max  # all bits but the sign
    for r in range(start, stop):
        row, _ = _row(floats, halves, bfloat16, r, buffer, bits)
        into = out[r]
        i = first + r % height
        m = min(i, n - 1 - i) if pairs else 0
        into[: i - m] = zero
        into[i + m + 1 :] = zero
        into[i] = zero
        if m > 0:
            c, slope, mass = numbers[2, r], gradients[3, r], gradients[4, r]
            for k in range(m):
                d[k] = row[unsigned(i - 1 - k)] - row[unsigned(i + 1 + k)]
            more_low, more_high, low_bits, high_bits = zero, zero, d_bits[0] & positive, d_bits[0] & positive
            if c != 0:
                for k in range(m):
                    low_bits = min(low_bits, d_bits[k] & positive)
                    high_bits = max(high_bits, d_bits[k] & positive)
                at_low, at_high = 0, 0
                for k in range(m):
                    at_low += (d_bits[k] & positive) == low_bits
                    at_high += (d_bits[k] & positive) == high_bits
                to_left_bits[0], to_left_bits[1] = low_bits, high_bits
                by_range = gradients[2, r] / (to_left[1] - to_left[0])
                slope += by_range
                more_low, more_high = by_range * (c - m) / at_low, -by_range * c / at_high
            for k in range(m):
                by_size = slope
                by_size += more_low if (d_bits[k] & positive) == low_bits else zero
                by_size += more_high if (d_bits[k] & positive) == high_bits else zero
                to_left[k] = by_size if d[k] > zero else (-by_size if d[k] < zero else zero)
            for k in range(m):
                into[unsigned(i - 1 - k)] = mass + to_left[k]
            for k in range(m):
                into[unsigned(i + 1 + k)] = mass - to_left[k]
        into[i] += gradients[1, r]
        for k in range(1, min(decay.size - 1, i) + 1):
            into[unsigned(i - k)] += gradients[1, r] * decay[unsigned(k)]
        for k in range(1, min(decay.size - 1, n - 1 - i) + 1):
            into[unsigned(i + k)] += gradients[1, r] * decay[unsigned(k)]
