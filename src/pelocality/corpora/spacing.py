"""Where the spaces go: words to text and back, the same way for an original and for its edit.

A *written word* is what stands between two spaces, less the punctuation at its edges: ``don't`` is one
written word though a treebank cuts it in two. Edits move written words whole, so that an edit never changes
how a tokenizer cuts a word; punctuation keeps its place, and spaces belong to places, not to words.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence

# Penn Treebank escapes, which may stand inside a token too (":-RRB-" is ":)")
_ESCAPES = {
    "-LRB-": "(",
    "-RRB-": ")",
    "-LSB-": "[",
    "-RSB-": "]",
    "-LCB-": "{",
    "-RCB-": "}",
    "\\/": "/",
    "\\*": "*",
}
_QUOTES = {
    "``": ('"', "“", "„", "``", "''", "«"),
    "''": ('"', "”", "“", "''", "»"),
    "`": ("'", "‘", "`"),
    "'": ("'", "’", "‘"),
    '"': ('"', "“", "”", "''", "``"),
}
_OPENING = frozenset({"``", "`", "“", "„", "‘", "«"})
_CLOSING = frozenset({"''", "”", "»"})
_DASHES = frozenset({"--", "---", "–", "—"})
_ELLIPSIS = re.compile(r"\.{2,}|…")
# scripts written without spaces between words: there, no space says nothing about word boundaries
_UNSPACED = (
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "THAI",
    "LAO",
    "KHMER",
    "MYANMAR",
    "BOPOMOFO",
    "TIBETAN",
    "IDEOGRAPHIC",
    "FULLWIDTH",
)


def unescape(token: str) -> str:
    r"""Write a Penn Treebank token as people write it.

    Args:
        token: A leaf of a bracketed tree, such as ``-LRB-`` or ``1\/2``.

    Returns:
        The token's own characters; quotes become plain ones.

    Examples:
        >>> unescape("-LRB-"), unescape(":-RRB-"), unescape("``"), unescape("dog")
        ('(', ':)', '"', 'dog')
    """
    if token in ("``", "''", "`"):
        return "'" if token == "`" else '"'
    if "-" in token or "\\" in token:
        for escape, plain in _ESCAPES.items():
            token = token.replace(escape, plain)
    return token


def align(tokens: Sequence[str], text: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Find each token in the text it was cut from.

    Args:
        tokens: The tokens in order, with Penn Treebank escapes or without.
        text: The text as people wrote it.

    Returns:
        The tokens as they stand in the text and the white space after each, or None where they do not match.

    Examples:
        >>> align(["Do", "n't", "-LRB-", "go", "-RRB-", "."], "Don't (go).")
        (('Do', "n't", '(', 'go', ')', '.'), ('', ' ', '', '', '', ''))
    """
    text = text.strip()
    surfaces, spaces, position = [], [], 0
    for token in tokens:
        surface = next(
            (s for s in (token, unescape(token), *_QUOTES.get(token, ())) if text.startswith(s, position)),
            None,
        )
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


@functools.cache
def _detokenizer() -> object:
    from nltk.tokenize.treebank import TreebankWordDetokenizer

    return TreebankWordDetokenizer()


def spaces_by_rule(tokens: Sequence[str], tags: Sequence[str] | None = None) -> tuple[str, ...]:
    """Guess the white space after each token from English Penn Treebank conventions.

    The rules are nltk's ``TreebankWordDetokenizer``; where its text cannot be matched to the tokens again, every
    token is followed by a space. Quotes, dashes and ellipses follow rules of their own: a quote clings to what it
    encloses, a dash has a space on each side, an ellipsis one after it.

    Args:
        tokens: The tokens in order.
        tags: Their Penn Treebank tags. A token tagged ``HYPH`` is written without spaces around it, and the tag
            of a quote says whether it opens; without tags, quotes open and close in turn.

    Returns:
        The white space after each token; the last is empty.

    Examples:
        >>> spaces_by_rule(["He", "ca", "n't", "go", "."])
        (' ', '', ' ', '', '')
        >>> spaces_by_rule(["He", "said", ",", '"', "Go", ".", '"'])
        (' ', '', ' ', '', '', '', '')
    """
    if not tokens:
        return ()
    opens = _quote_sides(tokens, tags)
    # the detokenizer takes all three for marks: seen as words, they get the spaces of their outer side from it
    shown = [
        "w" if i in opens or token in _DASHES or _ELLIPSIS.fullmatch(token) else token for i, token in enumerate(tokens)
    ]
    found = align(shown, _detokenizer().detokenize(shown))  # type: ignore[attr-defined]
    spaces = list(found[1]) if found else [" "] * (len(tokens) - 1) + [""]
    for i, token in enumerate(tokens):
        tag = tags[i] if tags else ""
        if tag == "HYPH" or opens.get(i) is True:
            spaces[i] = ""
        if i and (tag == "HYPH" or opens.get(i) is False or _ELLIPSIS.fullmatch(token)):
            spaces[i - 1] = ""
    for i in range(len(tokens) - 1):
        if _unspaced(_last_letter(tokens[i])) and _unspaced(tokens[i + 1][0]):
            spaces[i] = ""
    return tuple(spaces)


def _quote_sides(tokens: Sequence[str], tags: Sequence[str] | None) -> dict[int, bool]:
    """Say of each token that is a quote whether it opens: by its form, else its tag, else by turns."""
    opens: dict[int, bool] = {}
    unclosed = {'"': False, "'": False}
    for i, token in enumerate(tokens):
        if token not in _OPENING and token not in _CLOSING and token not in ('"', "'", "’"):
            continue
        kind = "'" if token in ("'", "’", "`", "‘") else '"'
        tag = tags[i] if tags else ""
        if token in _OPENING or token in _CLOSING:
            opens[i] = token in _OPENING
        elif tag in ("``", "''"):
            opens[i] = tag == "``"
        elif kind == "'" and (tag == "POS" or (not unclosed[kind] and i and tokens[i - 1][-1] in "sSzZxX")):
            continue  # the dogs' bowl
        else:
            opens[i] = not unclosed[kind]
        unclosed[kind] = opens[i]
    return opens


def is_punctuation(word: str) -> bool:
    """Say whether a token has no letter and no digit, nor anything that stands for one.

    Args:
        word: A token.

    Returns:
        True for marks and brackets; signs that are read aloud (``%``, ``&``, ``€``) count as words.

    Examples:
        >>> is_punctuation("..."), is_punctuation("don't"), is_punctuation("%")
        (True, False, False)
    """
    return all((unicodedata.category(c)[0] in "PM" and c not in "%&@#") or c in "`´^~|=<>+" for c in word)


def is_mark(character: str) -> bool:
    """Say whether a character belongs to the letter before it: vowel signs, accents, joiners.

    Args:
        character: One character.

    Returns:
        True for the Unicode categories Mn, Mc and Me and for the two zero-width joiners.

    Examples:
        >>> [is_mark(c) for c in "नि"], is_mark("n")
        ([False, True], False)
    """
    return not character.isascii() and (unicodedata.category(character)[0] == "M" or character in "\u200c\u200d")


@functools.lru_cache(maxsize=65536)
def _unspaced(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_UNSPACED)


def _last_letter(word: str) -> str:
    """Give the last character that is no mark: the name of a mark does not always tell its script."""
    return next((c for c in reversed(word) if not is_mark(c)), word[-1])


def is_glued(left: str, space: str, right: str) -> bool:
    """Say whether two neighbouring tokens belong to one written word.

    Args:
        left: The token before.
        space: The white space between them.
        right: The token after.

    Returns:
        True where nothing stands between them and their script does put spaces between words.

    Examples:
        >>> is_glued("do", "", "n't"), is_glued("do", " ", "not"), is_glued("他", "", "来")
        (True, False, False)
    """
    return not space and not _unspaced(_last_letter(left)) and not _unspaced(right[0])


def join(pieces: Sequence[str], gaps: Sequence[str]) -> str:
    """Write pieces of text one after the other, each followed by its gap.

    Args:
        pieces: The pieces, each one or more written words.
        gaps: The white space after each piece.

    Returns:
        The text. Where two words that take spaces would run into one (a Latin name moved beside a number in a
        Chinese sentence), a space is put between them.

    Examples:
        >>> join(["a dog", "barks", "."], [" ", "", ""])
        'a dog barks.'
        >>> join(["说", "iPhone", "2016", "年"], ["", "", "", ""])
        '说iPhone 2016年'
    """
    text: list[str] = []
    for i, piece in enumerate(pieces):
        text.append(piece)
        if i + 1 == len(pieces):
            break
        following = pieces[i + 1]
        runs_on = bool(piece and following) and _last_letter(piece).isalnum() and following[0].isalnum()
        text.append(" " if runs_on and is_glued(piece, gaps[i], following) else gaps[i])
    return "".join(text)
