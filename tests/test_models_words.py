"""Which tokens are words, for the kinds of tokenizers in use; tiny ones are trained here, nothing is downloaded."""

import pytest
import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pelocality.models.inputs.words import choose_words, special_ids, special_tokens_around
from pelocality.models.sequence_model import SequenceModel
from tests.families import tiny

TEXT = ["a cat and a dog sat on a mat", "the dogs ran 42 miles, unhappily!", "a hat and a bat"] * 20


def wordpiece():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "##s", "##ing", "river", "42", "!", "x1"]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|end|>"], show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<|end|>", eos_token="<|end|>")


def pieces_with_word_marks():
    pieces = ["<pad>", "</s>", "<unk>", "▁a", "▁cat", "▁dog", "s", "ing", "▁river", "▁42", "▁", "c", "t", "!"]
    backend = Tokenizer(models.Unigram([(piece, -0.1 * i) for i, piece in enumerate(pieces)], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


TOKENIZERS = {"wordpiece": wordpiece, "byte-level": byte_level, "unigram": pieces_with_word_marks}


def data2vec():
    """A family without a record that counts positions from its padding id."""
    config = hf.Data2VecTextConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=1
    )
    return hf.Data2VecTextModel(config)


def model_for(tokenizer):
    config = hf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return hf.BertModel(config)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_drawn_words_are_words_of_letters_and_encode_to_one_token(kind):
    tokenizer = TOKENIZERS[kind]()
    ids, names = choose_words(SequenceModel(model_for(tokenizer)), tokenizer, 3, 0)
    assert len(set(ids)) == 3
    for token, name in zip(ids, names, strict=True):
        assert name.isalpha()
        inside = tokenizer(f"a {name} a", add_special_tokens=False)["input_ids"]
        assert inside[1:-1] == [token]


def test_the_words_of_a_wordpiece_vocabulary_are_neither_pieces_nor_numbers_nor_special():
    tokenizer = wordpiece()
    _, names = choose_words(SequenceModel(model_for(tokenizer)), tokenizer, 4, 0)
    assert sorted(names) == ["a", "cat", "dog", "river"]
    with pytest.raises(ValueError, match="words=5 is more than the 4 words"):
        choose_words(SequenceModel(model_for(tokenizer)), tokenizer, 5, 0)


def test_words_with_marks_after_their_letters_are_words():
    """The vowel signs of Hindi and Thai, the points of Hebrew, an accent of its own."""
    words = ["किताब", "लड़का", "ข้าว", "שָׁלוֹם", "cafe\u0301", "घर"]
    vocabulary = {text: number for number, text in enumerate(["[UNK]", "a", *words, "3", "\u0301", "ok."])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    assert set(choose_words(SequenceModel(model_for(tokenizer)), tokenizer, 7, 0)[1]) == {"a", *words}
    with pytest.raises(ValueError, match="7 words"):
        choose_words(SequenceModel(model_for(tokenizer)), tokenizer, 8, 0)


def test_words_of_a_byte_level_vocabulary_start_with_a_space():
    tokenizer = byte_level()
    model = model_for(tokenizer)
    ids, _ = choose_words(SequenceModel(model), tokenizer, 5, 0)
    assert all(token.startswith("Ġ") for token in tokenizer.convert_ids_to_tokens(ids))


def test_given_words_are_looked_up_as_inside_a_sentence():
    tokenizer = byte_level()
    ids, names = choose_words(SequenceModel(model_for(tokenizer)), tokenizer, ["dog", "mat"], 0)
    assert tokenizer.convert_ids_to_tokens(list(ids)) == ["Ġdog", "Ġmat"]
    assert names == ("dog", "mat")


def test_ids_and_words_can_be_mixed():
    tokenizer = wordpiece()
    assert choose_words(SequenceModel(model_for(tokenizer)), tokenizer, [6, "dog"], 0) == ((6, 7), ("cat", "dog"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["dogs"], "'##s'"),
        (["cat dog"], "'cat', 'dog'"),
        (["elephant"], "elephant"),
        ([6, 6], "more than once"),  # it would count twice in the intervals over words
        ([6, "cat"], "more than once"),
        (64, "words=64"),
    ],
)
def test_words_that_cannot_be_repeated_are_refused(words, reason):
    tokenizer = wordpiece()
    with pytest.raises(ValueError, match=reason):
        choose_words(SequenceModel(model_for(tokenizer)), tokenizer, words, 0)


def test_a_tokenizer_of_another_model_is_refused():
    tokenizer = wordpiece()
    model = model_for(tokenizer)
    model.resize_token_embeddings(8, mean_resizing=False)
    with pytest.raises(ValueError, match="is this the model's tokenizer"):
        choose_words(SequenceModel(model), tokenizer, ["river"], 0)


def test_without_a_tokenizer_the_configurations_special_ids_are_left_out():
    model = tiny("t5")
    special = special_ids(SequenceModel(model))
    assert {0, 1} <= special
    ids, names = choose_words(SequenceModel(model), None, 97 - len(special & set(range(97))), 0)
    assert not special & set(ids)
    assert names == tuple(map(str, ids))


@pytest.mark.parametrize(("kind", "expected"), [
    ("wordpiece", ([2], [3])), ("byte-level", ([], [])), ("unigram", ([], [1])),
])  # fmt: skip
def test_special_tokens_around_a_sentence_are_those_of_the_tokenizer(kind, expected):
    assert special_tokens_around(TOKENIZERS[kind]()) == expected


@pytest.mark.parametrize("build", [lambda: tiny("roberta"), lambda: tiny("mpnet"), data2vec])
def test_the_padding_id_is_refused_where_positions_are_counted_from_it(build):
    model = build()
    with pytest.raises(ValueError, match="padding id 1"):
        choose_words(SequenceModel(model), None, [7, 1], 0)
    assert choose_words(SequenceModel(tiny("bert")), None, [7, 0], 0)[0] == (7, 0)
