"""Readers on malformed records, and labels of every type."""

import bz2
import gzip
import io
import itertools
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

from pelocality.corpora import read_conllu, read_frames, read_pairs, read_snli, read_texts, read_trees
from tests.test_corpora import ROW, TREES, conllu, frames_row, snli_row, write

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
        assert re.search(r"a\.jsonl:2: .", str(error))  # noqa: PT017


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


@pytest.mark.parametrize("end", ["\r", "\r\n", "\r\r\n", "mixed"])
def test_lines_end_as_on_any_machine(tmp_path, end):
    pair, cells = json.dumps(ROW), ["premise hypothesis label", "a b n", "c d n"]
    texts = {
        "en_a.conllu": conllu("# text = Go on", "1 Go _ VERB _ _ 0 root _ _", "2 on _ ADV _ _ 1 advmod _ _") * 2,
        "a.mrg": f"{TREES}\n{TREES}\n", "a.jsonl": f"{pair}\n\n{pair}", "a.txt": "a b\nc\n",
        "a.tsv": "\n".join(cells).replace(" ", "\t"), "a.csv": "\n".join(cells).replace(" ", ","),
    }  # fmt: skip
    readers = {"conllu": read_conllu, "mrg": read_trees, "txt": read_texts}
    for name, text in texts.items():
        lines, reader = text.split("\n"), readers.get(name.split(".")[1], read_pairs)
        several = [
            "\n" if "" in pair else ("\r", "\n", "\r\n")[i % 3] for i, pair in enumerate(itertools.pairwise(lines))
        ]
        ends = [*several, ""] if end == "mixed" else [*[end] * (len(lines) - 1), ""]
        (tmp_path / name).write_bytes(text.encode())
        expected = list(reader(tmp_path / name))
        (tmp_path / name).write_bytes("".join(map("".join, zip(lines, ends, strict=True))).encode())
        assert list(reader(tmp_path / name)) == expected
        assert len(expected) == 2


def test_another_format_than_that_of_snli_is_refused_with_the_fields_that_it_has(tmp_path):
    row = {"context": "a dog runs", "hypothesis": "an animal moves", "label": "e", "gold_labels": []}
    (tmp_path / "a.tsv").write_text("context\thypothesis\tlabel\na\tb\te\n")
    for path in (write(tmp_path / "a.jsonl", row, row), tmp_path / "a.tsv"):
        with pytest.raises(ValueError, match=rf"{path.name}: .*gold_label.*'context', 'hypothesis', 'label'"):
            list(read_snli(path))
    assert [pair.uid for pair in read_snli(write(tmp_path / "a.jsonl", row, snli_row()))] == ["p1"]


GOOD = conllu("1 Go _ VERB _ _ 0 root _ _")
ABC = [f"{i} {form} _ X _ _ {i - 1} root _ _" for i, form in enumerate("abc", 1)]
HEADER = "premise,hypothesis,label\n"
JSON = json.dumps(ROW) + "\n"


def conllu_errors():
    """Sentences that follow a good one, and what must be named."""
    for rows, says in (
        (["1 Go _ VERB _ _ 1 root _ _"], "word 1 is 1"),
        (["1 Go _ VERB _ _ 2 x _ _", "2 on _ ADV _ _ 1 x _ _"], "word 1 is 2"),
        (["1 a _ X _ _ 0 root _ _", "2 b _ X _ _ 3 x _ _", "3 c _ X _ _ 2 x _ _"], "word 2"),
        (["1 Go _ VERB _ _ 7 root _ _"], r"0\.\.1 .*word 1 is 7"),
        (["1 Go _ VERB _ _ _ x _ _", "2 on _ ADV _ _ 0 root _ _"], "word 1 is None"),
        (["1 Go _"], "10 columns"),
        (["1 a _ X _ _ 0 root _ _ more"], "10 columns"),
        (["1.1 Go _ VERB _ _ _ _ _ _"], "numbered"),
        (["2 Go _ VERB _ _ 0 root _ _"], "numbered"),
        (["1-4 Go _ _ _ _ _ _ _ _", "1 Go _ VERB _ _ 0 root _ _"], r"\[0, 4\)"),
        (["1-2 ab _ _ _ _ _ _ _ _", "1-2 ab _ _ _ _ _ _ _ _", *ABC], "overlap"),
        (["1-2 ab _ _ _ _ _ _ _ _", "2-3 bc _ _ _ _ _ _ _ _", *ABC], r"overlap, got \(0, 2, 'ab'\) and \(1, 3"),
        (["one Go _ VERB _ _ 0 root _ _"], "CoNLL-U"),
        (["# global.columns = ID HEAD DEPREL UP:PRED", "1 0 root go.01"], "ID and FORM.*'up:pred'"),
        (["# global.columns = ID FORM HEAD", "1 Go 0"], "DEPREL"),
        (["# global.columns = ID FORM FORM", "1 Go on"], "once"),
        (["# global.columns = ID FORM UP:PRED UP:ARGSPANS", "1 Go go.01 A0"], "'A0'"),
        (["# global.columns = ID FORM HEAD DEPREL UP:PRED UP:ARGHEADS", "1 Go 0 root go.01 A0:7"], "."),
        (["1 Go _ VERB _ _ 0 root _ _ 0.75"], "10 columns"),
        (["# global.columns = ID FORM UPOS", "1 Go VERB _"], "3 columns"),
        (["1 Go _ VERB _ _ 0 root _"], "10 columns"),
    ):
        yield "en_x.conllu", GOOD + conllu(*rows), f":3: .*{says}"


def changed(row, file, **changes):
    """A good line before one with a changed field, and what must be named."""
    return [
        (file, "\n".join(map(json.dumps, (row(), row(**{name: value})))), f":2: .*{says}")
        for name, cases in changes.items()
        for value, says in cases
    ]


# file, content, and what must be named after the name of the file
WRONG = [
    *conllu_errors(),
    ("vi_x.conllu", "1\tViệt  Nam\t_\tPROPN\t_\t_\t0\troot\t_\t_\n\n", ":1: .*two spaces"),
    ("a.mrg", f"{TREES}\n(S (NP", ":2: .*brackets"),
    ("a.mrg", f"{TREES}\n)", ":2: .*brackets"),
    *changed(
        snli_row, "snli.jsonl",
        sentence1_parse=[(None, "'sentence1_parse': None"), ("(S (NP", "brackets")],
        sentence1=[(None, "'sentence1': None")], gold_label=[(1, "")],
        sentence2_parse=[("( ( It ( 's old ) ) . )", "binary parse")], pairID=[([1], "'pairID'")],
    ),
    *changed(
        frames_row, "frames.jsonl",
        id=[(None, "'id': None")], head=[([2, 0, 2, 4], "word 4 is 4")],
        frames=[
            (None, "'frames': None"), ([1], ""), ([{"args": []}], "'roleset': None"),
            ([{"roleset": "x.01", "args": [["V", 1, 2, 3]]}], ""), ([{"roleset": "x", "args": [["V", "1", "2"]]}], ""),
            ([{"roleset": "x.01", "args": [["V", 1, 9]]}], "the 4 words"),
            ([{"r": "go.01", "a": [["ARG0", 0, 1]]}], "role V"),
        ],
    ),
    ("snli.jsonl", json.dumps(snli_row()) + "\n{", ":2: "),
    ("snli.jsonl", json.dumps(snli_row()) + '\n{"gold_label": "neutral"}', ":2: .*'sentence1_parse' .*'gold_label'"),
    *((f"{kind}.jsonl", text, r":1: .*read_pairs\(json\.load")
      for kind in ("snli", "frames", "a") for text in ("[\n{}\n]", "[{}]", "[]")),
    ("a.jsonl", JSON + '{"premise": "x", "b": "y", "label": "n"}', ":2: .*'hypothesis' .*'b'.*hypothesis="),
    ("a.jsonl", JSON + '{"premise": "a", "hypothesis": "b"}', ":2: .*'label' .*label=.*None"),
    ("a.jsonl", (JSON + JSON.replace("a", "café")).encode("latin-1"), ":2: .*UTF-8.*0xe9.*iconv"),
    ("a.jsonl", "a".encode("utf-16"), ":1: .*0xff"),
    ("a.jsonl", zipped("{}", "a.jsonl", "b.jsonl"), r":1: .*one file, got 2: \['a.jsonl', 'b.jsonl'\]; unpack it"),
    ("a.jsonl", zipped("{}", "a.jsonl")[:40], ":1: .*not a zip file"),
    ("a.jsonl", bz2.compress(b"{}" * 99)[:30], ":1: .*unpack"),
    ("a.jsonl", lzma.compress(b"{}" * 99)[:40], ":1: .*unpack"),
    ("a.jsonl.gz", gzip.compress(JSON.encode())[:30], ":1: .*unpack"),
    ("a.jsonl.gz", gzip.compress(JSON.encode())[3:], ":1: .*UTF-8"),
    ("a.csv", HEADER + "a,b,n\nc, d,e,n\n", ":3: .*3 cells, got 4"),
    ("a.csv", HEADER + 'a,b,n\n"c,d,n\ne,f,n\ng,h,n\n', ":3: .*unexpected end.*closed"),
    ("a.csv", HEADER + "a,b,n\n" + HEADER, ":3: .*header"),
    ("a.csv", '"premise,hypothesis,label\na,b,n\n', ":1: .*unexpected end"),
    ("a.csv", "premise,premise,label\n", ":1: .*header"),
    ("a.csv", f"{HEADER}{'a ' * 70_000},b,n\n", r":2: .*field limit.*\.jsonl"),
    ("a.tsv", "premise\thypothesis\tlabel\na\tb, c\n", ":2: .*3 cells, got 2"),
    ("a.tsv", 'premise\thypothesis\tlabel\na\tb\t"she ""went"""\n', ":2: .*went.*quoted.*read_csv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), WRONG, ids=[f"{case[0]}{case[2]}" for case in WRONG])
def test_what_is_wrong_in_a_file_is_named_with_the_file_and_the_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    readers = {"snli": read_snli, "frames": read_frames, "a": read_pairs}
    reader = {"mrg": read_trees, "conllu": read_conllu}.get(name.split(".")[-1]) or readers[name.split(".")[0]]
    with pytest.raises(ValueError, match=re.escape(name) + says):
        list(reader(tmp_path / name))


def test_an_archive_is_refused_as_no_text(tmp_path):
    with tarfile.open(tmp_path / "a.jsonl", mode="w:gz") as archive:
        archive.add(write(tmp_path / "b.jsonl", ROW), "b.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: must be text in UTF-8.*zero byte"):
        list(read_pairs(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("read", [read_snli, read_trees, read_conllu, read_frames, read_pairs])
def test_what_is_no_file_is_an_error_at_once(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="path must name a file"):
        read(tmp_path / "none.jsonl")
    if read is not read_pairs:
        for rows in ([ROW], pandas.DataFrame([ROW]), 3):
            with pytest.raises(TypeError, match=type(rows).__name__):
                read(rows)


@pytest.mark.parametrize(("row", "says"), [("x", "JSON object"), (None, "field"), (["a", "b"], "field")])
def test_rows_that_are_not_mappings_are_errors(row, says):
    with pytest.raises(ValueError, match=f"list:1: .*{says}"):
        list(read_pairs([row]))


@pytest.mark.parametrize(
    "one", [1, 1.0, "1", " 1 ", "1.0", "01", "neutral", np.int64(1), np.float32(1), torch.tensor(1), True]
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


def test_quoted_cells_hold_commas_line_breaks_and_doubled_quotes(tmp_path):
    text = 'premise,hypothesis,label\r\n"a ""b"", c","d\r\ne",n\r\n\r\nf g"h,"i",n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    pairs = [(pair.premise.text, pair.hypothesis.text) for pair in read_pairs(tmp_path / "a.csv")]
    assert pairs == [('a "b", c', "d\r\ne"), ('f g"h', "i")]


@pytest.mark.parametrize("cell", ['"go"', '""go""', '""', '"go" and "stay"', 'said "go""', '"'])
def test_quotation_marks_of_a_tab_separated_file_stay(tmp_path, cell):
    (tmp_path / "a.tsv").write_text(f"premise\thypothesis\tlabel\na\tb\t{cell}\n")
    assert [pair.label for pair in read_pairs(tmp_path / "a.tsv")] == [cell]


def test_a_deep_tree_is_read(tmp_path):
    deep = "(S " * 3000 + "(NN Rain)" + ")" * 3000
    [sentence] = read_trees(write(tmp_path / "a.mrg", deep))
    assert sentence.constituents.spans[0].labels == ("S",) * 3000
    row = snli_row(sentence2="Rain", sentence2_parse=deep)
    assert [pair.hypothesis.text for pair in read_snli(write(tmp_path / "a.jsonl", row))] == ["Rain"]


@pytest.mark.parametrize(
    ("read", "name"),
    [(read_snli, "a.jsonl"), (read_pairs, "a.jsonl"), (read_trees, "a.mrg"), (read_conllu, "en_a.conllu")],
)
def test_an_empty_file_is_warned_of(tmp_path, caplog, read, name):
    assert list(read(write(tmp_path / name, ""))) == []
    assert f"{name}: nothing to read in it" in caplog.text


def test_an_item_of_a_corpus_is_read_by_its_number():
    corpus = read_pairs([{"premise": text, "hypothesis": "b", "label": "n"} for text in ("a", "c")])
    assert [corpus[i].premise.text for i in (0, 1)] == ["a", "c"]
    with pytest.raises(IndexError, match="corpus 'list' has no item 2"):
        corpus[2]
    assert corpus
