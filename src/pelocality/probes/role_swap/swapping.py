"""The exchange of two arguments: what forbids it, and what else must change with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pelocality.corpora import Dependencies, Sentence, is_punctuation
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate, RoleArgument
from pelocality.probes.role_swap.capitals import capital, is_all_capitals, is_camel_case, starts_sentence, uncapitalised
from pelocality.probes.role_swap.forbidden import check_english

Agreement = Literal["skip", "reinflect", "ignore"]


Replacement = tuple[int, int, str, str]  # start, end, text, and the role or "agreement"


def exchange(
    sentence: Sentence, candidate: Candidate, agreement: Agreement, symmetric: frozenset[str]
) -> list[Replacement] | Skipped:
    """Exchange two arguments, with what follows from it for case, capitals and agreement.

    Args:
        sentence: The sentence.
        candidate: The arguments and their clause.
        agreement: What to do where the verb would no longer agree with its subject.
        symmetric: Base forms of verbs whose roles mean the same exchanged.

    Returns:
        What to write where, in order, or the reason why the arguments stay.
    """
    for check in (_check_spans, _check_words, _check_case):
        reason = check(sentence, candidate)
        if reason:
            return Skipped(reason)
    if sentence.language == "en":
        reason = check_english(sentence, candidate, symmetric)
        if reason:
            return Skipped(reason)
    replacements: list[Replacement] = []
    first, second = candidate.arguments
    for here, other in ((first, second), (second, first)):
        text = _placed(sentence, candidate, here, other)
        if isinstance(text, Skipped):
            return text
        replacements.append((here.start, here.end, text, here.role))
    if agreement != "ignore":
        verb = _agreement(sentence, candidate, agreement)
        if isinstance(verb, Skipped):
            return verb
        replacements += verb
    replacements.sort()
    if sentence.replaced([(start, end, text) for start, end, text, _ in replacements]) == sentence.text:
        return Skipped("the text would not change")
    return replacements


def _check_spans(sentence: Sentence, candidate: Candidate) -> str | None:
    a, b = sorted((f.start, f.end) for f in candidate.arguments)
    if a[1] > b[0]:
        return "the arguments overlap"
    if candidate.verb is not None and any(s <= candidate.verb < e for s, e in (a, b)):
        return "the arguments overlap with the verb"
    starts = {start for start, _ in sentence.written_words}
    ends = {end for _, end in sentence.written_words}
    for start, end in (a, b):
        if start not in starts or end not in ends:
            return "an argument cuts a surface token"
        if any(is_punctuation(w) and w not in ("-", "'", "’") for w in sentence.words[start:end]):
            return "an argument has punctuation"
    if _common(sentence, *a) == _common(sentence, *b):
        return "the arguments are the same"
    return None


def _common(sentence: Sentence, start: int, end: int) -> str:
    """Write an argument less what its place gives it: capitals, and in English the case of a pronoun."""
    text = sentence.written(start, end).casefold()
    return english.NOMINATIVE.get(text, text).casefold() if sentence.language == "en" else text


def _check_words(sentence: Sentence, candidate: Candidate) -> str | None:
    """Look for reflexives and reciprocals, by feature in any language and by word in English."""
    layer = sentence.dependencies
    features = layer.features if layer and layer.features else None
    start, end = candidate.extent
    lower = [word.lower() for word in sentence.words]
    for i in range(start, end):
        known = features[i] if features else {}
        if known.get("Reflex") == "Yes" or known.get("PronType") == "Rcp":
            return "a reflexive or reciprocal in the clause"
        if sentence.language == "en" and (
            lower[i] in english.REFLEXIVES or tuple(lower[i : i + 2]) in english.RECIPROCALS
        ):
            return "a reflexive or reciprocal in the clause"
    if features:
        for argument in candidate.arguments:
            if any("Int" in features[i].get("PronType", "") or "Rel" in features[i].get("PronType", "")
                   for i in (argument.start,)):  # fmt: skip
                return "an argument is interrogative or relative"
    return None


def _check_case(sentence: Sentence, candidate: Candidate) -> str | None:
    """Compare the cases the arguments bear; English keeps case for pronouns alone, which are re-written."""
    layer = sentence.dependencies
    if sentence.language == "en" or layer is None or layer.features is None:
        return None
    cases = [_cases(layer.heads, layer.relations, layer.features, argument) for argument in candidate.arguments]
    if cases[0] != cases[1]:
        return "the arguments bear different cases"
    marks = any(
        "Case" in features and upos in ("NOUN", "PROPN")
        for features, upos in zip(layer.features, layer.upos or (), strict=False)
    )
    return "the case of the arguments is not known" if marks and not cases[0] else None


# what bears the case of its noun, in some language: articles, adjectives, the further parts of a name
_CONCORD = frozenset({"det", "amod", "nummod", "flat", "compound", "appos", "conj", "fixed"})


def _cases(
    heads: Sequence[int], relations: Sequence[str], features: Sequence[Mapping[str, str]], argument: RoleArgument
) -> set[str]:
    head = _head(heads, argument)
    found, waiting = {head}, [head]
    while waiting:
        above = waiting.pop()
        for i in range(argument.start, argument.end):
            if heads[i] == above + 1 and i not in found and relations[i].split(":")[0] in _CONCORD:
                found.add(i)
                waiting.append(i)
    return {features[i]["Case"] for i in found if "Case" in features[i]}


def _head(heads: Sequence[int], argument: RoleArgument) -> int:
    outside = [i for i in range(argument.start, argument.end) if not argument.start < heads[i] <= argument.end]
    return outside[0] if outside else argument.end - 1


def _placed(sentence: Sentence, candidate: Candidate, here: RoleArgument, other: RoleArgument) -> str | Skipped:
    """Write the other argument as it must stand here: pronoun case, and capitals of a sentence's first word."""
    text = uncapitalised(sentence, other.start, other.end)
    if isinstance(text, Skipped):
        return text
    if sentence.language == "en" and other.end - other.start == 1:
        pronoun = text.lower()
        if pronoun in english.ACCUSATIVE or pronoun in english.NOMINATIVE:
            nominative = _wants_nominative(sentence, candidate, here)
            if nominative is None:
                return Skipped("which case a pronoun must take is unknown")
            form = (english.NOMINATIVE if nominative else english.ACCUSATIVE).get(pronoun, text)
            text = form.upper() if (len(text) > 1 and text.isupper()) or is_all_capitals(sentence) else form
        if (pronoun in english.PRONOUN_NUMBER and len(pronoun) < 5 and here.object
                and candidate.verb is not None and here.start != candidate.verb + 1):  # fmt: skip
            return Skipped("a pronoun would stand apart from its verb")
    there = sentence.words[here.start]
    if starts_sentence(sentence, here.start) and not is_camel_case(sentence.words[other.start]):
        if is_camel_case(there):  # "iPhones" bear none: would others here?
            return Skipped("whose capital the first word bears is unknown")
        if not there[0].islower():
            text = capital(text[0], sentence.language) + text[1:]
    return text


def _wants_nominative(sentence: Sentence, candidate: Candidate, here: RoleArgument) -> bool | None:
    if here.subject is not None:
        return here.subject and (candidate.finite is not None or not candidate.checked)
    word = sentence.words[here.start].lower()
    if here.end - here.start == 1 and (word in english.ACCUSATIVE or word in english.NOMINATIVE):
        return word in english.ACCUSATIVE
    return None if candidate.verb is None else here.end <= candidate.verb


def _agreement(sentence: Sentence, candidate: Candidate, agreement: Agreement) -> list[Replacement] | Skipped:
    """Check that the finite verb fits its new subject, and re-inflect it where that is asked for."""
    subject = next((f for f in candidate.arguments if f.subject), None)
    if candidate.checked and (candidate.finite is None or subject is None):
        return []
    if sentence.language != "en":
        return _foreign_agreement(sentence, candidate, subject)
    if subject is None:  # spans given by the caller: in English the argument before the verb is the subject
        subject = min(candidate.arguments, key=lambda f: f.start)
    other = next(f for f in candidate.arguments if f is not subject)
    tags = english.tags_of(sentence)
    old, new = (
        english.number_of(sentence.words[f.start : f.end], tags[f.start : f.end] if tags is not None else None)
        for f in (subject, other)
    )
    finite = candidate.finite if candidate.finite is not None else candidate.verb
    if finite is None:
        return [] if old is not None and old == new else Skipped("the verb may not agree with its new subject")
    word, tag = sentence.words[finite], tags[finite] if tags is not None else None
    if old is not None and tag is not None and not english.agrees(word, tag, old, old):
        return Skipped("the verb does not agree with the subject it has")
    if candidate.shared and (old is None or old != new):
        return Skipped("another verb would not agree with its new subject")
    if english.agrees(word, tag, old, new):
        return []
    if agreement == "skip":
        return Skipped("the verb would not agree with its new subject")
    if new is None:
        return Skipped("the number of the new subject is in doubt")
    form = english.inflect(word, tag, new)
    place = next((place for place in sentence.written_words if place[0] == finite), None)
    if form is None or place is None:
        return Skipped("the verb cannot be re-inflected")
    rest = sentence.written(finite + 1, place[1])  # the n't of "doesn't"
    if form.lower() == "am" and rest:
        return Skipped("the verb cannot be re-inflected")
    return [(*place, form + rest, "agreement")]


def _agreeing(layer: Dependencies, features: Sequence[Mapping[str, str]], argument: RoleArgument) -> Mapping[str, str]:
    """Return the features a verb agrees with: those of the head, plural where another is joined to it."""
    head = _head(layer.heads, argument)
    joined = any(
        layer.heads[i] == head + 1 and layer.relations[i].startswith("conj")
        for i in range(argument.start, argument.end)
    )
    return {**features[head], "Number": "Plur"} if joined else features[head]


def _foreign_agreement(
    sentence: Sentence, candidate: Candidate, subject: RoleArgument | None
) -> list[Replacement] | Skipped:
    """Outside English, compare what the verb marks with what the heads of the arguments bear."""
    layer = sentence.dependencies
    if layer is None or layer.features is None or candidate.finite is None or subject is None:
        return []
    other = next(f for f in candidate.arguments if f is not subject)
    old, new = (_agreeing(layer, layer.features, f) for f in (subject, other))
    marked = set(layer.features[candidate.finite])
    if candidate.voice == "passive" and candidate.verb is not None:  # French "est vendue": the participle agrees too
        marked.update(layer.features[candidate.verb])
    if candidate.shared and layer.upos is not None:  # "went and were seen": what any of the verbs marks
        verbs = (i for i in range(*candidate.extent) if layer.upos[i] in ("VERB", "AUX"))
        marked.update(*(layer.features[i] for i in verbs))
    default = {"Person": "3"}
    for feature in ("Number", "Person", "Gender"):
        if feature in marked and old.get(feature, default.get(feature)) != new.get(feature, default.get(feature)):
            return Skipped("the verb would not agree with its new subject")
    return []
