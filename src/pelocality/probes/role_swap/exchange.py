"""The exchange of two arguments, with the pronoun case, capitals and verb form that follow from it."""

from pelocality.corpora import Sentence
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.agreement import Agreement, Replacement, reinflected_verb
from pelocality.probes.role_swap.candidates import Candidate
from pelocality.probes.role_swap.capitals import capitalised, is_all_capitals, uncapitalised
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.exclusions import exclusion


def exchange(
    sentence: Sentence, candidate: Candidate, agreement: Agreement, symmetric: frozenset[str]
) -> list[Replacement] | Skipped:
    """Return the replacements that exchange two arguments, in order, or the reason to skip the candidate."""
    reason = exclusion(sentence, candidate, symmetric)
    if reason:
        return Skipped(reason)
    replacements: list[Replacement] = []
    for here, role in zip(candidate.arguments, candidate.roles, strict=True):
        text = _moved(sentence, candidate, candidate.other(here), here)
        if isinstance(text, Skipped):
            return text
        replacements.append((here.start, here.end, text, role))
    if agreement != "ignore":
        verb = reinflected_verb(sentence, candidate, agreement)
        if isinstance(verb, Skipped):
            return verb
        replacements += verb
    replacements.sort()
    if sentence.replaced([(start, end, text) for start, end, text, _ in replacements]) == sentence.text:
        return Skipped("the text would not change")
    return replacements


def _moved(sentence: Sentence, candidate: Candidate, argument: Slot, here: Slot) -> str | Skipped:
    """Return the text of an argument in the position of the other, with the right pronoun case and capital."""
    text = uncapitalised(sentence, argument.start, argument.end)
    if isinstance(text, Skipped):
        return text
    pronoun = text.lower() if argument.end - argument.start == 1 else ""
    if sentence.language == "en" and pronoun in english.PRONOUN_NUMBER:
        if pronoun in english.ACCUSATIVE or pronoun in english.NOMINATIVE:
            nominative = _is_nominative(sentence, candidate, here)
            if nominative is None:
                return Skipped("which case a pronoun must take is unknown")
            form = (english.NOMINATIVE if nominative else english.ACCUSATIVE).get(pronoun, text)
            text = form.upper() if (len(text) > 1 and text.isupper()) or is_all_capitals(sentence) else form
        verb = candidate.clause.verb
        is_object = here.function in ("object", "indirect object")
        if len(pronoun) < 5 and is_object and verb is not None and here.start != verb + 1:
            return Skipped("a pronoun would be separated from its verb")
    return capitalised(sentence, text, argument.start, here.start)


def _is_nominative(sentence: Sentence, candidate: Candidate, here: Slot) -> bool | None:
    """Return whether a pronoun in a position is nominative, None if unknown."""
    if here.function is not None:
        return here.function == "subject" and candidate.clause.finite is not None
    word = sentence.words[here.start].lower()
    if here.end - here.start == 1 and (word in english.ACCUSATIVE or word in english.NOMINATIVE):
        return word in english.ACCUSATIVE
    return None if candidate.clause.verb is None else here.end <= candidate.clause.verb
