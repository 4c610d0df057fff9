"""The cache of biases: when the last bias is reused and when it is built again."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    Encoding,
    FixedWindow,
    NoEncoding,
    PositionalSelfAttention,
    RelativeEncoding,
    SinusoidalEncoding,
    T5Buckets,
    _cache,
)

LEARNED = [
    lambda: AttenuatedEncoding(2, learnable=("decay", "symmetry", "scale")),
    lambda: DistanceTable(2, 5),
    lambda: T5Buckets(2),
    lambda: KERPLE(2),
]
FIXED = [
    lambda: AttenuatedEncoding(3),
    lambda: AttenuatedEncoding(3, [0.1, 0.5, 2.0], [0.3, 1, 3], learnable=[], scale=[1, 2, 3]),
    lambda: AttenuatedEncoding(3, decay=0.05, form="logits"),
    lambda: ALiBi(3),
    lambda: FixedWindow(3, width=2),
    lambda: SinusoidalEncoding(3),
    lambda: NoEncoding(3),
    lambda: DistanceTable(3, length=4, learnable=False),
]


def added(encoding, queries, keys=None, dtype=None):
    """Return what attention adds to its logits, which is cached."""
    return encoding.additive_mask(queries, keys or queries, mask=None, dtype=dtype or encoding.dtype)


def is_reused(encoding, *request, **options):
    """Return whether two calls return the same tensor."""
    return added(encoding, *request, **options).data_ptr() == added(encoding, *request, **options).data_ptr()


@pytest.mark.parametrize("write", ["item", "data", "numpy"])
@pytest.mark.parametrize("make", FIXED)
def test_a_write_into_a_bias_of_the_user_changes_no_other(make, write):
    encoding, twin = make(), make()
    expected, shared = twin.weights(8), added(twin, 8)
    for given in (encoding(8), encoding(8, dtype=torch.float64), encoding.weights(8)):
        given = given.contiguous() if write == "item" else given
        if write == "item":
            given[0, 0, 1] = 7.0
        elif write == "data":
            given.data.fill_(7.0)
        else:
            given.numpy()[...] = 7.0
    for each in (encoding, twin, make()):
        assert torch.equal(added(each, 8), shared)
        assert torch.equal(each.weights(8), expected)
        assert torch.equal(each(8), make()(8))
        assert not (each(8) == 7).any()


@pytest.mark.parametrize("make", FIXED)
def test_a_fixed_bias_is_built_once_while_length_and_dtype_stay(make):
    encoding = make()
    assert is_reused(encoding, 6)
    first = added(encoding, 6)
    assert added(encoding, 6, 7).shape[1:] == (6, 7)
    assert added(encoding, 6, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert is_reused(encoding, 6, dtype=torch.bfloat16)
    again = added(encoding, 6)
    assert again.data_ptr() != first.data_ptr()  # only the last is cached
    assert torch.equal(again, first)


def test_equal_encodings_share_their_bias_and_others_do_not():
    one = ALiBi(heads=3)
    layers = [copy.deepcopy(one) for _ in range(3)]
    assert len({added(layer, 6).data_ptr() for layer in (one, *layers)}) == 1
    assert added(ALiBi(heads=3, causal=True), 6).data_ptr() != added(one, 6).data_ptr()
    assert added(ALiBi(heads=3, slopes=1.0), 6).data_ptr() != added(one, 6).data_ptr()


def test_writing_into_a_bias_does_not_change_the_next_one():
    encoding = ALiBi(heads=3)
    right = added(encoding, 6).clone()
    added(encoding, 6)[0, 0, 0] = 7.0
    assert torch.equal(added(encoding, 6), right)


@pytest.mark.parametrize("change", ["load", "attribute", "buffer", "move"])
def test_a_changed_encoding_has_a_changed_bias(change):
    encoding = FixedWindow(width=1) if change == "attribute" else AttenuatedEncoding(decay=0.5)
    before = added(encoding, 6).clone()
    if change == "load":
        encoding.load_state_dict(AttenuatedEncoding(decay=0.1).state_dict())
    elif change == "attribute":
        encoding.width = 2
    elif change == "buffer":
        encoding.fixed_decay.mul_(0.5)
    else:
        encoding.double()
    after = added(encoding, 6)
    assert after.dtype == torch.float64 if change == "move" else not torch.equal(after, before)


def test_a_bias_built_in_inference_mode_can_be_used_in_training():
    encoding = ALiBi(heads=2, slopes=0.77)
    with torch.inference_mode():
        added(encoding, 6)
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=added(encoding, 6)[None]).sum().backward()
    assert torch.isfinite(q.grad).all()


def test_a_bias_that_no_encoding_used_last_is_freed():
    encoding = ALiBi(3, slopes=0.123)
    twin = copy.deepcopy(encoding)
    assert added(twin, 6).data_ptr() == added(encoding, 6).data_ptr()
    kept = weakref.ref(_cache._LAST[encoding])
    added(encoding, 7)
    assert kept() is not None
    added(twin, 7)
    gc.collect()
    assert kept() is None


def test_copies_that_were_changed_have_separate_biases():
    one = ALiBi(2)
    two, three = copy.deepcopy(one), copy.deepcopy(one)
    shared = added(one, 6)
    two.fixed_slopes.mul_(2)
    assert torch.equal(added(two, 6), 2 * shared)
    assert added(two, 6).data_ptr() == added(two, 6).data_ptr()
    assert added(one, 6).data_ptr() == added(three, 6).data_ptr() == shared.data_ptr()


def test_derivatives_for_a_buffer_are_computed():
    encoding = ALiBi(1, slopes=0.5)
    added(encoding, 4)

    def total(slopes):
        return torch.func.functional_call(encoding, {"fixed_slopes": slopes}, (4,)).sum()

    slopes, expected = torch.tensor([0.5]), -20.0
    assert torch.autograd.grad(total(slopes.requires_grad_()), slopes)[0].item() == expected
    slopes = slopes.detach()
    assert torch.func.grad(total)(slopes).item() == expected
    assert torch.func.jacfwd(total)(slopes).item() == expected
    assert torch.func.vmap(torch.func.grad(total))(slopes.repeat(3, 1)).tolist() == [[expected]] * 3
    with forward_ad.dual_level():
        dual = total(forward_ad.make_dual(slopes, torch.ones(1)))
        assert forward_ad.unpack_dual(dual).tangent.item() == expected
    assert torch.equal(added(encoding, 4), added(ALiBi(1, slopes=0.5), 4))


def test_a_fixed_bias_built_inside_a_transform_can_be_used_outside():
    encoding, x = ALiBi(1, slopes=0.25), torch.randn(4)
    torch.func.grad(lambda x: (added(encoding, 4)[0] * x).sum())(x)
    torch.func.vmap(lambda x: (added(encoding, 4)[0] * x).sum())(x[None])
    assert torch.equal(added(encoding, 4), added(ALiBi(1, slopes=0.25), 4))


def replica(module):
    """Return the copy that nn.DataParallel makes for each device, whose parameters are plain tensor attributes."""
    copied = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copied._modules[name] = replica(child)
    for name, parameter in module._parameters.items():
        setattr(copied, name, parameter * 1.0)
    return copied


@pytest.mark.parametrize("make", LEARNED)
def test_a_replica_of_data_parallel_learns(make):
    encoding = make()
    with torch.no_grad():
        added(replica(encoding), 5)  # if this were cached, the bias below would have no gradient
    output = added(replica(encoding), 5)
    torch.testing.assert_close(output, added(encoding, 5), rtol=0, atol=0)
    (output * torch.randn(output.shape)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoding.parameters())
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn(parameter.shape))
    assert not torch.equal(added(replica(encoding), 5), output)


def test_a_parametrized_parameter_is_read_through_its_parametrization():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    encoding = AttenuatedEncoding(learnable="decay", decay=0.25)
    nn.utils.parametrize.register_parametrization(encoding, "log_decay", Half())
    assert encoding.decay.item() == pytest.approx(0.5)
    added(encoding, 4)[0, 0, 1].backward()
    assert encoding.parametrizations.log_decay.original.grad.item() != 0


@pytest.mark.parametrize("write", ["data", "assign", "numpy", "buffer"])
def test_a_write_to_a_buffer_that_torch_does_not_record_changes_the_bias(write):
    encoding = ALiBi(heads=1, slopes=0.5)
    before = added(encoding, 6).clone()
    if write == "data":
        encoding.fixed_slopes.data.fill_(5.0)
    elif write == "assign":
        encoding.fixed_slopes.data = torch.tensor([5.0])
    elif write == "numpy":
        encoding.fixed_slopes.numpy()[:] = 5.0
    else:
        encoding.register_buffer("fixed_slopes", torch.tensor([5.0]))
    assert torch.equal(added(encoding, 6), 10 * before)


class Slope(RelativeEncoding):
    """A custom encoding with an attribute that is not an argument."""

    def __init__(self, heads=1):
        super().__init__(heads)
        self.k = 1.0

    def at(self, distance):
        return -self.k * distance.abs()[None]


@pytest.mark.parametrize("number", [2.0, torch.tensor(2.0), [2.0], lambda: 2.0])
def test_an_attribute_that_is_not_an_argument_changes_the_bias(number):
    class Read(Slope):
        def at(self, distance):
            k = self.k() if callable(self.k) else self.k[0] if isinstance(self.k, list) else self.k
            return -k * distance.abs()[None]

    encoding = Read()
    before = added(encoding, 4).clone()
    encoding.k = number
    assert torch.equal(added(encoding, 4), 2 * before)
    if isinstance(number, torch.Tensor):
        number.data.fill_(3.0)
        assert torch.equal(added(encoding, 4), 3 * before)


class Sum(RelativeEncoding):
    """A custom encoding that contains a list of encodings."""

    def __init__(self, first, others=(), heads=1, causal=False):
        super().__init__(heads, causal)
        self.first, self.others = first, nn.ModuleList(others)

    def at(self, distance):
        return self.first.at(distance) + sum(other.at(distance) for other in self.others)

    def configuration(self):
        return super().configuration() | {"others": [other.configuration() for other in self.others]}


class Pair(RelativeEncoding):
    """A custom encoding that contains two encodings."""

    def __init__(self, first, second, causal=False):
        super().__init__(max(first.heads, second.heads), causal)
        self.first, self.second = first, second

    def at(self, distance):
        return self.first.at(distance) + self.second.at(distance)


def frozen(*numbers):
    table = DistanceTable(1, len(numbers), learnable=False)
    table.values.copy_(torch.tensor([numbers]))
    return table


def test_the_bias_of_a_class_of_the_user_is_built_anew():
    class Drawn(Slope):
        factor = 1.0

        def at(self, distance):
            return self.factor * torch.rand(()) * super().at(distance)

    drawn = Drawn()
    assert added(drawn, 4)[0, 0, 1] != added(drawn, 4)[0, 0, 1]
    Drawn.factor = 0.0
    assert not added(drawn, 4).any()
    slope, before = Slope(), Slope()(4)
    slope.at = lambda distance: 2 * Slope.at(slope, distance)
    assert torch.equal(added(slope, 4), 2 * before)


def test_encodings_that_contain_others_depend_on_these():
    one, two = Pair(NoEncoding(), frozen(0.0, 1.0)), Pair(NoEncoding(), frozen(0.0, 3.0))
    assert torch.equal(3 * added(one, 4), added(two, 4))
    two.second.values.data.copy_(one.second.values)
    assert torch.equal(added(one, 4), added(two, 4))
    learned = Pair(NoEncoding(), DistanceTable(1, 2))
    added(learned, 4).sum().backward()
    assert learned.second.values.grad.any()


def test_encodings_that_contain_others_survive_configuration_and_pickling():
    for encoding in (
        Pair(ALiBi(1), Pair(AttenuatedEncoding(decay=0.2, form="logits"), NoEncoding())),
        Sum(ALiBi(1, slopes=0.3), [ALiBi(1, slopes=0.1), NoEncoding()], causal=True),
    ):
        twin = Encoding.from_configuration(encoding.configuration())
        assert type(twin) is type(encoding)
        assert torch.equal(twin(5), encoding(5))
        assert torch.equal(pickle.loads(pickle.dumps(encoding))(5), encoding(5))
    assert "ALiBi" in repr(Pair(ALiBi(1), NoEncoding()))


def test_an_argument_that_is_not_stored_is_named_and_printing_does_not_fail():
    class Forgetful(NoEncoding):
        def __init__(self, heads=1, width=3):
            super().__init__(heads)

    with pytest.raises(TypeError, match="Forgetful must store its argument 'width'"):
        Forgetful().configuration()
    assert repr(Forgetful()) == "Forgetful(heads=1, causal=False)"


@pytest.mark.parametrize("make", [*LEARNED, lambda: ALiBi(2), lambda: AttenuatedEncoding(2, decay=0.3)])
def test_an_encoding_may_be_built_on_the_meta_device_and_filled_later(make):
    """As from_pretrained builds a model that contains one."""
    encoding = make()
    with torch.device("meta"):
        empty = make()
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert empty(4).is_meta
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(encoding.state_dict())
    assert torch.equal(filled(4), encoding(4))


@pytest.mark.parametrize("make", [*LEARNED, lambda: ALiBi(2), lambda: SinusoidalEncoding(2)])
def test_a_layer_built_on_the_meta_device_may_be_assigned_its_tensors(make):
    layer, x = PositionalSelfAttention(8, 2, make()), torch.randn(1, 4, 8)
    with torch.device("meta"):
        empty = PositionalSelfAttention(8, 2, make())
    empty.load_state_dict(layer.state_dict(), assign=True)
    for need_weights in (True, False):
        assert torch.equal(empty(x, need_weights=need_weights)[0], layer(x, need_weights=need_weights)[0])
    assert empty.state_dict().keys() == layer.state_dict().keys()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("number", [-200.0, 20.0, 200.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda: KERPLE(2),
        lambda: KERPLE(2, kernel="power"),
        lambda: AttenuatedEncoding(2, learnable=True, form="logits"),
    ],
)
def test_extreme_learned_numbers_survive_a_round_trip(make, number, double):
    encoding = make().double() if double else make()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(number)
    twin = Encoding.from_configuration(encoding.configuration())
    twin.load_state_dict(encoding.state_dict())
    if not double:
        assert torch.equal(twin(4), encoding(4))
    assert not encoding(4).isnan().any()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("number", [-200.0, -87.5, 88.8, 200.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda: KERPLE(2),
        lambda: KERPLE(2, kernel="power"),
        lambda: AttenuatedEncoding(2, learnable=True, form="logits"),
        lambda: AttenuatedEncoding(2, learnable=True),
    ],
)
def test_extreme_learned_numbers_have_finite_biases_and_gradients(make, number, double):
    encoding = make().double() if double else make()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(number)
    bias = encoding(4)
    assert bias.isfinite().all()
    (bias.softmax(-1) * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoding.parameters())


@pytest.mark.parametrize("make", FIXED)
def test_shapes_computed_with_fake_tensors_leave_the_cache_as_it_was(make):
    cached, empty = make(), make()
    expected = added(cached, 6).clone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mode.is_our_fake(added(cached, 6))  # not read from it
        assert mode.is_our_fake(added(empty, 7))
    for encoding in (cached, empty, make()):
        assert type(added(encoding, 7)) is torch.Tensor  # not written to it
        assert torch.equal(added(encoding, 6), expected)
