"""What the metrics sum over rows and distances: on a line of tokens, or by the `Positions` of queries and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pelocality._toeplitz import diagonal_sums
from pelocality.metrics._inputs import Matrices, validated_weights
from pelocality.metrics._masks import check_hidden_keys, is_causal
from pelocality.metrics._row_pass import RowStatistics, compare_pairs, row_blocks, row_statistics
from pelocality.metrics._tolerance import Tolerance, check_rows
from pelocality.positions import Positions, as_tensor


def row_sums(matrices: Matrices, tolerance: Tolerance | None = None, *, pairs: bool = True) -> RowStatistics:
    """Return the sums over every row of weights, which are validated; ``pairs`` compares opposite keys."""
    positions, flat = matrices.positions, matrices.weights
    if positions is None:
        statistics = row_statistics(flat, tolerance, pairs=pairs)
        if bool(statistics.totals[0].any()):
            check_rows(statistics.numbers[0], flat)
        return statistics
    weights = weights_by_position(matrices)
    locality = sum_over_keys(weights, lambda rows: torch.exp2(-distances(matrices, rows)))
    faults = torch.zeros_like(locality)
    if not pairs:
        return RowStatistics(torch.stack([faults, locality]))
    tolerance = tolerance or matrices.tolerance()
    compared = [_compare_places(weights[:, rows], positions, rows, tolerance) for rows in row_blocks(weights)]
    *sums, numbers = (torch.cat(each, -1) for each in zip(*compared, strict=True))
    return RowStatistics(torch.stack([faults, locality, *sums, *_sides(matrices)]), numbers)


def _compare_places(
    weights: Tensor, positions: Positions, rows: slice, tolerance: Tolerance
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return irregularity, difference, paired mass and number of pairs of rows, from the mean weight of each place."""
    pairs, tolerance = positions.pairs(rows, weights.device), tolerance.of_rows(weights)
    if not positions.has_own_places:
        place = as_tensor(positions.places).to(weights.device)
        here = weights.new_zeros(*weights.shape[:-1], int(place.max()) + 1)
        weights = here.scatter_add(-1, place.expand(weights.shape), weights) / place.bincount()
    numbers = (pairs[:, 0] >= 0).sum(-1)
    left, right = pairs[..., : max(1, int(numbers.max()))].long().unbind(1)  # (rows, pairs)
    exists = left >= 0
    places = torch.stack([left, right]).clamp(min=0)[:, None].expand(-1, len(weights), -1, -1)
    at_left, at_right = (torch.where(exists, weights.gather(-1, each), 0) for each in places)
    return *compare_pairs(at_left, at_right, exists, tolerance), numbers


def _sides(matrices: Matrices) -> Tensor:
    """Return the weight on earlier and on later keys, (2, batch, m); above 0 on earlier ones where none is known."""
    weights, positions = matrices.weights.detach(), matrices.positions
    if later_keys(matrices, slice(1)) is None:
        return torch.ones_like(weights[..., 0]).expand(2, -1, -1)
    later = sum_over_keys(weights, lambda rows: later_keys(matrices, rows))
    if positions is not None and positions.queries is not None:
        return torch.stack([later + 1, later])
    i = torch.arange(weights.shape[-1], device=weights.device)
    return torch.stack([sum_over_keys(weights, lambda rows: i < i[rows, None]), later])


def sum_over_keys(weights: Tensor, factor: Callable[[slice], Any]) -> Tensor:
    """Return sum_j A_ij f_ij, (batch, m), with the factor of some queries and all keys, (rows, n)."""
    return torch.cat([(weights[:, rows] * factor(rows)).sum(-1) for rows in row_blocks(weights)], -1)


def weights_by_position(matrices: Matrices) -> Tensor:
    """Return validated weights, after checking that packed sequences do not attend to each other."""
    weights = validated_weights(matrices.weights)
    if matrices.positions is not None and matrices.positions.has_infinite:
        for rows in row_blocks(weights):
            reached = distances(matrices, rows).isfinite()
            check_hidden_keys(weights[:, rows], reached, "positions", "keys at an infinite distance get no attention")
    return weights


def distances(matrices: Matrices, rows: slice) -> Tensor:
    """Return the distance of these queries and every key, (rows, n), in the precision of the sums."""
    weights, positions = matrices.weights, matrices.positions
    apart = offsets(matrices, rows).abs() if positions is None else positions.distances_of(rows, weights.device)
    return apart.to(torch.promote_types(weights.dtype, torch.float32))


def offsets(matrices: Matrices, rows: slice) -> Tensor:
    """Return the signed distance of these queries and every key, (rows, n), below 0 for keys before the query."""
    if matrices.positions is not None:
        return matrices.positions.offsets_of(rows, matrices.weights.device)
    i = torch.arange(matrices.weights.shape[-1], device=matrices.weights.device)
    return i - i[rows, None]


def profile(matrices: Matrices) -> Tensor:
    """Return the mean attention at each distance, as `distance_profile` names it, in float64."""
    sums, counts = _sums_by_step(matrices)
    return sums / counts  # NaN where no pair is left


def radii(matrices: Matrices) -> Tensor:
    """Return the unsigned distances that occur, from 0 on, (r,)."""
    positions, weights = matrices.positions, matrices.weights
    if positions is None:
        return torch.arange(weights.shape[-1], device=weights.device, dtype=torch.float64)
    return positions.profile_distances[positions.here :].to(weights.device)


def sums_by_ring(matrices: Matrices, side: str = "both") -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention at each unsigned distance of one or both sides, its pairs of tokens, and the distances.

    Returns:
        (batch, r) and (r,) in float64, and (r,).
    """
    radius, (sums, counts) = radii(matrices), _sums_by_step(matrices)
    if side != "both":
        offsets(matrices, slice(0))  # refuses positions without directions
    here = len(counts) - len(radius)
    ring = (torch.arange(len(counts), device=sums.device) - here).abs()
    chosen = {"both": slice(None), "past": slice(here), "future": slice(here + 1, None)}[side]
    held, pairs = (
        each.new_zeros(*each.shape[:-1], len(radius)).index_add(-1, ring[chosen], each[..., chosen])
        for each in (sums, counts)
    )
    return held, pairs, radius


def _sums_by_step(matrices: Matrices) -> tuple[Tensor, Tensor]:
    """Return the attention at each signed distance, (batch, t), and the number of its pairs, (t,), in float64."""
    positions, weights = matrices.positions, weights_by_position(matrices)
    if positions is None:
        n = weights.shape[-1]
        return diagonal_sums(weights, torch.float64), n - torch.arange(1 - n, n, device=weights.device).abs().double()
    group = partial(positions.steps, device=weights.device)
    sums = sum_by(matrices, group, lambda rows: weights[:, rows], len(positions.step_count))
    return sums, as_tensor(positions.step_count).to(weights.device, torch.float64)


def sum_by(
    matrices: Matrices, group: Callable[[slice], Tensor] | None, values: Callable[[slice], Tensor], groups: int = 0
) -> Tensor:
    """Return the sum over each group of queries and keys, (batch, groups), float64.

    Args:
        matrices: Of which the rows are.
        group: The group of some queries and each key, (rows, n), their number for none. None: on a line, each diagonal.
        values: What is summed, (batch, rows, n), of some queries.
        groups: The number of groups.
    """
    blocks = row_blocks(matrices.weights)
    if group is None:
        n = matrices.weights.shape[-1]
        parts = [(rows, diagonal_sums(values(rows), torch.float64)) for rows in blocks]
        return torch.stack([pad(part, (n - rows.stop, rows.start)) for rows, part in parts]).sum(0)
    sums = None
    for rows in blocks:
        part = values(rows).flatten(1).double()
        sums = part.new_zeros(len(part), groups + 1) if sums is None else sums
        sums.scatter_add_(-1, group(rows).long().flatten().expand(part.shape), part)
    assert sums is not None
    return sums[:, :groups]


def of_each_key(matrices: Matrices, group: Callable[[slice], Tensor] | None, values: Tensor, rows: slice) -> Tensor:
    """Return the number of each group, (batch, groups), where its queries and keys are, (batch, rows, n)."""
    if group is None:
        n = matrices.weights.shape[-1]
        return values.unfold(-1, n, 1)[:, n - rows.stop : n - rows.start].flip(1)
    numbers = group(rows).clamp(max=values.shape[-1] - 1)
    return values.index_select(1, numbers.flatten()).reshape(len(values), *numbers.shape)


def later_keys(matrices: Matrices, rows: slice = slice(None)) -> Tensor | None:
    """Return which keys come after these queries, boolean (rows, n); None where no order is known."""
    weights = matrices.weights
    if matrices.positions is not None:
        return matrices.positions.later(rows, weights.device)
    square = weights.shape[-2] == weights.shape[-1]
    return offsets(matrices, rows) > 0 if square else None


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


def seen_keys(matrices: Matrices) -> Callable[[slice], Tensor]:
    """Return a function of queries which says what keys they see, boolean (batch or 1, rows, n).

    These are the visible keys as the caller says or as `past_only` finds, without those at an infinite distance.
    """
    *_, m, n = matrices.weights.shape
    causal = None if matrices.visible is not None else past_only(matrices)
    some = causal is not None and bool(causal.any())
    if matrices.visible is not None:
        check_hidden_keys(matrices.weights, matrices.visible)

    def seen(rows: slice) -> Tensor:
        if matrices.visible is not None:
            visible = matrices.visible[:, rows]
        else:
            assert causal is not None
            hidden = later_keys(matrices, rows)
            shown = torch.ones(1, len(range(*rows.indices(m))), n, dtype=torch.bool, device=matrices.weights.device)
            visible = shown if hidden is None or not some else ~(causal[:, None, None] & hidden)
        if matrices.positions is None or not matrices.positions.has_infinite:
            return visible
        return visible & distances(matrices, rows).isfinite()

    return seen


def visible_counts(matrices: Matrices) -> Tensor:
    """Return the number of keys that each query sees, (batch, m), in float64; see `seen_keys`."""
    *_, m, n = matrices.weights.shape
    if matrices.visible is None and matrices.positions is None and m == n:
        position = torch.arange(1, n + 1, device=matrices.weights.device, dtype=torch.float64)
        return torch.where(past_only(matrices)[:, None], position, float(n))
    seen = seen_keys(matrices)
    counts = [seen(rows).sum(-1, dtype=torch.float64) for rows in row_blocks(matrices.weights)]
    return torch.cat(counts, -1)
