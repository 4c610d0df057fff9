"""Persons among the arguments of a swap: if both are persons, either may do what the verb says."""

from collections.abc import Sequence
from typing import Literal

from pelocality.corpora import Sentence
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.clauses import Candidate
from pelocality.probes.role_swap.english import WORDS
from pelocality.probes.role_swap.features import agreement_features
from pelocality.probes.role_swap.pattern import head_of

_THINGS = english.words("it something everything")
_ANIMACY = {"Hum": True, "Inan": False, "Nhum": False}


def reversible(sentence: Sentence, candidate: Candidate) -> Literal["both", "one", "none", "unknown"]:
    """Return how many of the two arguments are persons or personal pronouns, as far as the words and tags tell."""
    tags = english.tags_of(sentence) if sentence.language == "en" else None
    lower, layer = english.lowered(sentence), sentence.dependencies
    persons: list[bool | None] = []
    for start, end in candidate.arguments:
        if sentence.language == "en":
            persons.append(_is_person(lower[start:end], list(tags or [""] * end)[start:end]))
        else:
            features = agreement_features(layer, layer.features, (start, end)) if layer and layer.features else {}
            persons.append(features.get("PronType") == "Prs" or _ANIMACY.get(features.get("Animacy", "")))
    return "unknown" if None in persons else ("none", "one", "both")[persons.count(True)]


def _is_person(words: Sequence[str], tags: Sequence[str]) -> bool | None:
    """Return whether an English noun phrase names persons and nothing else, None if that is unknown."""
    if not words:
        return None
    if len(words) == 1 and words[0] in english.PRONOUNS and not tags[0].startswith("NNP"):
        return words[0] not in _THINGS
    head = head_of(words, tags)
    noun, after = words[head], words[head + 1 : head + 2]
    if after == ["of"] and noun in WORDS["vague number"]:  # "a group of nuns"
        return _is_person(words[head + 2 :], tags[head + 2 :])
    if after and tags[head + 1] in ("CC", ","):  # "a nun and her hat"
        others = head + 2 + (tags[head + 1] == "," and tags[head + 2 : head + 3] == ["CC"])
        joined = (_is_person(words[: head + 1], tags[: head + 1]), _is_person(words[others:], tags[others:]))
        return None if None in joined else all(joined)
    owner = max((k + 1 for k in range(head) if tags[k] == "POS"), default=0)  # "the nun's House"
    nouns = [word for word, tag in zip(words[owner : head + 1], tags[owner:], strict=False) if tag[:2] == "NN"]
    if tags[head] in ("NN", "NNS") and noun not in ("one", "ones"):
        return noun in WORDS["persons"]
    # "Ada Lovelace", "Aunt Zillah"
    named = nouns and (nouns[0] in WORDS["given names"] or not WORDS["persons"].isdisjoint(nouns))
    return True if named or (tags[head] == "NNPS" and english.NATION.fullmatch(noun)) else None
