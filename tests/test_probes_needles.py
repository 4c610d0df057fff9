"""Needles: what stands where in a context, what the answers are, and what a bag of words can do with them."""

import re

import pytest
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from pelocality.probes import needle_items, needles, probe_info
from tests.test_models_words import byte_level

WORDS = ["The", "password", "of", "the", "is", ".", "filler", "Sentence", "number"]
WORDS += [*needles._KINDS, *needles._THINGS, *needles._VALUES]
STORY = [f"Sentence number {'filler ' * (i % 5)}of the. " * 3 for i in range(60)] + ["The king and the filler."]


def word_level(*special):
    """A tokenizer with one token for each word of the items."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", *special, *WORDS]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.fixture(params=[None, STORY], ids=["pairs", "text"])
def items(request):
    return needle_items(word_level(), lengths=[64, 150], contexts=3, haystack=request.param)


def test_the_right_answer_follows_its_question_in_the_context_and_nothing_else_does(items):
    for row in items:
        stated = re.findall(re.escape(row["question"]) + r" (\w+)\.", row["context"])
        assert stated == ([] if row["kind"] == "no needle" else [row["answers"][row["label"]]])


def test_all_answers_occur_once_but_for_those_that_the_control_leaves_out(items):
    for row in items:
        words = row["context"].replace(".", " ").split()
        found = [words.count(answer) for answer in row["answers"]]
        right = row["label"]
        expected = [1] * 5 if row["kind"] != "unique answer" else [int(i == right) for i in range(5)]
        assert found == expected


def test_needles_stand_at_their_depths(items):
    for row in items:
        if row["kind"] == "needle":
            sentences = [each for each in re.split(r"(?<=\.) ", row["context"]) if each]
            place = [i for i, each in enumerate(sentences) if each.startswith(row["question"])]
            # four other needles stand before or after it
            assert place[0] / (len(sentences) - 1) == pytest.approx(row["depth"], abs=5 / len(sentences))
    for row in items.filter(lambda row: row["kind"] == "needle" and row["depth"] in (0, 1)):
        ends = {0: row["context"].startswith, 1: row["context"].endswith}
        assert ends[row["depth"]](f"{row['question']} {row['answers'][row['label']]}.")


def test_a_context_is_as_long_as_whole_sentences_allow(items):
    tokenizer = word_level()
    for row in items:
        tokens = len(tokenizer(f"{row['context']} {row['question']} {row['answers'][0]}")["input_ids"])
        # the longest sentence of the story has 9 tokens, a pair 9; the longest question counts with its full stop
        assert row["length"] - 18 <= tokens <= row["tokens"] <= row["length"]


def test_the_rows_of_a_context_ask_for_every_depth_three_times(items):
    frame = items.to_pandas()
    assert (frame.groupby("uid").size() == 15).all()
    assert (frame.groupby("uid")["context"].nunique() == 1).all()
    assert (frame.groupby(["uid", "kind"])["label"].nunique() == 5).all()  # any fixed choice is right once
    assert (frame[frame["kind"] == "no needle"].groupby("uid")["question"].nunique() == 1).all()
    assert set(frame["depth"]) == {0, 0.25, 0.5, 0.75, 1}


def test_items_depend_on_the_seed_alone_and_a_length_not_on_the_others():
    tokenizer = word_level()
    both, again = (needle_items(tokenizer, lengths=[64, 99], contexts=2, seed=3) for _ in range(2))
    assert both[:] == again[:]
    alone = needle_items(tokenizer, lengths=[99], contexts=2, seed=3)
    assert alone["context"][:] == [row["context"] for row in both if row["length"] == 99]
    assert alone["context"][:] != needle_items(tokenizer, lengths=[99], contexts=2, seed=4)["context"][:]


def test_the_record_of_a_probe_says_how_it_was_built():
    items = needle_items(word_level(), lengths=[80], contexts=2, haystack=STORY)
    info = probe_info(items)
    assert (info.builder, info.items, info.rows) == ("needle_items", 2, 30)
    assert info.settings["haystack"] == 180  # not the sentence with a king
    assert set(items["provenance"]) == {"made of word lists | haystack"}
    assert not any("king and" in context for context in items["context"])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"depths": [0.5]}, ValueError, "depths"),
        ({"depths": [0.5, 0.2]}, ValueError, "ascending order"),
        ({"depths": [0, 1.5]}, ValueError, "from 0 to 1"),
        ({"lengths": [20]}, ValueError, "room for 5 pairs, 54 tokens, got 20"),
        ({"lengths": [64, 64]}, ValueError, "lengths"),
        ({"lengths": [999], "haystack": ["The filler of the."]}, ValueError, "length=999 .*give more text"),
        (
            {"lengths": [96], "haystack": ["The miller " + "and the miller " * 60 + "slept."] * 2},
            ValueError,
            "length=96",
        ),
        ({"lengths": [99], "haystack": ["A king."]}, ValueError, "haystack"),
        ({"haystack": "A text."}, TypeError, "haystack .*in a list"),
        ({"seed": -1}, ValueError, "seed"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer"),
        ({"tokenizer": byte_level()}, ValueError, "4 tokens; 11 are needed"),  # a space is a token
    ],
)
def test_impossible_items_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        needle_items(**{"tokenizer": word_level(), **options})


def test_sentences_that_do_not_fit_give_way_to_those_that_do():
    long = "The miller " + "and the miller " * 60 + "slept."
    haystack = [sentence for line in STORY for sentence in (line, long)]
    items = needle_items(word_level("<s>"), lengths=[128], contexts=6, haystack=haystack)
    assert min(items["tokens"]) >= 0.8 * 128
    assert max(items["tokens"]) <= 128
