"""Negation and mood, on which depends what label a swapped sentence has."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes.role_swap.english import words

_NEGATIVE_WORDS = words("""not n't n’t never no nobody no-one noone nothing none nowhere neither nor without hardly
    scarcely barely rarely seldom cannot nt""")
# "didn't" as one word, also without its apostrophe
_NEGATIVE_ENDING = re.compile(
    r"(?i).*n['’ʼ‘`´]t|(?:ca|wo|ai|do|does|did|is|are|could|had|has|have|should|was|were|would)nt"
)
_QUESTION = re.compile(r"[?？؟⁇⁈⁉‽\u037e]\W*$")  # "?!", ".?", and of a text split at spaces "him?"
_GREEK_QUESTION = re.compile(r";\W*$")  # what Unicode's normal forms make of the Greek question mark, U+037E
_CONDITIONALS = words("if unless whether supposing assuming")
_FIRST_IN_CONDITIONALS = words("suppose had should were provided providing")  # "Had the nun seen him, ..."


def is_negative(sentence: Sentence) -> bool:
    """Return whether a sentence has a negative word, in English by the word, elsewhere by feature or relation."""
    if sentence.language == "en":
        return any(word.lower() in _NEGATIVE_WORDS or _NEGATIVE_ENDING.fullmatch(word) for word in sentence.words)
    if any(f.get("Polarity") == "Neg" or f.get("PronType") == "Neg" for f in _features(sentence)):
        return True
    return sentence.dependencies is not None and any(r.endswith(":neg") for r in sentence.dependencies.relations)


def mood_of(sentence: Sentence) -> Literal["declarative", "interrogative", "conditional"]:
    """Return the mood of a sentence: a question by its mark, a conditional by English words or the feature Mood."""
    if any(map(_QUESTION.search, sentence.words)):
        return "interrogative"
    if sentence.language == "el" and any(map(_GREEK_QUESTION.search, sentence.words)):
        return "interrogative"
    by_word = sentence.language == "en" and _has_conditional(sentence.words)
    return "conditional" if by_word or any(f.get("Mood") == "Cnd" for f in _features(sentence)) else "declarative"


def _has_conditional(english: Sequence[str]) -> bool:
    """Return whether English words have one that begins a condition."""
    lower = [word.lower() for word in english]
    first = next((word for word in lower if not is_punctuation(word)), "")
    provided = any(one in ("provided", "providing") and other == "that" for one, other in itertools.pairwise(lower))
    return provided or first in _FIRST_IN_CONDITIONALS or not _CONDITIONALS.isdisjoint(lower)


def _features(sentence: Sentence) -> Sequence[Mapping[str, str]]:
    """Return the features of each word, none where they are unknown."""
    return (sentence.dependencies and sentence.dependencies.features) or ()
