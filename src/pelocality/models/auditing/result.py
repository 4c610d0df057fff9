"""What an audit found: the positions of each layer, declared and measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pelocality._display import DisplayMixin
from pelocality.models.sequence_model import label


@dataclass(frozen=True)
class LayerAudit:
    """The positions of one layer, declared and measured.

    Attributes:
        layer: Its number in the model.
        positions: (declared, measured), in words; a layer without attention is named as what it is.
        window: (declared, measured): the number of keys up to the query, or the distance to either side.
        causal: (declared, measured); None where nothing is declared, or for a layer without attention.
        first_key: The share of attention that goes to the first key, over heads and later queries.
        sinks: The share that goes to learned sinks, None where there are none.
        mismatches: What differs, in words.
    """

    layer: int
    positions: tuple[str, str]
    window: tuple[str, str] = ("", "")
    causal: tuple[bool | None, bool | None] = (None, None)
    first_key: float | None = None
    sinks: float | None = None
    mismatches: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Audit(DisplayMixin):
    """The positions that a model runs, one row per layer: declared by the configuration against measured.

    Attributes:
        layers: A `LayerAudit` for each layer of the model, those without attention included.
        model: Name of the model.
        length: The number of positions over which windows were measured.
        encoding: The encoding that was attached to the model while it ran, None where there was none.
        cautions: What could not be measured, and what to know of it.
    """

    layers: tuple[LayerAudit, ...]
    model: str
    length: int
    encoding: str | None
    cautions: tuple[str, ...]

    @property
    def mismatches(self) -> tuple[str, ...]:
        """What differs between declared and measured, such as "layer 3: declared window 8, measured 9"."""
        layers: dict[str, list[int]] = {}
        for row in self.layers:
            for mismatch in row.mismatches:
                layers.setdefault(mismatch, []).append(row.layer)
        return tuple(f"{_layers_text(numbers)}: {mismatch}" for mismatch, numbers in layers.items())

    def to_frame(self) -> pd.DataFrame:
        """Return the audit as a table.

        Returns:
            A DataFrame with one row per layer: ``layer``; ``positions``, ``window`` and ``causal``, each ``_declared``
            and ``_measured``; ``first_key`` and ``sinks``, in [0, 1]; ``mismatches``, separated by semicolons.

        Examples:
            >>> from pelocality import audit
            >>> from transformers import GPT2Config, GPT2Model
            >>> frame = audit(GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=99))).to_frame()
            >>> frame[["layer", "positions_measured", "causal_measured"]].to_numpy().tolist()
            [[0, 'learned', True], [1, 'learned', True]]
        """
        columns: dict[str, Any] = {"layer": [row.layer for row in self.layers]}
        for name in ("positions", "window", "causal"):
            declared, measured = zip(*(getattr(row, name) for row in self.layers), strict=True)
            columns |= {f"{name}_declared": declared, f"{name}_measured": measured}
        columns |= {name: [getattr(row, name) for row in self.layers] for name in ("first_key", "sinks")}
        return pd.DataFrame(columns | {"mismatches": ["; ".join(row.mismatches) for row in self.layers]})

    def _headline(self) -> str:
        number = len(self.mismatches)
        verdict = f"{number} mismatch{'es' if number > 1 else ''}" if number else "as declared"
        return f"{label(self.model, self.encoding)}: {len(self.layers)} layers, {verdict}"

    def _table(self) -> pd.DataFrame:
        frame = self.to_frame()
        shown = frame.drop(columns=["positions_declared", "window_declared", "causal_declared"])
        shown = shown.rename(columns=lambda name: name.removesuffix("_measured")).dropna(axis=1, how="all")
        shown["causal"] = frame.causal_measured.map({True: "yes", False: "no"}).fillna("")
        declared = frame.positions_declared.map({"undeclared": "undeclared"}).fillna("yes")
        declared = declared.where(frame.causal_measured.notna(), "").mask(frame.mismatches != "", "differs")
        return shown.drop(columns="mismatches").assign(declared=declared)

    @property
    def notes(self) -> tuple[str, ...]:
        """The mismatches, then the cautions."""
        return (*self.mismatches, *self.cautions)


@dataclass(frozen=True, eq=False, repr=False)
class AuditComparison(DisplayMixin):
    """Two models side by side: where their positions differ, and by how much attention changes.

    Attributes:
        audits: The `Audit` of each.
        distance: For each layer with attention, the smallest distance between query and key at which the layer's
            positions add something else in the two models; None where they add the same.
        length: The number of positions of the run that showed it: angles may depend on the length of the text.
        change: For each layer with attention, by how much attention on the same tokens differs: the total variation
            between the two models, 0 to 1, mean over heads and queries. It includes what layers below changed.
        layers: The numbers of these layers.
        input_position: The first position at which the tables at the input differ, the length of the shorter one if
            they are equal up to it; None where they do not differ.
    """

    audits: tuple[Audit, Audit]
    distance: tuple[int | None, ...]
    length: tuple[int | None, ...]
    change: tuple[float, ...]
    layers: tuple[int, ...]
    input_position: int | None

    @property
    def input_differs(self) -> bool:
        """Whether the tables of positions at the input differ."""
        return self.input_position is not None

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with one row per layer with attention."""
        both = [{row.layer: row.positions[1] for row in audit.layers} for audit in self.audits]
        frame = pd.DataFrame({"layer": self.layers})
        for letter, positions in zip("ab", both, strict=True):
            frame[f"positions_{letter}"] = frame["layer"].map(positions)
        frame["differs_from_distance"] = pd.array(self.distance, dtype="Int64")
        frame["differs_in_length"] = pd.array(self.length, dtype="Int64")
        frame["attention_change"] = self.change
        return frame

    def _headline(self) -> str:
        names = " and ".join(label(audit.model, audit.encoding) for audit in self.audits)
        if self.input_differs:
            return f"{names}: they differ at the input, from position {self.input_position} on"
        for layer, far, length in zip(self.layers, self.distance, self.length, strict=True):
            if far is not None:
                where = f"first in layer {layer}, at distances of {far} and more in {length} positions"
                return f"{names}: they differ {where}"
        return f"{names}: the same positions in every layer"

    _table = to_frame

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of both audits, each with its side."""
        return tuple(f"{side}: {note}" for side, each in zip("ab", self.audits, strict=True) for note in each.notes)


def _layers_text(numbers: Sequence[int]) -> str:
    """Return "layer 3", "layers 0-5" or "layers 1, 3"."""
    first, last = numbers[0], numbers[-1]
    every = f"{first}-{last}" if list(numbers) == list(range(first, last + 1)) else ", ".join(map(str, numbers))
    return f"layer {first}" if first == last else f"layers {every}"
