"""Readers: streaming, exact text, line numbers in errors, counts of what was left out."""

import json
import unicodedata

import pytest
from hypothesis import given, strategies as st

from pelocality.corpora import (
    SpacyParser,
    StanzaParser,
    plain_sentence,
    read_conllu,
    read_frames,
    read_pairs,
    read_snli,
    read_trees,
)
from pelocality.trees import Sentence
from tests.data import DATA, NEEDS_DATA

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


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", r"a.jsonl:2: "), ('["x"]', r"a.jsonl:2: expected one JSON object"),
     (json.dumps({"gold_label": "neutral"}), r"a.jsonl:2: no field 'sentence1_parse'"),
     (json.dumps(snli_row(sentence1_parse="(S (NP")), r"a.jsonl:2: ")],
)  # fmt: skip
def test_malformed_lines_are_errors_with_file_and_line(tmp_path, line, says):
    corpus = read_snli(write(tmp_path / "a.jsonl", snli_row(), line))
    with pytest.raises(ValueError, match=says):
        list(corpus)


def test_reading_is_lazy(tmp_path):
    corpus = iter(read_snli(write(tmp_path / "a.jsonl", snli_row(), "{broken")))
    assert next(corpus).uid == "p1"


@pytest.mark.parametrize("read", [read_snli, read_trees, read_conllu, read_frames, read_pairs])
def test_a_missing_file_is_an_error_at_once(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="path must name a file"):
        read(tmp_path / "none.jsonl")


def test_trees_may_share_a_line_or_take_many(tmp_path):
    path = write(tmp_path / "a.mrg", f"{TREES} {TREES}", "", "( (S", "  (NP (PRP We))", " (VP (VBP go))) )")
    sentences = list(read_trees(path))
    assert [s.text for s in sentences] == ["A cat naps.", "A cat naps.", "We go"]
    assert sentences[2].source == "a.mrg:3"


@pytest.mark.parametrize(
    ("text", "says"), [(f"{TREES}\n(S (NP", "a.mrg:2: .*not closed"), (f"{TREES}\n)", r"a.mrg:2: .*open with")]
)
def test_unmatched_brackets_are_errors_with_the_line(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        list(read_trees(write(tmp_path / "a.mrg", text)))


def conllu(*rows):
    return "\n".join(r if r.startswith("#") or not r else "\t".join(r.split(" ")) for r in rows) + "\n\n"


def test_conllu_reads_contractions_empty_nodes_spacing_and_features(tmp_path):
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
    assert sentence.contractions == ((0, 2, "Beim"),)
    assert sentence.dependencies.heads == (3, 3, 0, 5, 3, 5, 3)
    assert sentence.dependencies.features[2] == {"Case": "Dat", "Number": "Sing"}


def test_conllu_errors_name_the_line_where_the_sentence_starts(tmp_path):
    good = conllu("1 Go _ VERB _ _ 0 root _ _")
    with pytest.raises(ValueError, match=r"x\.conllu:3: words must be numbered"):
        list(read_conllu(write(tmp_path / "x.conllu", good + conllu("2 Go _ VERB _ _ 0 root _ _"))))


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


def test_a_tree_that_does_not_parse_costs_the_constituents_and_warns(tmp_path, caplog):
    [sentence] = read_frames(write(tmp_path / "f.jsonl", frames_row(tree="(TOP (X (NFP //)))) ")))
    assert sentence.constituents is None
    assert "f.jsonl:1" in caplog.text


def test_a_frame_without_predicate_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"f.jsonl:1: .*role V"):
        list(read_frames(write(tmp_path / "f.jsonl", frames_row(frames=[{"r": "go.01", "a": [["ARG0", 0, 1]]}]))))


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


def test_labels_of_a_dataset_get_their_names_and_missing_ones_are_dropped():
    import datasets

    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=["entailment", "neutral"]),
    )
    rows = {"premise": ["a b", "c d"], "hypothesis": ["a", "c"], "label": [1, -1]}
    corpus = read_pairs(datasets.Dataset.from_dict(rows, features=features))
    assert [pair.label for pair in corpus] == ["neutral"]
    assert corpus.dropped == {"no gold label": 1}


def test_integer_labels_without_names_are_refused():
    with pytest.raises(ValueError, match="label 0 has no name; pass label_names="):
        list(read_pairs([{"premise": "a", "hypothesis": "b", "label": 0}]))


def test_a_generator_of_rows_is_refused_because_it_can_be_read_only_once():
    with pytest.raises(TypeError, match="make it a list"):
        read_pairs(row for row in [])


def test_a_parser_gives_the_sides_their_structure():
    def parser(texts):
        return [Sentence(tuple(text.split()), language="xx") for text in texts]

    [pair] = read_pairs([{"premise": "a b", "hypothesis": "c", "label": "neutral"}], parser=parser)
    assert pair.premise.words == ("a", "b")
    assert (pair.premise.language, pair.premise.uid) == ("xx", "list:1/premise")


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


@given(st.text(st.sampled_from("ab1 .,!'-ि์ั\u0301\u200dก他か\u3099ا❤\ufe0f"), max_size=12))
def test_no_plain_text_is_cut_before_a_mark(text):
    sentence = plain_sentence(text)
    assert sentence.text == text.strip()
    for i, space in enumerate(sentence.spaces[:-1]):
        assert space or unicodedata.category(sentence.words[i + 1][0])[0] != "M"


@pytest.mark.parametrize(("parser", "package"), [(SpacyParser, "spacy"), (StanzaParser, "stanza")])
def test_a_missing_parser_is_named(parser, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        parser()(["A cat."])


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
    assert sentence.contractions == ((0, 2, "Zum"),)
    assert sentence.dependencies.features[1] == {"Case": "Dat", "Number": "Sing"}


@NEEDS_DATA
def test_every_sentence_of_the_real_corpora_comes_back_as_written():
    path = DATA / "snli_parsed" / "snli_dev_subset.jsonl"
    raw = {row["pairID"]: row for row in map(json.loads, path.open())}
    corpus = read_snli(path)
    pairs = list(corpus)
    assert (len(pairs), corpus.dropped["no gold label"]) == (1273, 16)  # the counts in the data's SOURCE.md
    for pair in pairs:
        row = raw[pair.uid]
        assert (pair.premise.text, pair.hypothesis.text) == (row["sentence1"].strip(), row["sentence2"].strip())
    frames = DATA / "ewt_srl_trees" / "ewt_dev.jsonl"
    texts = [json.loads(line)["text"].strip() for line in frames.open()]
    assert [sentence.text for sentence in read_frames(frames)] == texts


@NEEDS_DATA
@pytest.mark.parametrize("language", ["en", "de", "tr", "zh", "fi"])
def test_every_sentence_of_the_parallel_treebanks_comes_back_as_written(language):
    path = DATA / "ud_pud" / f"{language}_pud-slim.conllu"
    texts = [line[9:].strip() for line in path.read_text().splitlines() if line.startswith("# text = ")]
    sentences = list(read_conllu(path))
    assert [sentence.text for sentence in sentences] == texts
    assert {sentence.language for sentence in sentences} == {language}
