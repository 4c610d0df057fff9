"""The row pass of ``_row_pass`` in numba: the same sums, row by row, without any intermediate tensor.

Loaded only where numba is installed (the ``fast`` extra). Two details make the compiler vectorise the loops: indices
are cast to unsigned integers, and extremes are taken over the bits of non-negative floats.
"""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

unsigned = numba.uintp


def measure_rows(rows: Tensor, first: int, pairs: bool, base: float, per_nat: float, floor: float) -> list[Tensor]:
    """Measure rows of attention, on as many threads as torch uses.

    Args:
        rows: (batch, rows, n), float32 or float64 on the CPU; consecutive rows of each matrix.
        first: Position of the first row.
        pairs: Also compare left with right.
        base: Relative range up to which a row counts as constant.
        per_nat: Added to base where the weights of the pairs span a factor of e or more, see `Tolerance`.
        floor: Absolute range up to which a row counts as constant.

    Returns:
        The fields of `RowStatistics` in order, without the last three unless pairs, each (batch, rows).
    """
    batch, height, n = rows.shape
    weights = rows.contiguous().numpy().reshape(batch * height, n)
    bits = weights.view(np.int64 if weights.dtype == np.float64 else np.int32)
    reach = 64 if weights.dtype == np.float64 else 32  # the reach of `_row_blocks`
    decay = np.exp2(-np.arange(reach + 1)).astype(weights.dtype)
    statistics = np.zeros((6 if pairs else 3, batch * height), weights.dtype)
    arguments = (weights, bits, decay, first, height, pairs, base, per_nat, floor, statistics)
    threads = min(torch.get_num_threads(), 1 + weights.size // (1 << 18))
    if threads == 1:
        _measure(*arguments, 0, batch * height)
    else:
        bounds = np.linspace(0, batch * height, threads + 1).astype(int).tolist()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda a, b: _measure(*arguments, a, b), bounds[:-1], bounds[1:]))
    return list(torch.from_numpy(statistics).reshape(len(statistics), batch, height))


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz", "contract"}, error_model="numpy")
def _measure(  # type: ignore[no-untyped-def]
    weights, bits, decay, first, height, pairs, base, per_nat, floor, out, start, stop
):
    n = weights.shape[1]
    zero, tiny = weights.dtype.type(0), np.finfo(weights.dtype).tiny
    d = np.empty(n // 2 + 1, weights.dtype)
    d_bits = d.view(bits.dtype)
    for r in range(start, stop):
        row, row_bits = weights[r], bits[r]
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
        # `_row_blocks` says why: where the spread is small, the subtraction may have lost all digits
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
