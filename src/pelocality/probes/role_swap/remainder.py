"""What an English argument would leave behind: words after its end that may belong to its noun."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pelocality.corpora import is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate

CLAUSE_TAGS = frozenset({"MD", "VBD", "VBP", "VBZ", "WDT", "WP", "WP$", "WRB"})
_PASSED_OVER = (",", ":", "RB", "RP")


def check_remainder(candidate: Candidate, lower: Sequence[str], tags: Sequence[str]) -> str | None:
    """Return a reason to skip unless the words after the last argument are of a few kinds that belong to no noun."""
    last = max(candidate.arguments, key=lambda slot: slot.end)
    for argument in candidate.arguments:
        if is_comparison(lower[argument.start : argument.end], tags[argument.start : argument.end]):
            return "an argument is a comparison"
    words, within = lower[last.start : last.end], tags[last.start : last.end]
    verb = candidate.clause.verb
    is_light = verb is not None and lower[verb] in english.LIGHT_VERBS
    if last.function == "object" and any(a.startswith("NN") and b in ("VBG", "VBN") for a, b in pairwise(within)):
        return "an argument may be a clause"  # "had nuns working", "reported two nuns killed"
    if is_light and last.function == "object" and not is_certain(words, within, bare=True):
        return "an argument may hold a phrase of the verb"  # "had hats on the Liberty"
    if set(within) <= {"PRP", "NNP", "NNPS"} and english.QUANTIFIED.isdisjoint(words):
        return None  # a pronoun or a name has no modifiers after it: "told him to leave"
    k = last.end
    if tags[k : k + 1] == ("IN",) and lower[k + 1 : k + 2] == lower[k - 1 : k]:
        return "an argument may go on after its end"  # "piled hat upon hat"
    while k < len(tags) and _is_passed_over(lower[k], tags[k]):
        k += 1
    if k == len(tags):
        return None
    if tags[k] == "CC" and _has_no_clause(tags[k + 1 :]):
        return "an argument may go on after its end"
    if k >= candidate.clause.extent[1]:
        return None
    holds_clause = not CLAUSE_TAGS.isdisjoint(within)
    # a new clause: "saw the hat, he was glad"
    begins = tags[k] == "PRP" and k > last.end
    linked = tags[k] in ("IN", "TO") and lower[k] not in english.NOUN_LINKS and tags[k + 1 : k + 2] != ("VB",)
    if (
        is_punctuation(lower[k])
        or tags[k] == "CC"
        or begins
        or lower[k] in english.TIME_LINKS
        or (linked and not is_light and not holds_clause)
    ):
        return None
    return "an argument may go on after its end"


def _is_passed_over(word: str, tag: str) -> bool:
    if word in english.TIME_LINKS:
        return False
    return tag in _PASSED_OVER or word in (",", "-", "--", "–", "—") or word in english.DAYS


def _has_no_clause(tags: Sequence[str]) -> bool:
    """Return whether an adjective or a quantity follows a conjunction: "but enough to get by"."""
    rest = [tag for tag in tags if tag != "RB"][:1]
    return rest in (["JJ"], ["JJR"], ["RBR"], ["CD"])


def is_comparison(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a phrase has a degree or a comparison, whose second part may stand elsewhere."""
    return not english.DEGREES.isdisjoint(words) or not {"JJR", "RBR"}.isdisjoint(tags)


def is_certain(words: Sequence[str], tags: Sequence[str], *, bare: bool = False) -> bool:
    """Return whether a phrase is no adverbial, and has no phrase but *of* that may belong to the verb."""
    lower = [word.lower() for word in words]
    if not bare and len(words) == 1 and tags[0] == "NN" and lower[0] not in english.PRONOUN_NUMBER:
        return False  # "travel light", "go bowling"
    return not any(
        word in english.PREPOSITIONS and not (word == "of" and k and tags[k - 1].startswith("NN"))
        for k, word in enumerate(lower)
    )
