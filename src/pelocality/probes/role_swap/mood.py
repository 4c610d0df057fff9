"""Negation and mood, on which depends what label a swapped sentence has."""

from __future__ import annotations

from typing import Literal

from pelocality.corpora import Sentence
from pelocality.probes.role_swap.english import words

_NEGATIVE_WORDS = words(
    "not n't n’t never no nobody nothing none nowhere neither nor without hardly scarcely barely rarely seldom cannot "
    "nt cant wont dont didnt doesnt isnt"
)
_QUESTION_MARKS = ("?", "？", "؟")
_CONDITIONALS = words("if unless whether")


def is_negative(sentence: Sentence) -> bool:
    """Return whether a sentence has a negative word, in English by the word, elsewhere by feature or relation."""
    if sentence.language == "en":
        return not _NEGATIVE_WORDS.isdisjoint(word.lower() for word in sentence.words)
    layer = sentence.dependencies
    if layer is None:
        return False
    by_feature = (f.get("Polarity") == "Neg" or f.get("PronType") == "Neg" for f in layer.features or ())
    return any(by_feature) or any(relation.endswith(":neg") for relation in layer.relations)


def mood_of(sentence: Sentence) -> Literal["declarative", "interrogative", "conditional"]:
    """Return the mood of a sentence: interrogative with a question mark, conditional with *if* in English."""
    if any(word in _QUESTION_MARKS for word in sentence.words):
        return "interrogative"
    conditional = sentence.language == "en" and not _CONDITIONALS.isdisjoint(word.lower() for word in sentence.words)
    return "conditional" if conditional else "declarative"
