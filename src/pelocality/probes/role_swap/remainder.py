"""What an English argument would leave behind: words after its end that may belong to its noun."""

from collections.abc import Sequence
from itertools import pairwise

from pelocality.corpora import is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate

CLAUSE_TAGS = frozenset({"MD", "VBD", "VBP", "VBZ", "WDT", "WP", "WP$", "WRB"})
_PASSED_TAGS = frozenset({",", ":", "RB", "RP"})
_PASSED_WORDS = english.DAYS | {",", "-", "--", "–", "—", '"', "“", "”", "``", "''", "(", "-LRB-"}


def check_remainder(candidate: Candidate, lower: Sequence[str], tags: Sequence[str]) -> str | None:
    """Return a reason to skip unless the words after the last argument are of a few kinds that belong to no noun."""
    last = max(candidate.arguments, key=lambda slot: slot.end)
    if any(is_comparison(lower[slot.start : slot.end], tags[slot.start : slot.end]) for slot in candidate.arguments):
        return "an argument is a comparison"
    words, within = lower[last.start : last.end], tags[last.start : last.end]
    if last.function == "object" and any(a.startswith("NN") and b in ("VBG", "VBN") for a, b in pairwise(within)):
        return "an argument may be a clause"  # "had nuns working", "reported two nuns killed"
    is_light = candidate.clause.verb is not None and lower[candidate.clause.verb] in english.LIGHT_VERBS
    holds_clause = not CLAUSE_TAGS.isdisjoint(within)
    after_verb = last.function not in ("subject", None)
    if after_verb and (is_light or not holds_clause) and not is_certain(words, within, bare=True):
        return "an argument may hold a phrase of the verb"  # "had hats on the Liberty", "answer the phone for orders"
    k = last.end
    inside = k < candidate.clause.extent[1]
    if inside and _is_nominal(lower[k:], tags[k:]):
        return "a predicate over an argument would be left behind"  # "treated them like sons", "called them fools"
    while k < len(tags) and (tags[k] in _PASSED_TAGS or lower[k] in _PASSED_WORDS):
        k += 1
    is_apart, is_joined = any(map(is_punctuation, lower[last.end : k])), tags[k : k + 1] == ("CC",)
    if (is_apart or is_joined) and _is_nominal(lower[k + is_joined :], tags[k + is_joined :]):
        return "an argument may go on after its end"  # "found the real thing, big hats", "but enough to get by"
    linked = tags[k : k + 1] in (("IN",), ("TO",)) and lower[k] in english.VERB_LINKS
    # has few modifiers after it: "told Ada to leave", but "visited Bonn on the Rhine"
    if _is_name_or_pronoun(words, within):
        if tags[last.end : last.end + 1] == ("IN",) and {*within} != {"PRP"} and not linked and lower[k] != "for":
            return "an argument may go on after its end"
        other = candidate.other(last)
        named = _is_name_or_pronoun(lower[other.start : other.end], tags[other.start : other.end])
        moved = inside and not named and tuple(tags[last.end : last.end + 2]) == ("TO", "VB")
        return "an infinitive would have another subject" if moved else None  # "the fire required him to call her"
    # outside the clause, but not read as a modifier: "left the house he had in disrepair", "fed nuns including Ada"
    if k == len(tags) or (k >= candidate.clause.extent[1] and (is_apart or tags[k] not in ("PRP", "VBG", "VBN"))):
        return None
    begins = tags[k] == "PRP" and k > last.end  # a new clause: "saw the hat, he was glad"
    linked = linked and tags[k + 1 : k + 2] != ("VB",) and not is_light and not holds_clause
    linked = linked or lower[k] in english.TIME_LINKS
    return None if begins or linked or is_joined or is_punctuation(lower[k]) else "an argument may go on after its end"


def _is_name_or_pronoun(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a phrase is a personal pronoun or a proper name."""
    return set(tags) <= {"PRP", "NNP", "NNPS"} and english.QUANTIFIED.isdisjoint(words)


def _is_nominal(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether words begin with a noun phrase, or *like* or *as* with one, that is no time and no subject."""
    start = next((k for k, tag in enumerate(tags) if tag != "RB" and words[k] not in ("like", "as")), 0)
    end = next((k for k, tag in enumerate(tags) if k > start and tag in ("CC", ",", ".", ":")), len(tags))
    is_phrase = tags[start : start + 1] in (("DT",), ("PRP$",), ("CD",), ("NN",), ("NNS",), ("NNP",), ("JJ",))
    return is_phrase and CLAUSE_TAGS.isdisjoint(tags[:end]) and not any(map(english.is_measure, words[:end]))


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
