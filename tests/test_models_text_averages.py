"""text_average against the mean of attention over texts, computed one text at a time."""

import pytest
import torch
import transformers as hf

from pelocality import metrics
from pelocality.encodings import ALiBi
from pelocality.models import (
    AttentionFunction,
    TextAverage,
    attach,
    layers,
    position_share,
    positional_attention,
    text_average,
)
from tests.families import FAMILIES, offloaded, same, state, tiny, tiny_any, tokens
from tests.test_models_observe import LEARNED_SINKS, with_sinks
from tests.test_models_words import wordpiece

N = 9


def maps_of(model, ids):
    """Return the attention of one text (n,), one layer at a time: (layer, head, n, n)."""
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return torch.cat(model(ids[None], output_attentions=True).attentions)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mean_and_the_metrics_are_those_of_the_texts(name):
    model, ids = tiny(name).train(), tokens(6, N)
    before = state(model)
    result = text_average(model, [{"input_ids": part} for part in ids.split(4)], special_tokens=True)
    assert same(before, state(model))
    maps = torch.stack([maps_of(model.eval(), text) for text in ids]).double()
    torch.testing.assert_close(result.attention, maps.mean(0), rtol=0, atol=1e-7)
    torch.testing.assert_close(result.per_sample["locality"], metrics.locality(maps), rtol=0, atol=1e-7)
    torch.testing.assert_close(metrics.locality(result), result.mean_of_metric.locality, rtol=0, atol=1e-7)
    torch.testing.assert_close(
        result.share, position_share(model, [{"input_ids": ids}], special_tokens=True).share, equal_nan=True
    )
    assert result.source.texts == 6
    assert (result.counts == 6).all()


def test_texts_of_different_lengths_count_where_they_have_a_query():
    model, lengths = tiny("gpt2"), [9, 5, 7]
    texts = [tokens(1, n, seed)[0] for seed, n in enumerate(lengths)]
    result = text_average(model, [{"input_ids": text} for text in texts], special_tokens=True)
    maps = [maps_of(model, text) for text in texts]
    assert result.counts.tolist() == [3] * 5 + [2] * 2 + [1] * 2
    for i in range(9):
        rows = [each[:, :, i] for each, n in zip(maps, lengths, strict=True) if n > i]
        mean = torch.stack([torch.nn.functional.pad(row, (0, 9 - row.shape[-1])) for row in rows]).mean(0)
        torch.testing.assert_close(result.attention[:, :, i], mean)
    by_text = torch.stack([metrics.past_locality(each) for each in maps])
    torch.testing.assert_close(result.per_sample["past_locality"], by_text)
    ids, mask = torch.ones(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, 9 - len(text) :], mask[row, 9 - len(text) :] = text, 1
    padded = text_average(model, [{"input_ids": ids, "attention_mask": mask}], special_tokens=True)
    torch.testing.assert_close(padded.attention, result.attention)
    for name, values in result.per_sample.items():
        torch.testing.assert_close(padded.per_sample[name], values)


@pytest.mark.parametrize("first", [True, False])
def test_layers_that_differ_in_causality_have_the_metrics_that_all_have(first):
    masks = [torch.ones(N, N).tril() > 0, torch.ones(N, N) > 0]
    table = torch.randn(9, N, N, generator=torch.manual_seed(0))

    def function(ids):
        return [table[ids[:, :1]].masked_fill(~mask, -torch.inf).softmax(-1) for mask in masks[:: 1 if first else -1]]

    model, ids = AttentionFunction(function, 9), torch.randint(9, (4, N), generator=torch.manual_seed(0))
    result = text_average(model, [{"input_ids": ids[:3]}, {"input_ids": ids[3:]}], special_tokens=True)
    assert list(result.per_sample) == ["locality", "symmetry", "relative_asymmetry", "cut_share"]
    maps = torch.stack(function(ids), 1)
    torch.testing.assert_close(result.per_sample["locality"].float(), metrics.locality(maps))
    with pytest.raises(ValueError, match="got 'past_locality'"):
        result.interval("past_locality")


def test_an_encoder_with_a_causal_layer_is_averaged_over_texts():
    model = tiny("bert")
    encodings = [ALiBi(2, causal=True), *[ALiBi(2)] * (len(model.encoder.layer) - 1)]
    with attach(model, encodings):
        result = text_average(model, [{"input_ids": tokens(4, N)}], special_tokens=True)
    assert list(result.per_sample) == ["locality", "symmetry", "relative_asymmetry", "cut_share"]
    assert not result.source.causal


def test_special_tokens_are_cut_out_of_the_matrices():
    model = hf.BertModel(hf.BertConfig(**tiny("bert").config.to_dict())).eval()
    ids = torch.tensor([[2, 6, 7, 10, 3], [2, 7, 6, 5, 3]])
    result = text_average(model, [{"input_ids": ids}], tokenizer=wordpiece())
    maps = torch.stack([maps_of(model, text) for text in ids]).double()
    kept = maps[..., 1:4, 1:4]
    torch.testing.assert_close(result.attention, (kept / kept.sum(-1, keepdim=True)).mean(0))
    torch.testing.assert_close(result.per_sample["cut_share"], 1 - kept.sum(-1).mean(-1))
    with pytest.raises(ValueError, match="special tokens between its words"):
        text_average(model, [{"input_ids": torch.tensor([[2, 6, 3, 7, 3]])}], tokenizer=wordpiece())


def test_a_position_between_others_that_no_text_has_is_refused():
    special = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    text = {"input_ids": tokens(2, 7), "special_tokens_mask": special}
    with pytest.raises(ValueError, match="no text has a token to measure at position 3, between 0 and 6"):
        text_average(tiny("bert"), [text])
    special[1, 3] = 0
    assert text_average(tiny("bert"), [text]).attention.isfinite().all()


@pytest.mark.parametrize("name", LEARNED_SINKS)
def test_learned_sinks_are_set_apart(name):
    model, ids = with_sinks(name), tokens(4, N)
    result = text_average(model, [{"input_ids": ids}], special_tokens=True)
    maps = torch.stack([maps_of(model, text) for text in ids]).double()
    torch.testing.assert_close(result.attention, (maps / maps.sum(-1, keepdim=True)).mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.per_sample["learned_sink"], 1 - maps.sum(-1).mean(-1), rtol=0, atol=1e-6)
    nearness = 2.0 ** -(torch.arange(N)[:, None] - torch.arange(N)).abs()
    found = result.per_sample["locality_with_sink"]
    torch.testing.assert_close(found, (maps * nearness).sum(-1).mean(-1), rtol=0, atol=1e-6)


def test_only_the_first_positions_are_measured():
    model, ids = tiny("gpt2"), tokens(3, N)
    result = text_average(model, [{"input_ids": ids}], special_tokens=True, length=4)
    maps = torch.stack([maps_of(model, text) for text in ids])[..., :4, :4]
    torch.testing.assert_close(result.attention, maps.mean(0))


def test_layers_have_the_models_numbers():
    text = [{"input_ids": tokens(3, N)}]
    result = text_average(tiny_any("jamba"), text, special_tokens=True, layers=[-1])
    assert result.layers == (3,)
    assert result.other_layers == {0: "linear_attention", 2: "linear_attention"}
    with pytest.raises(ValueError, match=r"layers holds \[0\], which have no attention"):
        text_average(tiny_any("jamba"), text, special_tokens=True, layers=[0])


def test_a_frame_has_the_position_share_and_the_repr_too():
    result = text_average(tiny("gpt2"), [{"input_ids": tokens(4, N)}], special_tokens=True)
    frame = result.to_frame()
    torch.testing.assert_close(torch.tensor(frame["position_share"]), result.share.flatten())
    assert {"past_locality_low", "sink_rate"} <= set(frame.columns)
    lines = repr(result).splitlines()
    assert lines[0] == "TextAverage of GPT2Model: 3 layers x 2 heads, n = 9, mean over 4 texts, special tokens counted"
    assert "position share" in lines[1]


def test_saving_and_loading_gives_the_same_result(tmp_path):
    result = text_average(tiny("gpt2"), [{"input_ids": tokens(4, N)}], special_tokens=True)
    result.save(tmp_path / "text.safetensors")
    loaded = TextAverage.load(tmp_path / "text.safetensors")
    assert loaded.to_frame().equals(result.to_frame())
    assert loaded.source == result.source
    assert torch.equal(loaded.counts, result.counts)


def test_one_text_has_no_share_and_too_short_texts_are_refused():
    model = tiny("gpt2")
    one = text_average(model, [{"input_ids": tokens(1, N)}, {"input_ids": tokens(1, 2)}], special_tokens=True)
    assert one.per_sample["locality"].shape == (1, 3, 2)
    assert one.source.texts == 2
    with pytest.raises(ValueError, match=r"with length=.* and without_first=.* no text has 3 tokens"):
        text_average(model, [{"input_ids": tokens(4, 2)}], special_tokens=True)
    with pytest.raises(ValueError, match="texts is empty"):
        text_average(model, [], special_tokens=True)


def test_text_of_one_word_gives_what_identical_words_give():
    model = tiny("bert")
    text = [{"input_ids": torch.full((1, N), word)} for word in (7, 9)]
    found = text_average(model, text, special_tokens=True)
    torch.testing.assert_close(found.attention, positional_attention(model, length=N, words=[7, 9]).attention)


def test_the_first_tokens_of_texts_can_be_left_out():
    model, ids = tiny("gpt2"), tokens(5, N)
    text = [{"input_ids": ids}]
    result = text_average(model, text, special_tokens=True, without_first=2)
    maps = torch.stack([maps_of(model, one) for one in ids])
    torch.testing.assert_close(result.attention, metrics.crop(maps, 2).mean(0))
    torch.testing.assert_close(
        result.share, position_share(model, text, special_tokens=True, without_first=2).share, equal_nan=True
    )
    assert not torch.allclose(result.share, text_average(model, text, special_tokens=True).share)
    with pytest.raises(ValueError, match="without_first must be at least 0"):
        text_average(model, text, special_tokens=True, without_first=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_offloaded_models_are_measured_where_they_run(name):
    text = [{"input_ids": tokens(2, N, seed)} for seed in range(2)]
    expected, moved = text_average(tiny(name), text, special_tokens=True), offloaded(tiny(name))
    torch.testing.assert_close(text_average(moved, text, special_tokens=True).attention, expected.attention)
    found = position_share(moved, text, special_tokens=True)
    torch.testing.assert_close(found.share, expected.share, equal_nan=True)
    assert all(weight.is_meta for weight in moved.parameters())


def test_rows_of_several_texts_are_refused():
    model, ids = tiny("gpt2"), tokens(2, N)
    expected = text_average(model, [{"input_ids": ids}], special_tokens=True).attention
    positions = torch.arange(N)[None]
    found = text_average(model, [{"input_ids": ids, "position_ids": positions}], special_tokens=True)
    torch.testing.assert_close(found.attention, expected)
    padded = {"input_ids": torch.nn.functional.pad(ids, (2, 0)), "position_ids": torch.tensor([[1, 1, *range(N)]] * 2)}
    padded["attention_mask"] = torch.nn.functional.pad(torch.ones_like(ids), (2, 0))
    torch.testing.assert_close(text_average(model, [padded], special_tokens=True).attention, expected)
    packed = {"input_ids": ids.reshape(1, -1), "position_ids": torch.cat([positions, positions], 1)}
    for function in (text_average, position_share):
        with pytest.raises(ValueError, match="rows of several texts cannot be read; give one text a row"):
            function(model, [packed], special_tokens=True)
    three_axes = {"input_ids": ids, "position_ids": positions.expand(3, 2, N)}
    torch.testing.assert_close(text_average(model, [three_axes], special_tokens=True).attention, expected)
    with pytest.raises(ValueError, match=r"position_ids must have the shape of input_ids \(2, 9\), got \(1, 4\)"):
        text_average(model, [{"input_ids": ids, "position_ids": positions[:, :4]}], special_tokens=True)


def test_ids_outside_the_vocabulary_are_named_in_every_batch():
    text = [{"input_ids": tokens(2, 6)}, {"input_ids": torch.full((1, 6), 97)}]
    with pytest.raises(ValueError, match=r"input_ids must be in 0\.\.96.* got 97"):
        text_average(tiny("bert"), text, special_tokens=True)


@pytest.mark.parametrize("lengths", [(12, 8), (12, 7), (8, 12), (6, 1, 5)])
@pytest.mark.parametrize("name", ["switch_transformers", "bart decoder"])
def test_texts_of_other_lengths_have_the_metrics_that_they_have_alone(name, lengths):
    """A router over eight experts looks like attention to eight tokens, cross-attention to one key like that of one."""
    torch.manual_seed(0)
    if name == "bart decoder":
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 2}
        config = hf.BartConfig(
            vocab_size=97, encoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes
        )
        model = hf.BartModel(config).decoder
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "num_experts": 8}
        sizes |= {"num_sparse_encoder_layers": 1}
        model = hf.SwitchTransformersEncoderModel(hf.SwitchTransformersConfig(vocab_size=97, **sizes))
    text = [{"input_ids": tokens(2, length)} for length in lengths]
    together = text_average(model.eval(), text, special_tokens=True).per_sample["locality"]
    alone = [
        text_average(model, [one], special_tokens=True).per_sample for one in text if one["input_ids"].shape[1] > 1
    ]
    torch.testing.assert_close(together, torch.cat([each["locality"] for each in alone]), rtol=0, atol=0)


def test_texts_of_unequal_lengths_are_noted_where_the_mean_leans_to_the_left():
    uniform = AttentionFunction(lambda ids: [torch.zeros(len(ids), 1, *[ids.shape[1]] * 2).softmax(-1)], 97)
    for model, lengths, leans in ((uniform, (8, 16), True), (uniform, (8, 8), False), (tiny("gpt2"), (8, 16), False)):
        result = text_average(model, [{"input_ids": tokens(2, n)} for n in lengths], special_tokens=True)
        assert any("lean to the left" in note for note in result.notes) is leans
        assert ("lean to the left" in repr(result)) is leans
        unequal = lengths != (8, 8)
        assert any("8 to 16 tokens, with which most metrics change" in note for note in result.notes) is unequal
        assert ("n = 8 to 16" in repr(result)) is unequal
    mixed = text_average(uniform, [{"input_ids": tokens(2, n)} for n in (8, 16)], special_tokens=True)
    assert (metrics.direction_balance(mixed) < -0.1).all()
    cut = text_average(uniform, [{"input_ids": tokens(2, n)} for n in (8, 16)], special_tokens=True, length=8)
    torch.testing.assert_close(metrics.direction_balance(cut), torch.zeros(1, 1).double())


def test_a_text_that_a_model_cannot_run_is_refused_with_its_reason(monkeypatch):
    model = tiny("bert")
    run = type(model).forward

    def forward(self, input_ids=None, **options):
        if input_ids.shape[1] > 8:
            raise RuntimeError("too long for me")
        return run(self, input_ids, **options)

    monkeypatch.setattr(type(model), "forward", forward)
    for beginning in (500, 6):
        monkeypatch.setattr(layers, "_BEGINNING", beginning)
        with pytest.raises(
            ValueError, match=r"cannot be probed: on [12] x 9 tokens it fails with RuntimeError: too long for"
        ):
            text_average(model, [{"input_ids": tokens(2, n)} for n in (7, 9)], special_tokens=True)
