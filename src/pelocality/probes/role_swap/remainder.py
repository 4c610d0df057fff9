"""What an English argument would leave behind: words after its end that may belong to its noun."""

from __future__ import annotations

from collections.abc import Sequence

from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate

CLAUSE_TAGS = frozenset({"MD", "VBD", "VBP", "VBZ", "WDT", "WP", "WP$", "WRB"})
# may modify the noun before them: "the links to establish ...", "a court, complete with ...", "180 officers a year"
_MODIFIERS = ("VBG", "VBN", "JJ", "JJR", "JJS", "DT", "PDT", "PRP$", "CD", "NN", "NNS", "NNP", "NNPS")


def check_remainder(candidate: Candidate, lower: Sequence[str], tags: Sequence[str]) -> str | None:
    """Return a reason to skip if words after the last argument may belong to it."""
    last = max(candidate.arguments, key=lambda slot: slot.end)
    verb = candidate.clause.verb
    for argument in candidate.arguments:
        if is_comparison(lower[argument.start : argument.end], tags[argument.start : argument.end]):
            return "an argument is a comparison"
    within = tags[last.start : last.end]
    if set(within) <= {"PRP", "NNP", "NNPS"}:
        return None  # a pronoun or a name has no modifiers after it: "told him to leave"
    k = last.end
    while k < len(tags) and (tags[k] in (",", ":", "RB") or lower[k] in (",", "-", "--", "–", "—")):
        k += 1
    if k == len(tags):
        return None
    if tags[k] == "CC" and _has_no_clause(tags[k + 1 :]):
        return "an argument may go on after its end"
    if k >= candidate.clause.extent[1]:
        return None
    following = list(tags[k + 1 : k + 2])
    goes_on = (
        (tags[k] in _MODIFIERS and lower[k] not in english.DAYS)
        or tags[k] in ("WDT", "WP", "WP$")
        or (tags[k] == "TO" and following == ["VB"])
        or lower[k] in ("whether", "that", "like", "than", "of")
    )
    # the phrase may belong to a noun with a light verb, or to a clause in the argument
    is_light = verb is not None and lower[verb] in english.LIGHT_VERBS
    holds_clause = not CLAUSE_TAGS.isdisjoint(within)
    if goes_on or (tags[k] in ("IN", "TO") and (is_light or holds_clause)):
        return "an argument may go on after its end"
    return None


def _has_no_clause(tags: Sequence[str]) -> bool:
    """Return whether an adjective or a quantity follows a conjunction: "but enough to get by"."""
    rest = [tag for tag in tags if tag != "RB"][:1]
    return rest in (["JJ"], ["JJR"], ["RBR"], ["CD"])


def is_comparison(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a phrase has a degree or a comparison, whose second part may stand elsewhere."""
    return not english.DEGREES.isdisjoint(words) or not {"JJR", "RBR"}.isdisjoint(tags)
