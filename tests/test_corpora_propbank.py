"""PropBank's own files: words in the file or in a treebank, columns of trees and frames, and what is refused."""

import gzip
import pickle

import pytest

from pelocality.corpora import (
    Constituents,
    Frame,
    Sentence,
    plain_sentence,
    read_conllu,
    read_propbank,
)
from pelocality.probes import probe_info, semantic_role_swap
from tests.test_corpora import conllu

HE_BIT = ["PRP (TOP(S(NP*) - - (ARG0*)", "VBD (VP* bite bite.01 (V*)", "NNS (NP*)) - - (ARG1*)", ". *)) - - *"]
SHE_LEFT = ["PRP (TOP(S(NP*) - - (ARG0*)", "VBD (VP*) leave leave.01 (V*)", ". *)) - - *"]
WORDS = [("He", "bit", "nails", "."), ("She", "left", ".")]


def skeleton(path, *sentences, words="[WORD]"):
    """Write a document of PropBank, whose words are withheld unless they are given."""
    lines = []
    for number, rows in enumerate(sentences):
        forms = [words] * len(rows) if isinstance(words, str) else words[number]
        lines += [f"a 0 {k} {form}  {row}\n" for k, (form, row) in enumerate(zip(forms, rows, strict=True))] + ["\n"]
    path.write_text("".join(lines))
    return path


def tagged(words, rows, **layers):
    return Sentence(words, constituents=Constituents((), "x", tuple(row.split()[0] for row in rows)), **layers)


def frames_of(sentence):
    return [(f.roleset, f.verb, [tuple(argument) for argument in f.arguments]) for f in sentence.frames]


def test_a_file_of_propbank_with_its_words_has_trees_and_frames(tmp_path):
    path = skeleton(tmp_path / "a.gold_conll", HE_BIT, SHE_LEFT, words=[("He", "bit", "-LRB-", "."), WORDS[1]])
    first, second = corpus = read_propbank(path)
    assert (first.text, first.language, first.spacing) == ("He bit (.", "en", "rule")
    assert frames_of(first) == [("bite.01", (1, 2), [("ARG0", 0, 1), ("ARG1", 2, 3)])]
    assert [(c.start, c.end, c.labels) for c in first.constituents.spans] == [
        (0, 4, ("S",)), (0, 1, ("NP",)), (1, 3, ("VP",)), (2, 3, ("NP",)),
    ]  # fmt: skip
    assert second.uid.endswith("a.gold_conll:6")
    assert [sentence.text for sentence in pickle.loads(pickle.dumps(corpus))] == ["He bit (.", "She left."]
    packed = tmp_path / "a.gold_conll.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [sentence.words for sentence in read_propbank(packed)] == [first.words, second.words]


def test_words_that_are_withheld_come_from_a_treebank_with_its_text_and_dependencies(tmp_path):
    treebank = tmp_path / "a.conllu"
    treebank.write_text(
        conllu("# sent_id = a-1", "# text = He bit nails.",
               "1 He _ PRON PRP _ 2 nsubj _ _", "2 bit _ VERB VBD _ 0 root _ _",
               "3 nails _ NOUN NNS _ 2 obj _ _", "4 . _ PUNCT . _ 2 punct _ _")
        + conllu("# sent_id = a-2", "1 She _ PRON PRP _ 2 nsubj _ _", "2 left _ VERB VBD _ 0 root _ SpaceAfter=No",
                 "3 . _ PUNCT . _ 2 punct _ _")
    )  # fmt: skip
    first, second = corpus = read_propbank(
        skeleton(tmp_path / "a.gold_skel", HE_BIT, SHE_LEFT), read_conllu(treebank, "en")
    )
    assert [(s.text, s.uid, s.spacing) for s in (first, second)] == [
        ("He bit nails.", "a-1", "corpus"), ("She left.", "a-2", "corpus"),
    ]  # fmt: skip
    assert first.dependencies.relations == ("nsubj", "root", "obj", "punct")
    assert first.constituents.tags == ("PRP", "VBD", "NNS", ".")
    assert semantic_role_swap(corpus, source="dependencies", agreement="ignore")["hypothesis"] == ["Nails bit him."]


def test_sentences_that_the_treebank_divides_otherwise_are_found_by_their_tags(tmp_path):
    path = skeleton(tmp_path / "a.gold_skel", HE_BIT, SHE_LEFT)
    joined = tagged((*WORDS[0], *WORDS[1]), HE_BIT + SHE_LEFT, uid="a-1")
    assert [(s.words, s.uid != "a-1") for s in read_propbank(path, [joined])] == [(words, True) for words in WORDS]
    # "left" is two words: only the other sentence is found, and is whole
    other = [tagged(WORDS[0], HE_BIT, uid="a-1"), tagged(("She", "did", "leave", "."), [*SHE_LEFT, ". *)"], uid="a-2")]
    corpus = read_propbank(path, other)
    assert [sentence.uid for sentence in corpus] == ["a-1"]
    assert corpus.dropped == {"words not found": 1}


def test_a_sentence_at_whose_edge_a_word_is_divided_is_not_found_without_it(tmp_path):
    rows = ["JJ (TOP(S(NP* - - (ARG0*", "NNS *) - - *)", "VBD (VP*))) fail fail.01 (V*)"]
    path = skeleton(tmp_path / "a.gold_skel", HE_BIT, rows)
    words = [tagged(WORDS[0], HE_BIT), tagged(("single", "crystal", "chips", "failed"), ["NN x", *rows])]
    corpus = read_propbank(path, words)
    assert [sentence.words for sentence in corpus] == [WORDS[0]]
    assert corpus.dropped == {"words not found": 1}


CONLL_2012 = """#begin document (bc/a/00/a_0000); part 000
bc/a/00/a_0000 0 0 He PRP (TOP(S(NP*) - - - s1 * (ARG0*) * (0)
bc/a/00/a_0000 0 1 kept VBD (VP* keep 04 1 s1 * (V*) * -
bc/a/00/a_0000 0 2 biting VBG (S(VP* bite 01 - s1 * (ARG1* (V*) -
bc/a/00/a_0000 0 3 nails NNS (NP*)))) nail - - s1 * *) (ARG1*) -
bc/a/00/a_0000 0 4 /. . *)) - - - s1 * * * -

#end document
#begin document (bc/a/00/a_0000); part 001
bc/a/00/a_0000 1 0 Go VB (TOP(S(VP*))) go - - s1 * (V*) -

#end document
"""


def test_the_columns_of_conll_2012_are_read(tmp_path):
    (tmp_path / "a.v4_gold_conll").write_text(CONLL_2012)
    first, second = read_propbank(tmp_path / "a.v4_gold_conll")
    assert (first.text, second.text, second.frames) == (
        "He kept biting nails.",
        "Go",
        (Frame("go", (0, 1), (), second.frames[0].source),),
    )
    assert frames_of(first) == [
        ("keep.04", (1, 2), [("ARG0", 0, 1), ("ARG1", 2, 4)]),
        ("bite.01", (2, 3), [("ARG1", 3, 4)]),
    ]
    assert [(c.start, c.end, c.labels) for c in first.constituents.spans][-2:] == [(2, 4, ("S", "VP")), (3, 4, ("NP",))]


@pytest.mark.parametrize("cells", [("*", "*", "*"), ("-", "-", "-"), ("(TOP*", "*", "*)")])
def test_frames_need_no_tree(tmp_path, cells):
    rows = [
        f"XX {cell} {rest}" for cell, rest in zip(cells, ["- - (ARG0*)", "bite bite.01 (V*)", "- - *"], strict=True)
    ]
    [sentence] = read_propbank(skeleton(tmp_path / "a", rows, words=[("He", "bit", "-RRB-")]))
    assert (sentence.words, sentence.constituents) == (("He", "bit", ")"), None)
    assert frames_of(sentence) == [("bite.01", (1, 2), [("ARG0", 0, 1)])]


@pytest.mark.parametrize("name", ["a.v4_auto_conll", "a.auto_conll.gz", "auto_a.conll"])
def test_trees_and_frames_of_an_automatic_file_are_no_gold(tmp_path, name):
    content = CONLL_2012.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "a.v4_gold_conll").write_bytes(content)
    automatic, gold = (read_propbank(tmp_path / each)[0] for each in (name, "a.v4_gold_conll"))
    assert (automatic.automatic, gold.automatic) == (True, False)
    assert "gold" not in automatic.provenance
    assert "gold frames" in gold.provenance


def test_a_roleset_is_that_of_its_column_whatever_the_order(tmp_path):
    rows = [
        "PRP (TOP(S(NP*) - - (ARG0*) *", "VBD (VP* - - * (V*", "RB (ADVP*) think overthink.06 * *)",
        "VBD (VP*)))) say say.01 (V*) *",
    ]  # fmt: skip
    [sentence] = read_propbank(skeleton(tmp_path / "a", rows, words=[("He", "over", "thought", "said")]))
    assert frames_of(sentence) == [("say.01", (3, 4), [("ARG0", 0, 1)]), ("overthink.06", (1, 3), [])]
    rows = ["VBD (TOP(S(VP* have have.02 (V*) *", "NN (NP* nap nap.01 * *", "RB *)))) - - * (V*)"]
    [sentence] = read_propbank(skeleton(tmp_path / "a", rows, words=[("had", "nap", "then")]))
    assert [frame.roleset for frame in sentence.frames] == ["have.02", "nap.01"]


def test_sentences_that_an_official_file_has_in_a_damaged_form_are_dropped_and_counted(tmp_path):
    ragged = [HE_BIT[0], HE_BIT[1].replace("bite.01 ", ""), *HE_BIT[2:]]
    open_bracket = [*SHE_LEFT[:2], ". *) - - *"]
    corpus = read_propbank(skeleton(tmp_path / "a", ragged, open_bracket, SHE_LEFT, words=[*WORDS, WORDS[1]]))
    assert [sentence.text for sentence in corpus] == ["She left."]
    assert corpus.dropped == {"rows of different lengths": 1, "brackets that make no tree": 1}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["PRP (TOP(S*)) -"], r"rows must have 8 columns of PropBank, .*got 'a 0 0 x PRP \(TOP\(S\*\)\) -'"),
        (["UH (TOP(INTJ)) - -"], "rows must have 8 columns"),
        (["UH (TOP(INTJ*)) - - ARG0"], r"one V, got .ARG0"),
        (["UH (TOP(INTJ*)) - - (ARG0*"], r"one V, got '\(ARG0\*'"),
        (["UH (TOP(INTJ*)) - - (V*))"], r"one V, got '\(V\*\)\)'"),
        (["UH (TOP(INTJ*)) - - *"], r"one V, got '\*'"),
        (["UH (TOP(INTJ*)) - - (V*)"], "a frame must have a roleset"),
    ],
)
def test_a_malformed_file_is_an_error_with_file_and_line(tmp_path, rows, says):
    with pytest.raises(ValueError, match=rf"a:5: .*{says}"):
        list(read_propbank(skeleton(tmp_path / "a", SHE_LEFT, rows, words=[WORDS[1], ("x",)])))


def test_withheld_words_need_a_treebank_of_tagged_sentences(tmp_path):
    path = skeleton(tmp_path / "a", SHE_LEFT)
    with pytest.raises(ValueError, match=r"a:1: words are withheld \(\[WORD\]\); pass words="):
        list(read_propbank(path))
    with pytest.raises(TypeError, match="words must be a file, or rows"):
        read_propbank(path, (sentence for sentence in []))
    with pytest.raises(ValueError, match="words must have Penn Treebank tags, sentence '7' has none"):
        list(read_propbank(path, [plain_sentence("She left.", uid="7")]))
    with pytest.raises(FileNotFoundError, match="path must name a file"):
        read_propbank(tmp_path / "b")
    assert probe_info(semantic_role_swap(read_propbank(path, []))).dropped == {"words not found": 1}
