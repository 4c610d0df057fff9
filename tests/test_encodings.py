"""The interface of all encodings."""

import copy
import gc
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch

from pelocality import metrics
from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    Encoding,
    FixedWindow,
    NoEncoding,
    RelativeEncoding,
    SinusoidalEncoding,
    T5Buckets,
)
from pelocality.encodings.base import cast
from pelocality.metrics.without_matrix import measure_relative


def filled(encoding):
    """Return the encoding with random numbers in parameters that are zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in encoding.parameters():
        if not parameter.detach().any():
            torch.nn.init.normal_(parameter, generator=generator)
    return encoding


FIXED = [
    lambda causal: AttenuatedEncoding(heads=3, causal=causal),
    lambda causal: AttenuatedEncoding(
        3, [0.1, 0.5, 2.0], 1.0 if causal else [0.3, 1, 3], scale=[1, 2, 3], causal=causal
    ),
    lambda causal: AttenuatedEncoding(heads=3, decay=0.05, form="logits", causal=causal),
    lambda causal: ALiBi(heads=3, causal=causal),
    lambda causal: FixedWindow(heads=3, width=2, causal=causal),
    lambda causal: SinusoidalEncoding(heads=3, causal=causal),
    lambda causal: NoEncoding(heads=3, causal=causal),
    lambda causal: DistanceTable(heads=3, length=4, learnable=False, causal=causal),
]
LEARNED = [
    lambda causal: AttenuatedEncoding(heads=3, decay=0.2, learnable=True, causal=causal),
    lambda causal: AttenuatedEncoding(
        heads=3, decay=0.2, form="logits", learnable=("decay", "scale"), scale=0.7, causal=causal
    ),
    lambda causal: filled(DistanceTable(heads=3, length=4, causal=causal)),
    lambda causal: filled(DistanceTable(heads=3, length=30, signed=True, shared=True, causal=causal)),
    lambda causal: filled(T5Buckets(heads=3, buckets=8, max_distance=16, causal=causal)),
    lambda causal: KERPLE(heads=3, strength=[0.5, 1, 2], causal=causal),
    lambda causal: KERPLE(heads=3, kernel="power", curvature=0.5, causal=causal),
]
EVERY = pytest.mark.parametrize("make", FIXED + LEARNED)
CAUSAL = pytest.mark.parametrize("causal", [False, True])


@CAUSAL
@EVERY
def test_every_encoding_keeps_the_contract_of_all(make, causal):
    encoding = make(causal)
    for given, dtype in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert encoding(2, 5, dtype=given).dtype == dtype
    assert encoding.bfloat16()(5).dtype == torch.bfloat16
    assert encoding.weights(5).dtype == encoding.relative(5).dtype == torch.float32
    encoding, n = make(causal).double(), 9
    whole, weights, by_distance = encoding(n), encoding.weights(n), encoding.relative(n)
    assert (whole.shape, by_distance.shape) == ((3, n, n), (3, 2 * n - 1))
    assert {each.dtype for each in (whole, weights, by_distance)} == {torch.float64}
    # the weights are the softmax of the logits by distance
    dense = torch.stack([by_distance[:, n - 1 - i : 2 * n - 1 - i] for i in range(n)], 1).softmax(-1)
    torch.testing.assert_close(weights, dense)
    # cached keys: the last rows; causal: the past alone
    torch.testing.assert_close(encoding(4, n), whole[:, -4:])
    assert not (causal and whole.isfinite().triu(1).any())
    assert isinstance(encoding, FixedWindow) or whole.tril().isfinite().all()
    # FlexAttention
    for queries in (n, 3):
        modify = encoding.score_modification(queries, n)
        score = torch.arange(queries * n, dtype=torch.float64).reshape(1, queries, n)
        head, query, key = torch.arange(3)[:, None, None], torch.arange(queries)[:, None], torch.arange(n)
        torch.testing.assert_close(modify(score, torch.tensor(0), head, query, key), score + whole[:, -queries:])
    # padding
    mask = torch.tensor([[1] * 7 + [0] * 2, [0] * 2 + [1] * 7])
    if not causal:
        padded = encoding.weights(n, mask=mask)
        torch.testing.assert_close(padded[0, :, :7, :7], encoding.weights(7))
        torch.testing.assert_close(padded[1, :, 2:, 2:], encoding.weights(7))
        assert not padded[0, ..., 7:].any()
        bias = encoding(n, mask=mask).expand(2, 3, n, n)
        torch.testing.assert_close(bias[0, :, :7, :7], encoding(7))
        # without a matrix
        one, other = measure_relative(by_distance), metrics.measure(weights)
        torch.testing.assert_close(one.locality, other.locality)
        torch.testing.assert_close(one.relative_asymmetry, other.relative_asymmetry, atol=1e-10, rtol=0)


@pytest.mark.parametrize("make", FIXED[:1] + LEARNED[:2])
def test_flex_attention_with_the_score_modification_is_attention_with_the_bias(make):
    from torch.nn.attention.flex_attention import flex_attention

    encoding = make(False)
    q, k, v = torch.randn(3, 2, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    flexible = flex_attention(q, k, v, score_mod=encoding.score_modification(16))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=encoding(16)[None])
    torch.testing.assert_close(flexible, dense, atol=1e-5, rtol=1e-5)


def test_a_mask_that_differs_between_heads_expands_an_encoding_with_one_head():
    mask = torch.ones(1, 3, 1, 4).bool()
    mask[0, 1, 0, 2:] = False
    many = AttenuatedEncoding(3, decay=0.2)
    one = AttenuatedEncoding(1, decay=0.2)
    torch.testing.assert_close(one(4, mask=mask), many(4, mask=mask))
    torch.testing.assert_close(one.weights(4, mask=mask), many.weights(4, mask=mask))


def test_a_mask_may_differ_between_queries_and_heads():
    encoding = AttenuatedEncoding(heads=2, decay=0.1)
    causal = AttenuatedEncoding(heads=2, decay=0.1, causal=True).weights(5)
    past = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(encoding.weights(5, mask=past[None])[0], causal)
    torch.testing.assert_close(encoding.weights(5, mask=past.expand(1, 2, 5, 5))[0], causal)


@CAUSAL
@EVERY
def test_an_encoding_survives_copying_pickling_and_its_state_dict(make, causal):
    encoding = make(causal)
    bias = encoding(6)
    for twin in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert torch.equal(twin(6), bias)
    described = json.loads(json.dumps(encoding.configuration()))
    twin = Encoding.from_configuration(described)
    assert type(twin) is type(encoding)
    twin.load_state_dict(encoding.state_dict())
    assert torch.equal(twin(6), bias)
    assert twin.configuration() == described


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ALiBi(2, slopes=0.5), ALiBi(2, slopes=[0.1, 0.2])),
        (ALiBi(2, slopes=[0.5, 0.5]), ALiBi(2, slopes=[0.1, 0.2])),
        (AttenuatedEncoding(2, decay=0.5), AttenuatedEncoding(2, decay=[0.1, 0.2], symmetry=[1.0, 2.0], scale=[3, 4])),
    ],
)
def test_one_number_for_all_heads_and_one_for_each_load_into_one_another(one, other):
    for saved, here in ((one, copy.deepcopy(other)), (other, copy.deepcopy(one))):
        state = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
        here.load_state_dict(state)
        assert torch.equal(here(6), saved(6))
        assert here.configuration() == saved.configuration()
        assert all(torch.equal(tensor, state[name]) for name, tensor in here.state_dict().items())
    with pytest.raises(RuntimeError, match="size mismatch for fixed_slopes"):
        ALiBi(2).load_state_dict(ALiBi(3).state_dict())


class Sloped(NoEncoding):
    """A custom encoding with an argument that is no tensor."""

    def __init__(self, heads=1, slope=1.0):
        super().__init__(heads)
        self.slope = slope


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            AttenuatedEncoding(form="logits"),
            AttenuatedEncoding(),
            "form='weights', the state was saved with form='logi",
        ),
        (AttenuatedEncoding(causal=True), AttenuatedEncoding(), "causal=False, the state was saved with causal=True"),
        (ALiBi(2), ALiBi(2, causal=True), "causal=True, the state was saved with causal=False"),
        (FixedWindow(width=2), FixedWindow(width=3), "width=3, the state was saved with width=2"),
        (SinusoidalEncoding(base=5.0), SinusoidalEncoding(), "base=10000.0, the state was saved with base=5.0"),
        (KERPLE(2), KERPLE(2, "power"), "kernel='power', the state was saved with kernel='log'"),
        (T5Buckets(2, max_distance=99), T5Buckets(2), "max_distance=128, the state was saved with max_distance=99"),
        (Sloped(slope=2.0), Sloped(), "slope=1.0, the state was saved with slope=2.0"),
    ],
)
def test_a_state_is_not_loaded_into_an_encoding_with_other_arguments(one, other, words, tmp_path):
    torch.save(torch.nn.ModuleList([one]).state_dict(), tmp_path / "state.pt")
    for state in (torch.nn.ModuleList([one]).state_dict(), torch.load(tmp_path / "state.pt")):
        with pytest.raises(RuntimeError, match=re.escape(f"0 has {words}")):
            torch.nn.ModuleList([other]).load_state_dict(state)
        torch.nn.ModuleList([copy.deepcopy(one)]).load_state_dict(state)


class Table(RelativeEncoding):
    """A custom encoding whose arguments are tensors."""

    def __init__(self, numbers, order=(0,), causal=False):
        super().__init__(len(numbers), causal)
        self.register_buffer("numbers", torch.as_tensor(numbers, dtype=torch.float32))
        self.register_buffer("order", torch.as_tensor(order))

    def at(self, distance):
        return self.numbers[:, self.order][:, distance.long().abs().clamp(max=len(self.order) - 1)]


@pytest.mark.parametrize("numbers", [[[0.1, 0.2, 0.3], [4.0, 5.0, 6.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]])
def test_tensor_arguments_of_a_custom_encoding_keep_their_axes_and_their_kind(numbers):
    encoding = Table(torch.tensor(numbers), order=torch.tensor([2, 1]))
    described = json.loads(json.dumps(encoding.configuration()))
    assert described == {"type": "Table", "numbers": numbers, "order": [2, 1], "causal": False}
    assert all(isinstance(index, int) for index in described["order"])
    twin = Encoding.from_configuration(described)
    twin.load_state_dict(encoding.state_dict())
    assert torch.equal(twin(4), encoding(4))


@pytest.mark.parametrize("make", [FIXED[1], LEARNED[0], LEARNED[4]])
def test_an_encoding_compiles_whole_for_every_length_at_once(make):
    encoding = make(False)
    torch._dynamo.reset()
    compiled = torch.compile(encoding, backend="aot_eager", fullgraph=True, dynamic=True)
    for queries, keys in ((6, 6), (7, 30)):
        torch.testing.assert_close(compiled(queries, keys), encoding(queries, keys))
    parameters = list(encoding.parameters())
    if parameters:
        both = [torch.autograd.grad(one(6).square().sum(), parameters) for one in (compiled, encoding)]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("what", ["bias", "masked weights"])
@pytest.mark.parametrize("make", LEARNED)
def test_every_parameter_has_the_derivatives_of_finite_differences(make, what):
    class Caller(torch.nn.Module):
        def __init__(self, encoding):
            super().__init__()
            self.encoding = encoding

        def forward(self):
            if what == "bias":
                return self.encoding(4)
            return self.encoding.weights(4, mask=torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]]))

    module = Caller(make(False).double())
    names, values = zip(*module.named_parameters(), strict=True)

    def built(*parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), ())

    def loss(*parameters):
        return built(*parameters).square().sum()

    assert torch.autograd.gradcheck(built, values, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(built, values, check_fwd_over_rev=True, fast_mode=True)
    assert all(gradient.any() for gradient in torch.autograd.grad(loss(*values), values))
    places = tuple(range(len(values)))
    hessian = torch.func.hessian(loss, places)(*(value.detach() for value in values))
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, values))


def test_an_encoding_is_on_the_device_and_of_the_dtype_to_which_it_was_moved():
    encoding = ALiBi(heads=2)
    assert (encoding.device, encoding.dtype) == (torch.device("cpu"), torch.float32)
    encoding.to("meta", torch.bfloat16)
    assert (encoding.device, encoding.dtype) == (torch.device("meta"), torch.bfloat16)
    assert encoding.working_dtype == torch.float32


def test_constants_keep_their_precision_when_a_model_is_cast():
    encoding = AttenuatedEncoding(decay=0.3, form="logits")
    exact = encoding(400).bfloat16()
    assert torch.equal(encoding.bfloat16()(400), exact)
    assert encoding.configuration()["decay"] == 0.3
    assert torch.equal(encoding.float().decay, torch.tensor([0.3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decay", [5.0, 1e38])
def test_a_bias_too_steep_for_half_precision_masks_nothing(decay, dtype):
    assert torch.isfinite(AttenuatedEncoding(decay=decay, form="logits")(512, dtype=dtype)).all()
    assert torch.isfinite(cast(torch.tensor([[0.0, -1e300]], dtype=torch.float64), torch.float32)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [512, 700])
@pytest.mark.parametrize(
    "make",
    [
        lambda: AttenuatedEncoding(2, decay=[0.5, 0.01], form="logits", scale=-1.0),
        lambda: AttenuatedEncoding(2, decay=0.5, scale=1e6),
        lambda: AttenuatedEncoding(2, decay=0.5, symmetry=0.5, form="logits", scale=-1.0, causal=False),
    ],
)
def test_a_bias_that_rises_with_distance_keeps_its_softmax_when_it_is_rounded(make, n, dtype):
    exact = make().double()(n).softmax(-1)
    rounded = make()(n, dtype=dtype).double().softmax(-1)
    torch.testing.assert_close(rounded, exact, atol=0.03, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_integers_becomes_floats(causal):
    class Steps(RelativeEncoding):
        def at(self, distance):
            return -distance.abs().long()[None]

    class Counted(Encoding):
        def bias(self, query_length, key_length, mask):
            return torch.arange(key_length).expand(1, query_length, -1)

    steps, alibi = Steps(1, causal), ALiBi(1, slopes=1.0, causal=causal)
    assert torch.equal(steps(5), alibi(5))
    assert torch.equal(steps.relative(5), alibi.relative(5))
    assert torch.equal(steps.weights(5), alibi.weights(5))
    assert measure_relative(steps.relative(5)) == measure_relative(alibi.relative(5))
    assert Counted(1)(3).dtype == Counted(1).weights(3).dtype == torch.float32


@pytest.mark.parametrize("form", ["weights", "logits"])
def test_only_a_bias_that_is_normalised_over_keys_depends_on_the_mask(form):
    encoding = AttenuatedEncoding(decay=0.1, form=form)
    mask = torch.tensor([[1, 1, 1, 0]])
    assert encoding.depends_on_mask == (form == "weights")
    assert torch.equal(encoding(4, mask=mask), encoding(4)) == (form == "logits")


def test_a_custom_encoding_that_overrides_bias_gets_the_mask():
    class PerKey(NoEncoding):
        def bias(self, query_length, key_length, mask):
            return super().bias(query_length, key_length, mask) + (0 if mask is None else mask.sum(-1, keepdim=True))

    assert PerKey()(4, mask=torch.tensor([[1, 1, 1, 0]])).unique().tolist() == [3]


# ---- custom encodings and errors


class Constant(Encoding):
    """A custom encoding that is not a function of distance."""

    def __init__(self, heads=1, table=((0.0, 1.0), (2.0, 3.0))):
        super().__init__(heads)
        self.table = table

    def bias(self, query_length, key_length, mask):
        return torch.tensor(self.table)[None, -query_length:]


class Linear(RelativeEncoding):
    """A custom relative encoding."""

    def __init__(self, heads=1, slope=1.0, causal=False):
        super().__init__(heads, causal)
        self.slope = slope

    def at(self, distance):
        return -self.slope * distance.abs()[None]


def test_a_custom_encoding_needs_only_its_formula():
    assert torch.equal(Linear(slope=0.25)(4), ALiBi(heads=1, slopes=0.25)(4))
    twin = Encoding.from_configuration(Linear(slope=0.25, causal=True).configuration())
    assert isinstance(twin, Linear)
    assert torch.equal(twin(4), ALiBi(heads=1, slopes=0.25, causal=True)(4))
    assert torch.equal(Constant(heads=2)(2), torch.tensor([[0.0, 1], [2, 3]]).expand(2, 2, 2))
    with pytest.raises(TypeError, match="more than distance"):
        Constant().relative(2)


MISTAKES = {
    ValueError: [
        ("heads", lambda: ALiBi(heads=0)),
        ("each of 2 heads", lambda: ALiBi(heads=2, slopes=[1.0, 2.0, 3.0])),
        ("above 0", lambda: ALiBi(heads=2, slopes=-1.0)),
        ("slopes", lambda: ALiBi(heads=2, slopes=1e40)),
        ("query_length", lambda: ALiBi(heads=2)(3, 2)),
        ("query_length", lambda: ALiBi(heads=2)(0)),
        ("query_length", lambda: ALiBi(heads=2).score_modification(3, 2)),
        ("length", lambda: ALiBi(heads=2).relative(0)),
        ("mask", lambda: ALiBi(heads=2)(3, mask=torch.ones(2, 4, dtype=torch.bool))),
        ("1 or 2 heads", lambda: ALiBi(heads=2)(3, mask=torch.ones(1, 3, 3, 3).bool())),
        ("width", lambda: FixedWindow(width=-1)),
        ("even", lambda: SinusoidalEncoding(width=5)),
        ("base", lambda: SinusoidalEncoding(base=math.inf)),
        ("buckets", lambda: T5Buckets(heads=1, buckets=2)),
        ("max_distance", lambda: T5Buckets(heads=1, max_distance=8)),
        ("kernel", lambda: KERPLE(heads=1, kernel="gauss")),
        ("below 2", lambda: KERPLE(heads=1, kernel="power", curvature=2.0)),
        ("known: ALiBi", lambda: Encoding.from_configuration({"type": "Rotary"})),
    ],
    TypeError: [
        ("heads", lambda: ALiBi(heads=2.0)),
        ("causal", lambda: ALiBi(heads=2, causal=1)),
        ("slopes", lambda: ALiBi(2, slopes=torch.tensor([1 + 1j, 2]))),
        ("slopes", lambda: ALiBi(2, slopes=np.array([True, False]))),
        ("query_length", lambda: ALiBi(heads=2)(2.5)),
        ("mask", lambda: ALiBi(heads=2)(3, mask=torch.ones(2, 3))),
        ("floating", lambda: ALiBi(heads=2)(3, dtype=torch.int64)),
        ("base", lambda: SinusoidalEncoding(base="a")),
    ],
}


@pytest.mark.parametrize("error", MISTAKES)
def test_arguments_that_do_not_fit_are_named(error):
    for words, call in MISTAKES[error]:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("bias", [lambda k: -k.abs(), lambda k: -k.abs().expand(2, -1), lambda k: -k.abs()[None, 1:]])
def test_a_custom_formula_of_another_shape_is_refused(bias):
    class Custom(RelativeEncoding):
        def at(self, distance):
            return bias(distance)

    encoding = Custom(heads=3)
    for use in (encoding.weights, encoding, encoding.relative, encoding.score_modification):
        with pytest.raises(ValueError, match=r"Custom.at must return \(3 or 1, 9\)"):
            use(5)


def test_two_classes_of_one_name_are_not_mistaken_for_each_other():
    table, configuration = DistanceTable(2, length=4), ALiBi(2).configuration()
    names = {"__module__": "notebook"}
    others = [type("ALiBi", (ALiBi,), names), type("DistanceTable", (DistanceTable,), names)]
    assert type(table.scaled(decay=0.1)) is DistanceTable
    with pytest.raises(ValueError, match=r"of pelocality\.encodings\.alibi and of notebook"):
        Encoding.from_configuration(configuration)
    del others
    gc.collect()
    assert type(Encoding.from_configuration(configuration)) is ALiBi
