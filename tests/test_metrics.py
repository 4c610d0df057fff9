"""The published metrics and what all metrics share: golden values, slow reference, gradients, input validation."""

import importlib
import math
import os
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutput

from pelocality import metrics
from pelocality.encodings import ALiBi, AttenuatedEncoding
from pelocality.metrics import _row_pass, locality, measure, relative_asymmetry, symmetry
from pelocality.metrics._row_pass import row_statistics
from pelocality.metrics._tolerance import precision_of
from pelocality.metrics.accumulate import MeanOver
from pelocality.metrics.without_matrix import measure_absolute, measure_relative
from tests import golden, witness
from tests.names import METRICS

ON_A_CPU = pytest.mark.parametrize("compiler", ["torch", "numba"], indirect=True)
COMPILERS = pytest.mark.parametrize("compiler", ["torch", "numba", "triton"], indirect=True)
SIZES = [1, 2, 3, 4, 5, 33, 64, 65, 130]


@pytest.fixture
def compiler(request, monkeypatch):
    """Run a test on the formula in torch, or on a compiled pass; that for a GPU in triton's interpreter."""
    if request.param == "torch":
        monkeypatch.setattr(_row_pass, "_engine", lambda device: None)
        monkeypatch.setattr(_row_pass, "_BLOCK", 2000)
    if request.param == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("compiled for this machine's GPU, where test_another_device.py runs it")
        on_gpu = importlib.import_module("pelocality.metrics._row_pass_triton")

        for name in ("_sizes", "_gradient_sizes"):  # the interpreter takes as long for many rows as for one
            monkeypatch.setattr(on_gpu, name, lambda n: {"HEIGHT": 64, "BLOCK": 32, "num_warps": 1})
        monkeypatch.setattr(_row_pass, "_engine", lambda device: on_gpu)
    return request.param


def random_attention(*shape, seed=0, dtype=torch.float64, sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1).to(dtype)


def causal_attention(*shape, seed=0):
    weights = random_attention(*shape, seed=seed).tril()
    return weights / weights.sum(-1, keepdim=True)


@COMPILERS
@pytest.mark.parametrize("case", golden.CASES, ids=lambda case: case["name"])
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_golden_values_hold_to_twelve_digits(case, compiler):
    matrix = golden.matrix(case["name"])
    assert locality(matrix).item() == pytest.approx(case["locality"], abs=1e-12)
    assert relative_asymmetry(matrix).item() == pytest.approx(case["relative_asymmetry"], abs=1e-12)
    expected = math.nan if case["symmetry"] is None else case["symmetry"]
    assert symmetry(matrix).item() == pytest.approx(expected, abs=1e-12, nan_ok=True)


@COMPILERS
@pytest.mark.parametrize("n", SIZES)
def test_every_length_agrees_with_the_slow_reference(n, compiler):
    attention = random_attention(2, n, n, seed=n)
    result = measure(attention)
    for index, matrix in enumerate(attention.tolist()):
        assert result.locality[index].item() == pytest.approx(witness.locality(matrix), abs=1e-14)
        assert result.symmetry[index].item() == pytest.approx(witness.symmetry(matrix), abs=1e-14, nan_ok=True)
        assert result.relative_asymmetry[index].item() == pytest.approx(witness.relative_asymmetry(matrix), abs=1e-14)


weights = st.floats(0, 1, width=64)
matrices = st.integers(1, 40).flatmap(
    lambda n: hnp.arrays(np.float64, (n, n), elements=weights, fill=st.sampled_from([0.0, 0.25, 1.0]))
)


@COMPILERS
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(matrix=matrices, nearly=st.sampled_from([0.0, 1e-15, 1e-13, 1e-9, 1e-3]))
def test_float64_matrices_agree_with_the_slow_reference(compiler, matrix, nearly):
    matrix = 0.5 * (matrix + matrix[:, ::-1]) + nearly * matrix if nearly else matrix  # nearly constant rows
    matrix = matrix + (matrix.sum(-1, keepdims=True) == 0)
    matrix = matrix / matrix.sum(-1, keepdims=True)
    result = measure(matrix)
    rows = matrix.tolist()
    assert result.symmetry.item() == pytest.approx(witness.symmetry(rows), abs=1e-12, nan_ok=True)
    assert result.locality.item() == pytest.approx(witness.locality(rows), abs=1e-13)
    assert result.relative_asymmetry.item() == pytest.approx(witness.relative_asymmetry(rows), abs=1e-12)


@COMPILERS
@pytest.mark.parametrize("rtol", [0.0, 1e-12, 1e-3, 0.5])
def test_rtol_sets_the_tolerance_of_the_constant_row_rule(rtol, compiler):
    tilted = golden.softmax(-0.1 * (np.arange(33)[:, None] - np.arange(33)) ** 2.0)
    tilted = tilted * (1 + 1e-6 * np.tri(33))
    tilted /= tilted.sum(-1, keepdims=True)
    assert symmetry(tilted, rtol=rtol).item() == pytest.approx(witness.symmetry(tilted.tolist(), rtol), abs=1e-9)


def test_row_values_average_to_the_matrix_value():
    attention = random_attention(3, 21, 21)
    pairs = torch.minimum(torch.arange(21), torch.arange(21).flip(0))
    by_row = symmetry(attention, rows=True)
    assert by_row[:, [0, -1]].isnan().all()
    torch.testing.assert_close((pairs * by_row).nansum(-1) / pairs.sum(), symmetry(attention))
    torch.testing.assert_close(locality(attention, rows=True).mean(-1), locality(attention))


def test_measure_returns_the_values_of_each_function():
    attention = random_attention(2, 3, 40, 40)
    together = measure(attention)
    for name, function in (("locality", locality), ("symmetry", symmetry), ("relative_asymmetry", relative_asymmetry)):
        torch.testing.assert_close(getattr(together, name), function(attention), rtol=0, atol=1e-15)


def test_threads_do_not_change_the_numbers():
    attention = random_attention(4, 300, 300)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = measure(attention)
        torch.set_num_threads(3)
        together = measure(attention)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(alone.symmetry, together.symmetry, rtol=0, atol=1e-15)
    torch.testing.assert_close(alone.locality, together.locality, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [5, 9])
def test_gradients_equal_finite_differences(n, monkeypatch):
    monkeypatch.setattr(_row_pass, "_BLOCK", 50)  # several blocks of rows
    logits = (
        3 * torch.randn(2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    ).requires_grad_()

    def numbers(logits):
        result = measure(logits.softmax(-1))
        return result.locality, result.symmetry, result.relative_asymmetry

    assert torch.autograd.gradcheck(numbers, logits)


NUMBERS = {name: getattr(metrics, name) for name in ("locality", "symmetry", "relative_asymmetry")} | {
    "adjusted_locality": metrics.adjusted_locality,
    "past_locality": metrics.past_locality,
    "measure": lambda A: torch.stack(list(vars(measure(A)).values())),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("also_backward", [False, True])
def test_forward_mode_agrees_with_finite_differences(name, also_backward):
    number = NUMBERS[name]
    generator = torch.Generator().manual_seed(0)
    logits, direction = torch.randn(2, 2, 9, 9, dtype=torch.float64, generator=generator)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits.clone().requires_grad_(also_backward), direction)
        tangent = forward_ad.unpack_dual(number(dual.softmax(-1))).tangent
    step = 1e-6
    after, before = (number((logits + sign * step * direction).softmax(-1)) for sign in (1, -1))
    torch.testing.assert_close(tangent, (after - before) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "measure"])
def test_transforms_of_torch_func_agree_with_autograd(name):
    def value(logits):
        return NUMBERS[name](logits.softmax(-1)).sum()

    logits, direction = torch.randn(2, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(value)(logits), gradient)
    torch.testing.assert_close(torch.func.jvp(value, (logits,), (direction,))[1], (gradient * direction).sum())
    hessian = torch.autograd.functional.hessian(value, logits)
    torch.testing.assert_close(torch.func.hessian(value)(logits), hessian)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_second_derivatives_equal_finite_differences(n):
    logits = (
        2 * torch.randn(2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    ).requires_grad_()

    def numbers(logits):
        result = measure(logits.softmax(-1))
        return [v for v in (result.locality, result.symmetry, result.relative_asymmetry) if not v.isnan().any()]

    assert torch.autograd.gradgradcheck(numbers, logits)


@COMPILERS
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_gradients_with_and_without_create_graph_agree(compiler, dtype, within):
    tied = torch.eye(67).roll(2, -1)[None] / 2 + torch.eye(67) / 2  # many differences are equal
    attention = torch.cat([random_attention(2, 67, 67), causal_attention(1, 67, 67), tied]).to(dtype).requires_grad_()
    for value in (measure(attention).symmetry, relative_asymmetry(attention), locality(attention)):
        for weights in (torch.ones(4), torch.tensor([1.0, -2.0, 0.5, 1.0])):
            weights = weights.to(value.dtype)
            (once,) = torch.autograd.grad(value, attention, weights, retain_graph=True)
            (twice,) = torch.autograd.grad(value, attention, weights, create_graph=True)
            row = twice.detach().abs().amax(-1, keepdim=True).clamp(min=1e-10)
            torch.testing.assert_close(once / row, twice.detach() / row, rtol=within, atol=within)


@COMPILERS
def test_some_rows_of_matrices_have_the_sums_of_the_whole(compiler):
    attention = random_attention(2, 41, 41)
    whole, part = row_statistics(attention), row_statistics(attention[:, 7:30], first=7)
    torch.testing.assert_close(part.numbers, whole.numbers[..., 7:30], rtol=1e-12, atol=1e-15)


@COMPILERS
@pytest.mark.parametrize("fault", [math.nan, math.inf, -0.25, 0.5])
@pytest.mark.parametrize("column", [0, 4, 9])
def test_a_single_faulty_weight_is_refused(compiler, fault, column):
    attention = random_attention(2, 10, 10, dtype=torch.float32)
    attention[1, 4, column] += fault
    for metric in (locality, measure):
        with pytest.raises(ValueError, match="attention"):
            metric(attention)


def test_the_gradient_at_perfect_symmetry_is_zero_not_nan():
    attention = torch.from_numpy(golden.matrix("gauss_w0.1_N16")).requires_grad_()
    (gradient,) = torch.autograd.grad(symmetry(attention), attention)
    assert gradient.abs().max() == 0


@COMPILERS
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_low_precision_is_close_to_float64(dtype, within, compiler):
    exact = random_attention(3, 64, 64)
    rounded = measure(exact.to(dtype))
    assert rounded.symmetry.dtype == torch.float32
    torch.testing.assert_close(rounded.symmetry, measure(exact).symmetry.float(), rtol=0, atol=within)
    torch.testing.assert_close(rounded.locality, measure(exact).locality.float(), rtol=0, atol=within)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_symmetric_matrix_is_symmetric_in_every_precision(dtype):
    assert symmetry(torch.from_numpy(golden.matrix("gauss_w0.01_N128")).to(dtype)).item() == 1


def sinusoidal(n, width, dtype):
    """Return the logits of the table of Vaswani et al., computed in that precision throughout."""
    frequency = torch.exp(torch.arange(0, width, 2).to(dtype) * (-math.log(10000.0) / width))
    angle = torch.arange(n, dtype=dtype)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], -1)
    return table @ table.T / math.sqrt(width)


@pytest.mark.parametrize("scale", [1e-5, 1e-1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_encodings_stay_symmetric_through_the_rounding_of_their_logits(dtype, scale):
    for n, width in ((16, 64), (65, 768), (256, 16)):
        assert symmetry((scale * sinusoidal(n, width, dtype)).softmax(-1)) == 1
        attenuated = AttenuatedEncoding(heads=1, decay=scale, symmetry=1.0).to(dtype)
        assert symmetry(attenuated.weights(n).detach()) == 1


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_float32_and_float64_agree_on_nearly_uniform_attention(scale, n):
    logits = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).float() * scale
    exact = symmetry(logits.double().softmax(-1)).item()
    assert symmetry(logits.softmax(-1)).item() == pytest.approx(exact, abs=0.01)


@COMPILERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tilt", [1e-1, 1e-3, 1e-5, 1e-7])
def test_the_constant_row_rule_agrees_with_the_reference_in_every_precision(tilt, dtype, compiler):
    logits = tilt * torch.randn(33, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attention = (logits - 0.01 * (torch.arange(33) - torch.arange(33)[:, None]).abs()).softmax(-1).to(dtype)
    expected = witness.symmetry(attention.tolist(), eps=torch.finfo(dtype).eps)
    if dtype in (torch.float16, torch.bfloat16):  # the per_nat term is that of float32
        expected = witness.symmetry(attention.tolist(), rtol=2 * torch.finfo(dtype).eps)
    assert symmetry(attention).item() == pytest.approx(expected, abs=1e-5)


@COMPILERS
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_converted_to_another_dtype_keeps_its_tolerance(half, dtype, compiler):
    position = torch.arange(48.0)
    distance = position - position[:, None]
    noise = 1e-7 * torch.randn(9, 48, 48, generator=torch.Generator().manual_seed(0))
    attention = ((-0.1 * distance.abs()) * (1 + noise)).softmax(-1).to(half)
    assert (symmetry(attention) == 1).all()
    assert (symmetry(attention.to(dtype).numpy()) == 1).all()
    many = (3 * torch.randn(1, 260, 260, generator=torch.Generator().manual_seed(1))).softmax(-1).to(half).to(dtype)
    assert (many.sum(-1) - 1).abs().max() > (1e-3 if half == torch.bfloat16 else 0)
    torch.testing.assert_close(locality(many.numpy()), locality(many.to(half)).to(dtype), rtol=0, atol=1e-6)


def test_a_causal_matrix_of_float32_is_not_taken_for_half_precision():
    assert precision_of(causal_attention(3, 9, 9).float()) == torch.float32
    assert precision_of(causal_attention(3, 9, 9).bfloat16().double()) == torch.bfloat16
    mixed = torch.cat([torch.full((70, 4, 4), 0.25), random_attention(1, 4, 4).float()])
    assert precision_of(mixed) == torch.float32


def test_numba_that_cannot_be_loaded_leaves_the_metrics_to_torch(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pelocality.metrics._row_pass_numba", None)  # importing it raises an ImportError
    _row_pass._engine.cache_clear()
    try:
        assert locality(torch.eye(5)) == locality(torch.eye(5)[None])[0] == 1
        assert symmetry(torch.eye(5)) == 1
    finally:
        _row_pass._engine.cache_clear()
    assert caplog.text.count("numba cannot be used, metrics are computed in torch") == 1


def numbers(values):
    """Return what a metric returns as a list of tensors."""
    return list(vars(values).values()) if isinstance(values, metrics.Measurement) else [values]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:the attention is one-sided")
def test_every_metric_keeps_the_contract_of_all(name):
    def metric(given, **options):
        return numbers(getattr(metrics, name)(given, **options))

    attention = random_attention(3, 2, 9, 9)
    before, expected = attention.clone(), metric(attention)
    negative_bit = torch.complex(torch.zeros_like(attention), -attention).conj().imag
    forms = {
        "negative bit": negative_bit,
        "other strides": attention.mT.contiguous().mT,
        "layers": tuple(attention),
        "output": BaseModelOutput(attentions=tuple(attention)),
        "array": attention.numpy(),
        "result": SimpleNamespace(attention=attention),
    }
    for form in forms.values():
        torch.testing.assert_close(metric(form), expected, rtol=1e-12, atol=1e-13, equal_nan=True)
    swapped = metric(attention.transpose(0, 1))
    torch.testing.assert_close([each.transpose(0, 1) for each in swapped], expected, equal_nan=True)
    for matrices in (attention, causal_attention(3, 2, 9, 9), torch.eye(9).expand(3, 2, 9, 9), torch.ones(3, 2, 1, 1)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for values in metric(matrices.to(dtype)):
                assert values.dtype == torch.promote_types(dtype, torch.float32)
                assert values.shape[:2] == (3, 2)
                assert not values.isinf().any() or name == "half_life"
    for gradients in (False, True):
        empty = torch.zeros(2, 0, 5, 5, requires_grad=gradients)
        assert all(values.shape[:2] == (2, 0) for values in metric(empty))
    if name != "crop":
        assert all(values.shape[:2] == (2, 0) for values in metric(empty, mask=torch.ones(2, 0, 5)))
    zeros = torch.eye(9).expand(3, 2, 9, 9)
    torch.testing.assert_close(metric(torch.where(zeros > 0, zeros, -0.0)), metric(zeros), equal_nan=True)
    assert torch.equal(attention, before)


def test_arrays_and_results_are_accepted():
    attention = random_attention(2, 10, 10)

    class Result:
        """An object with an ``attention``."""

    result = Result()
    result.attention = attention
    read_only = attention.numpy()
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (result, read_only, read_only.astype(">f8"), read_only[::-1][::-1]):
            torch.testing.assert_close(locality(form), locality(attention))
        backwards = read_only[:1][::-1]  # a negative stride that numpy takes for contiguous
        torch.testing.assert_close(locality(backwards), locality(attention[:1]))


@pytest.mark.parametrize("metric", [symmetry, measure])
@pytest.mark.parametrize(
    "matrix", [causal_attention(12, 12), causal_attention(12, 12).flip(-1, -2)], ids=["past", "future"]
)
def test_one_sided_attention_warns_and_names_the_alternative(matrix, metric):
    with pytest.warns(UserWarning, match="relative_asymmetry") as caught:
        metric(torch.stack([random_attention(12, 12), matrix]))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "call",
    [
        lambda A: symmetry(tuple(A)),
        lambda A: symmetry(A, mask=torch.tensor([[1] * 9 + [0] * 3, [1] * 12, [0] * 2 + [1] * 10])),
        lambda A: MeanOver(metrics.symmetry).update(A),
        lambda A: MeanOver(metrics.symmetry)(A),
    ],
    ids=["layers", "spans", "update", "forward"],
)
def test_a_call_warns_once_with_the_location_of_the_caller(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(causal_attention(3, 12, 12))
    here = [warning.filename for warning in caught if "one-sided" in str(warning.message)]
    assert here == [__file__]


def banded(*shape):
    """Return uniform attention to n tokens as Longformer returns it: entry c of row i is key i + c - n // 2."""
    n = shape[-1]
    key = torch.arange(n) + torch.arange(n)[:, None] - n // 2
    seen = ((key >= 0) & (key < n)).double().expand(*shape, n)
    return seen / seen.sum(-1, keepdim=True)


INVALID = {
    ValueError: [
        torch.ones(1, 2, 0), torch.ones(3), torch.ones(2, 0, 0), torch.randn(4, 4).softmax(-2), torch.randn(4, 4).abs(),
        torch.tensor([[1.5, -0.5], [0.5, 0.5]]), torch.tensor([[math.nan, 1.0], [0.5, 0.5]]),
        torch.tensor([[math.inf, 1.0], [0.5, 0.5]]), torch.tensor([[math.inf, -math.inf], [0.5, 0.5]]),
        (), (None, None), torch.eye(4) * torch.tensor([2.0, 0, 2, 2]), torch.full((4, 4), 0.2),
        torch.eye(4) * torch.tensor([1.0, 1, 1, 0]), banded(2, 3, 7),
        LongformerBaseModelOutput(None, attentions=(torch.eye(5),)),
    ],
    TypeError: [
        torch.eye(3, dtype=torch.complex64), torch.eye(3, dtype=torch.int64), np.eye(3, dtype=int), "attention.npy",
        torch.nn.Sequential(), ALiBi(2), [[1.0, 0.0], [0.0, 1.0]], pd.DataFrame(np.eye(2)), object(), Seq2SeqLMOutput(),
        np.ma.masked_array(np.eye(3), np.eye(3)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in METRICS if name != "crop"])
def test_invalid_attention_raises_an_error(name):
    for error, several in INVALID.items():
        for attention in several:
            with pytest.raises(error):
                getattr(metrics, name)(attention)


def test_a_tolerance_is_a_number_of_at_least_0():
    attention = random_attention(9, 9)
    for metric in (symmetry, measure, measure_absolute, lambda A, rtol: measure_relative(A[0], rtol=rtol)):
        assert metric(attention, rtol=torch.tensor(0.1)) == metric(attention, rtol=0.1)
        for rtol in (-1.0, math.nan):
            with pytest.raises(ValueError, match="rtol"):
                metric(attention, rtol=rtol)


def test_masked_entries_raise_an_error_in_every_argument():
    attention, hidden = torch.eye(4), np.ma.masked_array(np.ones(4, bool), [False, False, False, True])
    for call in (
        lambda: locality(attention, mask=hidden),
        lambda: metrics.adjusted_locality(attention, visible=np.ma.masked_array(np.ones((4, 4), bool), np.eye(4))),
        lambda: ALiBi(4, slopes=hidden.astype(float)),
    ):
        with pytest.raises(TypeError, match=r"(mask|visible|slopes) must not be a masked array"):
            call()
    nothing_hidden = np.ma.masked_array(np.ones(4, bool))
    assert locality(attention, mask=nothing_hidden) == locality(attention)
    assert locality(np.ma.masked_array(np.eye(4))) == locality(attention)


def test_compiled_functions_have_the_values_and_gradients_of_metrics():
    logits = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def loss(logits):
        return (logits**2).sum() + 10 * symmetry(logits.softmax(-1)).sum()

    value, expected = torch.compile(loss, backend="aot_eager")(logits), loss(logits)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (value, expected)))


def test_measurements_are_shown_as_a_table_without_profiles():
    found = measure(random_attention(2, 3, 8, 8))
    assert len(repr(found).splitlines()) == 1 + 6
    assert "<table" in found._repr_html_()
    relative = measure_relative(torch.rand(4, 15))
    assert list(relative.to_frame().columns)[:3] == ["axis 0", "locality", "symmetry"]
    assert "sink_rate" in repr(relative)
    assert "profile" not in repr(relative)
    assert repr(measure(torch.eye(8))) == "Measurement(locality=1.0000, symmetry=1.0000, relative_asymmetry=0.0000)"
    assert measure(torch.eye(8))._repr_html_() is None
