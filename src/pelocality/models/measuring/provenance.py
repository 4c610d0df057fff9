"""The model, words and versions behind a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import pelocality
from pelocality.models.measuring.samples import hides_future
from pelocality.models.sequence_model import SequenceModel

_FEW = 10  # texts of which a head that ignores position has a share below -0.1
_SINK = 0.3  # attention above uniform, from which on a first token is a sink


@dataclass(frozen=True)
class Provenance:
    """The model, words and versions behind a result.

    Attributes:
        model: Name or path the model was loaded from, or its class.
        model_class: Class of the model that ran.
        model_type: ``config.model_type``.
        dtype: Precision the model ran in.
        special_tokens: Of words, whether special tokens were fed around them (the matrices never contain them); of
            texts, whether they are counted.
        causal: Whether no query attends to later keys.
        versions: Of pelocality, torch and transformers.
        encoding: The encoding that was attached to the model while it ran, with ``position_embeddings``; None where
            there was none.
        words: The words that were repeated, as text.
        word_ids: Their token ids.
        seed: Seed they were drawn with; None for given words.
        prefix: The tokens fed before the words, as text (the matrices never contain them).
        equal_states: Whether the repeated word held the same hidden state at every position, in every layer.
        texts: Number of texts, each of several equal ones once.
        repeated: Number of texts that are equal to another one, and do not count.
        left_out: Of texts that were cut at ``length`` positions, how many of these are not measured, because they are
            special tokens or ``without_first`` leaves them out.
    """

    model: str
    model_class: str
    model_type: str
    dtype: str
    special_tokens: bool
    causal: bool
    versions: Mapping[str, str]
    encoding: str | None = None
    words: tuple[str, ...] = ()
    word_ids: tuple[int, ...] = ()
    seed: int | None = None
    prefix: tuple[str, ...] = ()
    equal_states: bool = False
    texts: int = 0
    repeated: int = 0
    left_out: int = 0


def provenance(model: SequenceModel, visible: Tensor, **more: Any) -> Provenance:
    """Return the provenance of a result of a model."""
    return Provenance(
        model=model.name,
        model_class=type(model.module).__name__,
        model_type=getattr(model.config, "model_type", ""),
        dtype=str(model.dtype).removeprefix("torch."),
        causal=hides_future(visible),
        versions={module.__name__: module.__version__ for module in (pelocality, torch, transformers)},
        encoding=model.encoding,
        **more,
    )


def over_texts(source: Provenance) -> str:
    """Return what a result over texts was computed from, for its headline."""
    return f"{source.texts} texts, special tokens {'counted' if source.special_tokens else 'left out'}"


def share_notes(source: Provenance, layers: Sequence[int], sink: Tensor) -> list[str]:
    """Return cautions for shares of texts, one sentence each.

    Args:
        source: The provenance of the result.
        layers: The layers of the result.
        sink: What the first token gets above uniform attention, (layer, head), the mean over later queries.
    """
    notes, n = [], source.texts
    if source.repeated:
        notes.append(f"{source.repeated} texts are equal to one of the {n} and do not count")
    if n == 1:
        notes.append("one text has no position share (NaN), which compares texts: pass more")
    elif n <= _FEW:
        notes.append(
            f"of {n} texts, a head that ignores position has a share of {-1 / (n - 1):.2f} on average: pass more"
        )
    found = [str(layer) for layer, heads in zip(layers, sink, strict=True) if bool((heads > _SINK).any())]
    if found:
        most = f"up to {float(sink.nan_to_num().max()):.2f} more attention than uniform attention gives it"
        where = f"in layers {', '.join(found)}"
        notes.append(f"the first token gets {most} {where}, which counts as position: measure with without_first=1")
    return notes


def other_layers_note(others: Mapping[int, str]) -> tuple[str, ...]:
    """Return a note that says what the layers without attention over the tokens alone are, if there are any."""
    kinds = ", ".join(f"{layer} {kind}" for layer, kind in others.items())
    return (f"layers that are not measured: {kinds}",) if others else ()
