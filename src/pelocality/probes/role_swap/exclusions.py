"""Reasons not to exchange two arguments: those that hold in any language, then those in English.

Each function returns the reason, or None if nothing speaks against the exchange.
"""

from collections.abc import Sequence

from pelocality.corpora import Dependencies, Sentence, is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.english_exclusions import english_exclusion
from pelocality.probes.role_swap.noun_phrases import head_in_tree


def exclusion(sentence: Sentence, candidate: Candidate, symmetric: frozenset[str]) -> str | None:
    """Return the reason why two arguments cannot be exchanged."""
    return (
        _check_spans(sentence, candidate)
        or _check_features(sentence, candidate)
        or _check_case(sentence, candidate)
        or (english_exclusion(sentence, candidate, symmetric) if sentence.language == "en" else None)
    )


def _check_spans(sentence: Sentence, candidate: Candidate) -> str | None:
    """Check that the arguments are whole surface tokens, apart from each other and from the verb."""
    first, second = sorted((slot.start, slot.end) for slot in candidate.arguments)
    if first[1] > second[0]:
        return "the arguments overlap"
    verb = candidate.clause.verb
    if verb is not None and any(start <= verb < end for start, end in (first, second)):
        return "the arguments overlap with the verb"
    starts, ends = ({place[k] for place in sentence.surface_tokens} for k in (0, 1))
    if verb is not None and sum(is_punctuation(word) for word in sentence.words[first[1] : verb]) % 2:
        return "punctuation belongs to an argument in part"  # "Ada, saw him": a comma that no other closes
    for start, end in (first, second):
        if start not in starts or end not in ends:
            return "an argument cuts a surface token"
        dotted = "." in sentence.words[end - 1] and not sentence.words[end - 1][0].isdigit()
        if dotted and any(sentence.words[k : k + 1] in ((), (".",)) for k in (first[1], second[1])):
            return "an abbreviation would end the sentence"  # "U.K" before a full stop, "U.K." without one
        if " - " in sentence.surface(start, end) or not _keeps_marks_paired(sentence.words, start, end):
            return "punctuation belongs to an argument in part"
    return None


_OPENING = {'"': '"', "“": "”", "``": "''", "(": ")", "[": "]", "‘": "’", "-LRB-": "-RRB-"}


def _keeps_marks_paired(words: Sequence[str], start: int, end: int) -> bool:
    """Return whether commas and quotes inside a span have their counterpart there, and none outside belongs to it."""
    inside = [word for word in words[start:end] if is_punctuation(word) and word not in ("-", "'", "’")]
    quotes = [k for k in range(start, end) if words[k] in ("'", "’") and not words[k - 1].endswith(("s", "S"))]
    if len(quotes) % 2:  # "the hat 'Ada", but "the nuns' hat"
        return False
    if not set(inside) <= {",", *_OPENING, *_OPENING.values()}:
        return False
    after = words[end] if end < len(words) else ""
    if "," in inside and after == ",":  # "Ada, the judge, saw him": the second comma would stay behind
        return False
    pairs = all(inside.count(a) % 2 == 0 if a == b else inside.count(a) == inside.count(b) for a, b in _OPENING.items())
    return pairs and not (start and after and _OPENING.get(words[start - 1]) == after)


def _check_features(sentence: Sentence, candidate: Candidate) -> str | None:
    """Look for reflexives, reciprocals and interrogatives, by feature in any language and by word in English."""
    layer = sentence.dependencies
    features = layer.features if layer and layer.features else ({},) * len(sentence.words)
    lower = [word.lower() for word in sentence.words]
    for i in range(*candidate.clause.extent):
        by_feature = features[i].get("Reflex") == "Yes" or features[i].get("PronType") == "Rcp"
        by_word = lower[i] in english.REFLEXIVES or tuple(lower[i : i + 2]) in english.RECIPROCALS
        if by_feature or (sentence.language == "en" and by_word):
            return "a reflexive or reciprocal in the clause"
    if (
        layer
        and candidate.clause.verb is not None
        and any(layer.relations[child].endswith(":lvc") for child in layer.children[candidate.clause.verb])
    ):
        return "a light verb with a noun"
    kinds = [features[slot.start].get("PronType", "") for slot in candidate.arguments]
    if any("Int" in kind or "Rel" in kind for kind in kinds):
        return "an argument is interrogative or relative"
    return None


def _check_case(sentence: Sentence, candidate: Candidate) -> str | None:
    """Compare the cases of the arguments; in English only pronouns have case, and they are adapted."""
    layer = sentence.dependencies
    if sentence.language == "en" or layer is None or layer.features is None:
        return None
    first, second = (_cases(layer, argument) for argument in candidate.arguments)
    if first != second:
        return "the arguments have different cases"
    marked = any(
        "Case" in features and upos in ("NOUN", "PROPN")
        for features, upos in zip(layer.features, layer.upos or (), strict=False)
    )
    return "the case of the arguments is unknown" if marked and not first else None


# dependents that have the case of their noun, in some language: articles, adjectives, further parts of a name
_CONCORD = frozenset({"det", "amod", "nummod", "flat", "compound", "appos", "conj", "fixed"})


def _cases(layer: Dependencies, argument: Slot) -> set[str]:
    """Return the cases marked on the head of an argument and on the words that agree with it."""
    found = {head_in_tree(layer, argument)}
    waiting = list(found)
    while waiting:
        above = waiting.pop()
        for i in range(argument.start, argument.end):
            if layer.heads[i] == above + 1 and i not in found and layer.relations[i].split(":")[0] in _CONCORD:
                found.add(i)
                waiting.append(i)
    return {layer.features[i]["Case"] for i in found if layer.features and "Case" in layer.features[i]}
