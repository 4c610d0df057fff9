"""The companions: each against a loop written from its equation, its closed forms, and what it is there to show."""

import math
import warnings

import numpy as np
import pytest
import torch

from pelocality import metrics
from tests.test_metrics import causal_attention, random_attention

FLOATS = [name for name in metrics.__all__ if name not in ("Measurement", "measure", "crop")]


def uniform(n, causal=False):
    weights = torch.ones(n, n, dtype=torch.float64)
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True)


def previous_token(n):
    return torch.eye(n, dtype=torch.float64)[[0, *range(n - 1)]]


def loop(name, A):
    """The equations of the docstrings, element by element."""
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
            behind = sum(A[i][i - k] >= A[i][i - k - 1] for i in span for k in range(i))
            ahead = sum(A[i][i + k] >= A[i][i + k + 1] for i in span for k in range(n - 1 - i))
            return [behind / pairs, ahead / pairs]
        case "entropy":
            return mean([-sum(a * math.log(a) for a in row if a) / math.log(n) for row in A])
        case "sink_rate":
            return mean([A[i][0] for i in range(1, n)])


@pytest.mark.parametrize("n", [2, 3, 8, 17])
@pytest.mark.parametrize(
    "name",
    [
        "direction_balance", "past_locality", "mean_distance", "window", "distance_profile", "profile_asymmetry",
        "toeplitz_share", "monotonicity", "entropy", "sink_rate",
    ],
)  # fmt: skip
def test_a_companion_is_its_equation(name, n):
    attention = random_attention(3, n, n, seed=n)
    wanted = torch.tensor([loop(name, matrix) for matrix in attention.tolist()], dtype=torch.float64)
    torch.testing.assert_close(getattr(metrics, name)(attention), wanted)


@pytest.mark.parametrize("name", ["direction_balance", "past_locality", "mean_distance", "entropy", "sink_rate"])
def test_row_values_belong_to_their_rows(name):
    attention = random_attention(6, 6)
    other = random_attention(6, 6, seed=1)
    mixed = torch.cat([attention[:3], other[3:]])
    metric = getattr(metrics, name)
    torch.testing.assert_close(metric(mixed, rows=True)[:3], metric(attention, rows=True)[:3], equal_nan=True)
    torch.testing.assert_close(metric(mixed, rows=True)[3:], metric(other, rows=True)[3:], equal_nan=True)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("matrix", ["random", "causal", "identity", "one token"])
def test_leading_axes_and_precision_are_kept(name, matrix):
    attention = {
        "random": random_attention(2, 3, 9, 9),
        "causal": causal_attention(2, 3, 9, 9),
        "identity": torch.eye(9).expand(2, 3, 9, 9),
        "one token": torch.ones(2, 3, 1, 1),
    }[matrix]
    metric = getattr(metrics, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        values = {dtype: metric(attention.to(dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    assert values[torch.float64].dtype == torch.float64
    assert values[torch.float32].dtype == values[torch.bfloat16].dtype == torch.float32
    assert values[torch.float32].shape[:2] == (2, 3)
    assert not values[torch.float64].isinf().any() or name == "half_life"


@pytest.mark.parametrize("n", [2, 8, 64, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_uniform_attention_has_no_locality_beyond_chance(n, causal):
    assert metrics.adjusted_locality(uniform(n, causal)).item() == pytest.approx(0, abs=1e-12)


def test_adjusted_locality_is_one_for_the_identity_and_nan_for_a_single_token():
    assert metrics.adjusted_locality(torch.eye(7)).item() == 1
    assert math.isnan(metrics.adjusted_locality(torch.ones(1, 1)))


def test_causality_is_seen_matrix_by_matrix_or_given():
    both = torch.stack([uniform(16), uniform(16, causal=True)])
    torch.testing.assert_close(metrics.adjusted_locality(both), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    assert metrics.adjusted_locality(both, causal=True)[0] < 0
    torch.testing.assert_close(metrics.entropy(both), torch.ones(2, dtype=torch.float64))
    assert metrics.entropy(both, causal=False)[1] < 1


def test_a_previous_token_head_is_told_apart_from_a_symmetric_one():
    head = previous_token(64)
    assert metrics.past_locality(head) == 1
    assert metrics.relative_asymmetry(head) == 1
    assert metrics.direction_balance(head) == -1
    with pytest.warns(UserWarning, match="one-sided"):
        assert metrics.symmetry(head) > 0.9


def test_a_faint_tilt_stays_faint_in_the_relative_asymmetry():
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


def test_the_half_life_of_flat_or_growing_attention_is_infinite_and_of_one_distance_unknown():
    i = torch.arange(32, dtype=torch.float64)
    growing = (0.1 * (i - i[:, None]).abs()).softmax(-1)
    assert metrics.half_life(torch.stack([uniform(32), growing])).tolist() == [math.inf, math.inf]
    assert math.isnan(metrics.half_life(previous_token(32)))
    assert math.isnan(metrics.half_life(torch.eye(32)))


def test_a_toeplitz_matrix_is_all_distance_and_a_sink_is_not():
    i = np.arange(12)
    circulant = np.exp(-0.3 * ((i[:, None] - i) % 12))
    toeplitz = torch.from_numpy(circulant / circulant.sum(-1, keepdims=True))
    assert metrics.toeplitz_share(toeplitz).item() == pytest.approx(1)
    assert metrics.toeplitz_share(uniform(12)) == 1
    assert metrics.toeplitz_share(torch.eye(12)[[0] * 12]) < 0.3


def test_the_empty_half_of_a_causal_matrix_explains_nothing():
    generator = torch.Generator().manual_seed(0)
    noise = 3 * torch.randn(20, 48, 48, generator=generator, dtype=torch.float64)
    causal = noise.masked_fill(torch.ones(48, 48).triu(1).bool(), -math.inf).softmax(-1)
    share = metrics.toeplitz_share(causal).mean()
    assert 0 <= share < 0.35


def test_the_future_of_a_causal_matrix_has_no_monotonicity():
    past, future = metrics.monotonicity(causal_attention(9, 9))
    assert 0 <= past <= 1
    assert math.isnan(future)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_the_window_holds_its_share_and_no_smaller_one_does(share):
    attention = random_attention(40, 40)
    w = int(metrics.window(attention, share))
    i = torch.arange(40)
    held = [(attention * ((i - i[:, None]).abs() <= v)).sum(-1).mean().item() for v in (w, w - 1)]
    assert held[0] >= share - 1e-12 > held[1]


def test_the_identity_needs_no_window_and_has_no_distance():
    assert metrics.window(torch.eye(5)) == 0
    assert metrics.mean_distance(torch.eye(5)) == 0
    assert metrics.entropy(torch.eye(5)) == 0


def test_cropping_a_sink_shows_what_the_head_does_beside_it():
    identity = torch.eye(16, dtype=torch.float64)
    head = 0.8 * identity[[0] * 16] + 0.1 * previous_token(16) + 0.1 * identity
    assert metrics.sink_rate(head).item() == pytest.approx(0.8 + 0.1 / 15)
    assert metrics.past_locality(head) < 0.4
    assert metrics.past_locality(metrics.crop(head, 1)) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda A: metrics.window(A, 0.0), "share"),
        (lambda A: metrics.window(A, 1.5), "share"),
        (lambda A: metrics.sink_rate(A, 0), "sinks"),
        (lambda A: metrics.half_life(A, side="left"), "side"),
    ],
)
def test_options_out_of_range_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.eye(4))


@pytest.mark.parametrize(
    "name",
    ["direction_balance", "adjusted_locality", "past_locality", "distance_profile", "mean_distance", "half_life",
     "toeplitz_share", "entropy", "sink_rate"],
)  # fmt: skip
def test_smooth_companions_are_differentiable(name):
    logits = torch.randn(2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    i = torch.arange(7)
    near = -2 * (i - i[:, None]).abs()  # half_life is infinite, without a slope, where attention does not fall
    assert torch.autograd.gradcheck(lambda x: getattr(metrics, name)((x + near).softmax(-1)), logits)
