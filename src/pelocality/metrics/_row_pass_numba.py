"""The row pass of ``_row_pass`` in numba: the same sums, row by row, without any intermediate tensor.

Two details make the compiler vectorise the loops: indices are cast to unsigned integers, and extremes are taken over
the bits of non-negative floats.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance

unsigned = numba.uintp
_PART = 1 << 19  # weights converted and measured at a time: about the size of a core's cache


def measure_rows(rows: Tensor, first: int, pairs: bool, tolerance: Tolerance) -> tuple[Any, ...]:
    """Measure rows of attention, on as many threads as torch uses.

    Args:
        rows: (batch, rows, n), on the CPU; consecutive rows of each matrix. Half precision is converted to float32.
        first: Position of the first row.
        pairs: Also compare left with right.
        tolerance: Up to which a row counts as constant.

    Returns:
        The fields of `RowStatistics` in order, without the last three unless pairs.
    """
    batch, height, n = rows.shape
    flat, dtype = rows.reshape(batch * height, n), torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(6 if pairs else 3, batch * height, dtype=dtype, device="cpu")
    out, integer = sums.numpy(), np.int64 if dtype == torch.float64 else np.int32
    reach = 64 if dtype == torch.float64 else 32  # beyond, 2^-|i-j| is below the precision's eps
    decay = np.exp2(-np.arange(reach + 1)).astype(out.dtype)
    size = max(1, _PART // n)

    def measure(start: int) -> None:
        weights = flat[start : start + size].to(dtype).contiguous().numpy()
        _measure(weights, weights.view(integer), decay, first, height, pairs, *tolerance, ABSOLUTE_FLOOR, out, start)

    starts = range(0, batch * height, size)
    if (threads := min(torch.get_num_threads(), len(starts))) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(measure, starts))
    else:
        for start in starts:
            measure(start)
    total, smallest, *rest = sums.reshape(len(sums), batch, height)
    return total, smallest.amin().item() if smallest.numel() else 0.0, *rest


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz", "contract"}, error_model="numpy")
def _measure(  # type: ignore[no-untyped-def]
    weights, bits, decay, first, height, pairs, base, per_nat, floor, out, start
):
    n = weights.shape[1]
    zero, tiny = weights.dtype.type(0), np.finfo(weights.dtype).tiny
    d = np.empty(n // 2 + 1, weights.dtype)
    d_bits = d.view(bits.dtype)
    for part, r in enumerate(range(start, start + len(weights))):
        row, row_bits = weights[part], bits[part]
        i = first + r % height
        m = min(i, n - 1 - i)
        total, sign = zero, row_bits[0]
        for j in range(n):
            total += row[j]
            sign = min(sign, row_bits[j])
        out[0, r] = total
        if sign < 0:  # the sign bit: a negative weight, or -0.0, which is accepted
            out[1, r] = row.min()
        near = min(m, decay.size - 1)
        local = row[i]
        for k in range(1, near + 1):
            local += decay[k] * (row[unsigned(i - k)] + row[unsigned(i + k)])
        for j in range(max(0, i - decay.size + 1), i - near):
            local += decay[i - j] * row[j]
        for j in range(i + near + 1, min(n, i + decay.size)):
            local += decay[j - i] * row[j]
        out[2, r] = local
        if not pairs or m == 0:
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
        d_bits[m] = low_bits
        low = d[m]
        d_bits[m] = high_bits
        spread = d[m] - low
        excess = difference - m * low
        constant = spread <= floor
        # the subtraction loses digits where the spread is small beside the differences, and only where it is small
        # beside the tolerance can a row be constant
        if spread < max(d[m] / 16, 2 * (base + per_nat)):
            excess = zero
            for k in range(m):
                excess += d[k] - low
            largest, smallest = tiny, row[unsigned(i - 1)]
            for j in range(i - m, i + m + 1):
                if j != i:
                    largest, smallest = max(largest, row[j]), min(smallest, row[j])
            nats = min(1.0, np.log(largest / max(smallest, tiny)))
            constant = constant or spread <= (base + per_nat * nats) * largest
        if not constant:
            out[3, r] = excess / spread
        out[4, r] = difference
        out[5, r] = paired
