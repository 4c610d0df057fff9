"""RotaryEncoding against transformers' rotation, complex numbers and closed forms."""

import math

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pelocality.encodings import Encoding, PositionalSelfAttention, RotaryEncoding, biased_attention

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def rotary_module(scaling=None, dim=16):
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4} | (scaling or {})}
    longest = (scaling or {}).get("original_max_position_embeddings", 512) * (scaling or {}).get("factor", 1)
    config = hf.LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=int(longest), **options
    )
    return LlamaRotaryEmbedding(config)


def states(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_the_rotation_is_that_of_transformers(scaling):
    module = rotary_module(SCALINGS.get(scaling))
    encoding = RotaryEncoding(16, base=5e4, scaling=SCALINGS.get(scaling)).double()
    query, key = states(2, 4, 30, 16), states(2, 4, 30, 16, seed=1)
    expected = apply_rotary_pos_emb(query, key, *module(query, torch.arange(30)[None]))
    rotated = encoding.attention_inputs(query, key)
    assert rotated[2] is None
    for one, other in zip(rotated, expected, strict=False):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)  # transformers has angles in float32


def test_pairs_that_are_named_are_those_that_turn_whatever_the_usual_ones_are():
    pairs = [[0, 3], [1, 2]]
    one, other = (
        RotaryEncoding(4, frequencies=[1.0, 0.5], pairs=pairs, interleaved=interleaved) for interleaved in (True, False)
    )
    content = torch.randn(2, 1, 4)
    torch.testing.assert_close(one.kernel(*content, 5), other.kernel(*content, 5))


def test_interleaved_pairs_are_those_of_gpt_j():
    encoding = RotaryEncoding(16, interleaved=True).double()
    query = states(1, 3, 9, 16)
    cos, sin = encoding.angles(torch.arange(9))
    expected = rotate_interleaved(query.transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(encoding.attention_inputs(query, query)[0], expected)


def test_dimensions_behind_the_rotated_ones_stay():
    query = states(1, 2, 5, 24)
    rotated = RotaryEncoding(16).double().attention_inputs(query, query)[0]
    assert torch.equal(rotated[..., 16:], query[..., 16:])
    assert not torch.allclose(rotated[..., :16], query[..., :16])


def test_the_last_query_is_at_the_last_key():
    query, key = states(1, 2, 9, 16), states(1, 2, 9, 16, seed=1)
    encoding = RotaryEncoding(16, causal=True).double()
    whole, last = (encoding.attention_inputs(each, key) for each in (query, query[:, :, -2:]))
    assert torch.equal(whole[0][:, :, -2:], last[0])
    assert torch.equal(whole[2][:, :, -2:], last[2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_kernel_is_the_logits_of_the_same_query_and_key_everywhere(interleaved, heads):
    n, frequencies = 12, states(heads, 8, seed=3)
    encoding = RotaryEncoding(
        16, heads, frequencies=frequencies, attention_scaling=1.2, interleaved=interleaved
    ).double()
    query, key = states(2, 3, 20), states(2, 3, 20, seed=1)
    everywhere = (each[:, :, None].expand(-1, -1, n, -1) for each in (query, key))
    q, k, _ = encoding.attention_inputs(*everywhere)
    logits = q @ k.mT / math.sqrt(20)
    kernel = encoding.kernel(query, key, n)
    assert kernel.shape == (2, 3, 2 * n - 1)
    i = torch.arange(n)
    torch.testing.assert_close(kernel[..., i[None] - i[:, None] + n - 1], logits)


def test_the_kernel_of_a_causal_encoding_hides_the_future():
    kernel = RotaryEncoding(4, causal=True).kernel(torch.ones(1, 4), torch.ones(1, 4), 5)
    assert torch.equal(kernel.isinf(), torch.arange(-4, 5)[None] > 0)


def test_scaling_angles_is_scaling_positions():
    encoding, query = RotaryEncoding(16).double(), states(1, 2, 10, 16)
    doubled = encoding.scaled(2.0).attention_inputs(query, query)[0]
    every_second = encoding.attention_inputs(query.repeat_interleave(2, 2), query.repeat_interleave(2, 2))[0][:, :, ::2]
    torch.testing.assert_close(doubled, every_second)
    by_head = RotaryEncoding(16, heads=2).scaled([1.0, 0.0]).double().attention_inputs(query, query)[0]
    assert torch.equal(by_head[:, 1], query[:, 1])
    torch.testing.assert_close(by_head[:, 0], encoding.attention_inputs(query, query)[0][:, 0])


def test_a_new_base_has_the_frequencies_of_that_base():
    rebased = RotaryEncoding(16, base=1e4).double().rebased(1e6)
    torch.testing.assert_close(rebased.frequencies, RotaryEncoding(16, base=1e6).double().frequencies)
    assert rebased.base == 1e6


def test_bands_are_stopped():
    encoding = RotaryEncoding(16)
    slow, fast = encoding.without(slowest=0.25), encoding.without(fastest=0.25)
    assert slow.frequencies[0].eq(0).tolist() == [False] * 6 + [True] * 2
    assert fast.frequencies[0].eq(0).tolist() == [True] * 2 + [False] * 6
    assert encoding.without(bands=[1, 3]).frequencies[0].eq(0).nonzero().flatten().tolist() == [1, 3]
    assert encoding.without(slowest=1.0).wavelengths.isinf().all()
    content = torch.randn(1, 2, 6, 16)
    assert torch.equal(encoding.without(fastest=1.0).attention_inputs(content, content)[0], content)


@pytest.mark.parametrize("kwargs", [{"slowest": 0.05}, {"slowest": 1.5}, {"fastest": -0.25}, {"bands": [8]}])
def test_bands_out_of_range_are_refused(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        RotaryEncoding(16).without(**kwargs)


@pytest.mark.parametrize("name", ["Llama", "ModernBert", "Gemma3Text"])
def test_the_rotation_of_a_model(name):
    config = getattr(hf, f"{name}Config")(
        hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=8, vocab_size=9, pad_token_id=0
    )
    model = getattr(hf, f"{name}Model")(config)
    if name == "Llama":
        found = RotaryEncoding.from_model(model).frequencies[0]
        torch.testing.assert_close(found, model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
        return
    with pytest.raises(ValueError, match="sliding_attention"):
        RotaryEncoding.from_model(model)
    encoding = RotaryEncoding.from_model(model, layer_type="full_attention")
    torch.testing.assert_close(encoding.frequencies[0], model.rotary_emb.full_attention_inv_freq, rtol=1e-6, atol=0)
    assert encoding.base == config.rope_parameters["full_attention"]["rope_theta"]


def test_models_without_one_rotation_are_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with pytest.raises(ValueError, match="rotations, or none"):
        RotaryEncoding.from_model(hf.BertModel(hf.BertConfig(**sizes)))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="depend on the length"):
        RotaryEncoding.from_model(hf.LlamaModel(hf.LlamaConfig(**sizes, rope_parameters=rope)))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dim": 7}, "frequencies"),
        ({"dim": 8, "scaling": {"rope_type": "ntk"}}, "rope_type"),
        ({"dim": 8, "scaling": {"factor": 2.0}}, "rope_type"),
        ({"dim": 8, "scaling": {"rope_type": "dynamic", "factor": 2.0}}, "frequencies="),
        ({"dim": 8, "scaling": {"rope_type": "linear"}}, "factor"),
        ({"dim": 8, "scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"dim": 8, "frequencies": [1.0, 0.1]}, r"\(4,\)"),
        ({"dim": 4, "heads": 3, "frequencies": torch.ones(2, 2)}, "3 heads"),
        ({"dim": 4, "frequencies": [1.0, math.nan]}, "finite"),
        ({"dim": 4, "base": -1.0}, "base"),
        ({"dim": 4, "base": 5.0, "scaling": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta"),
        ({"dim": 4, "scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        ({"dim": 4, "scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial"),
        ({"dim": 4, "scaling": "linear"}, "dictionary"),
        ({"dim": 4, "frequencies": [1e300, 1.0]}, "finite in float32"),
        ({"dim": 4, "frequencies": "ab"}, "frequencies"),
        ({"dim": 4, "frequencies": torch.ones(2, dtype=torch.complex64)}, "real numbers"),
        ({"dim": 4, "attention_scaling": math.nan}, "attention_scaling"),
    ],
)
def test_what_cannot_be_a_rotation_is_refused(kwargs, match):
    with pytest.raises((TypeError, ValueError), match=match):
        RotaryEncoding(**kwargs)


def test_the_base_of_a_scaling_is_the_base():
    scaling = {"type": "linear", "factor": 2.0, "rope_theta": 5e5}  # as transformers once wrote it
    encoding = RotaryEncoding(8, scaling=scaling)
    assert encoding.base == 5e5
    torch.testing.assert_close(encoding.frequencies, RotaryEncoding(8, base=5e5).scaled(0.5).frequencies)
    rebased = encoding.rebased(1e3)
    torch.testing.assert_close(rebased.frequencies, RotaryEncoding(8, base=1e3).scaled(0.5).frequencies)
    again = Encoding.from_configuration(rebased.configuration())
    assert torch.equal(again.frequencies, rebased.frequencies)


def test_the_encoder_is_read_and_the_decoder_if_it_is_passed():
    def half(base):
        rope = {"rope_type": "default", "rope_theta": base}
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        return hf.T5GemmaModuleConfig(**sizes, head_dim=8, num_key_value_heads=1, rope_parameters=rope)

    model = hf.T5GemmaModel(hf.T5GemmaConfig(encoder=half(1e4), decoder=half(100.0), vocab_size=99))
    assert RotaryEncoding.from_model(model).base == 1e4
    assert RotaryEncoding.from_model(model.decoder).base == 100.0


def test_encodings_without_numbers_are_printed():
    assert repr(RotaryEncoding(8).to("meta")) == "RotaryEncoding(dim=8, heads=1)"


def test_a_float_mask_takes_the_dtype_of_the_queries():
    for dtype, other in ((torch.float16, torch.float32), (torch.float32, torch.float64)):
        layer = PositionalSelfAttention(16, 2, RotaryEncoding(8)).to(dtype)
        x = torch.randn(2, 6, 16).to(dtype)
        found = layer(x, attn_mask=torch.zeros(6, 6, dtype=other))[0]
        torch.testing.assert_close(found, layer(x)[0])


def test_there_are_no_weights_without_content():
    for call in (lambda e: e(5), lambda e: e.weights(5), lambda e: e.relative(5)):
        with pytest.raises(TypeError, match="queries and keys"):
            call(RotaryEncoding(8))
    with pytest.raises(TypeError, match="concat"):
        PositionalSelfAttention(16, 2, RotaryEncoding(8), mode="concat")


def test_a_query_needs_as_many_dimensions_as_are_rotated():
    with pytest.raises(ValueError, match="at least the 16"):
        biased_attention(*torch.randn(3, 1, 2, 4, 8), RotaryEncoding(16))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_functions_and_layers_rotate(causal):
    torch.manual_seed(0)
    encoding = RotaryEncoding(8, causal=causal)
    query, key, value = torch.randn(3, 2, 4, 10, 8)
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[1, ..., 7:] = False
    q, k, _ = encoding.attention_inputs(query, key)
    seen = mask & (torch.ones(10, 10).tril() > 0) if causal else mask
    expected = nn.functional.scaled_dot_product_attention(q, k, value, seen.expand(-1, 1, 10, -1))
    torch.testing.assert_close(biased_attention(query, key, value, encoding, mask=mask), expected)
    layer = PositionalSelfAttention(32, 4, encoding)
    x = torch.randn(2, 10, 32)
    padding = ~mask[:, 0, 0]
    fast = layer(x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(layer(x, key_padding_mask=padding)[0], fast)
    alone = layer(x[1:, :7])[0]
    torch.testing.assert_close(fast[1:, :7], alone)
    added = torch.zeros(10, 10)
    torch.testing.assert_close(layer(x, key_padding_mask=padding, attn_mask=added)[0], fast)


def test_frequencies_are_learned():
    encoding = RotaryEncoding(8, heads=2, learnable=True).double()
    assert encoding.frequencies.shape == (2, 4)
    query, key = states(1, 2, 5, 8), states(1, 2, 5, 8, seed=1)

    def logits(frequencies):
        with torch.no_grad():
            copy = torch.nn.Parameter(frequencies)
        encoding.__dict__["_parameters"]["free_frequencies"] = copy
        q, k, _ = encoding.attention_inputs(query, key)
        return (q @ k.mT), copy

    total, parameter = logits(encoding.frequencies.detach())
    total[0, 1, 4, 0].backward()
    step = 1e-6
    for head, band in ((0, 0), (1, 0), (1, 3)):
        moved = parameter.detach().clone()
        moved[head, band] += step
        slope = (logits(moved)[0][0, 1, 4, 0] - total[0, 1, 4, 0]).item() / step
        assert parameter.grad[head, band].item() == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize("learnable", [False, True])
def test_a_rotation_is_rebuilt_from_its_configuration(learnable):
    encoding = RotaryEncoding(8, heads=2, base=500.0, scaling=SCALINGS["linear"], learnable=learnable, causal=True)
    encoding = encoding.scaled([0.5, 1.5]).without(slowest=0.5)
    again = Encoding.from_configuration(encoding.configuration())
    assert torch.equal(again.frequencies, encoding.frequencies)
    assert again.configuration() == encoding.configuration()
    again.load_state_dict(encoding.state_dict())


# ---- several axes


def by_axes():
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.rand(2, 4, 3, generator=generator).double()
    frequencies[:, :2, 1:] = 0  # bands that read the first axis alone
    pairs = [[0, 5], [6, 1], [2, 3], [9, 4]]
    return RotaryEncoding(8, 2, frequencies=frequencies, axes=3, pairs=pairs, attention_scaling=1.1).double()


def test_a_rotation_by_several_axes_is_a_product_of_rotations_and_its_kernel_depends_on_displacement():
    encoding, generator = by_axes(), torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 7, 12, dtype=torch.float64, generator=generator)
    places = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    rotated = encoding.rotate(x, *encoding.angles(places))
    for head in range(2):
        for token in range(7):
            matrix = torch.eye(12, dtype=torch.float64)
            for (a, b), wave in zip(encoding.pairs, encoding.frequencies[head], strict=True):
                angle = float(wave @ places[token])
                turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
                matrix[[[a], [b]], [[a, b]]] = 1.1 * turn
            torch.testing.assert_close(rotated[0, head, token], matrix @ x[0, head, token], atol=1e-6, rtol=1e-6)
    logits = rotated[0, :, :1] @ rotated[0].mT / 12**0.5
    for key in range(7):
        kernel = encoding.kernel(x[0, :, 0], x[0, :, key], places[key : key + 1] - places[:1])
        torch.testing.assert_close(kernel[:, 0], logits[:, 0, key], atol=1e-6, rtol=1e-6)


def test_one_axis_is_changed_alone():
    encoding = by_axes()
    w = encoding.frequencies
    torch.testing.assert_close(
        encoding.scaled([0.5, 2.0], axis=1).frequencies[..., 1], w[..., 1] * w.new([[0.5], [2.0]])
    )
    for changed in (encoding.scaled(0.5, axis=1), encoding.rebased(7.0, axis=1), encoding.without(axis=1)):
        assert torch.equal(changed.frequencies[..., ::2], w[..., ::2])
        assert not torch.equal(changed.frequencies, w)
    assert not encoding.without(axis=2).frequencies[..., 2].any()
    stopped = encoding.without(slowest=0.5, axis=1).frequencies[..., 1]  # half of the two bands that read it
    assert ((stopped == 0).sum(-1) == 3).all()
    assert torch.equal(stopped.amax(-1), w[..., 1].amax(-1))
    with pytest.raises(ValueError, match="fastest"):
        encoding.without(fastest=0.2, axis=1)
    with pytest.raises(ValueError, match="axis"):
        encoding.scaled(0.5, axis=3)


def test_several_axes_are_saved_and_copied_and_another_base_is_that_of_one_series():
    encoding = by_axes()
    again = Encoding.from_configuration(encoding.configuration())
    assert again.pairs == encoding.pairs
    torch.testing.assert_close(again.frequencies.double(), encoding.frequencies, atol=1e-7, rtol=1e-6)
    series = RotaryEncoding(16).frequencies[0]
    frequencies = torch.zeros(8, 2).scatter(1, torch.tensor([[0], [1]] * 4), series[:, None])
    rebased = RotaryEncoding(16, frequencies=frequencies, axes=2).rebased(100.0)
    torch.testing.assert_close(rebased.frequencies.sum(-1)[0], RotaryEncoding(16, base=100.0).frequencies[0])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"axes": 2}, "frequencies"),
        ({"axes": 2, "frequencies": torch.ones(4)}, r"\(4, 2\)"),
        ({"axes": 2, "frequencies": torch.ones(4, 2), "causal": True}, "causal"),
        ({"pairs": [[0, 1], [2, 3], [4, 5]]}, "pairs"),
        ({"pairs": [[0, 1], [2, 3], [4, 5], [6, 6]]}, "pairs"),
        ({"pairs": [[0, 1], [2, 3], [4, 5], [6, -1]]}, "pairs"),
    ],
)
def test_what_cannot_be_a_rotation_by_axes_is_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        RotaryEncoding(8, **kwargs)


def test_tokens_of_several_coordinates_are_not_counted():
    with pytest.raises(ValueError, match="coordinates"):
        by_axes().attention_inputs(torch.randn(1, 2, 5, 12), torch.randn(1, 2, 5, 12))
    with pytest.raises(ValueError, match="displacements"):
        by_axes().kernel(torch.randn(2, 12), torch.randn(2, 12), 5)
