"""Role swaps in English: capitals, verbs that do not have two different roles, and errors of parsers."""

import dataclasses

import pytest

from pelocality.probes import probe_info, semantic_role_swap
from tests.test_probes_role_swap import reasons, sentence, swapped


@pytest.mark.parametrize(
    ("tree", "made"),
    [
        ("(S (NP (PRP YOU)) (VP (VBP HAVE) (NP (DT A) (NN CAT))) (. .))", "A CAT HAS YOU."),
        ("(S (NP (DT THE) (NN DOG)) (VP (VBD BIT) (NP (PRP HIM))) (. .))", "HE BIT THE DOG."),
        ("(S (NP (PRP I)) (VP (VBP AM) (RB N'T) (VP (VBG BITING) (NP (DT A) (NN DOG)))) (. .))",
         "A DOG ISN'T BITING ME."),
        ("(S (NP (DT A) (NN DOG)) (VP (VBD BIT) (NP (PRP ME))) (. .))", "I BIT A DOG."),
        ("(S (NP (DT The) (NN man)) (VP (VBD dropped) (NP (NNP iPhone) (CD 5))))", "iPhone 5 dropped the man"),
        ("(S (NP (CD 5) (NNS dogs)) (VP (VBD bit) (NP (DT the) (NN man))))", "The man bit 5 dogs"),
        ("(S (NP (PRP She)) (VP (VBD bit) (NP (PRP HIM))))", "HE bit her"),
    ],
)  # fmt: skip
def test_capitals_of_whole_sentences_and_inside_words_are_kept(tree, made):
    assert swapped(tree, agreement="reinflect") == [made]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ("(S (NP (NNP iPhone) (CD 5)) (VP (VBD hit) (NP (DT the) (NN man))))",
         "whether the first word keeps its capital is unknown"),
        ("(S (NP (DT THE) (NN dog)) (VP (VBD bit) (NP (DT a) (NN man))))",
         "whether the first word keeps its capital is unknown"),
        ("(S (NP (DT The) (NNP Dog)) (VP (VBD Bit) (NP (DT a) (NNP Man))))", "the sentence is a heading"),
    ],
)  # fmt: skip
def test_capitals_in_doubt_are_skipped(tree, reason):
    assert swapped(tree) == []
    assert reasons(tree) == {reason}


S = "(S (NP {}) (VP (VB{} {}) (NP {})) (. .))"


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (S.format("(PRP It)", "D", "rained", "(NNS cats)"), "it or there may have no referent"),
        (S.format("(EX There)", "D", "passed", "(DT a) (NN nun)"), "it or there may have no referent"),
        ("(S (NP (PRP It)) (VP (VBD scared) (NP (DT the) (NN nun)) (S (VP (TO to) (VP (VB run))))))",
         "it or there may have no referent"),
        (S.format("(DT The) (NN nun)", "D", "hugged", "(DT a) (NN judge)"), "the verb is symmetric"),
        (S.format("(DT The) (NN nun)", "Z", "faces", "(DT a) (NN judge)"), "the verb is symmetric"),
        (S.format("(DT The) (NN nun)", "D", "shook", "(NNS hands)"), "a light verb with a noun"),
        (S.format("(DT The) (NN nun)", "D", "stayed", "(DT a) (NN judge)"), "the verb is a copula"),
        ("(S (NP (DT A) (NN nun)) (VP (VBZ makes) (NP (PRP$ her) (NN guest)) (NP (DT a) (NN meal))))",
         "an indirect object besides the arguments"),
        ("(SBAR (IN whether) (S (NP (PRP you)) (VP (VB need) (NP (DT the) (NN hat)))))",
         "whether the verb is finite is in doubt"),
    ],
)  # fmt: skip
def test_english_candidates_that_cannot_be_swapped_are_skipped(tree, reason):
    assert swapped(tree, agreement="reinflect") == []
    assert reasons(tree, agreement="reinflect") == {reason}


@pytest.mark.parametrize(
    ("tree", "made"),
    [
        (S.format("(DT The) (NN nun)", "D", "shook", "(DT the) (NN judge)"), "The judge shook the nun."),
        (S.format("(DT The) (NN nun)", "Z", "makes", "(DT a) (NN hat)"), "A hat makes the nun."),
        ("(S (NP (PRP We)) (VP (VBD made) (S (NP (PRP him)) (VP (VB see) (NP (DT a) (NN nun))))) (. .))",
         "We made a nun see him."),
    ],
)  # fmt: skip
def test_similar_clauses_that_can_be_swapped_are_swapped(tree, made):
    assert swapped(tree) == [made]


# trees as a parser may build them: skipped if a parser made them, trusted if they are from a treebank
MISREAD = [
    ("(NP (NP (DT A) (NN nun)) (VP (VBG holding) (NP (DT a) (NN microphone) (NN singing))) (. .))",
     "the parser may be wrong"),
    ("(S (NP (DT A) (NN nun)) (VP (VBZ is) (VP (VBG helping) (NP (DT a) (JJ small) (NN child) (NN dig)))) (. .))",
     "the parser may be wrong"),
    ("(NP (NP (DT A) (NN nun)) (VP (VBG buying) (NP (NNS drinks) (CC and) (VBG smoking) (NNS pipes))) (. .))",
     "the parser may be wrong"),
    ("(NP (NP (DT A) (NN nun)) (VP (VBG washing) (NP (NNS stairs)) (S (VP (VBG leading) (ADVP (RB down))))) (. .))",
     "the parser may be wrong"),
    ("(NP (NP (DT A) (NN nun)) (VP (VBG wearing) (NP (DT a) (NN hat)) (PP (IN in) (S (VP (VBG racing))))) (. .))",
     "the parser may be wrong"),
    ("(S (NP (DT A) (NN nun)) (ADJP (JJ next) (PP (TO to) (NP (NNP Ada)))) (VP (VBD saw) (NP (DT a) (NN hat))) (. .))",
     "the parser may be wrong"),
    ("(S (NP (DT A) (NN dog)) (VP (VBD took) (NP (NP (DT a) (NN stick)) (PP (IN on) (NP (DT the) (NN grass))))) (. .))",
     "the parser may be wrong"),
    ("(NP (NP (DT A) (NN nun)) (VP (VBG running) (NP (DT a) (NN marathon) (NNS talks))) (. .))",
     "a determiner does not agree with its noun"),
    ("(NP (NP (NP (DT A) (NN view)) (PP (IN of) (NP (DT a) (NN nun)))) (VP (VBG having) (NP (DT a) (NN drink))) (. .))",
     "the parser may be wrong"),
    ("(NP (NP (NP (DT A) (NN nun)) (PP (IN in) (NP (NN red))) (CC and) (NP (DT a) (NN boy))) (VP (VBG riding)"
     " (NP (DT a) (NN bike))) (. .))", "the parser may be wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "reason"), MISREAD)
def test_frequent_parser_errors_are_skipped_in_automatic_trees_only(tree, reason):
    gold = sentence(tree)
    parsed = dataclasses.replace(gold, constituents=dataclasses.replace(gold.constituents, automatic=True))
    probe = semantic_role_swap([parsed], source="constituents")
    assert probe_info(probe).skipped == {reason: 1}
    assert reason not in probe_info(semantic_role_swap([gold], source="constituents")).skipped


@pytest.mark.parametrize(
    ("tree", "made"),
    [
        ("(NP (NP (NP (DT A) (NN nun)) (PP (IN in) (NP (NN red)))) (VP (VBG riding) (NP (DT a) (NN bike))) (. .))",
         "A bike riding a nun in red."),
        ("(S (NP (DT A) (NN nun)) (VP (VBD saw) (NP (NP (DT a) (NN row)) (PP (IN of) (NP (NNS hats))))) (. .))",
         "A row of hats saw a nun."),
    ],
)  # fmt: skip
def test_similar_automatic_trees_are_still_swapped(tree, made):
    gold = sentence(tree)
    parsed = dataclasses.replace(gold, constituents=dataclasses.replace(gold.constituents, automatic=True))
    assert semantic_role_swap([parsed], source="constituents")["hypothesis"] == [made]
