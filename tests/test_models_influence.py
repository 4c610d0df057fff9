"""Influence of positions on hidden states, against closed forms, finite differences and the full Jacobian."""

import sys

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import direction_balance, influence, locality, positional_attention, text_average
from pelocality.encodings import AttenuatedEncoding
from pelocality.models import (
    AttentionFunction,
    Influence,
    PositionalAttention,
    SequenceModel,
    TextAverage,
    attach,
    identical_patches,
)
from tests.families import EVERY, offloaded, quantised, same, small, state, tiny, tiny_any, tokens

N, D = 7, 16
measuring = sys.modules["pelocality.models.measuring.influence"]  # whose name is also that of the function
OTHERS = {
    "mamba": lambda: hf.MambaModel(small(hf.MambaConfig)),
    "mamba2": lambda: hf.Mamba2Model(small(hf.Mamba2Config, num_heads=4, head_dim=8, n_groups=1, chunk_size=4)),
    "falcon_mamba": lambda: hf.FalconMambaModel(small(hf.FalconMambaConfig)),
    "rwkv": lambda: hf.RwkvModel(small(hf.RwkvConfig, attention_hidden_size=16, context_length=32)),
    "xlstm": lambda: hf.xLSTMModel(small(hf.xLSTMConfig, num_blocks=2, num_heads=2)),
    "fnet": lambda: hf.FNetModel(small(hf.FNetConfig)),
    "recurrent_gemma": lambda: hf.RecurrentGemmaModel(
        small(hf.RecurrentGemmaConfig, num_hidden_layers=3, num_key_value_heads=1, lru_width=16)
    ),
    "longformer": lambda: hf.LongformerModel(small(hf.LongformerConfig, attention_window=4)),
}
CAUSAL = {
    "bloom",
    "recurrent_gemma",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "xlstm",
    "gpt2",
    "mistral",
    "jamba",
    "mixtral",
    "lfm2",
}


def any_model(name):
    """Return one tiny model of any family here or in tests.families, in float64."""
    if name not in OTHERS:
        return tiny(name) if name in EVERY else tiny_any(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OTHERS[name]().double().eval()


def of_text(model, ids, **options):
    """Return the influence of a model on texts with all their tokens."""
    return influence(model, [{"input_ids": ids}], special_tokens=True, progress=False, **options)


class Mixing(nn.Module):
    """One linear layer: each position becomes a weighted sum of all positions, in other dimensions."""

    def __init__(self, mix):
        super().__init__()
        self.words, self.out, self.mix = nn.Embedding(50, D), nn.Linear(D, D, bias=False), nn.Parameter(mix)

    def forward(self, ids):
        return self.mix @ self.out(self.words(ids))


class Convolution(nn.Module):
    """Two convolutions over positions, the second of which looks at the past alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, D)
        self.both, self.past = nn.Conv1d(D, D, 3, padding=1), nn.Conv1d(D, D, 3)

    def forward(self, ids):
        states = self.both(self.words(ids).mT).tanh()
        return self.past(nn.functional.pad(states, (2, 0))).mT


def test_influence_of_a_linear_layer_is_its_squared_weights():
    mix = torch.rand(N, N, dtype=torch.float64) + 0.1
    model = SequenceModel(Mixing(mix).double(), vocabulary_size=50)
    result = of_text(model, tokens(1, N) % 50, directions=D)
    expected = mix.square() / mix.square().sum(-1, keepdim=True)
    torch.testing.assert_close(result.attention[0, 0], expected)
    assert result.layers == (0,)


def test_a_convolution_is_seen_as_far_as_it_reaches():
    result = of_text(SequenceModel(Convolution(), vocabulary_size=50), tokens(1, 9) % 50)
    reach = torch.zeros(9, 9, dtype=torch.bool)
    for query in range(9):
        reach[query, max(0, query - 3) : query + 2] = True
    assert torch.equal(result.attention[0, 0] > 0, reach)
    assert result.visible is None  # zero, but not by a causal mask


class EmbeddedTwice(nn.Module):
    """A module that embeds its tokens twice, and other tokens once."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(50, D), nn.Conv1d(D, D, 3, padding=1)

    def get_input_embeddings(self):
        return self.words

    def mixed(self, one, two, other):
        return self.mix((one * two * (1 + other)).mT).mT.tanh()

    def forward(self, ids):
        return self.mixed(self.words(ids), self.words(ids), self.words(49 - ids))


def test_tokens_that_are_embedded_twice_have_influence_by_both():
    model, ids = EmbeddedTwice().double(), tokens(1, N) % 50
    result = of_text(SequenceModel(model, vocabulary_size=50), ids, directions=D)
    other = model.words(49 - ids).detach()
    jacobian = torch.autograd.functional.jacobian(lambda e: model.mixed(e, e, other)[0], model.words(ids).detach())
    expected = jacobian.square().sum((1, 2, 4))
    torch.testing.assert_close(result.attention[0, 0], expected / expected.sum(-1, keepdim=True))


def squared_jacobian(model, ids):
    """Return the squared norms of the Jacobian's blocks (layer, n, n), by reverse mode over all hidden states."""
    embeddings = model.get_input_embeddings()(ids).detach()

    def run(given):
        states = model(inputs_embeds=given, output_hidden_states=True).hidden_states[1:]
        return torch.stack([each[0] for each in states])

    jacobian = torch.autograd.functional.jacobian(run, embeddings)  # (layer, n, d, 1, n, d)
    return jacobian.square().sum((2, 3, 5))


@pytest.mark.parametrize("name", ["bert", "bloom", "recurrent_gemma"])
def test_influence_in_all_directions_is_the_whole_jacobian(name):
    model, ids = any_model(name), tokens(1, N)
    for norm in ("final_norm", "ln_f"):  # the last hidden states are behind it
        if hasattr(model, norm):
            setattr(model, norm, nn.Identity())
    expected = squared_jacobian(model, ids)
    result = of_text(model, ids, directions=model.get_input_embeddings().weight.shape[1])
    torch.testing.assert_close(result.attention[:, 0], expected / expected.sum(-1, keepdim=True), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "xlnet"])
def test_backward_mode_gives_what_forward_mode_does(name, monkeypatch):
    model, ids, found = any_model(name), tokens(2, N), []
    for way in (measuring._in_forward_mode, measuring._backward_twice):
        monkeypatch.setattr(measuring, "_way", lambda *run, way=way: way)
        found.append(of_text(model, ids).attention)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_part_that_runs_without_gradients_has_influence():
    """Such a part has a derivative in forward mode alone."""

    def function(given):
        with torch.no_grad():
            past = given.cumsum(1) / 20
        return given + past

    result = of_text(SequenceModel(Own(function), vocabulary_size=50), torch.tensor([[3, 4, 5]]), directions=D)
    squares = torch.tensor([[1.05, 0, 0], [0.05, 1.05, 0], [0.05, 0.05, 1.05]]).square()
    torch.testing.assert_close(result.attention[0, 0].float(), squares / squares.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", ["t5", "mamba"])
def test_influence_is_that_of_finite_differences(name):
    model, ids, step = any_model(name), tokens(1, 5), 1e-3  # norms and scans are in float32
    last = "last_hidden_state"
    base = SequenceModel(model).module
    norms = [each for each in base.modules() if each is getattr(base, "final_layer_norm", getattr(base, "norm_f", 0))]
    table, found = base.get_input_embeddings(), torch.zeros(5, 5, dtype=torch.float64)

    def run(position, dimension, by):
        def change(module, args, output):
            where = output.clone()
            place = (0, position) if output.shape[0] == 1 else (position, 0)
            where[place][dimension] += by
            return where

        handles = [table.register_forward_hook(change)]
        handles += [each.register_forward_hook(lambda module, args, output: args[0]) for each in norms]
        with torch.no_grad():
            output = base(input_ids=ids)[last][0]
        for handle in handles:
            handle.remove()
        return output

    width = table.weight.shape[1]
    for key in range(5):
        for dimension in range(width):
            change = (run(key, dimension, step) - run(key, dimension, -step)) / (2 * step)
            found[:, key] += change.square().sum(-1)
    result = of_text(model, ids, directions=width)
    torch.testing.assert_close(result.attention[-1, 0], found / found.sum(-1, keepdim=True), rtol=1e-3, atol=1e-4)


def test_few_directions_are_right_on_average_and_more_are_nearer():
    model, ids = tiny("bert"), tokens(1, N)
    exact = of_text(model, ids, directions=D).attention
    drawn = {k: torch.stack([of_text(model, ids, directions=k, seed=s).attention for s in range(6)]) for k in (1, 4)}
    spread = {k: (each - exact).square().mean().sqrt() for k, each in drawn.items()}
    assert spread[4] < 0.6 * spread[1]
    assert (drawn[4].mean(0) - exact).abs().max() < 0.1


@pytest.mark.parametrize("name", [*OTHERS, "t5 decoder", "albert", "xlnet", "jamba"])
def test_every_kind_of_model_has_influence_in_every_layer(name):
    model, n = any_model(name), 8
    before = state(model)
    result = of_text(model, tokens(1, n))
    assert isinstance(result, TextAverage)
    depth = getattr(SequenceModel(model).config, "num_hidden_layers", None)
    assert result.layers == tuple(range(depth))
    assert result.attention.shape == (depth, 1, n, n)
    torch.testing.assert_close(result.attention.sum(-1), torch.ones(depth, 1, n, dtype=torch.float64))
    assert same(before, state(model))
    assert result.source.causal == (name in {*CAUSAL, "t5 decoder"})
    if result.source.causal:
        assert not result.attention.triu(1).any()
        torch.testing.assert_close(direction_balance(result), -torch.ones(depth, 1, dtype=torch.float64))


def test_mixtures_of_experts_run_in_plain_torch_and_get_their_kernel_back():
    config = small(hf.MixtralConfig, num_key_value_heads=1, num_local_experts=4)
    model = hf.MixtralModel(config).eval()
    kernels = [model.config._experts_implementation]
    assert kernels != ["eager"]
    before = state(model)
    result = of_text(model, tokens(2, N))
    assert not result.attention.triu(1).any()
    assert [model.config._experts_implementation] == kernels
    assert same(before, state(model))


def test_texts_of_a_padded_batch_are_those_of_each_text_alone():
    model, ids, lengths = tiny("gpt2"), tokens(3, 9), (9, 5, 7)
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    padded = influence(model, [{"input_ids": ids, "attention_mask": mask}], special_tokens=True)
    texts = [{"input_ids": ids[i : i + 1, :n]} for i, n in enumerate(lengths)]
    alone = influence(model, texts, special_tokens=True)
    torch.testing.assert_close(padded.attention, alone.attention)
    torch.testing.assert_close(padded.per_sample["locality"], alone.per_sample["locality"])


def test_directions_depend_on_the_text_and_the_seed_alone():
    model, ids = tiny("bert"), tokens(2, N)
    both = of_text(model, ids)
    other = of_text(model, ids.flip(0))
    torch.testing.assert_close(both.attention, other.attention)
    assert not torch.equal(both.attention, of_text(model, ids, seed=1).attention)


def test_identical_words_have_influence_with_intervals_and_frames(tmp_path):
    model = tiny("gpt2")
    result = influence(model, length=N, words=3, seed=3)
    assert isinstance(result, PositionalAttention)
    assert result.source.words == positional_attention(model, length=N, words=3, seed=3).source.words
    low, high = result.interval("past_locality")
    mean = result.per_sample["past_locality"].mean(0)
    assert bool(((low <= mean) & (mean <= high)).all())
    assert {"past_locality", "past_locality_low", "past_locality_of_mean"} <= {*result.to_frame().columns}
    assert repr(result).startswith("PositionalAttention of GPT2Model: influence in 3 layers, 2 directions, n = 7")
    assert result.notes[-1].startswith("influence over depth: ")
    result.save(tmp_path / "influence.safetensors")
    assert PositionalAttention.load(tmp_path / "influence.safetensors").source == result.source


def test_a_model_that_pads_its_input_is_refused_for_other_lengths():
    with pytest.raises(ValueError, match=r"\(1, 8, 16\), then .*, not \(1, 7, d\)"):
        of_text(any_model("longformer"), tokens(1, 7))


def test_an_attached_encoding_dials_influence():
    model = tiny("distilbert")
    found = []
    for decay in (0.05, 2.0):
        with attach(model, AttenuatedEncoding(heads=2, decay=decay)):
            found.append(locality(influence(model, length=8, words=1))[0, 0])
    assert found[1] > found[0]


def test_a_model_in_training_is_measured_as_it_evaluates():
    model = tiny("bert").train()
    model.gradient_checkpointing_enable()  # whose hook asks for gradients of the embeddings
    hooks = [*model.get_input_embeddings()._forward_hooks]
    before = state(model)
    found = of_text(model, tokens(2, N))
    torch.testing.assert_close(found.attention, of_text(tiny("bert"), tokens(2, N)).attention)
    assert same(before, state(model))
    assert [*model.get_input_embeddings()._forward_hooks] == hooks
    assert len(hooks) == 1


def test_half_precision_and_offloaded_weights_are_measured():
    ids = tokens(2, N)
    exact = of_text(tiny("bert"), ids).attention
    half = of_text(tiny("bert").bfloat16(), ids).attention
    assert (half - exact).abs().max() < 0.1
    torch.testing.assert_close(of_text(offloaded(tiny("bert")), ids).attention, exact)


def test_vectors_and_images_are_read_by_the_first_block():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True), 2).eval()
    generator = torch.Generator().manual_seed(0)
    vectors = SequenceModel(encoder, inputs=lambda sample, n: torch.randn(1, 1, D, generator=generator).expand(1, n, D))
    result = influence(vectors, length=N, words=2)
    assert result.layers == (0, 1)
    assert encoder(torch.zeros(1, N, D)).requires_grad  # as before
    config = small(hf.ViTConfig, image_size=16, patch_size=4)
    vit = SequenceModel(hf.ViTModel(config).eval(), inputs=identical_patches(4))
    on_line = SequenceModel(vit.module, inputs=lambda sample, n: identical_patches(4)(sample, 16))
    images = torch.randn(3, 3, 16, 16)
    for whole, part in [
        (influence(on_line, [images[:1]], directions=D), influence(vit, [images[:1]], directions=D)),
        (influence(on_line, length=17, words=1, directions=D), influence(vit, length=16, words=1, directions=D)),
    ]:
        patches = whole.attention[..., 1:, 1:]  # without [CLS]
        torch.testing.assert_close(part.attention, patches / patches.sum(-1, keepdim=True))


class Own(nn.Module):
    """A module whose output goes through a function."""

    def __init__(self, function):
        super().__init__()
        self.words, self.function = nn.Embedding(50, D), function

    def forward(self, ids):
        return self.function(self.words(ids))


class Doubled(torch.autograd.Function):
    """A function without a derivative in forward mode, which cannot be differentiated twice."""

    @staticmethod
    def forward(context, given):
        return 2 * given

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        return 2 * gradient


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Doubled.apply, "Function"),
        (lambda given: given + 3 * given.detach().cumsum(1), "finite differences"),
        (lambda given: given.detach(), "finite differences"),
        (lambda given: given.roll(1, 1) * torch.tensor([0.0, 1, 1])[:, None], "depend on no input embedding"),
        (lambda given: given[:, :1], r"not \(1, 3, d\)"),
        (lambda given: given.sum((1, 2)).long(), "it has no hidden states"),
    ],
)
def test_what_has_no_derivative_is_refused_by_name(function, message):
    with pytest.raises(ValueError, match=message):
        of_text(SequenceModel(Own(function), vocabulary_size=50), torch.tensor([[3, 4, 5]]))


def test_a_model_is_restored_after_an_error():
    reversible = {"axial_pos_embds": False, "attn_layers": ["local"] * 2, "local_attn_chunk_length": 4}
    model = hf.ReformerModel(small(hf.ReformerConfig, **reversible)).eval()
    before = state(model)
    with pytest.raises(ValueError, match="Function"):
        of_text(model, tokens(1, 8))
    assert same(before, state(model))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_rounded_weights_are_refused():
    with pytest.raises(ValueError, match="finite differences"):
        of_text(quantised(tiny("bert")), tokens(1, N))


def test_operations_without_a_batching_rule_run_one_by_one():
    def function(given):
        return given.cumsum(1) * (1.0 if float(given.sum()) > -1e9 else 2.0)

    result = of_text(SequenceModel(Own(function), vocabulary_size=50), torch.tensor([[3, 4, 5]]), directions=D)
    expected = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 1, 1]])
    torch.testing.assert_close(result.attention[0, 0].float(), expected / expected.sum(-1, keepdim=True))


def test_arguments_are_checked():
    model = tiny("bert")
    for directions in (0, 17):
        with pytest.raises(ValueError, match="directions"):
            influence(model, length=N, words=1, directions=directions)
    with pytest.raises(TypeError, match="AttentionFunction"):
        influence(AttentionFunction(lambda ids: [], 50), length=N)


def test_attention_of_such_models_is_still_refused():
    with pytest.raises(ValueError, match="it has no attention weights"):
        text_average(any_model("mamba"), [{"input_ids": tokens(1, N)}], special_tokens=True)
    assert Influence(any_model("mamba")).why_not_measured() is None
