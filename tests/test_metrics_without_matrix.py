"""The values without a matrix equal those of the dense matrix."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from pelocality.encodings import ALiBi
from pelocality.metrics import measure
from pelocality.metrics.position_tables import position_weights
from pelocality.metrics.without_matrix import measure_absolute, measure_relative
from tests import golden, witness
from tests.test_metrics import BOTH, backend  # noqa: F401
from tests.test_metrics_position_tables import random_table

FIELDS = ("locality", "symmetry", "relative_asymmetry")


def dense(bias):
    """Return the attention of a relative bias."""
    n = (bias.shape[-1] + 1) // 2
    i = torch.arange(n)
    return bias[..., i - i[:, None] + n - 1].softmax(-1)


def assert_same(one, other, atol=1e-13):
    for field in FIELDS:
        torch.testing.assert_close(getattr(one, field), getattr(other, field), rtol=0, atol=atol, equal_nan=True)


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


def test_relative_measures_are_differentiable():
    bias = random_table(13).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: [getattr(measure_relative(b), field) for field in FIELDS], bias)


def test_the_result_keeps_precision_and_shape():
    result = measure_relative(torch.zeros(2, 0, 9))
    assert result.locality.shape == (2, 0)
    assert measure_relative(torch.zeros(2, 9, dtype=torch.bfloat16)).symmetry.dtype == torch.float32


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        (torch.zeros(4), ValueError, "odd"),
        (torch.tensor(0.0), ValueError, "odd"),
        (torch.zeros(2, 8, 8), ValueError, r"got shape \(2, 8, 8\); an encoding gives them as relative\(n\)"),
        (torch.tensor([0.0, math.nan, 0.0]), ValueError, "NaN"),
        (torch.tensor([0.0, math.inf, 0.0]), ValueError, "inf"),
        (torch.tensor([0.0, -math.inf, -math.inf]), ValueError, "masks every key"),
        (torch.zeros(5, dtype=torch.int64), TypeError, r"got torch.int64; use bias.float"),
        ([0.0, 0.0, 0.0], TypeError, r"got list; convert it with np\.asarray\(bias\)"),
        (ALiBi(2), TypeError, r"got ALiBi; give its \.relative\(length\)"),
        (10.0 * distances(200).abs(), ValueError, "nats"),
    ],
)
def test_invalid_biases_raise_an_error(bias, error, words):
    with pytest.raises(error, match=words):
        measure_relative(bias)


@BOTH
@pytest.mark.parametrize("n", [1, 2, 3, 4, 33, 130, 1100])
def test_a_table_has_the_values_of_its_dense_matrix(n, backend):  # noqa: F811
    table = random_table(n, 6)
    assert_same(measure_absolute(table), measure(position_weights(table)))


@BOTH
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_each_head_is_measured(similarity, backend):  # noqa: F811
    table, query, key = random_table(50, 6), random_table(3, 6, 4, seed=1), random_table(3, 6, 4, seed=2)
    options = {"similarity": similarity, "temperature": 0.7}
    result = measure_absolute(table, query, key, **options)
    assert result.symmetry.shape == (3,)
    assert_same(result, measure(position_weights(table, query, key, **options)))


def test_no_heads_give_empty_results():
    absolute = measure_absolute(random_table(5, 6), random_table(0, 6, 4), random_table(0, 6, 4))
    for result in (absolute, measure_relative(random_table(0, 9))):
        assert [getattr(result, field).shape for field in FIELDS] == [(0,)] * 3


@BOTH
@pytest.mark.parametrize("n", [2, 70])
def test_similarities_beyond_the_precision_raise_an_error(n, backend):  # noqa: F811
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


@BOTH
def test_float32_tables_agree_to_float32_precision(backend):  # noqa: F811
    table = random_table(600, 16).float()
    assert measure_absolute(table).symmetry.dtype == torch.float32
    assert_same(measure_absolute(table), measure(position_weights(table)), atol=1e-5)
