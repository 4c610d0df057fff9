"""Identical-word probing: the attention of one repeated word shows positions alone, as its content is constant."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._checks import count, flag
from pelocality._distributed import failing_together, part_of_process, rank_and_size, summed
from pelocality.models.inputs.words import check_words, choose_words, prefix_tokens, special_tokens_around
from pelocality.models.layers import attention_layers, observe_layers
from pelocality.models.measuring.provenance import provenance
from pelocality.models.measuring.result import PositionalAttention
from pelocality.models.measuring.samples import CAUSAL, hides_future, metrics_with_sink, sample_metrics
from pelocality.models.sequence_model import SequenceModel
from pelocality.positions import Positions

_BATCH_BYTES = 2**24  # attention of one batch in one layer; a batch of one word may need more


def positional_attention(
    model: nn.Module | SequenceModel,
    tokenizer: Any = None,
    length: int = 64,
    *,
    words: int | Sequence[str | int] = 64,
    seed: int = 0,
    special_tokens: bool = False,
    prefix: bool | str | int = False,
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

    Attention is observed where torch computes it, in the implementation that the model uses: any model that attends by
    torch's kernel, by ``nn.MultiheadAttention`` or by a softmax that multiplies the values can be probed. The mode and
    the weights of the model are restored, also after an interrupt.

    Where ``torch.distributed`` is initialised, each process measures a part of the words, and all return the result.

    Args:
        model: A transformers model, with or without a head, or a `SequenceModel` of any module. Of an encoder-decoder
            model the encoder is probed; pass ``model.get_decoder()`` for the other half.
        tokenizer: Its tokenizer. Words are then whole words of letters; without one they are any ids but those the
            configuration calls special.
        length: Number of positions n, in tokens. Tokens that the model itself puts around its input, such as a ViT's
            [CLS], are cut out of the matrices, rows renormalised.
        words: How many words to draw, each word of the vocabulary as likely as any other, or the words themselves
            (text of one token each, or ids). 16 words instead of 256 move single heads of a small BERT by up to 0.04
            in locality. For a model that reads something else than token ids, how many samples to ask its ``inputs``
            for; their numbers begin at ``seed``.
        seed: Seed of the draw.
        special_tokens: Feed the tokenizer's special tokens around the words and cut them out of the matrices, rows
            renormalised. By default none are fed. The numbers differ: [CLS] and [SEP] draw attention, and the attention
            between the words is more local.
        prefix: True to feed the beginning-of-text token of the tokenizer or the configuration before the words, or
            another word or id, and cut it out of the matrices, rows renormalised; ``cut_share`` is what it received.
            Where positions are only relative, as in most decoders, it makes the hidden states differ: without it each
            layer shows only the positions that it adds itself.
        layers: Layers to return, by their index in the model; by default all that have attention. Long inputs to
            large models take much memory: ask for a few layers at a time.
        batch_size: Words at a time; by default at most 64, as many as fit into 16 MiB of attention weights of a
            layer. Memory does not grow with the number of words.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `PositionalAttention` with the mean matrix (layer, head, n, n) with rows that sum to 1, the metrics of each
        word, and their provenance. Learned sinks are set apart, their share is in ``per_sample``. On the model's
        device, float32 (float64 for a float64 model).

    Raises:
        TypeError: Something that is not a model, or arguments of the wrong type.
        ValueError: A model that cannot be probed (the message says why), a length beyond its positions, words
            that are not one token, or unknown layers.
        RuntimeError: Another process failed.

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
    model = SequenceModel.of(model)
    flag("special_tokens", special_tokens)
    if batch_size is not None:
        count("batch_size", batch_size)
    if model.content is None:
        probe = _repeated_words(model, tokenizer, length, words, seed, special_tokens, prefix)
    else:
        probe = _constant_content(model, length, words, seed, special_tokens or prefix is not False)
    with failing_together() as must_agree:
        must_agree += (probe.ids, probe.names, length, layers)
        known = attention_layers(model, probe.inputs(0, 1), length + probe.fed)
        requested = known.requested(layers)
        positions = slice(known.before + probe.before, known.before + probe.before + length)
        of_one_word = known.heads * (known.added + probe.fed + length) ** 2 * known.dtype.itemsize
        size = batch_size or max(1, min(64, _BATCH_BYTES // of_one_word))
        size = min(size, math.ceil(len(probe.names) / rank_and_size()[1])) if model.content is None else 1
        places = model.positions_of(length)
        sums = _Sums(requested, any(known.sinks), positions, len(probe.names), places)
        starts = part_of_process(range(0, len(probe.names), size))  # empty: the first word gives the shapes
        for start in tqdm(starts or [0], desc="identical words", unit="batch", delay=3, disable=not progress):
            add = sums.from_word(start, mean=model.content is not None)
            observe_layers(model, known, requested, probe.inputs(start, size), add)
        equal_states = _equal_states(model, probe.inputs(0, 1), positions)
    sums.add_processes(counts=bool(starts))
    mean = sums.attention.div_(len(probe.names))  # in place: this tensor is most of the memory for long inputs
    source = provenance(
        model,
        sums.visible,
        special_tokens=special_tokens,
        words=probe.names,
        word_ids=probe.ids,
        seed=count("seed", seed, 0) if isinstance(words, int | np.integer) else None,
        prefix=probe.prefix,
        equal_states=equal_states,
    )
    return PositionalAttention(
        attention=mean,
        per_sample=sums.per_word,
        layers=requested,
        source=source,
        visible=None if bool(sums.visible.all()) else sums.visible,
        other_layers=known.others,
        positions=places,
    )


@dataclass(frozen=True)
class _Probe:
    """Inputs of constant content.

    Attributes:
        inputs: From the number of the first word and a number of words to the inputs of one call.
        names: The words as text.
        ids: Their token ids.
        prefix: The tokens before the words, as text.
        before: The number of tokens before the words.
        fed: The number of tokens before and after the words.
    """

    inputs: Callable[[int, int], Any]
    names: tuple[str, ...]
    ids: tuple[int, ...] = ()
    prefix: tuple[str, ...] = ()
    before: int = 0
    fed: int = 0


def _repeated_words(
    model: SequenceModel,
    tokenizer: Any,
    length: int,
    words: int | Sequence[str | int],
    seed: int,
    special_tokens: bool,
    prefix: bool | str | int,
) -> _Probe:
    """Return rows of one repeated word each."""
    before, after = special_tokens_around(tokenizer) if special_tokens else ([], [])
    fed: list[str] = []
    if prefix is not False:
        if special_tokens:
            raise ValueError("special_tokens=True and prefix both feed tokens before the words; give one of them")
        before, fed = prefix_tokens(model, tokenizer, prefix)
    model.check_length(length, len(before) + len(after))
    ids, names = choose_words(model, tokenizer, words, seed)
    if fed and before[-1] in ids:
        raise ValueError(f"words holds the prefix {fed[-1]!r}, which must differ from the words; give another prefix")
    rows = torch.tensor([[*before, *[word] * length, *after] for word in ids], device=model.device)
    model.check_ids(rows[:1])  # the special tokens; words were looked up in the vocabulary
    return _Probe(
        inputs=lambda start, size: {"input_ids": rows[start : start + size]},
        names=names,
        ids=ids,
        prefix=tuple(fed),
        before=len(before),
        fed=len(before) + len(after),
    )


def _constant_content(
    model: SequenceModel, length: int, words: int | Sequence[str | int], seed: int, surrounded: bool
) -> _Probe:
    """Return samples of a model's own content."""
    count("length", length)
    check_words(words)
    if not isinstance(words, int | np.integer) or surrounded:
        given = "special_tokens and prefix are" if surrounded else f"words={words!r} is"
        raise ValueError(f"{given} for models that read token ids; {model} reads what its inputs= gives: pass a number")
    first, content = count("seed", seed, 0), model.content
    assert content is not None
    return _Probe(
        inputs=lambda start, size: model.moved(content(first + start, length)),
        names=tuple(f"sample {first + i}" for i in range(words)),
    )


class _Sums:
    """Sums over words in at least float32, and the metrics of each word; the matrices of the words are not stored."""

    def __init__(
        self, layers: Sequence[int], sinks: bool, positions: slice, words: int, places: Positions | None
    ) -> None:
        self.layers, self.sinks, self.positions, self.words = layers, sinks, positions, words
        self.places = places
        self.attention = torch.zeros(0)  # (layer, head, n, n) once a batch was added
        self.visible = torch.zeros(0, dtype=torch.bool)  # (layer, n, n)
        # one tensor per metric: thousands of small tensors would keep freed memory from the system
        self.per_word: dict[str, Tensor] = {}  # (word, layer, head)

    def add_processes(self, counts: bool) -> None:
        """Add the words of all other processes, to those of this one if they count."""
        for sums in (self.attention, self.visible, *self.per_word.values()):
            if not counts:
                sums.zero_()
        self.attention, self.visible = summed(self.attention), summed(self.visible.int()) > 0
        if not hides_future(self.visible):  # causal metrics would be missing for some words
            self.per_word = {name: values for name, values in self.per_word.items() if name not in CAUSAL}
        self.per_word = {name: summed(values) for name, values in self.per_word.items()}

    def from_word(self, start: int, *, mean: bool) -> Callable[[int, Tensor, Tensor], None]:
        """Return a function that adds the words from ``start`` on in one layer, or their mean."""

        def add(place: int, weights: Tensor, visible: Tensor) -> None:
            if mean:
                weights, visible = weights.mean(0, keepdim=True), visible.any(0, keepdim=True)
            self._add(start, place, weights, visible)

        return add

    def _add(self, start: int, place: int, weights: Tensor, visible: Tensor) -> None:
        """Add the words from ``start`` on in one layer, (word, head, n, n) and (word, n, n)."""
        part = self.positions
        half = weights.dtype not in (torch.float32, torch.float64)
        given = (weights.float() if half else weights)[..., part, :]
        weights, visible = given[..., part], visible[:, part, part]
        if not self.attention.numel():
            self.attention = weights.new_zeros(len(self.layers), *weights.shape[1:])
            self.visible = visible.new_zeros(len(self.layers), *visible.shape[1:])
        whole = given.shape == weights.shape
        attention = weights
        if not whole or half or self.sinks:
            total, mass = given.sum(-1, keepdim=True), weights.sum(-1, keepdim=True)
            keys = visible.sum(-1, keepdim=True)[:, None]
            if bool(((mass <= 0) & (keys == 0)).any()):
                cut = (
                    "has all its weight on tokens that are cut out, the prefix or special tokens; measure without them"
                )
                raise ValueError(f"in layer {self.layers[place]} a query {'sees no key' if whole else cut}")
            uniform = (visible[:, None] / keys).to(weights.dtype)
            attention = torch.where(mass > 0, weights / mass, uniform)  # uniform where the weight underflowed
        values = sample_metrics(attention, visible, positions=self.places)
        if not whole:
            values["cut_share"] = (total - mass).mean((-2, -1))
        if self.sinks:
            values["learned_sink"] = 1 - total.mean((-2, -1))
        if self.sinks and self.places is None:
            values |= metrics_with_sink(weights)
        for name, value in values.items():
            if name not in self.per_word:
                shape = (self.words, len(self.layers), value.shape[1])
                self.per_word[name] = value.new_zeros(shape, device=self.attention.device)
            self.per_word[name][start : start + len(value), place] = value.to(self.attention.device)
        for matrix in attention:
            self.attention[place] += matrix.to(self.attention.device)
        self.visible[place] |= visible.any(0).to(self.visible.device)


def _equal_states(model: SequenceModel, inputs: Any, positions: slice) -> bool:
    """Return whether a repeated word has equal hidden states at all its positions in every layer."""
    if model.config is None or positions.stop - positions.start < 2:
        return False
    states = getattr(model.outputs(inputs, output_hidden_states=True), "hidden_states", None)
    if not states or any(layer.ndim < 2 or layer.shape[-2] < positions.stop for layer in states):
        return False
    return all(_equal_rows(layer[..., positions, :]) for layer in states)


def _equal_rows(states: Tensor) -> bool:
    """Return whether rows (..., n, d) are equal up to rounding, in most of their dimensions: a few may be huge."""
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)  # a softmax may be float32 in any model
    states = states.double() if states.device.type == "cpu" else states.float()
    spread, size = (states - states[..., :1, :]).abs().amax(-2), states.abs().amax(-2)
    return bool((spread / size.clamp(min=torch.finfo(torch.float32).tiny)).median() < eps**0.5)
