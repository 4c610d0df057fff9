"""When a bias may be kept and when it must be built anew: what is learned, what was written to, what holds others."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    Encoding,
    NoEncoding,
    RelativeEncoding,
    T5Buckets,
)

LEARNED = [
    lambda: AttenuatedEncoding(2, learnable=("decay", "symmetry", "scale")),
    lambda: DistanceTable(2, 5),
    lambda: T5Buckets(2),
    lambda: KERPLE(2),
]


def replica(module):
    """What nn.DataParallel makes of a module on every device: parameters become tensors among the attributes."""
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
        replica(encoding)(5)  # a bias that was kept here would have no gradient below
    output = replica(encoding)(5)
    torch.testing.assert_close(output, encoding(5), rtol=0, atol=0)
    (output * torch.randn(output.shape)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoding.parameters())
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn(parameter.shape))
    assert not torch.equal(replica(encoding)(5), output)


def test_a_parametrized_number_is_read_through_its_parametrization():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    encoding = AttenuatedEncoding(learnable="decay", decay=0.25)
    nn.utils.parametrize.register_parametrization(encoding, "log_decay", Half())
    assert encoding.decay.item() == pytest.approx(0.5)
    encoding(4)[0, 0, 1].backward()
    assert encoding.parametrizations.log_decay.original.grad.item() != 0


@pytest.mark.parametrize("write", ["data", "assign", "numpy", "buffer"])
def test_a_number_that_was_written_behind_torchs_back_changes_the_bias(write):
    encoding = ALiBi(heads=1, slopes=0.5)
    before = encoding(6).clone()
    if write == "data":
        encoding.fixed_slopes.data.fill_(5.0)
    elif write == "assign":
        encoding.fixed_slopes.data = torch.tensor([5.0])
    elif write == "numpy":
        encoding.fixed_slopes.numpy()[:] = 5.0
    else:
        encoding.register_buffer("fixed_slopes", torch.tensor([5.0]))
    assert torch.equal(encoding(6), 10 * before)


class Slope(RelativeEncoding):
    """An encoding of a user's own, with a number that is no argument."""

    def __init__(self, heads=1):
        super().__init__(heads)
        self.k = 1.0

    def at(self, distance):
        return -self.k * distance.abs()[None]


@pytest.mark.parametrize("number", [2.0, torch.tensor(2.0), [2.0], lambda: 2.0])
def test_an_attribute_that_is_no_argument_changes_the_bias(number):
    class Read(Slope):
        def at(self, distance):
            k = self.k() if callable(self.k) else self.k[0] if isinstance(self.k, list) else self.k
            return -k * distance.abs()[None]

    encoding = Read()
    before = encoding(4).clone()
    encoding.k = number
    assert torch.equal(encoding(4), 2 * before)
    if isinstance(number, torch.Tensor):
        number.data.fill_(3.0)
        assert torch.equal(encoding(4), 3 * before)


class Sum(RelativeEncoding):
    """An encoding of a user's own that holds encodings."""

    def __init__(self, first, others=(), heads=1, causal=False):
        super().__init__(heads, causal)
        self.first, self.others = first, nn.ModuleList(others)

    def at(self, distance):
        return self.first.at(distance) + sum(other.at(distance) for other in self.others)

    def configuration(self):
        return super().configuration() | {"others": [other.configuration() for other in self.others]}


class Pair(RelativeEncoding):
    """The plainest such encoding."""

    def __init__(self, first, second, heads=1, causal=False):
        super().__init__(heads, causal)
        self.first, self.second = first, second

    def at(self, distance):
        return self.first.at(distance) + self.second.at(distance)


def frozen(*numbers):
    table = DistanceTable(1, len(numbers), learnable=False)
    table.values.copy_(torch.tensor([numbers]))
    return table


def test_encodings_that_hold_others_do_not_share_a_bias_unless_those_are_equal():
    one, two = Pair(NoEncoding(), frozen(0.0, 1.0)), Pair(NoEncoding(), frozen(0.0, 3.0))
    assert torch.equal(3 * one(4), two(4))
    assert copy.deepcopy(one)(4).data_ptr() == one(4).data_ptr()
    two.second.values.data.copy_(one.second.values)
    assert two(4).data_ptr() == one(4).data_ptr()
    learned = Pair(NoEncoding(), DistanceTable(1, 2))
    learned(4).sum().backward()
    assert learned.second.values.grad.any()


def test_encodings_that_hold_others_survive_configuration_and_pickling():
    for encoding in (
        Pair(ALiBi(1), Pair(AttenuatedEncoding(decay=0.2, form="logits"), NoEncoding())),
        Sum(ALiBi(1, slopes=0.3), [ALiBi(1, slopes=0.1), NoEncoding()], causal=True),
    ):
        twin = Encoding.from_configuration(encoding.configuration())
        assert type(twin) is type(encoding)
        assert torch.equal(twin(5), encoding(5))
        assert torch.equal(pickle.loads(pickle.dumps(encoding))(5), encoding(5))
    assert "ALiBi" in repr(Pair(ALiBi(1), NoEncoding()))


def test_an_argument_that_is_not_kept_is_named_and_printing_does_not_fail():
    class Forgetful(NoEncoding):
        def __init__(self, heads=1, width=3):
            super().__init__(heads)

    with pytest.raises(TypeError, match="Forgetful must keep its argument 'width'"):
        Forgetful().configuration()
    assert repr(Forgetful()) == "Forgetful(heads=1, causal=False)"


@pytest.mark.parametrize("make", [*LEARNED, lambda: ALiBi(2), lambda: AttenuatedEncoding(2, decay=0.3)])
def test_an_encoding_may_be_built_on_the_meta_device_and_filled_later(make):
    """As from_pretrained builds a model that holds one."""
    encoding = make()
    with torch.device("meta"):
        empty = make()
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert empty(4).is_meta
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(encoding.state_dict())
    assert torch.equal(filled(4), encoding(4))


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
def test_numbers_that_ran_away_in_training_make_a_round_trip(make, number, double):
    encoding = make().double() if double else make()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(number)
    twin = Encoding.from_configuration(encoding.configuration())
    twin.load_state_dict(encoding.state_dict())
    if not double:
        assert torch.equal(twin(4), encoding(4))
    assert not encoding(4).isnan().any()
