"""Reasons to leave two arguments where they are: in any language, in English, and where parsers often fail.

Each function returns the reason, or None if nothing speaks against the exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pelocality.corpora import Dependencies, Sentence, is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.agreement import has_determiner_mismatch, head_in_tree, head_of
from pelocality.probes.role_swap.candidates import Candidate
from pelocality.probes.role_swap.clauses import Slot


def exclusion(sentence: Sentence, candidate: Candidate, symmetric: frozenset[str]) -> str | None:
    """Return the reason why two arguments cannot be exchanged."""
    return (
        _check_spans(sentence, candidate)
        or _check_features(sentence, candidate)
        or _check_case(sentence, candidate)
        or (_check_english(sentence, candidate, symmetric) if sentence.language == "en" else None)
    )


def _check_spans(sentence: Sentence, candidate: Candidate) -> str | None:
    """Check that the arguments are whole surface tokens, apart from each other and from the verb, and different."""
    first, second = sorted((slot.start, slot.end) for slot in candidate.arguments)
    if first[1] > second[0]:
        return "the arguments overlap"
    verb = candidate.clause.verb
    if verb is not None and any(start <= verb < end for start, end in (first, second)):
        return "the arguments overlap with the verb"
    starts, ends = ({place[k] for place in sentence.surface_tokens} for k in (0, 1))
    for start, end in (first, second):
        if start not in starts or end not in ends:
            return "an argument cuts a surface token"
        if any(is_punctuation(w) and w not in ("-", "'", "’") for w in sentence.words[start:end]):
            return "an argument has punctuation"
    if _comparable(sentence, *first) == _comparable(sentence, *second):
        return "the arguments are the same"
    return None


def _comparable(sentence: Sentence, start: int, end: int) -> str:
    """Return an argument without what depends on its position: capitals, and in English the case of a pronoun."""
    text = sentence.surface(start, end).casefold()
    return english.NOMINATIVE.get(text, text).casefold() if sentence.language == "en" else text


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


def is_all_capitals(sentence: Sentence) -> bool:
    """Return whether a sentence is in capitals throughout, such as ``THE DOG BIT HIM.``"""
    return sentence.text.isupper() and any(word.isupper() and len(word) > 1 for word in sentence.words)


def starts_sentence(sentence: Sentence, start: int) -> bool:
    """Return whether a word begins a sentence: only quotes or punctuation before it, or the end of another."""
    before = [word for word in sentence.words[:start] if word not in ('"', "“", "'", "‘", "(", "``")]
    return all(is_punctuation(word) for word in before) or before[-1] in (".", "!", "?")


def _check_english(sentence: Sentence, candidate: Candidate, symmetric: frozenset[str]) -> str | None:
    """Check the verb, the words around it, and the two noun phrases."""
    tags = english.tags_of(sentence)
    lower = [word.lower() for word in sentence.words]
    reason = _check_verb(sentence, candidate, lower, symmetric) or _check_verb_phrase(sentence, candidate, lower, tags)
    if reason:
        return reason
    for argument in candidate.arguments:
        words = lower[argument.start : argument.end]
        reason = _check_noun_phrase(words, tags[argument.start : argument.end] if tags is not None else None)
        if reason:
            return reason
        other = candidate.other(argument)
        if len(words) > 1 and not (english.POSSESSIVES | english.THIRD_PERSON).isdisjoint(words):
            pronoun = lower[other.start] if other.end - other.start == 1 else ""
            if pronoun not in english.PRONOUN_NUMBER.keys() - english.THIRD_PERSON:
                return "a pronoun in one argument may refer to the other"
    clause = candidate.clause
    if any(
        lower[i] in english.FLOATING and not any(slot.start <= i < slot.end for slot in candidate.arguments)
        for i in range(clause.extent[0], min(clause.extent[1], clause.verb or 0))
    ):
        return "a floating quantifier belongs to an argument"
    return None


def _check_verb(
    sentence: Sentence, candidate: Candidate, lower: Sequence[str], symmetric: frozenset[str]
) -> str | None:
    """Look for verbs whose arguments do not have two different roles, and for expletives."""
    position, lemma = candidate.clause.verb, candidate.lemma
    verb = lower[position] if position is not None else ""
    if (
        position is not None
        and not starts_sentence(sentence, position)
        and sentence.words[position][0].isupper()
        and not is_all_capitals(sentence)
    ):
        return "the sentence is a heading"  # "The Dog Bit Him": which words have a capital is a matter of style
    if verb in english.COPULAS or lemma in ("be", "become", "seem", "remain", "stay"):
        return "the verb is a copula"
    if verb in english.verb_forms(symmetric) or lemma in symmetric:
        return "the verb is symmetric"
    if verb in english.MEASURE_VERBS:
        return "the verb takes a measure"
    if verb in english.QUOTING_VERBS:
        return "the verb introduces quoted words"
    if any(_is_expletive(candidate, argument, lower) for argument in candidate.arguments):
        return "an argument is an expletive"
    return None


def _check_verb_phrase(
    sentence: Sentence, candidate: Candidate, lower: Sequence[str], tags: Sequence[str] | None
) -> str | None:
    """Check the words around the verb: likeness, *have on*, and possible errors of a parser."""
    position = candidate.clause.verb
    if position is None:
        return None
    verb, after = lower[position], lower[position + 1 : position + 2]
    phrases = [lower[argument.start : argument.end] for argument in candidate.arguments]
    if verb in english.SHAKE and any(phrase[-1] == "hands" for phrase in phrases):
        return "the verb is symmetric"
    if verb in english.MAKE and any(p[0] in ("a", "an") and set(p[1:2]) & english.JUDGEMENTS for p in phrases):
        return "the verb is a copula"
    if verb in english.SENSE_VERBS and after == ["like"]:
        return "the verb is symmetric"
    last = max(argument.end for argument in candidate.arguments)
    if verb in english.HAVE and lower[last : last + 1] == ["on"]:
        return "the verb is 'have on'"
    if tags is None:
        return None
    if _may_be_finite(candidate, position, lower, tags):
        return "whether the verb is finite is in doubt"
    return _check_parse(candidate, position, lower, tags) if sentence.automatic else None


def _may_be_finite(candidate: Candidate, verb: int, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a base form has no reason to be one: "whether you need it" may be tagged so and still agree."""
    subject = candidate.subject
    if subject is None or candidate.clause.finite is not None or tags[verb] != "VB":
        return False
    before = words[subject.start - 1] if subject.start else ""
    return "to" not in words[subject.end : verb] and before not in english.BARE_INFINITIVE_VERBS


def _is_expletive(candidate: Candidate, argument: Slot, words: Sequence[str]) -> bool:
    """Return whether a pronoun has no referent: "it rained cats", "it takes courage", "it pained him to go"."""
    phrase, verb = words[argument.start : argument.end], candidate.clause.verb
    if phrase == ["there"] and argument.function in (None, "subject"):
        return True
    if phrase != ["it"] or verb is None:
        return False
    last = max(slot.end for slot in candidate.arguments)
    is_first = argument.end <= verb and words[verb] in english.EXPLETIVE_VERBS
    return is_first or (last < len(words) and words[last] in english.CLAUSE_WORDS)


def _check_noun_phrase(words: Sequence[str], tags: Sequence[str] | None) -> str | None:
    """Check that an English argument is a plain noun phrase."""
    if set(words[:2]) & english.WH_WORDS or (tags and tags[0] in ("WDT", "WP", "WP$", "WRB")):
        return "an argument is interrogative or relative"
    if english.NEGATIVE_POLARITY & set(words):
        return "an argument is a negative polarity item"
    pronouns = english.ACCUSATIVE.keys() | english.NOMINATIVE.keys()
    coordinated = any(a in ("and", "or") and b in pronouns for a, b in itertools.pairwise(words))
    if coordinated or (len(words) > 1 and words[0] in pronouns - {"her"}):
        return "a pronoun inside a longer argument"
    if len(words) == 1 and words[0] in english.LOWER_CASE and words[0] not in english.PRONOUN_NUMBER:
        return "an argument is not headed by a noun"
    if tags is None:
        return None
    if tags[0] in ("IN", "TO", "EX", "RB", "VB", "VBD", "VBZ", "VBP"):
        return "an argument is not a noun phrase"
    head = head_of(words, tags)
    if head is None:
        return "an argument is not headed by a noun"
    if ("TO", "VB") in itertools.pairwise(tags):
        return "an argument contains an infinitive"  # "a role to play": its subject is the other argument
    if words[head] in english.MEASURES or words[head].removesuffix("s") in english.MEASURES:
        return "an argument is a measure"
    bare = tags[head] == "NN" and words[head] not in english.PRONOUN_NUMBER
    if bare and not any(t in ("DT", "PRP$", "POS", "CD", "PDT", "NNP", "NNPS") for t in tags[:head]):
        return "an argument is a bare singular noun"
    return None


# prepositions that belong to the noun before them: "a picture of a dog", "a book about dogs"
_NOMINAL_PREPOSITIONS = frozenset({"of", "about", "like"})


def _check_parse(candidate: Candidate, verb: int, words: Sequence[str], tags: Sequence[str]) -> str | None:
    """Look for frequent errors of parsers of English.

    Each rule was written for rows that were wrong in automatically parsed image captions.
    """
    particle = set(words[verb + 1 : verb + 2]) & english.PREPOSITIONAL_PARTICLES
    if particle and any(argument.start == verb + 2 for argument in candidate.arguments):
        return "a particle may be a preposition"
    for argument in candidate.arguments:
        phrase, phrase_tags = words[argument.start : argument.end], tags[argument.start : argument.end]
        is_object = argument.function in ("object", "indirect object")
        if _is_cut_short(argument, verb, words, tags) or _has_verb(is_object, words[verb], phrase, phrase_tags):
            return "the parser may have misplaced the end of an argument"
        if is_object and any(
            tag == "IN" and word not in _NOMINAL_PREPOSITIONS for word, tag in zip(phrase, phrase_tags, strict=True)
        ):
            return "an argument may contain a modifier of the verb"  # "carries a stick on the grass"
        if has_determiner_mismatch(phrase, phrase_tags):
            return "a determiner does not agree with its noun"
        participle = candidate.clause.finite is None and tags[verb] == "VBG"
        if argument.function == "subject" and participle and _has_several_nouns(phrase, phrase_tags):
            return "the participle may modify another noun"
    return None


def _is_cut_short(argument: Slot, verb: int, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a noun phrase may continue after its end, as parsers most often miss."""
    following = words[argument.end : argument.end + 1]
    if following in (["and"], ["or"]):
        return True
    if following == ["to"] and argument.end - argument.start == 1:  # "making something to eat"
        return words[argument.start] in english.PRONOUN_NUMBER
    if argument.end <= verb:  # "a man with a hat on is ...", "a woman next to him is ..."
        noun_between = any(tag.startswith(("NN", "PRP")) for tag in tags[argument.end : verb])
        return following == ["on"] or tags[argument.end] in ("IN", "RP") or noun_between
    after = tags[argument.end : argument.end + 2]  # "washing stairs leading down", "in a coat in competing"
    return after[:1] == ("VBG",) or (following == ["in"] and after[1:] == ("VBG",))


def _has_verb(is_object: bool, verb: str, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a noun phrase may contain a verb, as parsers most often miss."""
    if any(tag == "CC" and after.endswith("ing") for tag, after in zip(tags, words[1:], strict=False)):
        return True  # "having drinks and smoking cigarettes"
    if is_object and "VBG" in tags[1:]:
        return True
    # "holding a microphone singing": somebody sings; "helping a child dig"
    last_two = [tag[:2] for tag in tags[-2:]] == ["NN", "NN"]
    return last_two and (words[-1].endswith("ing") or verb in english.HELPING_VERBS)


def _has_several_nouns(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether the participle after a subject may modify only a part of it.

    "a view of a woman holding a drink", "a man with a beard and a boy with a bag riding a bike".
    """
    head = head_of(words, tags)
    chained = "of" in words and (head is None or words[head] not in english.GROUPS)
    return chained or ("CC" in tags and bool({"IN", "VBG"} & set(tags)))
