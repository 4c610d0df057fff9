"""Whether a clause that a parser found can be trusted: a second parser agrees, or its shape leaves no doubt.

Most wrong swaps of parsed text come from phrases attached to the wrong word. Where no second parser is asked, only
clauses are used in which little can be attached wrongly.
"""

from collections.abc import Sequence
from itertools import pairwise

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate, find_candidates
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.noun_phrases import has_determiner_mismatch
from pelocality.probes.role_swap.remainder import is_certain

_UPOS_KINDS = {
    "NOUN": "noun",
    "PROPN": "noun",
    "VERB": "verb",
    "AUX": "verb",
    "ADP": "adposition",
    "DET": "determiner",
    "NUM": "determiner",
    "CCONJ": "link",
    "SCONJ": "link",
    "ADV": "adverb",
}
_TAG_KINDS = {
    **dict.fromkeys(("NN", "NNS", "NNP", "NNPS"), "noun"),
    **dict.fromkeys(("MD", "VB", "VBD", "VBG", "VBN", "VBP", "VBZ", "VB?"), "verb"),
    **dict.fromkeys(("IN", "TO"), "adposition"),
    **dict.fromkeys(("CC", "WDT", "WP", "WP$", "WRB"), "link"),
    **dict.fromkeys(("DT", "CD", "PRP$", "PDT"), "determiner"),
    **dict.fromkeys(("RB", "UH"), "adverb"),
    "RP": "particle",
}


_BARE = ("NN", "NNS", "JJ")


def reason_to_distrust(sentence: Sentence, candidate: Candidate, second: Sentence | None) -> str | None:
    """Return the reason not to trust a clause of an automatic tree; ``second`` is another parser's sentence."""
    verb, first, last = candidate.clause.verb, *sorted(candidate.arguments, key=lambda slot: slot.start)
    kinds = _kinds(sentence)
    if kinds is None or verb is None:
        return None
    passive = candidate.clause.voice == "passive"
    # "slides down a slide": a particle of the verb, or a preposition of the noun?
    if not first.end <= verb < last.start or set(kinds[verb + 1 : last.start]) - ({"adposition"} if passive else set()):
        return "words between the verb and an argument"
    tags = english.tags_of(sentence) if sentence.language == "en" else None
    # "have painted faces": a verb in the perfect, or an adjective?
    if tags and sentence.words[verb - 1].lower() in english.HAVE and tags[verb] == "VBN" and tags[last.start] in _BARE:
        return "the parser may be wrong"
    for slot in (first, last) if tags else ():
        phrase, phrase_tags = (layer[slot.start : slot.end] for layer in (sentence.words, tags or ()))
        if has_determiner_mismatch(phrase, phrase_tags):
            return "a determiner does not agree with its noun"
        if any(a == "NNS" and b.startswith("NN") for a, b in pairwise(phrase_tags)):  # "gave boards independence"
            return "the parser may be wrong"
    if tags is not None and not is_certain(sentence.words[last.start : last.end], tags[last.start : last.end]):
        return "the parser may be wrong"
    # "accused the nun of theft": of the noun, or of the verb?
    takes_of = sentence.words[verb].lower() in english.verb_forms(english.OF_VERBS)
    if tags and takes_of and "of" in sentence.words[last.start : last.end]:
        return "the parser may be wrong"
    # "helping a child dig": two nouns, or a noun and a verb?
    if sentence.words[verb].lower() in english.HELPING_VERBS and kinds[last.end - 2 : last.end] == ["noun", "noun"]:
        return "the parser may be wrong"
    if second is not None:
        found = find_candidates(second, candidate.roles, "dependencies")
        texts = _texts(sentence, candidate)
        agreed = any(isinstance(other, Candidate) and _texts(second, other) == texts for other in found)
        return None if agreed else "two parsers do not agree"
    fragment = candidate.clause.finite is None
    # "great job keeping our house": a clause? "a view of a nun having a drink": who has it?
    if fragment and (kinds[first.start] != "determiner" or "of" in sentence.words[first.start : first.end]):
        return "the parser may be wrong"
    return None if _is_plain(sentence, first, last, kinds, verb) else "the parser may be wrong"


def _texts(sentence: Sentence, candidate: Candidate) -> tuple[str, ...]:
    """Return the words of the verb and of both arguments, which do not depend on how a parser splits words."""
    verb = candidate.clause.verb
    spans = [(slot.start, slot.end) for slot in candidate.arguments]
    return tuple(sentence.surface(*span) for span in ([] if verb is None else [(verb, verb + 1)]) + spans)


def _kinds(sentence: Sentence) -> list[str] | None:
    """Return the kind of each word, of the tables above, ``"mark"`` or ``"other"``."""
    tags = english.tags_of(sentence) if sentence.language == "en" else None
    names: Sequence[str] | None = tags
    if names is None and sentence.dependencies is not None:
        names = sentence.dependencies.upos
    if names is None:
        return None
    table = _UPOS_KINDS if tags is None else _TAG_KINDS
    return [
        "mark" if is_punctuation(w) else table.get(name, "other") for w, name in zip(sentence.words, names, strict=True)
    ]


def _is_plain(sentence: Sentence, first: Slot, last: Slot, kinds: Sequence[str], verb: int) -> bool:
    """Return whether a sentence is one clause, its arguments are plain noun phrases, and one phrase at most follows."""
    after = kinds[last.end :]
    return (
        _is_setting(kinds[: first.start])
        and set(kinds[first.end : verb]) <= {"verb", "adverb"}
        and {"verb", "link"}.isdisjoint(after)
        and after.count("adposition") <= 1
        and all(_is_noun_phrase(sentence.words[s.start : s.end], kinds[s.start : s.end]) for s in (first, last))
        and kinds[first.start : first.end].count("adposition") <= 1
    )


def _is_noun_phrase(words: Sequence[str], kinds: Sequence[str]) -> bool:
    """Return whether a phrase has no link or mark, no verb but a participle with its object, and ends in a noun."""
    if kinds[-1] != "noun" and len(kinds) > 1:
        return False
    # "a microphone singing": two nouns, or a noun and a verb?
    if kinds[-2:] == ["noun", "noun"] and words[-1].endswith("ing"):
        return False
    participles = all(after in ("noun", "other", "determiner") for kind, after in pairwise(kinds) if kind == "verb")
    return participles and {"link", "mark", "particle"}.isdisjoint(kinds)


def _is_setting(kinds: Sequence[str]) -> bool:
    """Return whether nothing but adverbs stands before the clause, or a phrase that a mark ends."""
    return set(kinds) <= {"adverb", "mark"} or (kinds[-1] == "mark" and {"verb", "link"}.isdisjoint(kinds))
