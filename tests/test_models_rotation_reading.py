"""How models rotate, read by running them, against formulas of our own, and what is refused."""

import copy
import itertools
import math

import pytest
import torch
import transformers as hf
from transformers.models import ernie4_5_vl_moe, gemma4, glm4v, hunyuan_vl, llama4, paddleocr_vl

from pelocality.encodings import RotaryEncoding
from pelocality.models import SequenceModel, identical_patches
from pelocality.models.rotations import rotation_of
from tests.families import same, state

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
T, H, W = range(3)


def series(dim, base=1e4):
    return [base ** (-2 * f / dim) for f in range(dim // 2)]


def waves(axes, bands):
    """Return wave vectors (band, axis) of bands (axis, frequency)."""
    found = torch.zeros(len(bands), axes, dtype=torch.float64)
    for f, (axis, frequency) in enumerate(bands):
        found[f, axis] = frequency
    return found


def mrope(section, **more):
    return TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}}


def ernie():
    experts = {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2, "mlp_layer_types": ["dense"] * 2}
    sizes = {name: each for name, each in mrope([3, 3, 2]).items() if name != "head_dim"}
    config = ernie4_5_vl_moe.configuration_ernie4_5_vl_moe.Ernie4_5_VLMoeTextConfig(**sizes, **experts)
    return ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel(config)


def llama4_vision():
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 1.0}
    config = hf.Llama4VisionConfig(**VISION | {"intermediate_size": 32}, image_size=28, **sizes)
    return llama4.modeling_llama4.Llama4VisionModel(config)


def sections(*axes):
    """Return the bands of one series of frequencies, each of which reads one axis."""
    return waves(3, list(zip(axes, series(16), strict=True)))


def square(side, first, base=1e4, unit=1.0):
    """Return the bands of two axes with a series each."""
    frequencies = [unit * each for each in series(8, base)]
    return waves(2, [(axis, each) for axis in (first, 1 - first) for each in frequencies])


# a model, the number of its patches, and its wave vectors
MODELS = {
    "Qwen2-VL": lambda: (
        hf.Qwen2VLTextModel(hf.Qwen2VLTextConfig(**mrope([2, 3, 3]))), None, sections(T, T, H, H, H, W, W, W),
    ),
    "Qwen2.5-VL": lambda: (
        hf.Qwen2_5_VLTextModel(hf.Qwen2_5_VLTextConfig(**mrope([4, 2, 2]))), None, sections(T, T, T, T, H, H, W, W),
    ),
    "Qwen3-VL": lambda: (
        hf.Qwen3VLTextModel(hf.Qwen3VLTextConfig(**mrope([3, 3, 2]))), None, sections(T, H, W, T, H, W, T, H),
    ),
    "GLM-4V": lambda: (
        glm4v.modeling_glm4v.Glm4vTextModel(glm4v.configuration_glm4v.Glm4vTextConfig(**mrope([2, 3, 3]))), None,
        sections(T, T, H, H, H, W, W, W),
    ),
    "PaddleOCR-VL": lambda: (
        paddleocr_vl.modeling_paddleocr_vl.PaddleOCRTextModel(
            paddleocr_vl.configuration_paddleocr_vl.PaddleOCRTextConfig(**mrope([2, 3, 3]))
        ), None, sections(T, T, H, H, H, W, W, W),
    ),
    "ERNIE 4.5": lambda: (ernie(), None, sections(H, W, H, W, H, W, T, T)),
    "DINOv3": lambda: (
        hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VISION, image_size=40, num_register_tokens=2)), 100,
        square(10, 0, 100.0, 2 * math.pi * 2 / 10),
    ),
    "DINOv3 of other images": lambda: (
        hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VISION, image_size=40, num_register_tokens=2)), 49,
        square(7, 0, 100.0, 2 * math.pi * 2 / 7),
    ),
    "Llama 4": lambda: (llama4_vision(), 49, square(7, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_by_several_coordinates_is_that_of_its_formula(name, dtype):
    model, length, expected = MODELS[name]()
    buffers = {key: each.clone() for key, each in model.named_buffers()}
    model.to(dtype)
    for key, each in buffers.items():  # as from_pretrained leaves them
        module, _, attribute = key.rpartition(".")
        setattr(model.get_submodule(module), attribute, each)
    before = state(model)
    subject = model if length is None else SequenceModel(model, inputs=identical_patches(4))
    found = RotaryEncoding.from_model(subject, length=length)
    assert found.axes == expected.shape[1]
    torch.testing.assert_close(found.waves[0], expected.float(), rtol=1e-5, atol=1e-8)
    assert same(before, state(model))


def test_an_image_tower_is_not_read_without_images_and_without_their_size():
    model = MODELS["DINOv3"]()[0]
    with pytest.raises((TypeError, ValueError)):
        RotaryEncoding.from_model(model)
    with pytest.raises(ValueError, match="length"):
        RotaryEncoding.from_model(SequenceModel(model, inputs=identical_patches(4)))


def test_two_angles_in_a_pair_are_no_rotation():
    config = hunyuan_vl.configuration_hunyuan_vl.HunYuanVLTextConfig(**mrope([2, 2, 2, 2]))
    with pytest.raises(ValueError, match="HunYuan"):
        RotaryEncoding.from_model(hunyuan_vl.modeling_hunyuan_vl.HunYuanVLTextModel(config))


def test_a_first_token_with_angles_of_its_own_is_refused():
    model = hf.MLCDVisionModel(hf.MLCDVisionConfig(**VISION, image_size=24))
    with pytest.raises(ValueError, match="MLCD"):
        RotaryEncoding.from_model(model, length=36)


def test_bands_that_do_not_turn_are_bands():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
    config = hf.Gemma4TextConfig(**TEXT, **kinds, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    model = gemma4.modeling_gemma4.Gemma4TextModel(config)
    found = RotaryEncoding.from_model(model, layer_type="full_attention")
    torch.testing.assert_close(found.frequencies[0], model.rotary_emb.full_attention_inv_freq, rtol=1e-6, atol=0)
    assert 0 < int((found.frequencies == 0).sum()) < len(found.frequencies[0])


def test_frequencies_are_what_runs_not_what_a_buffer_says():
    model = hf.LlamaModel(hf.LlamaConfig(**TEXT))
    unused = copy.deepcopy(model.rotary_emb)
    own = RotaryEncoding.from_model(model)
    model.first = unused
    unused.inv_freq.mul_(7)
    assert torch.equal(RotaryEncoding.from_model(model).frequencies, own.frequencies)
    model.rotary_emb.inv_freq.mul_(0.5)
    torch.testing.assert_close(RotaryEncoding.from_model(model).frequencies, own.frequencies / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_length_names_one_of_several_rotations(kind):
    special = {"dynamic": {"factor": 4.0}, "longrope": {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}}[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **special}
    model = hf.LlamaModel(hf.LlamaConfig(**TEXT, max_position_embeddings=64, rope_parameters=rope))
    with pytest.raises(ValueError, match="length"):
        RotaryEncoding.from_model(model)
    short, long = (RotaryEncoding.from_model(model, length=length).frequencies[0] for length in (32, 640))
    torch.testing.assert_close(short.double(), torch.tensor(series(16)).double(), rtol=1e-4, atol=1e-7)
    assert bool((long[1:] < short[1:]).all())


def turned(base, angle, pairs):
    """Return states (head, n, d), of which pairs of dimensions are rotated by angles (head, n, band) in float32."""
    out, (a, b) = base.clone(), pairs.T
    cos, sin = angle.float().cos(), angle.float().sin()
    out[..., a], out[..., b] = base[..., a] * cos - base[..., b] * sin, base[..., b] * cos + base[..., a] * sin
    return out.double()


@pytest.mark.parametrize("seed", range(12))
def test_any_rotation_is_found(seed):
    torch.manual_seed(seed)
    axes, heads, d, bands = seed % 3 + 1, (1, 2)[seed % 2], 16, int(torch.randint(1, 9, ()))
    places = torch.tensor(list(itertools.product(*[range(5 + axis) for axis in range(axes)])))
    pairs = torch.randperm(d)[: 2 * bands].view(-1, 2)
    pairs = pairs[pairs.amin(-1).argsort()]
    wave = torch.randn(heads, bands, axes, dtype=torch.float64) * 10 ** (-2 * torch.rand(heads, bands, 1)) / 3
    wave[..., 0] = wave[..., 0].abs() + 1e-3
    base = torch.randn(2 * heads, 1, d).expand(-1, len(places), -1)
    found = rotation_of(turned(base, (places.double() @ wave.mT).repeat(2, 1, 1), pairs), places)
    full = {tuple(pair): each for pair, each in zip(found.pairs.tolist(), found.frequencies.unbind(1), strict=True)}
    for pair, each in zip(pairs.tolist(), wave.unbind(1), strict=True):
        torch.testing.assert_close(full.pop(tuple(pair)), each, rtol=1e-3, atol=1e-5)
    assert not any(map(torch.any, full.values()))


@pytest.mark.parametrize("kind", ["two angles", "shift", "square", "other places"])
def test_what_is_no_rotation_by_the_places_is_refused(kind):
    torch.manual_seed(0)
    places = torch.arange(61)[:, None]
    pairs, base = torch.arange(16).view(2, -1).T, torch.randn(4, 1, 16).expand(-1, 61, -1)
    angle = (places * torch.tensor(series(16)))[None].expand(4, -1, -1)
    states = turned(base, angle, pairs)
    if kind == "two angles":
        states[..., 8:] = turned(base, angle.flip(-1), pairs)[..., 8:]
    elif kind == "shift":
        states = base.double() + torch.randn(16) * places * 0.01
    elif kind == "square":
        states = turned(base, angle**2, pairs)
    else:
        places = places.flip(0).roll(3, 0)
    with pytest.raises(ValueError, match="angle"):
        rotation_of(states, places)


def test_heads_of_nearly_equal_frequencies_are_told_apart():
    torch.manual_seed(0)
    places, pairs = torch.arange(61)[:, None], torch.arange(8).view(2, -1).T
    wave = torch.tensor(series(8)).double()[None, :, None] * torch.tensor([1.0, 1.001])[:, None, None]
    base = torch.randn(4, 1, 8).expand(-1, 61, -1)
    found = rotation_of(turned(base, (places.double() @ wave.mT).repeat(2, 1, 1), pairs), places)
    torch.testing.assert_close(found.frequencies, wave, rtol=1e-4, atol=1e-6)
