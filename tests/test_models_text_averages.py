"""text_average against the mean of attention and the share of position, computed one text at a time."""

import math

import pandas as pd
import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import metrics
from pelocality.models import AttentionFunction, TextAverage, layers, positional_attention, text_average
from tests.families import FAMILIES, base_of, offloaded, same, state, tiny, tokens
from tests.test_models_observe import LEARNED_SINKS, with_sinks
from tests.test_models_words import byte_level, wordpiece

N = 9


def maps_of(model, ids):
    """Return the attention of one text (n,), one layer at a time: (layer, head, n, n)."""
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return torch.cat(model(ids[None], output_attentions=True).attentions)


def averaged(matrices, visible=None):
    """Return the average of a function that gives attention matrices (text, n, n) to as many texts."""
    n = matrices.shape[-1]
    ids = nn.functional.pad(torch.arange(len(matrices))[:, None], (0, n - 1))
    special = torch.zeros_like(ids) if visible is None else 1 - visible.diagonal(dim1=-2, dim2=-1).long()
    model = AttentionFunction(lambda ids: [matrices[ids[:, 0]][:, None]], len(matrices))
    return text_average(model, [{"input_ids": ids, "special_tokens_mask": special}])


def share_of(matrices):
    """Return the share of attention matrices (text, n, n) over all tokens."""
    return float(averaged(matrices).share)


def slow_share(matrices, masks):
    """Compute the definition: predict every sentence from the others, one entry at a time."""
    error = squares = 0.0
    n = matrices.shape[-1]
    deviations = []
    for matrix, mask in zip(matrices, masks, strict=True):
        seen = {}
        for i in range(n):
            keys = [j for j in range(n) if mask[i, j]]
            total = sum(float(matrix[i, j]) for j in keys)
            for j in keys:
                seen[i, j] = float(matrix[i, j]) / total - 1 / len(keys)
        deviations.append(seen)
    for i in range(n):
        for j in range(n):
            values = [seen[i, j] for seen in deviations if (i, j) in seen]
            if len(values) < 2:
                continue
            for index, value in enumerate(values):
                others = values[:index] + values[index + 1 :]
                error += (value - sum(others) / len(others)) ** 2
                squares += value**2
    return 1 - error / squares


def test_attention_by_position_alone_has_share_one():
    matrix = torch.randn(N, N, dtype=torch.float64).softmax(-1)
    assert share_of(matrix.expand(5, N, N)) == pytest.approx(1)


def test_attention_that_ignores_position_has_share_minus_one_over_the_others():
    torch.manual_seed(0)
    for sentences in (3, 10, 100):
        content = torch.randn(sentences, 40, 40, dtype=torch.float64).softmax(-1)
        assert share_of(content) == pytest.approx(-1 / (sentences - 1), abs=0.01)


def test_a_mixture_has_the_share_of_its_variance():
    """D = position + independent noise of the same variance: half of the sum of squares is position."""
    torch.manual_seed(0)
    sentences, n = 400, 30
    position = torch.randn(n, n, dtype=torch.float64)
    noise = torch.randn(sentences, n, n, dtype=torch.float64)
    position, noise = (x - x.mean(-1, keepdim=True) for x in (position, noise))
    deviation = 0.1 / n * (position / position.std() + noise / noise.std())
    assert share_of(1 / n + deviation) == pytest.approx(0.5, abs=0.02)


def test_the_share_of_uniform_attention_is_nan():
    assert math.isnan(share_of(torch.full((5, N, N), 1 / N)))
    causal = torch.ones(5, N, N).tril()
    assert math.isnan(share_of(causal / causal.sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_of_uniform_attention_gives_nan_and_larger_deviations_a_share(dtype):
    eps = torch.finfo(dtype).eps
    # the logits of position, far below and far above what one weight is rounded by
    faint, clear = ((scale * torch.randn(N, N).double()).softmax(-1).to(dtype) for scale in (eps / 4, 64 * eps))
    assert math.isnan(share_of(faint.expand(6, N, N)))
    assert share_of(clear.expand(6, N, N)) > 0.99


def test_one_pass_equals_the_definition_with_lengths_that_differ():
    torch.manual_seed(0)
    matrices = torch.randn(6, N, N, dtype=torch.float64).softmax(-1)
    masks = torch.zeros(6, N, N, dtype=torch.bool)
    for sentence, (start, stop) in enumerate([(0, 9), (1, 8), (1, 5), (0, 4), (2, 9), (0, 2)]):
        masks[sentence, start:stop, start:stop] = True
    assert float(averaged(matrices, masks).share) == pytest.approx(slow_share(matrices, masks), abs=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mean_and_the_metrics_are_those_of_the_texts(name):
    model, ids = tiny(name).train(), tokens(6, N)
    before = state(model)
    result = text_average(model, [{"input_ids": part} for part in ids.split(4)], special_tokens=True)
    assert same(before, state(model))
    maps = torch.stack([maps_of(model.eval(), text) for text in ids]).double()  # (text, layer, head, n, n)
    torch.testing.assert_close(result.attention, maps.mean(0), rtol=0, atol=1e-7)
    torch.testing.assert_close(result.per_sample["locality"], metrics.locality(maps), rtol=0, atol=1e-7)
    torch.testing.assert_close(metrics.locality(result), result.mean_of_metric.locality, rtol=0, atol=1e-7)
    visible = torch.ones(3, N, N, dtype=torch.bool) if result.visible is None else result.visible
    by_definition = slow_share(maps[:, 0, 0], visible[:1].expand(6, N, N))
    assert float(result.share[0, 0]) == pytest.approx(by_definition, abs=1e-6)
    assert result.share[0].min() < 0.9
    assert result.source.texts == 6
    assert (result.counts == 6).all()


def test_texts_of_different_lengths_count_where_they_have_a_query():
    model, lengths = tiny("gpt2"), [5, 9, 7]
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
    pairs = torch.stack([(torch.arange(9) < n)[:, None] & torch.ones(9, 9).tril().bool() for n in lengths])
    padded = torch.stack(
        [nn.functional.pad(each[0, 0], (0, 9 - n, 0, 9 - n)) for each, n in zip(maps, lengths, strict=True)]
    )
    assert float(result.share[0, 0]) == pytest.approx(slow_share(padded, pairs), abs=1e-6)


@pytest.mark.parametrize("name", ["roberta", "gpt2", "bloom", "xlnet", "deberta"])
def test_padding_on_either_side_is_left_out(name):
    model, lengths = tiny(name).float(), [9, 6, 8, 7]
    texts = [tokens(1, n, seed)[0] for seed, n in enumerate(lengths)]
    alone = text_average(model, [{"input_ids": text} for text in texts], special_tokens=True)
    for side in ("left", "right"):
        ids, mask = torch.ones(4, 9, dtype=torch.long), torch.zeros(4, 9, dtype=torch.long)
        for row, text in enumerate(texts):
            where = slice(9 - len(text), 9) if side == "left" else slice(0, len(text))
            ids[row, where], mask[row, where] = text, 1
        padded = text_average(model, [{"input_ids": ids, "attention_mask": mask}], special_tokens=True)
        torch.testing.assert_close(padded.share, alone.share, atol=1e-4, rtol=0, equal_nan=True)
        torch.testing.assert_close(padded.attention, alone.attention, atol=1e-6, rtol=0)
        assert torch.equal(padded.counts, alone.counts)
        for metric, values in alone.per_sample.items():
            torch.testing.assert_close(padded.per_sample[metric], values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "deberta"])
def test_models_with_constant_content_are_positional(name):
    """Every word has the same vector, so attention depends on position only."""
    model = tiny(name)
    embedding = base_of(model).get_input_embeddings()
    with torch.no_grad():
        embedding.weight[:] = embedding.weight[7]
    result = text_average(model, [{"input_ids": tokens(6, N)}], special_tokens=True)
    assert (result.share - 1).abs().max() < 1e-6


@pytest.mark.parametrize("first", [True, False])
def test_layers_that_differ_in_causality_have_the_metrics_that_all_have(first):
    masks = [torch.ones(N, N).tril() > 0, torch.ones(N, N) > 0]
    table = torch.randn(9, N, N, generator=torch.manual_seed(0))

    def function(ids):
        return [table[ids[:, :1]].masked_fill(~mask, -torch.inf).softmax(-1) for mask in masks[:: 1 if first else -1]]

    model, ids = AttentionFunction(function, 9), torch.randint(9, (4, N), generator=torch.manual_seed(0))
    result = text_average(model, [{"input_ids": ids[:3]}, {"input_ids": ids[3:]}], special_tokens=True)
    everywhere = {"adjusted_locality", "mean_distance", "sink_rate", "window", "cut_share"}
    assert result.per_sample.keys() == {"locality", "symmetry", "relative_asymmetry"} | everywhere
    maps = torch.stack(function(ids), 1)
    torch.testing.assert_close(result.per_sample["locality"].float(), metrics.locality(maps))
    with pytest.raises(ValueError, match="got 'past_locality'"):
        result.interval("past_locality")


def test_special_tokens_are_cut_out_of_the_matrices():
    model = hf.BertModel(hf.BertConfig(**tiny("bert").config.to_dict())).eval()
    ids = torch.tensor([[2, 6, 7, 10, 3], [2, 1, 6, 5, 3]])  # [CLS] ... [SEP]; 1 is an unknown word, which is a word
    result = text_average(model, [{"input_ids": ids}], tokenizer=wordpiece())
    maps = torch.stack([maps_of(model, text) for text in ids]).double()
    kept = maps[..., 1:4, 1:4]
    torch.testing.assert_close(result.attention, (kept / kept.sum(-1, keepdim=True)).mean(0))
    torch.testing.assert_close(result.per_sample["cut_share"], 1 - kept.sum(-1).mean(-1))
    mask = torch.tensor([[1, 0, 0, 0, 1]] * 2)
    by_mask = text_average(model, [{"input_ids": ids, "special_tokens_mask": mask}])
    torch.testing.assert_close(by_mask.attention, result.attention)
    torch.testing.assert_close(by_mask.share, result.share, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="special tokens between its words"):
        text_average(model, [{"input_ids": torch.tensor([[2, 6, 3, 7, 3]])}], tokenizer=wordpiece())


def test_a_token_that_is_unknown_and_end_of_text_at_once_is_special():
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    ids = torch.tensor([[end, 20, 21, 22], [end, 23, 24, 25]])
    assert text_average(tiny("gpt2"), [{"input_ids": ids}], tokenizer=tokenizer).counts.tolist() == [2, 2, 2]


def test_empty_batches_are_skipped():
    model, text = tiny("bert"), [{"input_ids": tokens(4, N)}]
    empty = [{"input_ids": torch.empty(0, N, dtype=torch.long)}, {"input_ids": []}]
    found = text_average(model, [*empty, *text, *empty], special_tokens=True)
    assert torch.equal(found.share, text_average(model, text, special_tokens=True).share)
    assert found.source.texts == 4
    with pytest.raises(ValueError, match="texts is empty"):
        text_average(model, empty, special_tokens=True)


def test_a_position_between_others_that_no_text_has_is_refused():
    special = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    text = {"input_ids": tokens(2, 7), "special_tokens_mask": special}
    with pytest.raises(ValueError, match="position 0 to 6"):
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
    assert text_average(model, [{"input_ids": ids}], special_tokens=True, length=10**6).length == N


def test_layers_have_the_models_numbers():
    text = [{"input_ids": tokens(3, N)}]
    whole, some = (text_average(tiny("bert"), text, special_tokens=True, layers=each) for each in (None, [2, 0]))
    assert torch.equal(some.share, whole.share[[2, 0]])
    assert some.to_frame()["layer"].tolist() == [2, 2, 0, 0]


def test_a_frame_has_the_position_share_and_the_repr_too():
    result = text_average(tiny("gpt2"), [{"input_ids": tokens(4, N)}], special_tokens=True)
    frame = result.to_frame()
    torch.testing.assert_close(torch.tensor(frame["position_share"]), result.share.flatten())
    assert {"past_locality_low", "sink_rate"} <= set(frame.columns)
    lines = repr(result).splitlines()
    assert lines[0] == "TextAverage of GPT2Model: 3 layers x 2 heads, n = 9, mean over 4 texts, special tokens counted"
    assert "position_share" in lines[1].split()


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
    with pytest.raises(ValueError, match="no text has 3 tokens"):
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
    cropped = metrics.crop(maps, 2)
    torch.testing.assert_close(result.attention, cropped.mean(0))
    by_definition = slow_share(cropped[:, 0, 0], torch.ones(5, N - 2, N - 2).tril().bool())
    assert float(result.share[0, 0]) == pytest.approx(by_definition, abs=1e-6)
    with pytest.raises(ValueError, match="without_first must be at least 0"):
        text_average(model, text, special_tokens=True, without_first=-1)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_offloaded_models_are_measured_where_they_run(name):
    text = [{"input_ids": tokens(2, N, seed)} for seed in range(2)]
    expected, moved = text_average(tiny(name), text, special_tokens=True), offloaded(tiny(name))
    found = text_average(moved, text, special_tokens=True)
    torch.testing.assert_close(found.attention, expected.attention)
    torch.testing.assert_close(found.share, expected.share, equal_nan=True)
    assert all(weight.is_meta for weight in moved.parameters())


def test_rows_of_several_texts_are_refused():
    packed = {"input_ids": tokens(1, 2 * N), "position_ids": torch.arange(N).repeat(2)[None]}
    with pytest.raises(ValueError, match="position_ids"):
        text_average(tiny("gpt2"), [packed], special_tokens=True)


@pytest.mark.parametrize("lengths", [(12, 8), (8, 12), (6, 1, 5)])
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


@pytest.mark.parametrize("beginning", [500, 6])
def test_a_text_that_a_model_cannot_run_is_refused_with_its_reason(beginning, monkeypatch):
    class Short(hf.BertModel):
        def forward(self, input_ids=None, **options):
            if input_ids.shape[1] > 8:
                raise RuntimeError("too long for me")
            return super().forward(input_ids, **options)

    monkeypatch.setattr(layers, "_BEGINNING", beginning)
    model, text = Short(tiny("bert").config), [{"input_ids": tokens(2, n)} for n in (7, 9)]
    with pytest.raises(ValueError, match=r"Short .* on [12] x 9 tokens it fails with RuntimeError: too long for me"):
        text_average(model.eval(), text, special_tokens=True)


@pytest.mark.parametrize(
    ("texts", "arguments", "error"),
    [
        ({"input_ids": tokens(2, 4)}, {}, TypeError),
        ("a text", {}, TypeError),
        (pd.DataFrame({"text": ["a b"]}), {}, TypeError),
        (nn.Identity(), {}, TypeError),
        ([[1, 2]], {}, TypeError),
        ([{"labels": 1}], {}, TypeError),
        ([{"input_ids": torch.rand(2, 4)}], {}, ValueError),
        ([{"input_ids": tokens(2, 4)}], {}, ValueError),  # which tokens are special?
        ([{"input_ids": [[1, 2], [3]]}], {}, ValueError),
        ([{"input_ids": tokens(2, 4), "attention_mask": torch.ones(2, 5)}], {}, ValueError),
        ([{"input_ids": tokens(1, 3), "attention_mask": [[1, 0, 1]]}], {}, ValueError),
        ([{"input_ids": tokens(1, 3), "special_tokens_mask": [[1, 2, 0]]}], {}, ValueError),
        ([{"input_ids": torch.tensor([[5, 0], [6, 7]])}], {}, ValueError),  # padding
        ([{"input_ids": tokens(2, 6)}, {"input_ids": torch.full((1, 6), 97)}], {"special_tokens": True}, ValueError),
        ([{"input_ids": tokens(2, 41)}], {"special_tokens": True}, ValueError),
        ([{"input_ids": tokens(2, 4)}], {"length": 2}, ValueError),
    ],
)
def test_invalid_input_raises_and_does_not_change_the_model(texts, arguments, error):
    model = tiny("bert").train()
    before = state(model)
    with pytest.raises(error, match=r"texts|input_ids|_mask|special tokens|length"):
        text_average(model, texts, **arguments)
    assert same(before, state(model))
