"""Clauses: a verb with its subject, objects and obliques, read from dependencies or from phrase structure.

Both readings are rules, not gold annotation. The dependency rule holds for every language of Universal Dependencies and
assumes no word order; the rule over phrases is for English.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pelocality.corpora import Dependencies, Sentence, is_punctuation
from pelocality.probes.role_swap.english import LEADING_VERBS, PASSIVE_AUXILIARIES, tags_of

Function = Literal["subject", "object", "indirect object", "oblique"]


@dataclass(frozen=True, slots=True)
class Slot:
    """An argument position: its words without adposition and edge punctuation, its function, and its full extent.

    ``function`` and ``outer`` are None if no tree is known.
    """

    start: int
    end: int
    function: Function | None = None
    outer: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Clause:
    """A verb and its argument slots.

    ``finite`` is the word that agrees with the subject, None in a clause without one; ``shared`` means that another
    verb has the same subject; ``extent`` is the span of the clause. Without a tree, ``voice`` is ``"unknown"``, and so
    is the finite verb.
    """

    verb: int | None
    slots: tuple[Slot, ...]
    extent: tuple[int, int]
    voice: Literal["active", "passive", "unknown"] = "unknown"
    finite: int | None = None
    shared: bool = False

    def slot(self, function: Function) -> Slot | None:
        """Return the slot with a function, None if there is none or more than one."""
        found = [slot for slot in self.slots if slot.function == function]
        return found[0] if len(found) == 1 else None


_PASSIVE_SUBJECTS = ("nsubj:pass", "nsubjpass")
_FUNCTIONS: dict[str, Function] = {
    **dict.fromkeys(("nsubj", *_PASSIVE_SUBJECTS), "subject"),
    **dict.fromkeys(("obj", "dobj"), "object"),
    **dict.fromkeys(("iobj", "dative"), "indirect object"),
}


def _function(relation: str) -> Function | None:
    return _FUNCTIONS.get(relation) or ("oblique" if relation.split(":")[0] in ("obl", "agent", "prep") else None)


def dependency_clauses(sentence: Sentence) -> Iterator[Clause]:
    """Yield the clauses of a dependency tree, one per verb with a subject, in order.

    Subject, object, indirect object and obliques are the dependents ``nsubj`` (``nsubj:pass``), ``obj``, ``iobj`` and
    ``obl`` of the verb with their subtrees, or their names in spaCy's English scheme. Adpositions at the edge are not
    part of a slot, so that they keep their place when arguments change places.
    """
    layer = sentence.dependencies
    if layer is None:
        return
    tags = tags_of(sentence) if sentence.language == "en" else None
    for verb, below in enumerate(layer.children):
        relations = [layer.relations[child] for child in below]
        functions = [_function(relation) for relation in relations]
        if "subject" not in functions or "cop" in relations or (layer.upos and layer.upos[verb] not in ("VERB", "AUX")):
            continue
        if tags is not None and tags[verb] == "VBN" and not any(relation.startswith("aux") for relation in relations):
            continue  # "the man made catastrophe"
        slots = (
            _dependent_slot(sentence, layer, child, function)
            for child, function in zip(below, functions, strict=True)
            if function is not None
        )
        extent = layer.subtree(verb)
        yield Clause(
            verb,
            tuple(slot for slot in slots if slot is not None),
            (min(extent), max(extent) + 1),
            "passive" if any(relation in _PASSIVE_SUBJECTS for relation in relations) else "active",
            _finite(sentence, layer, tags, verb, below),
            _shares_subject(layer, verb),
        )


def _dependent_slot(sentence: Sentence, layer: Dependencies, child: int, function: Function) -> Slot | None:
    """Return the slot of a dependent, None if its subtree is not contiguous."""
    inside = layer.subtree(child)
    start, end = min(inside), max(inside) + 1
    if len(inside) != end - start:
        return None
    outer = _trimmed(sentence, start, end)
    if layer.relations[child] in ("agent", "prep"):  # spaCy: the preposition is the head of its noun
        nouns = [k for k in layer.children[child] if layer.relations[k] == "pobj"]
        if len(nouns) != 1:
            return None
        child = nouns[0]
        inside = layer.subtree(child)
        start, end = min(inside), max(inside) + 1
    for dependent in layer.children[child]:
        if layer.relations[dependent].split(":")[0] == "case":
            adposition = layer.subtree(dependent)
            if min(adposition) == start:
                start = max(adposition) + 1
            elif max(adposition) + 1 == end:
                end = min(adposition)
    return Slot(*_trimmed(sentence, start, end), function, outer) if start < end else None


def _trimmed(sentence: Sentence, start: int, end: int) -> tuple[int, int]:
    while end - start > 1 and is_punctuation(sentence.words[end - 1]):
        end -= 1
    while end - start > 1 and is_punctuation(sentence.words[start]):
        start += 1
    return start, end


def _finite(
    sentence: Sentence, layer: Dependencies, tags: Sequence[str] | None, verb: int, below: Sequence[int]
) -> int | None:
    """Return the first finite verb or auxiliary; in English, a clause with *to* has none."""
    if sentence.language == "en" and any(
        layer.relations[child] in ("mark", "aux") and sentence.words[child].lower() == "to" for child in below
    ):
        return None
    verbs = sorted([*(child for child in below if layer.relations[child].startswith("aux")), verb])
    if tags is not None:
        return next((word for word in verbs if tags[word] in ("MD", "VBZ", "VBP", "VBD", "VB?")), None)
    forms = [layer.features[word].get("VerbForm") if layer.features else None for word in verbs]
    # where no form is marked as finite, the first without a form is taken to be
    found = "Fin" if "Fin" in forms else None
    return verbs[forms.index(found)] if found in forms else None


def _shares_subject(layer: Dependencies, verb: int) -> bool:
    """Return whether a verb is coordinated with another that has no subject of its own."""
    joined = [child for child in layer.children[verb] if layer.relations[child] == "conj"]
    return any(not any("subj" in layer.relations[k] for k in layer.children[child]) for child in joined)


@dataclass(slots=True)
class _Node:
    """A phrase with its parts: phrases, and words (their index) that belong to none of these."""

    start: int
    end: int
    labels: tuple[str, ...]
    parts: list[_Node | int]

    @property
    def phrases(self) -> list[_Node]:
        return [part for part in self.parts if isinstance(part, _Node)]

    @property
    def words(self) -> list[int]:
        return [part for part in self.parts if isinstance(part, int)]


def _tree(sentence: Sentence) -> _Node:
    """Rebuild the tree over words from the phrases of a sentence."""
    spans = sentence.constituents.spans if sentence.constituents else ()
    waiting = sorted(spans, key=lambda c: (-c.start, c.end))
    stack = [_Node(0, len(sentence.words), (), [])]
    for word in range(len(sentence.words)):
        while stack[-1].end <= word:
            stack.pop()
        while waiting and waiting[-1].start == word:
            phrase = waiting.pop()
            stack.append(_Node(phrase.start, phrase.end, phrase.labels, []))
            stack[-2].parts.append(stack[-1])
        stack[-1].parts.append(word)
    return stack[0]


def constituent_clauses(sentence: Sentence) -> Iterator[Clause]:
    """Yield the clauses of English phrase structure, Penn Treebank style, one per verb with a subject, in order.

    In ``S``, ``SQ`` or ``SINV`` the noun phrase before the verb phrase is the subject; auxiliaries lead down through
    verb phrases to the verb; a noun phrase after it is the object, the first of two the indirect object, a noun phrase
    in a prepositional phrase an oblique. *be* or *get* before a past participle makes a passive. A whole sentence that
    is a noun phrase with a participle (*A man riding a horse*) is read as a clause too. Verb phrases joined by a
    conjunction are left out.
    """
    tags = sentence.constituents.tags if sentence.constituents else None
    if tags is None:
        return
    first, last = _trimmed(sentence, 0, len(sentence.words))
    waiting = [_tree(sentence)]
    while waiting:
        node = waiting.pop(0)
        waiting = node.phrases + waiting
        label = node.labels[-1] if node.labels else ""
        if label in ("S", "SQ", "SINV") or (label == "NP" and node.start <= first and last <= node.end):
            clause = _phrase_clause(sentence, tags, node)
            if clause is not None:
                yield clause


def _phrase_clause(sentence: Sentence, tags: Sequence[str], node: _Node) -> Clause | None:
    phrase = next((p for p in node.phrases if p.labels[0] == "VP"), None)
    if phrase is None or phrase.labels != ("VP",):
        return None
    subjects = [p for p in node.phrases if p.labels[0] == "NP" and p.end <= phrase.start]
    if len(subjects) != 1:
        return None
    fragment = node.labels[-1] == "NP"
    verbs = [word for word in node.words if word < phrase.start and _is_verb(tags[word])]
    while True:
        if any(tags[word] == "CC" for word in phrase.words):
            return None
        verbs += [word for word in phrase.words if _is_verb(tags[word])]
        below = [p for p in phrase.phrases if p.labels[0] == "VP"]
        if not below:
            break
        if len(below) > 1 or below[0].labels != ("VP",):
            return None
        if verbs and sentence.words[verbs[-1]].lower() not in LEADING_VERBS:
            return None  # "will be sent next week covering the costs": whose is the second verb phrase?
        phrase = below[0]
    if not verbs or verbs[-1] < phrase.start or (fragment and tags[verbs[0]] != "VBG"):
        return None
    verb = verbs[-1]
    if tags[verb] == "VBN" and len(verbs) == 1:
        return None
    auxiliaries = {sentence.words[word].lower() for word in verbs[:-1]}
    return Clause(
        verb,
        (_phrase_slot(sentence, subjects[0], "subject"), *_slots_after(sentence, tags, phrase, verb)),
        (node.start, node.end),
        "passive" if tags[verb] == "VBN" and auxiliaries & PASSIVE_AUXILIARIES else "active",
        verbs[0] if tags[verbs[0]] in ("MD", "VBZ", "VBP", "VBD") and not fragment else None,
    )


def _is_verb(tag: str) -> bool:
    return tag.startswith("VB") or tag in ("MD", "TO")


def _phrase_slot(sentence: Sentence, phrase: _Node, function: Function, outer: _Node | None = None) -> Slot:
    outer = outer or phrase
    return Slot(*_trimmed(sentence, phrase.start, phrase.end), function, (outer.start, outer.end))


def _slots_after(sentence: Sentence, tags: Sequence[str], phrase: _Node, verb: int) -> Iterator[Slot]:
    """Yield the slots after the verb: objects, then noun phrases inside prepositional ones."""
    after = [p for p in phrase.phrases if p.start > verb]
    objects = [p for p in after if p.labels == ("NP",)]
    functions: list[Function] = ["object"] if len(objects) == 1 else ["indirect object", "object"]
    if len(objects) <= 2:
        for node, function in zip(objects, functions, strict=False):
            yield _phrase_slot(sentence, node, function)
    for node in after:
        nouns = [p for p in node.phrases if p.labels == ("NP",) and p.end == node.end]
        begins = node.words[:1] == [node.start] and tags[node.start] in ("IN", "TO")
        if node.labels == ("PP",) and begins and len(nouns) == len(node.phrases) == 1:
            yield _phrase_slot(sentence, nouns[0], "oblique", node)
