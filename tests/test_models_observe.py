"""Which layers attention maps belong to and which keys their masks leave visible, in models that have no record."""

from functools import partial

import accelerate
import pytest
import torch
import transformers as hf

from pelocality.encodings import ALiBi
from pelocality.metrics import adjusted_locality
from pelocality.models import (
    PositionalAttention,
    _observe,
    attach,
    position_share,
    positional_attention,
    text_average,
)
from pelocality.models._observe import observe
from pelocality.models._run import find_base
from pelocality.models.eager import eager_attention
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
    "gemma3": (
        lambda: hf.Gemma3TextModel(decoder(hf.Gemma3TextConfig, sliding_window=4, layer_types=SLIDING)),
        [WINDOW, CAUSAL],
    ),
    "qwen3": (
        lambda: hf.Qwen3Model(
            decoder(hf.Qwen3Config, sliding_window=4, use_sliding_window=True, layer_types=SLIDING)
        ),
        [WINDOW, CAUSAL],
    ),
    "mixtral": (lambda: hf.MixtralModel(decoder(hf.MixtralConfig, sliding_window=4)), [WINDOW, WINDOW]),
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
    "openai-gpt": (
        lambda: hf.OpenAIGPTModel(hf.OpenAIGPTConfig(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=40)),
        [CAUSAL, CAUSAL],
    ),
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


def observed(model, ids):
    base = find_base(model)
    with eager_attention(model):
        return observe(base, input_ids=ids)


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
    found = position_share(model, [{"input_ids": tokens(4, N, seed)} for seed in range(3)], special_tokens=True)
    assert found.share.isnan().all()
    for counts, expected in zip(found.counts, MASKED[name][1], strict=True):
        assert torch.equal(counts, 12 * expected)


def test_a_window_does_not_make_content_positional():
    """The same weights with and without a window: without positions, scores depend on the words only."""
    windowed = made("gemma2", scale=8)
    text = [{"input_ids": tokens(8, 30, seed)} for seed in range(4)]
    share = position_share(windowed, text, special_tokens=True).share[0]
    windowed.config.layer_types = ["full_attention"] * 2
    windowed.layers[0].self_attn.sliding_window = None
    plain = position_share(windowed, text, special_tokens=True).share[0]
    assert (share - plain).abs().max() < 0.1


@pytest.mark.parametrize("name", MASKED)
def test_positional_attention_returns_the_visible_keys(name):
    result = positional_attention(made(name), length=N, words=4)
    expected = torch.stack(MASKED[name][1])
    if expected.all():
        assert result.visible is None
    else:
        assert torch.equal(result.visible, expected)


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
    base = find_base(made("gemma2"))
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, 6:] = 0
    with eager_attention(base):
        seen = observe(base, input_ids=tokens(2, N), attention_mask=mask)
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
    found = position_share(model, [{"input_ids": tokens(4, N)}], special_tokens=True)
    assert found.layers == (1, 3)
    assert "layers without attention: 0 linear_attention, 2 linear_attention" in repr(found)
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


@pytest.mark.parametrize("name", ["bert", "t5", "xlnet", "gemma2", "jamba", "learned sinks"])
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
    monkeypatch.setattr(_observe, "_BEGINNING", 3)
    torch.testing.assert_close(measured(), whole, rtol=0, atol=0, equal_nan=True)


def test_selecting_a_layer_without_attention_raises():
    with pytest.raises(ValueError, match=r"layers holds \[0\], which have no attention.* \[1, 3\]"):
        positional_attention(tiny_any("jamba"), length=N, words=4, layers=[0, 1])
    with pytest.raises(ValueError, match="the model's 4 layers"):
        positional_attention(tiny_any("jamba"), length=N, words=4, layers=[4])


@pytest.mark.parametrize("name", ["albert", "albert with inner layers", "t5", "xlnet", "bert", "distilbert", "bloom"])
def test_layers_are_counted_where_blocks_are_shared(name):
    model = tiny(name)
    with eager_attention(model):
        seen = observe(model, input_ids=tokens(2, N))
    assert seen.known.layers == tuple(range(len(seen.maps)))
    assert seen.known.depth == len(seen.maps)


def test_layers_that_differ_in_heads_are_refused():
    class Uneven(hf.RemBertModel):
        def forward(self, input_ids=None, **_):
            batch, n = input_ids.shape
            maps = tuple(torch.eye(n).expand(batch, heads, n, n) for heads in (2, 1))
            return hf.modeling_outputs.BaseModelOutput(torch.zeros(batch, n, 16), attentions=maps)

    with pytest.raises(ValueError, match=r"different numbers of heads \(1, 2\)"):
        positional_attention(Uneven(UNKNOWN["rembert"]().config), length=N, words=4)


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


def test_a_softmax_of_the_same_numbers_in_another_order_is_not_that_of_a_layer():
    class Permuted(hf.RemBertModel):
        def forward(self, input_ids=None, **_):
            batch, n = input_ids.shape
            scores = torch.rand(batch, 2, n, n)
            scores.transpose(0, 1).softmax(-1)  # (head, batch, n, n), as many numbers
            maps = (scores.softmax(-1),)
            return hf.modeling_outputs.BaseModelOutput(torch.zeros(batch, n, 16), attentions=maps)

    known = observe(Permuted(UNKNOWN["rembert"]().config), input_ids=tokens(3, N)).known
    assert (known.order, known.softmaxes) == ((1,), 2)


def test_the_mask_of_an_attached_encoding_is_seen():
    model = tiny("bert")
    with attach(model, ALiBi(2, causal=True)):
        assert torch.equal(positional_attention(model, length=N, words=[7]).visible, CAUSAL.expand(3, N, N))


LEARNED_SINKS = {
    "gpt_oss": lambda: hf.GptOssModel(
        decoder(hf.GptOssConfig, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    ),
    "mimo_v2_flash": lambda: hf.MiMoV2FlashModel(
        decoder(
            hf.MiMoV2FlashConfig,
            num_attention_heads=4,
            v_head_dim=8,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
        )
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
    class Damped(hf.BertModel):
        def forward(self, input_ids=None, **more):
            outputs = super().forward(input_ids, **more)
            outputs["attentions"] = tuple(weights * 0.5 for weights in outputs.attentions)
            return outputs

    with pytest.raises(ValueError, match=r"layer 0 do not sum to 1 \(off by 0\.5\)"):
        positional_attention(Damped(tiny("bert").config), length=N, words=[7])


def test_a_difference_of_two_maps_is_refused():
    with pytest.raises(ValueError, match="difference of two maps"):
        positional_attention(hf.DiffLlamaModel(decoder(hf.DiffLlamaConfig)), length=N, words=[7])


def test_a_result_names_the_layers_without_attention():
    result = positional_attention(tiny_any("jamba"), length=N, words=4)
    assert result.other_layers == {0: "linear_attention", 2: "linear_attention"}
    assert "layers without attention: 0 linear_attention, 2 linear_attention" in repr(result)
    lfm = hf.Lfm2Model(decoder(hf.Lfm2Config, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]))
    result = positional_attention(lfm.eval(), length=N, words=4)
    assert result.layers == (1,)
    assert result.other_layers == {0: "conv", 2: "conv"}


def test_windows_are_reported_by_layer():
    result = positional_attention(made("gemma2"), length=N, words=4)
    assert result.visible_keys == (4, N)
    assert result.to_frame("layer")["visible_keys"].tolist() == [4, N]
    assert "visible keys" in repr(result)
    assert "visible keys" not in repr(positional_attention(tiny("gpt2"), length=N, words=4))


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


DECODERS = {
    "t5": lambda: hf.T5Model(hf.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)),
    "bart": lambda: hf.BartModel(
        hf.BartConfig(
            vocab_size=99,
            d_model=16,
            encoder_layers=1,
            decoder_layers=2,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    ),
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


def test_errors_of_a_model_name_it():
    class Broken(hf.BertModel):
        def forward(self, input_ids=None, **_):
            raise KeyError("memory")

    with pytest.raises(ValueError, match=r"Broken \(model type 'bert'\) cannot be probed: on 1 x 11 .*KeyError: 'mem"):
        positional_attention(Broken(tiny("bert").config), length=N, words=[7])


def test_the_way_out_of_a_forward_in_mixed_precision_is_named():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier Trainer
    try:
        model = tiny("bert").float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5)  # so that rounding to bfloat16 shows
        model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        with pytest.raises(ValueError, match=r"mixed precision, which `del model\.forward` undoes$"):
            positional_attention(model, length=N)
        del model.forward
        assert positional_attention(model, length=N).attention.dtype == torch.float32
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_whose_eager_attention_computes_something_else_is_refused():
    """In transformers 5.23 the eager attention of Falcon adds its ALiBi biases twice."""

    class Doubled(hf.GPT2Model):
        def forward(self, input_ids=None, **inputs):
            eager = self.config._attn_implementation == "eager"
            return super().forward(
                input_ids, **inputs, position_ids=(1 + eager) * torch.arange(input_ids.shape[1])[None]
            )

    model = Doubled(tiny("gpt2").config).eval()
    before = state(model)
    ids = tokens(3, N)
    calls = (
        lambda: positional_attention(model, length=N, words=3),
        lambda: position_share(model, [{"input_ids": ids}], special_tokens=True),
    )
    for measure in calls:
        with pytest.raises(
            ValueError, match=r"eager attention, which returns weights, it gives other outputs than with s"
        ):
            measure()
    assert same(before, state(model))
    model.config._attn_implementation = "eager"
    for measure in calls:
        measure()
