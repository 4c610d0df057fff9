"""Spacing: words to text and back, by the same rules for an original and for its perturbation.

A *surface token* is the text between two spaces without the punctuation at its edges: ``don't`` is one surface token,
although a treebank splits it into two words. Perturbations move whole surface tokens, so that they never change how a
tokenizer splits a word; punctuation keeps its place, and spaces belong to positions, not to words.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Sequence

_DOUBLE = ('"', "“", "”", "„", "``", "''", "«", "»")
_SINGLE = ("'", "’", "‘", "`")
_QUOTES = dict.fromkeys(("``", "''", '"'), _DOUBLE) | dict.fromkeys(("`", "'"), _SINGLE)
# True for forms of quotes that open, False for forms that close
_SIDES = dict.fromkeys(("``", "`", "“", "„", "‘", "«"), True) | dict.fromkeys(("''", "”", "»"), False)
_DASH_OR_ELLIPSIS = re.compile(r"---?|[–—]|\.{2,}|…")
# No space follows an opening token, and no space precedes a closing one, in English treebanks.
_OPENING = re.compile(r"[(\[{<]|[A-Z]*[$#£€]")
_CLOSING = re.compile(r"[,.;:!?%)\]}>]|[!?]{2,}|\.{2,}|…|n['’]t|['’](?:s|m|d|ll|re|ve|em|n)?", re.IGNORECASE)
_HALVES = {"can not", "gon na", "wan na", "got ta", "gim me", "lem me", "d' ye", "more 'n", "'t is", "'t was"}
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
_ESCAPES |= {"\\/": "/", "\\*": "*"}
_QUOTES_IN_TREES = {"``": '"', "''": '"', "`": "'"}
# Names of characters in scripts without spaces between words: a missing space does not join two words there.
_UNSPACED = re.compile(
    "CJK|HIRAGANA|(HALFWIDTH )?KATAKANA|THAI|LAO|KHMER|MYANMAR|JAVANESE|BOPOMOFO|TIBETAN|IDEOGRAPHIC|FULLWIDTH"
)


def unescape(token: str) -> str:
    r"""Return the text of a Penn Treebank token.

    Args:
        token: A leaf of a bracketed tree, such as ``-LRB-`` or ``1\/2``.

    Returns:
        The token without escapes; quotes become plain ones.

    Examples:
        >>> unescape("-LRB-"), unescape(":-RRB-"), unescape("``"), unescape("dog")
        ('(', ':)', '"', 'dog')
    """
    if token in _QUOTES_IN_TREES:
        return _QUOTES_IN_TREES[token]
    if "B-" in token or "\\" in token:  # an escape may also occur inside a token (":-RRB-" is ":)")
        for escape, plain in _ESCAPES.items():
            token = token.replace(escape, plain)
    return token


def align(tokens: Sequence[str], text: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Find each token in the text that it comes from.

    Args:
        tokens: The tokens in order, with Penn Treebank escapes or without.
        text: The original text.

    Returns:
        The tokens as they are in the text and the white space after each, or None if they do not match.

    Examples:
        >>> align(["Do", "n't", "-LRB-", "go", "-RRB-", "."], "Don't (go).")
        (('Do', "n't", '(', 'go', ')', '.'), ('', ' ', '', '', '', ''))
    """
    text = text.strip()
    surfaces, spaces, position = [], [], 0
    for token in tokens:
        surface = token
        if not text.startswith(token, position):
            others = (unescape(token), *_QUOTES.get(token, ()))
            surface = next((each for each in others if text.startswith(each, position)), "")
        if not surface:
            return None
        position += len(surface)
        after = position
        while after < len(text) and text[after].isspace():
            after += 1
        surfaces.append(surface)
        spaces.append(text[position:after])
        position = after
    return (tuple(surfaces), tuple(spaces)) if position == len(text) else None


def spaces_by_rule(tokens: Sequence[str], tags: Sequence[str] | None = None) -> tuple[str, ...]:
    """Guess the white space after each token from English Penn Treebank conventions.

    No space stands before a closing mark (``.``, ``,``, ``)``, ``%``), a clitic (*n't*, *'s*, also with ``’``), an
    ellipsis or the second half of a word (*can not*, *gon na*), after an opening bracket or a currency sign, or beside
    a slash. No space stands between a quote and the text it encloses. A space stands on each side of a dash, and
    between the period of an abbreviation and that of the sentence.

    Args:
        tokens: The tokens in order.
        tags: Their Penn Treebank tags. A token tagged ``HYPH`` has no spaces around it, and the tag of a quote tells
            whether it opens; without tags, quotes open and close in turn.

    Returns:
        The white space after each token; the last is empty.

    Raises:
        ValueError: ``tags`` is not one per token.

    Examples:
        >>> spaces_by_rule(["He", "ca", "n't", "go", "."])
        (' ', '', ' ', '', '')
        >>> spaces_by_rule(["He", "said", ",", '"', "Go", ".", '"'])
        (' ', '', ' ', '', '', '', '')
    """
    opens = _quote_sides(tokens, tags)
    spaces = []
    for i, (left, right) in enumerate(itertools.pairwise(tokens)):
        if right == "." and re.search(r"\w\.$", left):
            spaces.append(" ")  # treebanks repeat the period of an abbreviation at the end of a sentence
            continue
        reasons = (
            opens[i] if i in opens else bool(_OPENING.fullmatch(left)),
            not opens[i + 1] if i + 1 in opens else bool(_CLOSING.fullmatch(right)),
            "/" in (left, right),
            f"{left} {right}".lower() in _HALVES,
            "HYPH" in (tags or ())[i : i + 2],
            _unspaced(_last_letter(left)) and _unspaced(right[0]),
        )
        spaces.append("" if any(reasons) else " ")
    return (*spaces, "") if tokens else ()


def _quote_sides(tokens: Sequence[str], tags: Sequence[str] | None) -> dict[int, bool]:
    """Return whether each token that is a quote opens: by its form, else by its tag, else in turn."""
    opens: dict[int, bool] = {}
    unclosed = {'"': False, "'": False}
    for i, token in enumerate(tokens):
        if token not in _SIDES and token not in ('"', "'", "’"):
            continue
        quote, tag = "'" if token in _SINGLE else '"', tags[i] if tags else ""
        opening = _SIDES.get(token, {"``": True, "''": False}.get(tag))
        if opening is None:
            if quote == "'" and (tag == "POS" or (not unclosed[quote] and i and tokens[i - 1][-1] in "sSzZxX")):
                continue  # an apostrophe: the dogs' bowl
            opening = not unclosed[quote]
        opens[i] = unclosed[quote] = opening
    return opens


def possessives(tokens: Sequence[str], tags: Sequence[str] | None) -> list[int]:
    """Return the places of apostrophes that are no quotes: the dogs' bowl."""
    places = [i for i, token in enumerate(tokens) if token in ("'", "’")]
    quotes = _quote_sides(tokens, tags) if places else {}
    return [i for i in places if i not in quotes]


@functools.lru_cache(maxsize=65536)
def is_punctuation(word: str) -> bool:
    """Return whether a token is punctuation.

    Args:
        word: A token.

    Returns:
        True for punctuation marks, brackets and invisible characters, such as the space of width zero between words
        of Khmer; signs that are read aloud (``%``, ``&``, ``€``), also of other scripts, count as words.

    Examples:
        >>> is_punctuation("..."), is_punctuation("don't"), is_punctuation("%"), is_punctuation("％")
        (True, False, False, False)
    """
    return all(map(_is_punctuation_mark, word))


def _is_punctuation_mark(character: str) -> bool:
    if character in "`´^~|=<>+":
        return True
    category = unicodedata.category(character)
    read_aloud = unicodedata.normalize("NFKC", character) in "%&@#٪‰‱§"
    return category == "Cf" or (category[0] in "PM" and not read_aloud)


def is_mark(character: str) -> bool:
    """Return whether a character belongs to the letter before it: Unicode categories M*, and zero-width joiners.

    Examples:
        >>> [is_mark(c) for c in "नि"], is_mark("n")
        ([False, True], False)
    """
    return not character.isascii() and (unicodedata.category(character)[0] == "M" or character in "\u200c\u200d")


@functools.lru_cache(maxsize=65536)
def _unspaced(character: str) -> bool:
    return _UNSPACED.match(unicodedata.name(character, "")) is not None


def _last_letter(word: str) -> str:
    """Return the last character that is not a mark: the name of a mark does not always contain its script."""
    return word[-1] if word.isascii() else next((c for c in reversed(word) if not is_mark(c)), word[-1])


def is_glued(left: str, space: str, right: str) -> bool:
    """Return whether two neighbouring words belong to one surface token.

    They do if there is no white space between them, neither is a dash or an ellipsis, and their script has spaces
    between words, or they are a number and its percent sign.

    Examples:
        >>> is_glued("do", "", "n't"), is_glued("do", " ", "not"), is_glued("他", "", "来"), is_glued("２０", "", "％")
        (True, False, False, True)
    """
    if space or _DASH_OR_ELLIPSIS.fullmatch(left) or _DASH_OR_ELLIPSIS.fullmatch(right):
        return False
    if left[-1].isdigit() and unicodedata.normalize("NFKC", right) in ("%", "‰"):
        return True
    return not _unspaced(_last_letter(left)) and not _unspaced(right[0])


def join(pieces: Sequence[str], gaps: Sequence[str]) -> str:
    """Join pieces of text, each followed by its gap.

    Args:
        pieces: The pieces, each one or more surface tokens.
        gaps: The white space after each piece.

    Returns:
        The text. A space is added where two words of a script with spaces would become one (a Latin name moved next
        to a number in a Chinese sentence).

    Examples:
        >>> join(["a dog", "barks", "."], [" ", "", ""])
        'a dog barks.'
        >>> join(["说", "iPhone", "2016", "年"], ["", "", "", ""])
        '说iPhone 2016年'
    """
    text = list(pieces[:1])
    for (left, right), gap in zip(itertools.pairwise(pieces), gaps, strict=False):
        runs_on = bool(not gap and left and right) and _last_letter(left).isalnum() and right[0].isalnum()
        text += [" " if runs_on and is_glued(left, gap, right) else gap, right]
    return "".join(text)
