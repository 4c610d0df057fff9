"""Role swaps in English: capitals, verbs whose roles are no two, and what parsers misread."""

import pytest

from tests.test_probes_roles import reasons, swapped


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
def test_capitals_of_whole_sentences_and_inside_words_stay(tree, made):
    assert swapped(tree, agreement="reinflect") == [made]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ("(S (NP (NNP iPhone) (CD 5)) (VP (VBD hit) (NP (DT the) (NN man))))",
         "whose capital the first word bears is unknown"),
        ("(S (NP (DT THE) (NN dog)) (VP (VBD bit) (NP (DT a) (NN man))))",
         "whose capital the first word bears is unknown"),
        ("(S (NP (DT The) (NNP Dog)) (VP (VBD Bit) (NP (DT a) (NNP Man))))", "the sentence is written as a heading"),
    ],
)  # fmt: skip
def test_capitals_in_doubt_are_set_aside(tree, reason):
    assert swapped(tree) == []
    assert reasons(tree) == {reason}
