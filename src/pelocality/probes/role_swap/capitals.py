"""Capitals: which one a word owes to standing first in its sentence, and which is its own."""

from __future__ import annotations

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english

# adjectives of nations and names, which keep their capital: "American", "Chinese", "British", "Iraqi"
_NAME_ENDINGS = ("an", "ese", "ish", "i", "ch", "ic")


def capital(letter: str, language: str) -> str:
    """Write a letter large, as its language does.

    Args:
        letter: The letter.
        language: ISO code.

    Returns:
        The capital: Turkish has one for each of its two letters i.
    """
    return "İ" if letter == "i" and language in ("tr", "az") else letter.upper()


def _small(letter: str, language: str) -> str:
    return {"I": "ı", "İ": "i"}.get(letter, letter.lower()) if language in ("tr", "az") else letter.lower()


def is_all_capitals(sentence: Sentence) -> bool:
    """Say whether a sentence is written in capitals throughout.

    Args:
        sentence: The sentence.

    Returns:
        True for ``THE DOG BIT HIM.``; no word of it owes its capital to its place.
    """
    return sentence.text.isupper() and any(word.isupper() and len(word) > 1 for word in sentence.words)


def is_camel_case(word: str) -> bool:
    """Say whether a word starts small and has a capital within.

    Args:
        word: A word.

    Returns:
        True for ``iPhone`` and ``eBay``, which are written so wherever they stand.
    """
    return word[0].islower() and any(letter.isupper() for letter in word[1:])


def starts_sentence(sentence: Sentence, start: int) -> bool:
    """Say whether a word stands where a sentence starts, and so may owe its capital to that.

    Args:
        sentence: The sentence, which may hold several.
        start: The word.

    Returns:
        True where only punctuation comes before it, or the mark that ends a sentence.
    """
    before = [word for word in sentence.words[:start] if word not in ('"', "“", "'", "‘", "(", "``")]
    return not any(not is_punctuation(word) for word in before) or before[-1] in (".", "!", "?")


def uncapitalised(sentence: Sentence, start: int, end: int) -> str | Skipped:
    """Write some words as they would stand within a sentence.

    Args:
        sentence: The sentence.
        start: The first word.
        end: The word after the last.

    Returns:
        The text, without a capital that it owes to standing first; skipped where that is in doubt.
    """
    text = sentence.written(start, end)
    word = sentence.words[start]
    if not starts_sentence(sentence, start) or not word[0].isupper() or word == "I" or is_all_capitals(sentence):
        return text
    if sentence.language == "en" and len(word) > 1 and word.isupper() and word.lower() in english.LOWER_CASE:
        return Skipped("whose capital the first word bears is unknown")  # "THE dog": louder, or half a heading
    lowered = _small(text[0], sentence.language) + text[1:]
    if sentence.language == "en" and word.lower() in english.LOWER_CASE:
        return lowered
    if any(letter.isupper() for letter in word[1:]):
        return text
    layer = sentence.dependencies
    if sentence.language == "en":
        tags = english.tags_of(sentence)
        tag = tags[start] if tags is not None else None
    else:
        universal = layer.upos[start] if layer and layer.upos else None
        german_noun = sentence.language == "de" and universal == "NOUN"
        tag = None if universal is None else "NNP" if universal == "PROPN" or german_noun else "other"
    following = sentence.words[start + 1 : end][:1]
    in_name = bool(following) and following[0][0].isupper()
    named = tag in ("NNP", "NNPS")
    if named and (in_name or not sentence.automatic):  # taggers take a capital for a name: "Kids play"
        return text
    adjective = sentence.language == "en" and tag != "NNS" and word.endswith(_NAME_ENDINGS)
    if tag is None or named or in_name or adjective:
        return Skipped("whose capital the first word bears is unknown")
    return lowered
