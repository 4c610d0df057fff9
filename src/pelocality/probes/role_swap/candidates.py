"""Candidates: pairs of arguments with the two roles, found by frames, by a rule over a tree, or by the caller."""

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, Literal

from pelocality.corpora import Dropped, Frame, Sentence
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap.clauses import Clause, Slot, constituent_clauses, dependency_clauses

RoleSpans = Mapping[str, tuple[int, int]]
Source = Literal["frames", "dependencies", "constituents"] | Callable[[Sentence], Iterable[RoleSpans]]


_AGENTS = frozenset({"obl:agent", "agent"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two arguments that may change places, their roles, their clause, and the lemma of its verb where known."""

    roles: tuple[str, str]
    arguments: tuple[Slot, Slot]
    clause: Clause
    lemma: str = ""

    @property
    def subject(self) -> Slot | None:
        """The argument that is the subject, None if neither is or no tree is known."""
        return next((slot for slot in self.arguments if slot.function == "subject"), None)

    def other(self, argument: Slot) -> Slot:
        """Return the argument that is not this one."""
        first, second = self.arguments
        return second if argument is first else first


def find_candidates(
    sentence: Sentence, roles: tuple[str, str], source: Source
) -> Iterator[Candidate | Skipped | Dropped]:
    """Yield the candidates of a sentence, and the reasons for the verbs and frames that have none."""
    if callable(source):
        yield from (_from_spans(sentence, roles, spans) for spans in _returned(source(sentence)))
    elif getattr(sentence, source) is None:
        layers = ("dependencies", "constituents", "frames")
        found = next((name for name in layers if getattr(sentence, name) is not None), None)
        yield Dropped(f"no {source}, but {found}; pass source={found!r}" if found else f"no {source}")
    else:
        by_dependencies = source == "dependencies" or (source == "frames" and sentence.dependencies is not None)
        clauses = list(dependency_clauses(sentence) if by_dependencies else constituent_clauses(sentence))
        if source == "frames":
            yield from (_from_frame(sentence, roles, frame, clauses) for frame in sentence.frames or ())
        else:
            yield from (_by_rule(sentence, clause) for clause in clauses)


def _returned(found: Any) -> Iterable[RoleSpans]:
    """Return what a function of the caller's returned, which must be mappings."""
    wanted = "source must return a list of {role: (start, end)} mappings, one for each predicate"
    if isinstance(found, Mapping) or not isinstance(found, Iterable):
        advice = "; put it in a list" if isinstance(found, Mapping) else ""
        raise TypeError(f"{wanted}, returned {brief(found)}{advice}")
    for spans in found:
        if not isinstance(spans, Mapping):
            raise TypeError(f"{wanted}, returned {brief(spans)} in it")
        yield spans


def _from_spans(sentence: Sentence, roles: tuple[str, str], spans: RoleSpans) -> Candidate | Skipped:
    """Return the candidate that a function of the caller's has found."""
    if not set(roles) <= set(spans):
        return Skipped("a role has no argument")
    for role in (*roles, *({"V"} & set(spans))):
        span: Any = spans[role]
        if not isinstance(span, Sequence) or [isinstance(k, numbers.Integral) for k in span] != [True, True]:
            raise TypeError(f"source must return spans (start, end) over words, returned {role} = {span!r}")
        start, end = span
        if not 0 <= start < end <= len(sentence.words):
            raise ValueError(
                f"source must return spans within the {len(sentence.words)} words of {sentence.uid!r}, "
                f"returned {role} = [{start}, {end})"
            )
    return _without_tree(sentence, roles, spans, spans["V"][0] if "V" in spans else None)


def _without_tree(
    sentence: Sentence, roles: tuple[str, str], spans: RoleSpans, verb: int | None, lemma: str = ""
) -> Candidate:
    arguments = (Slot(*spans[roles[0]]), Slot(*spans[roles[1]]))
    return Candidate(roles, arguments, Clause(verb, arguments, (0, len(sentence.words))), lemma)


def _from_frame(sentence: Sentence, roles: tuple[str, str], frame: Frame, clauses: list[Clause]) -> Candidate | Skipped:
    """Match a frame with a clause of the tree, which shows the subject and the adpositions that stay in place."""
    found = [[a for a in frame.arguments if a.role == role] for role in roles]
    if any(len(arguments) != 1 for arguments in found):
        return Skipped("a role has no argument, or several")
    if any(a.role in {f"{prefix}-{role}" for prefix in "CR" for role in roles} for a in frame.arguments):
        return Skipped("an argument is discontinuous, or a relative pronoun refers to it")
    spans = {role: (argument.start, argument.end) for role, [argument] in zip(roles, found, strict=True)}
    lemma, _, sense = frame.roleset.partition(".")
    if sense == "LV":
        return Skipped("a light verb with a noun")
    if sentence.dependencies is None and sentence.constituents is None:
        return _without_tree(sentence, roles, spans, frame.verb[0], lemma)
    clause = next((c for c in clauses if c.verb is not None and frame.verb[0] <= c.verb < frame.verb[1]), None)
    if clause is None:
        return Skipped("the predicate is not a verb with a subject of its own")
    first, second = (
        next((slot for slot in clause.slots if span in ((slot.start, slot.end), slot.outer)), None)
        for span in spans.values()
    )
    if first is None or second is None:
        return Skipped("an argument is not a slot of the verb's own clause")
    return _in_clause(clause, roles, (first, second), lemma)


def _by_rule(sentence: Sentence, clause: Clause) -> Candidate | Skipped:
    """Return subject and object as ARG0 and ARG1; in a passive, the agent and the subject."""
    subject = clause.slot("subject")
    if clause.voice == "passive":
        agents = [slot for slot in clause.slots if slot.function == "oblique" and _is_agent(sentence, slot)]
        agent, patient = (agents[0] if len(agents) == 1 else None), subject
    else:
        agent, patient = subject, clause.slot("object")
    if agent is None or patient is None:
        return Skipped("a role has no argument, or several")
    return _in_clause(clause, ("ARG0", "ARG1"), (agent, patient))


def _is_agent(sentence: Sentence, slot: Slot) -> bool:
    start, end = slot.outer or (slot.start, slot.end)
    layer = sentence.dependencies
    if layer is not None:
        span = range(start, end)
        heads = [i for i in span if not start < layer.heads[i] <= end]
        if any(layer.relations[i] in _AGENTS for i in heads):
            return True
        if not _AGENTS.isdisjoint(layer.relations):
            return False  # the treebank marks its agents: "is known by several names"
    return sentence.language == "en" and sentence.words[start].lower() == "by"


def _in_clause(
    clause: Clause, roles: tuple[str, str], arguments: tuple[Slot, Slot], lemma: str = ""
) -> Candidate | Skipped:
    if any(slot.function == "indirect object" and slot not in arguments for slot in clause.slots):
        return Skipped("an indirect object besides the arguments")  # "a meal makes her husband a woman"
    return Candidate(roles, arguments, clause, lemma)
