"""Texts of models whose rotations depend on the longest text of a batch: a text is measured as it is alone."""

import pytest
import torch
import transformers as hf

from pelocality.models import position_share, positional_attention, reflection_gap, text_average
from tests.families import same, small, spread, state, tokens

_GROUPED = {"num_key_value_heads": 1, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "dynamic": lambda: hf.LlamaModel(
        small(hf.LlamaConfig, max_position_embeddings=16, rope_parameters=DYNAMIC, **_GROUPED)
    ),
    "longrope": lambda: hf.Phi3Model(
        small(
            hf.Phi3Config,
            max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=LONG,
            **_GROUPED,
        )
    ),
    "dynamic in some layers": lambda: hf.Gemma3TextModel(
        small(
            hf.Gemma3TextConfig,
            head_dim=8,
            max_position_embeddings=16,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": DYNAMIC,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **_GROUPED,
        )
    ),
}
LENGTHS = [10, 40, 30, 30, 12]


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spread(MODELS[name]())


def texts():
    return [tokens(1, n, seed)[0] for seed, n in enumerate(LENGTHS)]


def padded(side):
    ids, mask = torch.zeros(len(LENGTHS), 40, dtype=torch.long), torch.zeros(len(LENGTHS), 40, dtype=torch.long)
    for row, text in enumerate(texts()):
        where = slice(40 - len(text), 40) if side == "left" else slice(0, len(text))
        ids[row, where], mask[row, where] = text, 1
    return [{"input_ids": ids, "attention_mask": mask}]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_does_not_depend_on_the_texts_of_its_batch(name, side):
    model = build(name)
    before = state(model)
    alone = [text_average(model, [{"input_ids": text}], special_tokens=True) for text in texts()]
    together = text_average(model, padded(side), special_tokens=True)
    assert same(before, state(model))
    for metric, values in together.per_sample.items():
        torch.testing.assert_close(values, torch.cat([each.per_sample[metric] for each in alone]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        together.attention[..., -1, :], alone[1].attention[..., -1, :], rtol=0, atol=1e-6
    )  # the only text of 40 tokens
    gaps = torch.cat([reflection_gap(model, text) for text in texts()])
    torch.testing.assert_close(reflection_gap(model, **padded(side)[0]), gaps)
    share = position_share(model, [{"input_ids": text} for text in texts()], special_tokens=True).share
    torch.testing.assert_close(position_share(model, padded(side), special_tokens=True).share, share)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_does_not_depend_on_what_the_model_read_before(name):
    model, used = build(name), build(name)
    with torch.no_grad():
        used(tokens(1, 60))
    cached = {key: value for key, value in vars(used.rotary_emb).items() if "seq_len_cached" in key}
    frequencies = {key: value.clone() for key, value in used.rotary_emb.named_buffers()}
    text = [{"input_ids": tokens(2, 30)}]
    expected = text_average(model, text, special_tokens=True)
    torch.testing.assert_close(text_average(used, text, special_tokens=True).attention, expected.attention)
    words = {"length": 30, "words": [7, 8], "progress": False}
    torch.testing.assert_close(
        positional_attention(used, **words).attention, positional_attention(model, **words).attention
    )
    assert cached == {key: value for key, value in vars(used.rotary_emb).items() if "seq_len_cached" in key}
    if name != "longrope":  # whose frequencies are chosen anew in every call
        for key, value in used.rotary_emb.named_buffers():
            assert torch.equal(value, frequencies[key])


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_texts_of_equal_length_are_still_run_together(name, monkeypatch):
    model, sizes = build(name), []
    forward = model.forward

    def record(*arguments, **inputs):
        sizes.append(tuple(inputs["input_ids"].shape))
        return forward(*arguments, **inputs)

    monkeypatch.setattr(model, "forward", record)
    text_average(model, padded("left"), special_tokens=True)
    assert sizes[1:] == [(1, 10), (1, 40), (2, 30), (1, 12)]  # after the run that finds the layers
