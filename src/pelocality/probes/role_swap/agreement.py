"""Agreement of the verb with its new subject: by number in English, by features in other languages."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pelocality.corpora import Dependencies, Sentence
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.english import Number
from pelocality.probes.role_swap.noun_phrases import head_in_tree, number_of

Agreement = Literal["skip", "reinflect", "ignore"]
Replacement = tuple[int, int, str, str]  # start, end, text, and the role or "agreement"

_PRESENT: dict[Number, str] = {"1sg": "am", "3sg": "is", "plural": "are"}
_PAST: dict[Number, str] = {"1sg": "was", "3sg": "was", "plural": "were"}
_BE = {**dict.fromkeys(_PRESENT.values(), _PRESENT), **dict.fromkeys(_PAST.values(), _PAST)}


def reinflected_verb(sentence: Sentence, candidate: Candidate, agreement: Agreement) -> list[Replacement] | Skipped:
    """Return the replacement of the finite verb that the new subject needs, if any, or the reason to skip."""
    clause, subject = candidate.clause, candidate.subject
    if clause.voice != "unknown" and (clause.finite is None or subject is None):
        return []
    if sentence.language != "en":
        return _compared_features(sentence, candidate)
    # without a tree, the argument before the verb is the subject
    subject = subject or min(candidate.arguments, key=lambda slot: slot.start)
    tags = english.tags_of(sentence)
    old, new = (
        number_of(sentence.words[slot.start : slot.end], tags[slot.start : slot.end] if tags is not None else None)
        for slot in (subject, candidate.other(subject))
    )
    finite = clause.finite if clause.finite is not None else _finite_by_word(sentence.words, subject, clause.verb)
    if finite is None:
        return [] if old is not None and old == new else Skipped("the verb may not agree with its new subject")
    word, tag = sentence.words[finite], tags[finite] if tags is not None else None
    if old is not None and tag is not None and not agrees(word, tag, old, old):
        return Skipped("the verb does not agree with its present subject")
    if tag == "VBD" and word.lower() in english.SYNCRETIC and new == "3sg" != old:
        return Skipped("the tense of the verb is unknown")
    if agrees(word, tag, old, new):
        return []
    if agreement == "skip":
        return Skipped("the verb would not agree with its new subject")
    if new is None:
        return Skipped("the number of the new subject is in doubt")
    form = inflect(word, tag, new)
    place = next((place for place in sentence.surface_tokens if place[0] == finite), None)
    rest = sentence.surface(finite + 1, place[1]) if place is not None else ""  # the n't of "doesn't"
    if form is None or place is None or (form.lower() == "am" and rest):
        return Skipped("the verb cannot be reinflected")
    return [(*place, form + rest, "agreement")]


def _finite_by_word(words: Sequence[str], subject: Slot, verb: int | None) -> int | None:
    """Return the first auxiliary between subject and verb, without a tree, or the verb."""
    between = range(subject.end, verb or subject.end)
    return next((i for i in between if words[i].lower() in english.AUXILIARIES), verb)


def _compared_features(sentence: Sentence, candidate: Candidate) -> list[Replacement] | Skipped:
    """Outside English, compare the features marked on the verb with those of the heads of the arguments."""
    layer, clause, subject = sentence.dependencies, candidate.clause, candidate.subject
    if layer is None or layer.features is None or clause.finite is None or subject is None:
        return []
    old, new = (_agreement_features(layer, layer.features, slot) for slot in (subject, candidate.other(subject)))
    marked = set(layer.features[clause.finite])
    if clause.voice == "passive" and clause.verb is not None:  # French "est vendue": the participle agrees too
        marked.update(layer.features[clause.verb])
    if clause.shared and layer.upos is not None:  # "went and were seen": features marked on any of the verbs
        verbs = (i for i in range(*clause.extent) if layer.upos[i] in ("VERB", "AUX"))
        marked.update(*(layer.features[i] for i in verbs))
    for feature, default in (("Number", None), ("Person", "3"), ("Gender", None)):
        if feature in marked and old.get(feature, default) != new.get(feature, default):
            return Skipped("the verb would not agree with its new subject")
    return []


def _agreement_features(
    layer: Dependencies, features: Sequence[Mapping[str, str]], argument: Slot
) -> Mapping[str, str]:
    """Return the features of the head of an argument, plural if another word is coordinated with it."""
    head = head_in_tree(layer, argument)
    coordinated = any(
        layer.heads[i] == head + 1 and layer.relations[i].startswith("conj")
        for i in range(argument.start, argument.end)
    )
    return {**features[head], "Number": "Plur"} if coordinated else features[head]


def agrees(finite: str, tag: str | None, old: Number | None, new: Number | None) -> bool:
    """Return whether a finite verb that agrees with one subject agrees with another; False if in doubt.

    ``tag`` is None or ``VB?`` if unknown.

    Examples:
        >>> agrees("bites", "VBZ", "3sg", "plural"), agrees("bit", "VBD", "3sg", "plural")
        (False, True)
        >>> agrees("was", "VBD", "1sg", "3sg"), agrees("like", "VBP", "1sg", "plural")
        (True, True)
    """
    word = finite.lower()
    if tag in ("MD", "VB", "VBG", "VBN") or (tag == "VBD" and word not in _BE):
        return True
    if tag in (None, "VB?") and (word in english.INVARIABLE or word.endswith("ed")):
        return True
    if new is None:
        return False
    if word in _BE:
        return _BE[word][new] == word
    if tag == "VBZ":
        return new == "3sg"
    if tag == "VBP":
        return new != "3sg"
    return old is not None and (old == "3sg") == (new == "3sg")


def inflect(finite: str, tag: str | None, number: Number) -> str | None:
    """Return a present-tense verb, or *was* or *were*, inflected for a number by lemminflect; None for other forms.

    Examples:
        >>> inflect("Does", "VBZ", "plural"), inflect("watch", "VBP", "3sg"), inflect("WAS", "VBD", "plural")
        ('Do', 'watches', 'WERE')
    """
    word = finite.lower()
    if word in _BE:
        form = _BE[word][number]
    elif tag in ("VBZ", "VBP") and word.isalpha() and len(word) > 1:  # "they r"
        try:
            import lemminflect
        except ImportError as error:
            raise ImportError(
                'agreement="reinflect" needs lemminflect: pip install lemminflect, or use agreement="skip"'
            ) from error
        lemmas = lemminflect.getLemma(word, upos="VERB")
        if tag == "VBP" and word not in lemmas:  # "they knew", tagged as present
            return None
        lemmas = lemmas if tag == "VBZ" else (word,)
        forms = lemminflect.getInflection(lemmas[0], tag="VBZ") if number == "3sg" else lemmas
        if not forms:
            return None
        form = forms[0]
    else:
        return None
    if finite.isupper() and len(finite) > 1:
        return form.upper()
    return form.capitalize() if finite[0].isupper() else form
