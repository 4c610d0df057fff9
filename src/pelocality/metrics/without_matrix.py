"""Locality and symmetry without an n x n matrix, for long contexts.

Relative encodings need only their bias at every distance, O(n); tables of position embeddings, blocks of rows.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pelocality._checks import on_float64_device
from pelocality.metrics._inputs import float_tensor
from pelocality.metrics._row_blocks import row_blocks, rows_needed
from pelocality.metrics._row_pass import block_statistics, pool_sums
from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance
from pelocality.metrics.position_tables import Similarity, project, softmax_weights
from pelocality.metrics.published import Measurement, warn_of_one_sided

# How far (in nats) the largest bias of a row may lie below the largest of all in float64.
_RANGE = 600.0


def measure_relative(bias: Tensor | np.ndarray, *, rtol: float | None = None) -> Measurement:
    """Measure a relative encoding from its bias at every distance, in O(n).

        A_ij = softmax_j b[j - i],  j = 0..n-1

    The same values as ``measure(A)``, to rounding, without the matrix: the normaliser of a row cancels out of symmetry,
    and everything else is a cumulative sum, minimum or maximum over distance.

    Args:
        bias: b[k] for k = -(n-1)..n-1, the past first, (..., 2n - 1), as ``encoding.relative(n)`` gives. -inf where
            a distance is masked: a causal bias is -inf at every k > 0.
        rtol: As for `symmetry`; None: that of the bias's dtype.

    Returns:
        A frozen result with ``.locality``, ``.symmetry`` and ``.relative_asymmetry``, each (...), computed in
        float64, on the same device; differentiable.

    Raises:
        TypeError: Not a float tensor or array.
        ValueError: A negative rtol, an even number of distances, NaN or +inf, a query whose keys are all masked, or
            a bias that grows with distance beyond the range of float64.

    Warns:
        UserWarning: A bias is one-sided (causal): its symmetry is meaningless, its relative asymmetry is 1.

    Note:
        An n x n matrix of biases, as an encoding returns it when called, cannot be recognised at odd n: its rows are
        read as n heads.

    Examples:
        >>> import torch
        >>> n = 131_072
        >>> k = torch.arange(-(n - 1), n, dtype=torch.float64)
        >>> measure_relative(-0.5 * k.abs()).locality
        tensor(0.4581, dtype=torch.float64)
    """
    given = float_tensor("bias", bias)
    if given.ndim == 0 or given.shape[-1] % 2 == 0:
        wanted = f"bias must hold an odd number, one for each k = -(n-1)..n-1, got shape {tuple(given.shape)}"
        raise ValueError(f"{wanted}; an encoding gives them as relative(n), not as its n x n matrix")
    if bool(torch.isnan(given).any()) or bool((given == torch.inf).any()):
        raise ValueError("bias contains NaN or +inf; use -inf where a distance is masked")
    tolerance = Tolerance.for_dtype(given.dtype, rtol)
    n = (given.shape[-1] + 1) // 2
    heads = on_float64_device(given).reshape(-1, given.shape[-1]).to(torch.float64)
    # head by head, in the working memory of one
    measured = [_measure_one_bias(head, tolerance) for head in heads]
    values = torch.stack(measured) if measured else heads.new_empty(0, 3)
    dtype = torch.promote_types(given.dtype, torch.float32)
    past, future = ((given[..., side] == -torch.inf).all(-1) for side in (slice(0, n - 1), slice(n, None)))
    if n > 2 and bool((past ^ future).any()):
        warn_of_one_sided()
    return Measurement(*values.to(given.device, dtype).reshape(*given.shape[:-1], 3).unbind(-1))


def _measure_one_bias(bias: Tensor, tolerance: Tolerance) -> Tensor:
    """Return locality, symmetry and relative asymmetry, (3,), of one bias (2n-1,)."""
    n = (len(bias) + 1) // 2
    _check_range(bias.detach(), n)
    weight = (bias - bias.max()).exp()
    left, right = weight[: n - 1].flip(0), weight[n - 1 :]  # left[k-1] = e^b[-k], right[k] = e^b[k]
    zero = weight.new_zeros(1)
    decay = torch.exp2(-torch.arange(n, device=bias.device, dtype=bias.dtype))
    i = torch.arange(n, device=bias.device)
    # row i has the distances -i..n-1-i: sums over them are cumulative sums from the middle outwards
    normaliser = torch.cat([zero, left.cumsum(0)]) + right.cumsum(0).flip(0)
    near = torch.cat([zero, (left * decay[1:]).cumsum(0)]) + (right * decay).cumsum(0).flip(0)
    locality = (near / normaliser).sum()
    d = (left - right[1:]).abs()  # d[k-1], times each row's normaliser
    low, high = d.cummin(0).values, d.cummax(0).values
    spread = high - low
    # sum_k (d_k - min d) over the first m, from non-negative terms: each further pair adds d_k - min d, and where it
    # lowers the minimum, the terms of all pairs before it grow by as much
    drop = torch.cat([zero, low[:-1] - low[1:]])
    excess = (d - low + torch.arange(n - 1, device=d.device) * drop).cumsum(0)
    largest = torch.maximum(left, right[1:]).cummax(0).values
    smallest = torch.minimum(left, right[1:]).cummin(0).values
    m = torch.minimum(i, i.flip(0))[1:-1] - 1  # index of the last pair of every row with pairs
    normaliser = normaliser[1:-1]
    floor = ABSOLUTE_FLOOR * normaliser
    irregularity = tolerance.irregularity(excess[m], spread[m], largest[m], smallest[m], floor).sum()
    difference = (d.cumsum(0)[m] / normaliser).sum()
    paired = ((left + right[1:]).cumsum(0)[m] / normaliser).sum()
    return torch.stack(pool_sums(n, locality, irregularity, difference, paired))


def _check_range(bias: Tensor, n: int) -> None:
    """Raise ValueError if a row has no visible key or its largest bias is too far below that of another row."""
    past = torch.cat([bias.new_full((1,), -torch.inf), bias[: n - 1].flip(0).cummax(0).values])
    visible = torch.maximum(past, bias[n - 1 :].cummax(0).values.flip(0))  # each row's largest bias
    if bool((visible == -torch.inf).any()):
        raise ValueError("bias masks every key of some query; leave at least one distance visible from every position")
    if bool(visible.max() - visible.min() > _RANGE):
        raise ValueError(f"bias grows by more than {_RANGE:.0f} nats with distance; measure a shorter length")


def measure_absolute(
    table: Tensor | np.ndarray | nn.Embedding,
    query: Tensor | np.ndarray | None = None,
    key: Tensor | np.ndarray | None = None,
    *,
    similarity: Similarity = "dot",
    temperature: float | None = None,
    rtol: float | None = None,
) -> Measurement:
    """Measure a table of position embeddings in blocks of rows.

        A_ij = softmax_j (p_i W_q)(p_j W_k)^T / sqrt(d_head)

    The same numbers as ``measure(position_weights(table, query, key))``, to rounding, in memory that grows with
    n and not with n squared.

    Args:
        table: P, (n, d), one embedding per position, or their module, as for `position_weights`.
        query: W_q, (d, d_head), or (heads, d, d_head).
        key: W_k, of the same shape; both or neither.
        similarity: As for `position_weights`.
        temperature: As for `position_weights`.
        rtol: As for `symmetry`; None: that of the table's precision.

    Returns:
        A frozen result with ``.locality``, ``.symmetry`` and ``.relative_asymmetry``, each () or (heads,), on the
        same device, without gradients (use `measure` for them).

    Raises:
        TypeError: As for `position_weights`.
        ValueError: As for `position_weights`, or a negative rtol.

    Note:
        In float32 a symmetric table (such as a sinusoidal one) is symmetric only to rounding, which the published
        symmetry may measure: use float64, or `measure_relative` on its exact bias.

    Examples:
        >>> import torch
        >>> table = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
        >>> measure_absolute(table).symmetry.shape
        torch.Size([])
    """
    projected = project(table, query, key, similarity, temperature)
    queries, keys = map(on_float64_device, projected)
    tolerance = Tolerance.for_dtype(queries.dtype, rtol)
    n = queries.shape[-2]
    by_head = [each.reshape(-1, n, each.shape[-1]) for each in (queries, keys)]
    sums = queries.new_zeros(len(by_head[0]), 4, dtype=torch.float64)
    with torch.no_grad():
        for q, k, total in zip(*by_head, sums, strict=True):
            for _, first, stop in row_blocks(1, n, q.device):
                block = softmax_weights(q[rows_needed(first, stop, n)], k)
                statistics = block_statistics(block[None], first, stop, tolerance)
                total += torch.stack([values.sum(dtype=torch.float64) for values in statistics.sums])
    values = pool_sums(n, *sums.unbind(-1))
    return Measurement(*(value.to(projected[0]).reshape(queries.shape[:-2]) for value in values))
