"""Strings are measured as the batches are that a user would make of them."""

import pytest
import torch
import transformers as hf
from tokenizers import processors

from pelocality.models import AttentionFunction, text_average
from tests.families import same, state, tiny
from tests.test_models_words import byte_level, pieces_with_word_marks, wordpiece

NOUNS = ["cat", "dog", "river", "bat"]
TEXTS = ["a cat and a dog", "the river", "a dog sat on a mat 42", "dogs!", "a cat, a hat and a bat", "a x1 a dog river"]


def gpt2():
    """A decoder whose tokenizer has no padding token."""
    return hf.GPT2Model(hf.GPT2Config(vocab_size=320, n_positions=40, n_embd=12, n_layer=2, n_head=2)).double()


READERS = {
    "bert": (lambda: tiny("bert"), wordpiece),
    "roberta": (lambda: tiny("roberta"), wordpiece),  # counts positions from its padding id
    "gpt2": (gpt2, byte_level),
    "xlnet": (lambda: tiny("xlnet"), wordpiece),
    "t5": (lambda: tiny("t5"), pieces_with_word_marks),
    "llama": (lambda: tiny("llama"), wordpiece),
}


def by_hand(tokenizer, texts, size, side="right"):
    """The batches of a user, padded on one side, with a padding token where there is none."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"padding": True, "padding_side": side, "return_tensors": "pt", "return_special_tokens_mask": True}
    return [tokenizer(texts[start : start + size], **options) for start in range(0, len(texts), size)]


def assert_equal(found, expected):
    torch.testing.assert_close(found.share, expected.share, equal_nan=True)
    assert found.source == expected.source
    torch.testing.assert_close(found.attention, expected.attention)
    assert found.per_sample.keys() == expected.per_sample.keys()
    for name, values in found.per_sample.items():
        torch.testing.assert_close(values, expected.per_sample[name], equal_nan=True)


@pytest.mark.parametrize("name", READERS)
def test_strings_are_measured_as_the_batches_made_of_them_by_hand(name):
    model, tokenizer = (build() for build in READERS[name])
    padding = tokenizer.pad_token
    for side, options in [
        ("left", {"batch_size": 4}),
        ("left", {"batch_size": 3, "length": 5, "without_first": 1}),
        ("right", {"special_tokens": True}),
    ]:
        found = text_average(model, TEXTS, tokenizer=tokenizer, **options)
        assert tokenizer.pad_token == padding
        batches = by_hand(READERS[name][1](), TEXTS, options.get("batch_size", 16), side)
        assert_equal(found, text_average(model, batches, tokenizer=tokenizer, **options))


def test_token_types_are_those_of_the_tokenizer():
    tokenizer, model = wordpiece(), tiny("bert")
    plain = text_average(model, TEXTS, tokenizer=tokenizer)
    template = {"single": "[CLS]:1 $A:1 [SEP]:1", "special_tokens": [("[CLS]", 2), ("[SEP]", 3)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**template)
    assert_equal(text_average(model, TEXTS, tokenizer=tokenizer), plain)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    found = text_average(model, TEXTS, tokenizer=tokenizer)
    assert_equal(found, text_average(model, by_hand(tokenizer, TEXTS, 16)))
    assert not torch.allclose(found.attention, plain.attention)


def test_token_types_that_a_model_does_not_read_are_left_out(monkeypatch):
    tokenizer, model = wordpiece(), tiny("llama")
    expected, read = text_average(model, TEXTS, tokenizer=tokenizer), set()
    forward = model.forward

    def record(*arguments, **inputs):
        read.update(inputs)
        return forward(*arguments, **inputs)

    monkeypatch.setattr(model, "forward", record)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    for texts in (TEXTS, by_hand(tokenizer, TEXTS, 16)):
        assert_equal(text_average(model, texts, tokenizer=tokenizer), expected)
    assert "input_ids" in read
    assert "token_type_ids" not in read


def test_a_generator_of_strings_is_read_as_it_is_needed():
    read, longest = [], []

    def function(ids):
        longest.append(len(read))
        return [torch.eye(ids.shape[1]).expand(len(ids), 1, -1, -1)]

    def lines():
        for number in range(12):
            read.append(number)
            yield f"a {NOUNS[number // 4]} a {NOUNS[number % 4]}"

    result = text_average(AttentionFunction(function, 99), lines(), tokenizer=wordpiece(), batch_size=3)
    assert result.source.texts == 12
    assert sorted(set(longest)) == [3, 6, 9, 12]


def test_strings_of_other_lengths_are_read_one_by_one_without_padding():
    function = AttentionFunction(lambda ids: [torch.eye(ids.shape[1]).expand(len(ids), 1, -1, -1)], 99)
    with pytest.raises(ValueError, match="no padding"):
        text_average(function, TEXTS, tokenizer=wordpiece())
    assert text_average(function, TEXTS, tokenizer=wordpiece(), batch_size=1).source.texts == len(TEXTS)


@pytest.mark.parametrize("length", [4, 16])
def test_a_tokenizer_that_truncates_and_pads_by_itself_gives_whole_texts(length):
    """As that of all-MiniLM-L6-v2, whose file says so."""
    tokenizer = wordpiece()
    tokenizer.backend_tokenizer.enable_truncation(length)
    tokenizer.backend_tokenizer.enable_padding(length=length)
    expected = text_average(tiny("bert"), TEXTS, tokenizer=wordpiece())
    assert_equal(text_average(tiny("bert"), TEXTS, tokenizer=tokenizer), expected)


@pytest.mark.parametrize(
    ("texts", "arguments", "error"),
    [
        ("a cat", {}, TypeError),
        (["a cat", " \n"], {}, ValueError),  # no token
        ([*TEXTS, "a " * 39], {}, ValueError),  # more than the model can read
        (["a cat", float("nan")], {}, TypeError),
        ([["a cat", "a dog"]], {}, TypeError),
        ([], {}, ValueError),
        (TEXTS, {"tokenizer": None}, TypeError),
        (TEXTS, {"batch_size": 0}, ValueError),
    ],
)
def test_texts_that_cannot_be_read_raise_and_do_not_change_the_model(texts, arguments, error):
    model = tiny("bert").train()
    before = state(model)
    with pytest.raises(error, match=next(iter(arguments), "text")):
        text_average(model, texts, **{"tokenizer": wordpiece(), "batch_size": 2, **arguments})
    assert same(before, state(model))
