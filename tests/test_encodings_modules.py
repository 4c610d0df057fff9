"""Encodings as modules of torch: replicas, parametrizations, the meta device, encodings that contain others."""

import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    Encoding,
    NoEncoding,
    PositionalSelfAttention,
    RelativeEncoding,
    SinusoidalEncoding,
    T5Buckets,
)

LEARNED = [
    lambda: AttenuatedEncoding(2, learnable=("decay", "symmetry", "scale")),
    lambda: DistanceTable(2, 5),
    lambda: T5Buckets(2),
    lambda: KERPLE(2),
]


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
    output = replica(encoding)(5)
    torch.testing.assert_close(output, encoding(5), rtol=0, atol=0)
    (output * torch.randn(output.shape)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoding.parameters())
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn(parameter.shape))
    assert not torch.equal(replica(encoding)(5), output)


def test_a_parametrized_parameter_is_read_through_its_parametrization():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    encoding = AttenuatedEncoding(learnable="decay", decay=0.25)
    nn.utils.parametrize.register_parametrization(encoding, "log_decay", Half())
    assert encoding.decay.item() == pytest.approx(0.5)
    encoding(4)[0, 0, 1].backward()
    assert encoding.parametrizations.log_decay.original.grad.item() != 0


def test_derivatives_for_a_buffer_are_computed():
    encoding = ALiBi(1, slopes=0.5)

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


EXTREME = [
    lambda: KERPLE(2),
    lambda: KERPLE(2, kernel="power"),
    lambda: AttenuatedEncoding(2, learnable=True, form="logits"),
    lambda: AttenuatedEncoding(2, learnable=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [-200.0, -87.5, 20.0, 88.8, 200.0])
@pytest.mark.parametrize("make", EXTREME)
def test_extreme_learned_numbers_have_finite_biases_and_gradients_and_survive_a_round_trip(make, number, dtype):
    encoding = make().to(dtype)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(number)
    bias = encoding(4)
    assert bias.isfinite().all()
    (bias.softmax(-1) * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoding.parameters())
    if dtype == torch.float32:
        twin = Encoding.from_configuration(encoding.configuration())
        twin.load_state_dict(encoding.state_dict())
        assert torch.equal(twin(4), bias)
