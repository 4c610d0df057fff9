"""Reasons not to exchange two arguments in English: the verb, the noun phrases, and what refers to them.

Each function returns the reason, or None if nothing speaks against the exchange.
"""

import itertools
from collections.abc import Sequence

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate
from pelocality.probes.role_swap.capitals import is_all_capitals, starts_sentence
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.mood import is_negative, mood_of
from pelocality.probes.role_swap.noun_phrases import head_of
from pelocality.probes.role_swap.remainder import CLAUSE_TAGS, check_remainder, is_certain

_CLAUSE_ENDS = frozenset({",", ".", ":", "CC", "IN", "TO", "WDT", "WP", "WRB"})


def english_exclusion(sentence: Sentence, candidate: Candidate, symmetric: frozenset[str]) -> str | None:
    """Check the verb, the words around it, the two noun phrases, and what the rest of the sentence says of them."""
    tags = english.tags_of(sentence)
    lower = [word.lower().replace("’", "'") for word in sentence.words]
    reason = _check_verb(sentence, candidate, lower, symmetric) or _check_verb_phrase(candidate, lower, tags)
    for argument in candidate.arguments:
        reason = reason or _check_argument(candidate, argument, lower, tags)
    if reason:
        return reason
    functions = {argument.function for argument in candidate.arguments}
    if candidate.clause.voice == "passive" and functions == {"subject", "object"}:
        return "both orders of a passive with an object mean the same"  # "prizes were awarded the winners"
    reason = check_remainder(candidate, lower, tags) if tags is not None else None
    if reason is None and tags is not None and _has_ellipsis(candidate, lower, tags):
        return "an auxiliary stands for the verb phrase"
    return reason or _check_reference(sentence, candidate, lower, tags)


def _check_verb(
    sentence: Sentence, candidate: Candidate, lower: Sequence[str], symmetric: frozenset[str]
) -> str | None:
    """Look for verbs whose arguments do not have two different roles, and for expletives."""
    position = candidate.clause.verb
    verb = lower[position] if position is not None else ""
    if (
        position is not None
        and not starts_sentence(sentence, position)
        and sentence.words[position][0].isupper()
        and not is_all_capitals(sentence)
    ):
        return "the sentence is a heading"  # "The Dog Bit Him": which words have a capital is a matter of style
    if not all(_is_name(sentence, slot) for slot in candidate.arguments):
        symmetric -= english.SYMMETRIC_BETWEEN_NAMES
    for verbs, reason in (
        (english.COPULAS, "the verb is a copula"),
        (english.verb_forms(symmetric) | {"seeing"}, "the verb is symmetric"),
        (english.MEASURE_VERBS | english.MOTION_VERBS, "the verb takes a measure"),
        (english.DO, "a light verb with a noun"),
        (english.QUOTING_VERBS, "the verb introduces quoted words"),
    ):
        if verb in verbs or candidate.lemma in verbs:
            return reason
    for argument in candidate.arguments:
        phrase = lower[argument.start : argument.end]
        if phrase == ["it"] or (phrase == ["there"] and argument.function in (None, "subject")):
            return "it or there may have no referent"  # "it rained cats", "I do not expect it", "you made it"
    return None


def _is_name(sentence: Sentence, argument: Slot) -> bool:
    """Return whether the head of an argument is a name: by its tag, without tags by the capital of its last word."""
    words, tags = sentence.words[argument.start : argument.end], english.tags_of(sentence)
    if tags is None:
        return words[-1][0].isupper() and words[-1].lower() not in english.LOWER_CASE | english.PRONOUN_NUMBER.keys()
    head = head_of(words, tags[argument.start : argument.end])
    return head is not None and tags[argument.start + head].startswith("NNP")


def _check_verb_phrase(candidate: Candidate, lower: Sequence[str], tags: Sequence[str] | None) -> str | None:
    """Check the words around the verb, whose subject it has, and whether a base form is finite."""
    position = candidate.clause.verb
    if position is None:
        return None
    last = max(argument.end for argument in candidate.arguments)
    has_pronoun = any({*lower[slot.start : slot.end]} <= english.PERSONAL for slot in candidate.arguments)
    for slot in candidate.arguments:
        if tags is None:
            break
        # "few hats had Ada", "no harm means Ada": a pronoun cannot be a subject there
        fronted = lower[position] in english.HAVE or lower[slot.start] in english.NEGATIVE_QUANTIFIERS
        if slot.function == "object" and fronted and not has_pronoun:
            return "the subject may stand after the verb"
        if slot.function == "subject" and {"IN", "NN", "NNS"} & {*tags[slot.end : position]}:
            return "words between the verb and an argument"  # "the nun in May saw a hat"
        if slot.function == "object" and set(tags[position + 1 : slot.start]) - {"RP", "IN"}:
            return "words between the verb and an argument"  # "announced on Wednesday a new tool"
        between = zip(lower[position + 1 : slot.start], tags[position + 1 : slot.start], strict=True)
        if slot.function == "oblique" and [word for word, tag in between if tag != "RP"] != ["by"]:
            return "words between the verb and an argument"  # "sunk in a raid by the navy"
    if candidate.clause.shared or (tags is not None and _verb_is_joined(tags[last:])):
        return "another verb has the same subject"
    subject = candidate.subject
    if candidate.clause.finite is None and subject is not None and lower[subject.start - 1 : subject.start] == ["and"]:
        return "the arguments are parts of a longer phrase"  # "limits for nuns and judges returning to town"
    if tags is not None and _may_be_finite(candidate, position, lower, tags):
        return "whether the verb is finite is in doubt"
    return None


def _verb_is_joined(rest: Sequence[str]) -> bool:
    """Return whether a verb follows the first conjunction among tags."""
    joined = (tag for tag in itertools.dropwhile(lambda tag: tag != "CC", rest) if tag not in ("CC", "RB", ","))
    return next(joined, "") in ("VB", "VBP", "VBZ", "VBD", "MD")


def _may_be_finite(candidate: Candidate, verb: int, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a base form has no reason to be one: "whether you need it" may be tagged so and still agree."""
    subject = candidate.subject
    if subject is None or candidate.clause.finite is not None or tags[verb] != "VB":
        return False
    before = words[subject.start - 1] if subject.start else ""
    return "to" not in words[subject.end : verb] and before not in english.BARE_INFINITIVE_VERBS


def _check_argument(
    candidate: Candidate, argument: Slot, lower: Sequence[str], tags: Sequence[str] | None
) -> str | None:
    """Check the words beside an argument, its own words, and whether it is a subject or an object."""
    phrase_tags = tags[argument.start : argument.end] if tags is not None else None
    following = min(argument.end, len(lower) - 1)
    if lower[following] == "of" or (tags is not None and tags[following] in ("WDT", "WP", "WP$")):
        return "an argument goes on after its end"
    if lower[argument.start - 1 : argument.start] and lower[argument.start - 1] in english.FOCUS:
        return "an adverb before an argument may belong to it"  # "almost every nun", "not the hat"
    following += lower[following] == ","
    if lower[following : following + 1] and lower[following] in english.FOCUS_AFTER:
        return "an adverb after an argument may belong to it"  # "the nun alone", "no hat whatsoever"
    phrase, verb = lower[argument.start : argument.end], candidate.clause.verb
    is_light = verb is not None and lower[verb] in english.LIGHT_VERBS
    reason = _check_noun_phrase(phrase, phrase_tags, is_light)
    if reason:
        return reason
    is_adverbial = phrase_tags is not None and (phrase_tags[0] == "CD" or not is_certain(phrase, phrase_tags))
    if argument.function == "oblique" and (candidate.clause.voice == "active" or is_adverbial):
        return "an argument is not subject or object"  # "works as a coach", "eliminated by force", "cut by 3 tons"
    return None


def _check_noun_phrase(words: Sequence[str], tags: Sequence[str] | None, is_light: bool) -> str | None:
    """Check that an English argument is a plain noun phrase."""
    if set(words[:2]) & english.WH_WORDS or (tags and tags[0] in ("WDT", "WP", "WP$", "WRB")):
        return "an argument is interrogative or relative"
    if not english.ARCHAIC_PRONOUNS.isdisjoint(words):
        return "which case a pronoun must take is unknown"
    coordinated = any(a in ("and", "or") and b in english.PERSONAL for a, b in itertools.pairwise(words))
    if coordinated or (len(words) > 1 and words[0] in english.PERSONAL - {"her"}):
        return "a pronoun inside a longer argument"
    if words[-1] in english.PLACES | {"there", "here"} and len(words) > 1:
        return "an argument is not a plain noun phrase"  # "football indoors"
    if words[-1] in english.FLOATING and len(words) > 1:
        return "a floating quantifier belongs to an argument"  # "the nuns all saw Ada"
    if words[-1] in english.FOCUS_AFTER - {"else"} and len(words) > 1:
        return "an adverb after an argument may belong to it"  # "the nun alone saw Ada"
    if any(word.endswith("-") and len(word) > 1 for word in words) or any(a == b for a, b in itertools.pairwise(words)):
        return "an argument has a false start"  # "th- the hat", "the the hat"
    if len(words) == 1 and words[0] in english.LOWER_CASE and words[0] not in english.PRONOUN_NUMBER:
        return "an argument is not headed by a noun"
    if tags is None:  # the agent of a passive in a frame: "by the nun"
        begins_otherwise = words[0] in english.PREPOSITIONS | english.VERB_LINKS | {"whether"}
        return "an argument is not a noun phrase" if begins_otherwise else None
    if tags[-1] in ("IN", "TO", "VBG"):
        return "an argument has the gap of a relative clause"  # "hats that she knew the owners of"
    if "UH" in tags:
        return "an argument has a false start"  # "the, uh, hat"
    if tags[0] in ("CC", "IN", "TO", "EX", "RB", "VB", "VBD", "VBG", "VBZ", "VBP"):
        return "an argument is not a noun phrase"
    head = head_of(words, tags)
    if head is None or (head and words[head] in english.ACCUSATIVE and tags[head] != "NNP"):  # "a good one I trust"
        return "an argument is not headed by a noun"
    for k in range(len(words)):
        # "a meal, which he liked": a comma must follow
        apart = words[k] == "," and (k > head or tags[k + 1] in ("DT", "PRP$"))
        if apart and not _is_list(words[k + 1 :], tags[k + 1 :]):
            return "punctuation belongs to an argument in part"
        if k and (tags[k] in ("DT", "PRP$", "PDT") or words[k] in ("last", "next")) and _follows_noun(tags[:k]):
            return "an argument is not a plain noun phrase"  # "meat just the juice in the can"
    if any(tags[k].startswith("NN") and tags[k + 1 : k + 3] == ("TO", "VB") for k in range(len(tags))):
        return "an argument contains an infinitive"  # "a role to play": its subject is the other argument
    unit = english.is_measure(words[head])
    if (
        words[head][0].isdigit() or "$" in tags or (unit and not (head and tags[head - 1].startswith("NN")))
    ):  # but "road blocks"
        return "an argument is a measure"
    if is_light and head == 0 and tags[head] in ("NN", "NNS") and words[head] not in english.PRONOUN_NUMBER:
        return "a light verb with a noun"  # "took place", "makes sense", "shook hands"
    return None


def _is_list(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether the words after a comma are further parts of a list: coordinated, and without a clause."""
    joined = {word for word, tag in zip(words, tags, strict=True) if tag == "CC"}
    return bool(joined) and joined <= {"and", "&"} and CLAUSE_TAGS.isdisjoint(tags)


def _follows_noun(tags: Sequence[str]) -> bool:
    """Return whether a noun, with or without an adverb after it, ends a phrase."""
    before = [tag for tag in tags[-2:] if tag != "RB"]
    return bool(before) and before[-1].startswith("NN")


def _has_ellipsis(candidate: Candidate, lower: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a later clause has an auxiliary without a verb: "I chose Ada, we did", "is she?", "so did I"."""
    last = max(argument.end for argument in candidate.arguments)
    for k in range(last, len(lower)):
        if lower[k] not in english.DO | english.AUXILIARIES or tags[k] == "VB":
            continue
        after = next((i for i in range(k + 1, len(lower)) if lower[i] not in english.AFTER_AUXILIARY), None)
        if after is None or is_punctuation(lower[after]):
            return True
        if lower[k] in english.AUXILIARIES and tags[after] == "PRP" and lower[after + 1 :] == ["?"]:
            return True
        rest = itertools.takewhile(lambda tag: tag not in _CLAUSE_ENDS, tags[k + 1 :])
        if lower[k - 1] in english.INVERTING and not any(tag.startswith("VB") for tag in rest):
            return True
    return False


def _check_reference(
    sentence: Sentence, candidate: Candidate, lower: Sequence[str], tags: Sequence[str] | None
) -> str | None:
    """Look for words whose meaning depends on an argument: pronouns, quantifiers, *another*."""
    phrases = [lower[slot.start : slot.end] for slot in candidate.arguments]
    inside = {i for slot in candidate.arguments for i in range(slot.start, slot.end)}
    third = english.POSSESSIVES | english.THIRD_PERSON
    for phrase, other in (phrases, phrases[::-1]):
        if len(phrase) > 1 and not third.isdisjoint(phrase) and not _is_first_or_second_person(other):
            return "a pronoun in one argument may refer to the other"
        if phrase[0] in english.INDEFINITE and not english.OTHERS.isdisjoint(other):
            return "a reflexive or reciprocal in the clause"
    outside = {lower[i] for i in range(*candidate.clause.extent) if i not in inside}
    referring = outside & (third | english.REFLEXIVES) and not all(map(_is_first_or_second_person, phrases))
    if referring or (tags is not None and _is_named_again(candidate, phrases, lower, tags)):
        return "a pronoun besides the arguments may refer to one"
    inner = {*phrases[0], *phrases[1]}
    licensed = is_negative(sentence) or mood_of(sentence) != "declarative"
    refused = inner & english.ANY and not outside & english.MODALS  # "refused any hat"; but "may see any hat"
    if refused or (inner & english.NEGATIVE_POLARITY and licensed):
        return "an argument is a negative polarity item"
    negative = any(not english.NEGATIVE_QUANTIFIERS.isdisjoint(phrase) for phrase in phrases)
    if negative and not english.NEGATIVE_POLARITY.isdisjoint(outside):
        return "a negative polarity item depends on an argument"  # "no nun ever saw a hat"
    clause = candidate.clause
    before_verb = range(clause.extent[0], min(clause.extent[1], clause.verb or 0))
    if english.PLURAL_ADVERBS & outside or any(lower[i] in english.FLOATING and i not in inside for i in before_verb):
        return "a floating quantifier belongs to an argument"
    return None


def _is_named_again(
    candidate: Candidate, phrases: Sequence[Sequence[str]], lower: Sequence[str], tags: Sequence[str]
) -> bool:
    """Return whether a pronoun that is an argument would stand where a reflexive must, or refer to a new controller.

    "I asked him to help me" would become "he asked me to help me", "let him fool you" without a subject "let you fool".
    """
    before, after = min(s.start for s in candidate.arguments), max(s.end for s in candidate.arguments)
    rest = range(after, candidate.clause.extent[1])
    tail = itertools.takewhile(
        lambda i: tags[i] not in ("CC", ",", ".", ":") and lower[i] not in english.TIME_LINKS, rest
    )
    others = {lower[i] for i in tail}
    if candidate.clause.finite is None:
        others.update(lower[:before])
        verb = next((i for i in range(before) if tags[i].startswith("VB")), None)
        if verb is not None and not any(tag.startswith(("NN", "PRP")) for tag in tags[:verb]):
            others.add("you")  # the subject of an imperative
    pronouns = {phrase[0] for phrase in phrases if len(phrase) == 1}
    third = candidate.clause.finite is None and not pronouns.isdisjoint(english.THIRD_PERSON)
    return (third and not others.isdisjoint(english.THIRD_PERSON)) or any(
        pronouns & person and others & person for person in english.PERSONS
    )


def _is_first_or_second_person(words: Sequence[str]) -> bool:
    return len(words) == 1 and words[0] in english.PERSONAL - english.THIRD_PERSON
