"""A model with what its report reads, and the results that several of its parts share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pelocality import models
from pelocality.reports.inputs import text_batches


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
    """

    model: models.SequenceModel
    tokenizer: Any
    lines: list[str] | None
    batches: list[Any] | None
    length: int
    words: int
    seed: int

    @cached_property
    def trial(self) -> models.PositionalAttention:
        """The attention to one word, which says whether the model is causal."""
        options: dict[str, Any] = {"length": self.length, "words": 1, "seed": self.seed}
        return models.positional_attention(self.model, self.tokenizer, **options, progress=False)

    @cached_property
    def prefix(self) -> bool:
        """Whether a token goes before the words: without it a causal model of relative positions has equal states."""
        source = self.trial.source
        if not (source.causal and source.equal_states):
            return False
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return (getattr(self.model.config, "bos_token_id", None) if bos is None else bos) is not None

    @cached_property
    def repeated(self) -> models.PositionalAttention:
        """The attention to repeated words."""
        return models.positional_attention(self.model, self.tokenizer, **self._options("repeated"), progress=False)

    @cached_property
    def on_text(self) -> models.TextAverage:
        """The attention on texts, in causal models without their first token."""
        options = self._options("on_text")
        return models.text_average(self.model, self.texts, tokenizer=self.tokenizer, **options, progress=False)

    @property
    def first(self) -> int:
        """The number of first tokens that are left out of texts."""
        return int(self.trial.source.causal)

    @cached_property
    def texts(self) -> list[Any]:
        """Texts of one length."""
        if self.batches is not None:
            return self.batches
        if self.lines is None or self.tokenizer is None:
            raise ValueError("texts need a tokenizer, or texts= as batches of what the model reads")
        longest = self.model.longest or 10**9
        return text_batches(self.lines, self.tokenizer, min(self.length + self.first, longest - 4))

    @cached_property
    def classes(self) -> models.HeadClasses:
        """What each head is, of random tokens alone without a tokenizer."""
        texts = self.texts if supported(lambda: self.texts) else None
        return models.head_classes(self.model, self.tokenizer, texts, **self._options("classes"), progress=False)

    def _options(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of the call that makes `repeated`, `on_text` or `classes`."""
        if name == "on_text":  # the positions of texts that are measured include the special tokens around them
            return {"without_first": self.first, "length": self.length + self.first + 2}
        options = {"length": self.length, "seed": self.seed}
        if name == "classes":
            return options | {"sequences": 8, "permutations": 2}
        return options | {"words": self.words} | ({"prefix": True} if self.prefix else {})

    def code(self, name: str) -> str:
        """Return the line that makes `repeated`, `on_text` or `classes`."""
        calls = {
            "repeated": "positional_attention(model, tokenizer",
            "on_text": "text_average(model, texts, tokenizer=tokenizer",
            "classes": f"head_classes(model, tokenizer{', texts' if supported(lambda: self.texts) else ''}",
        }
        return ", ".join([calls[name], *(f"{key}={value!r}" for key, value in self._options(name).items())]) + ")"


def supported(result: Callable[[], Any]) -> bool:
    """Return whether the model, or its tokenizer, supports a result."""
    try:
        result()
    except (TypeError, ValueError):
        return False
    return True
