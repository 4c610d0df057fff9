"""Any torch module as a model: measured in the attention that torch computes, each against a witness of its own."""

import contextlib
import math

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import (
    LocalityCallback,
    Positions,
    dependency_accuracy,
    influence,
    metrics,
    positional_attention,
    positional_logits,
    rollout,
    text_average,
)
from pelocality.corpora import Dependencies, Sentence
from pelocality.encodings import DistanceTable
from pelocality.models import SequenceModel, identical_patches, periodic_series, steady_sound, steady_spectrum
from tests.families import small, state, tiny, tokens
from tests.test_models_words import wordpiece

N, WIDTH, HEADS, VOCABULARY = 16, 24, 3, 50
WORDS = [7, 9, 30]
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()


def seeded(make):
    """Return a module with large random weights, so that positions and content show."""
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.4)
    return module


def softmax_of(query, key, visible=None):
    """The attention of queries and keys (batch, n, d), head by head: (batch, head, n, n)."""
    heads = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key)]
    logits = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
    return (logits if visible is None else logits.masked_fill(~visible, -torch.inf)).softmax(-1)


class Block(nn.Module):
    """One layer, by torch's kernel or by an explicit softmax."""

    def __init__(self, causal, kernel):
        super().__init__()
        self.causal, self.kernel = causal, kernel
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, states):
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(states).split(WIDTH, -1)
        )
        if self.kernel:
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            logits = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
            if self.causal:
                logits = logits.masked_fill(~CAUSAL, -torch.inf)
            attended = torch.dropout(logits.softmax(-1), 0.1, self.training) @ value
        return states + self.out(attended.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """A module as people write them, with a learned table of positions."""

    def __init__(self, causal=True, kernel=True):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(causal, kernel) for _ in range(2)])

    def forward(self, ids):
        states = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            states = block(states)
        return states


def own_attention(model, ids):
    """The attention of `Own`, computed from its weights."""
    states, maps = model.words(ids) + model.positions.weight[: ids.shape[1]], []
    for block in model.blocks:
        query, key, value = block.project(states).split(WIDTH, -1)
        weights = softmax_of(query, key, CAUSAL if block.causal else None)
        maps.append(weights)
        heads = value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        states = states + block.out((weights @ heads).transpose(1, 2).flatten(2))
    return torch.stack(maps)  # (layer, batch, head, n, n)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_an_own_module_is_measured(causal, kernel):
    model = seeded(lambda: Own(causal, kernel)).train()
    result = positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)
    expected = own_attention(model, torch.tensor(WORDS)[:, None].expand(-1, N)).mean(1)
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)
    assert result.source.causal is causal
    assert result.layers == (0, 1)
    assert result.source.model == "Own"
    assert model.training


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrappers_of_torch_around_an_own_module_are_taken_off(wrap):
    model = seeded(Own).eval()
    expected = positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)
    wrapped = SequenceModel(wrap(model), vocabulary_size=VOCABULARY)
    assert torch.equal(positional_attention(wrapped, length=N, words=WORDS).attention, expected.attention)
    for block in model.blocks:
        block.compile(backend="eager")
    compiled = positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)
    assert torch.equal(compiled.attention, expected.attention)
    torch.compiler.reset()


def test_an_own_module_is_measured_on_text():
    model = seeded(Own).eval()
    known = SequenceModel(model, vocabulary_size=VOCABULARY, name="mine")
    ids = tokens(6, N) % VOCABULARY
    result = text_average(known, [{"input_ids": ids}], special_tokens=True)
    expected = own_attention(model, ids).mean(1)
    torch.testing.assert_close(result.attention.float(), expected, rtol=0, atol=1e-5)
    assert repr(result).startswith("TextAverage of mine: 2 layers x 3 heads, n = 16")
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}
    with pytest.raises(ValueError, match="Own reads no padding"):
        text_average(known, [padded], special_tokens=True)


def test_the_dependencies_of_an_own_module_are_found():
    class Previous(nn.Module):
        def forward(self, ids):
            n = ids.shape[1]
            logits = torch.full((n, n), -1e4).diagonal_scatter(torch.zeros(n - 1), -1)
            return logits.expand(len(ids), 1, n, n).softmax(-1) @ torch.ones(len(ids), 1, n, 4)

    sentence = Sentence(
        ("a", "cat", "dog"), uid="1", dependencies=Dependencies((2, 0, 2), ("det", "root", "obj"), "made up")
    )
    found = dependency_accuracy(SequenceModel(Previous(), vocabulary_size=VOCABULARY), wordpiece(), [sentence])
    assert found.accuracy("obj").tolist() == [[1.0]]
    assert found.accuracy("det").tolist() == [[0.0]]


def test_an_own_model_of_transformers_needs_no_eager_attention():
    class OwnModel(hf.PreTrainedModel):
        config_class = hf.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.inner = Own()

        def get_input_embeddings(self):
            return self.inner.words

        def forward(self, input_ids=None, **_):
            return hf.modeling_outputs.BaseModelOutput(last_hidden_state=self.inner(input_ids))

    model = seeded(lambda: OwnModel(hf.PretrainedConfig())).eval()
    result = positional_attention(model, length=N, words=WORDS)
    expected = own_attention(model.inner, torch.tensor(WORDS)[:, None].expand(-1, N)).mean(1)
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)


# ---- the modules of torch


def states_of(sample, length):
    """One vector, plus positions that are the same for every sample."""
    generator = torch.Generator().manual_seed(sample)
    positions = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(99))
    return torch.randn(1, 1, WIDTH, generator=generator) + positions


def attention_of_torch(attention, states):
    """The attention of `nn.MultiheadAttention`, from its weights."""
    query, key, _ = nn.functional.linear(states, attention.in_proj_weight, attention.in_proj_bias).split(WIDTH, -1)
    return softmax_of(query, key)


def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)


@pytest.mark.parametrize("training", [True, False])
def test_torchs_encoder_is_measured_beside_its_fast_path(training):
    encoder = seeded(lambda: nn.TransformerEncoder(encoder_layer(), 2)).train(training)
    result = positional_attention(SequenceModel(encoder, inputs=states_of), length=N, words=3)
    encoder.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    expected = []
    with torch.no_grad():
        for sample in range(3):
            states, maps = states_of(sample, N), []
            for layer in encoder.layers:
                maps.append(attention_of_torch(layer.self_attn, states))
                states = layer(states)
            expected.append(torch.cat(maps))
    torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(result.attention, torch.stack(expected).mean(0), rtol=0, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_and_an_attention_of_torch_are_measured():
    layer, attention = seeded(encoder_layer), seeded(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    expected = torch.cat([attention_of_torch(layer.self_attn, states_of(sample, N)) for sample in range(3)])
    result = positional_attention(SequenceModel(layer, inputs=states_of), length=N, words=3)
    torch.testing.assert_close(result.attention, expected.mean(0)[None], rtol=0, atol=1e-5)
    expected = torch.cat([attention_of_torch(attention, states_of(sample, N)) for sample in range(3)])
    known = SequenceModel(attention, inputs=lambda sample, length: (states_of(sample, length),) * 3)
    result = positional_attention(known, length=N, words=3)
    torch.testing.assert_close(result.attention, expected.mean(0)[None], rtol=0, atol=1e-5)


def test_padding_of_torchs_encoder_is_left_out():
    encoder = seeded(lambda: nn.TransformerEncoder(encoder_layer(), 1))
    states = torch.cat([states_of(sample, N) for sample in range(4)])
    padding = torch.arange(N) >= torch.tensor([N, N, 9, 9])[:, None]
    batch = {"src": states, "src_key_padding_mask": padding}
    result = text_average(SequenceModel(encoder, inputs=states_of), [batch])
    assert result.counts.tolist() == [4] * 9 + [2] * 7
    maps = attention_of_torch(encoder.layers[0].self_attn, states)
    alone = torch.cat([attention_of_torch(encoder.layers[0].self_attn, states[2:, :9])])
    expected = maps[:2].sum(0)
    expected[:, :9, :9] += alone.sum(0)
    expected /= result.counts[:, None]
    torch.testing.assert_close(result.attention[0].float(), expected, rtol=0, atol=1e-5)


def test_attention_with_a_column_for_nothing_has_a_sink():
    attention = seeded(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_zero_attn=True))
    known = SequenceModel(attention, inputs=lambda sample, length: (states_of(sample, length),) * 3)
    result = positional_attention(known, length=N, words=3)
    assert (result.per_sample["learned_sink"] > 0).all()


# ---- libraries


X_TRANSFORMERS = {"plain": {}, "flash": {"attn_flash": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 3}}
KEYS_BEFORE = {
    "memory key": {"attn_num_mem_kv": 1},
    "key of zeros": {"attn_add_zero_kv": True},
    "learned sink": {"attn_head_learned_sink": True},
}


@pytest.mark.parametrize("options", [*X_TRANSFORMERS.values(), *KEYS_BEFORE.values()], ids=str)
def test_x_transformers_are_measured(options):
    x = pytest.importorskip("x_transformers")
    sizes = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8}

    def make(**more):
        decoder = x.Decoder(**sizes, **more)
        return seeded(lambda: x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=decoder)).eval()

    model, plain = make(**options), make(**{**options, "attn_flash": False})
    plain.load_state_dict(model.state_dict())
    result = positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)
    with torch.no_grad():
        maps = torch.stack(list(plain(torch.tensor(WORDS)[:, None].expand(-1, N), return_attn=True)[1]))[..., -N:]
    expected = (maps / maps.sum(-1, keepdim=True)).mean(1)
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)
    assert result.source.causal


def test_a_vit_of_timm_is_measured():
    timm = pytest.importorskip("timm", reason="timm needs torchvision", exc_type=ImportError)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=2, img_size=64).eval()
    content, maps = identical_patches(16, argument=None), []
    result = positional_attention(SequenceModel(model, inputs=content), length=N, words=1)
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: maps.append(output))
    with torch.no_grad():
        model(content(0, N))
    expected = torch.cat(maps)[..., 1:, 1:]  # without [CLS]
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)


# ---- models of transformers without token ids


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
IMAGES = SIZES | {"image_size": 16, "patch_size": 4}


def whisper():
    halves = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = hf.WhisperConfig(
        vocab_size=99, d_model=16, num_mel_bins=8, max_source_positions=N, max_target_positions=70, pad_token_id=0,
        encoder_ffn_dim=16, decoder_ffn_dim=16, **halves,
    )  # fmt: skip
    return hf.WhisperModel(config)


def wav2vec2():
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SIZES, **convolutions, **positions))


def patchtst():
    return hf.PatchTSTModel(
        hf.PatchTSTConfig(
            num_input_channels=2, context_length=4 * N, patch_length=4, patch_stride=4, d_model=16, ffn_dim=16,
            num_attention_heads=2, num_hidden_layers=2,
        )
    )  # fmt: skip


def clip():
    return hf.CLIPModel(hf.CLIPConfig(text_config={**SIZES, "vocab_size": 99}, vision_config=IMAGES))


# a model, what it reads, and how many tokens it puts before its input
WITHOUT_TOKENS = {
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**IMAGES)), identical_patches(4), 1),
    "vit with a head": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGES)), identical_patches(4), 1),
    "dinov2 with registers": (
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**IMAGES, num_register_tokens=4)),
        identical_patches(4),
        5,
    ),
    "dinov3": (lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**IMAGES, num_register_tokens=2)), identical_patches(4), 3),
    "clip": (lambda: clip().vision_model, identical_patches(4), 1),
    "wav2vec2": (wav2vec2, steady_sound(10, 20), 0),
    "whisper": (lambda: whisper().get_encoder(), steady_spectrum(8, 2), 0),
    "patchtst": (patchtst, periodic_series(4, channels=2), 0),
}


@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_models_of_images_sound_and_series_are_measured(name):
    make, content, added = WITHOUT_TOKENS[name]
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 4)
    before = state(model)
    result = positional_attention(SequenceModel(model, inputs=content), length=N, words=2, seed=5)
    assert state(model)[1:] == before[1:]
    model.set_attn_implementation("eager")
    maps = []
    with torch.no_grad():
        for sample in (5, 6):
            each = model(**content(sample, N), output_attentions=True).attentions
            maps.append(torch.stack(each)[..., added:, added:].mean(1))  # (layer, batch or channel, head, n, n)
    expected = torch.stack(maps)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(result.attention, expected.mean(0), rtol=0, atol=1e-5)
    assert result.length == N
    assert result.source.words == ("sample 5", "sample 6")
    assert ("cut_share" in result.per_sample) == (added > 0)
    assert ("mean over 2 samples, tokens of the model's own cropped" in repr(result)) == (added > 0)


def test_the_text_half_of_clip_and_the_decoder_of_whisper_read_tokens():
    assert positional_attention(clip(), length=N, words=WORDS).source.model_class == "CLIPTextModel"
    assert positional_attention(whisper().get_decoder(), length=N, words=WORDS).source.causal


def test_cross_attention_to_as_many_states_as_tokens_is_measured_in_the_order_in_which_it_runs():
    """Layers 1 and 3 of two layers with self-attention and cross-attention each; the witness is transformers' own."""
    model = whisper().get_decoder().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 4)

    def content(sample, length, more=0):
        states = torch.randn(1, length + more, 16, generator=torch.Generator().manual_seed(sample))
        return {"input_ids": torch.full((1, length), 7 + sample), "encoder_hidden_states": states}

    known = SequenceModel(model, inputs=content)
    both, crossed = (positional_attention(known, length=N, words=1, layers=each) for each in (None, [1, 3]))
    one_more = SequenceModel(model, inputs=lambda sample, length: content(sample, length, 1))
    assert positional_attention(one_more, length=N, words=1).layers == (0, 1)  # the self-attention alone
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**content(0, N), output_attentions=True)
    torch.testing.assert_close(both.attention[0::2], torch.cat(output.attentions), rtol=0, atol=1e-5)
    torch.testing.assert_close(crossed.attention, torch.cat(output.cross_attentions), rtol=0, atol=1e-5)
    result = positional_attention(one_more, length=N, words=1)  # one column more than tokens, as with a sink
    assert result.layers == (0, 1)
    assert any("left out" in note for note in result.notes)


@pytest.mark.parametrize("registers", [0, 2])
def test_a_diffusion_transformer_is_measured_at_a_time_step(registers):
    """Its blocks are scaled by the time step, and registers stand before its latents."""

    class Diffusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.positions = nn.Linear(4, WIDTH), nn.Embedding(N, WIDTH)
            self.registers = nn.Parameter(torch.zeros(registers, WIDTH))
            self.blocks = nn.ModuleList([Block(False, True) for _ in range(2)])

        def beginning(self, latents, time):
            states = self.read(latents) + self.positions.weight
            return torch.cat([self.registers.expand(len(states), -1, -1), states], 1) * (1 + time)

        def forward(self, latents, time):
            states = self.beginning(latents, time)
            for block in self.blocks:
                states = block(states * (1 - time))
            return states

    def content(sample, length, time=0.3):
        latent = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(sample))
        return latent.expand(-1, length, -1), torch.tensor([time])

    model, expected = seeded(Diffusion), []
    result = positional_attention(SequenceModel(model, inputs=content), length=N, words=3)
    for sample in range(3):
        states, maps = model.beginning(*content(sample, N)), []
        for block in model.blocks:
            states = states * 0.7
            maps.append(softmax_of(*block.project(states).split(WIDTH, -1)[:2])[0, :, registers:, registers:])
            states = block(states)
        expected.append(torch.stack(maps))
    expected = torch.stack(expected)
    expected = (expected / expected.sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)
    later = SequenceModel(model, inputs=lambda sample, length: content(sample, length, 0.9))
    assert (positional_attention(later, length=N, words=3).attention - expected).abs().max() > 0.01


def test_attention_within_windows_is_refused():
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    known = SequenceModel(hf.SwinModel(config), inputs=identical_patches(2))
    with pytest.raises(ValueError, match="windows"):
        positional_attention(known, length=64, words=2)


def test_inputs_that_do_not_fit_are_refused_with_the_reason():
    images = SequenceModel(hf.ViTModel(hf.ViTConfig(**IMAGES)), inputs=identical_patches(4))
    own = SequenceModel(Own(), vocabulary_size=VOCABULARY)
    for model, arguments, reason in [
        (images, {"length": 15}, "square"),
        (SequenceModel(images.module, inputs=identical_patches(4, rows=3)), {}, "rows=3"),
        (images, {"length": 9}, r"Input image size \(12\*12\)"),  # as the model says
        (images, {"words": ["cat"]}, "words must be a number"),
        (images, {"prefix": True}, "prefix"),
        (own, {"words": [50]}, "words .* 50"),
        (wav2vec2(), {}, r"pass SequenceModel\(model, inputs="),
    ]:
        with pytest.raises(ValueError, match=reason):
            positional_attention(model, **{"length": N, "words": 2} | arguments)
    for arguments, error in [
        ({"inputs": 3}, TypeError),
        ({"inputs": steady_sound}, TypeError),
    ]:
        with pytest.raises(error, match="inputs"):
            SequenceModel(nn.Linear(2, 2), **arguments)


def test_dropout_that_is_always_on_is_refused():
    class Dropped(nn.Module):
        def forward(self, ids):
            states = torch.ones(len(ids), 1, ids.shape[1], 8)
            return nn.functional.scaled_dot_product_attention(states, states, torch.randn_like(states), dropout_p=0.5)

    with pytest.raises(ValueError, match="dropout"):
        positional_attention(SequenceModel(Dropped(), vocabulary_size=9), length=N, words=[3])


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_under_autocast_is_measured_with_the_queries_that_it_casts(causal):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.positions = nn.Embedding(9, WIDTH), nn.Embedding(N, WIDTH)

        def forward(self, ids):
            states = (self.words(ids) + self.positions.weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            bias = torch.linspace(0, 3, N).expand(N, N).masked_fill(~CAUSAL & causal, -torch.inf)
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=bias)

    model = seeded(Cast)
    result = positional_attention(SequenceModel(model, vocabulary_size=9), length=N, words=[3])
    states = (model.words.weight[3] + model.positions.weight).unflatten(-1, (HEADS, -1)).transpose(0, 1)
    states, bias = states.bfloat16().double(), torch.linspace(0, 3, N).bfloat16().double()
    logits = states @ states.mT / math.sqrt(WIDTH // HEADS) + bias
    expected = logits.masked_fill(~CAUSAL & causal, -torch.inf).softmax(-1)
    torch.testing.assert_close(result.attention[0].double(), expected, rtol=0, atol=1e-6)


def test_grouped_queries_and_masks_of_the_kernel_are_read():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4 * 8 + 2 * 2 * 8)

        def forward(self, ids):
            query, key, value = self.words(ids).split([32, 16, 16], -1)
            query, key, value = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (query, key, value))
            mask = torch.linspace(-1, 1, N)[None].expand(N, -1).masked_fill(~CAUSAL, -torch.inf)
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=0.1, enable_gqa=True
            )

    model = seeded(Grouped)
    result = positional_attention(SequenceModel(model, vocabulary_size=9), length=N, words=[3])
    mask = torch.linspace(-1, 1, N).expand(4, N, N).masked_fill(~CAUSAL, -torch.inf)  # one word adds a constant
    torch.testing.assert_close(result.attention[0], mask.softmax(-1), rtol=0, atol=1e-5)
    assert torch.equal(result.visible[0], CAUSAL)


def test_flex_attention_of_a_model_is_switched_to_torchs_kernel():
    model = hf.BertModel(small(hf.BertConfig)).eval()
    expected = positional_attention(model, length=N, words=WORDS).attention
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(positional_attention(model, length=N, words=WORDS).attention, expected)
    assert model.config._attn_implementation == "flex_attention"


def test_a_callback_measures_an_own_module(tmp_path):
    class Trained(Own):
        def forward(self, input_ids, labels=None):
            states = super().forward(input_ids)
            return {"loss": states.square().mean(), "logits": states}

    rows = [{"input_ids": list(range(12)), "labels": list(range(12))}] * 4
    callback = LocalityCallback(every=1, length=12, words=2, vocabulary_size=VOCABULARY)
    settings = hf.TrainingArguments(
        str(tmp_path), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        logging_strategy="no",
    )  # fmt: skip
    model = seeded(Trained)
    hf.Trainer(model, settings, train_dataset=rows, callbacks=[callback]).train()
    assert callback.table["layer"].tolist() == [0, 1, 0, 1]
    assert callback.table["past_locality"].notna().all()


def test_a_sequence_model_of_a_transformers_model_measures_what_the_model_does():
    model = tiny("bert")
    expected = positional_attention(model, length=N, words=WORDS)
    known = SequenceModel(model)
    assert torch.equal(positional_attention(known, length=N, words=WORDS).attention, expected.attention)
    assert SequenceModel.of(known) is known
    assert (known.longest, known.vocabulary, str(known)) == (40, 97, "BertModel (model type 'bert')")


# ---- positions that are no line


def vit():
    return seeded(WITHOUT_TOKENS["vit"][0]).eval()


def test_the_patches_of_images_are_measured_on_their_grid(tmp_path):
    known, grid = SequenceModel(vit(), inputs=identical_patches(4)), Positions.grid(4, 4)
    result = positional_attention(known, length=16, words=3)
    assert torch.equal(result.positions.keys, grid.keys)
    expected = metrics.measure(result.attention, positions=grid)
    for one, other in zip(vars(metrics.measure(result)).values(), vars(expected).values(), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(result.mean_of_metric.locality, result.metric_of_mean.locality)
    line = metrics.measure(result.attention)
    assert not torch.allclose(line.symmetry, expected.symmetry)
    assert "distance is by positions of 2 coordinates, not by order" in result.notes
    result.save(tmp_path / "grid.safetensors")
    loaded = type(result).load(tmp_path / "grid.safetensors")
    assert torch.equal(loaded.positions.keys, grid.keys)
    assert torch.equal(metrics.symmetry(loaded), metrics.symmetry(result))


def test_images_are_averaged_on_their_grid():
    known, grid = SequenceModel(vit(), inputs=identical_patches(4)), Positions.grid(4, 4)
    batches = [{"pixel_values": torch.randn(2, 3, 16, 16)} for _ in range(2)]
    result = text_average(known, batches, length=17, without_first=1)  # [CLS] is left out in any case
    assert torch.equal(result.attention, text_average(known, batches).attention)
    assert not result.source.special_tokens
    assert not any("left out" in note for note in result.notes)
    assert result.positions.dimensions == 2
    torch.testing.assert_close(metrics.symmetry(result), metrics.symmetry(result.attention, positions=grid))
    with attention_of(known.module, batches[0]) as maps, attention_of(known.module, batches[1]) as others:
        alone = metrics.symmetry(maps[0], positions=Positions.grid(4, 4, before=1))
        expected = torch.cat([maps, others])[..., 1:, 1:]
    expected = (expected / expected.sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(result.attention.float(), expected, rtol=0, atol=1e-5)
    assert result.source.texts == 4
    torch.testing.assert_close(result.per_sample["symmetry"][0].float(), alone, rtol=0, atol=1e-4)
    depth = rollout(result)
    assert depth.positions.dimensions == 2
    seen = influence(known, batches, without_first=1)
    torch.testing.assert_close(seen.metric_of_mean.locality, metrics.locality(seen.attention, positions=grid))


# a model of images, their height and width, their grid, and how many tokens it puts before them
OBLONG = {
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**SIZES, image_size=(8, 32), patch_size=4)), (8, 32), (2, 8), 1),
    "other patches": (
        lambda: hf.ViTModel(hf.ViTConfig(**SIZES, image_size=(8, 32), patch_size=(2, 8))), (8, 32), (4, 4), 1
    ),
    "as wide as there are tokens": (
        lambda: hf.DeiTModel(hf.DeiTConfig(**SIZES, image_size=(12, 8), patch_size=4)), (12, 8), (3, 2), 2
    ),
    "with a rest": (WITHOUT_TOKENS["dinov2 with registers"][0], (11, 35), (2, 8), 5),
    "dinov3": (WITHOUT_TOKENS["dinov3"][0], (32, 8), (8, 2), 3),
    "without [CLS]": (
        lambda: hf.IJepaModel(hf.IJepaConfig(**SIZES, image_size=(8, 16), patch_size=4)), (8, 16), (2, 4), 0
    ),
    "tokens behind": (
        lambda: hf.YolosModel(hf.YolosConfig(**SIZES, image_size=[8, 32], patch_size=4, num_detection_tokens=3)),
        (8, 32), (2, 8), 1
    ),
}  # fmt: skip


def symmetry_of_patches(attention, rows, columns):
    """The published symmetry of a matrix over opposite patches of a grid, patch by patch."""
    place = [(i // columns, i % columns) for i in range(rows * columns)]
    number = {each: i for i, each in enumerate(place)}
    total = count = 0
    for i, (y, x) in enumerate(place):
        opposite = [number.get((2 * y - v, 2 * x - u)) for v, u in place]
        pairs = [(j, k) for j, k in enumerate(opposite) if k is not None and j < k]
        gaps = [abs(float(attention[i, j] - attention[i, k])) for j, k in pairs]
        width = max(gaps, default=0) - min(gaps, default=0)
        total += (sum(gaps) - len(gaps) * min(gaps)) / width if width > 1e-9 else 0
        count += len(gaps)
    return 1 - total / count


@pytest.mark.parametrize("name", OBLONG)
def test_images_are_measured_on_the_grid_of_their_pixels(name):
    make, size, grid, added = OBLONG[name]
    model, n = seeded(make).eval(), grid[0] * grid[1]
    batches = [{"pixel_values": torch.randn(images, 3, *size)} for images in (3, 2)]
    result = text_average(model, batches)
    maps = []
    for batch in batches:
        with attention_of(model, batch) as each:
            maps.append(each[..., added : added + n, added : added + n])
    expected = torch.cat(maps) / torch.cat(maps).sum(-1, keepdim=True)
    torch.testing.assert_close(result.attention.float(), expected.mean(0), rtol=0, atol=1e-5)
    assert torch.equal(result.positions.keys, Positions.grid(*grid).keys)
    own = [[symmetry_of_patches(head, *grid) for head in layer] for layer in expected.mean(0).double()]
    torch.testing.assert_close(metrics.symmetry(result), torch.tensor(own, dtype=torch.float64), rtol=0, atol=1e-4)
    assert torch.equal(influence(model, batches[:1], directions=1).positions.keys, result.positions.keys)


def test_identical_patches_fill_images_that_are_not_square():
    model, grid = seeded(OBLONG["vit"][0]).eval(), Positions.grid(2, 8)
    inputs = [identical_patches(4, rows=2), identical_patches(4, columns=8), identical_patches(4, rows=2, columns=8)]
    results = [positional_attention(SequenceModel(model, inputs=each), length=16, words=2) for each in inputs]
    results.append(positional_attention(model, length=16, words=2))  # the grid of its configuration
    with torch.no_grad():
        model.set_attn_implementation("eager")
        images = torch.cat([inputs[0](sample, 16)["pixel_values"] for sample in (0, 1)])
        assert images.shape == (2, 3, 8, 32)
        assert torch.equal(images[..., :4, :4], images[..., 4:, 28:])
        expected = torch.stack(model(images, output_attentions=True).attentions, 1)[..., 1:, 1:]
    expected = (expected / expected.sum(-1, keepdim=True)).mean(0)
    for result in results:
        torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)
        assert torch.equal(result.positions.keys, grid.keys)
    assert identical_patches((2, 8))(0, 9)["pixel_values"].shape == (1, 3, 6, 24)
    for wrong, error in (({"rows": 0}, ValueError), ({"columns": 2.0}, TypeError)):
        with pytest.raises(error, match=next(iter(wrong))):
            identical_patches(4, **wrong)


class Patched(nn.Module):
    """Patches of images of any size behind a token of its own, in an order, after a convolution over neighbours."""

    def __init__(self, order):
        super().__init__()
        self.stem, self.patches = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, WIDTH, 4, 4)
        self.order, self.first = order, nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList([Block(False, True)])

    def forward(self, images):
        states = self.order(self.patches(self.stem(images))).flatten(2).transpose(1, 2)
        return self.blocks[0](torch.cat([self.first.expand(len(states), -1, -1), states], 1))


def test_images_whose_grid_is_not_that_of_their_tokens_are_refused():
    inputs, wide, narrow = identical_patches(4, argument=None), torch.randn(2, 3, 8, 32), torch.randn(2, 3, 16, 16)
    torch.manual_seed(0)
    known = SequenceModel(Patched(nn.Identity()), inputs=inputs)
    assert text_average(known, [wide]).positions.keys.amax(0).tolist() == [1, 7]
    by_column = SequenceModel(Patched(lambda states: states.mT), inputs=inputs)
    for measure in text_average, influence:
        with pytest.raises(ValueError, match="order"):
            measure(by_column, [wide])
        both, alone = measure(known, [wide, narrow]), [measure(known, [each]) for each in (wide, narrow)]
        for name in ("locality", "symmetry"):
            expected = torch.cat([each.per_sample[name] for each in alone])
            torch.testing.assert_close(both.per_sample[name], expected)
        assert both.source.layouts == 2
        with pytest.raises(ValueError, match="one layout"):
            metrics.locality(both)
    with pytest.raises(ValueError, match="16 tokens, and 12"):
        text_average(known, [wide], length=12)
    for texts in wide, [wide.movedim(1, -1)]:  # images one by one; channels last
        with pytest.raises(ValueError, match="texts must be batches of images"):
            text_average(known, texts)
    with pytest.raises(TypeError, match="texts"):
        text_average(vit(), {"pixel_values": narrow})
    packed = hf.PixtralVisionModel(hf.PixtralVisionConfig(**SIZES, image_size=32, patch_size=4)).eval()
    batches = [{"pixel_values": narrow[:1]}, {"pixel_values": narrow}]  # the images of a batch are one row of patches
    assert text_average(packed, batches[:1]).length == 16
    with pytest.raises(ValueError, match="positions"):
        text_average(packed, batches)


@contextlib.contextmanager
def attention_of(model, batch):
    """Yield the attention of each text, (text, layer, head, n, n), as the model returns it."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        yield torch.stack(model(**batch, output_attentions=True).attentions, 1)
    model.set_attn_implementation(implementation)


def test_positions_are_given_with_the_model():
    sentences = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    own = SequenceModel(Own(), vocabulary_size=VOCABULARY, positions=sentences)
    result = positional_attention(own, length=10, words=2)
    torch.testing.assert_close(
        result.per_sample["mean_distance" if result.source.causal else "locality"].mean(0),
        (metrics.mean_distance if result.source.causal else metrics.locality)(result.attention, positions=sentences),
    )
    with pytest.raises(ValueError, match="positions are of 10 tokens, and 9 are measured"):
        positional_attention(own, length=9, words=2)
    line = SequenceModel(Own(), vocabulary_size=VOCABULARY, positions=torch.arange)
    assert positional_attention(line, length=9, words=2).positions is None
    with pytest.raises(ValueError, match="positions of distances have no opposite keys"):
        SequenceModel(Own(), vocabulary_size=VOCABULARY, positions=Positions(distances=torch.zeros(3, 3)))


def test_a_table_by_distance_along_a_line_is_not_made_from_a_grid():
    result = positional_attention(SequenceModel(vit(), inputs=identical_patches(4)), length=16, words=1)
    with pytest.raises(ValueError, match="attention must be of tokens on a line"):
        DistanceTable.from_attention(result)


def test_text_without_its_special_tokens_lies_at_given_positions():
    bert = SequenceModel(tiny("bert"), positions=np.arange(5) / 2)
    ids = torch.tensor([[1, 7, 9, 11, 13, 15, 2]]).repeat(2, 1)
    ids[1, 1:6] += 1
    special = torch.tensor([[1, 0, 0, 0, 0, 0, 1]]).repeat(2, 1)
    result = text_average(bert, [{"input_ids": ids, "special_tokens_mask": special}])
    assert result.positions.shape == (5, 5)
    expected = metrics.locality(result.attention, positions=np.arange(5) / 2)
    torch.testing.assert_close(result.per_sample["locality"].mean(0), expected)
    with pytest.raises(ValueError, match="positional_logits need tokens on a line"):
        positional_logits(bert, length=5)
