"""Identical-word probing: one word repeated, so that nothing but position is left to attend by."""

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
    layer_indices,
    model_name,
    run,
)
from pelocality.models._words import choose_words, special_frame
from pelocality.models.families._record import Architecture
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
    r"""Return the attention that is left when every token is the same word.

    $$A_{ij} = \frac{1}{|W|} \sum_{w \in W} \operatorname{attention}(w, w, \dots, w)_{ij}$$

    Content is constant, so the weights show position alone (Wang et al., ICLR 2021, there for the first layer and 300
    random words). In deeper layers it is still the position of constant content, passed through the layers below. A
    model whose positions are all relative passes nothing on: equal words stay equal in every layer, and each shows the
    relative positions it adds itself. The result then says so in its ``notes``.

    Any transformers model that returns softmax attention over its tokens can be probed: the families of
    ``pelocality.models.families`` are tested, others are checked as they run. The model comes back as it was, in mode,
    attention implementation and weights, also when interrupted.

    Args:
        model: a transformers model, with or without a head. Of T5, the encoder is probed; of other encoder-decoder
            models pass ``model.get_encoder()``.
        tokenizer: its tokenizer. Words are then whole words of letters; without one they are any ids but those the
            configuration calls special.
        length: number of positions n, in tokens.
        words: how many words to draw, each word of the vocabulary as likely as any other, or the words themselves
            (text of one token each, or ids). 16 words instead of 256 move single heads of a small BERT by up to 0.04
            in locality.
        seed: seed of the draw.
        special_tokens: feed the tokenizer's special tokens around the words and cut them out of the matrices, rows
            renormalised. By default none are fed. It is another number: [CLS] and [SEP] draw attention away, and what
            is left is more local.
        layers: layers to keep, by their index in the model; by default all that have attention.
        batch_size: words at a time; by default as many as keep the weights of a batch under 256 MiB. Memory does not
            grow with the number of words.
        progress: show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `PositionalAttention`: the mean matrix (layer, head, n, n) with rows that sum to 1, the metrics of each
        word, and what produced them. On the model's device, float32 (float64 for a float64 model).

    Raises:
        TypeError: for something that is no transformers model, or arguments of the wrong type.
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
    base, record = find_base(model)
    before, after = _frame(tokenizer, special_tokens)
    check_length(base, length, len(before) + len(after))
    if batch_size is not None:
        count("batch_size", batch_size)
    ids, names = choose_words(base, tokenizer, words, seed)
    rows = [[*before, *[word] * length, *after] for word in ids]  # (word, n + special tokens)
    part = slice(len(before), len(before) + length)
    with (
        eager_attention(model),
        tqdm(total=len(ids), desc="identical words", unit="word", delay=3, disable=not progress) as bar,
    ):
        mean, visible, measured, kept = _probe(base, record, rows, part, layers, batch_size, bar)
        equal_states = _equal_states(base, rows[0], part)
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
        encoding=attached_encoding(record, base),
        equal_states=equal_states,
    )
    return PositionalAttention(mean, measured, kept, source, None if bool(visible.all()) else visible)


def _probe(
    base: Any,
    record: Architecture | None,
    rows: list[list[int]],
    part: slice,
    layers: Sequence[int] | None,
    batch_size: int | None,
    bar: tqdm[Any],
) -> tuple[Tensor, Tensor, Measurement, tuple[int, ...]]:
    """Run every word and return the mean attention, the keys visible, the metrics by word, and the layers' numbers."""
    sums: list[Tensor] = []
    seen: list[Tensor] = []
    kept: list[int] = []
    measured: dict[str, list[Tensor]] = {name: [] for name in METRICS}
    done, size = 0, 1 if batch_size is None else batch_size
    while done < len(rows):
        batch = torch.tensor(rows[done : done + size], device=device_of(base))
        observed = observe(base, record, input_ids=batch)
        maps = observed.maps
        if not sums:
            kept = _kept(layers, observed)
        cut = [_cut(maps[place], part) for place in kept]  # (word, head, n, n) each
        # running sums in at least float32: the matrices of the words themselves are not kept
        totals = [_rows(weights).sum(0).to(maps[0].device) for weights in cut]
        views = [observed.visible[place][:, part, part].any(0).to(maps[0].device) for place in kept]
        sums = [a + b for a, b in zip(sums, totals, strict=True)] if sums else totals
        seen = [a | b for a, b in zip(seen, views, strict=True)] if seen else views
        by_layer = [measure(weights) for weights in cut]
        for name in METRICS:
            measured[name].append(torch.stack([getattr(m, name).to(maps[0].device) for m in by_layer], dim=1))
        if batch_size is None and done == 0:
            bytes_a_word = sum(weights.nbytes for weights in maps)
            size = max(1, min(64, _BATCH_BYTES // bytes_a_word))
        done += len(batch)
        bar.update(len(batch))
    mean = torch.stack(sums) / len(rows)
    numbers = tuple(observed.layers[place] for place in kept)
    return mean, torch.stack(seen), Measurement(**{n: torch.cat(parts) for n, parts in measured.items()}), numbers


def _kept(layers: Sequence[int] | None, observed: Observed) -> list[int]:
    """Return which of the maps are those of the layers that were asked for, all of them for None."""
    numbers = observed.layers if layers is None else layer_indices(layers, observed.depth)
    absent = sorted(set(numbers) - set(observed.layers))
    if absent:
        raise ValueError(
            f"layers holds {absent}, which have no attention in this model; those that have are {list(observed.layers)}"
        )
    return [observed.layers.index(number) for number in numbers]


def _equal_states(base: Any, row: list[int], part: slice) -> bool:
    """Return whether a repeated word holds one hidden state at all its positions, in every layer."""
    states = run(base, input_ids=torch.tensor([row], device=device_of(base)), output_hidden_states=True).hidden_states
    if not states or part.stop - part.start < 2 or any(layer.shape[-2] != len(row) for layer in states):
        return False
    return all(_equal_rows(layer[..., part, :]) for layer in states)


def _equal_rows(states: Tensor) -> bool:
    """Return whether rows (..., n, d) are equal up to rounding, in most of their dimensions: a few may be huge."""
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)  # a softmax may be float32 in any model
    states = states.double() if states.device.type == "cpu" else states.float()
    spread, size = (states - states[..., :1, :]).abs().amax(-2), states.abs().amax(-2)
    return bool((spread / size.clamp(min=torch.finfo(torch.float32).tiny)).median() < eps**0.5)


def _frame(tokenizer: Any, special_tokens: bool) -> tuple[list[int], list[int]]:
    if not special_tokens:
        return [], []
    if tokenizer is None:
        raise ValueError("special_tokens=True needs a tokenizer, whose template says where they stand; pass tokenizer=")
    return special_frame(tokenizer)


def _cut(weights: Tensor, part: slice) -> Tensor:
    """Leave special tokens out, rows renormalised."""
    return weights if weights.shape[-1] == part.stop - part.start else crop(weights, part.start, part.stop)


def _rows(weights: Tensor) -> Tensor:
    """Return half precision as float32 with rows that sum to 1 in it; wider types as they are."""
    if weights.dtype in (torch.float32, torch.float64):
        return weights
    weights = weights.float()
    return weights / weights.sum(-1, keepdim=True)
