"""Encodings in any module: beside the same bias added to the logits by hand."""

import copy
import pickle
import types

import pytest
import torch
import transformers as hf
from torch import nn

from benchmarks.attaching import AddedToLogits
from pelocality.encodings import ALiBi, AttenuatedEncoding, CoPE, DistanceTable, NoEncoding, RotaryEncoding
from pelocality.models import SequenceModel, attach, attached, load, positional_attention
from pelocality.models.observer import SOFTMAXES
from tests.families import assert_same_outputs, same_weights, tiny, tokens
from tests.test_models_sequence_model import (
    HEADS,
    KEYS_BEFORE,
    VOCABULARY,
    WIDTH,
    WITHOUT_TOKENS,
    X_TRANSFORMERS,
    N,
    Own,
    encoder_layer,
    seeded,
)

IDS = tokens(2, N) % VOCABULARY
KERNEL = nn.functional.scaled_dot_product_attention


def table(heads, length=N):
    """A signed table of random numbers, without a symmetry that would hide a wrong formula."""
    found = DistanceTable(heads, length=length, signed=True)
    with torch.no_grad():
        found.values.copy_(torch.randn(found.values.shape, generator=torch.Generator().manual_seed(0)))
    return found


def output_of(model, inputs):
    """The first tensor that a model returns."""
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, torch.Tensor) else output[0]


def assert_close(actual, expected):
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * max(scale, 1))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_enters_the_logits_of_an_own_module(causal, kernel):
    model, by_hand = seeded(lambda: Own(causal, kernel)).eval(), seeded(lambda: Own(causal, kernel=False)).eval()
    before, bias = output_of(model, IDS), table(HEADS)
    with AddedToLogits(bias(N).detach()):
        expected = output_of(by_hand, IDS)
    with attach(model, bias, example_inputs=IDS, position_embeddings="keep") as attachment:
        assert_close(output_of(model, IDS), expected)
        assert len(attachment.encodings) == 2
        assert attached(model).encodings == attachment.encodings
    assert torch.equal(output_of(model, IDS), before)
    assert attached(model) is None
    assert set(vars(model.blocks[0])) == set(vars(Own().blocks[0]))


def test_positions_that_are_named_are_disabled():
    model, without = seeded(Own).eval(), seeded(Own).eval()
    with torch.no_grad():
        without.positions.weight.zero_()
    with AddedToLogits(table(HEADS)(N).detach()):
        expected = output_of(seeded_like(without, kernel=False), IDS)
    before = copy.deepcopy(model.state_dict())
    with attach(model, table(HEADS), example_inputs=IDS, disable=["positions"]):
        assert_close(output_of(model, IDS), expected)
        with pytest.raises(IndexError):
            model.words(torch.tensor([VOCABULARY]))
        assert model.positions(torch.tensor([99])).eq(0).all()  # any length
    assert same_weights(before, model.state_dict())


def seeded_like(model, **options):
    """The same weights in a module with other options."""
    found = Own(**options).eval()
    found.load_state_dict(model.state_dict())
    return found


def test_one_layer_alone_gets_the_encoding():
    model, by_hand = seeded(Own).eval(), seeded(lambda: Own(kernel=False)).eval()
    with torch.no_grad(), AddedToLogits(table(HEADS)(N).detach()):
        states = by_hand.blocks[0](by_hand.words(IDS) + by_hand.positions(torch.arange(N)))
    expected = by_hand.blocks[1](states).detach()
    with attach(model, table(HEADS), example_inputs=IDS, layers=[0], position_embeddings="keep") as attachment:
        assert [type(each) for each in attachment.encodings] == [DistanceTable, NoEncoding]
        assert_close(output_of(model, IDS), expected)
    bert = tiny("bert").float()
    with attach(bert, table(2), layers=[1], position_embeddings="keep") as attachment:
        assert [type(each) for each in attachment.encodings] == [NoEncoding, DistanceTable, NoEncoding]


def turned(states):
    """Rotate (batch, head, n, 8) by complex numbers of the frequencies 1 and 1 / 5 in the first four dimensions."""
    phase = torch.exp(1j * torch.arange(N)[:, None] * torch.tensor([1.0, 0.2]))
    z = torch.complex(states[..., :2], states[..., 2:4]) * phase
    return torch.cat([z.real, z.imag, states[..., 4:]], -1)


@pytest.mark.parametrize("kernel", [True, False])
def test_queries_and_keys_of_an_own_module_are_rotated(kernel, monkeypatch):
    model, by_hand, attended = seeded(lambda: Own(kernel=kernel)).eval(), seeded(Own).eval(), KERNEL
    with attach(model, RotaryEncoding(4, base=25.0), example_inputs=IDS, position_embeddings="keep"):
        rotated = output_of(model, IDS)
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda query, key, value, **more: attended(turned(query), turned(key), value, **more),
    )
    assert_close(rotated, output_of(by_hand, IDS))


@pytest.mark.parametrize("encoding", [RotaryEncoding(4), CoPE(8, positions=4)])
def test_rotations_and_cope_in_attention_that_torch_projects_are_refused_by_name(encoding):
    layer = seeded(encoder_layer).eval()
    with pytest.raises(ValueError, match=rf"{type(encoding).__name__} .* nn\.MultiheadAttention"):
        attach(layer, encoding, example_inputs=torch.randn(2, N, WIDTH), position_embeddings="keep")


PADDING = torch.arange(N) >= torch.tensor([N, 9])[:, None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torchs_encoder_gets_the_bias_beside_its_fast_path(padded, training):
    """The witness is the encoder's own mask."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, dropout=0.0)
    model = seeded(lambda: nn.TransformerEncoder(layer, 2)).train(training)
    batch = {"src": torch.randn(2, N, WIDTH), "src_key_padding_mask": PADDING if padded else None}
    real = ~PADDING if padded else torch.ones_like(PADDING)
    mask = table(HEADS)(N).detach().repeat(2, 1, 1)
    floats = {"src_key_padding_mask": torch.zeros(2, N).masked_fill(PADDING, -torch.inf) if padded else None}
    expected = output_of(model, batch | floats | {"mask": mask})
    with attach(model, table(HEADS), example_inputs=batch, position_embeddings="keep"):
        assert_close(output_of(model, batch)[real], expected[real])


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_nested_tensors_are_off_until_removal(copied):
    model = seeded(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)).eval()
    batch = {"src": torch.randn(2, N, 8), "src_key_padding_mask": PADDING}
    before, bias = output_of(model, batch), table(2)
    torch.backends.mha.set_fastpath_enabled(False)
    expected = output_of(model, batch | {"mask": bias(N).detach().repeat(2, 1, 1)})
    torch.backends.mha.set_fastpath_enabled(True)
    attach(model, bias, example_inputs=batch["src"], position_embeddings="keep")
    model = copied(model)
    assert_close(output_of(model, batch)[~PADDING], expected[~PADDING])
    attached(model).remove()
    assert model.use_nested_tensor
    assert torch.equal(output_of(model, batch), before)


def test_one_attention_of_torch_gets_the_bias_and_cross_attention_does_not():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.cross = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))

        def forward(self, states, other):
            states = self.own(states, states, states, need_weights=False)[0]
            return self.cross(states, other, other, need_weights=False)[0]

    model, batch = seeded(Both), {"states": torch.randn(2, N, WIDTH), "other": torch.randn(2, N, WIDTH)}
    with torch.no_grad():
        mask = table(HEADS)(N).repeat(2, 1, 1)
        states = model.own(batch["states"], batch["states"], batch["states"], attn_mask=mask)[0]
        expected = model.cross(states, batch["other"], batch["other"])[0]
    with attach(model, table(HEADS), example_inputs=batch, position_embeddings="keep") as attachment:
        assert len(attachment.encodings) == 1
        assert_close(output_of(model, batch), expected)


@pytest.mark.parametrize("name", X_TRANSFORMERS)
def test_x_transformers_get_the_bias(name):
    x = pytest.importorskip("x_transformers")

    def make(**more):
        decoder = x.Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=8, **more)
        return seeded(lambda: x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=decoder)).eval()

    model, plain = make(**X_TRANSFORMERS[name]), make(**{**X_TRANSFORMERS[name], "attn_flash": False})
    plain.load_state_dict(model.state_dict())
    with AddedToLogits(table(HEADS)(N).detach()):
        expected = output_of(plain, IDS)
    with attach(model, table(HEADS), example_inputs=IDS, position_embeddings="keep"):
        assert_close(output_of(model, IDS), expected)


class KeyBefore(AddedToLogits):
    """Adds nothing to the first column."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in SOFTMAXES and args[0].shape[-2:] == (N, N + 1):
            args = (args[0] + nn.functional.pad(self.bias, (1, 0)), *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", KEYS_BEFORE.values(), ids=str)
def test_a_key_before_the_tokens_gets_no_bias_and_tokens_do(options):
    x = pytest.importorskip("x_transformers")
    decoder = x.Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=8, **options)
    model = seeded(lambda: x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=decoder)).eval()
    before = output_of(model, IDS)
    with KeyBefore(table(HEADS)(N).detach()):
        expected = output_of(model, IDS)
    assert not torch.allclose(expected, before, atol=1e-2)
    with attach(model, table(HEADS), example_inputs=IDS, position_embeddings="keep"):
        assert_close(output_of(model, IDS), expected)
    assert torch.equal(output_of(model, IDS), before)


class Grouped(nn.Module):
    """Two layers of four heads that share two keys: in five axes, or head by head."""

    def __init__(self, attend):
        super().__init__()
        self.words, self.attend = nn.Embedding(VOCABULARY, 16), attend
        self.blocks = nn.ModuleList([nn.Linear(16, 32) for _ in range(2)])
        for block in self.blocks:
            block.forward = types.MethodType(attending(attend), block)

    def forward(self, ids):
        states = self.words(ids)
        for block in self.blocks:
            states = states + block(states)
        return states


def attending(attend):
    def forward(self, states):
        query, key, value = nn.functional.linear(states, self.weight, self.bias).split((16, 8, 8), -1)
        query = query.unflatten(-1, (2, 2, 4)).permute(0, 2, 3, 1, 4)  # (batch, group, head, n, d)
        key, value = (each.unflatten(-1, (2, 1, 4)).permute(0, 2, 3, 1, 4) for each in (key, value))
        attended = attend(query, key, value, torch.ones(states.shape[1], states.shape[1]).tril().bool())
        return attended.flatten(1, 2).transpose(1, 2).flatten(2)

    return forward


def in_steps(query, key, value, visible):
    return (query @ key.mT / 2).masked_fill(~visible, -torch.inf).softmax(-1) @ value


def head_by_head(attend):
    """Call a function of (batch, n, d) for each of the four heads."""
    return lambda query, key, value, visible: torch.stack(
        [
            torch.stack([attend(query[:, g, h], key[:, g, 0], value[:, g, 0], visible) for h in range(2)], 1)
            for g in range(2)
        ],
        1,
    )


def in_the_kernel(query, key, value, visible):
    key, value = (each.expand(*query.shape[:-2], -1, -1) for each in (key, value))
    return KERNEL(query, key, value, attn_mask=visible)


GROUPED = {
    "steps": in_steps,
    "kernel": in_the_kernel,
    "head by head": head_by_head(in_steps),
    "head by head in the kernel": head_by_head(in_the_kernel),
}


@pytest.mark.parametrize("encoding", [table(4), RotaryEncoding(4, base=25.0)], ids=["bias", "rotation"])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads_and_heads_one_by_one_get_their_own_bias(name, encoding):
    def four_axes(query, key, value, visible):
        key, value = (each.expand_as(query).flatten(1, 2) for each in (key, value))
        return KERNEL(query.flatten(1, 2), key, value, attn_mask=visible).unflatten(1, (2, 2))

    model, usual = (seeded(lambda attend=attend: Grouped(attend)).eval() for attend in (GROUPED[name], four_axes))
    before = output_of(model, IDS)
    attach(usual, encoding, example_inputs=IDS, position_embeddings="keep")
    with attach(model, encoding, example_inputs=IDS, position_embeddings="keep"):
        assert_close(output_of(model, IDS), output_of(usual, IDS))
    assert torch.equal(output_of(model, IDS), before)


def in_chunks(query, key, value, visible):
    chunks = zip(query.split(4, -2), visible.split(4), strict=True)
    return torch.cat([in_steps(part, key, value, mask) for part, mask in chunks], -2)


def by_exponentials(query, key, value, visible):
    weights = (query @ key.mT).masked_fill(~visible, -torch.inf).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def by_einsum(query, key, value, visible):
    logits = torch.einsum("bghid,bgjd->bghij", query, key[:, :, 0])
    return logits.masked_fill(~visible, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("prove", [True, False])
@pytest.mark.parametrize(
    ("attend", "encoding"),
    [
        (in_chunks, table(4)),
        (by_exponentials, table(4)),
        (torch.vmap(in_steps, in_dims=(0, 0, 0, None)), table(4)),
        (by_einsum, RotaryEncoding(4)),
    ],
)
def test_attention_that_is_measured_but_gets_no_encoding_is_refused_by_name(attend, encoding, prove):
    model = seeded(lambda: Grouped(attend)).eval()
    assert positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=2).heads == 4
    with pytest.raises(ValueError, match=r"(Linear attends by exponentials|Linear computes attention by einsum)"):
        attach(model, encoding, example_inputs=IDS, position_embeddings="keep", prove=prove)


@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_models_of_images_sound_and_series_get_the_bias(name):
    make, content, added = WITHOUT_TOKENS[name]
    model, inputs = seeded(make).eval(), content(0, N)
    model.set_attn_implementation("eager")
    with AddedToLogits(table(2, N + added)(N + added).detach()) as by_hand:
        expected = output_of(model, inputs)
    assert by_hand.found == 2
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        before = output_of(model, inputs)
        known = SequenceModel(model, inputs=content)
        with attach(known, table(2, N + added), example_inputs=inputs, position_embeddings="keep"):
            assert_close(output_of(model, inputs), expected)
            assert positional_attention(known, length=N, words=1).source.encoding is not None
        assert_same_outputs(output_of(model, inputs), before)


def test_a_parameter_of_positions_is_disabled():
    model = seeded(WITHOUT_TOKENS["vit"][0]).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    without = copy.deepcopy(model)
    with torch.no_grad():
        without.embeddings.position_embeddings.zero_()
    before = copy.deepcopy(model.state_dict())
    with attach(model, NoEncoding(), example_inputs=inputs, disable=["embeddings.position_embeddings"]):
        assert_same_outputs(output_of(model, inputs), output_of(without, inputs))
        model(**inputs).last_hidden_state.sum().backward()
        assert all(weight.grad is None for name, weight in model.named_parameters() if "position_emb" in name)
    assert same_weights(before, model.state_dict())
    assert type(model.embeddings) is type(without.embeddings)


def test_encodings_that_normalise_over_keys_see_the_mask():
    model, longer = seeded(Own).eval(), IDS
    encoding = AttenuatedEncoding(HEADS, decay=0.3, form="weights")
    with attach(model, encoding, example_inputs=IDS, position_embeddings="keep"):
        whole = output_of(model, longer)
        assert_close(output_of(model, longer[:, :9]), whole[:, :9])  # causal: a prefix does not see the rest


class LeftPadded(Own):
    """A causal module that hides keys by -1e9, and among padding on the left all keys of a query."""

    def forward(self, ids):
        visible = torch.ones(ids.shape[-1], ids.shape[-1]).tril().bool() & (ids != 0)[:, None, None]
        states = self.words(ids)
        for block in self.blocks:
            query, key, value = (
                each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in block.project(states).chunk(3, -1)
            )
            logits = (query @ key.transpose(-1, -2)).masked_fill(~visible, -1e9)
            states = states + block.out((logits.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return states


def test_queries_that_see_no_key_are_left_out_of_the_proof():
    model, padded = seeded(LeftPadded).eval(), IDS.clamp(min=1)
    padded[0, :3] = 0
    attach(model, table(HEADS), example_inputs=padded, position_embeddings="keep")
    assert_close(output_of(model, padded)[:1, 3:], output_of(model, padded[:1, 3:]))


def test_encodings_train_are_copied_and_saved_as_parts_of_the_module():
    model = seeded(Own)
    encoding = AttenuatedEncoding(HEADS, decay=0.3, form="logits", learnable=["decay"])
    attachment = attach(model, encoding, example_inputs=IDS, position_embeddings="keep")
    model(IDS).square().mean().backward()
    assert all(each.log_decay.grad.abs().sum() > 0 for each in attachment.encodings)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        attached(copied).encodings[0].log_decay.add_(1)
    assert not torch.equal(output_of(copied, IDS), output_of(model, IDS))
    other = seeded(Own)
    attach(other, encoding, example_inputs=IDS, position_embeddings="keep")
    other.load_state_dict(copied.state_dict())
    assert torch.equal(output_of(other, IDS), output_of(copied, IDS))
    attached(copied).remove()
    assert attached(model) is not None
    attachment.remove()
    attachment.remove()
    assert_same_outputs(output_of(model, IDS), output_of(copied, IDS))


def test_a_model_of_images_is_saved_and_loaded_with_its_encoding(tmp_path):
    model, inputs = seeded(WITHOUT_TOKENS["vit with a head"][0]).eval(), {"pixel_values": torch.randn(2, 3, 16, 16)}
    encoding, names = AttenuatedEncoding(2, decay=0.3, learnable=True), set(model.state_dict())
    table_name = "embeddings.position_embeddings"
    attachment = attach(model, encoding, example_inputs=inputs, disable=[table_name])
    with torch.no_grad():
        attachment.encodings[1].log_decay.add_(1)
    assert {name for name in model.state_dict() if "pelocality" not in name} == names
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert same_weights(model.state_dict(), loaded.state_dict())
    assert_same_outputs(output_of(loaded, inputs), output_of(model, inputs))
    assert repr(attached(loaded).encodings) == repr(attachment.encodings)
    attached(loaded).remove()
    attachment.remove()
    assert_same_outputs(output_of(loaded, inputs), output_of(model, inputs))
    loaded.save_pretrained(tmp_path / "plain")
    plain = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "plain")
    assert_same_outputs(output_of(plain, inputs), output_of(model, inputs))


KEEP = {"position_embeddings": "keep"}


@pytest.mark.parametrize(("options", "message"), [
    ({}, r"the positions of Own are not known; name what holds positions, disable=\[\.\.\.\], or add"),
    ({"disable": ["position"]}, "disable must hold names of parts or parameters of the model, got 'position'; such as"),
    (KEEP | {"disable": ["positions"]}, "disable is for modules"),
    (KEEP | {"layers": [2]}, "layers must name"),
    (KEEP | {"encoding": ALiBi(2)}, "must have 1 or 3 heads, as the attention has, got 2"),
    (KEEP | {"encoding": [ALiBi(HEADS)]}, "or a list of 2, one per layer"),
    (KEEP | {"example_inputs": IDS + VOCABULARY}, "it has no row for every position"),
    (KEEP | {"encoding": AttenuatedEncoding(HEADS, symmetry=0.5)}, "acts on future keys only"),
])  # fmt: skip
def test_what_cannot_be_attached_is_refused_and_changes_nothing(options, message):
    model = seeded(Own)
    names, before = [set(vars(module)) for module in model.modules()], output_of(model, IDS)
    options = {"encoding": ALiBi(HEADS), "example_inputs": IDS} | options
    with pytest.raises(ValueError, match=message):
        attach(model, options.pop("encoding"), **options)
    assert [set(vars(module)) for module in model.modules()] == names
    assert torch.equal(output_of(model, IDS), before)


def test_attention_that_leaves_out_the_bias_is_refused():
    class Stubborn(nn.Module):
        """Attends by a kernel at first, and by products that no function of torch shows later."""

        def __init__(self):
            super().__init__()
            self.words, self.runs = nn.Embedding(VOCABULARY, 8), 0

        def forward(self, ids):
            self.runs += 1
            states = self.words(ids)[:, None]
            if self.runs > 5:
                weights = (states @ states.mT / 8**0.5).exp()
                return (weights / weights.sum(-1, keepdim=True)) @ states
            return nn.functional.scaled_dot_product_attention(states, states, states)

    with pytest.raises(ValueError, match="Stubborn, which computes no attention that torch shows"):
        attach(seeded(Stubborn), table(1), example_inputs=IDS, position_embeddings="keep")
