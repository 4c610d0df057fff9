"""Negation and mood, on which depends what label a swapped sentence has."""

from __future__ import annotations

import re
from typing import Literal

from pelocality.corpora import Sentence
from pelocality.probes.role_swap.english import words

_NEGATIVE_WORDS = words(
    "not n't n’t never no nobody nothing none nowhere neither nor without hardly scarcely barely rarely seldom cannot "
    "nt cant wont dont didnt doesnt isnt aint arent couldnt hadnt hasnt havent shouldnt wasnt werent wouldnt"
)
_NEGATIVE_ENDING = re.compile(r".*n['’ʼ‘`´]t", re.IGNORECASE)  # "didn't" as one word
_QUESTION = re.compile(r"[?？؟⁇⁈⁉‽]\W*$")  # "?!", ".?", and of a text split at spaces "him?"
_CONDITIONALS = words("if unless whether")


def is_negative(sentence: Sentence) -> bool:
    """Return whether a sentence has a negative word, in English by the word, elsewhere by feature or relation."""
    if sentence.language == "en":
        return any(word.lower() in _NEGATIVE_WORDS or _NEGATIVE_ENDING.fullmatch(word) for word in sentence.words)
    layer = sentence.dependencies
    if layer is None:
        return False
    by_feature = (f.get("Polarity") == "Neg" or f.get("PronType") == "Neg" for f in layer.features or ())
    return any(by_feature) or any(relation.endswith(":neg") for relation in layer.relations)


def mood_of(sentence: Sentence) -> Literal["declarative", "interrogative", "conditional"]:
    """Return the mood of a sentence: interrogative if a word ends in a question mark, conditional with English *if*."""
    if any(map(_QUESTION.search, sentence.words)):
        return "interrogative"
    conditional = sentence.language == "en" and not _CONDITIONALS.isdisjoint(word.lower() for word in sentence.words)
    return "conditional" if conditional else "declarative"
