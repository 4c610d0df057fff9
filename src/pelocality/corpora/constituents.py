"""Phrases of a sentence: from bracketed trees, or from dependency trees."""

import functools
import re
from collections import defaultdict
from typing import Any

from pelocality.corpora.sentence import LEAF, Constituent, Constituents, Dependencies, Sentence
from pelocality.corpora.spacing import unescape

# Groups: label and word after an opening bracket, the bracket that closes a leaf; or a closing bracket or other text.
_NODE = re.compile(rf"\(\s*([^\s()]*)\s*((?:{LEAF})?)\s*(\)?)|(\)|{LEAF})")
_ROOTS = frozenset({"", "ROOT", "TOP"})
_NOT_WORDS = frozenset({"-NONE-", "CODE", "-DFL-", "ID"})  # tags of traces, of codes, of marks
# Some treebanks do not tag traces as -NONE-: (NP-SBJ *con*), (ADVP *T*-1), (C 0), (P 0), (WNP 0), (TO *).
_MARKED = r"\S+ \*(?:T|ICH|con|pro|exp|arb|PRO|RNR|EXP|PPA|NOT|U)\*(?:-\d+)?"
_TRACE = re.compile(rf"{_MARKED}|(?:C|P|W[A-Z]+P)(?:[-=]\S+)? 0|TO \*")
# IcePaHC has lemmas behind its words, most of which begin like them, (P á-á) (NS-A bækur-bók), and divides some words,
# (N-N land$-land) (D-N $ið-hinn).
_LEMMAS = re.compile(r"\(ID |[.,]-[.,]\)")
_TAGGED = re.compile(r"\((?!ID |CODE )\S+ ([^\s()*0][^\s()]*)\)")
_LIKE_LEMMA = re.compile(r"(.)[^-]*-\1.*", re.IGNORECASE)
_PHRASES = "ADJP ADVP CONJP FRAG INTJ LST NAC NML NP NX PP PRN PRT QP ROOT RRC S SBAR SBARQ SINV SQ TOP UCP VP X"
_TAGS = "CC CD DT EX FW HYPH IN JJ JJR JJS LS MD NN NNS NNP NNPS PDT POS PRP PRP$ RB RBR RBS RP SYM TO UH VB VBD VBG"
_TAGS += " VBN VBP VBZ WDT WP WP$ WRB WHADJP WHADVP WHNP WHPP . , : $ # `` '' -LRB- -RRB- -NONE-"
_LABELS = frozenset(f"{_PHRASES} {_TAGS}".split())
_BINARY = "a tree must label each node and word, got {!r}; of a binary parse take the labelled one, sentence1_parse"


class SeveralWordsError(ValueError):
    """A node of a tree holds a word beside something else."""


@functools.lru_cache(maxsize=4096)
def category(label: str) -> str:
    """Return the category of a treebank label.

    Args:
        label: A label such as ``NP-SBJ-1`` or ``-LRB-``.

    Returns:
        The category without function tags and indices.

    Examples:
        >>> category("NP-SBJ-1"), category("ADVP=2"), category("-LRB-")
        ('NP', 'ADVP', '-LRB-')
    """
    return label if label.startswith("-") else label.split("-")[0].split("=")[0].split("|")[0]


def parse_bracketed(bracketed: str, source: str, automatic: bool = False) -> tuple[tuple[str, ...], Constituents]:
    """Read a bracketed tree, Penn Treebank style.

    Traces (``-NONE-``), codes that are not words (``CODE``, ``ID`` and ``-DFL-`` of Switchboard and the historical
    corpora) and phrases that hold nothing else are left out, function tags are removed, and escapes such as ``-LRB-``
    are replaced by the characters that they stand for. Words of IcePaHC lose their lemmas (``og-og``), and their halves
    are joined (``tungur$-tunga`` and ``$nar-hinn`` are *tungurnar*).

    Args:
        bracketed: One tree, such as ``(S (NP (DT The) (NN dog)) (VP (VBD ran)))``.
        source: Where the tree comes from.
        automatic: Whether a parser made it.

    Returns:
        The words and the phrases over them; a unary chain over the same words is one phrase with several labels.

    Raises:
        ValueError: The brackets do not make one tree of labelled nodes with each word in a node of its own. Binary
            parses without labels (``sentence1_binary_parse`` of SNLI) are refused.

    Examples:
        >>> words, phrases = parse_bracketed("(TOP (S (NP (DT The) (NN dog)) (VP (VBD ran))))", "gold")
        >>> words, [(c.start, c.end, c.labels) for c in phrases.spans]
        (('The', 'dog', 'ran'), [(0, 3, ('S',)), (0, 2, ('NP',)), (2, 3, ('VP',))])
    """
    if _looks_binary(bracketed):
        raise ValueError(_BINARY.format(bracketed.strip()[:60]))
    has_codes = "CODE" in bracketed
    leaves = _TAGGED.findall(bracketed) if _LEMMAS.search(bracketed) else []
    has_lemmas = 0 < len(leaves) <= 2 * sum(map(bool, map(_LIKE_LEMMA.fullmatch, leaves)))
    words: list[str] = []
    tags: list[str] = []
    nodes: list[list[Any]] = []  # start, end and label of each phrase, from the outermost in
    unclosed: list[list[Any]] = []
    for label, word, closes, other in _NODE.findall(bracketed):
        if closes and word and label and (unclosed or not nodes):
            if not unclosed:  # the tree is one word: (NN Rain)
                nodes.append([0, 0, ""])
            # ID is the name of the tree if it stands beside the root
            is_code = label in _NOT_WORDS and (label != "ID" or [phrase[2] for phrase in unclosed] == [""])
            is_code = is_code or (has_codes and any(phrase[2] == "CODE" for phrase in unclosed))
            if not is_code and not (word[0] in "*0" and _TRACE.fullmatch(f"{label} {word}")):
                word = re.sub(r"^(.[^-]*)-.+", r"\1", word) if has_lemmas else word
                if has_lemmas and word[0] == "$" and words and words[-1].endswith("$"):
                    words[-1] = words[-1][:-1] + word[1:]
                    continue
                words.append(word if word.isalnum() else unescape(word))
                tags.append(label)
        elif other == ")" and unclosed:
            unclosed.pop()[1] = len(words)
        elif other == ")" or (not unclosed and nodes):
            nodes = []  # what follows the end of a tree makes it no tree
            break
        elif word and not closes:
            raise SeveralWordsError(_BINARY.format(bracketed.strip()[:60]))
        elif other or (closes and label) or (not label and (words or any(phrase[2] for phrase in nodes))):
            raise ValueError(_BINARY.format(bracketed.strip()[:60]))
        elif not closes:
            unclosed.append([len(words), 0, label])
            nodes.append(unclosed[-1])
    if unclosed or not nodes:
        text = bracketed if len(bracketed) < 200 else f"{bracketed[:100]} ... {bracketed[-100:]}"
        raise ValueError(f"a bracketed tree must be one tree with matching brackets, got {text!r}")
    chains = defaultdict(list)
    for start, end, label in nodes:
        if start < end and label not in _ROOTS:
            chains[start, end].append(category(label))
    spans = tuple(Constituent(start, end, tuple(labels)) for (start, end), labels in chains.items())
    return tuple(words), Constituents(spans, source, tuple(tags), bracketed, automatic)


def _looks_binary(bracketed: str) -> bool:
    """Return whether a binary parse has the form of a labelled tree: ``( They ( are ( sleeping . ) ) )``.

    A binary tree has one more word than brackets, a labelled one only if it has one or two words; SNLI's binary parses
    have a space after each bracket, and a word stands there where a labelled tree has a label.
    """
    if re.search(r"\([^\s)]", bracketed):
        return False
    words = len(re.findall(r"[^\s()]+", bracketed))
    labels = re.findall(r"\(\s*([^\s()]+)", bracketed)
    return words == bracketed.count("(") + 1 and not all(category(label) in _LABELS for label in labels)


def dependency_constituents(dependencies: Dependencies) -> Constituents:
    """Return the full subtrees of a dependency tree as phrases.

    A word with all its descendants is a phrase if these words are contiguous; discontinuous subtrees (non-projective
    ones) are left out. The label is the relation of the subtree's root to its head.

    Args:
        dependencies: The dependency tree.

    Returns:
        The phrases; their source names this rule.

    Examples:
        >>> gold = Dependencies((2, 3, 0, 5, 3), ("det", "nsubj", "root", "det", "obj"), "gold")
        >>> [(c.start, c.end, c.labels) for c in dependency_constituents(gold).spans]
        [(0, 5, ('root',)), (0, 2, ('nsubj',)), (3, 5, ('obj',))]
    """
    spans = []
    for word, relation in enumerate(dependencies.relations):
        words = sorted(dependencies.subtree(word))
        if words[-1] - words[0] + 1 == len(words) > 1:
            spans.append(Constituent(words[0], words[-1] + 1, (relation,)))
    spans.sort(key=lambda c: (c.start, -c.end))
    return Constituents(tuple(spans), f"dependency subtrees of {dependencies.source}", automatic=dependencies.automatic)


def phrases(sentence: Sentence) -> Constituents | None:
    """Return the constituents of a sentence, or its dependency subtrees if it has no constituents.

    Args:
        sentence: The sentence.

    Returns:
        The phrases with their source, or None if the sentence has neither kind of tree.

    Examples:
        >>> words, constituents = parse_bracketed("(S (NP (DT A) (NN cat)) (VP (VBZ sleeps)))", "made up")
        >>> phrases(Sentence(words, constituents=constituents)).spans[1]
        Constituent(start=0, end=2, labels=('NP',))
    """
    if sentence.constituents is not None:
        return sentence.constituents
    return dependency_constituents(sentence.dependencies) if sentence.dependencies is not None else None
