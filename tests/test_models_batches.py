"""Batches of texts: equal texts count once, and what the model reads beside its tokens is given to it."""

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.models import AttentionFunction, SequenceModel, text_average
from tests.families import small, spread, tiny, tokens
from tests.test_models_tokenised import TEXTS, assert_equal
from tests.test_models_words import wordpiece

N = 9


def maps_of(model, ids, **inputs):
    """Return the attention of texts, (text, layer, head, n, n)."""
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return torch.stack(model(ids, output_attentions=True, **inputs).attentions, 1)


def xlm():
    sizes = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "n_langs": 3, "max_position_embeddings": 40}
    return spread(hf.XLMModel(hf.XLMConfig(vocab_size=97, **sizes)))


def ernie():
    return spread(hf.ErnieModel(small(hf.ErnieConfig, use_task_id=True, task_type_vocab_size=3)))


def test_equal_texts_count_once_and_their_number_is_said():
    model, tokenizer = tiny("bert"), wordpiece()
    once = text_average(model, TEXTS, tokenizer=tokenizer)
    for batch_size in (1, 4, 100):
        thrice = text_average(model, TEXTS * 3, tokenizer=tokenizer, batch_size=batch_size)
        assert (thrice.source.texts, thrice.source.repeated) == (6, 12)
        assert "12 texts are equal to one of the 6 and do not count" in thrice.notes
        torch.testing.assert_close(thrice.share, once.share, equal_nan=True)
        torch.testing.assert_close(thrice.interval()[0], once.interval()[0])
    assert once.source.repeated == 0
    assert not any("equal" in note for note in once.notes)


def test_one_text_ten_times_has_no_share():
    texts = ["a cat and a dog"] * 10
    result = text_average(tiny("bert"), texts, tokenizer=wordpiece())
    assert result.share.isnan().all()
    assert "one text has no position share (NaN), which compares texts: pass more" in result.notes


def test_texts_are_equal_on_either_side_of_the_padding_and_differ_by_any_input():
    model, ids = tiny("bert"), tokens(1, N)
    left = {"input_ids": nn.functional.pad(ids, (3, 0)), "attention_mask": nn.functional.pad(ids > 0, (3, 0))}
    right = {"input_ids": nn.functional.pad(ids, (0, 2)), "attention_mask": nn.functional.pad(ids > 0, (0, 2))}
    other_types = {"input_ids": ids, "token_type_ids": torch.ones_like(ids)}
    same_types = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    result = text_average(model, [left, right], special_tokens=True)
    assert (result.source.texts, result.source.repeated) == (1, 1)
    result = text_average(model, [other_types, same_types], special_tokens=True)
    assert (result.source.texts, result.source.repeated) == (2, 0)


def test_equal_batches_of_something_else_than_token_ids_count_once():
    model = SequenceModel(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), lambda *_: 0
    )
    states = torch.randn(3, N, 8)
    result = text_average(model, [states, states.clone(), -states])
    assert (result.source.texts, result.source.repeated) == (6, 3)


def test_positions_that_begin_elsewhere_are_used():
    model, ids = tiny("gpt2"), tokens(3, 8)
    positions = torch.arange(20, 28).expand(3, 8)
    expected = maps_of(model, ids, position_ids=positions).mean(0)
    for given in (positions, positions[:1], positions[0], positions.expand(3, 3, 8)):
        found = text_average(model, [{"input_ids": ids, "position_ids": given}], special_tokens=True)
        torch.testing.assert_close(found.attention, expected)
    padded = {"input_ids": nn.functional.pad(ids, (2, 0)), "position_ids": nn.functional.pad(positions, (2, 0))}
    padded["attention_mask"] = nn.functional.pad(torch.ones_like(ids), (2, 0))
    torch.testing.assert_close(text_average(model, [padded], special_tokens=True).attention, expected)
    axes = torch.stack([positions, positions, positions + 1])
    with pytest.raises(ValueError, match="position_ids"):
        text_average(model, [{"input_ids": ids, "position_ids": axes}], special_tokens=True)
    with pytest.raises(ValueError, match="no row for every position"):
        text_average(model, [{"input_ids": ids, "position_ids": positions + 20}], special_tokens=True)


def test_positions_that_a_model_does_not_read_are_checked_alone():
    model, ids = tiny("bloom"), tokens(3, 8)
    expected = text_average(model, [{"input_ids": ids}], special_tokens=True)
    found = text_average(model, [{"input_ids": ids, "position_ids": torch.arange(20, 28)}], special_tokens=True)
    torch.testing.assert_close(found.attention, expected.attention)


@pytest.mark.parametrize(("build", "name"), [(xlm, "langs"), (ernie, "task_type_ids")])
def test_what_the_model_reads_beside_the_tokens_is_given_to_it(build, name):
    model, ids = build(), tokens(3, 8)
    kinds = torch.tensor([[0, 1, 2, 0, 1, 2, 1, 1]]).expand(3, 8)
    expected = maps_of(model, ids, **{name: kinds})
    assert (expected - maps_of(model, ids)).abs().max() > 0.01
    found = text_average(model, [{"input_ids": ids, name: kinds}], special_tokens=True)
    torch.testing.assert_close(found.attention, expected.double().mean(0))
    padded = {"input_ids": nn.functional.pad(ids, (2, 0)), name: nn.functional.pad(kinds, (2, 0))}
    padded["attention_mask"] = nn.functional.pad(torch.ones_like(ids), (2, 0))
    moved = text_average(model, [padded], special_tokens=True)
    torch.testing.assert_close(moved.attention, found.attention)
    rows = [{"input_ids": row.tolist(), name: kinds[0].tolist()} for row in ids]
    assert_equal(text_average(model, rows, special_tokens=True), moved)


def test_what_the_model_reads_and_cannot_be_given_with_the_tokens_is_refused():
    ids = tokens(3, 8)
    states = torch.zeros(3, 8, 16)
    for model, name, value in [
        (tiny("bert"), "encoder_hidden_states", states),
        (xlm(), "lengths", torch.tensor([8, 8, 8])),
        (tiny("bert"), "inputs_embeds", states),
    ]:
        with pytest.raises(ValueError, match=f"texts hold {name}"):
            text_average(model, [{"input_ids": ids, name: value}], special_tokens=True)
    batch = {"input_ids": ids, "labels": states, "text": ["a", "b", "c"], "langs": None}
    assert text_average(xlm(), [batch], special_tokens=True).source.texts == 3


def test_a_module_of_token_ids_alone_is_given_nothing_else():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.attention = nn.Embedding(97, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, ids, token_type_ids=None, position_ids=None):
            return self.attention(*[self.words(ids)] * 3)

    model, ids = SequenceModel(Own(), vocabulary_size=97), tokens(3, 8)
    for name, more in [("position_ids", torch.arange(8)), ("token_type_ids", torch.ones_like(ids))]:
        with pytest.raises(ValueError, match=name):
            text_average(model, [{"input_ids": ids, name: more}], special_tokens=True)
    tokenizer = wordpiece()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert text_average(model, TEXTS, tokenizer=tokenizer, batch_size=1).source.texts == len(TEXTS)


# ---- notes


def sink_model(strength):
    def attend(ids):
        n = ids.shape[1]
        noise = torch.randn(len(ids), 1, n, n, generator=torch.manual_seed(int(ids.sum()))) * 0.1
        noise[..., 0] += strength
        return [noise.softmax(-1)]

    return AttentionFunction(attend, 97)


def test_a_sink_and_a_small_number_of_texts_are_noted():
    many = [{"input_ids": tokens(20, N)}]
    result = text_average(sink_model(2.5), many, special_tokens=True)
    assert any("the first token gets up to 0.60" in note and "in layers 0" in note for note in result.notes)
    assert not text_average(sink_model(2.5), many, special_tokens=True, without_first=1).notes
    assert not text_average(sink_model(0), many, special_tokens=True).notes
    two = text_average(sink_model(0), [{"input_ids": tokens(2, N)}], special_tokens=True)
    assert two.notes == ("of 2 texts, a head that ignores position has a share of -1.00 on average",)


def test_a_length_that_counts_special_tokens_is_noted():
    model = hf.BertModel(hf.BertConfig(**tiny("bert").config.to_dict())).eval()
    ids = torch.cat([torch.full((12, 1), 2), tokens(12, 10), torch.full((12, 1), 3)], 1)
    result = text_average(model, [{"input_ids": ids}], tokenizer=wordpiece(), length=8)
    assert result.length == 7
    assert any("n = 7, as length= counts 1 first tokens" in note for note in result.notes)
    assert text_average(model, [{"input_ids": ids}], tokenizer=wordpiece(), length=9).length == 8
    whole = text_average(model, [{"input_ids": ids}], tokenizer=wordpiece())
    assert not any("length=" in note for note in whole.notes)
    assert not any(
        "length=" in note for note in text_average(model, [{"input_ids": ids}], special_tokens=True, length=8).notes
    )
