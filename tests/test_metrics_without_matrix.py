"""The values without a matrix equal those of the dense matrix."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from pelocality import metrics
from pelocality.encodings import ALiBi
from pelocality.metrics import measure
from pelocality.metrics.position_tables import position_weights
from pelocality.metrics.without_matrix import RelativeMeasurement, measure_absolute, measure_relative
from tests import golden, witness
from tests.test_metrics import ON_A_CPU, compiler  # noqa: F401
from tests.test_metrics_position_tables import random_table

FIELDS = ("locality", "symmetry", "relative_asymmetry")
RELATIVE = [each.name for each in dataclasses.fields(RelativeMeasurement)]
OF_VISIBLE_KEYS = ("adjusted_locality", "entropy")
SHARES, SIDES = (0.01, 0.5, 0.9, 1.0), ("both", "past", "future")
MASKS = {
    "none": lambda k: k < -math.inf,
    "causal": lambda k: k > 0,
    "past": lambda k: k < 0,
    "window": lambda k: k.abs() > 3,
    "causal window": lambda k: (k > 0) | (k < -3),
    "dilated": lambda k: k % 2 == 1,
}
BIASES = {
    "random": lambda k: 2 * random_table(2, 3, len(k), seed=len(k)),
    "sharp": lambda k: 40 * random_table(len(k), seed=len(k)),
    "uniform": lambda k: 0 * k,
    "exponential": lambda k: -0.1 * k.abs(),
    "steep": lambda k: -3.0 * k**2,
    "underflow": lambda k: -2000.0 * k.abs(),
    "previous token": lambda k: -20.0 * (k + 1).abs(),
    "growing": lambda k: 2.0 * k.abs(),
    "far from 0": lambda k: 1e6 - k.abs(),
}


def dense(bias):
    """Return the attention of a relative bias."""
    n = (bias.shape[-1] + 1) // 2
    i = torch.arange(n)
    return bias[..., i - i[:, None] + n - 1].softmax(-1)


def assert_same(one, other, atol=1e-13):
    for field in FIELDS:
        torch.testing.assert_close(getattr(one, field), getattr(other, field), rtol=0, atol=atol, equal_nan=True)


def matrix_values(bias):
    """Return every metric of the dense matrix of a bias."""
    i = torch.arange((bias.shape[-1] + 1) // 2)
    attention, visible = dense(bias), (bias > -math.inf)[..., i - i[:, None] + len(i) - 1]
    values = {
        name: getattr(metrics, name)(attention, **({"visible": visible} if name in OF_VISIBLE_KEYS else {}))
        for name in (*RELATIVE, "profile_asymmetry")
    }
    windows = {share: metrics.window(attention, share) for share in SHARES}
    return values | windows | {side: metrics.half_life(attention, side=side) for side in SIDES}


def relative_values(bias):
    """Return the same of `measure_relative`."""
    result = measure_relative(bias)
    values = {name: getattr(result, name) for name in (*RELATIVE, "profile_asymmetry")}
    windows = {share: result.window(share) for share in SHARES}
    return values | windows | {side: result.half_life(side=side) for side in SIDES}


def assert_same_values(bias, rtol=1e-9, atol=1e-13):
    one, other = relative_values(bias), matrix_values(bias)
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def distances(n):
    return torch.arange(-(n - 1), n, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 33, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_a_relative_bias_has_the_values_of_its_dense_matrix(n, causal):
    bias = 2 * random_table(2, 3, 2 * n - 1, seed=n)
    if causal:
        bias[..., n:] = -torch.inf
    assert_same(measure_relative(bias), measure(dense(bias)))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 33, 200])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_every_metric_of_a_relative_bias_is_that_of_its_dense_matrix(n, mask, kind):
    k = distances(n)
    assert_same_values(BIASES[kind](k).masked_fill(MASKS[mask](k), -math.inf))


@settings(max_examples=60, deadline=None)
@given(
    sides=st.integers(1, 30)
    .flatmap(lambda n: hnp.arrays(np.float64, 2 * n - 1, elements=st.floats(-40, 20) | st.just(-np.inf)))
    .map(lambda sides: sides.round(3)),  # monotonicity compares weights, which rounding could make equal
    center=st.floats(-40, 20).map(lambda x: round(x, 3)),
)
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_every_metric_agrees_wherever_keys_are_masked(sides, center):
    bias = torch.from_numpy(sides)
    bias[len(bias) // 2] = center  # no query without a key
    one, other = relative_values(bias), matrix_values(bias)
    for name in set(one) - {"symmetry", *SIDES}:  # both measure the rounding of nearly constant rows and flat profiles
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_geometric_distribution_has_its_closed_form_at_a_million_positions():
    n, slope = 1_000_000, 0.5
    k = distances(n)
    q = math.exp(-slope)
    with pytest.warns(UserWarning, match="one-sided"):
        causal = measure_relative(torch.where(k > 0, -math.inf, slope * k))
    # A_ij = (1 - q) q^(i-j) but for the first rows, whose share is about 1 / n
    assert causal.mean_distance.item() == pytest.approx(q / (1 - q), rel=1e-5)
    assert causal.locality.item() == pytest.approx((1 - q) / (1 - q / 2), rel=1e-5)
    assert causal.past_locality.item() == pytest.approx((1 - q) / (1 - q / 2), rel=1e-5)
    assert causal.half_life(side="past").item() == pytest.approx(math.log(2) / slope, rel=1e-5)
    assert causal.window(0.9).item() == math.ceil(math.log(0.1) / math.log(q)) - 1
    assert causal.direction_balance == -1
    nats = -math.log(1 - q) - q / (1 - q) * math.log(q)
    mean_of_inverse_log = (1 / torch.arange(2, n + 1, dtype=torch.float64).log()).mean().item()
    assert causal.entropy.item() == pytest.approx(nats * mean_of_inverse_log, rel=1e-4)
    assert causal.sink_rate.item() == pytest.approx(q / n, rel=0.5)
    both = measure_relative(-slope * k.abs())
    assert both.mean_distance.item() == pytest.approx(2 * q / (1 - q**2), rel=1e-5)
    assert both.half_life().item() == pytest.approx(math.log(2) / slope, rel=1e-5)
    assert abs(both.direction_balance.item()) < 1e-12


def test_many_short_heads_are_measured_as_one_by_one():
    bias = random_table(2, 200, 2 * 700 - 1)  # more numbers than are measured at a time
    result = measure_relative(bias)
    for field in RELATIVE:
        one_by_one = torch.stack([getattr(measure_relative(head), field) for head in bias[1, -3:]])
        torch.testing.assert_close(getattr(result, field)[1, -3:], one_by_one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_a_shorter_bias_leaves_the_first_tokens_out(mask):
    k = distances(20)
    bias = random_table(len(k)).masked_fill(MASKS[mask](k), -math.inf)
    result = measure_relative(bias[3:-3])
    for name in ("locality", "mean_distance", "entropy", "sink_rate"):
        expected = getattr(metrics, name)(dense(bias), without_first=3)
        torch.testing.assert_close(getattr(result, name), expected, rtol=1e-12, atol=0)


def test_keys_whose_weight_underflows_stay_visible():
    bias = torch.where(distances(9) > 0, -2000.0, 0.0)
    assert metrics.entropy(dense(bias)).item() == pytest.approx(1)  # inferred to be causal
    assert measure_relative(bias).entropy.item() == pytest.approx(
        metrics.entropy(dense(bias), causal=False).item(), abs=1e-6
    )


@pytest.mark.filterwarnings("ignore:the attention is one-sided")
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_is_rounded_once(dtype, mask):
    k = distances(100)
    bias = random_table(2, len(k)).masked_fill(MASKS[mask](k), -math.inf).to(dtype)
    one, other = relative_values(bias), relative_values(bias.double())
    for name in set(one) - {"symmetry"}:  # its tolerance is that of the dtype
        assert one[name].dtype == torch.float32
        torch.testing.assert_close(one[name].double(), other[name], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_window_or_a_side_that_does_not_exist_raises_an_error():
    result = measure_relative(torch.zeros(5))
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            result.window(share)
    with pytest.raises(KeyError, match="left"):
        result.half_life(side="left")


def test_a_causal_bias_warns_that_its_symmetry_is_meaningless():
    bias = random_table(2, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_relative(bias)
    bias[1, 5:] = -torch.inf
    with pytest.warns(UserWarning, match="the attention is one-sided") as caught:
        measure_relative(bias)
    assert caught[0].filename == __file__


@settings(max_examples=200, deadline=None)
@given(
    bias=st.integers(1, 30).flatmap(lambda n: hnp.arrays(np.float64, 2 * n - 1, elements=st.floats(-40, 20))),
    symmetric=st.sampled_from([0.0, 1e-14, 1e-10, 1e-5, 1.0]),
)
def test_biases_agree_with_the_slow_reference(bias, symmetric):
    bias = torch.from_numpy(0.5 * (bias + bias[::-1]) + symmetric * bias)
    matrix = dense(bias).tolist()
    result = measure_relative(bias)
    assert result.locality.item() == pytest.approx(witness.locality(matrix), abs=1e-12)
    assert result.relative_asymmetry.item() == pytest.approx(witness.relative_asymmetry(matrix), abs=1e-10)
    if symmetric in (0.0, 1.0):  # in between, both measure the rounding of their softmax
        assert result.symmetry.item() == pytest.approx(witness.symmetry(matrix), abs=1e-9, nan_ok=True)


def test_an_exactly_symmetric_bias_is_exactly_symmetric_at_any_length():
    for n in (64, 4096):
        frequency = 10000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64)
        bias = torch.cos(distances(n).abs()[:, None] * frequency).sum(-1) / 8
        result = measure_relative(bias)
        assert result.symmetry == 1
        assert result.relative_asymmetry == 0


def test_the_toeplitz_golden_case_holds_without_the_matrix():
    case = next(case for case in golden.CASES if case["name"] == "sinusoidal_d64_N64_toeplitz_softmax")
    frequency = 10000.0 ** (-2 * np.arange(32) / 64)
    bias = np.cos(abs(np.arange(-63, 64))[:, None] * frequency).sum(-1) / 8
    assert measure_relative(bias).locality.item() == pytest.approx(case["locality"], abs=1e-12)


def test_a_steep_decay_underflows_as_the_dense_softmax_does():
    bias = -3.0 * distances(100) ** 2
    assert_same(measure_relative(bias), measure(dense(bias)))


def test_a_bias_that_grows_with_distance_has_the_values_of_its_dense_matrix():
    assert_same(measure_relative(2.0 * distances(200).abs()), measure(dense(2.0 * distances(200).abs())))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_relative_measures_are_differentiable(mask):
    k = distances(7)
    bias = (0.3 * random_table(2, len(k)) - k.abs()).requires_grad_()  # falls, or half_life is infinite

    def values(b):
        result = measure_relative(b.masked_fill(MASKS[mask](k), -math.inf))
        found = [getattr(result, field) for field in RELATIVE if field != "monotonicity"]
        return [each for each in (*found, result.profile_asymmetry, result.half_life()) if not each.isnan().any()]

    assert torch.autograd.gradcheck(values, bias)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_gradients_are_those_of_the_dense_matrix_where_weights_underflow(mask):
    k = distances(9)
    for kind in ("underflow", "previous token", "uniform"):
        bias = BIASES[kind](k).masked_fill(MASKS[mask](k), -math.inf).requires_grad_()
        attention = dense(bias)
        result = measure_relative(bias)
        for name in ("locality", "past_locality", "mean_distance", "direction_balance", "sink_rate"):
            value, expected = getattr(result, name), getattr(metrics, name)(attention)
            if not value.isnan():
                one, other = (torch.autograd.grad(each, bias, retain_graph=True)[0] for each in (value, expected))
                torch.testing.assert_close(one, other.nan_to_num(), rtol=1e-9, atol=1e-12)
        assert torch.autograd.grad(result.entropy, bias)[0].isfinite().all()


def test_the_result_keeps_precision_and_shape():
    result = measure_relative(torch.zeros(2, 0, 9))
    assert result.locality.shape == result.half_life().shape == result.window().shape == (2, 0)
    assert result.distance_profile.shape == (2, 0, 9)
    assert result.monotonicity.shape == (2, 0, 2)
    assert measure_relative(torch.zeros(2, 9, dtype=torch.bfloat16)).symmetry.dtype == torch.float32


@pytest.mark.parametrize(
    ("bias", "error"),
    [
        (torch.zeros(4), ValueError),
        (torch.tensor(0.0), ValueError),
        (torch.zeros(2, 8, 8), ValueError),
        (torch.tensor([0.0, math.nan, 0.0]), ValueError),
        (torch.tensor([0.0, math.inf, 0.0]), ValueError),
        (torch.tensor([0.0, -math.inf, -math.inf]), ValueError),
        (10.0 * distances(200).abs(), ValueError),
        (torch.zeros(5, dtype=torch.int64), TypeError),
        ([0.0, 0.0, 0.0], TypeError),
        (ALiBi(2), TypeError),
    ],
)
def test_invalid_biases_raise_an_error(bias, error):
    with pytest.raises(error, match="bias"):
        measure_relative(bias)


@ON_A_CPU
@pytest.mark.parametrize("n", [1, 2, 3, 4, 33, 130, 1100])
def test_a_table_has_the_values_of_its_dense_matrix(n, compiler):  # noqa: F811
    table = random_table(n, 6)
    assert_same(measure_absolute(table), measure(position_weights(table)))


@ON_A_CPU
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_each_head_is_measured(similarity, compiler):  # noqa: F811
    table, query, key = random_table(50, 6), random_table(3, 6, 4, seed=1), random_table(3, 6, 4, seed=2)
    options = {"similarity": similarity, "temperature": 0.7}
    result = measure_absolute(table, query, key, **options)
    assert result.symmetry.shape == (3,)
    assert_same(result, measure(position_weights(table, query, key, **options)))


def test_no_heads_give_empty_results():
    absolute = measure_absolute(random_table(5, 6), random_table(0, 6, 4), random_table(0, 6, 4))
    for result in (absolute, measure_relative(random_table(0, 9))):
        assert [getattr(result, field).shape for field in FIELDS] == [(0,)] * 3


@ON_A_CPU
@pytest.mark.parametrize("n", [2, 70])
def test_similarities_beyond_the_precision_raise_an_error(n, compiler):  # noqa: F811
    table = 1e20 * random_table(n, 4).float()
    for function in (measure_absolute, position_weights):
        with pytest.raises(ValueError, match=r"beyond the range of torch\.float32"):
            function(table)
        function(table.double())


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_relative_bias_counts_as_constant_where_its_dense_matrix_does(scale, dtype):
    for seed in range(5):
        bias = scale * (random_table(65, seed=seed) + 1e-2 * random_table(65, seed=seed).flip(0))
        bias = bias.to(dtype)
        expected = witness.symmetry(dense(bias.double()).tolist(), eps=torch.finfo(dtype).eps)
        assert measure_relative(bias).symmetry.item() == pytest.approx(expected, abs=1e-6)


@ON_A_CPU
def test_float32_tables_agree_to_float32_precision(compiler):  # noqa: F811
    table = random_table(600, 16).float()
    assert measure_absolute(table).symmetry.dtype == torch.float32
    assert_same(measure_absolute(table), measure(position_weights(table)), atol=1e-5)
