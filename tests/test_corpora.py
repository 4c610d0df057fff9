"""Readers: streaming, exact text, line numbers in errors, counts of items left out."""

import gzip
import json
import pickle
import unicodedata
from dataclasses import replace
from pathlib import Path

import datasets
import pandas
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pelocality.corpora import (
    Dependencies,
    Sentence,
    SpacyParser,
    StanzaParser,
    plain_sentence,
    read_conllu,
    read_frames,
    read_pairs,
    read_snli,
    read_texts,
    read_trees,
)
from pelocality.probes import constituency_shuffling, probe_info, random_shuffling, semantic_role_swap
from tests.data import DATA, NEEDS_DATA, corpora

ROW = {"premise": "a b", "hypothesis": "c", "label": "n"}
ROWS = datasets.Dataset.from_list([ROW])
TREES = "(ROOT (S (NP (DT A) (NN cat)) (VP (VBZ naps)) (. .)))"


def snli_row(**changes):
    row = {
        "gold_label": "neutral", "pairID": "p1",
        "sentence1": "A cat naps.", "sentence1_parse": TREES,
        "sentence2": "It's old.",
        "sentence2_parse": "(ROOT (S (NP (PRP It)) (VP (VBZ 's) (ADJP (JJ old))) (. .)))",
    }  # fmt: skip
    return row | changes


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_snli_drops_pairs_without_gold_label_and_counts_them_at_every_pass(tmp_path):
    corpus = read_snli(write(tmp_path / "a.jsonl", snli_row(), snli_row(gold_label="-"), snli_row(pairID="p2")))
    for _ in range(2):
        pairs = list(corpus)
        assert [p.uid for p in pairs] == ["p1", "p2"]
        assert corpus.dropped == {"no gold label": 1}
    assert pairs[0].hypothesis.text == "It's old."
    assert pairs[0].premise.constituents.automatic
    assert "a.jsonl:1" in pairs[0].premise.provenance


def table(path, *rows):
    path.write_text("".join("\t".join(map(str, row)) + "\r\n" for row in rows), newline="")
    return path


def test_the_official_tables_of_snli_multinli_and_hans_are_read_with_their_parses(tmp_path):
    row = snli_row(sentence1='A "cat" naps.', sentence1_parse=TREES.replace("(NN cat)", "(`` ``) (NN cat) ('' '')"))
    row = {"gold_label": row.pop("gold_label"), "sentence1_binary_parse": "( x )", **row}
    labels = ["label1", "label2", "label3", "label4", "label5"]
    # SNLI's tables fill up the labels that an annotator did not give, MultiNLI's leave out their cells
    snli = table(tmp_path / "snli_1.0_dev.txt", [*row, *labels], [*row.values(), "neutral", "", "", "", ""])
    multinli = table(tmp_path / "multinli.txt", [*row, *labels], [*row.values(), "neutral"])
    hans = table(tmp_path / "heuristics.txt", [*row, "template"], [*row.values(), "temp1"])
    for path in (snli, multinli, hans):
        [pair] = read_snli(path)
        assert (pair.premise.text, pair.label, pair.uid) == ('A "cat" naps.', "neutral", "p1")
        assert pair.premise.constituents.spans[0].labels == ("S",)
    with pytest.raises(ValueError, match=r"a\.txt:2: a row must have 8 cells, got 7"):
        list(read_snli(table(tmp_path / "a.txt", [*row, "template"], row.values())))


def test_the_official_table_of_sick_is_read_as_plain_pairs(tmp_path):
    names = ["pair_ID", "sentence_A", "sentence_B", "entailment_label", "relatedness_score"]
    path = table(tmp_path / "SICK.txt", names, [7, "A man's here", 'A "man" is', "NEUTRAL", 4.5])
    columns = {"premise": "sentence_A", "hypothesis": "sentence_B", "label": "entailment_label", "uid": "pair_ID"}
    [pair] = read_pairs(path, **columns)
    assert (pair.premise.text, pair.hypothesis.text) == ("A man's here", 'A "man" is')
    assert (pair.label, pair.uid) == ("NEUTRAL", "7")
    compressed = tmp_path / "SICK.txt.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert [pair.uid for pair in read_pairs(compressed, **columns)] == ["7"]


def test_two_files_of_one_name_give_their_sentences_two_names(tmp_path):
    row = {"premise": "a", "hypothesis": "b", "label": "n"}
    for folder in ("mnli", "snli"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "dev.jsonl", row)
    names = [pair.uid for folder in ("mnli", "snli") for pair in read_pairs(tmp_path / folder / "dev.jsonl")]
    assert names == ["mnli/dev.jsonl:1", "snli/dev.jsonl:1"]


def test_reading_is_lazy(tmp_path):
    corpus = iter(read_snli(write(tmp_path / "a.jsonl", snli_row(), "{broken")))
    assert next(corpus).uid == "p1"


def test_trees_may_share_a_line_or_take_many(tmp_path):
    path = write(tmp_path / "a.mrg", f"{TREES} {TREES}", "", "( (S", "  (NP (PRP We))", " (VP (VBP go))) )")
    sentences = list(read_trees(path))
    assert [s.text for s in sentences] == ["A cat naps.", "A cat naps.", "We go"]
    assert [s.uid for s in sentences] == [f"{tmp_path.name}/a.mrg:{place}" for place in ("1", "1.2", "3")]


def conllu(*rows):
    return "\n".join(r if r.startswith("#") or not r else "\t".join(r.split(" ")) for r in rows) + "\n\n"


def test_conllu_reads_multiword_tokens_empty_nodes_spacing_and_features(tmp_path):
    text = conllu(
        "# sent_id = s1", "# text = Beim  See(da)!",
        "1-2 Beim _ _ _ _ _ _ _ _", "1 Bei _ ADP _ _ 3 case _ _", "2 dem _ DET _ Case=Dat 3 det _ _",
        "3 See _ NOUN _ Case=Dat|Number=Sing 0 root _ SpaceAfter=No", "3.1 ist _ VERB _ _ _ _ _ _",
        "4 ( _ PUNCT _ _ 5 punct _ SpaceAfter=No", "5 da _ ADV _ _ 3 advmod _ SpaceAfter=No",
        "6 ) _ PUNCT _ _ 5 punct _ SpaceAfter=No", "7 ! _ PUNCT _ _ 3 punct _ _",
    )  # fmt: skip
    [sentence] = read_conllu(write(tmp_path / "de_x-ud-test.conllu", text))
    assert (sentence.uid, sentence.language) == ("s1", "de")
    assert sentence.words == ("Bei", "dem", "See", "(", "da", ")", "!")
    assert sentence.text == "Beim  See(da)!"
    assert sentence.multiword_tokens == ((0, 2, "Beim"),)
    assert sentence.dependencies.heads == (3, 3, 0, 5, 3, 5, 3)
    assert sentence.dependencies.features[2] == {"Case": "Dat", "Number": "Sing"}


GO = "1 Go _ VERB _ _ 0 root _ _"
ZUM = [["1-2", "zum", "_", "_", "_", "_", "_", "_", "_", "_"],
       ["1", "zu", "zu", "ADP", "APPR", "_", "3", "case", "_", "_"],
       ["2", "dem", "der", "DET", "ART", "Case=Dat", "3", "det", "_", "_"],
       ["3", "See", "See", "NOUN", "NN", "Case=Dat|Number=Sing", "0", "root", "_", "SpaceAfter=No"],
       ["3.1", "ist", "sein", "VERB", "_", "_", "_", "_", "0:root", "_"],
       ["4", ".", ".", "PUNCT", "$.", "_", "3", "punct", "_", "_"]]  # fmt: skip
TEN = ["ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC"]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(11)), st.sampled_from(["# global.columns = {}", "#global.columns={}  "]),
       st.sampled_from(" \t"), st.sampled_from(["\n", "\n# sent_id = 1\n", "\n\n"]))  # fmt: skip
def test_the_columns_that_a_file_names_hold_for_all_its_sentences(tmp_path, order, header, between, after):
    names = [[*TEN, "PARSEME:MWE"][column] for column in order]
    rows = ["\t".join([*row, "*"][column] for column in order) for row in ZUM]
    text = header.format(between.join(names)) + after + ("\n".join(rows) + "\n\n") * 3
    path, plain = tmp_path / "de_a-ud-dev.cupt", tmp_path / "plain" / "de_a-ud-dev.cupt"
    path.write_text(text)
    plain.parent.mkdir(exist_ok=True)
    plain.write_text(conllu(*(" ".join(row) for row in ZUM)))
    [expected] = read_conllu(plain)
    for sentence in (found := list(read_conllu(path))):
        dependencies = replace(sentence.dependencies, source=expected.dependencies.source)
        assert replace(sentence, uid=expected.uid, source=expected.source, dependencies=dependencies) == expected
    assert len(found) == 3
    assert expected.text == "zum See."


def test_columns_that_are_not_there_are_unknown(tmp_path):
    text = conllu("# global.columns = FORM ID", "It 1", "'s 2", "old 3", ". 4", "", "# text = No", "No 1")
    first, second = read_conllu(write(tmp_path / "a.conllup", text), "en")
    assert (first.text, first.spacing, first.dependencies, first.frames) == ("It's old.", "rule", None, None)
    assert (second.text, second.spacing) == ("No", "corpus")


HEADS = ["1 The _ DET _ _ 2 det", "2 man _ NOUN _ _ 5 nsubj", "3 who _ PRON _ _ 4 nsubj", "4 sleeps _ VERB _ _ 2 acl",
         "5 sees _ VERB _ _ 0 root", "6 a _ DET _ _ 7 det", "7 dog _ NOUN _ _ 5 obj"]  # fmt: skip
SENSES = ["_", "_", "_", "sleep.01", "see.01", "_", "_"]
BY_HEAD = ["_ _", "A0 A0", "R-A0 _", "_ _", "_ _", "_ _", "_ A1"]
PLUS = f"# global.columns = {' '.join(TEN[:8])} UP:PRED UP:ARGHEADS"
OF_HEADS = ["_ _", "_ _", "_ _", "sleep.01 A0:2|R-A0:3", "see.01 A0:2|A1:7", "_ _", "_ _"]
SPANS = ["_", "_", "_", "A0:1-2|R-A0:3-3", "A0:1-4|A1:6-7", "_", "_"]


def beside(*columns):
    return list(map(" ".join, zip(HEADS, *columns, strict=True)))


PROPOSITIONS = {
    "1": beside(["_", "_", "_", "Y", "Y", "_", "_"], SENSES, BY_HEAD),
    "English": beside(["_ _"] * 7, SENSES, [cells.replace("A", "ARG") for cells in BY_HEAD]),
    "2": [f"{PLUS} UP:ARGSPANS", *beside(OF_HEADS, SPANS)],
    "2 by heads": [PLUS, *beside(OF_HEADS)],
}


@pytest.mark.parametrize("version", PROPOSITIONS)
def test_dependencies_and_frames_of_universal_propositions_are_in_one_file(tmp_path, version):
    rows = PROPOSITIONS[version]
    for sentence in (found := list(read_conllu(write(tmp_path / "en_x-up-dev.conllup", conllu(*rows, "", *rows))))):
        assert sentence.language == "en"
        assert sentence.text == "The man who sleeps sees a dog"
        assert sentence.dependencies.relations[:2] == ("det", "nsubj")
        assert [(f.roleset, f.verb, [tuple(a) for a in f.arguments]) for f in sentence.frames] == [
            ("sleep.01", (3, 4), [("ARG0", 0, 2), ("R-ARG0", 2, 3)]),
            ("see.01", (4, 5), [("ARG0", 0, 4), ("ARG1", 5, 7)]),
        ]
    assert len(found) == 2


def test_trees_of_udpipe_are_automatic(tmp_path):
    text = conllu("# generator = UDPipe 2", "# udpipe_model = english-ewt", "# newdoc", GO, "", GO)
    assert [s.automatic for s in read_conllu(write(tmp_path / "a.conllu", text), "en")] == [True, True]
    assert not read_conllu(write(tmp_path / "a.conllu", conllu(GO)), "en")[0].automatic


@pytest.mark.parametrize(
    ("name", "language"), [("en-ud-dev.conllu", "en"), ("EN_x-ud-dev.conllu", "en"), ("eng_x-ud-dev.conllu", "en"),
                           ("de_pud-ud-test.conllu.gz", "de"), ("lzh_x-ud-dev.conllu", "lzh"), ("dev.conllu", ""),
                           ("my-dev.conllu", ""), ("dev_x.conllu", ""), ("no_labels.conllu", ""),
                           ("it_works.conllu", ""), ("mt_output.conllu", ""), ("de_pud.conllu", "")],
)  # fmt: skip
def test_the_language_of_a_treebank_is_in_its_name_or_a_warning_is_logged(tmp_path, name, language, caplog):
    content = conllu("1 Go _ VERB _ _ 0 root _ _").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    [sentence] = read_conllu(tmp_path / name)
    assert sentence.language == language
    assert ("pass language=" in caplog.text) == (not language)


def test_language_tags_are_normalised(tmp_path):
    path = write(tmp_path / "a.mrg", TREES)
    assert [s.language for tag in ("EN", "eng", "en-US") for s in read_trees(path, tag)] == ["en"] * 3


def frames_row(**changes):
    row = {
        "id": "f1", "text": "Cats chase mice.", "tokens": ["Cats", "chase", "mice", "."],
        "tree": "(TOP (S (NP (NNS Cats)) (VP (VBP chase) (NP (NNS mice))) (. .)))",
        "head": [2, 0, 2, 2], "deprel": ["nsubj", "root", "obj", "punct"], "upos": ["NOUN", "VERB", "NOUN", "PUNCT"],
        "frames": [{"roleset": "chase.01", "args": [["ARG0", 0, 1], ["V", 1, 2], ["ARG1", 2, 3]]}],
    }  # fmt: skip
    return row | changes


def test_frames_come_with_both_trees(tmp_path):
    [sentence] = read_frames(write(tmp_path / "f.jsonl", frames_row()))
    assert sentence.text == "Cats chase mice."
    assert sentence.frames[0].verb == (1, 2)
    assert [(a.role, a.start, a.end) for a in sentence.frames[0].arguments] == [("ARG0", 0, 1), ("ARG1", 2, 3)]
    assert sentence.dependencies is not None
    assert sentence.constituents is not None


def test_frames_without_tokens_take_words_from_the_tree(tmp_path):
    row = {"id": "f1", "tree": frames_row()["tree"], "frames": [{"r": "chase.01", "a": [["V", 1, 2]]}]}
    [sentence] = read_frames(write(tmp_path / "f.jsonl", row))
    assert (sentence.text, sentence.spacing) == ("Cats chase mice.", "rule")


def test_frames_need_no_tree(tmp_path):
    row = {name: value for name, value in frames_row().items() if name != "tree"}
    for each in (row, row | {"tree": None}):
        [sentence] = read_frames(write(tmp_path / "f.jsonl", each))
        assert (sentence.constituents, sentence.text) == (None, "Cats chase mice.")
        assert [a.role for a in sentence.frames[0].arguments] == ["ARG0", "ARG1"]
    with pytest.raises(ValueError, match="'tree'"):
        list(read_frames(write(tmp_path / "f.jsonl", row | {"tokens": None})))


@pytest.mark.parametrize("tree", ["(TOP (X (NFP //)))) ", frames_row()["tree"].replace("mice", "rats")])
def test_a_tree_that_does_not_fit_the_words_is_left_out_with_a_warning(tmp_path, caplog, tree):
    [sentence] = read_frames(write(tmp_path / "f.jsonl", frames_row(tree=tree, id=3)))
    assert (sentence.constituents, sentence.text, sentence.uid) == (None, "Cats chase mice.", "3")
    assert "f.jsonl:1: the tree does not fit the tokens" in caplog.text


ODD = snli_row(sentence1="A ice cream naps.", sentence1_parse=TREES.replace("(NN cat)", "(NN ice cream)"))
UNLABELLED = [snli_row(gold_label=label, sentence1_parse=None) for label in (None, "", "-", " - ")]
UNLABELLED.append({name: value for name, value in snli_row().items() if name != "gold_label"})
OTHER_TEXTS = [frames_row(text="Dogs chase mice."), frames_row(text=None)]
NULLS = [ROW | {name: value} for name in ("premise", "hypothesis") for value in (None, float("nan"), pandas.NA)]
RAGGED = ["1 Ada _ PROPN _ _ 2 nsubj _ _ _ A0", "2 saw _ VERB _ _ 0 root _ _ see.01"]


@pytest.mark.parametrize(
    ("read", "rows", "kept", "dropped"),
    [
        (read_snli, [snli_row(), *UNLABELLED], "A cat naps.", {"no gold label": 5}),
        (read_snli, [snli_row(sentence1="A kitten."), snli_row()], "A cat naps.", {"text and parse disagree": 1}),
        (read_snli, [ODD, snli_row()], "A cat naps.", {"a node of the parse holds several words": 1}),
        (read_trees, [TREES, "(S (NP (-NONE- *)))"], "A cat naps.", {"tree without words": 1}),
        (read_frames, OTHER_TEXTS, "Cats chase mice.", {"text and words disagree": 1}),
        (read_conllu, [conllu(GO), conllu("# text = Stop", GO)], "Go", {"text and words disagree": 1}),
        (read_conllu, [conllu(*RAGGED), conllu(GO)], "Go", {"columns of arguments are not those of the predicates": 1}),
        (read_conllu, [conllu("# a"), conllu(GO), conllu("# text = b")], "Go", {"comments without words": 2}),
    ],
)
def test_what_is_left_out_is_counted(tmp_path, read, rows, kept, dropped):
    corpus = read(write(tmp_path / "en_x-ud-dev", *rows))
    assert [getattr(item, "premise", item).text for item in corpus] == [kept]
    assert corpus.dropped == dropped


def test_a_pair_with_a_null_text_is_dropped_and_counted_and_a_warning_says_so_if_none_is_left(caplog):
    corpus = read_pairs([ROW, *NULLS, ROW | {"hypothesis": "null"}])
    assert [pair.hypothesis.text for pair in corpus] == ["c", "null"]
    assert corpus.dropped == {"a text is null": 6}
    for frame, warnings in ((pandas.DataFrame([ROW, *NULLS]), 0), (pandas.DataFrame(NULLS), 1)):
        list(read_pairs(frame))
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == warnings


@pytest.mark.parametrize("suffix", ["jsonl", "tsv", "csv"])
def test_plain_pairs_come_from_files_of_three_kinds(tmp_path, suffix):
    rows = [{"premise": 'A "cat" naps.', "hypothesis": "It's asleep, maybe.", "label": "neutral"}]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write(path, *rows)
    elif suffix == "tsv":
        path.write_text("\n".join("\t".join(r) for r in (rows[0].keys(), rows[0].values())))
    else:
        path.write_text('premise,hypothesis,label\n"A ""cat"" naps.","It\'s asleep, maybe.",neutral\n')
    [pair] = read_pairs(path)
    assert (pair.premise.text, pair.hypothesis.text, pair.label) == tuple(rows[0].values())


def test_labels_of_a_dataset_get_their_names_and_missing_ones_are_dropped(caplog):
    features = datasets.Features(dict.fromkeys(("premise", "hypothesis"), datasets.Value("string")))
    features["label"] = datasets.ClassLabel(names=["entailment", "neutral"])
    rows = {"premise": ["a b", "c d"], "hypothesis": ["a", "c"], "label": [1, -1]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    for names in (None, ["entailment", "neutral"]):
        corpus = read_pairs(dataset, label_names=names)
        assert [pair.label for pair in corpus] == ["neutral"]
        assert corpus.dropped == {"no gold label": 1}
    assert not caplog.messages
    [pair] = read_pairs(dataset, label_names=["neutral", "entailment"])  # such as the order of a model
    assert pair.label == "entailment"
    assert "label_names= orders the labels ['neutral', 'entailment'], the dataset ['entailment', 'neutral']" in (
        caplog.text
    )


def test_a_data_frame_is_read_by_its_rows():
    columns = {"premise": ["a b", "c"], "hypothesis": ["d", "e"], "label": [1, None], "id": [7, 8], "features": [1, 2]}
    corpus = read_pairs(pandas.DataFrame(columns), label_names=["entailment", "neutral"], uid="id")
    for _ in range(2):
        assert [(pair.premise.text, pair.label, pair.uid) for pair in corpus] == [("a b", "neutral", "7")]
        assert corpus.dropped == {"no gold label": 1}


def test_corpora_can_be_sent_to_other_processes(tmp_path):
    write(tmp_path / "a.jsonl", {"premise": "a", "hypothesis": "b", "label": "n"})
    for source in (tmp_path / "a.jsonl", [{"premise": "a", "hypothesis": "b", "label": "n"}]):
        copy = pickle.loads(pickle.dumps(read_pairs(source)))
        assert [pair.label for pair in copy] == ["n"]


class Once:
    """Rows that can be read once, such as those of an open file."""

    def __init__(self):
        self.rows = iter([{"premise": "a b", "hypothesis": "c", "label": "n"}] * 3)

    def __iter__(self):
        return self.rows


@pytest.mark.parametrize(
    ("read", "error", "says"),
    [
        (lambda: read_pairs(row for row in []), TypeError, "got a generator; make a list"),
        (lambda: read_pairs(Once()), TypeError, "make a list"),  # a builder would lose its first row
        (lambda: read_pairs(datasets.DatasetDict(test=ROWS)), TypeError, "one of several splits"),
        (lambda: read_pairs(ROWS[:]), TypeError, r"datasets\.Dataset\.from_dict of columns"),
        (lambda: list(read_pairs(ROWS.with_format("pandas"))), ValueError, "'label'"),
        (lambda: read_pairs("a.xlsx"), ValueError, "'.jsonl'"),
        (lambda: list(read_pairs([{**ROW, "label": 0}])), ValueError, "label 0 has no name; pass label_names="),
        (lambda: read_texts("A cat naps."), FileNotFoundError, "read_texts takes texts in a list"),
        (lambda: list(read_texts([3])), ValueError, "list:1: "),
        (lambda: read_texts(text for text in ["a"]), TypeError, "texts .*got a generator"),
        (lambda: read_texts(pandas.DataFrame({"text": ["a"]})), TypeError, r"frame\['text'\]"),
        (lambda: read_trees("a.mrg", language="English"), ValueError, "ISO code"),
    ],
)
def test_what_readers_cannot_read_is_refused_with_the_way_out(read, error, says):
    with pytest.raises(error, match=says):
        read()


@pytest.mark.parametrize(("named", "language"), [("", "de"), ("fr", "fr")])
def test_the_language_given_is_that_of_a_parser_that_names_none(named, language):
    def parser(texts):  # a generator function
        yield from (Sentence(tuple(text.split()), language=named) for text in texts)

    [pair] = read_pairs([ROW], parser=parser, language="de")
    assert (pair.premise.language, pair.hypothesis.language) == (language, language)
    assert (pair.premise.words, pair.premise.uid) == (("a", "b"), "list:1/premise")


def test_texts_come_from_a_list_or_a_file_with_one_a_line_and_go_to_every_builder(tmp_path):
    texts = ["The cat chased a dog.", " ", "Rain falls."]
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("\n".join(texts).encode()))

    def parser(texts):
        heads, relations = (2, 3, 0, 5, 3, 3), ("det", "nsubj", "root", "det", "obj", "punct")
        tags = ("DET", "NOUN", "VERB", "DET", "NOUN", "PUNCT")
        noun, past = {"Number": "Sing"}, {"VerbForm": "Fin", "Tense": "Past"}
        tree = Dependencies(heads, relations, "x", tags, ({}, noun, past, {}, noun, {}))
        return [replace(plain_sentence(text), dependencies=tree if "cat" in text else None) for text in texts]

    for source, name in ((texts, "list"), (path, f"{tmp_path.name}/a.txt.gz")):
        corpus = read_texts(source)
        assert [(s.text, s.uid) for s in corpus] == [(texts[0], f"{name}:1"), (texts[2], f"{name}:3")]
        assert len(random_shuffling(corpus)) == 2
        parsed = read_texts(source, parser=parser, language="en")
        assert len(constituency_shuffling(parsed, 2)) == 1
        assert semantic_role_swap(parsed, source="dependencies")["hypothesis"] == ["A dog chased the cat."]


def test_dashes_and_ellipses_of_plain_text_separate_surface_tokens():
    sentence = plain_sentence("He left--then came...and went -- home.")
    moved = [sentence.surface(*token) for token in sentence.surface_tokens]
    assert moved == ["He", "left", "then", "came", "and", "went", "home"]


def test_plain_text_comes_back_exactly():
    for text in ("Well-known dogs don't bark; 3.5% do!", "  spaced   out ", "C'est l'été…", "他来了。"):
        assert plain_sentence(text).text == text.strip()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("नमस्ते हिन्दी।", ("नमस्ते", "हिन्दी", "।")),
        ("שָׁלוֹם עֲלֵיכֶם!", ("שָׁלוֹם", "עֲלֵיכֶם", "!")),
        ("cafe\u0301 o\u0308de.", ("cafe\u0301", "o\u0308de", ".")),
        ("สวัสดีครับ เพื่อน", ("สวัสดีครับ", "เพื่อน")),
        ("မြန်မာစာ", ("မြန်မာစာ",)),
        ("می\u200cروم خانه", ("می\u200cروم", "خانه")),
        ("I ❤\ufe0f you", ("I", "❤\ufe0f", "you")),
        ("他来了。", ("他来了", "。")),
    ],
)  # fmt: skip
def test_a_mark_stays_with_its_letter(text, words):
    sentence = plain_sentence(text)
    assert (sentence.words, sentence.text) == (words, text)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab1 .,!'-ि์ั\u0301\u200dก他か\u3099ا❤\ufe0f"), max_size=12))
def test_no_plain_text_is_cut_before_a_mark(text):
    sentence = plain_sentence(text)
    assert sentence.text == text.strip()
    for i, space in enumerate(sentence.spaces[:-1]):
        assert space or unicodedata.category(sentence.words[i + 1][0])[0] != "M"


def test_spacy_documents_become_sentences():
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
    doc = spacy.tokens.Doc(
        spacy.blank("en").vocab,
        words=["It", "'s", "old", ".", "  "], spaces=[False, True, False, False, False],
        heads=[1, 1, 1, 1, 3], deps=["nsubj", "ROOT", "acomp", "punct", ""], 
        pos=["PRON", "AUX", "ADJ", "PUNCT", "SPACE"],
    )  # fmt: skip
    sentence = SpacyParser("blank")._sentence(doc)
    assert sentence.text == "It's old."
    assert sentence.dependencies.heads == (2, 0, 2, 2)
    assert sentence.dependencies.automatic


def test_stanza_documents_become_sentences():
    stanza = pytest.importorskip("stanza", reason="stanza is not installed")
    doc = stanza.Document(
        [[{"id": (1, 2), "text": "Zum"}, {"id": 1, "text": "zu", "head": 3, "deprel": "case", "upos": "ADP"},
          {"id": 2, "text": "dem", "head": 3, "deprel": "det", "upos": "DET", "feats": "Case=Dat|Number=Sing"},
          {"id": 3, "text": "See", "head": 0, "deprel": "root", "upos": "NOUN"}]]
    )  # fmt: skip
    sentence = StanzaParser("de")._sentence(doc)
    assert sentence.words == ("zu", "dem", "See")
    assert sentence.multiword_tokens == ((0, 2, "Zum"),)
    assert sentence.dependencies.features[1] == {"Case": "Dat", "Number": "Sing"}


@pytest.mark.parametrize("path", corpora("nli_pairs.jsonl"))
def test_every_pair_of_a_corpus_comes_back_as_written(path):
    raw = {row["pairID"]: row for row in map(json.loads, path.open(encoding="utf-8"))}
    corpus = read_snli(path)
    pairs = list(corpus)
    assert len(pairs) + corpus.dropped["no gold label"] == len(raw)
    assert corpus.dropped.keys() == {"no gold label"}
    for pair in pairs:
        row = raw[pair.uid]
        assert (pair.premise.text, pair.hypothesis.text) == (row["sentence1"].strip(), row["sentence2"].strip())


@NEEDS_DATA
def test_the_parsed_pairs_are_as_many_as_their_source_says():
    corpus = read_snli(DATA / "snli_parsed" / "snli_dev_subset.jsonl")
    assert (len(list(corpus)), corpus.dropped["no gold label"]) == (1273, 16)  # the counts in the data's SOURCE.md


@pytest.mark.parametrize("path", corpora("frames.jsonl"))
def test_every_sentence_with_frames_comes_back_as_written(path):
    texts = [json.loads(line)["text"].strip() for line in path.open(encoding="utf-8")]
    assert [sentence.text for sentence in read_frames(path)] == texts


@pytest.mark.parametrize("path", corpora(".conllu"))
def test_every_sentence_of_a_treebank_comes_back_as_written(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    sentences = list(read_conllu(path, path.name[:2]))
    assert [sentence.text for sentence in sentences] == [line[9:].strip() for line in lines if line[:8] == "# text ="]
    assert {sentence.language for sentence in sentences} == {path.name[:2]}


def test_a_treebank_with_tags_alone_is_read_where_no_tree_is_needed(tmp_path):
    rows = ["1 Dogs _ NOUN NNS _ _ _ _ _", "2 bark _ VERB VBP _ _ _ _ SpaceAfter=No", "3 . _ PUNCT . _ _ _ _ _"]
    [sentence] = corpus = read_conllu(write(tmp_path / "tagged.conllu", conllu(*rows)), "en")
    assert (sentence.text, sentence.dependencies) == ("Dogs bark.", None)
    assert random_shuffling(corpus)["sentence"] == ["bark Dogs."]
    assert probe_info(constituency_shuffling(corpus, 2)).dropped == {"no tree": 1}


@pytest.mark.parametrize("tags", [("PRON", "VERB"), ("X", "X"), ("_", "_")])
def test_a_treebank_that_withholds_its_words_is_refused(tmp_path, tags):
    rule = conllu("1 ___ _ PUNCT _ _ 0 root _ _")  # a line of a text
    words = conllu("# text = _ __", f"1 _ _ {tags[0]} _ _ 2 nsubj _ _", f"2 __ _ {tags[1]} _ _ 0 root _ _")
    corpus = read_conllu(write(tmp_path / "en_esl-ud-dev.conllu", rule + words))
    assert corpus[0].text == "___"
    with pytest.raises(ValueError, match=r"dev\.conllu:3: words must be those of a text, each of the 2 is withheld"):
        list(corpus)


def test_tags_of_the_language_and_words_with_a_space_are_read(tmp_path):
    row = "1\tViệt Nam\t_\tPROPN\tNNP\t_\t0\troot\t_\t_\n\n"
    [sentence] = read_conllu(write(tmp_path / "vi_x.conllu", row))
    assert (sentence.words, sentence.dependencies.xpos) == (("Việt Nam",), ("NNP",))


def test_data_sets_like_those_of_other_papers_are_made_from_spans():
    page = (Path(__file__).parents[1] / "docs" / "corpora.md").read_text(encoding="utf-8")
    code = page.partition("## Data sets like those of other papers")[2].partition("```python\n")[2].partition("```")[0]
    made = {}
    exec(code, made)
    assert made["hans"]["hypothesis"] == ["The criminal arrested the cop.", "The judge was advised by the lawyer."]
    assert made["events"][0]["sentence_bad"] == "The criminal arrested the cop."
    assert made["role"]["hypothesis"] == ["The owner forgot which waitress the customer had served."]
    words = made["scrambled"][0]["sentence"].split()
    assert [sorted(words[i : i + 3]) for i in (0, 3, 6)] == [
        ["old", "sailor", "the"], ["his", "told", "young"], ["a", "niece", "story"],
    ]  # fmt: skip


def test_pairs_that_share_a_premise_keep_names_and_places_of_their_own(tmp_path):
    rows = [snli_row(pairID=f"p{k}") for k in range(3)]
    corpus = read_snli(write(tmp_path / "a.jsonl", *rows))
    for _ in range(2):
        pairs = []
        for pair in corpus:
            assert pair.premise.surface_tokens == ((0, 1), (1, 2), (2, 3))
            pairs.append(pair)
        assert [pair.premise.uid for pair in pairs] == ["p0/premise", "p1/premise", "p2/premise"]
        for line, pair in enumerate(pairs, 1):
            assert pair.premise.source.endswith(f"a.jsonl:{line}")
            assert pair.premise.constituents.source.endswith(f"a.jsonl:{line}")
