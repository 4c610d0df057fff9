"""The loss at each position against a loop over prefixes, and its means over texts by hand."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
import transformers as hf
from scipy import stats

from pelocality import ALiBi, attach
from pelocality.evaluation import LossByPosition, loss_by_position
from tests.families import tiny
from tests.test_evaluation_likelihood import causal_model, masked_model, masking
from tests.test_models_words import byte_level

TEXTS = ["a cat", "a cat and a dog sat", "the dogs ran", "a hat"]
IDS = torch.randint(5, 90, (3, 12), generator=torch.Generator().manual_seed(0))


def llama(**options):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=99, initializer_range=0.5, **options)).double()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_losses_are_those_of_a_loop_over_prefixes(batch_size):
    tokenizer = byte_level()
    model = causal_model(tokenizer)
    result = loss_by_position(model, TEXTS, tokenizer=tokenizer, batch_size=batch_size)
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = np.full((len(rows), max(map(len, rows)) - 1), np.nan)
    for row, ids in enumerate(rows):
        for place in range(1, len(ids)):
            logits = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1]
            expected[row, place - 1] = -float(logits.log_softmax(-1)[ids[place]])
    np.testing.assert_allclose(result.losses.numpy(), expected, rtol=1e-8)
    assert result.losses.dtype == torch.float64
    assert len(set(map(len, rows))) > 1


def test_long_texts_are_scored_in_parts():
    ids = torch.randint(5, 90, (2, 530), generator=torch.Generator().manual_seed(1))
    model = llama().eval()
    expected = torch.stack([torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:],
                                                              reduction="none") for row in ids])  # fmt: skip
    torch.testing.assert_close(loss_by_position(model, [{"input_ids": ids}]).losses, expected.detach())


def test_padding_has_no_loss_and_changes_none():
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), IDS], 1)
    mask = (torch.arange(16) >= 4).long().expand(3, 16)
    model = llama()
    found = loss_by_position(model, [{"input_ids": padded, "attention_mask": mask}])
    torch.testing.assert_close(found.losses, loss_by_position(model, [{"input_ids": IDS}]).losses)
    assert model.training


def test_a_text_may_begin_with_the_token_that_the_tokenizer_adds():
    tokenizer = masking()
    losses = loss_by_position(causal_model(tokenizer), ["a cat sat", "[CLS] a cat sat"], tokenizer).losses
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


def test_a_text_counts_where_it_reaches_the_whole_range():
    rows = [[1.0, 2, 3, 4, 5, 6, 7], [2.0, 3, 5, 8, 6, 0, torch.nan], [4, 0, 3, 1, *[torch.nan] * 3]]
    losses = torch.tensor(rows, dtype=torch.float64)
    result = LossByPosition(losses, "a model", 0)
    every = result.to_frame(per_doubling=None)
    assert every["first"].tolist() == every["last"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert every["texts"].tolist() == [3, 3, 3, 3, 2, 2, 1]
    np.testing.assert_allclose(every["loss"], losses.nanmean(0))
    low, high = stats.t.interval(0.9, 2, losses[:, 0].mean(), stats.sem(losses[:, 0]))
    assert result.to_frame(None, 0.9).loc[0, ["low", "high"]].tolist() == pytest.approx([low, high])
    assert every["low"].isna().tolist() == [False] * 6 + [True]
    ranges = result.to_frame(per_doubling=1)
    assert ranges[["first", "last", "texts"]].to_numpy().tolist() == [[1, 1, 3], [2, 3, 3], [4, 7, 1]]
    assert ranges["loss"].tolist() == pytest.approx([7 / 3, (2.5 + 4 + 1.5) / 3, 5.5])
    assert "a model: 3 texts of up to 8 tokens" in repr(result)


@pytest.mark.parametrize("per_doubling", [1, 2, 3, 50])
def test_ranges_cover_every_position_once(per_doubling):
    frame = LossByPosition(torch.rand(2, 100).double(), "", 0).to_frame(per_doubling)
    covered = [place for row in frame.itertuples() for place in range(row.first, row.last + 1)]
    assert covered == list(range(1, 101))


def test_texts_are_cut_to_the_declared_length_unless_another_is_asked_for(caplog):
    model = llama(max_position_embeddings=8)
    result = loss_by_position(model, [{"input_ids": IDS}])
    assert result.losses.shape == (3, 7)
    assert result.cut == 3
    assert "3 of them cut" in repr(result)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        longer = loss_by_position(model, [{"input_ids": IDS}], length=11)
    assert "trained on at most 8 positions" in caplog.text
    assert longer.losses.shape == (3, 10)
    torch.testing.assert_close(longer.losses[:, :7], result.losses)
    assert loss_by_position(model, [{"input_ids": IDS}], length=5).losses.shape == (3, 4)


def test_a_table_of_positions_has_an_end_until_it_is_disabled():
    tokenizer = byte_level()
    model, long = causal_model(tokenizer), ["a cat and a dog sat on a mat " * 4]
    assert loss_by_position(model, long, tokenizer=tokenizer).losses.shape == (1, 23)
    with pytest.raises(ValueError, match="length=30 is beyond the 24 positions"):
        loss_by_position(model, long, tokenizer=tokenizer, length=30)
    with attach(model, ALiBi(heads=2)):
        result = loss_by_position(model, long, tokenizer=tokenizer, length=30)
    assert result.losses.shape == (1, 29)
    assert "ALiBi attached" in result.model


def test_two_models_are_compared_text_by_text():
    one, other = (loss_by_position(llama(rope_theta=base), [{"input_ids": IDS}]) for base in (1e4, 10.0))
    difference = dataclasses.replace(one, losses=one.losses - other.losses).to_frame(None)
    values = (one.losses - other.losses)[:, 5]
    low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
    assert difference.loc[5, ["loss", "low", "high"]].tolist() == pytest.approx([float(values.mean()), low, high])


def test_models_without_such_a_loss_are_refused():
    with pytest.raises(ValueError, match="model must attend to the left only"):
        loss_by_position(masked_model(), ["a cat sat"], tokenizer=masking())
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        loss_by_position(hf.T5ForConditionalGeneration(tiny("t5").config), [{"input_ids": IDS}])
    with pytest.raises(ValueError, match="must predict the model's 99 tokens"):
        loss_by_position(llama().model, [{"input_ids": IDS}])


@pytest.mark.parametrize(
    ("texts", "options", "error", "says"),
    [
        ("a cat", {}, TypeError, "texts"),
        (["a cat"], {}, TypeError, "tokenizer"),
        ([], {}, ValueError, "at least two tokens"),
        ([{"input_ids": IDS[:, :1]}], {}, ValueError, "at least two tokens"),
        ([{"input_ids": IDS + 90}], {}, ValueError, r"input_ids must be in 0\.\.98"),
        ([{"input_ids": IDS}], {"length": 1}, ValueError, "length"),
    ],
)
def test_other_arguments_are_refused(texts, options, error, says):
    model = llama()
    with pytest.raises(error, match=says):
        loss_by_position(model, texts, **options)
    assert model.training
    with pytest.raises(ValueError, match="per_doubling"):
        LossByPosition(torch.rand(2, 9).double(), "", 0).to_frame(0)


def test_nan_is_an_error_and_not_the_end_of_a_text():
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    ids = torch.tensor([[5, 6, 8, 9, 10, 11, 12, 13, 14, 15], [5, 6, 8, 9, 10, 11, 12, 13, 7, 15]])
    with pytest.raises(ValueError, match="model gives NaN for text 1"):
        loss_by_position(model, [{"input_ids": ids}])


def test_one_tokenised_row_is_a_text_and_ragged_rows_are_texts():
    model = llama()
    assert loss_by_position(model, [{"input_ids": [5, 6, 7]}]).losses.shape == (1, 2)
    ragged = {"input_ids": [[5, 6, 7, 8], [5, 6]], "attention_mask": None}
    assert (~loss_by_position(model, [ragged]).losses.isnan()).sum(1).tolist() == [3, 1]
