"""What the metrics sum over rows and distances: on a line of tokens, or by the `Positions` of queries and keys."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pelocality._toeplitz import diagonal_sums
from pelocality.metrics._inputs import Matrices, validated_weights
from pelocality.metrics._masks import check_hidden_keys, is_causal
from pelocality.metrics._ratio import ratio
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
    compared = [_compare(weights[:, rows], positions, rows, tolerance) for rows in row_blocks(weights)]
    *sums, numbers = (torch.cat(each, -1) for each in zip(*compared, strict=True))
    return RowStatistics(torch.stack([faults, locality, *sums, *_sides(matrices)]), numbers)


def _compare(
    weights: Tensor, positions: Positions, rows: slice, tolerance: Tolerance
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return irregularity, difference, paired mass and number of pairs of rows, from the mean weight of each place."""
    opposite, tolerance = positions.opposites(rows, weights.device), tolerance.of_rows(weights)  # (rows, places)
    if not positions.has_own_places:
        places = positions.places.to(weights.device)
        here = weights.new_zeros(*weights.shape[:-1], opposite.shape[1])
        weights = here.scatter_add(-1, places.expand(weights.shape), weights) / places.bincount()
    first = opposite > torch.arange(opposite.shape[1], device=weights.device)  # each pair once
    numbers = first.sum(-1)
    query, place = first.nonzero(as_tuple=True)
    column = torch.arange(len(query), device=weights.device) - (numbers.cumsum(0) - numbers)[query]
    exists = torch.arange(max(1, int(numbers.max())), device=weights.device) < numbers[:, None]

    def weights_of(chosen: Tensor) -> Tensor:
        by_query = torch.zeros_like(exists, dtype=torch.int64)
        by_query[query, column] = chosen
        return torch.where(exists, weights.gather(-1, by_query.expand(len(weights), -1, -1)), 0)

    left, right = weights_of(place), weights_of(opposite[query, place])
    return *compare_pairs(left, right, exists, tolerance), numbers


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
    dtype = torch.promote_types(matrices.weights.dtype, torch.float32)
    if matrices.positions is None:
        return offsets(matrices, rows).abs().to(dtype)
    return at_steps(matrices, matrices.positions.step_distance, rows).to(dtype)


def offsets(matrices: Matrices, rows: slice) -> Tensor:
    """Return the signed distance of these queries and every key, (rows, n), below 0 for keys before the query."""
    if matrices.positions is not None:
        return at_steps(matrices, matrices.positions.step_offset, rows)
    i = torch.arange(matrices.weights.shape[-1], device=matrices.weights.device)
    return i - i[rows, None]


def at_steps(matrices: Matrices, table: NDArray[Any], rows: slice) -> Tensor:
    """Return what a table (t + 1,) has for the step from each of these queries to each key, (rows, n)."""
    assert matrices.positions is not None
    numbers = matrices.positions.steps(rows, matrices.weights.device)
    return as_tensor(table).to(numbers.device).index_select(0, numbers.flatten()).reshape(numbers.shape)


def profile(matrices: Matrices) -> Tensor:
    """Return the mean attention at each distance, as `distance_profile` names it, in float64."""
    positions, weights = matrices.positions, weights_by_position(matrices)
    if positions is None:
        return mean_by(matrices, None, weights)
    return mean_by(matrices, positions.step_profile, weights, len(positions.profile_distances))


def ring_means(matrices: Matrices, side: str = "both") -> tuple[Tensor, Tensor]:
    """Return the mean attention at each unsigned distance of one or both sides, (batch, r), and the distances (r,)."""
    assert matrices.positions is not None
    radius, ring = matrices.positions.rings
    if side != "both":
        offset = matrices.positions.step_offset
        ring = np.where(offset < 0 if side == "past" else (offset > 0) & np.isfinite(offset), ring, -1)
    means = mean_by(matrices, ring, weights_by_position(matrices), len(radius))
    return means, as_tensor(radius).to(means.device)


def rows_by_ring(matrices: Matrices, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the ring of each key around these queries, (rows, n), 0 for an infinite distance, and the radii (r,)."""
    device = matrices.weights.device
    if matrices.positions is None:
        return offsets(matrices, rows).abs(), torch.arange(matrices.weights.shape[-1], device=device)
    radius, ring = matrices.positions.rings
    return at_steps(matrices, ring.clip(min=0), rows), as_tensor(radius).to(device)


def mean_by(matrices: Matrices, group: NDArray[Any] | None, weights: Tensor, groups: int | None = None) -> Tensor:
    """Return the mean weight of each group of steps, (batch, groups), float64, NaN for an empty one.

    Args:
        matrices: Whose positions have the steps.
        group: The group of each step, (t + 1,), -1 for none; None: on a line, each diagonal.
        weights: (batch, m, n).
        groups: The number of groups; None: as many as there are.
    """
    if group is None:
        n = weights.shape[-1]
        numbers = n - torch.arange(1 - n, n, device=weights.device).abs()
        return diagonal_sums(weights, torch.float64) / numbers
    assert matrices.positions is not None
    sums = sum_by(matrices, group, lambda rows: weights[:, rows], groups)
    pairs = np.zeros(sums.shape[-1] + 1, np.int64)
    np.add.at(pairs, group, matrices.positions.step_count)  # the last are those of no group
    return ratio(sums, as_tensor(pairs[:-1]).to(weights.device), torch.nan)


def sum_by(
    matrices: Matrices, group: NDArray[Any] | None, values: Callable[[slice], Tensor], groups: int | None = None
) -> Tensor:
    """Return the sum over each group of steps, (batch, groups), float64.

    Args:
        matrices: As for `mean_by`.
        group: As for `mean_by`.
        values: What is summed, (batch, rows, n), of some queries.
        groups: As for `mean_by`.
    """
    blocks = row_blocks(matrices.weights)
    if group is None:
        n = matrices.weights.shape[-1]
        parts = [(rows, diagonal_sums(values(rows), torch.float64)) for rows in blocks]
        return torch.stack([pad(part, (n - rows.stop, rows.start)) for rows, part in parts]).sum(0)
    groups = int(group.max()) + 1 if groups is None else groups
    group, sums = np.where(group >= 0, group, groups), None
    for rows in blocks:
        part = values(rows).flatten(1).double()
        sums = part.new_zeros(len(part), groups + 1) if sums is None else sums
        sums.scatter_add_(-1, at_steps(matrices, group, rows).flatten().expand(part.shape), part)
    assert sums is not None
    return sums[:, :groups]


def of_each_key(matrices: Matrices, group: NDArray[Any] | None, values: Tensor, rows: slice) -> Tensor:
    """Return the number of each group, (batch, groups), where its queries and keys are, (batch, rows, n)."""
    if group is None:
        n = matrices.weights.shape[-1]
        return values.unfold(-1, n, 1)[:, n - rows.stop : n - rows.start].flip(1)
    numbers = at_steps(matrices, group.clip(min=0), rows)
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
