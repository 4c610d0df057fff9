"""Shuffles: which words they permute, which they keep, and that they are reproducible."""

import hashlib
import inspect
import itertools
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import typing
from collections import Counter
from functools import partial

import datasets
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pelocality.probes
from pelocality.corpora import (
    Dependencies,
    Pair,
    Sentence,
    dependency_constituents,
    parse_bracketed,
    read_conllu,
    read_pairs,
    read_snli,
)
from pelocality.evaluation import evaluate
from pelocality.probes import (
    _build,
    constituency_shuffling,
    minimal_pairs,
    probe_info,
    random_shuffling,
    semantic_role_swap,
    window_shuffling,
)
from pelocality.probes._build import generator_for
from pelocality.probes._rows import features_of
from pelocality.probes._spans import phrases_in_tokens
from tests.data import corpora

TREE = (
    "(ROOT (S (NP (DT The) (JJ old) (NN sailor)) (VP (VBD told) (NP (PRP$ his) (JJ young) (NN niece))"
    " (NP (DT a) (JJ long) (, ,) (JJ sad) (NN story) (PP (IN about) (NP (NNS whales))))) (. .)))"
)
SHORT = "(ROOT (S (NP (DT The) (NN sailor)) (VP (VBD wept)) (. .)))"


def sentence(bracketed, uid="s", **layers):
    words, constituents = parse_bracketed(bracketed, "made up")
    return Sentence(words, uid=uid, language="en", constituents=constituents, **layers)


def pair(uid="p", label="entailment", premise=TREE, hypothesis=SHORT):
    return Pair(sentence(premise, f"{uid}/1"), sentence(hypothesis, f"{uid}/2"), label, uid)


PAIRS = [pair(f"p{k}", label) for k, label in enumerate(["entailment", "neutral", "contradiction"] * 3)]
SHUFFLES = {
    "constituency": lambda items, **kw: constituency_shuffling(items, range(2, 6), **kw),
    "window": lambda items, **kw: window_shuffling(items, range(2, 6), **kw),
    "random": random_shuffling,
}


def bag(text):
    return Counter(re.findall(r"[\w']+", text))


@pytest.mark.parametrize("name", SHUFFLES)
@given(seed=st.integers(0, 2**40), side=st.sampled_from(["premise", "hypothesis", "both"]))
@settings(max_examples=15, deadline=None)
def test_a_shuffle_keeps_the_words_and_touches_nothing_outside_its_spans(name, seed, side):
    for row in SHUFFLES[name](PAIRS[:2], seed=seed, side=side):
        for half in ("premise", "hypothesis"):
            original, perturbed = row[f"original_{half}"], row[half]
            spans = [span for span in row["spans"] if span["side"] == half]
            assert bag(perturbed) == bag(original)
            assert (perturbed != original) == bool(spans)
            rebuilt = original
            for span in spans:
                assert span["original"] != span["perturbed"]
                rebuilt = rebuilt.replace(span["original"], span["perturbed"], 1)
            assert rebuilt == perturbed
        assert row["label"] == row["original_label"]
        assert row["seed"] == seed


def test_constituents_have_the_size_asked_for_without_counting_punctuation():
    row = constituency_shuffling([sentence(TREE)], 6)[0]
    [span] = row["spans"]
    assert (row["size"], row["category"], span["original"]) == (6, "NP", "a long, sad story about whales")
    assert span["perturbed"][-1] != ","
    assert span["perturbed"].split()[1].endswith(",")  # the comma keeps its place, after the second word


def test_all_disjoint_constituents_are_taken_longest_first():
    [row] = constituency_shuffling([sentence(TREE)], range(2, 7), spans="all")
    assert [(s["start"], s["end"]) for s in row["spans"]] == [(0, 3), (4, 7), (7, 14)]
    assert row["size"] == 6


def test_categories_restrict_the_constituents():
    for seed in range(5):
        [row] = constituency_shuffling([sentence(TREE)], range(2, 6), categories={"PP"}, seed=seed)
        assert row["sentence"].endswith("story whales about.")


def test_a_category_that_no_constituent_has_is_named_in_the_reason():
    probe = constituency_shuffling([sentence(TREE)], range(2, 6), categories={"pp"})
    assert probe_info(probe).dropped == {"no constituent of that size and category": 1}


def test_a_constituent_that_is_the_whole_sentence_is_skipped():
    probe = constituency_shuffling([sentence(SHORT)], 3)
    assert len(probe) == 0
    assert probe_info(probe).skipped == {"the constituent is the whole sentence": 1}
    assert probe_info(probe).dropped == {"no constituent of that size": 1}


def test_a_constituent_of_equal_words_cannot_be_shuffled():
    probe = constituency_shuffling([sentence("(S (NP (NN no) (NN no)) (VP (VBD said)))")], 2)
    assert probe_info(probe).skipped == {"no order of the constituent's words changes the text": 1}


@pytest.mark.parametrize(
    ("words", "spaces"),
    [
        (("人", "人人"), ("", "")),  # one string in either order
        (("人", "人人", "人人人"), ("", "", "")),
        (("20", "20 20"), (" ", "")),  # words may hold spaces
        (("人", "，", "人"), ("", "", "")),
    ],
)
def test_words_that_make_one_string_in_any_order_are_dropped(words, spaces):
    probe = random_shuffling([Sentence(words, spaces, uid="1", language="zh")])
    assert len(probe) == 0
    assert probe_info(probe).dropped == {"no order of the words changes the text": 1}


@given(st.lists(st.sampled_from(["人", "人人", "人人人", "大", "大人"]), min_size=1, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_sentence_is_shuffled_exactly_if_some_order_changes_its_text(words, spaced):
    space = " " if spaced else ""
    item = Sentence(tuple(words), (space,) * (len(words) - 1) + ("",), uid="1", language="zh")
    orders = {space.join(order) for order in itertools.permutations(words)}
    rows = list(random_shuffling([item]))
    assert len(rows) == (len(orders) > 1)
    assert all(row["sentence"] in orders - {item.text} for row in rows)


def test_a_constituent_that_cuts_a_surface_token_is_skipped():
    cut = "(S (NP (PRP He)) (VP (VBZ 's) (VP (VBG counting) (NP (NNS whales)))))"
    probe = constituency_shuffling([sentence(cut)], 2, categories={"VP"}, seed=1)
    assert probe[0]["sentence"] == "He's whales counting"
    assert probe_info(constituency_shuffling([sentence(cut)], 3, categories={"VP"})).skipped == {
        "the constituent cuts a surface token": 1
    }


def test_windows_match_the_constituents_in_number_and_size_and_are_not_constituents():
    items = [pair(f"s{k}", hypothesis=f"(S (NP (NNP Ada{k})) (VP (VBD wept)))") for k in range(40)]
    constituents = {(0, 3), (4, 7), (7, 14), (12, 14), (3, 14), (0, 15)}
    for spans in ("one", "all"):
        first = constituency_shuffling(items, 3, spans=spans, seed=5)
        control = window_shuffling(items, 3, spans=spans, seed=5)
        assert first["uid"] == control["uid"]
        assert first["size"] == control["size"]
        for row, other in zip(first, control, strict=True):
            assert len(row["spans"]) == len(other["spans"])
            assert not {(s["start"], s["end"]) for s in other["spans"]} & constituents
            assert {(s["start"], s["end"]) for s in row["spans"]} <= constituents
    assert len({str(row["spans"]) for row in control}) > 3  # places are drawn, not fixed


NO_ROOM = "no room was found for windows that are not constituents"


def test_a_pair_without_room_for_the_windows_of_one_side_is_dropped():
    full = "(ROOT (S (NP (DT A) (NN cat)) (VP (VBD sat) (RB down)) (. .)))"  # one window of 2, two constituents
    items = [pair(hypothesis=full), pair(premise=full)]
    assert [row["side"] for row in constituency_shuffling(items, 2, side="both", spans="all")] == ["both", "both"]
    control = window_shuffling(items, 2, side="both", spans="all")
    assert (len(control), probe_info(control).dropped) == (0, {NO_ROOM: 2})
    assert window_shuffling([pair()], 2, side="both", spans="all")["side"] == ["both"]


def test_windows_that_block_each_other_are_placed_anew():
    halves = "(S (NP (NN a) (NN b) (NN c)) (NP (NN d) (NN e) (NN f)){})"
    for seed in range(20):  # "b c d" and "e f g" fit; "c d e", if drawn first, leaves no room for another
        [row] = window_shuffling([sentence(halves.format(" (NN g)"))], 3, spans="all", seed=seed)
        assert [(span["start"], span["end"]) for span in row["spans"]] == [(1, 4), (4, 7)]
    assert probe_info(window_shuffling([sentence(halves.format(""))], 3, spans="all")).dropped == {NO_ROOM: 1}


def test_dependency_subtrees_are_used_without_constituents():
    layer = Dependencies((2, 3, 0, 6, 6, 3), ("det", "nsubj", "root", "det", "amod", "obj"), "gold")
    item = Sentence(("the", "cat", "saw", "a", "big", "dog"), uid="d", dependencies=layer)
    [row] = constituency_shuffling([item], 3)
    assert (row["category"], row["spans"][0]["start"]) == ("obj", 3)
    assert [c["category"] for c in constituency_shuffling([item], 2)[0]["spans"]] == ["nsubj"]


def test_random_shuffling_needs_no_trees():
    probe = random_shuffling(read_pairs([{"premise": "one two three", "hypothesis": "one", "label": "neutral"}]))
    assert sorted(probe[0]["premise"].split()) == ["one", "three", "two"]
    assert probe[0]["hypothesis"] == "one"


def test_labels_select_pairs_and_the_others_are_counted():
    probe = random_shuffling(PAIRS, labels=("neutral",))
    assert set(probe["label"]) == {"neutral"}
    assert probe_info(probe).dropped == {"label not in labels": 6}


def test_every_item_has_a_row_or_is_counted_and_logged(caplog):
    items = [*PAIRS, pair("q", premise=SHORT)]
    with caplog.at_level(logging.INFO, logger="pelocality"):
        probe = constituency_shuffling(items, 6)
    info = probe_info(probe)
    assert (info.items, info.rows, sum(info.dropped.values())) == (10, 9, 1)
    (message,) = [r.getMessage() for r in caplog.records if "rows" in r.getMessage()]
    assert message == "constituency_shuffling: 9 rows from 10 items; dropped: no constituent of that size (1)"
    assert (info.settings["sizes"], info.settings["seed"]) == ([6], 0)


def test_info_survives_saving(tmp_path):
    probe = random_shuffling(PAIRS)
    probe.save_to_disk(tmp_path / "probe")
    assert probe_info(datasets.load_from_disk(tmp_path / "probe")) == probe_info(probe)
    with pytest.raises(ValueError, match=r"made by pelocality\.probes"):
        probe_info(datasets.Dataset.from_dict({"a": [1]}))


def test_info_of_joined_probes_is_the_sum():
    shuffled = random_shuffling(PAIRS[:3])
    constituents = constituency_shuffling([PAIRS[0], pair("q", premise=SHORT)], 3)
    info = probe_info(datasets.concatenate_datasets([shuffled, random_shuffling(PAIRS[:3]), constituents]))
    assert (info.builder, info.items, info.rows) == ("random_shuffling, constituency_shuffling", 8, 7)
    assert info.settings == {"side": "premise", "labels": None, "seed": 0}
    assert info.dropped == {"no constituent of that size": 1}


def test_minimal_pairs_know_the_builder_of_rows_joined_or_read_from_parquet(tmp_path):
    joined = datasets.concatenate_datasets([random_shuffling(PAIRS[:2]), constituency_shuffling(PAIRS[:1], 3)])
    joined.to_parquet(tmp_path / "probe.parquet")
    read = datasets.Dataset.from_parquet(str(tmp_path / "probe.parquet"), cache_dir=str(tmp_path / "cache"))
    columns = {name: joined[name] for name in joined.column_names if name != "spans"}  # as from CSV
    for probe in (joined, read, datasets.Dataset.from_dict(columns)):
        assert minimal_pairs(probe)["UID"] == ["random_shuffling", "random_shuffling", "constituency_shuffling"]
    with pytest.raises(ValueError, match="kept with save_to_disk"):
        probe_info(read)
    for name in ("size", "original_premise"):
        with pytest.raises(KeyError, match=name):
            minimal_pairs(random_shuffling(PAIRS).remove_columns(name))
    unlabelled = random_shuffling(PAIRS).remove_columns(["label", "original_label"])
    assert len(minimal_pairs(unlabelled)) == len(unlabelled)


@pytest.mark.parametrize("read", [minimal_pairs, probe_info])
def test_a_probe_that_is_not_one_dataset_is_refused(read):
    probe = random_shuffling(PAIRS[:2])
    for wrong in (datasets.DatasetDict({"test": probe}), probe.to_iterable_dataset(), [probe]):
        with pytest.raises(TypeError, match=f"probe must be a datasets.Dataset, .*got {type(wrong).__name__}; "):
            read(wrong)


# every builder, over pairs and over sentences; a new one must be entered here
BUILDERS = {
    "constituency_shuffling": partial(constituency_shuffling, size=range(2, 6)),
    "window_shuffling": partial(window_shuffling, size=range(2, 6)),
    "random_shuffling": random_shuffling,
    "semantic_role_swap": partial(semantic_role_swap, source="constituents", label_policy="neutral"),
}
CHASE = "(ROOT (S (NP (DT The) (NN dog)) (VP (VBD chased) (NP (DT the) (NN cat))) (. .)))"


def test_all_builders_are_named_above():
    returns = {
        name: typing.get_type_hints(function).get("return")
        for name, function in vars(pelocality.probes).items()
        if callable(function) and not isinstance(function, type)
    }
    others = {"minimal_pairs", "needle_items"}  # take a probe, and a text
    assert {name for name, made in returns.items() if made is datasets.Dataset} - others == set(BUILDERS)


@pytest.mark.parametrize("kind", ["pair", "sentence"])
@pytest.mark.parametrize("name", BUILDERS)
def test_the_rows_of_every_builder_have_what_its_users_need(name, kind):
    item = pair(premise=CHASE, hypothesis=CHASE) if kind == "pair" else sentence(CHASE)
    probe = BUILDERS[name]([item])
    [row] = probe
    single = kind == "sentence" and name != "semantic_role_swap"  # which makes pairs of sentences
    required = features_of(sentences=single) | {"builder": datasets.Value("string")}
    assert {column: probe.features.get(column) for column in required} == required
    [scored] = minimal_pairs(probe)
    assert scored["UID"] == row["builder"] == probe_info(probe).builder == name
    assert (scored["sentence_good"], scored["sentence_bad"]) == (row[f"original_{row['side']}"], row[row["side"]])
    found = evaluate(lambda *texts: ["entailment"] * len(texts[0]), None, probe, progress=False)
    assert (len(found.examples), found.agreement.value) == (1, 1)


@pytest.mark.parametrize("name", BUILDERS)
def test_side_and_labels_are_for_pairs_only(name):
    build = getattr(pelocality.probes, name)
    parameters = inspect.signature(build).parameters
    arguments = {"size": 3} if "size" in parameters else {}
    side = parameters["side"].default
    build([sentence(CHASE)], **arguments, side=side, labels=None)
    for chosen in ({"side": {"premise": "hypothesis", "hypothesis": "premise"}[side]}, {"labels": ("entailment",)}):
        with pytest.raises(ValueError, match="side and labels are for pairs, not for single sentences, got side='"):
            build([sentence(CHASE)], **arguments, **chosen)


@pytest.mark.parametrize("name", BUILDERS)
def test_rows_depend_on_items_and_seed_alone(name):
    build = BUILDERS[name]
    items = [*PAIRS[:3], *(pair(f"q{k}", premise=CHASE, hypothesis=CHASE) for k in range(3))]
    one = build(items, seed=3)
    shared = build((item for item in items), seed=3, num_proc=2)  # a generator is read once
    assert shared[:] == one[:]
    assert probe_info(shared) == probe_info(one)
    assert build(items[3:], seed=3)[:] == one.select(range(len(one) - 3, len(one)))[:]
    nothing = build([])
    assert (len(nothing), probe_info(nothing).items) == (0, 0)


def test_another_seed_makes_other_rows():
    assert constituency_shuffling(PAIRS, 3, seed=4)[:] != constituency_shuffling(PAIRS, 3, seed=3)[:]


def test_choices_depend_on_the_texts_and_not_on_place_or_uid():
    texts = ["one two three four five", "six seven eight nine ten", "red blue green black white"]

    def perturbed_texts(order):  # without ids, the uid is the place in the input
        rows = [{"premise": texts[k], "hypothesis": "x", "label": "neutral"} for k in order]
        return {row["original_premise"]: row["premise"] for row in random_shuffling(read_pairs(rows))}

    assert perturbed_texts([0, 1, 2]) == perturbed_texts([2, 0, 1])
    renamed = [sentence(TREE, uid) for uid in ("a", "b")]
    assert len({row["sentence"] for row in constituency_shuffling(renamed, range(2, 7))}) == 1
    clauses = "(S {0} (CC and) {0})".format("(S (NP (DT A) (NN nun)) (VP (VBD saw) (NP (NNP Ada))))")
    swaps = semantic_role_swap([sentence(clauses, str(k)) for k in range(9)], source="constituents")
    assert len(swaps) == 9
    assert len(set(swaps["hypothesis"])) == 1


def test_pairs_that_share_a_premise_get_different_shuffles():
    rows = [{"premise": "one two three four five six", "hypothesis": f"h{k}", "label": "neutral"} for k in range(9)]
    assert len(set(random_shuffling(read_pairs(rows))["premise"])) > 5


def test_a_changed_file_is_read_again_and_the_cache_of_datasets_stays_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "a.jsonl"
    row = {"premise": "one two three", "hypothesis": "x", "label": "neutral"}
    path.write_text(json.dumps(row))
    corpus = read_pairs(path)
    before = random_shuffling(corpus)
    path.write_text(json.dumps(row | {"premise": "four five six"}))
    assert random_shuffling(corpus)[0]["original_premise"] == "four five six"
    assert before[0]["original_premise"] == "one two three"
    assert not (tmp_path / "cache").exists()


def test_processes_are_given_what_can_be_pickled_which_a_generator_cannot(monkeypatch):
    pool = _build.multiprocess.Pool
    monkeypatch.setattr(
        _build.multiprocess,
        "Pool",
        lambda number, start, arguments: pool(number, start, pickle.loads(pickle.dumps(arguments))),
    )
    assert random_shuffling((p for p in PAIRS), num_proc=2)[:] == random_shuffling(PAIRS)[:]


@pytest.mark.parametrize("num_proc", [None, 2])
def test_an_error_in_the_corpus_arrives_as_it_was(tmp_path, num_proc):
    row = json.dumps({"premise": "one two", "hypothesis": "x", "label": "neutral"})
    path = tmp_path / "a.jsonl"
    path.write_text(f"{row}\n{row}\n{row}\n{{broken")
    with pytest.raises(ValueError, match=r"a\.jsonl:4: "):
        random_shuffling(read_pairs(path), num_proc=num_proc)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: constituency_shuffling(PAIRS, 1), ValueError, "size must be at least 2"),
        (lambda: constituency_shuffling(PAIRS, 3, side="left"), ValueError, "side must be 'premise'"),
        (lambda: constituency_shuffling(PAIRS, 3, spans="some"), ValueError, "spans"),
        (lambda: constituency_shuffling(PAIRS, 3, categories="NP"), TypeError, "categories"),
        (lambda: random_shuffling(PAIRS, labels="neutral"), TypeError, "labels"),
        (lambda: random_shuffling(PAIRS, seed=-1), ValueError, "seed"),
        (lambda: random_shuffling(PAIRS, seed=2**80), ValueError, "seed must be from 0 to 9223372036854775807"),
        (lambda: random_shuffling(PAIRS, num_proc=0), ValueError, "num_proc"),
        (lambda: random_shuffling(PAIRS[0]), TypeError, "got a Pair .* in a list"),
        (lambda: random_shuffling([{"premise": "a"}]), TypeError, "a list of dict; .*read_pairs"),
        (lambda: random_shuffling([PAIRS[0], PAIRS[0].premise]), TypeError, "one kind"),
        (lambda: constituency_shuffling(PAIRS, 3, "both"), TypeError, "positional"),
    ],
)
def test_invalid_arguments_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_minimal_pairs_hold_originals_and_different_perturbations():
    both = minimal_pairs(random_shuffling(PAIRS, side="both"))
    assert len(both) == 18
    assert set(both["side"]) == {"premise", "hypothesis"}
    assert both["pairID"] == [str(k) for k in range(18)]
    assert set(both["UID"]) == {"random_shuffling"}
    assert all(row["sentence_good"] != row["sentence_bad"] for row in both)
    assert both[0]["sentence_good"] == PAIRS[0].premise.text
    single = minimal_pairs(random_shuffling([sentence(TREE)]))
    assert single[0]["sentence_good"] == sentence(TREE).text
    bite = "(S (NP (DT A) (NN dog)) (VP (VBD bit) (NP (PRP him))) (. .))"
    [swap] = minimal_pairs(semantic_role_swap([sentence(bite)], source="constituents"))
    assert (swap["sentence_good"], swap["sentence_bad"]) == ("A dog bit him.", "He bit a dog.")
    assert (swap["reversible"], swap["mood"], swap["negated"]) == ("one", "declarative", False)
    assert [span["original"] for span in swap["spans"]] == ["A dog", "him"]


def test_each_side_of_a_pair_has_its_own_size_and_category_as_a_minimal_pair():
    hypothesis = "(S (NP (DT A) (JJ very) (JJ old) (JJ tall) (NN ship)) (VP (VBD sank)) (. .))"
    rows = constituency_shuffling([pair(premise=SHORT, hypothesis=hypothesis)], range(2, 6), side="both")
    assert rows["size"][:] == [5]
    assert [span["size"] for span in rows[0]["spans"]] == [2, 5]
    separate = minimal_pairs(rows)
    assert separate["size"][:] == [2, 5]
    assert [[span["side"] for span in spans] for spans in separate["spans"]] == [["premise"], ["hypothesis"]]
    whole = minimal_pairs(random_shuffling([pair(premise=SHORT, hypothesis=hypothesis)], side="both"))
    assert (whole["size"][:], whole["category"][:]) == ([3, 6], ["sentence", "sentence"])


def texts_of(probe, name):
    return zip(
        *(probe.select_columns([f"{prefix}{name}"])[:][f"{prefix}{name}"] for prefix in ("", "original_")), strict=True
    )


@pytest.mark.parametrize("path", corpora("nli_pairs.jsonl"))
def test_shuffles_of_pairs_keep_every_character(path):
    corpus = list(read_snli(path))
    for probe in (constituency_shuffling(corpus, range(3, 7), spans="all", side="both"), random_shuffling(corpus)):
        assert len(probe) > 0.94 * len(corpus)
        changed = [False] * len(probe)
        for name in ("premise", "hypothesis"):
            for row, (perturbed, original) in enumerate(texts_of(probe, name)):
                assert sorted(perturbed) == sorted(original)
                changed[row] = changed[row] or perturbed != original
        assert all(changed)


@pytest.mark.parametrize("path", corpora(".conllu"))
def test_shuffles_of_treebanks_keep_every_character_but_spaces(path):
    corpus = list(read_conllu(path, path.name[:2]))
    probe = constituency_shuffling(corpus, range(3, 7), spans="all")
    assert len(probe) > 0.4 * len(corpus)
    for perturbed, original in texts_of(probe, "sentence"):
        assert sorted(perturbed.replace(" ", "")) == sorted(original.replace(" ", ""))


def test_labels_match_whatever_their_case_hyphens_and_underscores():
    rows = [{"premise": "one two three", "hypothesis": "two one", "label": name} for name in ("Entailment", "neutral")]
    assert random_shuffling(read_pairs(rows), labels=("entailment",))["label"] == ["Entailment"]
    assert len(random_shuffling(read_pairs(rows), labels=("ENTAILMENT", "Neutral"))) == 2
    rows = [{"premise": "one two", "hypothesis": "two", "label": "not_entailment"}]
    assert len(random_shuffling(read_pairs(rows), labels=("not entailment",))) == 1


def test_numbers_of_numpy_are_numbers():
    words, found = parse_bracketed("(S (NP (DT a) (JJ b) (NN c)) (VP (VB d)))", "made up")
    item = Sentence(words, constituents=found)
    assert len(constituency_shuffling([item], size=np.int64(3), seed=np.int64(2**63 - 1), num_proc=np.int64(1))) == 1


def test_constituents_in_surface_tokens_are_those_that_touch_them():
    n = 40
    words = tuple("ab" if i % 3 else "." for i in range(n))
    tree = Dependencies(tuple(range(n)), ("dep",) * n, "x")
    sentence = Sentence(words, (*("" if i % 4 == 1 else " " for i in range(n - 1)), ""), dependencies=tree)
    expected = {}
    for phrase in dependency_constituents(tree).spans:
        touched = [k for k, (a, b) in enumerate(sentence.surface_tokens) if a < phrase.end and phrase.start < b]
        if touched:
            edges = sentence.surface_tokens[touched[0]][0], sentence.surface_tokens[touched[-1]][1]
            key = (touched[0], touched[-1] + 1, phrase.start <= edges[0] and edges[1] <= phrase.end)
            expected[key] = (*expected.get(key, ()), *phrase.labels)
    assert phrases_in_tokens(sentence) == expected
    assert len(expected) > 20


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1, 2**32, 2**63 - 1])
def test_generators_are_those_of_seed_and_digest(seed):
    digest = int.from_bytes(hashlib.blake2b(b"a\0b", digest_size=16).digest())
    expected = np.random.default_rng([seed, digest]).random(3)
    assert generator_for(seed, "a", "b").random(3).tolist() == expected.tolist()


FORKED = """
import json, os, pickle, sys
from pathlib import Path
from pelocality.corpora import Sentence, parse_bracketed
from pelocality.probes import constituency_shuffling, random_shuffling

words, tree = parse_bracketed(sys.argv[2], "made up")
items = [Sentence(words, uid="s", language="en", constituents=tree)]
probe = random_shuffling(items, seed=9)
child = os.fork()
if not child:
    Path(sys.argv[1], "of_child").write_text(random_shuffling(items).cache_files[0]["filename"])
    sys.exit()
os.waitpid(child, 0)
exists = Path(probe.cache_files[0]["filename"]).exists()
print(json.dumps([probe[:], constituency_shuffling(items, 3, seed=9)[:], exists]))
Path(sys.argv[1], "pickled").write_bytes(pickle.dumps(probe))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork exists on POSIX systems only")
def test_another_interpreter_makes_the_same_rows_and_keeps_its_files_until_it_ends(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", FORKED, str(tmp_path), TREE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    here = [random_shuffling([sentence(TREE)], seed=9)[:], constituency_shuffling([sentence(TREE)], 3, seed=9)[:]]
    assert json.loads(run.stdout) == json.loads(json.dumps([*here, True]))  # the file outlives a forked child
    assert not list(tmp_path.glob("pelocality-*"))  # child and parent removed their own
    assert "pelocality-" in (tmp_path / "of_child").read_text()
    with pytest.raises(FileNotFoundError, match="temporary-use-save_to_disk"):
        pickle.loads((tmp_path / "pickled").read_bytes())
