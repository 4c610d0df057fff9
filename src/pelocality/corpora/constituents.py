"""Phrases of a sentence: from bracketed trees, and from dependency trees where there are no others."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from pelocality.corpora.sentence import Constituent, Constituents, Dependencies, Sentence
from pelocality.corpora.spacing import unescape

if TYPE_CHECKING:
    from nltk import Tree

_ROOTS = frozenset({"", "ROOT", "TOP"})
_BINARY = (
    "a bracketed tree must have a label in each node and each word in a node of its own, such as (NP (DT the) (NN "
    "dog)), got {what!r}; if this is a binary parse without labels (sentence1_binary_parse of SNLI), take the field "
    "with the labelled one (sentence1_parse)"
)


@functools.lru_cache(maxsize=4096)
def category(label: str) -> str:
    """Cut a treebank label down to its category.

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

    Traces (``-NONE-``) and what only they fill are left out, function tags cut off, ``-LRB-`` and kin undone.

    Args:
        bracketed: One tree, such as ``(S (NP (DT The) (NN dog)) (VP (VBD ran)))``.
        source: Where the tree came from.
        automatic: Whether a parser made it.

    Returns:
        The words and the phrases over them; a unary chain over the same words is one phrase with more labels.

    Raises:
        ValueError: Where the brackets do not make one tree of labelled nodes, each word in a node of its own:
            binary parses without labels (``sentence1_binary_parse`` of SNLI) are refused.

    Examples:
        >>> words, phrases = parse_bracketed("(TOP (S (NP (DT The) (NN dog)) (VP (VBD ran))))", "gold")
        >>> words, [(c.start, c.end, c.labels) for c in phrases.spans]
        (('The', 'dog', 'ran'), [(0, 3, ('S',)), (0, 2, ('NP',)), (2, 3, ('VP',))])
    """
    from nltk import Tree

    words: list[str] = []
    tags: list[str] = []
    found: list[tuple[int, int, str]] = []

    def visit(node: Tree | str, tag: str | None, top: bool) -> None:
        if not isinstance(node, Tree):
            words.append(unescape(node))
            tags.append(tag or "")
            return
        label = node.label()
        if label == "-NONE-":
            return
        leaf = len(node) == 1 and not isinstance(node[0], Tree)
        if not leaf:
            _check_labelled(node, top)
        place, start = len(found), len(words)
        if not leaf and label not in _ROOTS:
            found.append((start, start, category(label)))
        for child in node:
            visit(child, label if leaf else None, top and label in _ROOTS and len(node) == 1)
        if not leaf and label not in _ROOTS:
            found[place] = (start, len(words), category(label))

    tree = Tree.fromstring(bracketed)
    if _looks_binary(bracketed):
        raise ValueError(_BINARY.format(what=" ".join(bracketed.split())[:60]))
    visit(tree, None, True)
    chains: dict[tuple[int, int], list[str]] = {}
    for start, end, label in found:
        if start < end:
            chains.setdefault((start, end), []).append(label)
    spans = tuple(Constituent(start, end, tuple(labels)) for (start, end), labels in chains.items())
    return tuple(words), Constituents(spans, source, tuple(tags), bracketed, automatic)


def _check_labelled(node: Tree, top: bool) -> None:
    """Refuse a node that is neither a phrase nor a word under its tag: reading on would lose words."""
    from nltk import Tree

    words = [child for child in node if not isinstance(child, Tree)]
    if words or (not node.label() and not top):
        raise ValueError(_BINARY.format(what=" ".join(str(node).split())[:60]))


def _looks_binary(bracketed: str) -> bool:
    """Spot the binary parses that have the form of a labelled tree: ``( They ( are ( sleeping . ) ) )``.

    In a binary tree words outnumber brackets by one, in a labelled one only where it has one word or two;
    SNLI's binary parses have a space after each bracket, and words are seldom all capitals, as labels are.
    """
    tokens = bracketed.replace("(", " ").replace(")", " ").split()
    spaced = re.search(r"\([^\s)]", bracketed) is None
    return spaced and len(tokens) == bracketed.count("(") + 1 and not all(token.isupper() for token in tokens[:-1])


def dependency_constituents(dependencies: Dependencies) -> Constituents:
    """Take the full subtrees of a dependency tree as phrases.

    A word with all that depends on it, directly or not, is a phrase where it is one stretch of words;
    subtrees with gaps (non-projective ones) are none. The label is the relation that holds the subtree.

    Args:
        dependencies: The dependency tree.

    Returns:
        The phrases, whose source says that they were made by this rule.

    Examples:
        >>> gold = Dependencies((2, 3, 0, 5, 3), ("det", "nsubj", "root", "det", "obj"), "gold")
        >>> [(c.start, c.end, c.labels) for c in dependency_constituents(gold).spans]
        [(0, 5, ('root',)), (0, 2, ('nsubj',)), (3, 5, ('obj',))]
    """
    n = len(dependencies.heads)
    low, high, size = list(range(n)), list(range(n)), [1] * n
    for i in range(n):
        above, steps = dependencies.heads[i], 0
        while above and steps < n:  # steps: a cycle in a broken tree must not hang
            low[above - 1] = min(low[above - 1], i)
            high[above - 1] = max(high[above - 1], i)
            size[above - 1] += 1
            above, steps = dependencies.heads[above - 1], steps + 1
    spans = [
        Constituent(low[i], high[i] + 1, (dependencies.relations[i],))
        for i in range(n)
        if size[i] > 1 and high[i] - low[i] + 1 == size[i]
    ]
    spans.sort(key=lambda c: (c.start, -c.end))
    return Constituents(tuple(spans), f"dependency subtrees of {dependencies.source}", automatic=dependencies.automatic)


def phrases(sentence: Sentence) -> Constituents | None:
    """Give the phrases of a sentence: its own, or its dependency subtrees where it has no others.

    Args:
        sentence: The sentence.

    Returns:
        The phrases with their source, or None where the sentence has neither kind of tree.
    """
    if sentence.constituents is not None:
        return sentence.constituents
    return dependency_constituents(sentence.dependencies) if sentence.dependencies is not None else None
