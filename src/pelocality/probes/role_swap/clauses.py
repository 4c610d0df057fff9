"""Candidates: two arguments of a verb, from the frames or the tree of a sentence, or from the caller."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pelocality.corpora import Dependencies, Dropped, Frame, Sentence, is_punctuation
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap.english import VERB_GROUP

Span = tuple[int, int]  # the first word, and the word after the last
RoleSpans = Mapping[str, Span]
Source = Literal["frames", "dependencies", "constituents"] | Callable[[Sentence], Iterable[RoleSpans]]

NO_ARGUMENTS = Skipped("a role has no argument, or several")
NOT_IN_CLAUSE = Skipped("the arguments are not subject and object, or subject and agent, of one clause")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two arguments that may change places, without the adposition of an agent; the verb is None where unknown."""

    roles: tuple[str, str]
    arguments: tuple[Span, Span]
    verb: int | None
    voice: Literal["active", "passive", "unknown"] = "unknown"
    lemma: str = ""


def find_candidates(
    sentence: Sentence, roles: tuple[str, str], source: Source
) -> Iterator[Candidate | Skipped | Dropped]:
    """Yield the candidates of a sentence, and the reasons for the verbs and frames that have none."""
    if callable(source):
        yield from (_from_spans(sentence, roles, spans) for spans in source(sentence))
    elif getattr(sentence, source) is None:
        layers = ("dependencies", "constituents", "frames")
        other = next((name for name in layers if getattr(sentence, name) is not None), None)
        yield Dropped(f"no {source}, but {other}; pass source={other!r}" if other else f"no {source}")
    else:
        layer = None if source == "constituents" else sentence.dependencies
        clauses = list(_phrase_clauses(sentence) if layer is None else _dependency_clauses(sentence, layer))
        frames = (_from_frame(sentence, roles, frame, clauses) for frame in sentence.frames or ())
        yield from frames if source == "frames" else clauses


def _from_spans(sentence: Sentence, roles: tuple[str, str], spans: RoleSpans) -> Candidate | Skipped:
    """Return the candidate that a function of the caller's has found."""
    if not isinstance(spans, Mapping):
        raise TypeError(f"source must return a list of {{role: (start, end)}} mappings, returned {spans!r} in it")
    if not set(roles) <= set(spans):
        return NO_ARGUMENTS
    n = len(sentence.words)
    for role in (*roles, *({"V"} & set(spans))):
        start, end = spans[role]
        if not 0 <= start < end <= n:
            raise ValueError(f"source must return spans within the {n} words, returned {role} = [{start}, {end})")
    first, second = ((spans[role][0], spans[role][1]) for role in roles)
    return Candidate(roles, (first, second), spans["V"][0] if "V" in spans else None)


def _from_frame(
    sentence: Sentence, roles: tuple[str, str], frame: Frame, clauses: Sequence[Candidate | Skipped]
) -> Candidate | Skipped:
    """Return the arguments of a frame; where there is a tree, they must be those of the verb's clause in it."""
    by_role = [[(a.start, a.end) for a in frame.arguments if a.role == role] for role in roles]
    if any(len(spans) != 1 for spans in by_role):
        return NO_ARGUMENTS
    if any(a.role in {f"{prefix}-{role}" for prefix in "CR" for role in roles} for a in frame.arguments):
        return Skipped("an argument is discontinuous, or a relative pronoun refers to it")
    lemma, _, sense = frame.roleset.partition(".")
    if sense == "LV":
        return Skipped("a light verb with a noun")
    first, second = (_trimmed(sentence, *spans[0]) for spans in by_role)
    if sentence.dependencies is None and sentence.constituents is None:
        return Candidate(roles, (first, second), frame.verb[0], lemma=lemma)
    for clause in clauses:
        if isinstance(clause, Candidate) and clause.verb in range(*frame.verb):
            for one, other in (clause.arguments, clause.arguments[::-1]):
                if _is_argument(sentence, one, first) and _is_argument(sentence, other, second):
                    return Candidate(roles, (one, other), clause.verb, clause.voice, lemma)
    return NOT_IN_CLAUSE


def _is_argument(sentence: Sentence, argument: Span, span: Span) -> bool:
    """Return whether a span is an argument of the tree, with or without adpositions, which keep their place."""
    upos = sentence.dependencies.upos if sentence.dependencies is not None else None
    beside = [*range(span[0], argument[0]), *range(argument[1], span[1])]
    inside = span[0] <= argument[0] and argument[1] <= span[1]
    return inside and all(upos is not None and upos[i] == "ADP" for i in beside)


def _trimmed(sentence: Sentence, start: int, end: int) -> Span:
    """Return a span without punctuation at its edges, and without the *by* of an English agent before it."""
    while end - start > 1 and is_punctuation(sentence.words[end - 1]):
        end -= 1
    by = ("by",) if sentence.language == "en" else ()
    while end - start > 1 and (is_punctuation(sentence.words[start]) or sentence.words[start].lower() in by):
        start += 1
    return start, end


def _phrase_clauses(sentence: Sentence) -> Iterator[Candidate | Skipped]:
    """Yield the verbs of English phrase structure with the largest noun phrases beside their group."""
    if sentence.constituents is None or (tags := sentence.constituents.tags) is None:
        return
    phrases = [(c.start, c.end) for c in sentence.constituents.spans if c.labels[0] == "NP"]
    for verb, tag in enumerate(tags):
        begin, after = verb, verb + 1
        following = next((other for other in tags[after:] if other != "RB"), "")
        if not tag.startswith("VB") or following.startswith("VB"):
            continue  # an auxiliary
        while begin and tags[begin - 1] in VERB_GROUP:
            begin -= 1
        while after < len(tags) and (tags[after] == "RP" or sentence.words[after].lower() == "by"):
            after += 1
        before = min((span for span in phrases if span[1] == begin), default=None)
        behind = max((span for span in phrases if span[0] == after), default=None)
        if before is None or behind is None:
            yield from () if before is behind else (NO_ARGUMENTS,)
            continue
        first, last = _trimmed(sentence, *before), _trimmed(sentence, *behind)
        passive = after > verb + 1 and sentence.words[after - 1].lower() == "by"
        yield Candidate(("ARG0", "ARG1"), (last, first) if passive else (first, last), verb)


def _dependency_clauses(sentence: Sentence, layer: Dependencies) -> Iterator[Candidate | Skipped]:
    """Yield the verbs with a subject of Universal Dependencies, or of spaCy's English scheme; no order is assumed."""
    for verb, below in enumerate(layer.children):
        names = {child: layer.relations[child] for child in below}
        subjects = [child for child, name in names.items() if name in ("nsubj", "nsubj:pass", "nsubjpass")]
        if len(subjects) != 1 or "cop" in names.values() or (layer.upos and layer.upos[verb] not in ("VERB", "AUX")):
            continue
        passive = names[subjects[0]] != "nsubj"
        others = [k for k in below if (_is_agent(sentence, layer, k) if passive else names[k] in ("obj", "dobj"))]
        spans = [_subtree(sentence, layer, child) for child in (subjects + others if len(others) == 1 else ())]
        if len(spans) != 2 or spans[0] is None or spans[1] is None or {"iobj", "dative"} & {*names.values()}:
            yield NO_ARGUMENTS
        else:
            arguments = (spans[1], spans[0]) if passive else (spans[0], spans[1])
            yield Candidate(("ARG0", "ARG1"), arguments, verb, "passive" if passive else "active")


def _is_agent(sentence: Sentence, layer: Dependencies, child: int) -> bool:
    """Return whether a dependent is the agent of a passive: by its relation, or in a treebank without it by *by*."""
    if layer.relations[child] in ("obl:agent", "agent") or "obl:agent" in layer.relations:
        return layer.relations[child] in ("obl:agent", "agent")
    by = any(sentence.words[k].lower() == "by" for k in layer.children[child])
    return sentence.language == "en" and layer.relations[child] == "obl" and by


def _subtree(sentence: Sentence, layer: Dependencies, head: int) -> Span | None:
    """Return the span of a word with its dependents, without adpositions at its edge; None if it has gaps."""
    if layer.relations[head] == "agent":  # spaCy: the preposition is the head of its noun
        nouns = [k for k in layer.children[head] if layer.relations[k] == "pobj"]
        return _subtree(sentence, layer, nouns[0]) if len(nouns) == 1 else None
    inside, cases = layer.subtree(head), (k for k in layer.children[head] if layer.relations[k].split(":")[0] == "case")
    rest = inside.difference(*map(layer.subtree, cases))
    return _trimmed(sentence, min(rest), max(rest) + 1) if max(inside) - min(inside) + 1 == len(inside) else None
