"""Semantic role swaps: two arguments of a verb change places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import datasets

from pelocality._checks import count
from pelocality.corpora import Dropped, Pair, Sentence
from pelocality.probes._build import Item, Row, Skipped, build, generator_for
from pelocality.probes._rows import (
    Spans,
    check_choice,
    check_names,
    features_of,
    has_label,
    row_of,
    span_entry,
    texts_of,
    uid_of,
)
from pelocality.probes.role_swap.agreement import Agreement, Replacement
from pelocality.probes.role_swap.candidates import Candidate, Source, find_candidates
from pelocality.probes.role_swap.english import SYMMETRIC_VERBS
from pelocality.probes.role_swap.exchange import exchange

LabelPolicy = str | Callable[[str], str | None]
_LABELS = ("contradiction", "neutral", "not entailment")


def semantic_role_swap(
    pairs_or_sentences: Iterable[Item],
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

    Shuffle-SR of Chen et al. (2023, section 5.4); how they found roles is not known. Only swaps that change who did
    what to whom and leave a grammatical sentence are made: copulas, symmetric verbs (*meet*, *marry*), reflexives and
    reciprocals, arguments that overlap, that are not plain noun phrases, or whose case endings would reveal the
    swap are skipped and counted by reason in ``probe_info``. In English, pronouns change case (*he*, *him*), the
    capital of the first word stays with the position, and in a passive *by* keeps its place.

    Args:
        pairs_or_sentences: A corpus, or any iterable of pairs or of sentences.
        roles: The two roles to exchange.
        source: ``"frames"``: the sentence's frames; if there is a tree, both arguments must be slots of the verb's own
            clause in it. ``"dependencies"``: subject and object, or passive subject and agent, of Universal
            Dependencies, in any order and language. ``"constituents"``: the same by a rule over English phrase
            structure, which ``docs/probes.md`` explains. Or a function from a sentence to ``{role: (start, end)}``
            mappings over its words, with ``"V"`` for the verb where it is known.
        label_policy: The label of a perturbed pair: ``"contradiction"``, ``"neutral"``, ``"not entailment"``,
            or a function from the old label to the new, None to leave the pair out. Published data sets
            disagree, so there is no default where pairs have labels. Only a swap in an entailed hypothesis
            certainly changes the label: ``labels=("entailment",)`` keeps those.
        side: The side of a pair to perturb. A sentence becomes a pair itself: premise the sentence,
            hypothesis its swap, original hypothesis the sentence, original label ``"entailment"``.
        spans: ``"one"`` draws one usable predicate of a sentence, ``"all"`` gives a row for each.
        agreement: If the verb would not agree with its new subject, ``"skip"`` skips the swap, ``"reinflect"``
            changes the verb (English; needs lemminflect), ``"ignore"`` keeps it.
        symmetric_verbs: Base forms of verbs for which the swapped sentence means the same.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seed of the choice of the predicate, together with the item's text (for a pair, both texts) and
            nothing else.
        num_proc: Number of processes that share the work.
        progress: Whether to show progress bars.

    Returns:
        A dataset with the columns of ``constituency_shuffling`` over pairs; ``category`` is the voice, the
        category of a span its role (``"agreement"`` for a reinflected verb), ``size`` the words of both
        arguments.

    Raises:
        TypeError: An argument has the wrong type, or ``label_policy`` returns something other than a string or None.
        ValueError: An argument has an invalid value, or labelled pairs come without ``label_policy``.

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
        roles,
        source,
        label_policy,
        side,
        spans,
        agreement,
        frozenset(symmetric_verbs),
        check_names("labels", labels),
        seed,
    )
    return build("semantic_role_swap", pairs_or_sentences, perturb, num_proc, progress, features_of(Pair))


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
            check_choice("source", self.source, ("frames", "dependencies", "constituents"))
        check_choice("side", self.side, ("premise", "hypothesis"))
        check_choice("spans", self.spans, ("one", "all"))
        check_choice("agreement", self.agreement, ("skip", "reinflect", "ignore"))
        object.__setattr__(self, "seed", count("seed", self.seed, 0, most=2**63 - 1))
        if isinstance(self.roles, str) or len(self.roles) != 2 or self.roles[0] == self.roles[1]:
            raise ValueError(f"roles must be two different roles, such as ('ARG0', 'ARG1'), got {self.roles!r}")
        if self.source in ("dependencies", "constituents") and set(self.roles) != {"ARG0", "ARG1"}:
            raise ValueError(
                f"the rule over {self.source} knows ARG0 and ARG1 only, got {self.roles!r}; use source='frames'"
            )
        if self.label_policy is not None and not callable(self.label_policy):
            check_choice("label_policy", self.label_policy, _LABELS)

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of the builder, functions by their names."""
        return vars(self) | {
            "source": _name_of_function(self.source),
            "label_policy": _name_of_function(self.label_policy),
            "symmetric_verbs": sorted(self.symmetric_verbs),
        }

    def __call__(self, item: Item) -> Iterator[Row | Dropped | Skipped]:
        """Yield the rows of an item: find candidates, exchange those that can be, draw one or take all."""
        side, texts = self.side, texts_of(item)
        if isinstance(item, Sentence):
            item = Pair(item, item, "entailment" if self.label_policy is not None else None, uid_of(item))
            side = "hypothesis"
        if not has_label(item.label, self.labels):
            yield Dropped("label not in labels")
            return
        label = self._label(item.label)
        if callable(self.label_policy) and label is None:
            yield Dropped("label_policy returned None")
            return
        sentence: Sentence = getattr(item, side)
        usable: list[tuple[Candidate, list[Replacement]]] = []
        for candidate in find_candidates(sentence, self.roles, self.source):
            if not isinstance(candidate, Candidate):
                yield candidate
                continue
            swapped = exchange(sentence, candidate, self.agreement, self.symmetric_verbs)
            if isinstance(swapped, Skipped):
                yield swapped
            else:
                usable.append((candidate, swapped))
        if self.spans == "one" and usable:
            rng = generator_for(self.seed, *texts, side, "choose")
            usable = [usable[rng.integers(len(usable))]]
        for candidate, replacements in usable:
            yield self._row(item, side, candidate, replacements, label)

    def _label(self, label: str | None) -> str | None:
        """Return the label of a perturbed pair."""
        if self.label_policy is None and label is not None:
            raise ValueError(
                "label_policy must give the label of perturbed pairs: 'contradiction', 'neutral', 'not entailment' or "
                "a function from the old label to the new"
            )
        new = self.label_policy(label or "") if callable(self.label_policy) else self.label_policy
        if new is not None and not isinstance(new, str):
            raise TypeError(f"label_policy must return a label's name or None, returned {new!r} for {label!r}")
        return new

    def _row(
        self, item: Pair, side: str, candidate: Candidate, replacements: list[Replacement], label: str | None
    ) -> Row:
        sentence: Sentence = getattr(item, side)
        text = sentence.replaced([(start, end, new) for start, end, new, _ in replacements])
        spans = [span_entry(sentence, side, role, start, end, new) for start, end, new, role in replacements]
        row = row_of(item, {side: text}, spans, label)
        if self.source != "frames":
            how = _name_of_function(self.source) if callable(self.source) else f"rule over {self.source}"
            row["provenance"] += f"; roles: {how}"
        size = sum(
            any(slot.start <= start and end <= slot.end for slot in candidate.arguments)
            for start, end in sentence.surface_tokens
        )
        return {**row, "size": size, "category": candidate.clause.voice, "seed": self.seed}


def _name_of_function(value: object) -> object:
    return getattr(value, "__name__", repr(value)) if callable(value) else value
