"""What the metrics sum over rows and distances: on a line of tokens, or by the `Positions` of queries and keys."""

from functools import partial

import torch
from torch import Tensor

from pelocality._toeplitz import diagonal_sums
from pelocality.metrics._inputs import Matrices, validated_weights
from pelocality.metrics._masks import check_hidden_keys, is_causal
from pelocality.metrics._ratio import ratio
from pelocality.metrics._row_pass import RowStatistics, compare_pairs, row_statistics
from pelocality.metrics._tolerance import Tolerance, check_rows, row_faults
from pelocality.positions import Positions


def row_sums(matrices: Matrices, tolerance: Tolerance | None = None, *, pairs: bool = True) -> RowStatistics:
    """Return the sums over every row of weights, which are validated at the end; ``pairs`` compares opposite keys."""
    positions, flat = matrices.positions, matrices.weights
    if positions is None:
        statistics = row_statistics(flat, tolerance, pairs=pairs)
        if flat.numel():
            matrices.readings.add(statistics.faults.flatten(1).amax(1), partial(check_rows, weights=flat))
        return statistics
    weights = weights_by_position(matrices)
    sums = [(weights * torch.exp2(-distances(matrices))).sum(-1)]
    if not pairs:
        return RowStatistics(row_faults(weights), torch.stack(sums))
    sums += _compare(weights, positions, tolerance or Tolerance.for_dtype(matrices.precision))
    return RowStatistics(
        row_faults(weights), torch.stack(sums), _sides(matrices), positions.pairs.exists.sum(-1).to(weights.device)
    )


def _compare(weights: Tensor, positions: Positions, tolerance: Tolerance) -> tuple[Tensor, Tensor, Tensor]:
    """Return irregularity, difference and paired mass of every row, from the mean weight of each place."""
    left, right, exists, places = (each.to(weights.device) for each in (*positions.pairs, positions.places))
    here = torch.zeros_like(weights[..., : int(places.max()) + 1]).index_add(-1, places, weights)
    here = here / places.bincount()
    left, right = (torch.where(exists, here.gather(-1, side.expand(*here.shape[:-1], -1)), 0) for side in (left, right))
    return compare_pairs(left, right, exists, tolerance.of_rows(weights))


def _sides(matrices: Matrices) -> Tensor:
    """Return the weight on earlier and on later keys, (2, batch, m); 1 on earlier ones where no order is known."""
    weights, later = matrices.weights.detach(), later_keys(matrices)
    if later is None:
        return torch.ones_like(weights[..., 0]).expand(2, -1, -1)
    behind = (weights * later).sum(-1)
    return torch.stack([(weights * later.mT).sum(-1) if later.shape[0] == later.shape[1] else behind + 1, behind])


def weights_by_position(matrices: Matrices) -> Tensor:
    """Return validated weights, after checking that packed sequences do not attend to each other."""
    weights = validated_weights(matrices.weights)
    if matrices.positions is not None and bool(matrices.positions.distance.isinf().any()):
        reached = matrices.positions.distance.isfinite().to(weights.device)
        check_hidden_keys(weights, reached, "positions", "keys at an infinite distance get no attention")
    return weights


def distances(matrices: Matrices) -> Tensor:
    """Return the distance of every query and key, (m, n), in the precision of the sums."""
    distance = offsets(matrices).abs() if matrices.positions is None else matrices.positions.distance
    dtype = torch.promote_types(matrices.weights.dtype, torch.float32)
    return distance.to(dtype).to(matrices.weights.device)


def offsets(matrices: Matrices) -> Tensor:
    """Return the signed distance of every query and key, (m, n), below 0 for keys before the query."""
    if matrices.positions is not None:
        return matrices.positions.offset.to(matrices.weights.device)
    i = torch.arange(matrices.weights.shape[-1], device=matrices.weights.device)
    return i - i[:, None]


def profile(matrices: Matrices) -> Tensor:
    """Return the mean attention at each distance, as `distance_profile` names it, in float64."""
    weights = weights_by_position(matrices)
    if matrices.positions is None:
        n = weights.shape[-1]
        return diagonal_sums(weights, torch.float64) / (n - torch.arange(1 - n, n, device=weights.device).abs())
    return mean_by(matrices.positions.profile_index, len(matrices.positions.profile_distances), weights)


def ring_means(matrices: Matrices, side: str = "both") -> tuple[Tensor, Tensor]:
    """Return the mean attention at each unsigned distance of one or both sides, (batch, r), and the distances (r,)."""
    assert matrices.positions is not None
    radius, ring = matrices.positions.rings
    if side != "both":
        offset = matrices.positions.offset
        ring = torch.where(offset < 0 if side == "past" else (offset > 0) & offset.isfinite(), ring, -1)
    return mean_by(ring, len(radius), weights_by_position(matrices)), radius.to(matrices.weights.device)


def mass_by_ring(matrices: Matrices, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Return the attention by unsigned distance, (batch, r) or of each query (batch, m, r), and the distances.

    Both are float64.
    """
    weights = weights_by_position(matrices).double()
    if matrices.positions is None:
        radius, ring = torch.arange(weights.shape[-1], device=weights.device), offsets(matrices).abs()
    else:
        radius, ring = (each.to(weights.device) for each in matrices.positions.rings)
    if not rows:
        return _sum_by(ring, len(radius), weights), radius.double()
    by_ring = weights.new_zeros(*weights.shape[:-1], len(radius))
    return by_ring.scatter_add(-1, ring.clamp(min=0).expand(weights.shape), weights), radius.double()


def mean_by(group: Tensor, groups: int, weights: Tensor) -> Tensor:
    """Return the mean weight of each group of queries and keys, (batch, groups), float64, NaN for an empty one."""
    group = group.to(weights.device)
    return ratio(_sum_by(group, groups, weights), _sum_by(group, groups, (group >= 0)[None]), torch.nan)


def _sum_by(group: Tensor, groups: int, weights: Tensor) -> Tensor:
    """Return the sum over each group of queries and keys, (batch, groups), float64.

    Those of group -1, at an infinite distance, are added to group 0: they have no weight.
    """
    sums = torch.zeros(len(weights), groups, dtype=torch.float64, device=weights.device)
    return sums.index_add(1, group.flatten().clamp(min=0), weights.flatten(1).double())


def past_and_future(matrices: Matrices) -> tuple[Tensor, Tensor]:
    """Return which keys lie before and behind each query, boolean (m, n) each."""
    offset = offsets(matrices)
    return offset < 0, offset > 0


def later_keys(matrices: Matrices) -> Tensor | None:
    """Return which keys come after each query, boolean (m, n); None where no order is known."""
    weights = matrices.weights
    if matrices.positions is not None:
        later = matrices.positions.later
        return None if later is None else later.to(weights.device)
    square = weights.shape[-2] == weights.shape[-1]
    return torch.ones(weights.shape[1:], dtype=torch.bool, device=weights.device).triu(1) if square else None


def past_only(matrices: Matrices) -> Tensor:
    """Return which matrices have no weight on later keys, (batch,), as the caller says or as their weights show.

    Raises:
        ValueError: ``causal=True``, and a query has weight on a later key, or which keys are later is not known.
    """
    weights, later = matrices.weights.detach(), later_keys(matrices)
    if matrices.causal and later is None:
        raise ValueError("causal=True needs to know which keys come later; give positions= with one coordinate")
    if matrices.causal and later is not None:
        check_hidden_keys(weights, ~later, "causal=True", "leave causal out")
    if matrices.causal is not None or later is None:
        return weights.new_full(weights.shape[:1], bool(matrices.causal), dtype=torch.bool)
    causal = is_causal(weights, later)
    if matrices.inferred is not None and bool(later.any()):  # a single position is neither
        matrices.inferred.append(causal)
    return causal


def seen_keys(matrices: Matrices) -> Tensor:
    """Return which keys each query sees, boolean (batch, m, n): as given, or as `past_only` finds.

    Keys at an infinite distance are never seen.
    """
    weights, positions = matrices.weights, matrices.positions
    if matrices.visible is not None:
        check_hidden_keys(weights, matrices.visible)
        seen = matrices.visible
    else:
        seen, later, causal = torch.ones_like(weights, dtype=torch.bool), later_keys(matrices), past_only(matrices)
        if later is not None:
            seen &= ~(causal[:, None, None] & later)
    return seen if positions is None else seen & positions.distance.isfinite().to(weights.device)


def visible_counts(matrices: Matrices) -> Tensor:
    """Return the number of keys that each query sees, (batch, m), in float64; see `seen_keys`."""
    flat = matrices.weights
    *_, m, n = flat.shape
    if matrices.visible is not None or matrices.positions is not None or m != n:
        return seen_keys(matrices).sum(-1, dtype=torch.float64)
    position = torch.arange(1, n + 1, device=flat.device, dtype=torch.float64)
    return torch.where(past_only(matrices)[:, None], position, float(n))
