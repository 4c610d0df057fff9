"""The logits of models with rotations, compared with the queries and keys that the models themselves multiply."""

import sys
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from scipy.stats import t
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.families import tiny_model
from pelocality import past_locality
from pelocality.models import decompose, positional_logits
from pelocality.models.families import _FAMILIES
from pelocality.models.families.rotary import Rotary
from tests.families import base_of, eagerly, small, spread, tiny, tokens

N = 12
TYPES = [name for name, family in _FAMILIES.items() if isinstance(family, Rotary)]
_GROUPED = {"num_key_value_heads": 1, "pad_token_id": 0, "max_position_embeddings": 64}
_ALTERNATING = ["sliding_attention", "full_attention"]
_BASE = {"rope_theta": 1e2}


def _llama(**parameters):
    config = small(hf.LlamaConfig, **_GROUPED | {"max_position_embeddings": 8}, rope_parameters=_BASE | parameters)
    return hf.LlamaModel(config)


VARIANTS = {
    "linear": lambda: _llama(rope_type="linear", factor=4.0),
    "dynamic": lambda: _llama(rope_type="dynamic", factor=4.0),
    "yarn": lambda: _llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, attention_factor=1.3),
    "llama3": lambda: _llama(
        rope_type="llama3", factor=4.0, original_max_position_embeddings=8, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "longrope": lambda: _llama(
        rope_type="longrope", factor=2.0, original_max_position_embeddings=6, short_factor=[1.0] * 4,
        long_factor=[1.0, 2.0, 3.0, 4.0],
    ),
    "a quarter of the dimensions": lambda: hf.PhiModel(
        small(hf.PhiConfig, hidden_size=32, qk_layernorm=True, rope_parameters=_BASE | {"partial_rotary_factor": 0.25})
    ),
    "stablelm": lambda: hf.StableLmModel(small(hf.StableLmConfig, num_key_value_heads=2, qk_layernorm=False)),
    "gpt_neox": lambda: hf.GPTNeoXModel(small(hf.GPTNeoXConfig, hidden_size=32)),
    "half of the dimensions, interleaved": lambda: hf.GlmModel(small(hf.GlmConfig, head_dim=8, **_GROUPED)),
    "layers of two bases": lambda: hf.Gemma3TextModel(
        small(hf.Gemma3TextConfig, head_dim=8, sliding_window=5, layer_types=_ALTERNATING, **_GROUPED)
    ),
    "norm of each head": lambda: hf.Qwen3Model(
        small(hf.Qwen3Config, head_dim=8, use_sliding_window=True, sliding_window=5, layer_types=_ALTERNATING,
              **_GROUPED)
    ),
    "norm of each head by its own weights": lambda: hf.CohereModel(
        small(hf.CohereConfig, use_qk_norm=True, **_GROUPED)
    ),
    "a norm for each head": lambda: hf.StableLmModel(
        small(hf.StableLmConfig, num_key_value_heads=2, qk_layernorm=True)
    ),
    "bidirectional, with a window": lambda: hf.Gemma3TextModel(
        small(hf.Gemma3TextConfig, head_dim=8, sliding_window=5, layer_types=_ALTERNATING,
              use_bidirectional_attention=True, **_GROUPED)
    ),
    "norm of all heads": lambda: hf.Olmo2Model(small(hf.Olmo2Config, **_GROUPED)),
    "norm of one head": lambda: hf.Olmo2Model(small(hf.Olmo2Config, **_GROUPED | {"num_attention_heads": 1})),
    "capped logits": lambda: hf.Gemma2Model(
        small(hf.Gemma2Config, head_dim=8, sliding_window=5, attn_logit_softcapping=0.5, **_GROUPED)
    ),
    "layers without rotations": lambda: hf.SmolLM3Model(small(hf.SmolLM3Config, no_rope_layers=[1, 0], **_GROUPED)),
    "a window": lambda: hf.MistralModel(small(hf.MistralConfig, sliding_window=5, **_GROUPED)),
    "learned sinks": lambda: hf.GptOssModel(
        small(hf.GptOssConfig, head_dim=8, sliding_window=5, layer_types=_ALTERNATING, num_local_experts=4,
              num_experts_per_tok=2, rope_parameters=_BASE | {"rope_type": "default"}, **_GROUPED)
    ),
}  # fmt: skip


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spread(VARIANTS[name]() if name in VARIANTS else tiny_model(name))


def batch(ids, **more):
    return [{"input_ids": ids, **more}]


def kernel(model, ids, *, length=N, **options):
    return positional_logits(model, texts=batch(ids), length=length, **{"special_tokens": True} | options)


@contextmanager
def recorded_logits(model):
    """Record what each layer gives to its attention function: rotated queries times rotated keys, scaled."""
    found, base = [], base_of(model)

    def witness(module, query, key, value, attention_mask, scaling=None, **options):
        scaled = query.shape[-1] ** -0.5 if scaling is None else scaling
        groups = query.shape[1] // key.shape[1]
        found.append(scaled * query @ key.repeat_interleave(groups, 1).mT)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, scaling=scaled, **options)

    ALL_ATTENTION_FUNCTIONS.register("witness", witness)
    before, base.config._attn_implementation = base.config._attn_implementation, "witness"
    try:
        with torch.no_grad():
            yield found
    finally:
        base.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS._global_mapping["witness"]


@pytest.mark.parametrize("name", [*TYPES, *VARIANTS])
def test_the_logits_of_every_model_are_those_of_its_attention(name):
    model, ids = build(name), tokens(2, N) % 60 + 3
    parts = decompose(model, ids)
    with eagerly(model):
        own = torch.stack(base_of(model)(ids, output_attentions=True).attentions)
    own = own / own.sum(-1, keepdim=True)  # without what goes to a learned sink
    assert (parts.attention - own).abs().max() < 1e-6
    assert own.std() > 0.01


@pytest.mark.parametrize("name", VARIANTS)
def test_the_kernel_of_one_word_is_what_the_model_multiplies(name):
    model = build(name)
    ids = torch.full((1, N), 7)
    found = kernel(model, ids)
    with recorded_logits(model) as own:
        base_of(model)(ids)
    own = torch.cat(own)
    assert found.method == "texts"
    if hasattr(model.layers[0], "self_attn") and hasattr(model.layers[0].self_attn, "sinks"):
        # a learned sink takes another share at each position, so that equal words differ above the first layer
        with pytest.raises(ValueError, match=r"repeated word .*pass texts"):
            positional_logits(model, length=N, words=[7])
        found, own = kernel(model, ids, layers=[0]), own[:1]
    torch.testing.assert_close(found.logits, own, rtol=1e-5, atol=1e-6)
    words = positional_logits(model, length=N, words=[7], layers=found.layers)
    torch.testing.assert_close(words.relative, found.relative, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_kernel_of_texts_is_the_position_of_decompose(name):
    model, ids = build(name), tokens(3, N)
    expected, found = decompose(model, ids), kernel(model, ids)
    for text in range(3):
        torch.testing.assert_close(found.logits, expected.position[:, text], rtol=1e-5, atol=1e-6)
    assert torch.equal(found.visible, expected.visible[:, 0])
    assert found.caps == expected.caps
    flat = found.relative.std(-1) < 1e-9
    assert flat.all(1).tolist() == [name == "layers without rotations" and layer == 1 for layer in found.layers]


def test_logits_are_capped_in_attention_alone():
    found = kernel(build("capped logits"), torch.full((1, N), 7))
    assert found.caps == (0.5, 0.5)
    assert found.logits.abs().max() > 0.8
    capped = (0.5 * (found.logits / 0.5).tanh()).masked_fill(~found.visible[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(found.attention, capped)


def test_padding_special_tokens_first_tokens_and_equal_texts_do_not_count():
    model, ids, lengths = build("norm of each head"), tokens(3, N), (N, 7, 9)
    mask = torch.stack([torch.arange(N) < length for length in lengths]).long()
    whole = positional_logits(model, texts=batch(ids, attention_mask=mask), special_tokens=True, length=N)
    torch.testing.assert_close(whole.logits, decompose(model, ids, attention_mask=mask).position[:, 0])
    alone = [{"input_ids": text[None, :length]} for text, length in zip(ids, lengths, strict=True)]
    expected = positional_logits(model, texts=alone, special_tokens=True, without_first=2, length=N)

    rows = torch.zeros(4, N + 2, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for row, (text, length) in enumerate(zip(ids[[0, 1, 2, 1]], (*lengths, 7), strict=True)):
        rows[row, -length:], mask[row, -length:] = text[:length], 1  # padding on the left, and a text twice
    special = torch.zeros_like(rows).scatter(1, mask.argmax(1, keepdim=True), 1)
    texts = batch(rows, attention_mask=mask, special_tokens_mask=special)
    found = positional_logits(model, texts=texts, without_first=1, length=N)
    torch.testing.assert_close(found.relative, expected.relative, rtol=1e-9, atol=1e-9)
    assert found.content.tokens.tolist() == [10, 5, 7]
    assert repr(found) == "PositionalLogits(2 layers x 2 heads, n = 12, mean content of 3 texts, causal)"


def test_the_kernel_of_a_longer_length_holds_that_of_a_shorter():
    model, ids = build("norm of all heads"), tokens(2, N)
    long, short = kernel(model, ids, length=2000), kernel(model, ids)
    torch.testing.assert_close(long.relative[..., 2000 - N : 2000 + N - 1], short.relative)
    assert long.relative.shape == (2, 2, 3999)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_rotations_by_length_are_those_of_the_length_and_of_each_text(name):
    model, ids = build(name), tokens(2, N)
    for length in (4, 40):
        with recorded_logits(build(name)) as own, torch.no_grad():
            one_that_has_read_nothing = build(name)
            one_that_has_read_nothing.config._attn_implementation = "witness"
            one_that_has_read_nothing(torch.full((1, length), 7))
        for read in (3, N, 50):  # a text shorter and longer than the kernel
            found = kernel(model, torch.full((1, read), 7), length=length, layers=[0])
            torch.testing.assert_close(found.logits, own[0], rtol=1e-5, atol=1e-5)
    together = [{"input_ids": ids[:1, :4]}, {"input_ids": ids[1:]}]  # of two lengths, each run with its own angles
    found = positional_logits(model, texts=together, special_tokens=True, length=N)
    means = [kernel(model, text) for text in (ids[:1, :4], ids[1:])]
    torch.testing.assert_close(found.content.queries, torch.cat([each.content.queries for each in means]))


@pytest.mark.parametrize("name", ["deberta", "deberta-v2", "deberta-v2 c2p only", "xlnet"])
def test_the_kernel_of_embedded_distances_is_linear_in_the_texts(name):
    model, ids = tiny(name), tokens(2, N)
    one, other = (kernel(model, text[None]).relative for text in ids)
    both = kernel(model, ids)
    assert both.method == "texts"
    torch.testing.assert_close(both.relative, (one + other) / 2)
    parts = decompose(model, torch.full((1, N), 7), layers=[0])
    terms = parts.position + parts.content_to_position + parts.position_to_content
    torch.testing.assert_close(kernel(model, torch.full((1, N), 7), layers=[0]).logits, terms[:, 0])


@pytest.mark.parametrize("name", ["t5", "bloom", "bert", "mpnet"])
def test_texts_are_not_read_where_logits_are_exact_for_any_text(name):
    model, texts = tiny(name), iter(["never read"])
    found = positional_logits(model, texts=texts, length=N)
    assert found.method == "exact"
    assert next(texts) == "never read"
    torch.testing.assert_close(found.logits, positional_logits(model, length=N).logits)
    with pytest.raises(ValueError, match="exact"):
        found.interval()


def test_the_interval_is_the_jackknife_over_texts():
    model, ids = build("norm of each head"), tokens(5, N)
    whole = kernel(model, ids)
    low, high = whole.interval("past_locality", 0.9)
    without = torch.stack([past_locality(kernel(model, ids[[j for j in range(5) if j != i]])) for i in range(5)])
    values = 5 * past_locality(whole) - 4 * without
    half = t.ppf(0.95, 4) * values.std(0) / 5**0.5
    torch.testing.assert_close(low, values.mean(0) - half)
    torch.testing.assert_close(high, values.mean(0) + half)
    assert torch.isnan(kernel(model, ids[:1]).interval()[0]).all()
    assert torch.isfinite(positional_logits(model, length=N, words=4).interval("adjusted_locality")[0]).all()
    with pytest.raises(ValueError, match="metric"):
        whole.interval("nearness")
    with pytest.raises(ValueError, match="confidence"):
        whole.interval(confidence=2)


def test_texts_are_refused_with_a_remedy():
    model = build("linear")
    for texts, error in ([], ValueError), (["a cat"], TypeError), ("a cat", TypeError):
        with pytest.raises(error, match=r"texts|tokenizer"):
            positional_logits(model, texts=texts, length=N)
    with pytest.raises(ValueError, match="special tokens"):
        positional_logits(model, texts=batch(tokens(1, N)), length=N)
    for without_first, reason in (3, "no token"), (-1, "without_first"):
        with pytest.raises(ValueError, match=reason):
            kernel(model, tokens(1, 3), without_first=without_first)
    assert kernel(model, tokens(1, 1), length=1).relative.shape == (2, 2, 1)  # one token, one position
