"""Identical-word probing: the attention of one repeated word shows positions alone, as its content is constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

import pelocality
from pelocality._checks import count
from pelocality.metrics import Measurement, crop, measure
from pelocality.models._observe import Observed, observe
from pelocality.models._run import (
    attached_encoding,
    check_length,
    device_of,
    eager_attention,
    find_base,
    model_name,
    requested_layers,
    run,
)
from pelocality.models._words import choose_words, special_tokens_around
from pelocality.models.result import METRICS, PositionalAttention, Provenance

_BATCH_BYTES = 2**28  # attention of one batch over all layers; a batch of one word may need more


def positional_attention(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    length: int,
    words: int | Sequence[str | int] = 64,
    seed: int = 0,
    special_tokens: bool = False,
    layers: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> PositionalAttention:
    r"""Return the attention of a model to one repeated word, averaged over words.

    $$A_{ij} = \frac{1}{|W|} \sum_{w \in W} \operatorname{attention}(w, w, \dots, w)_{ij}$$

    Content is constant, so the weights show position alone (Wang et al., ICLR 2021, there for the first layer and 300
    random words). In deeper layers it is still the position of constant content, passed through the layers below. A
    model with relative positions only has equal hidden states at all positions of every layer, so each layer shows only
    the relative positions that it adds itself; the ``notes`` of the result then state it.

    Any transformers model that returns softmax attention over its tokens can be probed: the families of
    ``pelocality.models.families`` are tested, others are checked as they run. The mode, attention implementation and
    weights of the model are restored, also after an interrupt.

    Args:
        model: a transformers model, with or without a head. Of an encoder-decoder model the encoder is probed; pass
            ``model.get_decoder()`` for the other half.
        tokenizer: its tokenizer. Words are then whole words of letters; without one they are any ids but those the
            configuration calls special.
        length: number of positions n, in tokens.
        words: how many words to draw, each word of the vocabulary as likely as any other, or the words themselves
            (text of one token each, or ids). 16 words instead of 256 move single heads of a small BERT by up to 0.04
            in locality.
        seed: seed of the draw.
        special_tokens: feed the tokenizer's special tokens around the words and cut them out of the matrices, rows
            renormalised. By default none are fed. The numbers differ: [CLS] and [SEP] draw attention, and the attention
            between the words is more local.
        layers: layers to return, by their index in the model; by default all that have attention.
        batch_size: words at a time; by default as many as fit into 256 MiB of attention weights. Memory does not
            grow with the number of words.
        progress: show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `PositionalAttention`: the mean matrix (layer, head, n, n) with rows that sum to 1, the metrics of each
        word, and their provenance. On the model's device, float32 (float64 for a float64 model).

    Raises:
        TypeError: for something that is not a transformers model, or arguments of the wrong type.
        ValueError: for a model that cannot be probed (the message says why), a length beyond its positions, words
            that are not one token, or unknown layers.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> _ = torch.manual_seed(0)
        >>> tiny = DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=16, vocab_size=99)
        >>> result = positional_attention(DistilBertModel(tiny), length=12, words=8)
        >>> result.attention.shape, result.mean_of_metric.locality.shape
        (torch.Size([2, 2, 12, 12]), torch.Size([2, 2]))
        >>> result.to_frame().columns[:4].tolist()
        ['layer', 'head', 'locality', 'locality_low']
    """
    base = find_base(model)
    before, after = special_tokens_around(tokenizer) if special_tokens else ([], [])
    check_length(base, length, len(before) + len(after))
    if batch_size is not None:
        count("batch_size", batch_size)
    ids, names = choose_words(base, tokenizer, words, seed)
    rows = torch.tensor([[*before, *[word] * length, *after] for word in ids], device=device_of(base))
    sums = _Sums(layers, slice(len(before), len(before) + length))
    start, size = 0, batch_size or 1  # one word first, which tells how many fit into the memory of a batch
    with (
        eager_attention(model),
        tqdm(total=len(ids), desc="identical words", unit="word", delay=3, disable=not progress) as bar,
    ):
        while start < len(ids):
            observed = observe(base, input_ids=rows[start : start + size])
            sums.add(observed)
            bar.update(min(size, len(ids) - start))
            start += size
            size = batch_size or max(1, min(64, _BATCH_BYTES * size // sum(each.nbytes for each in observed.maps)))
        equal_states = _equal_states(base, rows[:1], sums.positions)
    mean = sums.attention / len(ids)
    source = Provenance(
        model=model_name(model),
        model_class=type(base).__name__,
        model_type=base.config.model_type,
        dtype=str(base.dtype).removeprefix("torch."),
        words=names,
        word_ids=ids,
        seed=seed if isinstance(words, int) else None,
        special_tokens=special_tokens,
        causal=length > 1 and bool((mean.triu(1) == 0).all()),
        versions={module.__name__: module.__version__ for module in (pelocality, torch, transformers)},
        encoding=attached_encoding(base),
        equal_states=equal_states,
    )
    visible = None if bool(sums.visible.all()) else sums.visible
    per_word = {name: torch.cat([torch.stack(by_layer, 1) for by_layer in sums.per_word[name]]) for name in METRICS}
    return PositionalAttention(mean, Measurement(**per_word), sums.layers, source, visible)


class _Sums:
    """Sums over words in at least float32, and the metrics of each word; the matrices of the words are not stored."""

    def __init__(self, requested: Sequence[int] | None, positions: slice) -> None:
        self.requested, self.positions = requested, positions
        self.layers: tuple[int, ...] = ()
        self.attention = torch.zeros(())  # (layer, head, n, n) once a batch was added
        self.visible = torch.zeros((), dtype=torch.bool)  # (layer, n, n)
        self.per_word: dict[str, list[list[Tensor]]] = {name: [] for name in METRICS}  # by batch and layer

    def add(self, observed: Observed) -> None:
        """Add the words of a batch."""
        self.layers = requested_layers(
            self.requested,
            observed.layers,
            observed.depth,
            f"which have no attention in this model; those that have are {list(observed.layers)}",
        )
        places = [observed.layers.index(layer) for layer in self.layers]
        device, part = observed.maps[0].device, self.positions
        # (word, head, n, n) each, in at least float32
        maps = [crop(observed.maps[place], part.start, part.stop) for place in places]
        self.attention = self.attention + torch.stack([weights.sum(0).to(device) for weights in maps])
        visible = [observed.visible[place][:, part, part].any(0).to(device) for place in places]
        self.visible = self.visible | torch.stack(visible)
        measured = [measure(weights) for weights in maps]
        for name, by_batch in self.per_word.items():
            by_batch.append([getattr(each, name).to(device) for each in measured])


def _equal_states(base: Any, row: Tensor, positions: slice) -> bool:
    """Return whether a repeated word, row (1, n), has equal hidden states at all its positions in every layer."""
    states = run(base, input_ids=row, output_hidden_states=True).hidden_states
    if not states or positions.stop - positions.start < 2 or any(layer.shape[-2] != row.shape[1] for layer in states):
        return False
    return all(_equal_rows(layer[..., positions, :]) for layer in states)


def _equal_rows(states: Tensor) -> bool:
    """Return whether rows (..., n, d) are equal up to rounding, in most of their dimensions: a few may be huge."""
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)  # a softmax may be float32 in any model
    states = states.double() if states.device.type == "cpu" else states.float()
    spread, size = (states - states[..., :1, :]).abs().amax(-2), states.abs().amax(-2)
    return bool((spread / size.clamp(min=torch.finfo(torch.float32).tiny)).median() < eps**0.5)
