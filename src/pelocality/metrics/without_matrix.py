"""The metrics without an n x n matrix, for long contexts.

Relative encodings need only their bias at every distance, O(n); tables of position embeddings, blocks of rows.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pelocality._checks import on_float64_device
from pelocality._toeplitz import row_sums
from pelocality.metrics._inputs import float_tensor
from pelocality.metrics._ratio import masked_mean, ratio
from pelocality.metrics._row_pass import pool_sums, row_statistics
from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance
from pelocality.metrics.distances import (
    Side,
    asymmetry_of_profile,
    excess_locality,
    half_life_of_profile,
    window_of_profile,
)
from pelocality.metrics.position_tables import Similarity, project, softmax_weights
from pelocality.metrics.published import Measurement, warn_of_one_sided
from pelocality.metrics.structure import normalised_entropy

# How far (in nats) the largest bias of a row may lie below the largest of all in float64.
_RANGE = 600.0

# How many numbers of several short heads are measured together, and how many rows of a table.
_PART, _HEIGHT = 2**18, 64


@dataclass(frozen=True, repr=False)
class RelativeMeasurement(Measurement):
    """Every metric of a relative encoding that does not need its matrix, as `measure_relative` returns them.

    Each equals the function of its name on the matrix, to rounding. Visible keys are those whose bias is not -inf.

    Attributes:
        adjusted_locality: (...), at most 1, 0 for uniform attention to the visible keys.
        past_locality: (...), 0 to 1.
        mean_distance: (...), in tokens.
        direction_balance: (...), -1 (past) to 1 (future).
        entropy: (...), 0 to 1, relative to uniform attention to the visible keys.
        sink_rate: (...), 0 to 1, the attention to the first token.
        monotonicity: (..., 2), past and future, each 0 to 1; without gradients.
        distance_profile: (..., 2n - 1), the past first.

    Examples:
        >>> import torch
        >>> n = 1_000_000
        >>> k = torch.arange(-(n - 1), n, dtype=torch.float64)
        >>> found = measure_relative(-0.05 * k.abs())
        >>> found.mean_distance, found.half_life(), found.window(0.9)
        (tensor(19.9912, dtype=torch.float64), tensor(13.8629, dtype=torch.float64), tensor(46., dtype=torch.float64))
    """

    adjusted_locality: Tensor
    past_locality: Tensor
    mean_distance: Tensor
    direction_balance: Tensor
    entropy: Tensor
    sink_rate: Tensor
    monotonicity: Tensor = field(compare=False)
    distance_profile: Tensor = field(compare=False, repr=False)

    def window(self, share: float = 0.9) -> Tensor:
        """Return the half-width of the window that holds a share of the attention, (...), as `window` does."""
        profile = self.distance_profile.detach()
        return window_of_profile(on_float64_device(profile).double(), share).to(profile)

    def half_life(self, *, side: Side = "both") -> Tensor:
        """Return the distance over which the attention halves, (...), as `half_life` does."""
        profile = self.distance_profile
        return half_life_of_profile(on_float64_device(profile).double(), side, profile.dtype).to(profile)

    @property
    def profile_asymmetry(self) -> Tensor:
        """(..., n - 1), between -1 and 1, as `profile_asymmetry`."""
        return asymmetry_of_profile(self.distance_profile)


def measure_relative(bias: Tensor | np.ndarray, *, rtol: float | None = None) -> RelativeMeasurement:
    """Measure a relative encoding from its bias at every distance, in O(n).

        A_ij = softmax_j b[j - i],  j = 0..n-1

    The values are those of the metrics on A, up to rounding, without the matrix. Sums over keys become cumulative sums
    over distance, and sums over queries cumulative sums of 1 / normaliser.

    Args:
        bias: b[k] for k = -(n-1)..n-1, the past first, (..., 2n - 1), as ``encoding.relative(n)`` returns. A masked
            distance is -inf. A causal bias is -inf at every k > 0.
        rtol: As for `symmetry`. None: the tolerance of the bias's dtype.

    Returns:
        A frozen result with ``.locality``, ``.symmetry``, ``.relative_asymmetry`` and the complementary metrics of
        `RelativeMeasurement`, each (...), computed in float64, on the same device; differentiable.

    Raises:
        TypeError: Not a float tensor or array.
        ValueError: A negative rtol, an even number of distances, NaN or +inf, a query whose keys are all masked, or
            a bias that grows with distance beyond the range of float64.

    Warns:
        UserWarning: A bias is one-sided (causal). Its symmetry is meaningless, and its relative asymmetry is 1.

    Note:
        ``bias[..., s:-s]`` has the values of the metrics with ``without_first=s``. Do not pass the n x n matrix that an
        encoding returns when called. At odd n this is not detected, and the rows are read as n heads.

    Examples:
        >>> import torch
        >>> n = 131_072
        >>> k = torch.arange(-(n - 1), n, dtype=torch.float64)
        >>> measure_relative(-0.5 * k.abs()).locality
        tensor(0.4581, dtype=torch.float64)
    """
    numbers = float_tensor("bias", bias)
    if numbers.ndim == 0 or numbers.shape[-1] % 2 == 0:
        raise ValueError(f"bias must be (..., 2n - 1), as relative(n) of an encoding, got shape {tuple(numbers.shape)}")
    if not bool((numbers < torch.inf).all()):
        raise ValueError("bias contains NaN or +inf; use -inf where a distance is masked")
    tolerance = Tolerance.for_dtype(numbers.dtype, rtol)
    batch, distances = numbers.shape[:-1], numbers.shape[-1]
    heads = on_float64_device(numbers).reshape(math.prod(batch), distances).to(torch.float64)
    # in the working memory of one long head, or of several short ones
    parts = [_measure_biases(part, tolerance) for part in torch.split(heads, max(1, _PART // distances))]
    dtype = torch.promote_types(numbers.dtype, torch.float32)
    fields = (torch.cat(values).to(numbers.device, dtype) for values in zip(*parts, strict=True))
    masked = numbers == -torch.inf
    past, future = masked[..., : distances // 2].all(-1), masked[..., distances // 2 + 1 :].all(-1)
    if distances > 3 and bool((past ^ future).any()):
        warn_of_one_sided()
    return RelativeMeasurement(*(values.reshape((*batch, *values.shape[1:])) for values in fields))


def _measure_biases(bias: Tensor, tolerance: Tolerance) -> tuple[Tensor, ...]:
    """Return the fields of `RelativeMeasurement`, each (heads, ...), of biases (heads, 2n - 1)."""
    n = (bias.shape[-1] + 1) // 2
    _check_range(bias.detach(), n)
    k = torch.arange(1 - n, n, device=bias.device, dtype=bias.dtype)
    distance, decay = k.abs(), torch.exp2(-k.abs())
    bias = bias - bias.detach().amax(-1, keepdim=True)
    weight, visible = bias.exp(), (bias > -torch.inf).to(bias.dtype)
    normaliser, support = row_sums(weight), row_sums(visible)
    local = row_sums(weight * decay) / normaliser
    pooled = pool_sums(n, (local.sum(-1), *_pair_sums(weight, normaliser, tolerance)))
    past = torch.where(k < 0, weight, 0)
    mass = row_sums(past)
    past_local = masked_mean(ratio(2 * row_sums(past * decay), mass), mass > 0)
    logits = torch.where(weight > 0, bias, 0)  # 0 * -inf is NaN
    nats = normaliser.log() - row_sums(weight * logits) / normaliser
    diagonal = weight * _rows_by_distance(1 / normaliser)  # sum of A_ij over j - i = k
    left, right = diagonal[:, : n - 1].sum(-1), diagonal[:, n:].sum(-1)
    first = weight[:, : n - 1].flip(-1) / normaliser[:, 1:]  # A_i0, i = 1..n-1
    return (
        *pooled,
        excess_locality(local, row_sums(visible * decay) / support, support),
        past_local,
        (diagonal * distance).sum(-1) / n,
        ratio(right - left, left + right),
        masked_mean(*normalised_entropy(nats.clamp(min=0), support)),
        first.mean(-1),
        torch.stack([_falling_share(weight[:, :n].flip(-1)), _falling_share(weight[:, n - 1 :])], -1),
        diagonal / (n - distance),
    )


def _rows_by_distance(values: Tensor) -> Tensor:
    """Return the sum of one value per row over the rows with a key at distance k, (heads, n) -> (heads, 2n - 1)."""
    past, future = values.flip(-1).cumsum(-1), values.cumsum(-1).flip(-1)  # rows -k..n-1 and 0..n-1-k
    return torch.cat([past[:, :-1], future], -1)


def _falling_share(weight: Tensor) -> Tensor:
    """Return one side of `monotonicity`, (heads,), from the weights e^b[k] at distances 0..n-1."""
    nearer, farther = weight.detach()[:, :-1], weight.detach()[:, 1:]
    rows = torch.arange(nearer.shape[-1], 0, -1, device=weight.device, dtype=weight.dtype)  # with both distances
    share = torch.where(nearer >= farther, rows, 0).sum(-1) / rows.sum().clamp(min=1)
    return torch.where((farther > 0).any(-1), share, torch.nan)


def _pair_sums(weight: Tensor, normaliser: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor, Tensor]:
    """Return irregularity, difference and paired of `RowStatistics`, summed over rows, each (heads,)."""
    n = normaliser.shape[-1]
    left, right = weight[:, : n - 1].flip(-1), weight[:, n:]  # e^b[-k] and e^b[k], k = 1..n-1
    d = (left - right).abs()  # d_k, times each row's normaliser
    low, high = d.cummin(-1).values, d.cummax(-1).values
    spread = high - low
    # sum_k (d_k - min d) over the first m, from non-negative terms: each further pair adds d_k - min d, and where it
    # lowers the minimum, the terms of all pairs before it grow by as much
    drop = pad(low[:, :-1] - low[:, 1:], (1, 0))[:, : n - 1]
    excess = (d - low + torch.arange(n - 1, device=d.device) * drop).cumsum(-1)
    largest = torch.maximum(left, right).cummax(-1).values
    smallest = torch.minimum(left, right).cummin(-1).values
    i = torch.arange(n, device=d.device)
    m = torch.minimum(i, i.flip(0))[1:-1] - 1  # index of the last pair of every row with pairs
    normaliser = normaliser[:, 1:-1]
    irregularity = tolerance.irregularity(
        excess[:, m], spread[:, m], largest[:, m], smallest[:, m], ABSOLUTE_FLOOR * normaliser
    )
    difference, paired = (sums.cumsum(-1)[:, m] / normaliser for sums in (d, left + right))
    return irregularity.sum(-1), difference.sum(-1), paired.sum(-1)


def _check_range(bias: Tensor, n: int) -> None:
    """Raise ValueError if a row has no visible key or its largest bias is too far below that of another row."""
    past = pad(bias[:, : n - 1].flip(-1).cummax(-1).values, (1, 0), value=-torch.inf)
    largest = torch.maximum(past, bias[:, n - 1 :].cummax(-1).values.flip(-1))  # the largest bias of each row
    if bool((largest == -torch.inf).any()):
        raise ValueError("bias masks every key of some query; leave at least one distance visible from every position")
    if bool((largest.amax(-1) - largest.amin(-1) > _RANGE).any()):
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
    q, k = (each.reshape(-1, n, each.shape[-1]) for each in (queries, keys))
    sums = queries.new_zeros(4, len(q), dtype=torch.float64)
    with torch.no_grad():
        for first in range(0, n, _HEIGHT):
            statistics = row_statistics(softmax_weights(q[:, first : first + _HEIGHT], k), tolerance, first=first)
            sums += statistics.numbers[1:5].sum(-1, dtype=torch.float64)
    values = pool_sums(n, sums)
    return Measurement(*(value.to(projected[0]).reshape(queries.shape[:-2]) for value in values))
