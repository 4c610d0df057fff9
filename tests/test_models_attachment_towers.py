"""Rotations of image towers, replaced: against the formula of each model with other frequencies, on several images."""

import copy
import itertools

import pytest
import torch
import transformers as hf
from transformers.models import gemma4, llama4, qwen2_5_vl, qwen2_vl, qwen3_vl

from pelocality.encodings import ALiBi, DisplacementTable, NoEncoding, PositionedEncoding, RotaryEncoding
from pelocality.models import SequenceModel, attach, load
from pelocality.positions import Positions
from tests.families import same, spread, state
from tests.test_models_attachment_rotation import of_images

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}


def grid(rows, columns, block=1):
    """Return the coordinates of patches, block by block."""
    blocks = itertools.product(range(0, rows, block), range(0, columns, block), range(block), range(block))
    return torch.tensor([(r + y, c + x) for r, c, y, x in blocks])


def halves(angle):
    angle = torch.cat([angle, angle], -1)
    return angle.cos().float(), angle.sin().float()


def dinov3():
    model = hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VISION, image_size=24, num_register_tokens=2))
    places = 6 * ((grid(10, 6) + 0.5) / torch.tensor([10.0, 6.0]) - 0.5)  # in patches of an image of 6 x 6
    batch = {"pixel_values": torch.randn(2, 3, 40, 24)}
    return model, None, batch, model.rope_embeddings, lambda waves: lambda pixels: halves(places.double() @ waves.mT)


def pixtral():
    model = hf.PixtralVisionModel(hf.PixtralVisionConfig(**VISION, image_size=24))
    batch = {"pixel_values": torch.randn(2, 3, 40, 40), "image_sizes": torch.tensor([[40, 24], [20, 40]])}
    return model, None, batch, model.patch_positional_embedding, by_ids


def llama4_vision():
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 1.0}
    config = hf.Llama4VisionConfig(**VISION | {"intermediate_size": 32}, image_size=24, **sizes)
    model = llama4.modeling_llama4.Llama4VisionModel(config)

    def angles(waves):
        angle = torch.cat([(grid(6, 6) + 1.0).double() @ waves.mT, torch.zeros(1, len(waves))])[:, None]  # then [CLS]
        return lambda states: torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    return model, None, {"pixel_values": torch.randn(2, 3, 24, 24)}, model.rotary_embedding, angles


def gemma4_vision():
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 3, "position_embedding_size": 64}
    model = gemma4.modeling_gemma4.Gemma4VisionModel(hf.Gemma4VisionConfig(**VISION, **sizes))

    def content(sample, length):
        noise = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(sample))
        return {"pixel_values": noise.repeat(1, length, 1), "pixel_position_ids": grid(6, 6)[None]}

    def angles(waves):
        def forward(states, position_ids):
            rows, columns = (position_ids.double() @ waves.mT).chunk(2, -1)
            angle = torch.cat([rows, rows, columns, columns], -1)
            return angle.cos().float(), angle.sin().float()

        return forward

    ids = torch.stack([grid(9, 6), grid(6, 9)])
    batch = {"pixel_values": torch.randn(2, 54, 48), "pixel_position_ids": ids}
    subject = SequenceModel(model, inputs=content, positions=grid(6, 6))
    return model, subject, batch, model.encoder.rotary_emb, angles


def qwen(model, order=slice(None)):
    def content(sample, length):
        noise = torch.randn(1, 96, generator=torch.Generator().manual_seed(sample))
        return {"hidden_states": noise.repeat(length, 1), "grid_thw": torch.tensor([[1, 6, 6]])}

    batch = {"hidden_states": torch.randn(48, 96), "grid_thw": torch.tensor([[1, 4, 6], [1, 6, 4]])}
    subject = SequenceModel(model, inputs=content, positions=grid(6, 6, block=2)[order])
    return model, subject, batch, model.rotary_pos_emb, by_ids


def by_ids(waves):
    return lambda states, position_ids: halves(position_ids.double() @ waves.mT)


def qwen2():
    config = hf.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(embed_dim=32, mlp_ratio=2, **QWEN)
    return qwen(qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config))


def qwen2_5():  # the first layer has windows of 4 x 4 patches, by which tokens are ordered in both layers
    config = qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        window_size=16, fullatt_block_indexes=[1], **QWEN
    )
    blocks = torch.arange(36).view(3, 3, 4)
    windows = [
        blocks[rows, columns].flatten() for rows in (slice(2), slice(2, 3)) for columns in (slice(2), slice(2, 3))
    ]
    model = qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config)
    return qwen(model, torch.cat(windows))


def qwen3():
    config = qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig(
        num_position_embeddings=64, deepstack_visual_indexes=[], **QWEN
    )
    return qwen(qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel(config))


TOWERS = [dinov3, pixtral, llama4_vision, gemma4_vision, qwen2, qwen2_5, qwen3]
WAYS = [*((tower, "sdpa") for tower in TOWERS), (dinov3, "eager"), (qwen2_5, "eager")]


def made(tower):
    torch.manual_seed(0)
    model, subject, batch, *others = tower()
    batch = {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
    return spread(model), subject or SequenceModel(model), batch, *others


def run(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state


@pytest.mark.parametrize(("tower", "way"), WAYS)
def test_frequencies_of_each_axis_are_those_of_the_formula(tower, way):
    model, subject, batch, rotary, angles = made(tower)
    model.set_attn_implementation(way)
    own, before, plain = RotaryEncoding.from_model(subject, length=36), state(model), run(model, batch)
    for changed in (own, own.scaled(0.5, axis=0).without(fastest=0.3, axis=1)):
        rotary.forward = angles(changed.waves[0].double())
        expected = run(model, batch)
        del rotary.forward
        with attach(subject, changed):
            torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(run(model, batch), plain)
    assert not torch.allclose(expected, plain, atol=1e-3)
    assert same(before, state(model))


@pytest.mark.parametrize("tower", [dinov3, qwen2_5])
def test_frequencies_of_a_tower_are_learned_measured_and_loaded(tower, tmp_path):
    model, subject, batch, *_ = made(tower)
    own = RotaryEncoding.from_model(subject, length=36)
    learned = RotaryEncoding(own.dim, 2, frequencies=own.frequencies, axes=2, learnable=True, length=own.length)
    with attach(subject, learned.scaled(0.5, axis=1)) as attachment:
        model(**batch).last_hidden_state.square().mean().backward()
        assert all(each.free_frequencies.grad.any((0, 1)).all() for each in attachment.encodings)
        expected = run(copy.deepcopy(model), batch)
        model.save_pretrained(tmp_path)
        attachment.save(tmp_path / "alone")
    for loaded in (load(tmp_path, dtype=torch.float64), load(tmp_path / "alone", model)):
        torch.testing.assert_close(run(loaded, batch), expected, atol=1e-5, rtol=1e-5)
    read = RotaryEncoding.from_model(subject, length=36).frequencies
    torch.testing.assert_close(read, own.scaled(0.5, axis=1).frequencies)


def test_frequencies_of_other_sizes_of_images_and_of_half_precision():
    model, _, batch, *_ = made(dinov3)
    halved, own = copy.deepcopy(model).bfloat16(), RotaryEncoding.from_model(SequenceModel(model), length=36)
    for each in (model, halved):
        plain = run(each, {"pixel_values": batch["pixel_values"].to(each.dtype)})
        with attach(each, RotaryEncoding.from_model(SequenceModel(each), length=100)):
            rotated = run(each, {"pixel_values": batch["pixel_values"].to(each.dtype)})
        off = (rotated - plain).abs().max() / plain.abs().max()
        assert off < (1e-5 if each is model else 0.1)
    with attach(model, own.scaled(0.5), layers=[1]):
        model.rope_embeddings.forward = lambda pixels: halves(torch.randn(60, 8))
        with pytest.raises(ValueError, match="angles"):
            run(model, batch)


def test_a_tower_takes_frequencies_of_its_axes_read_at_one_length():
    model, subject, *_ = made(dinov3)
    own = RotaryEncoding.from_model(subject, length=36)
    other = RotaryEncoding(own.dim, frequencies=own.frequencies, axes=2, length=49)
    line = RotaryEncoding(own.dim, frequencies=own.frequencies.sum(-1))
    for encoding, name in ((line, "axes"), ([own, other], "length"), (RotaryEncoding(8), "dim")):
        with pytest.raises(ValueError, match=name):
            attach(model, encoding)


@pytest.mark.parametrize(("tower", "before", "block"), [(dinov3, 3, 1), (qwen2, 0, 2)])
def test_a_bias_by_axis_takes_the_place_of_the_rotation(tower, before, block):
    model, subject, _, rotary, _ = made(tower)
    noise = {name: torch.randn_like(x) if x.is_floating_point() else x for name, x in subject.content(0, 36).items()}
    places = Positions(grid(6, 6, block=block) * torch.tensor([1.0, 0.25]), before=before)  # columns decay less
    table = DisplacementTable(2, places)
    torch.nn.init.normal_(table.values)

    def first_weights():
        seen = []
        subject.watch(noise, lambda attention: seen.append(attention.weights.double()), None)
        return seen[0]

    plain = run(model, noise)
    rotary.forward = lambda *call: halves(torch.zeros(36, 8))
    logits = first_weights().log()
    del rotary.forward
    for encoding in (PositionedEncoding(ALiBi(2, slopes=[0.5, 2.0]), places), table):
        with attach(subject, encoding):
            expected = (logits + encoding(36 + before)).softmax(-1)
            torch.testing.assert_close(first_weights(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(run(model, noise), plain)


def test_a_tower_with_a_table_beside_its_rotation_takes_a_bias_if_the_table_is_named():
    model, subject, *_ = made(llama4_vision)
    with pytest.raises(ValueError, match="disable"):
        attach(model, NoEncoding())
    with attach(model, NoEncoding(), disable=["positional_embedding_vlm"]):
        assert subject.equal_states(subject.content(0, 36), slice(0, 36))
    assert not subject.equal_states(subject.content(0, 36), slice(0, 36))


def test_a_table_of_kinds_and_axes_is_a_bias_between_text_and_images():
    model, inputs = of_images()
    inputs = {name: each[:1] for name, each in inputs.items()} | {"pixel_values": inputs["pixel_values"][:24].double()}
    places = model.model.get_rope_index(
        *(inputs[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw"))
    )
    kinds = (inputs["input_ids"][0] == 97)[:, None]
    table = DisplacementTable(4, Positions(torch.cat([kinds, places[0][:, 0].T], 1).double()))
    torch.nn.init.normal_(table.values)
    first = []
    for encoding in (NoEncoding(), table):
        with attach(model, encoding):
            model.set_attn_implementation("eager")
            first.append(model(**inputs, output_attentions=True).attentions[0].double())
    expected = (first[0].log() + table(16)).softmax(-1)
    torch.testing.assert_close(first[1], expected, atol=1e-6, rtol=1e-5)
