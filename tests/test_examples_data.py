"""The small corpus in examples/data: its layers agree, its trees are valid, and every builder finds rows in it."""

import json
import re
from collections import Counter

import conllu
import nltk
import pytest

from pelocality import (
    constituency_shuffling,
    example_data,
    probe_info,
    random_shuffling,
    read_conllu,
    read_frames,
    read_snli,
    read_trees,
    semantic_role_swap,
    window_shuffling,
)
from pelocality.corpora import dependency_constituents, parse_bracketed, read_pairs
from pelocality.evaluation.dependencies import dependency_distances
from pelocality.probes import minimal_pairs
from tests.data import EXAMPLES

TREEBANKS = sorted(EXAMPLES.glob("*.conllu"))
ENGLISH = EXAMPLES / "en_sentences.conllu"
PAIRS = EXAMPLES / "nli_pairs.jsonl"
LABELS = {"entailment", "neutral", "contradiction"}
SWAPS = {"source": "constituents", "label_policy": "not entailment"}

UPOS = frozenset(
    {"ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"}
    | {"PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"}
)
RELATIONS = frozenset(
    {"acl", "advcl", "advmod", "amod", "appos", "aux", "case", "cc", "ccomp", "clf", "compound", "conj", "cop"}
    | {"csubj", "dep", "det", "discourse", "dislocated", "expl", "fixed", "flat", "goeswith", "iobj", "list", "mark"}
    | {"nmod", "nsubj", "nummod", "obj", "obl", "orphan", "parataxis", "punct", "reparandum", "root", "vocative"}
    | {"xcomp", "acl:relcl", "aux:pass", "det:poss", "nmod:poss", "nsubj:pass", "obl:agent"}
)
FEATURES = frozenset(
    {"Case", "Definite", "Degree", "Gender", "Mood", "NumForm", "NumType", "Number", "Number[psor]", "Person"}
    | {"Polarity", "Poss", "PronType", "Reflex", "Tense", "VerbForm", "Voice"}
)
# allowed parts of speech of the dependent, by relation
PARTS_OF_SPEECH = {
    "punct": {"PUNCT"},
    "cc": {"CCONJ"},
    "case": {"ADP", "PART"},
    "mark": {"SCONJ", "PART"},
    "det": {"DET"},
    "nummod": {"NUM"},
    "amod": {"ADJ"},
    "aux": {"AUX"},
    "cop": {"AUX"},
    "advmod": {"ADV", "PART", "ADJ"},
    "discourse": {"INTJ"},
    "nsubj": {"NOUN", "PROPN", "PRON"},
    "obj": {"NOUN", "PROPN", "PRON"},
    "iobj": {"NOUN", "PROPN", "PRON"},
    "obl": {"NOUN", "PROPN", "PRON"},
    "nmod": {"NOUN", "PROPN", "PRON"},
}


def blocks(path):
    return conllu.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", TREEBANKS, ids=lambda path: path.name)
def test_every_sentence_is_a_projective_tree_with_one_root(path):
    sentences = list(read_conllu(path, path.name[:2]))  # which refuses cycles and heads out of range
    assert len({sentence.uid for sentence in sentences}) == len(sentences)
    for sentence in sentences:
        layer = sentence.dependencies
        assert layer.heads.count(0) == 1, sentence.uid
        assert layer.relations[layer.heads.index(0)] == "root", sentence.uid
        with_dependents = {k for k, head in enumerate(layer.heads) if layer.heads.count(k + 1)}
        # one contiguous phrase for each word with dependents
        assert len(dependency_constituents(layer).spans) == len(with_dependents), sentence.uid


@pytest.mark.parametrize("path", TREEBANKS, ids=lambda path: path.name)
def test_labels_are_those_of_universal_dependencies(path):
    for sentence in blocks(path):
        for token in sentence:
            where = f"{sentence.metadata['sent_id']}: {token['form']}"
            if not isinstance(token["id"], int):
                assert (token["upos"], token["head"]) == ("_", None), where
                continue
            relation = token["deprel"]
            assert token["upos"] in UPOS, where
            assert relation in RELATIONS, where
            assert set(token["feats"] or {}) <= FEATURES, where
            assert list(token["feats"] or {}) == sorted(token["feats"] or {}, key=str.lower), where
            assert token["upos"] in PARTS_OF_SPEECH.get(relation.split(":")[0], UPOS), where
            assert (token["upos"] == "PUNCT") == (relation == "punct"), where
            assert token["lemma"] not in (None, "_"), where
            if token["head"]:
                head = sentence.filter(id=token["head"])[0]
                if relation.split(":")[0] in ("det", "amod", "nummod") or relation == "nmod:poss":
                    assert head["upos"] in ("NOUN", "PROPN", "PRON"), where
                assert head["deprel"] not in ("punct", "case", "cc", "mark", "det", "aux", "aux:pass", "cop"), where


@pytest.mark.parametrize("path", TREEBANKS, ids=lambda path: path.name)
def test_verbs_agree_with_their_subjects_and_articles_with_their_nouns(path):
    for sentence in blocks(path):
        words = {token["id"]: token for token in sentence if isinstance(token["id"], int)}
        for token in words.values():
            head, feats = words.get(token["head"], {}), token["feats"] or {}
            if token["deprel"] in ("det", "det:poss", "amod"):
                theirs = head["feats"] or {}
                for name in ("Case", "Gender", "Number"):
                    assert feats.get(name) in (None, theirs.get(name)), (sentence.metadata["sent_id"], token["form"])
            if token["deprel"].startswith("nsubj") and feats.get("PronType") not in ("Rel", "Int"):
                verbs = [
                    t for t in words.values() if t["head"] == head["id"] and t["deprel"].startswith(("aux", "cop"))
                ]
                finite = next(f for t in [*verbs, head] if (f := t["feats"] or {}).get("VerbForm") == "Fin")
                joined = any(t["deprel"] == "conj" and t["head"] == token["id"] for t in words.values())
                number = "Plur" if joined else feats.get("Number")
                assert finite.get("Number") in (None, number), sentence.metadata["sent_id"]
                assert finite.get("Person") in (None, feats.get("Person", "3")), sentence.metadata["sent_id"]


def test_the_numbers_of_sentences_and_pairs_are_those_of_the_readme():
    assert {path.name: len(list(read_conllu(path, path.name[:2]))) for path in TREEBANKS} == {
        "de_sentences.conllu": 14,
        "en_sentences.conllu": 76,
        "fr_sentences.conllu": 14,
    }
    pairs = read_snli(PAIRS)
    assert Counter(pair.label for pair in pairs) == dict.fromkeys(LABELS, 24)
    assert pairs.dropped == {"no gold label": 2}
    assert Counter(pair.label for pair in read_pairs(EXAMPLES / "nli_train.jsonl")) == dict.fromkeys(LABELS, 25)
    assert sum(path.stat().st_size for path in EXAMPLES.iterdir()) < 300_000


@pytest.mark.parametrize("path", TREEBANKS, ids=lambda path: path.name)
def test_texts_are_read_exactly(path):
    texts = [sentence.metadata["text"] for sentence in blocks(path)]
    assert [sentence.text for sentence in read_conllu(path, path.name[:2])] == texts
    assert len(set(texts)) == len(texts)


def test_trees_frames_and_dependencies_are_of_the_same_sentences():
    readers = (read_conllu(ENGLISH, "en"), read_trees(EXAMPLES / "trees.mrg"), read_frames(EXAMPLES / "frames.jsonl"))
    for sentence, tree, frames, block in zip(*readers, blocks(ENGLISH), strict=True):
        assert sentence.words == tree.words == frames.words
        assert sentence.text == tree.text == frames.text
        assert sentence.uid == frames.uid
        assert frames.constituents.bracketed == tree.constituents.bracketed
        assert frames.dependencies.heads == sentence.dependencies.heads
        assert frames.dependencies.relations == sentence.dependencies.relations
        assert frames.dependencies.upos == sentence.dependencies.upos
        assert tree.constituents.tags == tuple(token["xpos"] for token in block if isinstance(token["id"], int))


def test_subjects_objects_and_obliques_are_phrases_of_the_brackets():
    for sentence in read_frames(EXAMPLES / "frames.jsonl"):
        phrases = {(c.start, c.end): c.labels for c in sentence.constituents.spans}
        for span in dependency_constituents(sentence.dependencies).spans:
            relation = span.labels[0].split(":")[0]
            wanted = {"nsubj": {"NP", "WHNP"}, "obj": {"NP"}, "iobj": {"NP"}, "obl": {"PP"}}.get(relation)
            assert wanted is None or wanted & set(phrases[span.start, span.end]), (sentence.uid, span)


def test_arguments_of_frames_are_phrases_around_a_verb():
    frames = [(sentence, frame) for sentence in read_frames(EXAMPLES / "frames.jsonl") for frame in sentence.frames]
    assert len(frames) > 80
    for sentence, frame in frames:
        phrases = {(c.start, c.end) for c in sentence.constituents.spans}
        layer = sentence.dependencies
        assert frame.verb[1] - frame.verb[0] == 1
        assert layer.upos[frame.verb[0]] in ("VERB", "AUX"), (sentence.uid, frame)
        assert re.fullmatch(r"[a-z]+\.\d\d", frame.roleset)
        assert len({argument.role for argument in frame.arguments}) == len(frame.arguments)
        for argument in frame.arguments:
            alone = argument.end - argument.start == 1
            assert alone or (argument.start, argument.end) in phrases, (sentence.uid, argument)
            assert re.fullmatch(r"(R-)?ARG([0-4]|M-[A-Z]{3})", argument.role)
            assert not argument.start <= frame.verb[0] < argument.end, (sentence.uid, argument)


def test_frames_have_the_lemma_of_their_verb():
    for sentence, block in zip(read_frames(EXAMPLES / "frames.jsonl"), blocks(ENGLISH), strict=True):
        words = [token for token in block if isinstance(token["id"], int)]
        for frame in sentence.frames:
            assert frame.roleset.split(".")[0] == words[frame.verb[0]]["lemma"]


def test_parses_of_pairs_contain_their_sentences():
    uids = []
    for row in map(json.loads, PAIRS.read_text(encoding="utf-8").splitlines()):
        uids.append(row["pairID"])
        assert row["gold_label"] in LABELS | {"-"}
        for name in ("sentence1", "sentence2"):
            words, _ = parse_bracketed(row[f"{name}_parse"], "x")
            binary = re.findall(r"[^\s()]+", row[f"{name}_binary_parse"])
            assert list(words) == binary
            assert "".join(words) == row[name].replace(" ", "")
            marked = re.sub(r"(?<=[^\s()])(?=\s)|(?<=\()", "", row[f"{name}_binary_parse"])
            tree = nltk.Tree.fromstring(re.sub(r"\((?=\s)", "(X", marked))
            assert all(len(node) == 2 for node in tree.subtrees())
    assert len(set(uids)) == len(uids)
    premises = {row["premise"] for row in map(json.loads, (EXAMPLES / "nli_train.jsonl").open(encoding="utf-8"))}
    assert not premises & {pair.premise.text for pair in read_snli(PAIRS)}  # no test item is in the training set


@pytest.mark.parametrize("size", [3, 4, 5, 6])
@pytest.mark.parametrize("builder", [constituency_shuffling, window_shuffling])
def test_shuffles_find_constituents_and_windows_of_every_size(builder, size):
    assert len(builder(read_snli(PAIRS), size)) >= 9
    assert len(builder(read_conllu(ENGLISH, "en"), size)) >= 9


@pytest.mark.parametrize("path", TREEBANKS, ids=lambda path: path.name)
def test_every_language_gives_shuffles_and_distances(path):
    corpus = read_conllu(path, path.name[:2])
    assert len(constituency_shuffling(corpus, range(3, 7))) >= 5
    assert len(window_shuffling(corpus, range(3, 7))) >= 3
    assert len(random_shuffling(corpus)) >= 14
    relations = set(dependency_distances(corpus).to_frame()["relation"])
    assert {"all", "det", "nsubj", "obj", "obl", "nsubj:pass", "aux:pass", "acl:relcl"} <= relations


def test_role_swaps_are_found_by_every_source_in_active_and_passive():
    for corpus, arguments in (
        (read_frames(EXAMPLES / "frames.jsonl"), {"source": "frames"}),
        (read_conllu(ENGLISH, "en"), {"source": "dependencies"}),
        (read_trees(EXAMPLES / "trees.mrg"), {"source": "constituents"}),
    ):
        skipping, reinflecting = (
            semantic_role_swap(corpus, agreement=how, **arguments) for how in ("skip", "reinflect")
        )
        assert {"active", "passive"} == set(skipping["category"])
        assert len(reinflecting) > len(skipping) >= 20
        assert "A small dog was chased by the postman." in skipping["hypothesis"]
        assert "He likes Clara." in skipping["hypothesis"]
        reasons = probe_info(skipping).skipped
        assert reasons["the verb would not agree with its new subject"]
        assert reasons["a reflexive or reciprocal in the sentence"]
    entailed = semantic_role_swap(read_snli(PAIRS), labels=("entailment",), **SWAPS)
    assert len(entailed) >= 5
    assert len(minimal_pairs(entailed)) == len(entailed)


def test_languages_that_mark_roles_by_order_are_swapped_and_those_that_mark_them_by_case_are_not():
    asked = {"source": "dependencies", "languages": ("de", "en", "fr")}
    swapped = {path.name[:2]: semantic_role_swap(read_conllu(path, path.name[:2]), **asked) for path in TREEBANKS}
    assert len(swapped["de"]) == 0
    assert {"La souris regarde le chat.", "Le voleur surprend la voisine."} <= set(swapped["fr"]["hypothesis"])


def test_the_running_text_has_a_hundred_paragraphs_of_thirty_words_or_more():
    lines = (EXAMPLES / "text.txt").read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines) == 100
    assert min(len(line.split()) for line in lines) >= 30


def test_a_file_is_found_by_its_name_and_a_mistyped_name_is_said():
    assert example_data("nli_pairs.jsonl").samefile(PAIRS)
    with pytest.raises(ValueError, match=r"got 'nli_pair.jsonl'; did you mean 'nli_pairs.jsonl'\?"):
        example_data("nli_pair.jsonl")
