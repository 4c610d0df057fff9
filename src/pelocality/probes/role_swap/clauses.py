"""Clauses: a verb with its subject, objects and obliques, read off dependencies or off phrase structure.

Both readings are rules, not gold: they say so in the source of what they find. The dependency rule holds
for every language of Universal Dependencies and assumes no order of words; the rule over phrases is for
English.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pelocality.corpora import Dependencies, Sentence, is_punctuation
from pelocality.probes.role_swap.english import tags_of

Function = Literal["subject", "object", "indirect object", "oblique"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a clause: its words less adposition and edge punctuation, its function, and its full extent."""

    start: int
    end: int
    function: Function
    outer: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Clause:
    """A verb and its places.

    ``finite`` is the word that agrees with the subject, None in a clause without one; ``shared`` says that
    another verb has the same subject; ``extent`` is all the clause covers.
    """

    verb: int
    passive: bool
    slots: tuple[Slot, ...]
    finite: int | None
    extent: tuple[int, int]
    shared: bool = False

    def slot(self, function: Function) -> Slot | None:
        """Find the one slot of a function.

        Args:
            function: Such as ``"subject"``.

        Returns:
            The slot, None where there is none or more than one.
        """
        found = [slot for slot in self.slots if slot.function == function]
        return found[0] if len(found) == 1 else None


_SUBJECTS = {"nsubj": False, "nsubj:pass": True, "nsubjpass": True}
_FUNCTIONS: dict[str, Function] = {
    "obj": "object",
    "dobj": "object",
    "iobj": "indirect object",
    "dative": "indirect object",
}


def dependency_clauses(sentence: Sentence) -> Iterator[Clause]:
    """Read the clauses off a dependency tree.

    Subject, object, indirect object and obliques are the dependents ``nsubj`` (``nsubj:pass``), ``obj``,
    ``iobj`` and ``obl`` of the verb with their subtrees, or their names in spaCy's English scheme.
    Adpositions at the edge stay out of a slot, so that they keep their place when arguments change places.

    Args:
        sentence: A sentence with dependencies.

    Returns:
        One clause per verb that has a subject, in order.
    """
    layer = sentence.dependencies
    if layer is None:
        return
    children: list[list[int]] = [[] for _ in layer.heads]
    for i, head in enumerate(layer.heads):
        if head:
            children[head - 1].append(i)
    tags = tags_of(sentence) if sentence.language == "en" else None
    for verb, below in enumerate(children):
        relations = {layer.relations[child]: child for child in below}
        subjects = [child for child in below if layer.relations[child] in _SUBJECTS]
        if not subjects or "cop" in relations or (layer.upos and layer.upos[verb] not in ("VERB", "AUX")):
            continue
        slots = []
        for child in below:
            function = _function(layer.relations[child])
            if function is not None:
                slot = _dependent_slot(sentence, layer, children, child, function)
                if slot is not None:
                    slots.append(slot)
        extent = _subtree(children, verb)
        auxiliaries = [child for child in below if layer.relations[child].startswith("aux")]
        yield Clause(
            verb,
            any(_SUBJECTS[layer.relations[child]] for child in subjects),
            tuple(slots),
            _finite(sentence, layer, tags, [*auxiliaries, verb], below),
            (min(extent), max(extent) + 1),
            _is_shared(layer, children, verb),
        )


def _function(relation: str) -> Function | None:
    if relation in _SUBJECTS:
        return "subject"
    if relation in _FUNCTIONS:
        return _FUNCTIONS[relation]
    return "oblique" if relation.split(":")[0] in ("obl", "agent", "prep") else None


def _subtree(children: Sequence[Sequence[int]], top: int) -> set[int]:
    found, waiting = {top}, [top]
    while waiting:
        for child in children[waiting.pop()]:
            if child not in found:  # a cycle in a broken tree must not hang
                found.add(child)
                waiting.append(child)
    return found


def _dependent_slot(
    sentence: Sentence, layer: Dependencies, children: Sequence[Sequence[int]], child: int, function: Function
) -> Slot | None:
    """Make a slot of a dependent, None where its subtree is not one stretch of words."""
    inside = _subtree(children, child)
    start, end = min(inside), max(inside) + 1
    if len(inside) != end - start:
        return None
    outer = _trimmed(sentence, start, end)
    core = child
    if layer.relations[child] in ("agent", "prep"):  # spaCy: the preposition is the head of its noun
        nouns = [k for k in children[child] if layer.relations[k] == "pobj"]
        if len(nouns) != 1:
            return None
        core = nouns[0]
        inside = _subtree(children, core)
        start, end = min(inside), max(inside) + 1
    for adposition in children[core]:
        if layer.relations[adposition].split(":")[0] == "case":
            own = _subtree(children, adposition)
            if min(own) == start:
                start = max(own) + 1
            elif max(own) + 1 == end:
                end = min(own)
    if start >= end:
        return None
    return Slot(*_trimmed(sentence, start, end), function, outer)


def _trimmed(sentence: Sentence, start: int, end: int) -> tuple[int, int]:
    while end - start > 1 and is_punctuation(sentence.words[end - 1]):
        end -= 1
    while end - start > 1 and is_punctuation(sentence.words[start]):
        start += 1
    return start, end


def _finite(
    sentence: Sentence,
    layer: Dependencies,
    tags: Sequence[str] | None,
    verbs: Sequence[int],
    below: Sequence[int],
) -> int | None:
    if sentence.language == "en" and any(
        layer.relations[child] in ("mark", "aux") and sentence.words[child].lower() == "to" for child in below
    ):
        return None
    for verb in sorted(verbs):
        if tags is not None:
            if tags[verb] in ("MD", "VBZ", "VBP", "VBD", "VB?"):
                return verb
        elif layer.features is None or layer.features[verb].get("VerbForm", "Fin") == "Fin":
            return verb
    return None


def _is_shared(layer: Dependencies, children: Sequence[Sequence[int]], verb: int) -> bool:
    joined = [child for child in children[verb] if layer.relations[child] == "conj"]
    return any(not any("subj" in layer.relations[k] for k in children[child]) for child in joined)


@dataclass(slots=True)
class _Node:
    """A phrase with its parts: phrases below it, and words (their index) of its own."""

    start: int
    end: int
    labels: tuple[str, ...]
    parts: list[_Node | int]


def _top(sentence: Sentence) -> _Node:
    """Rebuild the tree over words from the phrases of a sentence."""
    top = _Node(0, len(sentence.words), (), [])
    stack = [top]
    spans = sentence.constituents.spans if sentence.constituents else ()
    for phrase in sorted(spans, key=lambda c: (c.start, -c.end)):
        node = _Node(phrase.start, phrase.end, phrase.labels, [])
        while not (stack[-1].start <= node.start and node.end <= stack[-1].end):
            stack.pop()
        stack[-1].parts.append(node)
        stack.append(node)
    _add_words(top)
    return top


def _add_words(node: _Node) -> None:
    phrases = [part for part in node.parts if isinstance(part, _Node)]
    covered = {i for phrase in phrases for i in range(phrase.start, phrase.end)}
    words = [i for i in range(node.start, node.end) if i not in covered]
    node.parts = sorted([*phrases, *words], key=lambda part: part.start if isinstance(part, _Node) else part)
    for phrase in phrases:
        _add_words(phrase)


def constituent_clauses(sentence: Sentence) -> Iterator[Clause]:
    """Read the clauses off English phrase structure, Penn Treebank style.

    The rule: in ``S``, ``SQ`` or ``SINV`` the noun phrase before the verb phrase is the subject;
    auxiliaries lead down through verb phrases to the verb; a noun phrase after it is the object, the first
    of two the indirect object, a noun phrase in a prepositional phrase an oblique. *be* or *get* before a
    past participle makes a passive. A whole sentence that is a noun phrase with a participle (*A man riding
    a horse*) is read as a clause too. Verb phrases joined by a conjunction are left alone.

    Args:
        sentence: A sentence with constituents and tags.

    Returns:
        One clause per verb that has a subject, in order.
    """
    tags = sentence.constituents.tags if sentence.constituents else None
    if tags is None:
        return
    waiting = [_top(sentence)]
    while waiting:
        node = waiting.pop(0)
        parts = [part for part in node.parts if isinstance(part, _Node)]
        waiting = parts + waiting
        whole = not any(
            not is_punctuation(sentence.words[i]) for i in [*range(node.start), *range(node.end, len(sentence.words))]
        )
        if node.labels and (node.labels[-1] in ("S", "SQ", "SINV") or (node.labels[-1] == "NP" and whole)):
            clause = _phrase_clause(sentence, tags, node)
            if clause is not None:
                yield clause


def _phrase_clause(sentence: Sentence, tags: Sequence[str], node: _Node) -> Clause | None:
    phrase = next((p for p in node.parts if isinstance(p, _Node) and p.labels[0] == "VP"), None)
    if phrase is None or phrase.labels != ("VP",):
        return None
    before = [p for p in node.parts if isinstance(p, _Node) and p.labels[0] == "NP" and p.end <= phrase.start]
    if len(before) != 1:
        return None
    fragment = node.labels[-1] == "NP"
    verbs = [p for p in node.parts if isinstance(p, int) and p < phrase.start and _is_verb(tags[p])]
    while True:
        own = [p for p in phrase.parts if isinstance(p, int)]
        if any(tags[word] == "CC" for word in own):
            return None
        verbs += [word for word in own if _is_verb(tags[word])]
        below = [p for p in phrase.parts if isinstance(p, _Node) and p.labels[0] == "VP"]
        if not below:
            break
        if len(below) > 1 or below[0].labels != ("VP",):
            return None
        phrase = below[0]
    if not verbs or verbs[-1] < phrase.start or (fragment and tags[verbs[0]] != "VBG"):
        return None
    verb = verbs[-1]
    auxiliaries = [sentence.words[word].lower() for word in verbs[:-1]]
    passive = tags[verb] == "VBN" and any(word in _PASSIVE_AUXILIARIES for word in auxiliaries)
    slots = [Slot(*_trimmed(sentence, before[0].start, before[0].end), "subject", (before[0].start, before[0].end))]
    slots += _slots_after(sentence, tags, phrase, verb)
    finite = verbs[0] if tags[verbs[0]] in ("MD", "VBZ", "VBP", "VBD") and not fragment else None
    return Clause(verb, passive, tuple(slots), finite, (node.start, node.end))


_PASSIVE_AUXILIARIES = frozenset(
    {"be", "am", "is", "are", "was", "were", "been", "being", "'s", "'re", "'m", "get", "gets", "got", "getting"}
)


def _is_verb(tag: str) -> bool:
    return tag.startswith("VB") or tag in ("MD", "TO")


def _slots_after(sentence: Sentence, tags: Sequence[str], phrase: _Node, verb: int) -> list[Slot]:
    """List the places after the verb: objects, and noun phrases inside prepositional ones."""
    after = [p for p in phrase.parts if isinstance(p, _Node) and p.start > verb]
    objects = [p for p in after if p.labels == ("NP",)]
    functions: list[Function] = ["object"] if len(objects) == 1 else ["indirect object", "object"]
    slots = []
    if len(objects) <= 2:
        for node, function in zip(objects, functions, strict=False):
            slots.append(Slot(*_trimmed(sentence, node.start, node.end), function, (node.start, node.end)))
    for node in after:
        nouns = [p for p in node.parts if isinstance(p, _Node)]
        if node.labels == ("PP",) and len(nouns) == 1 and nouns[0].labels == ("NP",):
            first = node.parts[0]
            if isinstance(first, int) and tags[first] in ("IN", "TO") and nouns[0].end == node.end:
                core = _trimmed(sentence, nouns[0].start, nouns[0].end)
                slots.append(Slot(*core, "oblique", (node.start, node.end)))
    return slots
