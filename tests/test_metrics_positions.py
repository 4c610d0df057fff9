"""Metrics by positions that are no line: against the line, closed forms, and loops written from the equations."""

import copy
import inspect
import itertools
import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pelocality import MeanAttention, Positions, measure, metrics
from tests.names import METRICS
from tests.test_metrics import causal_attention, random_attention

BY_POSITION = [name for name in METRICS if "positions" in inspect.signature(getattr(metrics, name)).parameters]
DIRECTED = {"direction_balance", "past_locality", "profile_asymmetry", "diagonality"}


def values(name, attention, **options):
    found = getattr(metrics, name)(attention, **options)
    return torch.stack(list(vars(found).values())) if name == "measure" else found


@pytest.mark.parametrize("name", BY_POSITION)
@pytest.mark.parametrize("attention", [random_attention(3, 17, 17), causal_attention(17, 17)], ids=["both", "causal"])
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_tokens_in_a_line_have_the_same_numbers_to_the_bit_and_by_position_to_rounding(name, attention):
    expected = values(name, attention)
    for line in (range(17), np.arange(17), torch.arange(5, 22)[:, None], Positions(torch.arange(17.0))):
        assert torch.equal(values(name, attention, positions=line).nan_to_num(7), expected.nan_to_num(7))
    by_position = Positions(range(17), ring=1.0)  # measured by the code for any positions
    assert not by_position.is_line
    torch.testing.assert_close(values(name, attention, positions=by_position), expected, equal_nan=True)
    halves = Positions(np.arange(17) / 2)
    assert not halves.is_line
    same = {"symmetry", "relative_asymmetry", "direction_balance", "entropy", "toeplitz_share", "monotonicity",
            "diagonality", "profile_asymmetry", "distance_profile"}  # fmt: skip
    if name in same:
        torch.testing.assert_close(values(name, attention, positions=halves), expected, equal_nan=True)
    if name in ("mean_distance", "window", "half_life"):  # in the unit of the positions
        torch.testing.assert_close(values(name, attention, positions=halves), expected / 2)


ISOTROPIC = {
    "line": Positions(range(30)),
    "times": Positions([0.0, 0.1, 0.2, 0.30000000000000004, 0.7, 1.1, 1.4000000000000001]),
    "plane": Positions.grid(8, 8),
    "oblong": Positions.grid(5, 9),
    "shifted thirds": Positions(Positions.grid(6, 6).keys / 3 - 0.77),
    "skewed": Positions(
        Positions.grid(6, 6).keys.double() @ torch.tensor([[1.0, 0.3], [0.2, 1.7]], dtype=torch.float64)
    ),
    "space": Positions.grid(4, 3, 5),
    "sentences": Positions([0, 0, 0, 1, 1, 2, 2, 2, 2, 3]),
    "packed": Positions.packed([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]),
    "single precision": Positions(torch.linspace(0, 1, 41)),
    "unix times": Positions(1.7e9 + 0.1 * np.arange(31)),
    "nanoseconds": Positions(1_700_000_000_000_000_000 + 1_000_000 * np.arange(21)),
    "grid with an offset": Positions(np.indices((4, 4, 4)).reshape(3, -1).T * 0.1 + 100.3),
    "grid of single precision": Positions((Positions.grid(5, 5).keys * 0.02).float() + 5),
    "hexagons": Positions([(a + 0.5 * (b % 2) + 0.7, b * 3**0.5 / 2 * 1e0 + 0.7) for b in range(7) for a in range(6)]),
    "rotated": Positions(Positions.grid(6, 6).keys.double() @ torch.tensor([[0.8, 0.6], [-0.6, 0.8]]).double()),
}


@pytest.mark.parametrize("positions", ISOTROPIC.values(), ids=ISOTROPIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_of_distance_is_symmetric(positions, dtype):
    unit = positions.distance[positions.distance > 0].min()
    attention = (-((positions.distance / unit) ** 1.3) / 2).to(dtype).softmax(-1)
    found = measure(attention, positions=positions)
    assert found.symmetry == 1
    assert found.relative_asymmetry < 4 * torch.finfo(dtype).eps
    assert (metrics.monotonicity(attention, positions=positions) == 1).all()


def test_a_shift_by_a_vector_is_explained_by_displacements_alone():
    side = 7
    torus = (
        torch.randn(side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64).flatten().softmax(0)
    )
    i = torch.arange(side**2)
    step = lambda a, b: (b // side - a // side) % side * side + (b - a) % side  # noqa: E731
    attention = torus[step(i[:, None], i)]
    torch.testing.assert_close(
        metrics.toeplitz_share(attention, positions=Positions.grid(side, side)), torch.ones((), dtype=torch.float64)
    )
    assert metrics.toeplitz_share(attention) < 0.99


# ---- loops written from the equations


def placed(given):
    """Return coordinates of queries and keys as lists of tuples."""
    keys = [tuple(map(float, row)) for row in given.keys.tolist()]
    return keys if given.queries is None else [tuple(map(float, row)) for row in given.queries.tolist()], keys


def loop(name, A, x, y):
    """Compute the equation of the docstring for queries at x and keys at y, element by element."""
    queries, keys = range(len(x)), range(len(y))
    D = [[math.dist(x[i], y[j]) for j in keys] for i in queries]
    mean = lambda given: sum(given) / len(given) if given else math.nan  # noqa: E731
    if name == "locality":
        return mean([sum(A[i][j] / 2 ** D[i][j] for j in keys) for i in queries])
    if name == "mean_distance":
        return mean([sum(A[i][j] * D[i][j] for j in keys) for i in queries])
    if name == "window":
        radii = sorted({round(d, 9) for row in D for d in row} | {0})
        held = [sum(A[i][j] for i in queries for j in keys if D[i][j] <= r + 1e-9) for r in radii]
        return next(r for r, mass in zip(radii, held, strict=True) if mass >= 0.9 * held[-1] - 1e-12)
    if name == "distance_profile":
        signed = len(x[0]) == 1
        radii = sorted({round(d, 9) for row in D for d in row} | {0.0})
        axis = sorted({s * r for r in radii for s in (1, -1)}) if signed else radii
        at = lambda i, j: y[j][0] - x[i][0] if signed else D[i][j]  # noqa: E731
        return [mean([A[i][j] for i in queries for j in keys if abs(at(i, j) - k) < 1e-8]) for k in axis]
    # pairs of places, by the mean weight of the keys at each
    pairs = []
    for i in queries:
        weight = {p: mean([A[i][j] for j in keys if y[j] == p]) for p in set(y)}
        middle = lambda p, q, i=i: all(abs(a + b - 2 * c) < 1e-8 for a, b, c in zip(p, q, x[i], strict=True))  # noqa: E731
        pairs.append([(weight[p], weight[q]) for p, q in itertools.combinations(weight, 2) if middle(p, q)])
    if name == "relative_asymmetry":
        every = [pair for row in pairs for pair in row]
        return sum(abs(a - b) for a, b in every) / sum(a + b for a, b in every)
    scaled = []
    for row in pairs:
        d = [abs(a - b) for a, b in row]
        if d:
            spread = max(d) - min(d)
            scaled += [(each - min(d)) / spread if spread > 1e-12 else 0.0 for each in d]
    return 1 - mean(scaled)


SCATTERED = {
    "grid": Positions.grid(4, 5),
    "space": Positions.grid(2, 3, 3),
    "times": Positions([0.0, 0.5, 0.75, 1.0, 1.5, 2.25, 2.5, 2.75, 4.0]),
    "sentences": Positions([0, 0, 1, 1, 1, 2, 3, 3]),
    "any order": Positions([[2.0, 1.0], [0, 0], [1, 1], [1, 0], [2, 2], [0, 2]]),
    "patches of other frames": Positions(Positions.grid(3, 4).keys, queries=[[1.0, 1.0], [0.5, 1.5], [2.0, 3.0]]),
    "last tokens": Positions(range(12), queries=range(9, 12)),
    "frames of words": Positions(np.arange(10) / 10, queries=[0.2, 0.45, 0.7]),
}


@pytest.mark.parametrize("positions", SCATTERED.values(), ids=SCATTERED)
@pytest.mark.parametrize(
    "name", ["locality", "symmetry", "relative_asymmetry", "mean_distance", "window", "distance_profile"]
)
def test_metrics_by_position_are_those_of_the_equations(name, positions):
    attention = random_attention(2, *positions.shape, seed=3)
    found = getattr(metrics, name)(attention, positions=positions)
    expected = [loop(name, each.tolist(), *placed(positions)) for each in attention]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), equal_nan=True)


def test_packed_sequences_are_measured_each_by_itself():
    lengths = (5, 9, 3, 1)
    parts = [random_attention(n, n, seed=n) for n in lengths]
    attention = torch.block_diag(*parts)
    packed = Positions.packed([i for n in lengths for i in range(n)])
    total = sum(lengths)
    for name in ("locality", "mean_distance"):
        alone = sum(n * getattr(metrics, name)(each) for n, each in zip(lengths, parts, strict=True)) / total
        torch.testing.assert_close(getattr(metrics, name)(attention, positions=packed), alone)
    pairs = [(n - 1) ** 2 // 4 for n in lengths]
    alone = sum(k * metrics.symmetry(each) for k, each in zip(pairs, parts, strict=True) if k) / sum(pairs)
    torch.testing.assert_close(metrics.symmetry(attention, positions=packed), alone)
    uniform = torch.block_diag(*(torch.full((n, n), 1 / n, dtype=torch.float64) for n in lengths))
    for name, value in (("adjusted_locality", 0.0), ("entropy", 1.0), ("toeplitz_share", 1.0)):
        measured = getattr(metrics, name)(uniform, positions=packed)
        if name != "toeplitz_share":  # rows of short sequences hold larger weights
            torch.testing.assert_close(measured, torch.tensor(value, dtype=torch.float64))
    for metric in (metrics.locality, metrics.entropy, metrics.distance_profile, metrics.mean_distance):
        with pytest.raises(ValueError, match=r"positions hides keys with attention: .* at an infinite distance"):
            metric(random_attention(total, total), positions=packed)
    with pytest.raises(ValueError, match="measure one sequence at a time"):
        metrics.diagonality(attention, positions=packed)
    with pytest.raises(ValueError, match="without_first is not for packed"):
        metrics.locality(attention, positions=packed, without_first=1)
    one = Positions.packed(range(9))
    torch.testing.assert_close(
        metrics.locality(parts[1], positions=one, without_first=1), metrics.locality(parts[1], without_first=1)
    )


def test_packed_causal_sequences_are_adjusted_for_their_own_past():
    lengths = (6, 10)
    parts = [torch.ones(n, n, dtype=torch.float64).tril() for n in lengths]
    uniform = torch.block_diag(*(each / each.sum(-1, keepdim=True) for each in parts))
    packed = Positions.packed([*range(6), *range(10)])
    assert abs(metrics.adjusted_locality(uniform, positions=packed)) < 1e-12
    torch.testing.assert_close(metrics.entropy(uniform, positions=packed), torch.tensor(1.0, dtype=torch.float64))
    assert metrics.direction_balance(uniform, positions=packed) == -1


def test_the_last_queries_of_a_causal_model_have_the_rows_of_the_whole():
    whole = causal_attention(3, 20, 20)
    last, positions = whole[:, 15:], Positions(range(20), queries=range(15, 20))
    for name in ("locality", "past_locality", "mean_distance", "window", "entropy"):
        rows = getattr(metrics, name)(whole, rows=True)[:, 15:]
        torch.testing.assert_close(getattr(metrics, name)(last, positions=positions, rows=True), rows)
    with pytest.warns(UserWarning, match="one-sided"):
        rows = metrics.symmetry(whole, rows=True)[:, 15:-1]
    torch.testing.assert_close(metrics.symmetry(last, positions=positions, rows=True)[:, :-1], rows)
    assert (metrics.direction_balance(last, positions=positions) == -1).all()
    lonely = metrics.adjusted_locality(whole[:, 19:], positions=Positions(range(20), queries=[19]))
    assert lonely.isfinite().all()


def test_half_life_of_an_exponential_kernel_is_exact_in_the_unit_of_the_positions():
    seconds = torch.arange(300, dtype=torch.float64) / 50
    attention = (-3.0 * (seconds - seconds[:, None]).abs()).softmax(-1)
    for side in ("both", "past", "future"):
        assert metrics.half_life(attention, side=side, positions=seconds) == pytest.approx(math.log(2) / 3, rel=0.01)
    grid = Positions.grid(24, 24)
    attention = (-grid.distance).softmax(-1)
    assert metrics.half_life(attention, positions=grid) == pytest.approx(math.log(2), rel=0.05)


def test_rings_of_a_width_hold_what_lies_between():
    seconds = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sort().values * 10
    attention = random_attention(40, 40)
    rings = Positions(seconds, ring=0.5)
    profile = metrics.distance_profile(attention, positions=rings)
    axis = rings.profile_distances
    assert axis.diff().allclose(torch.tensor(0.5, dtype=torch.float64))
    assert len(profile) == len(axis)
    offset = seconds - seconds[:, None]
    for k in (-3.0, 0.0, 2.5):
        expected = attention[(offset.abs() / 0.5 + 0.5).floor() * 0.5 * offset.sign() == k].mean()
        torch.testing.assert_close(profile[axis == k][0], expected)
    assert len(metrics.distance_profile(attention, positions=seconds)) == len(Positions(seconds).profile_distances)


def test_graph_distances_measure_what_needs_no_direction():
    steps = torch.tensor([[0, 1, 2, math.inf], [1, 0, 1, math.inf], [2, 1, 0, math.inf], [math.inf] * 3 + [0]])
    graph = Positions(distances=steps)
    attention = (-steps.double()).softmax(-1)
    expected = (attention * 2.0**-steps).sum(-1).mean()
    torch.testing.assert_close(metrics.locality(attention, positions=graph), expected)
    assert metrics.monotonicity(attention, positions=graph).tolist() == [1.0]
    assert graph.profile_distances.tolist() == [0, 1, 2]
    for name in DIRECTED | {"symmetry", "relative_asymmetry", "measure"}:
        with pytest.raises(ValueError, match="have no"):
            getattr(metrics, name)(attention, positions=graph)


def test_tokens_without_a_place_are_left_out():
    attention = random_attention(2, 17, 17)
    grid = Positions.grid(4, 4, before=1)
    for name in BY_POSITION:
        if name in DIRECTED:
            continue
        found = values(name, attention, positions=grid)
        rest = values(name, metrics.crop(attention, 1), positions=Positions.grid(4, 4))
        torch.testing.assert_close(found, rest, equal_nan=True)
    rows = metrics.locality(attention, positions=grid, rows=True)
    assert rows.shape == (2, 17)
    assert rows[:, 0].isnan().all()
    assert rows[:, 1:].isfinite().all()


def test_padding_is_left_out_of_positions_as_well():
    times = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 9.0, 9.0])
    attention, mask = random_attention(2, 8, 8), torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
    found = metrics.symmetry(attention, positions=times, mask=mask)
    alone = metrics.symmetry(metrics.crop(attention[0], 0, 6), positions=times[:6])
    torch.testing.assert_close(found, torch.stack([alone, metrics.symmetry(attention[1], positions=times)]))
    profile = metrics.distance_profile(attention, positions=times, mask=mask)
    axis = Positions(times).profile_distances
    expected = metrics.distance_profile(metrics.crop(attention[0], 0, 6), positions=times[:6])
    shorter = [axis.tolist().index(each) for each in Positions(times[:6]).profile_distances.tolist()]
    torch.testing.assert_close(profile[0, shorter], expected)


@pytest.mark.parametrize("name", [name for name in BY_POSITION if name not in ("window", "monotonicity", "measure")])
def test_gradients_by_position_are_finite_and_those_of_finite_differences(name):
    positions = Positions(range(9), ring=1.0) if name in DIRECTED else Positions.grid(3, 3)
    logits = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    function = lambda x: getattr(metrics, name)(x.softmax(-1), positions=positions).nan_to_num().sum()  # noqa: E731
    assert torch.autograd.gradcheck(function, (logits,), atol=1e-5)


# ---- alignment


def gamma(A):
    rows, columns = range(len(A)), range(len(A[0]))
    pairs = [(i, j, k, m) for i in rows for k in rows if i < k for j in columns for m in columns]
    with_order = lambda sign: sum(A[i][j] * A[k][m] for i, j, k, m in pairs if sign * (m - j) > 0)  # noqa: E731
    rising, falling = with_order(1), with_order(-1)
    return (rising - falling) / (rising + falling)


def test_diagonality_counts_pairs_of_queries():
    for shape in ((5, 5), (3, 8), (8, 3)):
        attention = random_attention(2, *shape)
        expected = torch.tensor([gamma(each.tolist()) for each in attention], dtype=torch.float64)
        torch.testing.assert_close(metrics.diagonality(attention), expected)
        torch.testing.assert_close(metrics.diagonality(attention.flip(-1)), -expected)
        torch.testing.assert_close(metrics.diagonality(attention.flip(-1, -2)), expected)


def test_diagonality_of_alignments():
    for speeds in ([1, 1, 1, 1], [1, 4, 2, 1], [7, 1, 1, 3]):
        frames = torch.repeat_interleave(torch.eye(4), torch.tensor(speeds), dim=0)
        assert metrics.diagonality(frames) == 1
        assert metrics.diagonality(frames.T / frames.T.sum(-1, keepdim=True)) == 1
        assert metrics.diagonality(frames.flip(0)) == -1
    assert abs(metrics.diagonality(torch.full((6, 9), 1 / 9))) < 1e-6
    assert metrics.diagonality(torch.eye(4)[[2] * 5]).isnan()
    assert metrics.diagonality(torch.ones(1, 1)).isnan()


def test_diagonality_reads_the_order_of_queries_and_keys_from_positions():
    attention, order, keys = random_attention(6, 6), torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([5, 0, 1, 4, 2, 3])
    shuffled = attention[order][:, keys]
    positions = Positions(keys, queries=order)
    torch.testing.assert_close(metrics.diagonality(shuffled, positions=positions), metrics.diagonality(attention))
    together = metrics.diagonality(attention, positions=[0, 0, 1, 1, 2, 2])
    joined = attention.reshape(3, 2, 3, 2).sum((1, 3))
    torch.testing.assert_close(together, metrics.diagonality(joined / 2))


# ---- bad input


WRONG = {
    "keys": [torch.zeros(2, 4, 2), [math.nan] * 16],
    "positions": [Positions.grid(3, 3), Positions.grid(4, 4, before=1), torch.zeros(2, 16)],
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_positions_that_do_not_fit_are_refused(name):
    for argument, several in WRONG.items():
        for positions in several:
            with pytest.raises(ValueError, match=argument):
                getattr(metrics, name)(random_attention(16, 16), positions=positions)


@pytest.mark.parametrize("name", sorted(DIRECTED))
def test_a_plane_has_no_past(name):
    with pytest.raises(ValueError, match="have no past and no future"):
        getattr(metrics, name)(random_attention(16, 16), positions=Positions.grid(4, 4))
    rows = Positions.grid(4, 4).keys[:, :1]
    assert getattr(metrics, name)(random_attention(16, 16), positions=rows).isfinite().any()


def test_rectangles_need_positions_where_distance_counts_and_say_so():
    attention = random_attention(3, 8)
    for name in set(BY_POSITION) - {"entropy", "diagonality"}:
        with pytest.raises(ValueError, match=r"square, .* positions=Positions\(keys, queries\)"):
            getattr(metrics, name)(attention)
    assert metrics.entropy(attention).isfinite()
    assert metrics.sink_rate(attention).isfinite()
    with pytest.raises(ValueError, match="causal=True needs to know which keys come later"):
        metrics.entropy(attention, causal=True)
    with pytest.raises(ValueError, match="mask and without_first are for tokens that are queries and keys"):
        metrics.entropy(attention, without_first=1)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, "keys="),
        ({"keys": [1, 2], "distances": [[0, 1], [1, 0]]}, "keys="),
        ({"distances": [[0, 1], [1, 0]], "queries": [1, 2]}, "keys="),
        ({"keys": [0, 1, 2, 0, 1]}, r"Positions\.packed"),
        ({"keys": [0, 1, 2], "sequence": [0, 1]}, "sequence"),
        ({"keys": [0.0, 1e200]}, "keys"),
        ({"keys": [0, 1], "tolerance": -1}, "tolerance"),
        ({"keys": [[1, 2]], "queries": [1]}, "queries"),
        ({"keys": [1, 2], "queries": [1], "before": 1}, "before="),
        ({"keys": [1, 2], "ring": 0}, "ring"),
        ({"distances": [[0, -1]]}, "distances"),
        ({"distances": [0, 1]}, "distances"),
    ],
)
def test_bad_positions_are_refused(arguments, names):
    with pytest.raises(ValueError, match=names):
        Positions(**arguments)


def test_positions_are_described_by_their_arguments():
    apart = Positions(distances=[[0, torch.inf], [torch.inf, 0]])
    for given in (Positions.grid(2, 3, before=1), Positions([0.1, 0.5], [3.0], ring=0.25), apart, *SCATTERED.values()):
        again = Positions.from_configuration(json.loads(json.dumps(given.configuration(), allow_nan=False)))
        assert torch.equal(again.distance, given.distance)
        assert (again.before, again.ring) == (given.before, given.ring)


def test_coordinates_that_are_no_numbers_are_refused():
    dates, hidden = np.array(["2026-01-01"], "datetime64[s]"), np.ma.masked_array([1, 2], [False, True])
    for given in ([True, False], dates, hidden):
        with pytest.raises(TypeError, match="keys"):
            Positions(given)


def test_packed_sequences_of_any_length_are_told_apart():
    assert Positions.packed([0, 1, 2, 0, 0, 1, 5, 6]).sequence.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    part = Positions.packed([0, 1, 2, 3, 0, 1, 2, 3, 4]).part(1, 9)
    assert part.distance[0, 3:].isinf().all()
    lengths = (4, 3)
    kernels = [(-Positions(range(n)).distance).softmax(-1) for n in lengths]
    padded = torch.zeros(9, 9, dtype=torch.float64).fill_diagonal_(1)
    padded[:7, :7] = torch.block_diag(*kernels)
    ids, mask = Positions.packed([0, 1, 2, 3, 0, 1, 2, 0, 0]), [1] * 7 + [0] * 2
    assert metrics.monotonicity(padded, positions=ids, mask=mask).tolist() == [1, 1]
    profile = metrics.distance_profile(padded, positions=ids, mask=mask)
    torch.testing.assert_close(profile, profile.flip(-1))
    with pytest.raises(TypeError, match="position_ids must be the integers of one input"):
        Positions.packed([[0, 1], [0, 1]])
    seen = torch.ones(7, 7, dtype=torch.bool)
    whole = Positions.packed([0, 1, 2, 3, 0, 1, 2])
    for name in ("entropy", "adjusted_locality", "toeplitz_share"):
        given = getattr(metrics, name)(torch.block_diag(*kernels), positions=whole, visible=seen)
        torch.testing.assert_close(given, getattr(metrics, name)(torch.block_diag(*kernels), positions=whole))


def test_positions_that_were_used_without_gradients_serve_with_them():
    grid, attention = Positions.grid(4, 4), random_attention(16, 16)
    with torch.inference_mode():
        metrics.symmetry(attention, positions=grid)
        metrics.half_life(attention, positions=grid)
    for name in ("symmetry", "half_life", "toeplitz_share"):
        given = attention.clone().requires_grad_()
        getattr(metrics, name)(given, positions=grid).backward()
        fresh = Positions.grid(4, 4)
        function = lambda x, name=name, fresh=fresh: getattr(metrics, name)(x, positions=fresh)  # noqa: E731
        torch.testing.assert_close(torch.func.grad(function)(attention), given.grad)
    assert len(pickle.dumps(grid)) < 2000
    assert copy.deepcopy(grid) is grid
    aligned = random_attention(2, 5)
    with torch.device("meta"):
        other = Positions(range(5), queries=[0.5, 1.5])
        assert (other.pairs(slice(None)) >= 0).sum() == 6
        assert metrics.diagonality(aligned, positions=other).isfinite()


def test_other_queries_are_not_cut_with_the_keys():
    positions = Positions(range(5), queries=np.arange(5) + 0.5)
    with pytest.raises(ValueError, match="mask and without_first are for tokens that are queries and keys"):
        metrics.mean_distance(random_attention(5, 5), positions=positions, mask=[1, 1, 1, 1, 0])


def test_results_whose_positions_would_be_lost_are_refused():
    result = SimpleNamespace(attention=random_attention(9, 9), positions=Positions.grid(3, 3).keys)
    torch.testing.assert_close(metrics.symmetry(result), metrics.symmetry(result.attention, positions=result.positions))
    with pytest.raises(ValueError, match="crop would lose the positions of the result"):
        metrics.crop(result, 1)
    with pytest.raises(ValueError, match="MeanAttention would lose the positions"):
        MeanAttention(length=4).update(result)


def test_the_last_rows_of_a_causal_matrix_warn_as_the_whole_does():
    with pytest.warns(UserWarning, match="one-sided"):
        metrics.symmetry(causal_attention(20, 20)[15:], positions=Positions(range(20), queries=range(15, 20)))


def test_diagonality_counts_what_lies_behind_a_sink():
    attention = torch.tensor([[1 - 3e-17, 1e-17, 2e-17], [1.0, 3e-17, 1e-17], [1.0, 2e-17, 1e-17]], dtype=torch.float64)
    expected = torch.tensor(gamma(attention.tolist()), dtype=torch.float64)
    torch.testing.assert_close(metrics.diagonality(attention), expected)


def test_monotonicity_by_position_does_not_follow_the_default_dtype():
    attention, grid = random_attention(36, 36), Positions.grid(6, 6)
    expected = metrics.monotonicity(attention, positions=grid)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(metrics.monotonicity(attention, positions=grid), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_life_of_numbers_with_few_digits_is_that_of_their_own_precision():
    attention = torch.full((64, 64), 1 / 64, dtype=torch.float64)
    attention[32:, :32], attention[32:, 32:] = (1 - 2**-6) / 64, (1 + 2**-6) / 64
    assert torch.equal(attention.bfloat16().double(), attention)
    assert metrics.half_life(attention).isfinite()
    assert metrics.half_life(attention, positions=Positions(range(64), ring=1)).isfinite()
    assert metrics.half_life(attention, without_first=1) == metrics.half_life(metrics.crop(attention, 1))


def test_rings_round_the_displacements_of_a_line():
    seconds = np.sort(np.random.default_rng(0).random(40)) * 10
    attention = random_attention(40, 40)
    assert metrics.toeplitz_share(attention, positions=seconds) == pytest.approx(1, abs=0.1)
    assert metrics.toeplitz_share(attention, positions=Positions(seconds, ring=2.0)) < 0.2


@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
def test_points_may_have_as_many_coordinates_also_if_these_look_like_distances(n):
    assert Positions.grid(2, 1).shape == (2, 2)
    points = torch.ones(n, n) - torch.eye(n)
    assert torch.equal(Positions(points).distance, points.double() * 2**0.5)


@pytest.mark.parametrize(("n", "d"), [(12, 12), (20, 30), (9, 70)])
def test_displacements_along_many_axes_are_told_apart(n, d):
    points = np.random.default_rng(0).integers(0, 9, (n, d)) / 8
    vectors, places = {tuple(step) for step in (points - points[:, None]).reshape(-1, d)}, Positions(points)
    assert places.displacement_count == len(vectors) == len(places.displacements_of().unique())


def test_places_that_are_opposite_along_all_axes_but_the_first_are_no_pair():
    points = np.random.default_rng(0).integers(0, 3, (9, 40))
    for first, pairs in ((2 - points[:, :1], 9), (np.full((9, 1), 3), 0)):
        keys = np.concatenate([points, np.concatenate([first, 2 - points[:, 1:]], 1)])
        found = Positions(keys, queries=np.ones((1, 40))).pairs(slice(None))
        assert (found[0, 0] >= 0).sum() == pairs


def test_the_nearest_key_of_the_past_may_be_far():
    attention = random_attention(1, 9)
    expected = metrics.past_locality(attention, positions=Positions(range(9), queries=[9]))
    for dtype, far in itertools.product((torch.float32, torch.float64), (1e4, 1e9)):
        found = metrics.past_locality(attention.to(dtype), positions=Positions(range(9), queries=[far]))
        assert found == pytest.approx(expected.item(), rel=1e-6)


WHOLE = [torch.arange(2e6, 2e6 + 9), torch.arange(240, 249).half(), np.arange(9) + 1.7e9, np.arange(9) + 2**60]
SECONDS = [1.7e9 + i for i in range(9)]
MERGED = {
    "float32 seconds": torch.tensor(SECONDS),
    "float32 seconds in a list": [torch.tensor(each) for each in SECONDS],
    "float32 seconds of two days": torch.tensor(SECONDS + [each + 86_400 for each in SECONDS]),
    "float32 hours": np.array([each / 3600 for each in SECONDS], np.float32),
    "float32 days of an hour": np.float32(19_675 + np.arange(3600) / 86_400),
    "float64 nanoseconds": 1.7e18 + np.arange(9.0) * 1000,
    "bfloat16 positions": torch.arange(300).bfloat16(),
    "float16 shares": torch.linspace(0, 1, 256).half(),
    "fine and coarse axes": np.stack([np.linspace(0, 3600, 9), np.arange(9) * 0.001], 1).astype(np.float32),
    "integers that float64 merges": [0, 2**60, 2**60 + 1],
    "integers beyond int64": np.array([2**64 - 1, 2**64 - 2], np.uint64),
}


def test_whole_numbers_of_any_dtype_are_told_apart():
    for line in WHOLE:
        assert Positions(line).is_line
        assert torch.equal(Positions(line).distance, Positions(range(9)).distance)
    assert Positions.packed(np.array([254, 255, 0, 1], np.uint8)).sequence.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("keys", MERGED.values(), ids=MERGED)
def test_coordinates_that_rounding_merges_are_refused(keys):
    with pytest.raises(ValueError, match="keys"):
        Positions(keys)


def test_queries_that_rounding_merges_with_each_other_or_with_keys_are_refused():
    queries = MERGED["float32 seconds"]
    with pytest.raises(ValueError, match="queries"):
        Positions([0.0], queries)
    with pytest.raises(ValueError, match="keys"):
        Positions(SECONDS, queries[:1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_coordinates_that_rounding_parts_are_one_place(dtype):
    turn = np.array([[0.8, 0.6], [-0.6, 0.8]])
    line = np.stack([np.arange(64), np.zeros(64)], 1)
    there_and_back = (line @ turn).astype(dtype) @ turn.T.astype(dtype)
    kernel = (-Positions(range(64)).distance).softmax(-1)
    assert metrics.symmetry(kernel, positions=there_and_back) == 1
    assert Positions(np.array([0.3, 0.5, dtype(0.1) + dtype(0.2)], dtype)).distance[0, 2] == 0


def test_distances_that_differ_by_the_tolerance_are_equal():
    steps = np.array([[0, 1, 1.01], [1, 0, 1], [1.01, 1, 0]])
    assert Positions(distances=steps, tolerance=0.02).profile_distances.tolist() == [0, 1]
    assert len(Positions(distances=steps).profile_distances) == 3


@pytest.mark.parametrize(
    "positions", [Positions.grid(24, 20), Positions(np.arange(480) * 0.02), Positions.packed([*range(160)] * 3)]
)
def test_evenly_spaced_places_have_few_steps(positions):
    assert positions.steps().max() < 4 * 480
