"""Mean attention over words or texts: matrices, metrics, intervals and provenance."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pelocality import metrics as _metrics
from pelocality._checks import check_choice
from pelocality._display import DisplayMixin
from pelocality.metrics import Measurement
from pelocality.metrics.published import measurement
from pelocality.models.measuring.provenance import Provenance
from pelocality.models.measuring.samples import PUBLISHED, causal_metrics
from pelocality.models.sequence_model import label
from pelocality.positions import Positions
from pelocality.statistics import t_interval

_UNIFORM = 0.05  # a head closer to uniform attention than this, in total variation, counts as uniform
_NO_POSITIONS = 1e-6  # a layer closer than this adds no positions


class Averages(DisplayMixin):
    """What the results of words or texts have in common: the metrics of each of them, and tables."""

    per_sample: Mapping[str, Tensor]
    layers: tuple[int, ...]
    source: Provenance
    other_layers: Mapping[int, str]
    positions: Positions | None

    @property
    def length(self) -> int:
        """The number of positions n, of the longest text."""
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """The number of heads of each layer."""
        raise NotImplementedError

    @property
    def visible_keys(self) -> tuple[int, ...]:
        """The most keys that any query sees, layer by layer: n, or the size of a window or chunk."""
        raise NotImplementedError

    @property
    def mean_of_metric(self) -> Measurement:
        """The published metrics of each matrix, averaged: each (layer, head); a ValueError for a rollout."""
        return Measurement(**{name: self._samples_of(name).mean(0) for name in PUBLISHED})

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each; usually empty."""
        notes = []
        if self.other_layers:
            others = ", ".join(f"{layer} {what}" for layer, what in self.other_layers.items())
            notes.append(f"layers that are not measured: {others}")
        notes += self.source.cautions
        if self.positions is not None:
            notes.append(f"distance is by positions of {self.positions.dimensions} coordinates, not by order")
        if self.source.layouts > 1:
            notes.append(f"texts of {self.source.layouts} layouts, each measured on its own: there is no mean matrix")
        if self.source.causal:
            notes.append("causal: symmetry is meaningless on one-sided attention and not shown")
        if "learned_sink" in self.per_sample:
            notes.append("learned sinks: rows are renormalised without them, except of names in _with_sink")
        if self.source.repeated:
            notes.append(f"{self.source.repeated} texts are equal to one of the {self.source.texts} and do not count")
        if self.source.equal_states and not self.source.directions:
            notes.append("relative positions alone, so each layer shows only those it adds itself; use prefix=True")
        if self._lengths() != str(self.length):
            notes.append(f"texts have {self._lengths()} tokens, with which most metrics change: read adjusted_locality")
        return tuple(notes)

    def interval(self, metric: str = "locality", confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the t interval over words or texts for the mean of a metric.

        It covers the choice of words or texts, not the variation between training runs.

        Args:
            metric: A name in ``per_sample``, such as "locality".
            confidence: Coverage, between 0 and 1.

        Returns:
            The lower and the upper end, each (layer, head); NaN for a single sample.

        Raises:
            ValueError: An unknown metric or a confidence outside (0, 1).
        """
        return interval_of(self._samples_of(metric), confidence)

    def _samples_of(self, metric: str) -> Tensor:
        """Return the numbers of each sample, (sample, layer, head), which a rollout does not have."""
        if not self.per_sample:
            raise ValueError("a rollout has no numbers of each text, and so no intervals; read metric_of_mean")
        check_choice("metric", metric, self.per_sample)
        return self.per_sample[metric]

    def to_frame(
        self,
        by: Literal["head", "layer"] = "head",
        confidence: float = 0.95,
        metrics: str | Sequence[str] | Mapping[str, Callable[..., Tensor]] | None = None,
    ) -> pd.DataFrame:
        """Return the numbers as a table.

        Args:
            by: "head" for one row per layer and head, "layer" for the mean over the heads of each layer.
            confidence: Coverage of the intervals.
            metrics: A name or several in ``per_sample`` or of ``pelocality.metrics``, or functions of this result by
                column name. By default, of bidirectional attention, the published metrics; of causal attention, past
                locality, adjusted locality, mean distance, sink rate (the first token's share) and window; and the
                shares of sinks and of tokens that are cut out.

        Returns:
            A DataFrame with ``layer`` (and ``head``), and for each metric the mean over samples, its interval
            (``_low``, ``_high``) and the metric of the mean matrix (``_of_mean``); metrics that are not in
            ``per_sample`` have the last alone. ``visible_keys`` are the most keys that a query sees. Of a `TextAverage`
            also ``position_share``, its ``share``.

        Raises:
            ValueError: Another ``by``, an unknown metric, or one that is not a number per matrix.
        """
        check_choice("by", by, ("head", "layer"))
        index: pd.Index[Any] = pd.Index(self.layers, name="layer")
        if by == "head":
            index = pd.MultiIndex.from_product([self.layers, range(self.heads)], names=["layer", "head"])
        columns: dict[str, Tensor] = {}
        for name in self._shown() if metrics is None else [metrics] if isinstance(metrics, str) else metrics:
            function = metrics[name] if isinstance(metrics, Mapping) else metric_of(name)
            if not isinstance(metrics, Mapping) and name in self.per_sample:
                samples = self.per_sample[name]
                samples = samples.mean(-1, keepdim=True) if by == "layer" else samples
                low, high = interval_of(samples, confidence)
                columns |= {name: samples.mean(0), f"{name}_low": low, f"{name}_high": high}
            elif function is None:
                check_choice("metrics", name, [*self.per_sample, *filter(metric_of, dir(_metrics))])
            if function is not None and (self._has_matrices or name not in self.per_sample):
                columns[f"{name}_of_mean"] = function(self)
                if getattr(columns[f"{name}_of_mean"], "shape", None) != (len(self.layers), self.heads):
                    raise ValueError(f"metrics must give one number per matrix, (layer, head), which {name} does not")
        columns |= self._more_columns()
        if by == "layer":
            columns = {name: each.mean(-1) for name, each in columns.items()}
        frame = pd.DataFrame({name: values.flatten().tolist() for name, values in columns.items()}, index)
        frame["visible_keys"] = [keys for keys in self.visible_keys for _ in range(len(frame) // len(self.layers))]
        return frame.reset_index()

    def _shown(self) -> list[str]:
        """Return the metrics that are shown by default."""
        shares = [name for name in self.per_sample if name == "learned_sink" or "_with_sink" in name]
        if "cut_share" in self.per_sample and bool((self.per_sample["cut_share"] > 1e-3).any()):
            shares.append("cut_share")
        names = causal_metrics(self.positions) if self.source.causal else PUBLISHED
        return [*(name for name in names if not self.per_sample or name in self.per_sample), *shares]

    @property
    def _has_matrices(self) -> bool:
        return isinstance(self, AveragedAttention)

    def _more_columns(self) -> dict[str, Tensor]:
        """Return further columns of the table, (layer, head) each."""
        return {}

    def save(self, path: str | Path) -> None:
        """Write the result to one safetensors file, with the provenance as JSON in its header.

        Args:
            path: The file to write, in a folder that exists, by convention ending in ``.safetensors``.
        """
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors |= {f"per_sample.{name}": values for name, values in self.per_sample.items()}
        header = {
            "layers": self.layers,
            "source": asdict(self.source),
            "other_layers": list(self.other_layers.items()),
            "positions": None if self.positions is None else self.positions.configuration(),
        }
        metadata = {f"pelocality.{type(self).__name__}": json.dumps(header)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a result that ``save`` wrote.

        Args:
            path: The file.

        Returns:
            The same result, on the CPU.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file does not hold a saved result of this class.
            SafetensorError: It is no safetensors file, or not a whole one.
        """
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(f"pelocality.{cls.__name__}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if text is None:
            raise ValueError(f"{path} is not a saved {cls.__name__}; write one with result.save(path)")
        header = json.loads(text)
        source: Any = {k: tuple(each) if isinstance(each, list) else each for k, each in header["source"].items()}
        names = [name for name in tensors if name.startswith("per_sample.")]
        per_sample = {name.removeprefix("per_sample."): tensors.pop(name) for name in names}
        make: Any = cls
        return make(
            per_sample=per_sample,
            layers=tuple(header["layers"]),
            source=Provenance(**source),
            other_layers=dict(header["other_layers"]),
            positions=None if header.get("positions") is None else Positions.from_configuration(header["positions"]),
            **tensors,
        )

    def _samples(self) -> str:
        """Return over what the mean is, for the headline."""
        if self.source.texts:
            special = "counted" if self.source.special_tokens else "left out"
            return f"mean over {self.source.texts} texts, special tokens {special}"
        number, sample = len(self.source.words), "word" if self.source.word_ids else "sample"
        fed = "tokens of the model's own cropped" if "cut_share" in self.per_sample else "no special tokens"
        if self.source.special_tokens:
            fed = "special tokens fed and cropped"
        if self.source.prefix:
            fed = f"token {' '.join(self.source.prefix)} fed before them and cropped"
        return f"mean over {number} {sample}{'s' if number != 1 else ''}, {fed}"

    def _lengths(self) -> str:
        """Return the number of tokens, or those of the shortest and the longest text."""
        counts = getattr(self, "counts", None)
        shortest = self.length if counts is None else int((counts == counts[0]).sum())
        return str(self.length) if shortest == self.length else f"{shortest} to {self.length}"

    def _headline(self) -> str:
        model = label(self.source.model, self.source.encoding)
        what = f"{len(self.layers)} layers x {self.heads} heads"
        if self.source.directions:
            what = f"influence in {len(self.layers)} layers, {self.source.directions} directions"
        return f"{model}: {what}, n = {self._lengths()}, {self._samples()}"

    def _table(self) -> pd.DataFrame:
        frame = self.to_frame("layer")
        names = ["layer", *self._shown(), *self._more_columns()]
        if not self.source.causal and self._has_matrices:
            names.insert(3, "symmetry_of_mean")
        if min(self.visible_keys) < self.length:
            names.append("visible_keys")
        frame = frame[list(dict.fromkeys(name if name in frame else f"{name}_of_mean" for name in names))]
        mean = frame.mean().to_frame().T.astype(object).assign(layer="mean")
        return pd.concat([frame.astype(object), mean], ignore_index=True)


@dataclass(frozen=True, eq=False, repr=False)
class AveragedAttention(Averages):
    """Attention averaged over words or texts, with the metrics of each of them.

    Two averaging orders are in use. ``metric_of_mean`` measures the averaged matrix (Wang et al., 2021, average 300
    words first). ``mean_of_metric`` measures each matrix and averages the numbers; the intervals are for this order.
    Locality is linear, so both orders agree; symmetry is not: a small BERT has 0.82 as the mean over words and 0.83 of
    the mean. Which order Chen et al. (2023) used is not known.

    The metrics accept this result: ``symmetry(result)`` is the metric of the mean.

    Attributes:
        attention: Mean of the attention (layer, head, n, n); rows sum to 1 in every sample, also where a learned sink
            or tokens that are cut out take part of them.
        per_sample: By name, a number of the matrix of each word or text, (sample, layer, head): locality, symmetry and
            relative asymmetry; where no query of any layer sees the future, also the metrics that are shown of causal
            attention, and of texts on a line all of these but past locality in any case; ``cut_share``, the attention
            to tokens that are cut out; in models with learned sinks, ``learned_sink``, their share, and
            ``locality_with_sink`` and so on, measured on the weights as they are, whose rows sum to 1 less that share.
        layers: The model's layer numbers along the first axis.
        source: The `Provenance`.
        visible: The keys that each query may attend to by the model's mask (layer, n, n), None where nothing is
            masked.
        other_layers: What the model's layers without attention are, by number.
        positions: Where the tokens lie, by which the metrics measure distance; None for a line.
    """

    attention: Tensor
    per_sample: Mapping[str, Tensor]
    layers: tuple[int, ...]
    source: Provenance
    visible: Tensor | None = None
    other_layers: Mapping[int, str] = field(default_factory=dict)
    positions: Positions | None = None

    @property
    def length(self) -> int:
        """The number of positions n."""
        return self.attention.shape[-1]

    @property
    def heads(self) -> int:
        """The number of heads of each layer."""
        return self.attention.shape[1]

    @property
    def chance(self) -> Self:
        """What chance gives: uniform attention to the keys that each query sees, as one head and one sample."""
        visible = torch.ones_like(self.attention[:, 0]) if self.visible is None else self.visible
        uniform = (visible / visible.sum(-1, keepdim=True)).to(self.attention)
        result = replace(self, attention=uniform[:, None], per_sample={})
        names = (name for name in self._shown() if name in self.per_sample)
        per_sample = {name: function(result)[None] for name in names if (function := metric_of(name))}
        return replace(result, per_sample=per_sample)

    @property
    def precision(self) -> torch.dtype | None:
        """The precision in which the weights were computed, by whose rounding they are judged; None if not known."""
        return getattr(torch, self.source.precision, None)

    @property
    def profile(self) -> Tensor:
        """The mean attention at each signed distance, `distance_profile`, (layer, head, 2n - 1)."""
        return _metrics.distance_profile(self)

    @cached_property
    def metric_of_mean(self) -> Measurement:
        """The published metrics of the averaged matrix: each (layer, head)."""
        return measurement(self.attention, positions=self.positions)

    @property
    def visible_keys(self) -> tuple[int, ...]:
        """The most keys that any query sees, layer by layer: n, or the size of a window or chunk."""
        if self.visible is None:
            return (self.length,) * len(self.layers)
        return tuple(self.visible.sum(-1).amax(-1).tolist())

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each; usually empty."""
        notes = list(super().notes)
        if self.source.directions:
            own = self.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2))
            notes.append(f"influence over depth: {float(own.min()):.0%} to {float(own.max()):.0%} is a position's own")
        return tuple(notes)


@dataclass(frozen=True, eq=False, repr=False)
class AveragedMetrics(Averages):
    """What ``matrices=False`` measures of words or texts: numbers by distance and of each text, and no n x n matrix.

    Also what is measured of texts of several layouts, of which an entry of a mean matrix has no distance.
    ``attention``, ``visible``, ``share`` and ``metric_of_mean`` need matrices, and raise an error here. In
    ``to_frame()`` there are no columns that end in ``_of_mean``, and no ``position_share``.

    Attributes:
        profile: The mean attention at each signed distance, (layer, head, 2n - 1), over all pairs of tokens of all
            texts; of texts of one length, that of the mean matrix, `distance_profile`. Of several layouts it is empty,
            (layer, head, 0).
        counts: The number of texts or words with each query, (n,).
        most_keys: The most keys that any query sees, (layer,).
        per_sample: As of `AveragedAttention`, with adjusted locality, mean distance, window and ``sink_rate``, the
            first token's share, of bidirectional attention too.
        layers: The model's layer numbers along the first axis.
        source: The `Provenance`.
        other_layers: What the model's layers without attention are, by number.
        positions: None: the tokens lie on a line, or in the layouts that ``source.layouts`` counts.
    """

    profile: Tensor
    counts: Tensor
    most_keys: Tensor
    per_sample: Mapping[str, Tensor]
    layers: tuple[int, ...]
    source: Provenance
    other_layers: Mapping[int, str] = field(default_factory=dict)
    positions: Positions | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("attention", "visible", "share", "metric_of_mean"):
            raise ValueError(f"{name} needs n x n matrices: measure texts of one layout with matrices=True")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def length(self) -> int:
        """The number of positions n, of the longest text."""
        return len(self.counts)

    @property
    def heads(self) -> int:
        """The number of heads of each layer."""
        return self.profile.shape[1]

    @property
    def visible_keys(self) -> tuple[int, ...]:
        """The most keys that any query sees, layer by layer: n, or the size of a window or chunk."""
        return tuple(self.most_keys.tolist())


@dataclass(frozen=True, eq=False, repr=False)
class PositionalAttention(AveragedAttention):
    """Attention to identical words, which depends on position alone; see `AveragedAttention` for what it holds."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each; usually empty."""
        notes = list(super().notes)
        if self.source.equal_states and not self.source.directions:
            far = (self.attention - self.chance.attention).abs().sum(-1).mean(-1).amax(-1) / 2
            distance = list(zip(map(str, self.layers), far.tolist(), strict=True))
            if flat := [layer for layer, far in distance if far < _UNIFORM]:
                notes.append(f"uniform (within {_UNIFORM:.0%}), on text maybe not: layers {', '.join(flat)}")
            if none := [layer for layer, far in distance if far < _NO_POSITIONS]:
                notes.append(f"layers that add no positions: {', '.join(none)}")
        return tuple(notes)


def metric_of(name: str) -> Callable[..., Tensor] | None:
    """Return the function of `pelocality.metrics` of this name that takes attention; None if there is none."""
    function = getattr(_metrics, name, None)
    takes_attention = inspect.isfunction(function) and "attention" in inspect.signature(function).parameters
    return function if takes_attention else None


def interval_of(samples: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Return the ends of the t interval of the mean over the first axis, on the CPU."""
    low, high = t_interval(samples, confidence)
    return torch.from_numpy(low), torch.from_numpy(high)
