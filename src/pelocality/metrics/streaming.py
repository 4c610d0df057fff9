"""Locality and symmetry without an n x n matrix, for long contexts.

Relative encodings need only their bias at every distance, O(n); absolute ones their table, in blocks of rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pelocality.metrics._row_pass import block_statistics, covering, row_blocks
from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance
from pelocality.metrics.position_tables import Similarity, projections, weights_of
from pelocality.metrics.published import Measurement

# A row's largest visible weight may lie this many nats below the largest of all before float64 runs out.
_RANGE = 600.0


def measure_relative(bias: Tensor | np.ndarray, *, rtol: float | None = None) -> Measurement:
    """Measure a relative encoding from its bias at every distance, in O(n).

        A_ij = softmax_j b[j - i],  j = 0..n-1

    and of A what `measure` gives, to rounding, without ever holding it: a row's normaliser cancels out of symmetry,
    and everything else is a running sum, minimum or maximum over distance.

    Args:
        bias: b[k] for k = -(n-1)..n-1, the past first, (..., 2n - 1), as ``encoding.relative(n)`` gives. -inf where
            a distance is masked: a causal bias is -inf at every k > 0.
        rtol: As for `symmetry`; None: that of the bias's dtype.

    Returns:
        A frozen result with ``.locality``, ``.symmetry`` and ``.relative_asymmetry``, each (...), computed in
        float64, on the same device; differentiable.

    Raises:
        TypeError: No float tensor or array.
        ValueError: A negative rtol, an even number of distances, NaN or +inf, a query whose keys are all masked, or
            a bias that grows so steeply with distance that float64 cannot hold it.

    Note:
        A causal bias has published symmetry, which means nothing; its relative asymmetry is 1.

    Examples:
        >>> import torch
        >>> n = 131_072
        >>> k = torch.arange(-(n - 1), n, dtype=torch.float64)
        >>> measure_relative(-0.5 * k.abs()).locality
        tensor(0.4581, dtype=torch.float64)
    """
    given = torch.from_numpy(np.array(bias)) if isinstance(bias, np.ndarray) else bias
    if not isinstance(given, Tensor) or not given.is_floating_point():
        got = f"integers ({given.dtype}); use bias.float()" if isinstance(given, Tensor) else type(bias).__name__
        raise TypeError(f"bias must be a tensor or array of floating-point numbers, got {got}")
    if given.ndim == 0 or given.shape[-1] % 2 == 0:
        raise ValueError(
            f"bias must hold one number per distance k = -(n-1)..n-1, so an odd number, got shape {tuple(given.shape)}"
        )
    if bool(torch.isnan(given).any()) or bool((given == torch.inf).any()):
        raise ValueError("bias contains NaN or +inf; use -inf where a distance is masked")
    tolerance = Tolerance.of(given.dtype, rtol)
    heads = given.reshape(-1, given.shape[-1]).to(torch.float64)
    # head by head: the working memory is that of one
    measured = [_measure_one_bias(head, tolerance) for head in heads]
    values = torch.stack(measured) if measured else heads.new_empty(0, 3)
    dtype = torch.promote_types(given.dtype, torch.float32)
    return Measurement(*values.to(dtype).reshape(*given.shape[:-1], 3).unbind(-1))


def _measure_one_bias(bias: Tensor, tolerance: Tolerance) -> Tensor:
    """(2n-1,) -> locality, symmetry and relative asymmetry, (3,)."""
    n = (len(bias) + 1) // 2
    _refuse_out_of_range(bias.detach(), n)
    weight = (bias - bias.max()).exp()
    left, right = weight[: n - 1].flip(0), weight[n - 1 :]  # left[k-1] = e^b[-k], right[k] = e^b[k]
    nothing = weight.new_zeros(1)
    decay = torch.exp2(-torch.arange(n, device=bias.device, dtype=bias.dtype))
    i = torch.arange(n, device=bias.device)
    # row i sees the distances -i..n-1-i: sums over them are prefix sums from the middle outward
    normaliser = torch.cat([nothing, left.cumsum(0)]) + right.cumsum(0).flip(0)
    near = torch.cat([nothing, (left * decay[1:]).cumsum(0)]) + (right * decay).cumsum(0).flip(0)
    locality = (near / normaliser).mean()
    if n < 3:
        return torch.stack([locality, torch.full_like(locality, torch.nan), torch.zeros_like(locality)])
    d = (left - right[1:]).abs()  # d[k-1], times each row's normaliser
    low, high = d.cummin(0).values, d.cummax(0).values
    spread = high - low
    # sum_k (d_k - min d) over the first m, from terms that are never negative: when the minimum falls, all before gain
    drop = torch.cat([nothing, low[:-1] - low[1:]])
    excess = (d - low + torch.arange(n - 1, device=d.device) * drop).cumsum(0)
    largest = torch.maximum(left, right[1:]).cummax(0).values
    least = torch.minimum(left, right[1:]).cummin(0).values
    m = torch.minimum(i, i.flip(0))[1:-1] - 1  # every row with pairs, index of its last one
    normaliser = normaliser[1:-1]
    constant = spread[m] <= tolerance.times(largest[m], least[m]).maximum(ABSOLUTE_FLOOR * normaliser)
    irregular = torch.where(constant, 0, excess[m] / torch.where(constant, 1, spread[m]))
    paired = ((left + right[1:]).cumsum(0)[m] / normaliser).sum()
    asymmetry = (d.cumsum(0)[m] / normaliser).sum() / torch.where(paired > 0, paired, 1)
    return torch.stack([locality, 1 - irregular.sum() / ((n - 1) ** 2 // 4), asymmetry])


def _refuse_out_of_range(bias: Tensor, n: int) -> None:
    past = torch.cat([bias.new_full((1,), -torch.inf), bias[: n - 1].flip(0).cummax(0).values])
    visible = torch.maximum(past, bias[n - 1 :].cummax(0).values.flip(0))  # each row's largest bias
    if bool((visible == -torch.inf).any()):
        raise ValueError("bias masks every key of some query; leave at least one distance that each position has")
    if bool(visible.max() - visible.min() > _RANGE):
        raise ValueError(
            f"bias grows by more than {_RANGE:.0f} nats with distance, beyond what float64 can weigh in one pass; "
            "measure a shorter length, or the dense matrix with measure()"
        )


def measure_absolute(
    positions: Tensor | np.ndarray,
    query: Tensor | np.ndarray | None = None,
    key: Tensor | np.ndarray | None = None,
    *,
    similarity: Similarity = "dot",
    temperature: float | None = None,
    rtol: float | None = None,
) -> Measurement:
    """Measure a table of position embeddings in blocks of rows.

        A_ij = softmax_j (p_i W_q)(p_j W_k)^T / sqrt(d_head)

    The same numbers as ``measure(position_weights(positions, query, key))``, to rounding, in memory that grows with
    n and not with n squared.

    Args:
        positions: P, (n, d).
        query: W_q, (d, d_head), or (heads, d, d_head).
        key: W_k, of the same shape; both or neither.
        similarity: As for `position_weights`.
        temperature: As for `position_weights`.
        rtol: As for `symmetry`; None: that of the table's precision.

    Returns:
        A frozen result with ``.locality``, ``.symmetry`` and ``.relative_asymmetry``, each () or (heads,), on the
        same device, without gradients (take `measure` where you need them).

    Raises:
        TypeError: As for `position_weights`.
        ValueError: As for `position_weights`, or a negative rtol.

    Note:
        In float32 a table that is symmetric on paper (sinusoidal, say) is symmetric only to rounding, and the
        published symmetry may read that noise: use float64, or `measure_relative` on its exact bias.

    Examples:
        >>> import torch
        >>> table = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
        >>> measure_absolute(table).symmetry.shape
        torch.Size([])
    """
    queries, keys = projections(positions, query, key, similarity, temperature)
    n = queries.shape[-2]
    heads = []
    with torch.no_grad():
        for q, k in zip(queries.reshape(-1, n, queries.shape[-1]), keys.reshape(-1, n, keys.shape[-1]), strict=True):
            sums = q.new_zeros(4, dtype=torch.float64)
            for _, first, stop in row_blocks(1, n, q.device):
                block = weights_of(q[covering(first, stop, n)], k)
                s = block_statistics(block[None], first, stop, rtol=rtol)
                parts = (s.locality, s.irregularity, s.difference, s.paired)
                sums += torch.stack([part.sum(dtype=torch.float64) for part in parts if part is not None])
            heads.append(sums)
    local, irregular, difference, paired = torch.stack(heads).unbind(-1)
    pairs = (n - 1) ** 2 // 4
    values = (
        local / n,
        1 - irregular / pairs if pairs else torch.full_like(irregular, torch.nan),
        difference / torch.where(paired > 0, paired, 1),
    )
    return Measurement(*(value.to(queries.dtype).reshape(queries.shape[:-2]) for value in values))
