"""The model, words and versions behind a result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import pelocality
from pelocality.models.layers import AttentionLayers
from pelocality.models.sequence_model import SequenceModel


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
        seed: Seed they were drawn with, and the directions of an influence; None for given words.
        prefix: The tokens fed before the words, as text (the matrices never contain them).
        equal_states: Whether the repeated word held the same hidden state at every position, in every layer.
        texts: Number of texts, each of several equal ones once.
        repeated: Number of texts that are equal to another one, and do not count.
        left_out: Of texts that were cut at ``length`` positions, how many of these are not measured, because they are
            special tokens or ``without_first`` leaves them out.
        layouts: Number of ways in which the texts lie on several coordinates; 1 also where all begin as the longest.
        directions: Of an influence, the number of random directions; 0 of attention.
        precision: Precision in which the weights of attention were computed, by whose rounding `symmetry` judges them.
        cautions: What could not be proved of the attention that is measured, and which attention is left out.
        residual: Of a rollout, the weight of the residual connections; None of attention.
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
    layouts: int = 1
    directions: int = 0
    residual: float | None = None
    precision: str = ""
    cautions: tuple[str, ...] = ()


def provenance(model: SequenceModel, attending: AttentionLayers, *, causal: bool, **more: Any) -> Provenance:
    """Return the provenance of a result of a model.

    Args:
        model: The model.
        attending: Its layers, with the precision of their weights.
        causal: Whether no query attends to later keys.
        more: Other attributes of `Provenance`.
    """
    directions = getattr(model, "directions", 0)  # only an influence has directions
    if directions and more.get("seed") is None:
        more["seed"] = getattr(model, "seed", None)
    return Provenance(
        model=model.name,
        model_class=type(model.module).__name__,
        model_type=getattr(model.config, "model_type", ""),
        dtype=str(model.dtype).removeprefix("torch."),
        precision=str(attending.dtype).removeprefix("torch."),
        causal=causal,
        versions={module.__name__: module.__version__ for module in (pelocality, torch, transformers)},
        encoding=model.encoding,
        directions=directions,
        cautions=attending.cautions,
        **more,
    )
