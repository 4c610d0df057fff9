"""Exchanged semantic roles: who did it to whom, the other way round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import datasets

from pelocality._checks import count
from pelocality.corpora import Dropped, Pair, Records, Sentence
from pelocality.probes._build import Item, Row, Skipped, build, generator_for
from pelocality.probes._rows import check_choice, check_labels, content_of, name_of, pair_features, pair_row, span_entry
from pelocality.probes._spans import Spans
from pelocality.probes.role_swap.candidates import Candidate, RoleArgument
from pelocality.probes.role_swap.clauses import Clause, Slot, constituent_clauses, dependency_clauses
from pelocality.probes.role_swap.english import SYMMETRIC_VERBS
from pelocality.probes.role_swap.swapping import Agreement, Replacement, exchange

LabelPolicy = str | Callable[[str], str | None]
RoleSpans = Mapping[str, tuple[int, int]]
Source = Literal["frames", "dependencies", "constituents"] | Callable[[Sentence], Iterable[RoleSpans]]
_SOURCES = ("frames", "dependencies", "constituents")
_LABELS = ("contradiction", "neutral", "not entailment")


def semantic_role_swap(
    pairs_or_sentences: Iterable[Item] | Records[Item],
    roles: tuple[str, str] = ("ARG0", "ARG1"),
    source: Source = "frames",
    label_policy: LabelPolicy | None = None,
    *,
    side: Literal["premise", "hypothesis"] = "hypothesis",
    spans: Spans = "one",
    agreement: Agreement = "skip",
    symmetric_verbs: Collection[str] = SYMMETRIC_VERBS,
    labels: Collection[str] | None = None,
    seed: int = 0,
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Exchange the arguments of two semantic roles: *the dog bit a man* becomes *a man bit the dog*.

    Shuffle-SR of Chen et al. (2023, section 5.4); how they found roles is not known. A swap is made only
    where it is one and leaves a sentence: copulas, symmetric verbs (*meet*, *marry*), reflexives and
    reciprocals, arguments that overlap, that are not plain noun phrases, or whose case endings would give the
    swap away are skipped and counted by reason in ``probe_info``. In English, pronouns change case (*he*,
    *him*), capitals follow the start of the sentence, and in a passive the *by* stays where it is.

    Args:
        pairs_or_sentences: A corpus, or any iterable of pairs or of sentences.
        roles: The two roles to exchange.
        source: ``"frames"``: the sentence's frames, kept where a tree, if
            there is one, shows both arguments as places of the verb's own clause. ``"dependencies"``: subject
            and object, or passive subject and agent, of Universal Dependencies, in any order and language.
            ``"constituents"``: the same by a rule over English phrase structure (``docs/probes.md`` states
            it). Or a function from a sentence to ``{role: (start, end)}`` mappings over its words, ``"V"``
            for the verb where it is known.
        label_policy: The label of an edited pair: ``"contradiction"``, ``"neutral"``, ``"not entailment"``,
            or a function from the old label to the new, None to leave the pair out. Published sets
            disagree, so there is no default where pairs have labels. Only a swap in an entailed hypothesis
            surely changes the label: ``labels=("entailment",)`` keeps those.
        side: Which side of a pair is edited. A sentence becomes a pair itself: premise the sentence,
            hypothesis its swap, original hypothesis the sentence, original label ``"entailment"``.
        spans: ``"one"`` draws one usable predicate of a sentence, ``"all"`` gives a row for each.
        agreement: Where the verb would not agree with its new subject: ``"skip"`` skips the swap,
            ``"reinflect"`` changes the verb (English; needs lemminflect), ``"ignore"`` lets it stand.
        symmetric_verbs: Base forms of verbs whose swap means the same.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seeds the choice of the predicate, together with the item's text (for a pair, both texts) and
            nothing else.
        num_proc: How many processes share the work.
        progress: Whether to show progress bars.

    Returns:
        A dataset with the columns of ``constituency_shuffling`` over pairs; ``category`` is the voice, the
        category of a span its role (``"agreement"`` for a re-inflected verb), ``size`` the words of both
        arguments.

    Raises:
        TypeError: Where an argument is of the wrong kind, or ``label_policy`` returns something that is no
            string.
        ValueError: Where an argument makes no sense, or labelled pairs come without ``label_policy``.

    Examples:
        >>> from pelocality.corpora import Argument, Frame, Sentence
        >>> frame = Frame("bite.01", (2, 3), (Argument("ARG0", 0, 2), Argument("ARG1", 3, 4)), "made up")
        >>> words = ("A", "dog", "bit", "him", ".")
        >>> probe = semantic_role_swap([Sentence(words, uid="1", language="en", frames=(frame,))])
        >>> probe[0]["premise"], probe[0]["hypothesis"]
        ('A dog bit him.', 'He bit a dog.')
    """
    if isinstance(symmetric_verbs, str):
        raise TypeError(f"symmetric_verbs must be a collection of verbs, got {symmetric_verbs!r}")
    perturb = _RoleSwap(
        roles, source, label_policy, side, spans, agreement, frozenset(symmetric_verbs), check_labels(labels), seed
    )
    return build("semantic_role_swap", pairs_or_sentences, perturb, num_proc, progress)


@dataclass(frozen=True)
class _RoleSwap:
    """A swap of roles with its settings."""

    roles: tuple[str, str]
    source: Source
    label_policy: LabelPolicy | None
    side: str
    spans: Spans
    agreement: Agreement
    symmetric_verbs: frozenset[str]
    labels: tuple[str, ...] | None
    seed: int

    def __post_init__(self) -> None:
        if not callable(self.source):
            check_choice("source", self.source, _SOURCES)
        check_choice("side", self.side, ("premise", "hypothesis"))
        check_choice("spans", self.spans, ("one", "all"))
        check_choice("agreement", self.agreement, ("skip", "reinflect", "ignore"))
        object.__setattr__(self, "seed", count("seed", self.seed, 0))
        if isinstance(self.roles, str) or len(self.roles) != 2 or self.roles[0] == self.roles[1]:
            raise ValueError(f"roles must be two different roles, such as ('ARG0', 'ARG1'), got {self.roles!r}")
        if self.source in ("dependencies", "constituents") and set(self.roles) != {"ARG0", "ARG1"}:
            raise ValueError(
                f"the rule over {self.source} knows ARG0 and ARG1 only, got {self.roles!r}; use source='frames'"
            )
        if self.label_policy is not None and not callable(self.label_policy):
            check_choice("label_policy", self.label_policy, _LABELS)

    def features(self, kind: type) -> datasets.Features:
        """Return the columns of the rows: a pair, also where a sentence came."""
        return pair_features()

    def settings(self) -> Mapping[str, Any]:
        """Return what the builder was called with, functions by their names."""
        return vars(self) | {
            "source": _name_of_function(self.source),
            "label_policy": _name_of_function(self.label_policy),
            "symmetric_verbs": sorted(self.symmetric_verbs),
        }

    def __call__(self, item: Item) -> Iterator[Row | Dropped | Skipped]:
        """Find the predicates whose arguments may change places, draw one or take all, and write the rows."""
        side, content = self.side, content_of(item)
        if isinstance(item, Sentence):
            item = Pair(item, item, "entailment" if self.label_policy is not None else None, name_of(item))
            side = "hypothesis"
        elif item.label is not None and self.label_policy is None:
            raise ValueError(
                "label_policy must say what becomes of the labels of perturbed pairs: 'contradiction', 'neutral', "
                "'not entailment' or a function from the old label to the new"
            )
        if self.labels is not None and item.label not in self.labels:
            yield Dropped("label not asked for")
            return
        label = self.label_policy(item.label or "") if callable(self.label_policy) else self.label_policy
        if callable(self.label_policy) and label is None:
            yield Dropped("label policy gave no label")
            return
        if label is not None and not isinstance(label, str):
            raise TypeError(f"label_policy must return a label's name or None, returned {label!r} for {item.label!r}")
        sentence: Sentence = getattr(item, side)
        usable: list[tuple[Candidate, list[Replacement]]] = []
        for candidate in _candidates(sentence, self.roles, self.source):
            if not isinstance(candidate, Candidate):
                yield candidate
                continue
            swapped = exchange(sentence, candidate, self.agreement, self.symmetric_verbs)
            if isinstance(swapped, Skipped):
                yield swapped
            else:
                usable.append((candidate, swapped))
        if self.spans == "one" and usable:
            rng = generator_for(self.seed, *content, side, "choose")
            usable = [usable[rng.integers(len(usable))]]
        for candidate, replacements in usable:
            yield self._row(item, side, candidate, replacements, label)

    def _row(
        self, item: Pair, side: str, candidate: Candidate, replacements: list[Replacement], label: str | None
    ) -> Row:
        sentence: Sentence = getattr(item, side)
        row = pair_row(
            item,
            {side: sentence.replaced([(start, end, text) for start, end, text, _ in replacements])},
            label,
            [span_entry(sentence, side, role, start, end, text) for start, end, text, role in replacements],
            size=sum(
                any(f.start <= start and end <= f.end for f in candidate.arguments)
                for start, end in sentence.written_words
            ),
            category=candidate.voice,
            seed=self.seed,
            uid=name_of(item),
        )
        if self.source in ("dependencies", "constituents"):
            row["provenance"] += f"; roles: rule over {self.source}"
        elif callable(self.source):
            row["provenance"] += f"; roles: {_name_of_function(self.source)}"
        return row


def _name_of_function(value: object) -> object:
    return getattr(value, "__name__", repr(value)) if callable(value) else value


def _candidates(sentence: Sentence, roles: tuple[str, str], source: Source) -> Iterator[Candidate | Skipped | Dropped]:
    if callable(source):
        yield from _given(sentence, roles, source)
    elif source == "frames":
        yield from _framed(sentence, roles)
    else:
        layer = sentence.dependencies if source == "dependencies" else sentence.constituents
        if layer is None:
            yield Dropped(f"no {source}")
            return
        clauses = dependency_clauses(sentence) if source == "dependencies" else constituent_clauses(sentence)
        yield from _by_rule(sentence, clauses)


def _given(
    sentence: Sentence, roles: tuple[str, str], find: Callable[[Sentence], Iterable[RoleSpans]]
) -> Iterator[Candidate | Skipped]:
    for found in find(sentence):
        if not set(roles) <= set(found):
            yield Skipped("a role has no argument")
            continue
        for role in roles:
            start, end = found[role]
            if not 0 <= start < end <= len(sentence.words):
                raise ValueError(
                    f"source must give spans within the {len(sentence.words)} words of {sentence.uid!r}, "
                    f"gave {role} = [{start}, {end})"
                )
        first, second = (RoleArgument(role, *found[role]) for role in roles)
        verb = found["V"][0] if "V" in found else None
        yield Candidate((first, second), verb, None, (0, len(sentence.words)), "unknown")


def _framed(sentence: Sentence, roles: tuple[str, str]) -> Iterator[Candidate | Skipped | Dropped]:
    """Match frames with the clauses of a tree, which knows which argument is the subject and where a by stays out."""
    if sentence.frames is None:
        yield Dropped("no frames")
        return
    has_tree = sentence.dependencies is not None or sentence.constituents is not None
    read = dependency_clauses if sentence.dependencies is not None else constituent_clauses
    clauses = list(read(sentence))
    for frame in sentence.frames:
        found = {role: [a for a in frame.arguments if a.role == role] for role in roles}
        if any(len(arguments) != 1 for arguments in found.values()):
            yield Skipped("a role has no argument, or several")
            continue
        if any(a.role in {f"{kind}-{role}" for kind in "CR" for role in roles} for a in frame.arguments):
            yield Skipped("an argument is in pieces, or taken up by a relative pronoun")
            continue
        lemma = frame.roleset.split(".")[0]
        spans = [(found[role][0].start, found[role][0].end) for role in roles]
        if not has_tree:
            first, second = (RoleArgument(role, *where) for role, where in zip(roles, spans, strict=True))
            extent = (0, len(sentence.words))
            yield Candidate((first, second), frame.verb[0], None, extent, "unknown", lemma)
            continue
        clause = next((c for c in clauses if frame.verb[0] <= c.verb < frame.verb[1]), None)
        if clause is None:
            yield Skipped("the predicate is no verb with a subject of its own")
            continue
        slots = [_slot_at(clause, where) for where in spans]
        if slots[0] is None or slots[1] is None:
            yield Skipped("an argument is no place of the verb's own clause")
            continue
        yield _candidate(clause, roles, (slots[0], slots[1]), lemma)


def _slot_at(clause: Clause, where: tuple[int, int]) -> Slot | None:
    return next((slot for slot in clause.slots if where in ((slot.start, slot.end), slot.outer)), None)


def _candidate(clause: Clause, roles: tuple[str, str], slots: tuple[Slot, Slot], lemma: str) -> Candidate | Skipped:
    if any(slot.function == "indirect object" and slot not in slots for slot in clause.slots):
        return Skipped("an indirect object stands beside the arguments")  # "a meal makes her husband a woman"
    first, second = (
        RoleArgument(role, slot.start, slot.end, slot.function == "subject", "object" in slot.function)
        for role, slot in zip(roles, slots, strict=True)
    )
    voice = "passive" if clause.passive else "active"
    return Candidate(
        (first, second), clause.verb, clause.finite, clause.extent, voice, lemma, clause.shared, checked=True
    )


def _by_rule(sentence: Sentence, clauses: Iterable[Clause]) -> Iterator[Candidate | Skipped]:
    """Take subject and object for ARG0 and ARG1; in a passive, the agent and the subject."""
    for clause in clauses:
        subject = clause.slot("subject")
        if clause.passive:
            agents = [slot for slot in clause.slots if slot.function == "oblique" and _is_agent(sentence, slot)]
            agent, patient = (agents[0] if len(agents) == 1 else None), subject
        else:
            agent, patient = subject, clause.slot("object")
        if agent is None or patient is None:
            yield Skipped("a role has no argument, or several")
        else:
            yield _candidate(clause, ("ARG0", "ARG1"), (agent, patient), "")


def _is_agent(sentence: Sentence, slot: Slot) -> bool:
    layer = sentence.dependencies
    if layer is not None:
        start, end = slot.outer
        relations = {layer.relations[i] for i in range(start, end)}
        if relations & {"obl:agent", "agent"}:
            return True
    return sentence.language == "en" and sentence.words[slot.outer[0]].lower() == "by"
