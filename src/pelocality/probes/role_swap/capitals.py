"""Capitals: which a word has because it begins a sentence, and which it keeps wherever it stands."""

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english

# adjectives of nations and names, which keep their capital: "American", "Chinese", "British", "Iraqi"
_NAME_ENDINGS = ("an", "ese", "ish", "i", "ch", "ic")
_UNKNOWN_CAPITAL = Skipped("whether the first word keeps its capital is unknown")


def is_all_capitals(sentence: Sentence) -> bool:
    """Return whether a sentence is in capitals throughout, such as ``THE DOG BIT HIM.``"""
    return sentence.text.isupper() and any(word.isupper() and len(word) > 1 for word in sentence.words)


def starts_sentence(sentence: Sentence, start: int) -> bool:
    """Return whether a word begins a sentence: only quotes or punctuation before it, or the end of another."""
    before = [word for word in sentence.words[:start] if word not in ('"', "“", "'", "‘", "(", "``")]
    return all(is_punctuation(word) for word in before) or before[-1] in (".", "!", "?")


def uncapitalised(sentence: Sentence, start: int, end: int) -> str | Skipped:
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
    adjective = sentence.language == "en" and _may_be_nation(word.lower(), tag)
    name = sentence.automatic and tag == "NN" and not following  # "Stone saw him"
    return _UNKNOWN_CAPITAL if tag is None or named or in_name or adjective or name else lowered


def _may_be_nation(word: str, tag: str | None) -> bool:
    """Return whether an English word in small letters is a nation or religion, or ends as many of them do."""
    stem = word.removesuffix("s")
    endings = ("an", "i") if tag == "NNS" else _NAME_ENDINGS  # "Bosnians", "Iraqis", but "Fish", "Critics"
    person = next((word.removesuffix(end) for end in ("women", "woman", "men", "man") if word.endswith(end)), word)
    listed = not english.NATIONS.isdisjoint({word, stem, person, word.removesuffix("ies") + "y"})
    return listed or (stem if tag == "NNS" else word).endswith(endings)


def capitalised(sentence: Sentence, text: str, start: int, place: int) -> str | Skipped:
    """Return the text of words from ``start`` on with a capital if they move to the beginning of a sentence.

    ``place`` is the word whose position they take. If it is in doubt whether they need a capital, the reason to skip.
    """
    if not starts_sentence(sentence, place) or _is_camel_case(sentence.words[start]):
        return text
    if _is_camel_case(sentence.words[place]):  # "iPhones" has no capital: would another word have one here?
        return _UNKNOWN_CAPITAL
    return text if sentence.words[place][0].islower() else _upper(text[0], sentence.language) + text[1:]


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
