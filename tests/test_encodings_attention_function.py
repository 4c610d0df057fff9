"""`biased_attention` against PyTorch's attention with the matrix of the bias, forward and backward."""

import importlib
import os

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    Encoding,
    FixedWindow,
    RelativeEncoding,
    T5Buckets,
    attention_function,
    biased_attention,
)

DECAYS = [0.05, 0.4, 0.9]
ENCODINGS = {
    "ALiBi": lambda: ALiBi(3),
    "causal ALiBi": lambda: ALiBi(3, causal=True),
    "window": lambda: FixedWindow(3, width=4),
    "attenuated, fixed": lambda: AttenuatedEncoding(3, DECAYS, 0.5),
    "attenuated, logits form, one head": lambda: AttenuatedEncoding(1, 0.3, 2.0, form="logits", learnable=True),
    "attenuated, logits form, causal": lambda: AttenuatedEncoding(
        3, DECAYS, form="logits", learnable=["decay"], causal=True
    ),
    "attenuated, weights form": lambda: AttenuatedEncoding(3, DECAYS, 0.5, scale=3.0, learnable=True),
    "attenuated, weights form, scale alone": lambda: AttenuatedEncoding(3, 0.2, scale=3.0, learnable=["scale"]),
    "attenuated, weights form, causal": lambda: AttenuatedEncoding(3, DECAYS, learnable=["decay"], causal=True),
    "table": lambda: DistanceTable.from_encoding(ALiBi(3), 8, signed=True),
    "KERPLE": lambda: KERPLE(3),
    "T5": lambda: T5Buckets(3),
}
EVERY = pytest.mark.parametrize("name", ENCODINGS)


@pytest.fixture(params=["short", "long"])
def path(request, monkeypatch):
    """Use the code for short or for long sequences, both at lengths that are fast to test."""
    monkeypatch.setattr(attention_function, "_LONG", 2**18 if request.param == "short" else 1)
    return request.param


def tensors(queries, keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(queries)
    shapes = (queries, 4), (keys, 4), (keys, 5)
    return [torch.randn(3, 3, *shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def by_matrix(query, key, value, encoding, mask=None, **options):
    bias = encoding(query.shape[-2], key.shape[-2], mask=mask, dtype=query.dtype)
    bias = bias if bias.ndim == 4 else bias[None]
    bias = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, **options)


def with_gradients(function, inputs, encoding, **options):
    output = function(*inputs, encoding, **options)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(output)
    return output, *torch.autograd.grad(output, (*inputs, *encoding.parameters()), gradient)


@EVERY
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (1, 1), (7, 80)])
def test_it_equals_pytorchs_attention_with_the_matrix_of_the_bias(name, path, masked, queries, keys):
    encoding = ENCODINGS[name]().double()
    inputs = tensors(queries, keys)
    mask = torch.rand(3, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.7 if masked else None
    if masked and queries > 1:
        mask[1, 0, 1] = False  # a fully masked query
    options = {"mask": mask, "scale": 0.3}
    expected = with_gradients(by_matrix, inputs, encoding, **options)
    torch.testing.assert_close(with_gradients(biased_attention, inputs, encoding, **options), expected)
    assert all(each.isfinite().all() for each in expected)


@EVERY
@pytest.mark.parametrize("shape", [(3, 1, 1, 60), (1, 1, 1, 60)])
def test_padding_on_any_side_is_ignored(name, path, shape):
    encoding = ENCODINGS[name]().double()
    inputs = tensors(50, 60)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[0, ..., 41:] = False
    if len(mask) > 1:
        mask[1, ..., :13] = False
        mask[2] = False  # only padding
    expected = with_gradients(by_matrix, inputs, encoding, mask=mask)
    torch.testing.assert_close(with_gradients(biased_attention, inputs, encoding, mask=mask), expected)
    assert all(each.isfinite().all() for each in expected)


@settings(max_examples=4, deadline=None)
@given(queries=st.integers(1, 3), extra=st.integers(0, 2), form=st.sampled_from(["weights", "logits"]))
def test_gradients_are_those_of_finite_differences(queries, extra, form):
    inputs = tensors(queries, queries + extra)
    encoding = AttenuatedEncoding(3, DECAYS, form=form, learnable=True).double()

    def attend(query, key, value, *numbers):
        return biased_attention(query, key, value, encoding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_function, "_LONG", 1)
        assert torch.autograd.gradcheck(attend, (*inputs, *encoding.parameters()))


class Memory(TorchDispatchMode):
    """Record the largest number of elements in the memory of a tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **options or {})
        for each in pytree.tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.itemsize)
        return made


def test_a_long_fixed_bias_needs_no_matrix():
    n = 1100
    encoding, (query, key, value) = ALiBi(3), tensors(n, n)
    inputs = query, key, value[..., :4]  # of other sizes, PyTorch itself makes a matrix
    with Memory() as by_distance:
        output = biased_attention(*inputs, encoding)
    with Memory() as with_matrix:
        expected = by_matrix(*inputs, encoding)
    torch.testing.assert_close(output, expected)
    assert by_distance.largest < n * n <= with_matrix.largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "encoding",
    [
        KERPLE(3, "power", strength=5.0, curvature=0.5),
        AttenuatedEncoding(3, [0.01, 0.1, 1.0], form="logits", learnable=["decay"]),
        AttenuatedEncoding(3, DECAYS, scale=100.0, learnable=True),
    ],
    ids=["KERPLE", "logits", "weights"],
)
def test_half_precision_is_as_accurate_as_with_the_matrix(encoding, dtype, path):
    """All visible keys are far, so that rounding a large bias would change attention; the mean of values is not 0."""
    mask = None if encoding.depends_on_mask else (torch.arange(90) < 20).expand(3, 1, 1, 90)
    inputs = tensors(90, 90)
    inputs[2] = (inputs[2] + 3).detach().requires_grad_()
    exact = with_gradients(by_matrix, inputs, encoding, mask=mask)
    rounded = [each.detach().to(dtype).requires_grad_() for each in inputs]
    usual = with_gradients(by_matrix, rounded, encoding, mask=mask)
    found = with_gradients(biased_attention, rounded, encoding, mask=mask)
    assert found[0].dtype == dtype
    for one, other, truth in zip(found, usual, exact, strict=True):
        assert one.dtype == other.dtype
        size = truth.abs().max()
        assert (one - truth).abs().max() <= 2 * (other - truth).abs().max() + 0.01 * size


DISTANCE = torch.arange(-159, 140).double()  # of 140 queries and 160 keys
BIASES = {
    "learned": torch.randn(2, 299, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
    "one head": -0.1 * DISTANCE.abs()[None],
    "steep": -2.0 * DISTANCE.abs().expand(2, -1),
    "rising": 0.5 * DISTANCE.abs().expand(2, -1),
    "window": torch.where(DISTANCE.abs() < 30, 0.0, -torch.inf)[None],
    "causal": torch.where(DISTANCE > 0, -torch.inf, 0.01 * DISTANCE)[None],
}


@pytest.mark.parametrize("visible", ["all", "first", "some"])
@pytest.mark.parametrize("name", BIASES)
def test_kernels_of_a_gpu_are_as_accurate_as_the_matrix(name, visible):
    """In triton's interpreter; where the first keys alone are visible, the bias of a query is far from the largest."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton compiles for the GPU, which another_device.py tests")
    kernels = importlib.import_module("pelocality.encodings._toeplitz_kernels")
    generator = torch.Generator().manual_seed(6)
    shapes = [(1, 2, n, 16) for n in (140, 160, 160, 140)]
    *inputs, gradient = (torch.randn(shape, generator=generator).half() for shape in shapes)
    mask = {"all": None, "first": (torch.arange(160) < 9)[None, None, None]}
    mask["some"] = torch.rand(1, 2, 140, 160, generator=generator) < 0.5
    mask["some"][..., 7, :] = False
    mask = mask[visible]

    def attend(compute, dtype):
        tensors = [each.to(dtype).requires_grad_() for each in inputs]
        bias = BIASES[name].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        output = compute(*tensors, bias)
        return output, *torch.autograd.grad(output, (*tensors, bias), gradient.to(dtype))

    def by_matrix_of(query, key, value, bias):
        matrix = bias.unfold(-1, 160, 1).flip(-2)[None]
        matrix = matrix if mask is None else torch.where(mask, matrix, -torch.inf)
        largest = matrix.detach().amax(-1, keepdim=True)
        matrix = (matrix - torch.where(largest == -torch.inf, 0, largest)).to(query.dtype)
        return scaled_dot_product_attention(query, key, value, attn_mask=matrix, scale=0.3)

    found = attend(lambda *tensors: kernels.ToeplitzAttention.apply(*tensors, mask, 0.3, name == "causal"), torch.half)
    usual, exact = attend(by_matrix_of, torch.half), attend(by_matrix_of, torch.double)
    for one, other, truth in zip(found, usual, exact, strict=True):
        error, least = (one - truth).abs().max(), 0.01 * truth.abs().max() + 1e-3
        assert error <= 2 * (other - truth).abs().max() + least


def test_a_far_bias_does_not_overflow_in_float16(path):
    inputs = [each.detach().half() for each in tensors(60, 60)]
    encoding = AttenuatedEncoding(3, 1e4, form="logits")
    output = biased_attention(*inputs, encoding)
    torch.testing.assert_close(output, inputs[2])  # each query attends to itself only


class Twice:
    """A mixin that overrides the bias of an encoding."""

    def bias(self, query_length, key_length, mask):
        return 2 * super().bias(query_length, key_length, mask)


class LoudALiBi(Twice, ALiBi):
    pass


class LoudAttenuated(Twice, AttenuatedEncoding):
    pass


@pytest.mark.parametrize(
    "encoding",
    [LoudALiBi(3), LoudAttenuated(3, form="logits", learnable=True)],
    ids=lambda encoding: type(encoding).__name__,
)
def test_a_bias_overridden_in_a_subclass_is_used(path, encoding):
    inputs = tensors(40, 40)
    bias = encoding(40).double()[None]
    expected = scaled_dot_product_attention(*inputs, attn_mask=bias)
    torch.testing.assert_close(biased_attention(*inputs, encoding), expected)


def test_a_bias_overridden_on_the_object_is_used(path):
    inputs, encoding = tensors(40, 40), KERPLE(3)
    encoding.bias = lambda queries, keys, mask: torch.zeros(1, queries, keys)
    torch.testing.assert_close(biased_attention(*inputs, encoding), scaled_dot_product_attention(*inputs))


class Fading(RelativeEncoding):
    """A learned encoding that masks all keys less than two positions back; the first queries are fully masked."""

    def __init__(self, heads=1, causal=False):
        super().__init__(heads, causal)
        self.slope = torch.nn.Parameter(torch.tensor(0.3))

    def at(self, distance):
        return torch.where(distance <= -2, self.slope * distance, -torch.inf)[None]


def test_queries_fully_masked_by_the_encoding_get_zeros_and_no_gradient(path):
    inputs, encoding = tensors(30, 30), Fading(3).double()
    found = with_gradients(biased_attention, inputs, encoding)
    assert (found[0][:, :, :2] == 0).all()
    assert all(each.isfinite().all() for each in found)
    torch.testing.assert_close(found, with_gradients(by_matrix, inputs, encoding))


def test_an_empty_batch_and_a_compiled_encoding_work(path):
    encoding = KERPLE(3)
    empty = [each[:0].detach().float().requires_grad_() for each in tensors(8, 8)]
    biased_attention(*empty, encoding).sum().backward()
    assert all(number.grad is None or not number.grad.any() for number in encoding.parameters())
    inputs = [each.float() for each in tensors(8, 8)]
    compiled = torch.compile(encoding, backend="eager")
    torch.testing.assert_close(biased_attention(*inputs, compiled), biased_attention(*inputs, encoding))


def test_fake_tensors_work(path):
    with FakeTensorMode():
        encoding, inputs = KERPLE(3), torch.randn(3, 1, 3, 40, 4, requires_grad=True)
        output = biased_attention(*inputs, encoding)
        output.sum().backward()
        assert output.shape == (1, 3, 40, 4)
        assert all(number.grad is not None for number in encoding.parameters())


def test_it_is_exported_with_any_length():
    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoding = KERPLE(3)

        def forward(self, x):
            return biased_attention(x, x, x, self.encoding)

    n = torch.export.Dim("n", min=4, max=4096)
    exported = torch.export.export(Attends(), (torch.randn(1, 3, 24, 4),), dynamic_shapes={"x": {2: n}}, strict=False)
    x = torch.randn(1, 3, 1100, 4)
    torch.testing.assert_close(exported.module()(x), Attends()(x))


def test_an_encoding_that_is_not_relative_is_used_as_a_matrix(path):
    class Absolute(Encoding):
        def __init__(self, heads=1, causal=False):
            super().__init__(heads, causal)
            self.table = torch.nn.Parameter(torch.linspace(-1, 1, 40))

        def bias(self, query_length, key_length, mask):
            return self.table[:key_length].expand(1, query_length, -1)

    inputs = tensors(40, 40)
    ours, theirs = (with_gradients(attend, inputs, Absolute(3)) for attend in (biased_attention, by_matrix))
    torch.testing.assert_close(ours, theirs)


def test_dropout_and_compilation_use_pytorchs_attention(path):
    inputs = [each.detach() for each in tensors(40, 40)]
    encoding = DistanceTable.from_encoding(ALiBi(3), 8)
    torch.manual_seed(0)
    dropped = biased_attention(*inputs, encoding, dropout_p=0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(dropped, by_matrix(*inputs, encoding, dropout_p=0.5))
    compiled = torch.compile(biased_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, encoding), by_matrix(*inputs, encoding))


class Caller(torch.nn.Module):
    """A module whose parameters are those of the encoding."""

    def __init__(self, encoding, **options):
        super().__init__()
        self.encoding, self.options = encoding, options

    def forward(self, *inputs):
        return biased_attention(*inputs, self.encoding, **self.options)


def functional(encoding, **options):
    """Return biased_attention as a function of inputs and parameters, its equation, and the parameters."""
    module = Caller(encoding, **options)

    def ours(inputs, numbers):
        return torch.func.functional_call(module, numbers, tuple(inputs))

    def plainly(inputs, numbers):
        query, key, value = inputs
        shape = query.shape[-2], key.shape[-2]
        bias = torch.func.functional_call(encoding, {k.partition(".")[2]: v for k, v in numbers.items()}, shape)
        logits = query @ key.mT / 2 + bias
        visible = options.get("mask")
        logits = (
            logits if visible is None else logits.masked_fill(~visible, -1e30)
        )  # no query of the test is fully masked
        return logits.softmax(-1) @ value

    return ours, plainly, {name: number.detach() for name, number in module.named_parameters()}


@EVERY
@pytest.mark.parametrize("masked", [False, True])
def test_forward_mode_and_gradients_of_each_sample_are_those_of_the_equation(name, path, masked):
    encoding = ENCODINGS[name]().double()
    mask = (torch.arange(12) < 9).view(1, 1, 1, 12) if masked else None
    if masked and encoding.depends_on_mask:
        mask = None  # the equation above ignores the mask
    ours, plainly, numbers = functional(encoding, mask=mask)
    inputs = [each.detach() for each in tensors(9, 12)]
    tangents = [torch.randn_like(each) for each in inputs], {k: torch.randn_like(v) for k, v in numbers.items()}
    for direction in (tangents, ([torch.zeros_like(each) for each in inputs], tangents[1])):
        found, expected = (torch.func.jvp(each, (inputs, numbers), direction) for each in (ours, plainly))
        torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        dual = {k: forward_ad.make_dual(v, tangents[1][k]) for k, v in numbers.items()}
        tangent = forward_ad.unpack_dual(ours(inputs, dual)).tangent
    torch.testing.assert_close(0 * expected[1] if tangent is None else tangent, expected[1])

    def loss(function):
        def of_one(one, numbers):
            return function([each[None] for each in one], numbers).square().sum()

        return torch.func.vmap(torch.func.grad(of_one, (0, 1)), (0, None))(inputs, numbers)

    torch.testing.assert_close(loss(ours), loss(plainly))


@pytest.mark.parametrize("name", [name for name, make in ENCODINGS.items() if list(make().parameters())])
def test_second_derivatives_are_those_of_the_equation(name, path):
    ours, plainly, numbers = functional(ENCODINGS[name]().double())
    inputs = [each.detach()[:1, :, :4] for each in tensors(4, 4)]

    def hessian(function, outer, inner):
        return outer(inner(lambda numbers: function(inputs, numbers).square().sum()))(numbers)

    expected = hessian(plainly, torch.func.jacfwd, torch.func.jacrev)
    for outer, inner in (
        (torch.func.jacfwd, torch.func.jacrev),
        (torch.func.jacrev, torch.func.jacrev),
        (torch.func.jacfwd, torch.func.jacfwd),
    ):
        torch.testing.assert_close(hessian(ours, outer, inner), expected)


def test_a_fully_masked_batch_has_gradients_of_zero(path):
    inputs, encoding = tensors(30, 30), KERPLE(3).double()
    mask = torch.zeros(3, 1, 1, 30, dtype=torch.bool)
    found = with_gradients(biased_attention, inputs, encoding, mask=mask)
    assert not any(each.any() for each in found)
    assert torch.func.grad(lambda q: biased_attention(q, *inputs[1:], ALiBi(3), mask=mask).sum())(inputs[0]).any() == 0


def test_inputs_that_do_not_fit_raise_errors():
    query, key, value = tensors(6, 8)
    encoding = ALiBi(3)
    for change, error, message in (
        ({"query": query[0]}, ValueError, "must fit"),
        ({"key": key[:1]}, ValueError, "must fit"),
        ({"query": key[:, :, :, :3]}, ValueError, "must fit"),
        ({"key": key[:, :, :5], "value": value[:, :, :5]}, ValueError, "k >= q"),
        ({"encoding": 3}, TypeError, "encoding must be"),
        ({"encoding": ALiBi(2)}, ValueError, "1 or 3 heads"),
        ({"mask": torch.zeros(6, 8)}, ValueError, "mask must be booleans"),
        ({"mask": torch.ones(6, 8, dtype=torch.bool)}, ValueError, "mask must be"),
        ({"mask": torch.ones(2, 1, 1, 8, dtype=torch.bool)}, ValueError, "mask must be"),
    ):
        with pytest.raises(error, match=message):
            biased_attention(**({"query": query, "key": key, "value": value, "encoding": encoding} | change))


@pytest.mark.parametrize("length", [20, 600])
def test_keys_and_values_may_serve_groups_of_query_heads(length):
    query, key = torch.randn(2, 8, length, 16), torch.randn(2, 2, length, 16)
    encoding = ALiBi(heads=8)
    found = biased_attention(query, key, key, encoding, enable_gqa=True)
    bias = encoding(length)
    wanted = scaled_dot_product_attention(query, key, key, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        biased_attention(query, key, key, encoding)
    with pytest.raises(ValueError, match="must fit"):
        biased_attention(query[:, :7], key, key, ALiBi(heads=7), enable_gqa=True)


@pytest.mark.parametrize("mask", [torch.ones(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.bool)])
def test_a_mask_of_a_tokenizer_is_refused_with_the_way_to_pass_it(mask):
    query = torch.randn(2, 4, 20, 16)
    with pytest.raises((TypeError, ValueError), match=r"pass attention_mask\[:, None, None\]\.bool\(\)"):
        biased_attention(query, query, query, ALiBi(heads=4), mask=mask)
    biased_attention(query, query, query, ALiBi(heads=4), mask=mask[:, None, None].bool())
