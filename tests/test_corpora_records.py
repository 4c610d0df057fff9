"""Readers on malformed records, and labels of every type."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile

import numpy as np
import pandas
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from pelocality.corpora import read_conllu, read_frames, read_pairs, read_snli, read_trees
from tests.test_corpora import TREES, conllu, frames_row, snli_row, write

JUNK = st.sampled_from(
    [None, 1, -1, 2.5, True, "", "x", "(", "(S the cat)", [], [None], [1], ["a"], [[]], {}, {"a": 1}]
)


NAMES = ["entailment", "neutral", "contradiction"]


def labels(values, **options):
    corpus = read_pairs([{"premise": "a", "hypothesis": "b", "label": value} for value in values], **options)
    return [pair.label for pair in corpus], corpus.dropped["no gold label"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.sampled_from(["snli", "frames", "pairs"]), st.data())
def test_whatever_a_field_holds_the_only_error_is_one_that_names_file_and_line(tmp_path, kind, data):
    rows = {"snli": snli_row(), "frames": frames_row(), "pairs": {"premise": "a", "hypothesis": "b", "label": "n"}}
    read = {"snli": read_snli, "frames": read_frames, "pairs": read_pairs}[kind]
    row = dict(rows[kind])
    name = data.draw(st.sampled_from(sorted(row)))
    if data.draw(st.booleans()):
        row[name] = data.draw(JUNK)
    else:
        del row[name]
    try:
        list(read(write(tmp_path / "a.jsonl", rows[kind], row)))
    except ValueError as error:
        assert re.search(r"a\.jsonl:2: \w", str(error))  # noqa: PT017


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sentence1_parse": None}, "field 'sentence1_parse' must be a bracketed tree, got None"),
        ({"sentence1": None}, "field 'sentence1' must be a text, got None"),
        ({"gold_label": 1}, "field 'gold_label' must be a text, .*got 1"),
        ({"sentence2_parse": "( ( It ( 's old ) ) . )"}, "field 'sentence2_parse' does not parse: .*binary parse"),
        ({"pairID": [1]}, "field 'pairID' must be"),
    ],
)
def test_snli_errors_name_the_field_what_was_wanted_and_what_came(tmp_path, changes, says):
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: {says}"):
        list(read_snli(write(tmp_path / "a.jsonl", snli_row(), snli_row(**changes))))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x", "expected one JSON object a line, got 'x'"),
        (None, "a row must be a mapping of fields, got None"),
        (["a", "b"], r"a row must be a mapping of fields, got \['a', 'b'\]"),
    ],
)
def test_rows_that_are_not_mappings_are_errors(row, words):
    with pytest.raises(ValueError, match=f"list:1: {words}"):
        list(read_pairs([row]))


def test_a_file_with_a_byte_order_mark_or_compressed_is_read_like_any_other(tmp_path):
    text = json.dumps({"premise": "a", "hypothesis": "b", "label": "é"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8-sig")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress("\ufeffpremise,hypothesis,label\na,b,é\n".encode()))
    (tmp_path / "b.CSV.GZ").write_bytes((tmp_path / "a.csv.gz").read_bytes())
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv.gz", "b.CSV.GZ"):
        assert [pair.label for pair in read_pairs(tmp_path / name)] == ["é"]
    (tmp_path / "a.mrg").write_text(TREES, encoding="utf-8-sig")
    assert [sentence.text for sentence in read_trees(tmp_path / "a.mrg")] == ["A cat naps."]


def zipped(content, *names):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return packed.getvalue()


ROW = {"premise": "a", "hypothesis": "b", "label": "n"}
PACKED = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": lambda content: zipped(content, "data/", "data/a.jsonl", "__MACOSX/data/._a.jsonl"),
}


@pytest.mark.parametrize("name", ["a.jsonl.{}", "{}.jsonl"])
@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_file_is_read_whether_its_suffix_says_so_or_not(tmp_path, kind, name):
    path = tmp_path / name.format(kind)
    path.write_bytes(PACKED[kind](json.dumps(ROW).encode()))
    assert [pair.label for pair in read_pairs(path)] == ["n"]


def test_an_archive_of_several_files_or_of_an_unknown_kind_is_refused_with_its_reason(tmp_path):
    tape = io.BytesIO()
    with tarfile.open(fileobj=tape, mode="w:gz") as archive:
        archive.add(write(tmp_path / "b.jsonl", ROW), "b.jsonl")
    for content, says in (
        (zipped("{}", "a.jsonl", "b.jsonl"), r"a \.zip must hold one file, got 2: \['a.jsonl', 'b.jsonl'\]; unpack it"),
        (b"\x28\xb5\x2f\xfd 12", "got zstd; unpack it first"),
        (tape.getvalue(), "must be UTF-8, got the byte 0x00 after .*; unpack an archive"),
        ("a".encode("utf-16"), "got the byte 0xff after ''; .*convert other encodings with iconv"),
        (zipped("{}", "a.jsonl")[:40], "the compressed file cannot be read: File is not a zip file"),
        (bz2.compress(b"{}" * 99)[:30], "the compressed file is damaged"),
        (lzma.compress(b"{}" * 99)[:40], "the compressed file is damaged"),
    ):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.jsonl:?.*{says}"):
            list(read_pairs(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("content", ["[\n{}\n]", "[{}]", "[]"])
def test_a_json_array_is_an_error_that_says_which_reader_takes_it(tmp_path, content):
    for read in (read_snli, read_frames, read_pairs):
        with pytest.raises(ValueError, match=r"a\.jsonl:1: expected one JSON object a line, .*read_pairs\(json\.load"):
            list(read(write(tmp_path / "a.jsonl", content)))


@pytest.mark.parametrize("read", [read_snli, read_trees, read_conllu, read_frames])
@pytest.mark.parametrize("rows", [[ROW], pandas.DataFrame([ROW]), 3])
def test_a_reader_of_files_says_which_reader_takes_rows(read, rows):
    with pytest.raises(TypeError, match=f"path must be the name of a file, got a {type(rows).__name__}; read_pairs"):
        read(rows)


def test_bytes_that_are_not_utf8_are_errors_with_file_and_line(tmp_path):
    rows = [json.dumps({"premise": x, "hypothesis": "b", "label": "n"}, ensure_ascii=False) for x in ("a", "café")]
    (tmp_path / "a.jsonl").write_bytes("\n".join(rows).encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: must be UTF-8, got the byte 0xe9 after .*caf.*iconv"):
        list(read_pairs(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("damage", [slice(0, 30), slice(3, None)])
def test_a_damaged_compressed_file_is_an_error_that_names_it(tmp_path, damage):
    packed = gzip.compress(json.dumps({"premise": "a", "hypothesis": "b", "label": "n"}).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[damage])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:1: the compressed file is damaged"):
        list(read_pairs(tmp_path / "a.jsonl.gz"))


def test_a_missing_field_is_an_error_with_the_argument_that_names_it():
    with pytest.raises(ValueError, match=r"no field 'hypothesis'; there are 'premise', 'b'; name one with hypothesis="):
        list(read_pairs([{"premise": "x", "b": "y"}], label=None))
    with pytest.raises(ValueError, match=r"no field 'label'; .*; name one with label=, None for pairs without labels"):
        list(read_pairs([{"premise": "x", "hypothesis": "y"}]))


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", r"a.jsonl:2: "), ('["x"]', r"a.jsonl:2: expected one JSON object"),
     (json.dumps({"gold_label": "neutral"}), r"a.jsonl:2: no field 'sentence1'; there are 'gold_label'"),
     (json.dumps(snli_row(sentence1_parse="(S (NP")), r"a.jsonl:2: ")],
)  # fmt: skip
def test_malformed_lines_are_errors_with_file_and_line(tmp_path, line, says):
    corpus = read_snli(write(tmp_path / "a.jsonl", snli_row(), line))
    with pytest.raises(ValueError, match=says):
        list(corpus)


@pytest.mark.parametrize("read", [read_snli, read_trees, read_conllu, read_frames, read_pairs])
def test_a_missing_file_is_an_error_at_once(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="path must name a file"):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("text", "says"), [(f"{TREES}\n(S (NP", "a.mrg:2: .*not closed"), (f"{TREES}\n)", r"a.mrg:2: .*open with")]
)
def test_unmatched_brackets_are_errors_with_the_line(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        list(read_trees(write(tmp_path / "a.mrg", text)))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["1 Go _ VERB _ _ 1 root _ _"], "word 1 does not, its head is 1"),
        (["1 Go _ VERB _ _ 2 x _ _", "2 on _ ADV _ _ 1 x _ _"], "word 1 does not, its head is 2"),
        (
            ["1 a _ X _ _ 0 root _ _", "2 b _ X _ _ 3 x _ _", "3 c _ X _ _ 2 x _ _"],
            "lead to a root, word 2 does not",
        ),
        (["1 Go _ VERB _ _ 7 root _ _"], r"head of word 1 must be a whole number in 0\.\.1, got 7"),
        (["1 Go _ VERB _ _ _ x _ _", "2 on _ ADV _ _ 0 root _ _"], r"head of word 1 must be .* in 0\.\.2, got None"),
        (["1 Go _"], "word 1 must have the 10 columns"),
        (["1.1 Go _ VERB _ _ _ _ _ _"], "words must be numbered"),
        (["1-4 Go _ _ _ _ _ _ _ _", "1 Go _ VERB _ _ 0 root _ _"], r"got \[0, 4\)"),
        (["one Go _ VERB _ _ 0 root _ _"], "not a CoNLL-U sentence"),
    ],
)
def test_conllu_that_is_not_a_tree_is_an_error_with_the_line(tmp_path, rows, says):
    good = conllu("1 Go _ VERB _ _ 0 root _ _")
    with pytest.raises(ValueError, match=rf"en_x\.conllu:3: .*{says}"):
        list(read_conllu(write(tmp_path / "en_x.conllu", good + conllu(*rows))))


def test_conllu_errors_name_the_line_where_the_sentence_starts(tmp_path):
    good = conllu("1 Go _ VERB _ _ 0 root _ _")
    with pytest.raises(ValueError, match=r"x\.conllu:3: words must be numbered"):
        list(read_conllu(write(tmp_path / "x.conllu", good + conllu("2 Go _ VERB _ _ 0 root _ _"))))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"frames": None}, "field 'frames' must be a list of objects, got None"),
        ({"tree": None}, "field 'tree' must be a bracketed tree, got None"),
        ({"id": None}, "field 'id' must be a text or a whole number, got None"),
        ({"tokens": ["Cats", None]}, "field 'tokens' must be a list of texts, got None"),
        ({"head": [2, 0, 2, 4]}, "word 4 does not, its head is 4"),
        ({"frames": [1]}, "a frame must be an object with roleset and args, got 1"),
        ({"frames": [{"args": []}]}, "field 'roleset' must be a text, got None"),
        ({"frames": [{"roleset": "x.01", "args": [["V", 1, 2, 3]]}]}, r"x\.01 must be \[role, start, end\], got"),
        ({"frames": [{"roleset": "x.01", "args": [["V", "1", "2"]]}]}, r"x\.01 must be \[role, start, end\], got"),
        ({"frames": [{"roleset": "x.01", "args": [["V", 1, 9]]}]}, "spans must lie within the 4 words"),
    ],
)
def test_frames_errors_name_the_field_what_was_wanted_and_what_came(tmp_path, changes, says):
    with pytest.raises(ValueError, match=rf"f\.jsonl:2: .*{says}"):
        list(read_frames(write(tmp_path / "f.jsonl", frames_row(), frames_row(**changes))))


def test_a_frame_without_predicate_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"f.jsonl:1: .*role V"):
        list(read_frames(write(tmp_path / "f.jsonl", frames_row(frames=[{"r": "go.01", "a": [["ARG0", 0, 1]]}]))))


@pytest.mark.parametrize(
    "one", [1, 1.0, "1", " 1 ", "1.0", "neutral", np.int64(1), np.float32(1), torch.tensor(1), True]
)
def test_a_label_number_of_any_kind_gets_its_name(one):
    assert labels([one], label_names=NAMES) == (["neutral"], 0)


@pytest.mark.parametrize(
    "none", [None, "", " ", "-", "-1", -1, -1.0, np.int64(-1), torch.tensor(-1), float("nan"), np.nan, pandas.NA]
)
def test_a_missing_label_is_dropped_and_counted(none):
    assert labels([none], label_names=NAMES) == ([], 1)
    assert labels([none]) == ([], 1)


@pytest.mark.parametrize("wrong", [3, "3", "Neutral", 0.5, float("inf"), [1], {}, torch.tensor([1, 2]), np.array([1])])
def test_a_label_without_a_name_is_an_error_with_the_row(wrong):
    with pytest.raises(ValueError, match=r"list:1: .*label"):
        labels([wrong], label_names=NAMES)


def test_texts_that_are_digits_are_names_where_no_names_are_given():
    assert labels(["1", "0"]) == (["1", "0"], 0)


def test_labels_of_a_table_are_numbers_too(tmp_path):
    (tmp_path / "a.csv").write_text("premise,hypothesis,label\na,b,0\nc,d,-1\n")
    corpus = read_pairs(tmp_path / "a.csv", label_names=NAMES)
    assert [pair.label for pair in corpus] == ["entailment"]
    assert corpus.dropped == {"no gold label": 1}


@pytest.mark.parametrize("kind", [tuple, np.array, lambda names: pandas.Series(names, index=[2, 1, 0])])
def test_label_names_may_be_of_any_kind_with_an_order(kind):
    assert labels([0, 2], label_names=kind(NAMES)) == (["entailment", "contradiction"], 0)


@pytest.mark.parametrize("names", ["entailment", {0: "entailment"}, [0, 1], set(NAMES), {"entailment": 0}, iter(NAMES)])
def test_label_names_that_are_not_a_list_of_names_are_refused_at_once(names):
    with pytest.raises(TypeError, match="label_names must be a list of names"):
        read_pairs([], label_names=names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("premise,hypothesis,label\na,b,n\nc, d,e,n\n", r"a\.csv:3: .*must have 3 cells, got 4.*quoted"),
        ('premise,hypothesis,label\n"a\nb",c,n\nc,d\n', r"a\.csv:4: .*must have 3 cells, got 2"),
        ('premise,hypothesis,label\na,b,n\n"c,d,n\ne,f,n\ng,h,n\n', r"a\.csv:3: .*, got unexpected end.*closed"),
        ('premise,hypothesis,label\na,b,n\n"c"d,e,n\n', r"a\.csv:3: .*expected after .*doubled within quotes"),
        ('"premise,hypothesis,label\na,b,n\n', r"a\.csv:1: .*unexpected end of data"),
        ("premise,premise,label\n", r"a\.csv:1: must begin with a header that names each column once"),
        ("", r"a\.csv:1: must begin with a header"),
    ],
)
def test_a_row_with_too_many_or_too_few_cells_is_an_error(tmp_path, text, says):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=says):
        list(read_pairs(tmp_path / "a.csv"))


def test_a_row_of_a_tsv_with_another_number_of_cells_is_explained_by_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text("premise\thypothesis\tlabel\na\tb, c\n")
    with pytest.raises(ValueError, match=r"a\.tsv:2: .*must have 3 cells, got 2.*holds no tab"):
        list(read_pairs(tmp_path / "a.tsv"))


def test_quoted_cells_hold_commas_line_breaks_and_doubled_quotes(tmp_path):
    text = 'premise,hypothesis,label\r\n"a ""b"", c","d\r\ne",n\r\n\r\nf g"h,"i",n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    pairs = [(pair.premise.text, pair.hypothesis.text) for pair in read_pairs(tmp_path / "a.csv")]
    assert pairs == [('a "b", c', "d\r\ne"), ('f g"h', "i")]


def test_a_quoted_cell_of_a_tab_separated_file_is_an_error(tmp_path):
    frame = pandas.DataFrame({"premise": ["a", 'she said "go"'], "hypothesis": ["b", "c"], "label": ["n", "n"]})
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    with pytest.raises(
        ValueError, match=r"a\.tsv:3: .*without quoting, got .*said.*csv\.QUOTE_NONE, or pass pandas\.read_csv"
    ):
        list(read_pairs(tmp_path / "a.tsv"))
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False, quoting=csv.QUOTE_NONE)
    assert [pair.premise.text for pair in read_pairs(tmp_path / "a.tsv")] == ["a", 'she said "go"']


@pytest.mark.parametrize("cell", ['"go"', '""go""', '""', '"go" and "stay"', 'said "go""', '"'])
def test_quotation_marks_of_a_tab_separated_file_stay(tmp_path, cell):
    (tmp_path / "a.tsv").write_text(f"premise\thypothesis\tlabel\na\tb\t{cell}\n")
    assert [pair.label for pair in read_pairs(tmp_path / "a.tsv")] == [cell]


@pytest.mark.parametrize(("name", "tab"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_cell_that_is_too_long_is_an_error_with_the_way_out(tmp_path, name, tab):
    (tmp_path / name).write_text(f"premise,hypothesis,label\n{'a ' * 70_000},b,n\n".replace(",", tab))
    with pytest.raises(ValueError, match=rf"{name}:2: .*field limit \(131072\); if no .*left open, .*\.jsonl"):
        list(read_pairs(tmp_path / name))


def test_integer_labels_without_names_are_refused():
    with pytest.raises(ValueError, match="label 0 has no name; pass label_names="):
        list(read_pairs([{"premise": "a", "hypothesis": "b", "label": 0}]))


def test_a_pair_whose_parse_has_a_node_of_several_words_is_dropped_and_counted(tmp_path):
    odd = snli_row(sentence1="A ice cream naps.", sentence1_parse=TREES.replace("(NN cat)", "(NN ice cream)"))
    corpus = read_snli(write(tmp_path / "a.jsonl", odd, snli_row()))
    assert [pair.premise.text for pair in corpus] == ["A cat naps."]
    assert corpus.dropped == {"a node of the parse holds several words": 1}


def test_half_of_a_surrogate_pair_in_json_is_an_error_with_the_line(tmp_path):
    row = '{"premise": "\\ud83d\\ude00", "hypothesis": "%s", "label": "n"}'
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*surrogates not allowed"):
        list(read_pairs(write(tmp_path / "a.jsonl", row % "b", row % "\\uD800")))


def test_json_nested_too_deeply_is_an_error_with_the_line(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*recursion"):
        list(read_pairs(write(tmp_path / "a.jsonl", {"premise": "a", "hypothesis": "b", "label": "n"}, "[" * 100_000)))


def test_a_deep_tree_is_read(tmp_path):
    deep = "(S " * 3000 + "(NN Rain)" + ")" * 3000
    [sentence] = read_trees(write(tmp_path / "a.mrg", deep))
    assert sentence.constituents.spans[0].labels == ("S",) * 3000
    row = snli_row(sentence2="Rain", sentence2_parse=deep)
    assert [pair.hypothesis.text for pair in read_snli(write(tmp_path / "a.jsonl", row))] == ["Rain"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["1 a _ X _ _ 0 root _ _ more"], "must have the 10 columns of CoNLL-U, got 11"),
        (["1-2 ab _ _ _ _ _ _ _ _", "1-2 ab _ _ _ _ _ _ _ _"], "multiword_tokens must not overlap"),
        (["1-2 ab _ _ _ _ _ _ _ _", "2-3 bc _ _ _ _ _ _ _ _"], r"must not overlap, got \(0, 2, 'ab'\) and \(1, 3"),
    ],
)
def test_rows_of_a_treebank_that_would_be_read_in_part_are_an_error(tmp_path, rows, says):
    words = [f"{i} {form} _ X _ _ {i - 1} root _ _" for i, form in enumerate("abc", 1)] if "ab" in rows[0] else []
    text = conllu("1 Go _ VERB _ _ 0 root _ _") + conllu(*rows, *words)
    with pytest.raises(ValueError, match=r"en_x\.conllu:3: .*" + says):
        list(read_conllu(write(tmp_path / "en_x.conllu", text)))


def test_two_spaces_in_a_cell_of_a_treebank_are_an_error_that_names_them(tmp_path):
    row = "1\tViệt{}Nam\t_\tPROPN\t_\t_\t0\troot\t_\t_\n\n"
    [sentence] = read_conllu(write(tmp_path / "vi_x.conllu", row.format(" ")))
    assert sentence.words == ("Việt Nam",)
    with pytest.raises(ValueError, match=r"vi_x\.conllu:1: a cell must not have two spaces side by side, got '1"):
        list(read_conllu(write(tmp_path / "vi_x.conllu", row.format("  "))))


def test_a_treebank_sentence_whose_text_is_not_that_of_its_words_is_dropped_and_counted(tmp_path):
    good, wrong = (conllu(f"# text = {text}", "1 Go _ VERB _ _ 0 root _ _") for text in ("Go", "Stop"))
    corpus = read_conllu(write(tmp_path / "en_x.conllu", good + wrong))
    assert [sentence.text for sentence in corpus] == ["Go"]
    assert corpus.dropped == {"text and words disagree": 1}


def test_comments_without_words_are_left_out_and_counted(tmp_path):
    text = conllu("# newdoc id = x") + conllu("1 Go _ VERB _ _ 0 root _ _") + conllu("# text = Stop")
    corpus = read_conllu(write(tmp_path / "en_x.conllu", text))
    assert [sentence.text for sentence in corpus] == ["Go"]
    assert corpus.dropped == {"comments without words": 2}


@pytest.mark.parametrize(
    ("read", "name"),
    [(read_snli, "a.jsonl"), (read_pairs, "a.jsonl"), (read_trees, "a.mrg"), (read_conllu, "en_a.conllu")],
)
def test_an_empty_file_is_warned_of(tmp_path, caplog, read, name):
    assert list(read(write(tmp_path / name, ""))) == []
    assert f"{name}: nothing to read in it" in caplog.text


def test_an_item_of_a_corpus_is_read_by_its_number_and_its_length_is_refused_with_the_way_out():
    corpus = read_pairs([{"premise": text, "hypothesis": "b", "label": "n"} for text in ("a", "c")])
    assert [corpus[i].premise.text for i in (0, 1)] == ["a", "c"]
    with pytest.raises(IndexError, match="corpus 'list' has no item 2"):
        corpus[2]
    with pytest.raises(TypeError, match=r"list\(corpus\)"):
        len(corpus)
    with pytest.raises(TypeError, match=r"list\(corpus\)"):
        corpus[-1]
    assert corpus
