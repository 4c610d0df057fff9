"""The exchange of two arguments, with the pronoun case, capitals and verb form that follow from it."""

from pelocality.corpora import Sentence
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.agreement import Agreement, Replacement, reinflected_verb
from pelocality.probes.role_swap.candidates import Candidate
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.exclusions import exclusion, is_all_capitals, starts_sentence

# adjectives of nations and names, which keep their capital: "American", "Chinese", "British", "Iraqi"
_NAME_ENDINGS = ("an", "ese", "ish", "i", "ch", "ic")
_UNKNOWN_CAPITAL = Skipped("whether the first word keeps its capital is unknown")


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
    text = _uncapitalised(sentence, argument.start, argument.end)
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
    replaced = sentence.words[here.start]
    if starts_sentence(sentence, here.start) and not _is_camel_case(sentence.words[argument.start]):
        if _is_camel_case(replaced):  # "iPhones" has no capital: would another word have one here?
            return _UNKNOWN_CAPITAL
        if not replaced[0].islower():
            text = _upper(text[0], sentence.language) + text[1:]
    return text


def _is_nominative(sentence: Sentence, candidate: Candidate, here: Slot) -> bool | None:
    """Return whether a pronoun in a position is nominative, None if unknown."""
    if here.function is not None:
        return here.function == "subject" and candidate.clause.finite is not None
    word = sentence.words[here.start].lower()
    if here.end - here.start == 1 and (word in english.ACCUSATIVE or word in english.NOMINATIVE):
        return word in english.ACCUSATIVE
    return None if candidate.clause.verb is None else here.end <= candidate.clause.verb


def _uncapitalised(sentence: Sentence, start: int, end: int) -> str | Skipped:
    """Return words without the capital of a sentence's first word, or the reason to skip if that is in doubt."""
    text, word = sentence.surface(start, end), sentence.words[start]
    if sentence.language == "en" and not starts_sentence(sentence, start) and word[0].isupper():
        marked = start > 0 and sentence.words[start - 1] in ('"', "“", "``", ":")
        is_common = word.lower() in english.LOWER_CASE or _tag(sentence, start) in ("NN", "NNS")
        if not is_all_capitals(sentence) and (marked or (is_common and word.istitle())):
            return _UNKNOWN_CAPITAL  # a sentence that begins inside another
    if not starts_sentence(sentence, start) or not word[0].isupper() or word == "I" or is_all_capitals(sentence):
        return text
    lowered = _lower(text[0], sentence.language) + text[1:]
    if sentence.language == "en" and word.lower() in english.LOWER_CASE:
        # "THE dog": emphasis, or part of a heading
        return _UNKNOWN_CAPITAL if len(word) > 1 and word.isupper() else lowered
    tag = _tag(sentence, start)
    if "-" in text.split()[0] and (tag != "NNP" or sentence.automatic):  # "Al-Ahram", but "Twenty-one", "Pro-Western"
        return _UNKNOWN_CAPITAL
    if any(letter.isupper() for letter in word[1:]):
        return text
    following = sentence.words[start + 1 : end][:1]
    in_name = bool(following) and following[0][0].isupper()
    named = tag in ("NNP", "NNPS")
    if named and (in_name or not sentence.automatic):  # taggers mistake a capital for a name: "Kids play"
        return text
    adjective = sentence.language == "en" and tag != "NNS" and word.endswith(_NAME_ENDINGS)
    name = sentence.automatic and tag == "NN" and not following  # "Stone saw him"
    return _UNKNOWN_CAPITAL if tag is None or named or in_name or adjective or name else lowered


def _tag(sentence: Sentence, word: int) -> str | None:
    """Return the tag of a word: in other languages than English, "NNP" where it keeps its capital, or "other"."""
    if sentence.language == "en":
        tags = english.tags_of(sentence)
        return tags[word] if tags is not None else None
    layer = sentence.dependencies
    if layer is None or layer.upos is None:
        return None
    german_noun = sentence.language == "de" and layer.upos[word] == "NOUN"
    return "NNP" if layer.upos[word] == "PROPN" or german_noun else "other"


def _upper(letter: str, language: str) -> str:
    # Turkish has a capital for each of its two letters i
    return "İ" if letter == "i" and language in ("tr", "az") else letter.upper()


def _lower(letter: str, language: str) -> str:
    return {"I": "ı", "İ": "i"}.get(letter, letter.lower()) if language in ("tr", "az") else letter.lower()


def _is_camel_case(word: str) -> bool:
    """Return whether a word starts in lower case and has a capital inside, such as ``iPhone``."""
    return word[0].islower() and any(letter.isupper() for letter in word[1:])
