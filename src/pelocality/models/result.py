"""The result of identical-word probing: matrices, metrics, intervals and provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pelocality._display import DisplayMixin
from pelocality.metrics import Measurement, measure
from pelocality.models._run import label
from pelocality.statistics import t_interval

Metric = Literal["locality", "symmetry", "relative_asymmetry"]
METRICS: tuple[Metric, ...] = get_args(Metric)
_UNIFORM = 0.05  # a head closer to uniform attention than this, in total variation, counts as uniform


@dataclass(frozen=True)
class Provenance:
    """The model, words and versions behind a result.

    Attributes:
        model: name or path the model was loaded from, or its class.
        model_class: class of the model that ran.
        model_type: ``config.model_type``.
        dtype: precision the model ran in.
        words: the words that were repeated, as text.
        word_ids: their token ids.
        seed: seed they were drawn with; None for given words.
        special_tokens: whether special tokens were fed around the words (the matrices never contain them).
        causal: whether no query attends to later keys.
        versions: of pelocality, torch and transformers.
        encoding: the encoding that was attached to the model while it ran, with ``position_embeddings``; None where
            there was none.
        equal_states: whether the repeated word held the same hidden state at every position, in every layer.
    """

    model: str
    model_class: str
    model_type: str
    dtype: str
    words: tuple[str, ...]
    word_ids: tuple[int, ...]
    seed: int | None
    special_tokens: bool
    causal: bool
    versions: Mapping[str, str]
    encoding: str | None = None
    equal_states: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class PositionalAttention(DisplayMixin):
    """Attention to identical words, which depends on position alone.

    Two averaging orders are in use. ``metric_of_mean`` measures the matrix averaged over words (Wang et al., 2021,
    average 300 words first). ``mean_of_metric`` measures the matrix of each word and averages the numbers; the
    intervals are for this order. Locality is linear, so both orders agree; symmetry is not: a small BERT has 0.82 as
    the mean over words and 0.83 of the mean. Which order Chen et al. (2023) used is not known.

    The metrics accept this result: ``symmetry(result)`` is the metric of the mean.

    Attributes:
        attention: mean over words of the attention (layer, head, n, n), rows sum to 1.
        per_word: locality, symmetry and relative asymmetry of each word's matrix, each (word, layer, head).
        layers: the model's layer numbers along the first axis; layers without attention are not included.
        source: the `Provenance`.
        visible: the keys that each query may attend to by the model's mask (layer, n, n), None where nothing is
            masked.
    """

    attention: Tensor
    per_word: Measurement
    layers: tuple[int, ...]
    source: Provenance
    visible: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of positions n."""
        return self.attention.shape[-1]

    @property
    def mean_of_metric(self) -> Measurement:
        """The metrics of each word's matrix, averaged over words: each (layer, head)."""
        return Measurement(**{name: getattr(self.per_word, name).mean(0) for name in METRICS})

    @cached_property
    def metric_of_mean(self) -> Measurement:
        """The metrics of the matrix averaged over words: each (layer, head)."""
        return measure(self.attention)

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each; usually empty."""
        notes = []
        if self.source.causal:
            notes.append(
                "causal: symmetry is meaningless on one-sided attention (relative asymmetry is 1 by construction)"
            )
        if self.source.equal_states:
            notes.append(
                "relative positions alone: every position holds the same hidden state in every layer, so each layer "
                "shows only the positions it adds itself"
            )
            if uniform := [str(layer) for layer, flat in zip(self.layers, self._uniform(), strict=True) if flat]:
                notes.append(
                    f"uniform over the visible keys (within {_UNIFORM:.0%}): layers {', '.join(uniform)}; their "
                    "attention on text may differ"
                )
        return tuple(notes)

    def _uniform(self) -> list[bool]:
        """Return for each layer whether all its heads are nearly uniform over the visible keys."""
        visible = torch.ones_like(self.attention[:, 0]) if self.visible is None else self.visible
        uniform = visible / visible.sum(-1, keepdim=True)
        distance = (self.attention - uniform[:, None]).abs().sum(-1).mean(-1) / 2  # total variation, (layer, head)
        return (distance.amax(-1) < _UNIFORM).tolist()

    def interval(self, metric: Metric = "locality", confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the t interval over words for the mean of a metric.

        It covers the choice of words, not the variation between training runs.

        Args:
            metric: "locality", "symmetry" or "relative_asymmetry".
            confidence: coverage, between 0 and 1.

        Returns:
            The lower and the upper end, each (layer, head); NaN for a single word.

        Raises:
            ValueError: for an unknown metric or a confidence outside (0, 1).
        """
        if metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
        return _interval(getattr(self.per_word, metric), confidence)

    def to_frame(self, by: Literal["head", "layer"] = "head", confidence: float = 0.95) -> pd.DataFrame:
        """Return the numbers as a table.

        Args:
            by: "head" for one row per layer and head, "layer" for the mean over the heads of each layer.
            confidence: coverage of the intervals over words.

        Returns:
            A DataFrame with ``layer`` (and ``head``), and for each metric the mean over words, its interval
            (``_low``, ``_high``) and the metric of the mean matrix (``_of_mean``).

        Raises:
            ValueError: for another ``by``.
        """
        if by not in ("head", "layer"):
            raise ValueError(f"by must be 'head' or 'layer', got {by!r}")
        index: pd.Index[Any] = pd.Index(self.layers, name="layer")
        if by == "head":
            index = pd.MultiIndex.from_product([self.layers, range(self.attention.shape[1])], names=["layer", "head"])
        columns: dict[str, list[float]] = {}
        for name in METRICS:
            per_word, of_mean = getattr(self.per_word, name), getattr(self.metric_of_mean, name)
            if by == "layer":
                per_word, of_mean = per_word.mean(-1), of_mean.mean(-1)
            low, high = _interval(per_word, confidence)
            columns[name] = per_word.mean(0).flatten().tolist()
            columns[f"{name}_low"], columns[f"{name}_high"] = low.flatten().tolist(), high.flatten().tolist()
            columns[f"{name}_of_mean"] = of_mean.flatten().tolist()
        return pd.DataFrame(columns, index).reset_index()

    def save(self, path: str | Path) -> None:
        """Write the result to one safetensors file, with the provenance as JSON in its header.

        Args:
            path: the file to write, by custom ending in ``.safetensors``.
        """
        tensors = {"attention": self.attention} | ({} if self.visible is None else {"visible": self.visible})
        tensors |= {name: getattr(self.per_word, name) for name in METRICS}
        header = {"layers": self.layers, "source": asdict(self.source)}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"pelocality.PositionalAttention": json.dumps(header)},
        )

    @classmethod
    def load(cls, path: str | Path) -> PositionalAttention:
        """Read a result that ``save`` wrote.

        Args:
            path: the file.

        Returns:
            The same result, on the CPU.

        Raises:
            ValueError: if the file does not hold a saved result.
        """
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("pelocality.PositionalAttention")
            if text is None:
                raise ValueError(f"{path} is not a saved PositionalAttention; write one with result.save(path)")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        header = json.loads(text)
        source = header["source"]
        for field in ("words", "word_ids"):
            source[field] = tuple(source[field])
        return cls(
            attention=tensors["attention"],
            per_word=Measurement(**{name: tensors[name] for name in METRICS}),
            layers=tuple(header["layers"]),
            source=Provenance(**source),
            visible=tensors.get("visible"),
        )

    def _headline(self) -> str:
        heads, words = self.attention.shape[1], len(self.source.words)
        special = "special tokens fed and cropped" if self.source.special_tokens else "no special tokens"
        model = label(self.source.model, self.source.encoding)
        return (
            f"{model}: {len(self.layers)} layers x {heads} heads, n = {self.length}, "
            f"mean over {words} word{'s' if words != 1 else ''}, {special}"
        )

    def _table(self) -> pd.DataFrame:
        frame = self.to_frame("layer")[["layer", "locality", "symmetry", "symmetry_of_mean", "relative_asymmetry"]]
        mean = frame.mean().to_frame().T.astype(object).assign(layer="mean")
        table = pd.concat([frame.astype(object), mean], ignore_index=True)
        return table.rename(columns=lambda name: name.replace("_", " "))

    def _notes(self) -> tuple[str, ...]:
        return self.notes


def _interval(per_word: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Return the ends of the t interval of the mean over the first axis."""
    low, high = t_interval(per_word.double().cpu().numpy(), confidence)
    return torch.from_numpy(low), torch.from_numpy(high)
