"""The complementary metrics: against loops written from their equations, closed forms and known heads."""

import inspect
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pelocality import metrics, to_frame
from pelocality.metrics.accumulate import MeanOver
from tests.names import METRICS
from tests.test_metrics import numbers, random_attention

FLOATS = [name for name in METRICS if name not in ("measure", "crop")]


def uniform(n, causal=False):
    weights = torch.ones(n, n, dtype=torch.float64)
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True)


def previous_token(n):
    return torch.eye(n, dtype=torch.float64)[[0, *range(n - 1)]]


# for uniform attention over all keys and over the past; a table of docs/concepts.md says the same
SAME_AT_EVERY_LENGTH = {
    "adjusted_locality": (True, True), "relative_asymmetry": (True, True), "direction_balance": (True, True),
    "monotonicity": (True, True), "entropy": (True, True), "toeplitz_share": (True, False),
    "past_locality": (False, False), "mean_distance": (False, False), "window": (False, False),
    "half_life": (True, False), "sink_rate": (False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AT_EVERY_LENGTH)
def test_which_values_of_uniform_attention_are_the_same_at_every_length(name):
    for causal, same in zip((False, True), SAME_AT_EVERY_LENGTH[name], strict=True):
        values = [getattr(metrics, name)(uniform(n, causal)) for n in (64, 128, 512)]
        assert all(torch.allclose(each, values[0], atol=1e-6, rtol=1e-3, equal_nan=True) for each in values) == same


def loop(name, A):
    """Compute the equation of the docstring, element by element."""
    n = len(A)
    span = range(n)
    mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
    profile = {k: mean([A[i][i + k] for i in span if 0 <= i + k < n]) for k in range(1 - n, n)}
    by_distance = {w: mean([sum(A[i][j] for j in span if abs(i - j) <= w) for i in span]) for w in span}
    past = [[A[i][j] for j in range(i)] for i in span]
    match name:
        case "direction_balance":
            right = sum(A[i][j] for i in span for j in span if j > i)
            left = sum(A[i][j] for i in span for j in span if j < i)
            return (right - left) / (right + left)
        case "step_balance" | "step_profile":
            steps = {k: [(A[i][i + k] - A[i][i + k + 1]) ** 2 for i in range(n - 1 - k)] for k in range(1, n)}
            steps |= {-k: [(A[i][i - k] - A[i][i - k - 1]) ** 2 for i in range(k + 1, n)] for k in range(1, n)}
            if name == "step_profile":
                return [mean(steps.get(k, [])) for k in range(1 - n, n)]
            left, right = (sum(sum(values) for k, values in steps.items() if k * side > 0) for side in (-1, 1))
            return (right - left) / (right + left) if n > 2 else 0
        case "past_locality":
            return mean(
                [sum(A[i][j] / 2 ** (i - j - 1) for j in range(i)) / sum(p) for i, p in enumerate(past) if sum(p)]
            )
        case "mean_distance":
            return mean([sum(A[i][j] * abs(i - j) for j in span) for i in span])
        case "window":
            return float(min(w for w in span if by_distance[w] >= 0.9))
        case "distance_profile":
            return [profile[k] for k in range(1 - n, n)]
        case "profile_asymmetry":
            return [(profile[k] - profile[-k]) / (profile[k] + profile[-k]) for k in range(1, n)]
        case "toeplitz_share":
            grand = sum(map(sum, A)) / n**2
            within = sum((A[i][j] - profile[j - i]) ** 2 for i in span for j in span)
            return 1 - within / sum((A[i][j] - grand) ** 2 for i in span for j in span)
        case "monotonicity":
            pairs = n * (n - 1) / 2
            past_share = sum(A[i][i - k] >= A[i][i - k - 1] for i in span for k in range(i))
            future_share = sum(A[i][i + k] >= A[i][i + k + 1] for i in span for k in range(n - 1 - i))
            return [past_share / pairs, future_share / pairs]
        case "entropy":
            return mean([-sum(a * math.log(a) for a in row if a) / math.log(n) for row in A])
        case "sink_rate":
            return mean([A[i][0] for i in range(1, n)])


@pytest.mark.parametrize("n", [2, 3, 8, 17])
@pytest.mark.parametrize(
    "name",
    [
        "direction_balance", "past_locality", "mean_distance", "window", "distance_profile", "profile_asymmetry",
        "toeplitz_share", "monotonicity", "entropy", "sink_rate", "step_balance", "step_profile",
    ],
)  # fmt: skip
def test_a_complementary_metric_equals_its_equation(name, n):
    attention = random_attention(3, n, n, seed=n)
    expected = torch.tensor([loop(name, matrix) for matrix in attention.tolist()], dtype=torch.float64)
    torch.testing.assert_close(getattr(metrics, name)(attention), expected, equal_nan=True)


ROWS = ["direction_balance", "past_locality", "mean_distance", "entropy", "sink_rate", "step_balance"]


@pytest.mark.parametrize("name", ROWS)
def test_row_values_depend_on_their_rows_only(name):
    attention = random_attention(6, 6)
    other = random_attention(6, 6, seed=1)
    mixed = torch.cat([attention[:3], other[3:]])
    metric = getattr(metrics, name)
    torch.testing.assert_close(metric(mixed, rows=True)[:3], metric(attention, rows=True)[:3], equal_nan=True)
    torch.testing.assert_close(metric(mixed, rows=True)[3:], metric(other, rows=True)[3:], equal_nan=True)


@pytest.mark.filterwarnings("ignore:1 of 2 matrices have no weight above")
def test_causality_is_detected_per_matrix_or_given():
    both = torch.stack([uniform(16), uniform(16, causal=True)])
    torch.testing.assert_close(metrics.adjusted_locality(both), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    assert metrics.adjusted_locality(both[1], causal=True).abs() < 1e-6
    torch.testing.assert_close(metrics.entropy(both), torch.ones(2, dtype=torch.float64))
    assert metrics.entropy(both, causal=False)[1] < 1


def far_future(dtype):
    """Return attention whose future weights are too small for float32 in the steepest of three heads."""
    k = torch.arange(9, dtype=torch.float64) - torch.arange(9, dtype=torch.float64)[:, None]
    slope = torch.tensor([1.0, 5.0, 60.0], dtype=torch.float64)[:, None, None]
    return torch.where(k > 0, -slope * (k + 1), -0.1 * k.abs()).to(dtype).softmax(-1)


@pytest.mark.parametrize("name", ["adjusted_locality", "entropy", "toeplitz_share"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_batch_of_which_only_some_matrices_count_as_causal_warns_once(name, layers):
    metric, single = getattr(metrics, name), far_future(torch.float32)
    with pytest.warns(
        UserWarning, match=f"{layers} of {3 * layers} matrices have no weight above.*give causal="
    ) as caught:
        metric(single if layers == 1 else (single, single))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = metric(far_future(torch.float64))
        torch.testing.assert_close(metric(single, causal=False), exact.float(), rtol=0, atol=1e-4)
        metric(single[2]), metric(single[:2]), metric(torch.ones(1, 1))


@pytest.mark.parametrize("name", [name for name in METRICS if name != "crop"])
def test_keys_that_no_query_attends_to_warn_of_padding(name):
    attention = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp()
    metric, mask = getattr(metrics, name), torch.ones(2, 8, dtype=torch.long)
    for padding, words in ((slice(6, 8), "the last key"), (slice(0, 2), "the first key")):
        padded, tokens = attention.clone(), mask.clone()
        padded[1, ..., padding] = 0
        tokens[1, padding] = 0
        padded /= padded.sum(-1, keepdim=True)
        with pytest.warns(UserWarning, match=f"attends to {words}, as if it were padding; .*mask=attention_mask"):
            metric(padded)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "no query")
            metric(padded, mask=tokens)
            metrics.crop(padded, 2, 6)
            metric(padded[:1])
            metric(torch.eye(8).roll(-1, -1))
            metric(torch.stack([padded[0, 0], padded[1, 0]]))  # not all heads
            metric(torch.eye(8)[[0] * 8].expand(2, 8, 8))


def test_a_result_in_which_every_key_is_visible_is_not_taken_for_causal():
    single = far_future(torch.float32)
    for name in ("adjusted_locality", "entropy", "toeplitz_share"):
        metric = getattr(metrics, name)
        found = metric(SimpleNamespace(attention=single, visible=None))
        torch.testing.assert_close(found, metric(single, causal=False))


def windowed(n, width):
    """Return uniform attention of a decoder to the last few tokens, and its visible keys."""
    i = torch.arange(n)
    seen = (i <= i[:, None]) & (i > i[:, None] - width)
    return seen / seen.sum(-1, keepdim=True, dtype=torch.float64), seen


def chance_corrected(A, seen):
    """Compute (Loc(A) - Loc(U)) / (1 - Loc(U)) over the queries that see several keys, element by element."""
    gained = most = 0.0
    for i, row in enumerate(A):
        keys = [j for j in range(len(A)) if seen[i][j]]
        if len(keys) > 1:
            chance = sum(2.0 ** -abs(i - j) for j in keys) / len(keys)
            gained += sum(row[j] * 2.0 ** -abs(i - j) for j in keys) - chance
            most += 1 - chance
    return gained / most if most else math.nan


@pytest.mark.parametrize("width", [2, 4, 11])
def test_uniform_attention_within_a_window_scores_as_uniform(width):
    attention, seen = windowed(30, width)
    assert metrics.adjusted_locality(attention, visible=seen).item() == pytest.approx(0, abs=1e-12)
    assert metrics.entropy(attention, visible=seen).item() == pytest.approx(1, abs=1e-12)
    assert metrics.toeplitz_share(attention, visible=seen) < metrics.toeplitz_share(attention)


def test_visible_keys_are_not_inferred_from_single_zeros():
    identity, previous = torch.eye(30, dtype=torch.float64), previous_token(30)
    seen = windowed(30, 4)[1]
    for head in (identity, previous):
        expected = chance_corrected(head.tolist(), seen.tolist())
        assert metrics.adjusted_locality(head, visible=seen).item() == pytest.approx(expected, abs=1e-12)
        assert metrics.entropy(head, visible=seen) == 0
    assert metrics.adjusted_locality(identity, visible=seen) == 1
    assert metrics.adjusted_locality(identity) == 1


@pytest.mark.parametrize("seed", range(5))
def test_visible_keys_enter_as_in_the_equations(seed):
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(4, 1, 13, 13, generator=generator) < 0.4
    seen |= torch.eye(13, dtype=torch.bool).roll(seed, -1)
    attention = random_attention(4, 3, 13, 13, seed=seed) * seen
    attention = attention / attention.sum(-1, keepdim=True)
    local, spread, share = (
        getattr(metrics, name)(attention, visible=seen) for name in ("adjusted_locality", "entropy", "toeplitz_share")
    )
    for layer, head in np.ndindex(4, 3):
        A, sees = attention[layer, head].tolist(), seen[layer, 0].tolist()
        assert local[layer, head].item() == pytest.approx(chance_corrected(A, sees), abs=1e-12)
        rows = [
            -sum(a * math.log(a) for a in row if a) / math.log(sum(keys))
            for row, keys in zip(A, sees, strict=True)
            if sum(keys) > 1
        ]
        assert spread[layer, head].item() == pytest.approx(np.mean(rows), abs=1e-12)
        cells = [(j - i, A[i][j]) for i in range(13) for j in range(13) if sees[i][j]]
        profile = {k: np.mean([a for other, a in cells if other == k]) for k, _ in cells}
        mean = np.mean([a for _, a in cells])
        within, total = sum((a - profile[k]) ** 2 for k, a in cells), sum((a - mean) ** 2 for _, a in cells)
        assert share[layer, head].item() == pytest.approx(1 - within / total, abs=1e-12)


def test_queries_that_see_one_key_do_not_count():
    assert math.isnan(metrics.adjusted_locality(torch.eye(6), visible=torch.eye(6, dtype=torch.bool)))
    shifted = torch.eye(6).roll(1, -1)
    assert math.isnan(metrics.adjusted_locality(shifted, visible=shifted.bool()))
    assert math.isnan(metrics.entropy(shifted, visible=shifted.bool()))


def test_visible_keys_of_a_result_are_used():
    seen = torch.stack([windowed(12, width)[1] for width in (2, 5, 12)])  # (layer, n, n)
    attention = (seen / seen.sum(-1, keepdim=True))[:, None].expand(3, 3, 12, 12)  # as many heads as layers
    result = SimpleNamespace(attention=attention, visible=seen)
    torch.testing.assert_close(metrics.adjusted_locality(result), torch.zeros(3, 3), rtol=0, atol=1e-6)
    torch.testing.assert_close(metrics.entropy(result), torch.ones(3, 3))
    torch.testing.assert_close(metrics.toeplitz_share(result), metrics.toeplitz_share(attention, visible=seen[:, None]))
    mean = MeanOver(metrics.adjusted_locality, shape=(3, 3))
    mean.update(result)
    torch.testing.assert_close(mean.compute(), torch.zeros(3, 3, dtype=torch.float64), rtol=0, atol=1e-6)
    for arguments in ({"causal": True}, {"visible": torch.ones(12, 12).tril().bool()}):
        assert metrics.adjusted_locality(result, **arguments)[0, 0] > 0.3
    everything = SimpleNamespace(attention=attention, visible=None)
    expected = metrics.adjusted_locality(attention, causal=False)
    torch.testing.assert_close(metrics.adjusted_locality(everything), expected)


def test_visible_combines_with_layers_and_masks():
    (narrow, seen), (wide, sees) = windowed(12, 3), windowed(12, 6)
    layers = (narrow.expand(2, 2, 12, 12), wide.expand(2, 2, 12, 12))
    by_layer = torch.stack([seen, sees])[:, None, None]
    mask = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
    values = metrics.adjusted_locality(layers, visible=by_layer, mask=mask)
    torch.testing.assert_close(values, torch.zeros(2, 2, 2, dtype=torch.float64), rtol=0, atol=1e-12)
    one = metrics.adjusted_locality((layers[0], layers[0]), visible=seen, mask=mask)
    torch.testing.assert_close(one, torch.zeros(2, 2, 2, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["adjusted_locality", "entropy"])
def test_attention_to_the_future_is_refused_as_causal(name):
    metric = getattr(metrics, name)
    for future in (uniform(8), torch.stack([uniform(8, causal=True), torch.eye(8).roll(1, -1)])):
        with pytest.raises(ValueError, match=r"causal=True hides keys with attention: .* leave causal out"):
            metric(future, causal=True)
    past = torch.ones(8, 8, dtype=torch.bool).tril()
    assert torch.equal(metric(uniform(8, causal=True), causal=True), metric(uniform(8, causal=True), visible=past))


def test_attention_without_weight_on_either_side_is_not_one_sided(recwarn):
    assert metrics.symmetry(torch.eye(8)) == 1
    assert not recwarn
    with pytest.warns(UserWarning, match="one-sided"):
        metrics.symmetry(torch.stack([torch.eye(8), uniform(8, causal=True).float()]))


def test_a_small_asymmetry_gives_a_small_relative_asymmetry():
    i = torch.arange(64, dtype=torch.float64)
    distance = i - i[:, None]
    for tilt in (1e-2, 1e-6):
        attention = (-0.05 * distance**2 + tilt * distance).softmax(-1)
        assert metrics.relative_asymmetry(attention) < 3 * tilt
        assert metrics.symmetry(attention) < 0.9


@pytest.mark.parametrize("slope", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("side", ["both", "past", "future"])
def test_the_half_life_of_an_exponential_is_ln_2_over_its_slope(slope, side):
    i = torch.arange(2048, dtype=torch.float64)
    attention = (-slope * (i - i[:, None]).abs()).softmax(-1)
    assert metrics.half_life(attention, side=side).item() == pytest.approx(math.log(2) / slope, rel=0.02)


def test_the_half_life_of_constant_or_growing_attention_is_infinite_and_of_one_distance_nan():
    i = torch.arange(32, dtype=torch.float64)
    growing = (0.1 * (i - i[:, None]).abs()).softmax(-1)
    assert metrics.half_life(torch.stack([uniform(32), growing])).tolist() == [math.inf, math.inf]
    assert math.isnan(metrics.half_life(previous_token(32)))
    assert math.isnan(metrics.half_life(torch.eye(32)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("slope", [0.25, 0.01, 4.0])
def test_the_half_life_is_right_in_every_precision(slope, dtype):
    i = torch.arange(256, dtype=torch.float64)
    attention = (-slope * (i - i[:, None]).abs()).softmax(-1)
    exact = metrics.half_life(attention).item()
    assert exact < math.inf
    assert metrics.half_life(attention.to(dtype)).item() == pytest.approx(exact, rel=0.05)
    assert metrics.half_life(uniform(256).to(dtype)) == math.inf
    noise = random_attention(64, 64, sharpness=torch.finfo(dtype).eps / 4)
    assert metrics.half_life((noise + noise.flip(-1, -2)).div(2).to(dtype)) == math.inf


def window_by_loop(A, share):
    """Return the smallest half-width of the matrix and of every row, from exact sums."""
    n = len(A)
    by_distance = [
        [math.fsum(row[j] for j in {i - k, i + k} if 0 <= j < n) for k in range(n)] for i, row in enumerate(A)
    ]

    def smallest(masses):
        enough = share * math.fsum(masses) * (1 - n * 2**-52)
        return next(w for w in range(n) if math.fsum(masses[: w + 1]) >= enough)

    return smallest([math.fsum(row[k] for row in by_distance) for k in range(n)]), [
        smallest(row) for row in by_distance
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999999, 1.0])
def test_the_window_is_the_smallest_in_every_precision(share, dtype):
    for seed in range(3):
        attention = random_attention(90, 90, seed=seed).to(dtype)
        matrix, rows = window_by_loop(attention.tolist(), share)
        assert metrics.window(attention, share) == matrix
        assert metrics.window(attention, share, rows=True).tolist() == rows


def test_a_large_float32_matrix_keeps_the_far_part_of_its_window():
    n = 2048
    far = torch.eye(n).roll(60, -1)
    attention = 0.9897 * torch.eye(n) + 0.0103 * far
    window = int(metrics.window(attention, 0.99))
    assert window == int(metrics.window(attention.double(), 0.99)) == 60
    assert (metrics.window(attention, 0.99, rows=True)[:-60] == 60).all()


def test_a_toeplitz_matrix_has_toeplitz_share_one_and_a_sink_does_not():
    i = np.arange(12)
    circulant = np.exp(-0.3 * ((i[:, None] - i) % 12))
    toeplitz = torch.from_numpy(circulant / circulant.sum(-1, keepdims=True))
    assert metrics.toeplitz_share(toeplitz).item() == pytest.approx(1)
    assert metrics.toeplitz_share(torch.eye(12)[[0] * 12]) < 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_uniform_attention_has_toeplitz_share_one_at_every_length(dtype):
    for n in (*range(1, 12), 31, 64, 129):
        one = torch.full((n, n), 1 / n, dtype=dtype)
        for attention in (one, torch.zeros(n, n, dtype=dtype).softmax(-1), one.mT.reshape(n, n)):
            assert metrics.toeplitz_share(attention) == 1, n
        tilted = (1e-3 * torch.arange(n, dtype=torch.float64)).softmax(-1).expand(n, n)
        assert n < 3 or metrics.toeplitz_share(tilted.to(dtype)) < 1, n


def test_the_empty_half_of_a_causal_matrix_does_not_raise_the_toeplitz_share():
    generator = torch.Generator().manual_seed(0)
    noise = 3 * torch.randn(20, 48, 48, generator=generator, dtype=torch.float64)
    causal = noise.masked_fill(torch.ones(48, 48).triu(1).bool(), -math.inf).softmax(-1)
    share = metrics.toeplitz_share(causal).mean()
    assert 0 <= share < 0.35


def test_cropping_a_sink_leaves_the_rest_of_the_attention():
    identity = torch.eye(16, dtype=torch.float64)
    head = 0.8 * identity[[0] * 16] + 0.1 * previous_token(16) + 0.1 * identity
    assert metrics.sink_rate(head).item() == pytest.approx(0.8 + 0.1 / 15)
    assert metrics.past_locality(head) < 0.4
    assert metrics.past_locality(metrics.crop(head, 1)) == 1


WITH_ROWS = [f for name in METRICS if "rows" in inspect.signature(f := getattr(metrics, name)).parameters]


SEES = [metrics.adjusted_locality, metrics.entropy, metrics.toeplitz_share]


@pytest.mark.parametrize(
    ("functions", "option", "wrong", "error"),
    [
        (WITH_ROWS, "rows", "no", TypeError),
        (SEES, "causal", "no", TypeError),
        (SEES, "visible", torch.ones(4, 4), TypeError),
        (SEES, "visible", torch.ones(3, 4, dtype=torch.bool), ValueError),
        (SEES, "visible", torch.ones(2, 4, 4, dtype=torch.bool), ValueError),
        (SEES, "visible", torch.ones(1, 3, 4, 4, dtype=torch.bool), ValueError),
        (SEES, "visible", torch.eye(4, dtype=torch.bool), ValueError),
        ([metrics.window], "share", "0.5", TypeError),
        ([metrics.window], "share", 0.0, ValueError),
        ([metrics.window], "share", 1.5, ValueError),
        ([metrics.symmetry, metrics.measure], "rtol", "a", TypeError),
        ([metrics.symmetry, metrics.measure], "rtol", True, TypeError),
        ([metrics.sink_rate], "sinks", 0, ValueError),
        ([metrics.half_life], "side", "left", ValueError),
    ],
)
def test_options_that_do_not_fit_are_named(functions, option, wrong, error):
    for function in functions:
        with pytest.raises(error, match=option):
            function(random_attention(2, 2, 4, 4), **{option: wrong})


def test_causal_and_visible_together_are_refused():
    for metric in SEES:
        with pytest.raises(ValueError, match="give one of them"):
            metric(uniform(8), causal=False, visible=torch.ones(8, 8, dtype=torch.bool))


SMOOTH = [name for name in FLOATS if name not in ("window", "monotonicity")] + ["measure"]
ZEROS = {
    "causal": torch.ones(7, 7).tril(),
    "nothing": torch.ones(7, 7),
    "window": torch.ones(7, 7).tril().triu(-2),
    "two sided window": torch.ones(7, 7).tril(2).triu(-2),
    "identity": torch.eye(7),
    "one key each": torch.eye(7).roll(-1, -1),
    "first token": torch.eye(7)[[0] * 7],
    "single token": torch.ones(1, 1),
}


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("hidden", ZEROS)
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_gradients_are_those_of_finite_differences_and_finite_where_keys_are_hidden(name, hidden):
    keys = ZEROS[hidden].bool()
    i = torch.arange(len(keys))
    near = -2.0 * (i - i[:, None]).abs()  # half_life is infinite, without a gradient, where attention does not fall
    drawn = torch.randn(2, *keys.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def finite_values(logits):
        values = numbers(getattr(metrics, name)((logits + near).masked_fill(~keys, -math.inf).softmax(-1)))
        values = torch.stack(values)
        return values[values.isfinite()]

    for dtype in (torch.float32, torch.float64):
        logits = drawn.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(finite_values(logits).sum() + 0 * logits.sum(), logits)
        assert gradient.isfinite().all()
    if finite_values(logits).numel():
        assert torch.autograd.gradcheck(finite_values, logits, fast_mode=hidden != "nothing")


@pytest.mark.parametrize("name", ["adjusted_locality", "entropy", "past_locality", "half_life"])
def test_a_nan_value_leaves_the_gradients_of_other_matrices_finite(name):
    logits = torch.zeros(3, 6, 6, dtype=torch.float64, requires_grad=True)
    i = torch.arange(6)
    local = (logits - (i - i[:, None]).abs()).softmax(-1)
    hidden = torch.stack([torch.eye(6), torch.ones(6, 6), torch.eye(6)]).bool()
    attention = (local * hidden) / (local * hidden).sum(-1, keepdim=True)
    seen = {"visible": hidden} if name in ("adjusted_locality", "entropy") else {}
    values = getattr(metrics, name)(attention, **seen)
    assert values.isnan().tolist() == [True, False, True]
    values.nanmean().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().sum() > 0


# ---- tables


def test_metrics_of_any_attention_are_a_table():
    attention = random_attention(2, 3, 10, 10)
    frame = to_frame(attention, ["locality", "window"])
    assert frame.columns.tolist() == ["layer", "head", "locality", "window"]
    assert frame["head"].tolist() == [0, 1, 2, 0, 1, 2]
    np.testing.assert_allclose(frame["locality"], metrics.locality(attention).flatten())
    layers = to_frame(tuple(attention[None].transpose(0, 1)), "entropy", axes=["layer", "text", "head"])
    assert layers.shape == (6, 4)
    masked = to_frame(attention, "locality", mask=[1] * 9 + [0])
    np.testing.assert_allclose(masked["locality"], metrics.locality(attention, mask=[1] * 9 + [0]).flatten())
    own = to_frame(attention, {"past side": lambda each: metrics.monotonicity(each)[..., 0]})
    assert own.columns.tolist() == ["layer", "head", "past side"]
    alone = to_frame(attention[0, 0])
    assert (len(alone), alone.columns.tolist()) == (1, ["locality", "symmetry", "relative_asymmetry"])
    table = metrics.measure(attention).to_frame()
    np.testing.assert_allclose(table["symmetry"], metrics.symmetry(attention).flatten())
    assert metrics.measure(attention[0]).to_frame().columns[0] == "axis 0"


def test_tables_that_cannot_be_made_say_why():
    attention = random_attention(2, 3, 10, 10)
    with pytest.raises(ValueError, match="got 'localty'; did you mean 'locality'"):
        to_frame(attention, "localty")
    with pytest.raises(ValueError, match=r"one number per matrix, \(2, 3\), but monotonicity gives \(2, 3, 2\)"):
        to_frame(attention, "monotonicity")
    with pytest.raises(ValueError, match=r"axes must name the 2 leading axes of \(2, 3\), got \['head'\]"):
        to_frame(attention, axes=["head"])
    with pytest.raises(TypeError, match="no metric of locality takes masks"):
        to_frame(attention, "locality", masks=None)
    with pytest.raises(ValueError, match="leading axes"):
        metrics.measure(attention).to_frame(axes=["head"])
