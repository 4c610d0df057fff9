"""A model with what its report reads, and the results that several of its parts share."""

import copy
import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from pelocality import models
from pelocality.encodings import NoEncoding
from pelocality.reports.contents import CHANCE, MODEL
from pelocality.reports.inputs import text_batches

SHORT, FEW = 24, 8  # tokens and texts of the influence, whose cost grows with the square of the tokens

_Result = TypeVar("_Result")


@dataclass
class Subject:
    """A model with what its report reads, and the results that several parts share.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer, or None.
        lines: Texts as strings; None where batches were given.
        batches: Texts as batches; None without a tokenizer.
        length: Positions of words and texts.
        words: The number of words.
        seed: Seed of all draws.
        with_twins: Whether numbers stand beside those of its `twins`.
        within: A with-statement in which the model runs.
        missing: The reason why the model has no twin of a name.
    """

    model: models.SequenceModel
    tokenizer: Any
    lines: Any
    batches: list[Any] | None
    length: int
    words: int
    seed: int
    with_twins: bool = True
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    missing: dict[str, str] = field(default_factory=dict)

    @cached_property
    def twins(self) -> dict[str, "Subject"]:
        """The same architecture with random weights, and this model without positions, by these names."""
        twins = {}
        ways = {"with random weights": self._with_random_weights, "without positions": self._without_positions}
        for name, make in ways.items() if self.with_twins else ():
            try:
                twins[name] = make()
            except Exception as error:  # a configuration may not be enough to build a model, in any way
                self.missing[name] = reason_of(error)
        return twins

    def _with_random_weights(self) -> "Subject":
        model = self.model.with_random_weights(self.seed)
        if self.model.encodings:
            before: Any = models.attached(self.model.given)
            models.attach(model.with_head, before.encodings, position_embeddings=before.position_embeddings)
        return self._twin(model)

    def _without_positions(self) -> "Subject":
        if self.model.config is None:
            raise ValueError(f"which parts of {self.model} hold positions is not known")
        without = functools.partial(models.attach, self.model.with_head, NoEncoding())
        with without():  # the proof, once
            model = copy.copy(self.model)
        model.axes = None
        return self._twin(model, within=functools.partial(without, prove=False))

    def _twin(self, model: models.SequenceModel, **changes: Any) -> "Subject":
        """Return another model that is measured like this one."""
        twin = replace(self, model=model, with_twins=False, **changes)
        if supported(lambda: self.prefix):
            vars(twin).update(trial=self.trial, prefix=self.prefix)
        return twin

    def by_model(self, measure: Callable[[Any], Any], chance: Any = None) -> dict[str, Any]:
        """Return what a function measures of this model, of chance and of the twins, where they have it."""
        measured = {MODEL: measure(self)} | ({} if chance is None else {CHANCE: chance})
        for name, twin in {CHANCE: _Chance(self), **self.twins}.items():
            with suppress(AttributeError, TypeError, ValueError):  # some results have no chance level
                measured[name] = measure(twin)
        return measured

    def beside(self, numbers: Callable[[Any], dict[str, Any]], **chance: float) -> dict[str, dict[str, float]]:
        """Return numbers by name, each by model; chance levels are given where results have none."""
        by_model = self.by_model(numbers, chance)
        names: dict[str, Any] = by_model[MODEL]
        return {name: {model: float(each[name]) for model, each in by_model.items() if name in each} for name in names}

    @cached_property
    def trial(self) -> models.PositionalAttention:
        """The attention to one word, which says whether the model is causal."""
        return self.run(models.positional_attention, self.tokenizer, self.length, words=1, seed=self.seed)

    @cached_property
    def prefix(self) -> bool:
        """Whether a token goes before the words: without it a causal model of relative positions has equal states."""
        source = self.trial.source
        if not (source.causal and source.equal_states):
            return False
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return (getattr(self.model.config, "bos_token_id", None) if bos is None else bos) is not None

    def run(self, function: Callable[..., _Result], *inputs: Any, **options: Any) -> _Result:
        """Return what a function measures of the model."""
        with self.within():
            return function(self.model, *inputs, **options, progress=False)

    @cached_property
    def repeated(self) -> models.PositionalAttention:
        """The attention to repeated words."""
        return self.run(models.positional_attention, self.tokenizer, **self._options("repeated"))

    @cached_property
    def on_text(self) -> models.TextAverage:
        """The attention on texts, in causal models without their first token."""
        return self.run(models.text_average, self.texts, self.tokenizer, **self._options("on_text"))

    @property
    def averaged(self) -> models.AveragedAttention:
        """The attention on texts, or where the model reads none that on repeated words."""
        return self.on_text if supported(lambda: self.on_text) else self.repeated

    @cached_property
    def influence(self) -> models.AveragedAttention:
        """The influence on a few short texts, or on repeated words, in one direction."""
        short = text_batches(self.lines, self.tokenizer, min(SHORT, self.length), FEW) if self._reads_lines else None
        return self.run(models.influence, short, self.tokenizer, **self._options("influence"))

    @property
    def _reads_lines(self) -> bool:
        return self.lines is not None and self.tokenizer is not None

    @property
    def first(self) -> int:
        """The number of first tokens that are left out of texts."""
        return int(self.trial.source.causal)

    @cached_property
    def texts(self) -> list[Any]:
        """Texts of one length."""
        if self.batches is not None:
            return self.batches
        if not self._reads_lines:
            raise ValueError("texts need a tokenizer, or texts= as batches of what the model reads")
        longest = self.model.longest or 10**9
        return text_batches(self.lines, self.tokenizer, min(self.length + self.first, longest - 4))

    @cached_property
    def classes(self) -> models.HeadClasses:
        """What each head is, of random tokens alone without a tokenizer."""
        texts = self.texts if supported(lambda: self.texts) else None
        return self.run(models.head_classes, self.tokenizer, texts, **self._options("classes"))

    def _options(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of the call that makes `repeated`, `on_text`, `classes` or `influence`."""
        if name == "on_text":  # the positions of texts that are measured include the special tokens around them
            return {"without_first": self.first, "length": self.length + self.first + 2}
        if name == "influence":
            length = self.length if self.model.content else min(SHORT, self.length)
            return ({} if self._reads_lines else {"length": length, "words": 2}) | {"directions": 1, "seed": self.seed}
        options = {"length": self.length, "seed": self.seed}
        if name == "classes":
            return options | {"sequences": 8, "permutations": 2}
        return options | {"words": self.words} | ({"prefix": True} if self.prefix else {})

    def code(self, name: str) -> str:
        """Return the line that makes `repeated`, `on_text`, `classes` or `influence`."""
        short = f", text_batches(lines, tokenizer, {min(SHORT, self.length)}, {FEW}), tokenizer=tokenizer"
        calls = {
            "influence": f"influence(model{short if self._reads_lines else ''}",
            "repeated": "positional_attention(model, tokenizer",
            "on_text": "text_average(model, texts, tokenizer=tokenizer",
            "classes": f"head_classes(model, tokenizer{', texts' if supported(lambda: self.texts) else ''}",
        }
        return ", ".join([calls[name], *(f"{key}={value!r}" for key, value in self._options(name).items())]) + ")"


class _Chance:
    """What chance gives, in the place of each result of a subject that has it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject, name).chance


def supported(result: Callable[[], Any]) -> bool:
    """Return whether the model, or its tokenizer, supports a result."""
    try:
        result()
    except (TypeError, ValueError):
        return False
    return True


def reason_of(error: Exception) -> str:
    """Return why a model does not support something, without the advice to load another one."""
    return re.split("; (?:known:|load it with)", str(error).split("\n")[0])[0].rstrip(".")
