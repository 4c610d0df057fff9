"""Models of images and text: measured whole, at the position ids by which they rotate."""

import copy

import pytest
import torch
import transformers as hf

from pelocality import SequenceModel, metrics, plots, text_average
from pelocality.models import AveragedMetrics, head_classes, influence
from tests.families import same, spread, state

IMAGE, START = 97, 95
TEXT = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SIDES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, **SIDES}
QWEN3 = TOWER | {"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
PADDLE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PADDLE |= {"image_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}
MIXTURE = {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2, "mlp_layer_types": ["dense", "sparse"]}
IDS = {"image_token_id": IMAGE, "video_token_id": 96}
QWEN = IDS | {"vision_start_token_id": START, "vision_end_token_id": 94}
GLM = IDS | {"image_start_token_id": START, "image_end_token_id": 94, "video_start_token_id": 93}
GLM |= {"video_end_token_id": 92}


def text(*section, **more):
    return TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}} | more


# the configuration of the text, that of images, the ids of tokens, and the numbers of a patch
FAMILIES = {
    "Qwen2VL": (text(2, 3, 3), {"depth": 1, "embed_dim": 32, "hidden_size": 32, **SIDES}, QWEN, (96,)),
    "Qwen2_5_VL": (text(2, 3, 3), TOWER | {"out_hidden_size": 32, "window_size": 400}, QWEN, (96,)),
    "Qwen3VL": (text(3, 3, 2, head_dim=16), QWEN3, QWEN, (96,)),
    "Glm4v": (text(2, 3, 3), TOWER | {"out_hidden_size": 32, "image_size": 32}, GLM, (96,)),
    "Ernie4_5_VLMoe": (text(3, 3, 2, **MIXTURE), TOWER, GLM, (48,)),
    "PaddleOCRVL": (text(2, 3, 3, head_dim=16), PADDLE, QWEN, (3, 4, 4)),
}


def model_of(name):
    torch.manual_seed(0)
    of_text, of_images, ids, _ = FAMILIES[name]
    config = getattr(hf, f"{name}Config")(text_config=of_text, vision_config=of_images, **ids)
    return spread(getattr(hf, f"{name}ForConditionalGeneration")(config)).eval()


def texts(name, *rows, n=16, padding=0):
    """Return a batch with images in each row, by the place of their first token, of h x w patches in blocks of four.

    The last row has padding on the left.
    """
    ids, grids = torch.arange(5, 5 + n * len(rows)).view(-1, n) % 80 + 5, []
    for row, images in enumerate(rows):
        for place, (h, w) in images.items():
            ids[row, place - 1], ids[row, place : place + h * w // 4] = START, IMAGE
            grids.append([1, h, w])
    ids[-1, :padding] = 0
    patches = sum(h * w for _, h, w in grids)
    pixels = torch.randn(patches, *FAMILIES[name][-1], generator=torch.Generator().manual_seed(n)).double()
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor(grids),
    }


def own_ids(model, batch):
    """Return the model's own position ids, (batch, n, 3)."""
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    return model.model.get_rope_index(**{name: batch[name] for name in names})[0].movedim(0, -1)


def attention_and_places(model, batch):
    """Yield the attention (layer, head, n, n) of each text without padding, in steps, and the places of its tokens."""
    model = copy.deepcopy(model).float()  # in float64 the rows of padding are NaN in steps, and so is their text
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = torch.stack(model.model(**batch, output_attentions=True).attentions, 1).double()
    for weights, places, mask in zip(attention, own_ids(model, batch), batch["attention_mask"].bool(), strict=True):
        yield weights[..., mask, :][..., mask], places[mask].tolist()


def far(x, y):
    return max(abs(a - b) for a, b in zip(x, y, strict=True))


def mean_over_pairs(matrix, places, of_distance):
    return sum(matrix[i, j] * of_distance(far(x, y)) for i, x in enumerate(places) for j, y in enumerate(places)) / len(
        places
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_with_images_are_measured_at_the_positions_of_the_model(name):
    model, batch = model_of(name), texts(name, {4: (4, 6)}, {6: (6, 4)}, padding=2)
    before = state(model.train())
    result = text_average(model, [batch], special_tokens=True)
    assert (model.training, model.model.rope_deltas) == (True, None)
    assert same(before, state(model))
    assert isinstance(result, AveragedMetrics)
    assert (result.source.layouts, result.source.causal) == (2, True)
    for row, (weights, places) in enumerate(attention_and_places(model.eval(), batch)):
        for metric, of in (("locality", lambda d: 2.0**-d), ("mean_distance", lambda d: d)):
            own = [[mean_over_pairs(head, places, of) for head in layer] for layer in weights]
            torch.testing.assert_close(result.per_sample[metric][row], torch.tensor(own), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="one layout"):
        metrics.locality(result)
    assert not any("of_mean" in name or "past" in name for name in result.to_frame())


def test_texts_of_one_layout_have_a_mean_at_its_positions(tmp_path):
    model = model_of("Qwen2VL")
    known = SequenceModel(model)
    batches = [texts("Qwen2VL", {3: (4, 6), 13: (4, 4)}, n=length) for length in (24, 20)]
    result = text_average(known, batches, special_tokens=True)
    longest = own_ids(model, batches[0])[0]
    assert torch.equal(result.positions.keys, longest)
    assert result.counts.tolist() == [2] * 20 + [1] * 4
    (weights, places), *_ = attention_and_places(model, batches[0])
    own = [[mean_over_pairs(head, places, lambda d: 2.0**-d) for head in layer] for layer in weights]
    torch.testing.assert_close(result.per_sample["locality"][0], torch.tensor(own), rtol=0, atol=1e-5)
    expected = metrics.mean_distance(result.attention, positions=result.positions)
    torch.testing.assert_close(metrics.mean_distance(result), expected)
    result.save(tmp_path / "images.safetensors")
    again = type(result).load(tmp_path / "images.safetensors")
    torch.testing.assert_close(metrics.mean_distance(again), expected)
    axes = plots.profiles(result)[1]
    assert axes.lines[0].get_xdata()[:3].tolist() == [0, 1, 2]  # steps of text and patches are 1
    given = SequenceModel(model, positions=torch.arange(20) / 2)
    assert text_average(given, batches[1:], special_tokens=True).positions.dimensions == 1
    cut = text_average(known, batches, special_tokens=True, length=12, without_first=2)
    assert torch.equal(cut.positions.keys, longest[2:12])
    assert text_average(known, [*batches, batches[0]], special_tokens=True).source.repeated == 1
    moved = batches[0] | {"position_ids": longest.T[:, None] * 2}
    assert torch.equal(text_average(known, [moved], special_tokens=True).positions.keys, 2 * longest)
    with pytest.raises(ValueError, match="matrices"):
        text_average(known, batches, special_tokens=True, matrices=False)


def test_texts_without_images_are_measured_as_by_the_language_model():
    model = model_of("Qwen3VL")
    alone = {"input_ids": torch.arange(10, 34).view(2, 12)}
    expected = text_average(model.model.language_model, [alone], special_tokens=True)
    for of_text in ({}, {"mm_token_type_ids": torch.zeros(2, 12, dtype=torch.int)}):
        result = text_average(model, [alone | of_text], special_tokens=True)
        assert result.positions is None
        assert torch.equal(result.attention, expected.attention)
        assert all(torch.equal(each, expected.per_sample[name]) for name, each in result.per_sample.items())
    images = texts("Qwen3VL", {4: (4, 6)})
    both = text_average(model, [images, alone], special_tokens=True)
    for name, values in both.per_sample.items():
        torch.testing.assert_close(values[1:], expected.per_sample[name])


def test_influence_and_head_scores_of_texts_with_images():
    model, batch = model_of("Qwen2VL"), texts("Qwen2VL", {2: (4, 4)}, {4: (2, 6)}, n=10, padding=1)
    known, language, calls, layers = SequenceModel(model), model.model.language_model, [], []
    result = influence(known, [batch], special_tokens=True, directions=32)
    heads = head_classes(known, texts=[batch], special_tokens=True, length=10, sequences=2)
    language.register_forward_pre_hook(lambda module, args, call: calls.append(call), with_kwargs=True)
    language.layers[1].register_forward_hook(lambda module, args, states: layers.append(states))
    with torch.no_grad():
        model(**batch, use_cache=False)

    def run(states):
        language(**calls[0] | {"inputs_embeds": states})
        return layers.pop()

    jacobian = torch.autograd.functional.jacobian(run, calls[0]["inputs_embeds"], vectorize=True)
    for row, (weights, places) in enumerate(attention_and_places(model, batch)):
        mask = batch["attention_mask"][row].bool()
        squares = jacobian[row, :, :, row].square().sum((1, 3))[mask][:, mask].double()
        own = mean_over_pairs(squares / squares.sum(-1, keepdim=True), places, lambda d: 2.0**-d)
        assert abs(float(result.per_sample["locality"][row, 1, 0] - own)) < 1e-5
        pairs = [
            (i, places.index([each - 1 for each in x]))
            for i, x in enumerate(places)
            if min(x) > 1 and [each - 1 for each in x] in places
        ]
        previous = torch.stack([weights[..., i, j] for i, j in pairs]).mean(0)
        torch.testing.assert_close(heads.per_sample["previous"][row], previous, rtol=0, atol=1e-5)
    assert heads.scores["positional"].isnan().all()
    assert any("images" in note for note in heads.notes)


def test_images_on_a_line_may_see_later_patches_of_theirs():
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Gemma3Config(
        text_config=TEXT | {"head_dim": 16}, vision_config=vision | {"image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4, image_token_index=IMAGE,
    )  # fmt: skip
    model = spread(hf.Gemma3ForConditionalGeneration(config)).eval()
    ids = torch.arange(10, 22)[None]
    ids[0, 4:8] = IMAGE
    types = (ids == IMAGE).long()
    batch = {"input_ids": ids, "token_type_ids": types, "pixel_values": torch.randn(1, 3, 16, 16).double()}
    result = text_average(model, [batch], special_tokens=True)
    assert (result.positions, result.source.causal) == (None, False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat(model.model(**batch, output_attentions=True).attentions)
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-6)
    assert expected[:, :, 4, 7].min() > 0
