"""Negation and mood, on which depends what label a swapped sentence has."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pelocality.corpora import Sentence

# "didn't" may be one word, also without its apostrophe.
_NEGATIVE = re.compile(r"""(?xi) not|never|no|nobody|no-?one|nothing|none|nowhere|neither|nor|without|hardly|barely|
    scarcely|rarely|seldom|cannot|.*n['’ʼ‘`´]t|(?:ca|wo|ai|do|does|did|is|are|ha[ds]|have|was|were|(?:c|w|sh)ould)?nt""")
_QUESTION = re.compile(r"[?？؟⁇⁈⁉‽\u037e]\W*$")  # "?!", ".?", and of a text split at spaces "him?"
_GREEK_QUESTION = re.compile(r";\W*$")  # what Unicode's normal forms make of the Greek question mark, U+037E
# In words with a space between: "he left, if ...", "Had the nun seen him, ..."
_CONDITION = re.compile(r"""(?xi) (?<!\S)(?:if|unless|whether|supposing|assuming|provid(?:ed|ing)[ ]that)(?!\S) |
    ^(?:\W+[ ])?(?:suppose|had|should|were|provided|providing)(?!\S)""")


def is_negative(sentence: Sentence) -> bool:
    """Return whether a sentence has a negative word, in English by the word, elsewhere by feature or relation."""
    if sentence.language == "en":
        return any(map(_NEGATIVE.fullmatch, sentence.words))
    if any(f.get("Polarity") == "Neg" or f.get("PronType") == "Neg" for f in _features(sentence)):
        return True
    return sentence.dependencies is not None and any(r.endswith(":neg") for r in sentence.dependencies.relations)


def mood_of(sentence: Sentence) -> Literal["declarative", "interrogative", "conditional"]:
    """Return the mood of a sentence: a question by its mark, a conditional by English words or the feature Mood."""
    marks = (_QUESTION, _GREEK_QUESTION) if sentence.language == "el" else (_QUESTION,)
    if any(mark.search(word) for mark in marks for word in sentence.words):
        return "interrogative"
    by_word = sentence.language == "en" and _CONDITION.search(" ".join(sentence.words))
    return "conditional" if by_word or any(f.get("Mood") == "Cnd" for f in _features(sentence)) else "declarative"


def _features(sentence: Sentence) -> Sequence[Mapping[str, str]]:
    """Return the features of each word, none where they are unknown."""
    return (sentence.dependencies and sentence.dependencies.features) or ()
