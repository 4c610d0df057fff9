"""Rotations in models: against the model's own rotation, rotations by complex numbers, and in what is measured."""

import copy

import pytest
import torch
import transformers as hf

from pelocality.encodings import AttenuatedEncoding, CoPE, NoEncoding, RotaryEncoding
from pelocality.metrics import past_locality
from pelocality.models import (
    attach,
    attached,
    audit,
    decompose,
    load,
    positional_attention,
    positional_logits,
    rotary_from_targets,
    text_average,
)
from tests.families import ANY, assert_same_outputs, eagerly, same, small, spread, state, tiny, tokens
from tests.test_models_attachment import hidden, set_implementation
from tests.test_models_attachment_generation import LATENT

N = 9
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 5}
ROTARY = {  # what is special about each rotation
    "cohere": (hf.CohereConfig, {"pad_token_id": 0}),  # of neighbours
    "deepseek_v3": (hf.DeepseekV3Config, LATENT),  # of the last dimensions
    "esm": (hf.EsmConfig, {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 4}),
    "gemma3": (hf.Gemma3TextConfig, GROUPED | ALTERNATING),  # another one in layers with a window
    "glm": (hf.GlmConfig, {"head_dim": 8, "num_key_value_heads": 2, "pad_token_id": 0}),  # of some neighbours
    "gpt_neox": (hf.GPTNeoXConfig, {"hidden_size": 64, "rotary_pct": 0.5}),
    "llama4": (
        hf.Llama4TextConfig,
        GROUPED | {"num_hidden_layers": 4, "num_local_experts": 2, "intermediate_size_mlp": 16, "pad_token_id": 0,
                   "attn_temperature_tuning": False},
    ),  # of complex numbers, and none in every fourth layer
    "modernbert": (hf.ModernBertConfig, {"pad_token_id": 0}),
    "phi": (hf.PhiConfig, {"hidden_size": 64}),  # of some halves
    "yarn": (hf.LlamaConfig, GROUPED | {"rope_parameters": YARN}),  # with a factor
}  # fmt: skip


def rotary(name):
    torch.manual_seed(0)
    config, sizes = ROTARY[name]
    return spread(hf.AutoModel.from_config(small(config, **sizes)))


def rotations(model):
    """Return the rotations of a model by the type of its layers."""
    kinds = sorted(set(getattr(model.config, "layer_types", None) or [None]), key=str)
    try:
        return {None: RotaryEncoding.from_model(model)}
    except ValueError:
        return {kind: RotaryEncoding.from_model(model, layer_type=kind) for kind in kinds}


@pytest.mark.parametrize("name", ROTARY)
def test_a_models_own_rotation_gives_its_own_outputs_and_a_scaled_one_those_of_scaled_frequencies(name):
    model, ids = rotary(name), tokens(2, N)
    before, found = state(model), rotations(model)
    plain = hidden(model, ids)
    kinds = getattr(model.config, "layer_types", None) if None not in found else [None]
    for scale in (1.0, 0.5):
        each = [found[kind].scaled(scale) for kind in kinds]
        with attach(model, each if len(each) > 1 else each[0]) as attachment:
            rotated = hidden(model, ids)
            assert len(attachment.encodings) == (3 if name == "llama4" else model.config.num_hidden_layers)
        with torch.no_grad():
            buffers = [buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")]
            for buffer in buffers:
                buffer.mul_(scale)
            torch.testing.assert_close(rotated, hidden(model, ids), rtol=0, atol=1e-6 * float(plain.abs().max()))
            for buffer in buffers:
                buffer.div_(scale)
    assert not torch.allclose(rotated, plain, rtol=0, atol=1e-3)
    assert torch.equal(hidden(model, ids), plain)
    assert same(before, state(model))


def llama(layers=3, **more):
    torch.manual_seed(0)
    config = small(hf.LlamaConfig, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **more)
    return spread(hf.LlamaForCausalLM(config))


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.fixture
def model():
    return llama()


def test_layers_that_are_not_named_keep_their_rotation(model):
    ids, own = tokens(2, N), RotaryEncoding.from_model(model)
    with attach(model, [own, own.scaled(0.5), own]):
        expected = logits(model, ids)
    with attach(model, own.scaled(0.5), layers=[1]) as attachment:
        assert len(attachment.encodings) == 1
        assert_same_outputs(logits(model, ids), expected)


def test_a_causal_rotation_in_a_causal_model_is_the_rotation(model):
    ids, own = tokens(2, N), RotaryEncoding.from_model(model).scaled(0.5)
    causal = RotaryEncoding(own.dim, frequencies=own.frequencies, causal=True)
    for way in ("eager", "sdpa"):
        set_implementation(model, way)
        with attach(model, own):
            expected = logits(model, ids)
        with attach(model, causal):
            assert_same_outputs(logits(model, ids), expected)


def test_a_rotation_beside_the_models_own_adds_its_angles(model):
    ids, own = tokens(2, N), RotaryEncoding.from_model(model)
    with attach(model, own.scaled(0.25), position_embeddings="keep"):
        added = logits(model, ids)
    with attach(model, own.scaled(1.25)):
        assert_same_outputs(added, logits(model, ids))


def test_frequencies_that_depend_on_the_length_are_replaced():
    dynamic, fixed = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), llama()
    own = RotaryEncoding.from_model(fixed).scaled(0.5)
    with attach(dynamic, own), attach(fixed, own):
        assert_same_outputs(logits(dynamic, tokens(2, N)), logits(fixed, tokens(2, N)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cosines_may_be_copied_on_the_way(model, dtype):
    def copied(layer, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        return args, kwargs | {"position_embeddings": (cos.clone(), sin.clone())}

    ids, rotation = tokens(2, N), RotaryEncoding.from_model(model).scaled(0.5)
    with attach(model.to(dtype), rotation):
        expected = logits(model, ids)
    model.model.layers[1].register_forward_pre_hook(copied, with_kwargs=True)
    with attach(model, rotation):
        assert torch.equal(logits(model, ids), expected)


def test_layers_that_do_not_rotate_are_left_alone():
    config = small(hf.SmolLM3Config, **GROUPED, no_rope_layers=[1, 0, 1], num_hidden_layers=3, pad_token_id=0)
    model = spread(hf.SmolLM3Model(config))
    own = RotaryEncoding.from_model(model)
    assert len(attach(model, own).encodings) == 2
    attached(model).remove()
    with pytest.raises(ValueError, match="rotates queries and keys"):
        attach(model, own, layers=[1])


def test_layers_that_share_keys_take_a_rotation_each():
    model, ids = spread(ANY["gemma3n_text"]()), tokens(2, N)
    own = RotaryEncoding.from_model(model, layer_type="full_attention")
    for encodings in (own.scaled(0.3), [own, own, own, own.scaled(2.0)], RotaryEncoding(own.dim, learnable=True)):
        with attach(model, encodings):
            found = [hidden(model, ids, position_ids=torch.arange(N)[None] + shift) for shift in (0, 20)]
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="share their keys"):
        attach(model, own, layers=[3])


def test_a_model_of_inference_mode():
    with torch.inference_mode():
        made = llama()
        attach(made, RotaryEncoding.from_model(made).scaled(0.5)).remove()


def test_frequencies_are_learned_also_through_checkpointing(model):
    own, ids = RotaryEncoding.from_model(model), tokens(2, N)
    learned = RotaryEncoding(own.dim, heads=2, frequencies=own.frequencies, learnable=True)
    encodings, gradients = attach(model, learned).encodings, []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if options is not None:
            model.gradient_checkpointing_enable(options)
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(torch.stack([each.free_frequencies.grad for each in encodings]))
        assert_same_outputs(gradients[-1], gradients[0])
    assert gradients[0].all()


# ---- measuring


def test_an_attached_model_is_measured(model):
    options = {"length": 8, "words": [7, 9], "progress": False}
    own, plain, texts = RotaryEncoding.from_model(model), positional_attention(model, **options), [[5, 6, 7, 8, 9, 10]]
    with attach(model, own.scaled(0.5)):
        result = positional_attention(model, **options)
        average = text_average(model, [{"input_ids": texts * 2}], length=6, special_tokens=True, progress=False)
    assert "RotaryEncoding" in str(result.source.encoding)
    assert average.attention.shape[-1] == 6
    assert not torch.allclose(result.attention, plain.attention)


def test_an_audit_sees_the_base_of_an_attached_rotation():
    model = llama()
    with attach(model, RotaryEncoding(RotaryEncoding.from_model(model).dim, base=500.0)):
        found = audit(model)
    assert any("measured rotary, base 500:" in each for each in found.mismatches)
    with attach(model, RotaryEncoding.from_model(model).with_heads(2).scaled([0.5, 2.0])):
        assert any("measured queries change by position" in each for each in audit(model).mismatches)
    assert not audit(model).mismatches


def test_the_logits_of_an_attached_rotation_are_known(model):
    ids = tokens(2, N)
    with attach(model, RotaryEncoding.from_model(model).scaled(0.5)), eagerly(model):
        parts = decompose(model, ids)
        expected = torch.stack(model(ids, output_attentions=True).attentions)
    torch.testing.assert_close(parts.attention, expected.to(parts.attention), atol=1e-6, rtol=1e-5)
    with attach(model, RotaryEncoding.from_model(model).with_heads(2)), pytest.raises(ValueError, match="an attached"):
        decompose(model, ids)


def test_the_scale_of_a_past_locality():
    model, n = llama(layers=2), 8
    options = {"texts": [{"input_ids": tokens(4, n)}], "special_tokens": True, "length": n, "progress": False}
    own, before = RotaryEncoding.from_model(model), state(model)
    content, i = positional_logits(model, **options).content.mean(), torch.arange(n)

    def reached(scale):
        """Return the past locality by the kernel of the encoding itself."""
        scaled = own.double().scaled(scale)
        kernels = [scaled.kernel(content.queries[0, layer], content.keys[0, layer], n) for layer in range(2)]
        matrices = torch.stack(kernels)[..., i[None] - i[:, None] + n - 1]
        return past_locality(matrices.masked_fill(i[None] > i[:, None], -torch.inf).softmax(-1)).mean().item()

    wanted = reached(1.3)
    found = rotary_from_targets(model, past_locality=wanted, **options)
    assert reached((found.frequencies / own.frequencies).mean().item()) == pytest.approx(wanted, abs=1e-6)
    assert same(before, state(model))
    with pytest.raises(ValueError, match=r"past_locality must be between 0\.\d+ and 0\.\d+"):
        rotary_from_targets(model, past_locality=0.999, **options)


# ---- refusals


def test_what_cannot_be_attached_is_refused_and_changes_nothing(model):
    own, before = RotaryEncoding.from_model(model), state(model)
    for encoding, options, error, match in [
        (RotaryEncoding(2 * own.dim), {}, ValueError, f"rotates {own.dim} dimensions"),
        (RotaryEncoding(2 * own.dim), {"prove": False}, ValueError, "rotates"),
        (RotaryEncoding(own.dim, interleaved=True), {}, ValueError, "interleaved"),
        (own.with_heads(3), {}, ValueError, "1 or 2 heads"),
        (own.with_heads(4), {}, ValueError, "1 or 2 heads"),
        (own, {"layers": [7]}, ValueError, "layers must name"),
        (own, {"disable": ["norm"]}, ValueError, "disable is for"),
        ([own, own], {}, ValueError, "list of 3"),
        ([own, AttenuatedEncoding(), own], {}, TypeError, "rotary for all layers"),
        ([NoEncoding(), own, own], {}, TypeError, "rotary for all layers"),
    ]:
        with pytest.raises(error, match=match):
            attach(model, encoding, **options)
    set_implementation(model, "eager")
    for content in (CoPE(4), [NoEncoding(), CoPE(4), NoEncoding()]):
        with pytest.raises(ValueError, match=r"CoPE.*set_attn_implementation\('sdpa'\)"):
            attach(model, content)
    set_implementation(model, "sdpa")
    assert same(before, state(model))
    with pytest.raises(ValueError, match="causal"):
        attach(tiny("bert"), RotaryEncoding(8, causal=True))


def test_a_rotation_follows_position_ids_also_in_a_cache():
    model, ids = llama(), tokens(2, N)
    own = RotaryEncoding.from_model(model)
    position_ids = torch.tensor([[0, 1, 2, 5, 6, 7, 20, 21, 22]])
    with torch.no_grad():
        expected = model(ids, position_ids=position_ids).logits
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
        with attach(model, own.with_heads(2)):
            whole = model(ids, position_ids=position_ids).logits
            cache = model(ids[:, :6], position_ids=position_ids[:, :6], use_cache=True).past_key_values
            rest = model(ids[:, 6:], position_ids=position_ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest, expected[:, 6:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [4, 6, 10, 12, 18, 20])
def test_a_rotation_is_read_where_halves_of_its_cosines_are_rounded_differently(size):
    config = small(hf.LlamaConfig, hidden_size=2 * size, head_dim=size)
    model = spread(hf.LlamaModel(config).eval()).float()
    ids, own = tokens(2, N), RotaryEncoding.from_model(model)
    with torch.no_grad():
        expected = model(ids)[0]
        with attach(model, own):
            torch.testing.assert_close(model(ids)[0], expected, atol=1e-5, rtol=1e-5)


# ---- tokens of several coordinates


def of_images():
    """Return a small Qwen2-VL, and two texts with images of two sizes, of which one is padded on the left."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": 97, "video_token_id": 96, "vision_start_token_id": 95, "vision_end_token_id": 94}
    config = hf.Qwen2VLConfig(text_config=text | heads, vision_config=vision, **tokens)
    ids = torch.arange(10, 42).view(2, 16)
    ids[0, 3], ids[0, 4:10], ids[1, 6], ids[1, 7:13], ids[1, :2] = 95, 97, 95, 97, 0
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == 97).int(),
        "pixel_values": torch.randn(48, 96),
        "image_grid_thw": torch.tensor([[1, 4, 6], [1, 6, 4]]),
    }
    return spread(hf.Qwen2VLForConditionalGeneration(config)).eval(), inputs


CHANGES = {
    "frames": lambda own: own.scaled(0.5, axis=0),
    "no rows": lambda own: own.without(axis=1),
    "no fast columns": lambda own: own.without(fastest=0.3, axis=2),
    "all": lambda own: own.scaled(2.0),
    "another base": lambda own: own.rebased(100.0),
}


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_frequencies_of_each_axis_are_those_of_images_in_a_batch(way):
    model, inputs = of_images()
    set_implementation(model, way)
    own, rotary, before = RotaryEncoding.from_model(model), model.model.language_model.rotary_emb, state(model)
    if way == "eager":  # the model's own rows of padding are NaN there, and so is their text
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        plain = model(**inputs).logits
        for change in CHANGES.values():
            changed = change(own)

            def angles(states, position_ids):
                angle = torch.einsum("abn,fa->bnf", position_ids.double(), changed.waves[0].double())  # noqa: B023
                return [each.float() for each in (angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2))]

            rotary.forward = angles
            expected = model(**inputs).logits
            del rotary.forward
            with attach(model, changed):
                torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
                again = copy.deepcopy(model)
            torch.testing.assert_close(again(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(expected, plain, atol=1e-3)
        assert torch.equal(model(**inputs).logits, plain)
    assert same(before, state(model))


def test_images_are_continued_from_a_cache_and_by_a_loaded_model(tmp_path):
    model, inputs = of_images()
    own = RotaryEncoding.from_model(model)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with attach(model, own.scaled(0.5, axis=1)) as attachment:
        found = [model.generate(**inputs, **options, use_cache=each).logits for each in (True, False)]
        attachment.save(tmp_path)
    torch.testing.assert_close(*map(torch.stack, found), atol=1e-4, rtol=1e-4)
    again = load(tmp_path, model).generate(**inputs, **options).logits
    torch.testing.assert_close(torch.stack(again), torch.stack(found[0]))


def test_frequencies_of_several_axes_are_learned_and_texts_take_those_of_a_line():
    model, inputs = of_images()
    own, ids = RotaryEncoding.from_model(model), tokens(2, N)
    learned = RotaryEncoding(own.dim, 2, frequencies=own.frequencies, axes=3, learnable=True)
    line = RotaryEncoding(own.dim, frequencies=own.frequencies.sum(-1))
    with attach(model, learned) as attachment:
        model(**inputs).logits.square().mean().backward()
        assert all(each.free_frequencies.grad.any((0, 1)).all() for each in attachment.encodings)
        of_text = logits(model, ids)
    with attach(model, line):
        assert_same_outputs(logits(model, ids), of_text)
    with torch.no_grad():
        with attach(model, [own, own.scaled(0.5)]):
            expected = model(**inputs).logits
        with attach(model, own.scaled(0.5), layers=[1]):
            assert_same_outputs(model(**inputs).logits, expected)
    with pytest.raises(ValueError, match="axes"):
        attach(model, RotaryEncoding(own.dim, frequencies=own.frequencies[..., :2], axes=2))
    with pytest.raises(ValueError, match="axes"):
        attach(llama(), own)
