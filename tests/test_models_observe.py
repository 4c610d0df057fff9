"""Which layers attention maps belong to and which keys their masks leave visible, in models that have no record."""

from functools import partial
from types import SimpleNamespace

import accelerate
import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.metrics import adjusted_locality
from pelocality.models import (
    AttentionFunction,
    PositionalAttention,
    SequenceModel,
    layers,
    positional_attention,
    text_average,
)
from pelocality.models.layers import AttentionLayers, observe_layers
from tests.families import UNKNOWN, same, small, state, tiny, tiny_any, tokens

N = 11
I, J = torch.arange(N)[:, None], torch.arange(N)
CAUSAL = J <= I
WINDOW = CAUSAL & (I - J < 4)
CHUNK = CAUSAL & (I // 4 == J // 4)
AROUND = (I - J).abs() <= 2


def decoder(config_class, **more):
    return small(config_class, num_key_value_heads=2, head_dim=8, pad_token_id=0, **more)


SLIDING = ["sliding_attention", "full_attention"]
# a model, and the keys that each of its layers lets a query see
MASKED = {
    "gemma2": (
        lambda: hf.Gemma2Model(decoder(hf.Gemma2Config, sliding_window=4, layer_types=SLIDING)),
        [WINDOW, CAUSAL],
    ),
    "llama4": (
        lambda: hf.Llama4TextModel(
            decoder(
                hf.Llama4TextConfig,
                attention_chunk_size=4,
                layer_types=["chunked_attention", "full_attention"],
                num_local_experts=2,
                intermediate_size_mlp=16,
            )
        ),
        [CHUNK, CAUSAL],
    ),
    "gpt_neo": (
        lambda: hf.GPTNeoModel(
            hf.GPTNeoConfig(
                vocab_size=99,
                hidden_size=16,
                num_layers=2,
                num_heads=2,
                attention_types=[[["local", "global"], 1]],
                window_size=4,
            )
        ),
        [WINDOW, CAUSAL],
    ),
    "gpt_neox": (lambda: hf.GPTNeoXModel(small(hf.GPTNeoXConfig)), [CAUSAL, CAUSAL]),
    "xglm": (  # its softmax has batch and heads in one axis
        lambda: hf.XGLMModel(hf.XGLMConfig(vocab_size=99, d_model=16, num_layers=2, attention_heads=2, ffn_dim=16)),
        [CAUSAL, CAUSAL],
    ),
    "rembert": (UNKNOWN["rembert"], [torch.ones(N, N, dtype=torch.bool)] * 2),
}  # fmt: skip


def made(name, scale=1.0):
    torch.manual_seed(0)
    model = MASKED[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def attend_uniformly(model):
    """Make every head attend uniformly to the visible keys."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "query", "query_key_value", "c_attn")):
                parameter.zero_()
    return model


def observed(model, ids, **more):
    """Return the layers of a model that attend, and of each the attention and the visible keys."""
    model, inputs, maps, visible = SequenceModel.of(model), {"input_ids": ids, **more}, [], []

    def use(_, weights, seen):
        maps.append(weights)
        visible.append(seen)

    known = AttentionLayers(model, inputs)
    observe_layers(model, known, known.layers, inputs, use)
    return SimpleNamespace(known=known, maps=maps, visible=visible)


@pytest.mark.parametrize("name", MASKED)
def test_visible_keys_are_those_of_the_models_mask(name):
    seen = observed(made(name, scale=8), tokens(3, N))
    assert seen.known.layers == (0, 1)
    for visible, expected, weights in zip(seen.visible, MASKED[name][1], seen.maps, strict=True):
        assert torch.equal(visible, expected.expand(3, N, N))
        assert (weights.masked_select(~expected) == 0).all()


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_does_not_count_as_position(name):
    """Heads that are uniform over the visible keys have no share, whatever the mask."""
    model = attend_uniformly(made(name))
    found = text_average(model, [{"input_ids": tokens(4, N, seed)} for seed in range(3)], special_tokens=True)
    assert found.share.isnan().all()
    expected = torch.stack(MASKED[name][1])
    assert torch.equal(expected if found.visible is None else found.visible, expected)
    assert (found.visible is None) == bool(expected.all())


@pytest.mark.parametrize("name", ["mistral", "modernbert"])
def test_positional_attention_returns_the_visible_keys_of_known_families(name):
    model = tiny(name)
    result = positional_attention(model, length=N, words=[7], layers=[1])
    expected = CAUSAL & (I - J < 5) if name == "mistral" else (I - J).abs() <= 3
    assert torch.equal(result.visible, expected[None])


def test_visible_keys_are_saved(tmp_path):
    result = positional_attention(made("gemma2"), length=N, words=4)
    result.save(tmp_path / "probe.safetensors")
    assert torch.equal(PositionalAttention.load(tmp_path / "probe.safetensors").visible, result.visible)


def test_keys_whose_weights_underflow_are_visible():
    model = made("gpt_neox")
    with torch.no_grad():
        model.layers[0].attention.query_key_value.weight.mul_(200)
    seen = observed(model, tokens(1, N))
    assert ((seen.maps[0] == 0).all(1) & CAUSAL).any()
    assert torch.equal(seen.visible[0][0], CAUSAL)


def test_padding_is_masked_in_its_sequence_only():
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, 6:] = 0
    seen = observed(made("gemma2"), tokens(2, N), attention_mask=mask)
    assert torch.equal(seen.visible[1][0], CAUSAL)
    assert not seen.visible[1][1, :6, 6:].any()
    assert torch.equal(seen.visible[1][1, :6, :6], CAUSAL[:6, :6])


def test_masks_are_found_in_half_precision():
    seen = observed(made("gemma2").to(torch.bfloat16), tokens(2, N))
    assert seen.known.layers == (0, 1)
    assert torch.equal(seen.visible[0][0], WINDOW)


def test_layers_of_hybrids_have_the_models_numbers():
    model = tiny_any("jamba")
    before = state(model)
    result = positional_attention(model, length=N, words=4)
    assert result.layers == (1, 3)
    assert result.to_frame("layer")["layer"].tolist() == [1, 3]
    one = positional_attention(model, length=N, words=4, layers=[-1])
    assert one.layers == (3,)
    torch.testing.assert_close(one.attention[0], result.attention[1])
    found = text_average(model, [{"input_ids": tokens(4, N)}], special_tokens=True)
    assert found.layers == (1, 3)
    assert "layers that are not measured: 0 linear_attention, 2 linear_attention" in repr(found)
    assert found.to_frame()["layer"].unique().tolist() == [1, 3]
    assert same(before, state(model))


def test_attention_that_layers_share_has_the_numbers_of_those_layers():
    config = small(
        hf.ZambaConfig,
        num_hidden_layers=6,
        num_key_value_heads=2,
        n_mamba_heads=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        pad_token_id=0,
    )
    assert positional_attention(hf.ZambaModel(config).eval(), length=N, words=4).layers == (2, 4)


@pytest.mark.parametrize("name", ["bert", "xlnet", "gemma2", "jamba", "learned sinks"])
def test_layers_are_found_on_the_beginning_of_a_long_input(name, monkeypatch):
    """Here the beginning is shorter than a window and than any text."""
    models = {
        "jamba": partial(tiny_any, "jamba"),
        "gemma2": partial(made, "gemma2"),
        "learned sinks": partial(with_sinks, "gpt_oss"),
    }
    model = models.get(name, partial(tiny, name))()
    first, last = (1, 3) if name == "jamba" else (0, 1)
    mask = (torch.arange(N) < torch.tensor([[4], [N], [6]])).long()
    text = [{"input_ids": tokens(3, N, seed), "attention_mask": mask} for seed in range(2)]

    def measured():
        words = positional_attention(model, length=N, words=4, layers=[last, first])
        mean = text_average(model, text, special_tokens=True, layers=[last, first])
        return words.attention, words.per_sample, mean.attention, mean.per_sample, mean.share

    whole = measured()
    monkeypatch.setattr(layers, "_BEGINNING", 3)
    torch.testing.assert_close(measured(), whole, rtol=0, atol=0, equal_nan=True)


def test_selecting_a_layer_without_attention_raises():
    with pytest.raises(ValueError, match=r"layers .*\[1, 3\], the layers that attend"):
        positional_attention(tiny_any("jamba"), length=N, words=4, layers=[0, 1])
    with pytest.raises(ValueError, match="layers must name"):
        positional_attention(tiny_any("jamba"), length=N, words=4, layers=[4])


@pytest.mark.parametrize("name", ["albert", "albert with inner layers", "t5", "xlnet", "bert", "distilbert", "bloom"])
def test_layers_are_counted_where_blocks_are_shared(name):
    model = tiny(name)
    seen = observed(model, tokens(2, N))
    assert seen.known.layers == tuple(range(len(seen.maps)))
    assert seen.known.depth == len(seen.maps)


def test_layers_that_differ_in_heads_are_measured_by_name():
    uneven = AttentionFunction(lambda ids: [torch.eye(N).expand(len(ids), heads, N, N) for heads in (2, 1, 2)], 99)
    for some in (None, [1, 2]):
        with pytest.raises(ValueError, match=r"different numbers of heads \{0: 2, 1: 1, 2: 2\}; .* in layers"):
            positional_attention(uneven, length=N, words=4, layers=some)
    for some, heads in (([0, -1], 2), ([1], 1)):
        result = positional_attention(uneven, length=N, words=4, layers=some)
        assert torch.equal(result.attention, torch.eye(N).expand(len(some), heads, N, N))


def test_compiled_layers_are_observed_too():
    model = made("gemma2")
    for layer in model.layers:
        layer.compile(backend="eager")
    seen = observed(model, tokens(2, N))
    assert seen.known.layers == (0, 1)
    assert torch.equal(seen.visible[0][0], WINDOW)
    torch.compiler.reset()


def test_adjusted_locality_of_uniform_attention_inside_a_window_is_zero():
    """The chance level is uniform over the visible keys, which the metric reads from the result."""
    model = attend_uniformly(tiny("mistral"))
    result = positional_attention(model, length=N, words=4)
    assert adjusted_locality(result).abs().max() < 1e-6


class Attends(nn.Module):
    """An own module of one layer, whose weights a function changes before they multiply the values."""

    def __init__(self, change=lambda weights: weights):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.change = nn.Embedding(99, 8), change

    def forward(self, ids):
        states = self.words(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        scores = states @ states.mT
        scores.transpose(0, 1).softmax(-1)  # (head, batch, n, n): as many numbers, which multiply nothing
        self.weights = scores.softmax(-1)
        return self.change(self.weights) @ states


def test_a_softmax_that_multiplies_no_values_is_not_the_attention_of_a_layer():
    model = Attends().eval()
    seen = observed(SequenceModel(model, vocabulary_size=99), tokens(3, N))
    assert seen.known.layers == (0,)
    assert torch.equal(seen.maps[0], model.weights)


@pytest.mark.parametrize("change", [lambda weights: weights * 0.5, lambda weights: weights.flip(1)])
def test_weights_that_are_changed_after_their_softmax_are_refused(change):
    model = SequenceModel(Attends(change), vocabulary_size=99)
    with pytest.raises(ValueError, match="Attends cannot be probed: no attention over all its tokens was seen"):
        observed(model, tokens(1, N))


LEARNED_SINKS = {
    "gpt_oss": lambda: hf.GptOssModel(
        decoder(hf.GptOssConfig, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    ),
}


def with_sinks(name):
    torch.manual_seed(0)
    model = LEARNED_SINKS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0, 1 if key.endswith("sinks") else 0.3)
    return model


@pytest.mark.parametrize("name", LEARNED_SINKS)
def test_learned_sinks_are_measured_and_set_apart(name):
    model = with_sinks(name)
    result = positional_attention(model, length=N, words=[7, 9])
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        maps = torch.stack(model(torch.tensor([[7], [9]]).expand(-1, N), output_attentions=True).attentions, 1)
    share = 1 - maps.sum(-1).mean(-1)
    torch.testing.assert_close(result.per_sample["learned_sink"], share, atol=1e-6, rtol=1e-5)
    assert (share[:, -1] > 0.01).all()
    renormalised = maps / maps.sum(-1, keepdim=True)
    torch.testing.assert_close(result.attention, renormalised.mean(0))
    nearness = 2.0 ** -(I - J).abs()
    torch.testing.assert_close(result.per_sample["locality"], (renormalised * nearness).sum(-1).mean(-1))
    torch.testing.assert_close(result.per_sample["locality_with_sink"], (maps * nearness).sum(-1).mean(-1))
    assert {"learned_sink", "locality_with_sink", "past_locality"} <= set(result.to_frame().columns)
    assert "learned sink" in repr(result)
    low, high = result.interval("learned_sink")
    assert (low <= share.mean(0) + 1e-6).all()
    assert (high >= share.mean(0) - 1e-6).all()


def test_rows_that_a_sink_does_not_explain_are_refused():
    damped = AttentionFunction(lambda ids: [torch.eye(N).expand(len(ids), 1, N, N) * 0.5], 99)
    with pytest.raises(ValueError, match=r"layer 0 do not sum to 1 \(off by 0\.5\)"):
        positional_attention(damped, length=N, words=[7])


def test_a_difference_of_two_maps_is_refused():
    with pytest.raises(ValueError, match="difference of two maps"):
        positional_attention(hf.DiffLlamaModel(decoder(hf.DiffLlamaConfig)), length=N, words=[7])


def test_a_result_names_the_layers_without_attention():
    lfm = hf.Lfm2Model(decoder(hf.Lfm2Config, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]))
    result = positional_attention(lfm.eval(), length=N, words=4)
    assert result.layers == (1,)
    assert result.other_layers == {0: "conv", 2: "conv"}


def test_windows_are_reported_by_layer():
    result = positional_attention(made("gemma2"), length=N, words=4)
    assert result.visible_keys == (4, N)
    assert result.to_frame("layer")["visible_keys"].tolist() == [4, N]
    assert "visible_keys" in repr(result)
    assert "visible_keys" not in repr(positional_attention(tiny("gpt2"), length=N, words=4))


def test_layers_without_positions_are_reported():
    config = decoder(hf.SmolLM3Config, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0])
    torch.manual_seed(0)
    model = hf.SmolLM3Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    assert "layers that add no positions: 1, 3" in repr(positional_attention(model, length=N, words=4))


def half(size, **more):
    sizes = {"vocab_size": 99, "hidden_size": size, "num_hidden_layers": 2, "num_attention_heads": 2, **more}
    return sizes | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "sliding_window": 4}


HALVES = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "ffn_dim", "attention_heads")}
DECODERS = {
    "t5": lambda: hf.T5Model(hf.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)),
    "bart": lambda: hf.BartModel(hf.BartConfig(vocab_size=99, d_model=16, **HALVES)),
    "t5gemma": lambda: hf.T5GemmaModel(
        hf.T5GemmaConfig(encoder=half(24), decoder=half(16, cross_attention_hidden_size=24))
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_measured_with_an_encoder_output_of_zeros(name):
    torch.manual_seed(0)
    model = DECODERS[name]().eval()
    width = 24 if name == "t5gemma" else 16
    result = positional_attention(model.get_decoder(), length=N, words=[7])
    assert result.source.causal
    model.config._attn_implementation = model.get_decoder().config._attn_implementation = "eager"
    with torch.no_grad():
        maps = model.get_decoder()(
            input_ids=torch.full((1, N), 7), encoder_hidden_states=torch.zeros(1, 1, width), output_attentions=True
        ).attentions
    torch.testing.assert_close(result.attention, torch.cat(maps))


def test_a_forward_in_mixed_precision_is_measured_as_it_runs():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier Trainer
    try:
        model = tiny("bert").float()
        expected = positional_attention(model, length=N, words=4).attention
        prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        rounded = positional_attention(prepared, length=N, words=4).attention
        assert 1e-6 < (rounded - expected).abs().max() < 0.1
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_is_measured_in_the_attention_implementation_that_it_uses():
    """In transformers 5.23 the eager attention of Falcon adds its ALiBi biases twice."""

    class Doubled(hf.GPT2Model):
        def forward(self, input_ids=None, **inputs):
            eager = self.config._attn_implementation == "eager"
            positions = (1 + eager) * torch.arange(input_ids.shape[1])[None]
            return super().forward(input_ids, **inputs, position_ids=positions)

    plain = tiny("gpt2")
    doubled = Doubled(plain.config).double().eval()
    doubled.load_state_dict(plain.state_dict())
    before = state(doubled)
    expected = positional_attention(plain, length=N, words=3).attention
    torch.testing.assert_close(positional_attention(doubled, length=N, words=3).attention, expected)
    assert same(before, state(doubled))
    doubled.config._attn_implementation = "eager"
    assert (positional_attention(doubled, length=N, words=3).attention - expected).abs().max() > 0.01


def test_falcon_with_alibi_has_the_published_slopes():
    """Refused before, as its eager attention is wrong; the witness is the formula of Press et al. (2022)."""
    config = hf.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        new_decoder_architecture=False, multi_query=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.FalconModel(config).double().eval()
    logs = positional_attention(model, length=N, words=[50]).attention.log()
    steps = logs[0, :, 1:, 1] - logs[0, :, 1:, 0]  # of one key further to the right, for every query that sees both
    slopes = torch.tensor([2.0 ** -(2 * head) for head in range(1, 5)], dtype=torch.float64)
    torch.testing.assert_close(steps, (slopes / 8**0.5)[:, None].expand_as(steps), rtol=1e-6, atol=1e-7)
