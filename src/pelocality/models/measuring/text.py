"""One pass over tokenised text: its batches, and sums of the attention over sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pelocality._checks import count, flag
from pelocality._distributed import failing_together, gathered, rank_and_size, summed
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.layers import AttentionLayers, attention_layers, observe_layers
from pelocality.models.sequence_model import SequenceModel

# error of the softmax of equal logits, in eps: half precision is rounded once, from float32
_SOFTMAX_EPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 8}


def text_sums(
    model: SequenceModel,
    texts: Iterable[Any],
    layers: Sequence[int] | None,
    measure: Callable[[int, TextLayer], None],
    *,
    tokenizer: Any,
    length: int,
    special_tokens: bool,
    without_first: int,
    batch_size: int,
    progress: bool,
) -> TextSums:
    """Return the sums over the first ``length`` tokens of all texts, of the processes together.

    Every process reads every batch, and runs the first one to find the layers that attend.

    Args:
        model: The model.
        texts: Strings, tokenised batches, or batches of what a model without token ids reads.
        layers: Layers to add, by their index in the model; None: all that have attention.
        measure: Called with the number of a batch and what was added of it, for each layer.
        tokenizer: Reads strings, and identifies special tokens.
        length: The largest m.
        special_tokens: Whether special tokens are included.
        without_first: How many of the included tokens of each text to leave out.
        batch_size: Strings of a batch.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: As for `token_batches`, or batches that are not mappings of token ids.
        ValueError: As for `token_batches`, text longer than the model's positions, special tokens that nothing
            identifies, padding without a mask, or no text.
    """
    flag("special_tokens", special_tokens)
    count("without_first", without_first, least=0)
    count("batch_size", batch_size)
    sums: TextSums | None = None
    known: AttentionLayers | None = None
    measured = 0
    rank, size = rank_and_size()
    batches = TextBatches(
        model,
        texts,
        tokenizer,
        special_tokens=special_tokens,
        without_first=without_first,
        batch_size=batch_size,
        progress=progress,
    )
    with failing_together() as must_agree:
        for number, (inputs, included) in enumerate(batches):
            if known is None or sums is None:
                known = attention_layers(model, inputs)
                requested = known.requested(layers)
                sums = TextSums(requested, known.others, known.heads)
            if number % size == rank:  # others are measured by other processes
                first, included = known.before + without_first, None if included is None else included[:, :length]
                reader = _Reader(sums, any(known.sinks), included, first, length, measure, number)
                observe_layers(model, known, sums.layers, inputs, reader)
                measured += reader.texts
        must_agree += batches.checksums
        if sums is None:
            raise ValueError("texts is empty; pass some text (a generator can be read only once)")
    sums.add_processes(max(gathered([sums.length])), measured)
    sums.repeated = batches.repeated
    return sums


class _Reader:
    """Adds a batch to the sums, layer by layer.

    Attributes:
        texts: The number of texts of the batch that were measured.
    """

    def __init__(
        self,
        sums: TextSums,
        sinks: bool,
        included: Tensor | None,
        first: int,
        length: int,
        measure: Callable[[int, TextLayer], None],
        number: int,
    ) -> None:
        self.sums, self.sinks, self.included, self.number = sums, sinks, included, number
        self.first, self.length, self.measure, self.texts = first, length, measure, 0

    def __call__(self, place: int, weights: Tensor, visible: Tensor) -> None:
        """Add the attention (batch, head, n, n) of a layer between the included tokens (batch, m), m <= n."""
        included = self.included
        if included is None:  # all that attends to itself, without the tokens that the model adds before
            shown = visible.diagonal(dim1=-2, dim2=-1).cpu()
            behind = torch.arange(shown.shape[1], device="cpu") >= self.first
            included = (shown & behind)[:, : self.first + self.length]
        self.texts = int(included.any(1).sum())
        m = included.shape[1]
        pairs = included[:, :, None] & included[:, None, :] & visible[:, :m, :m].cpu()
        attention = self.sums.add(place, weights, pairs)
        self.measure(self.number, TextLayer(place, weights, included, pairs, attention, self.sinks))


@dataclass(frozen=True)
class TextLayer:
    """The attention of a batch of texts in one layer.

    Attributes:
        place: The index of the layer among the requested ones.
        weights: What the model computed, (batch, head, n, n).
        included: Which of the first m <= n tokens are included, (batch, m).
        pairs: Which pairs of included tokens are visible, (batch, m, m).
        attention: The weights of those pairs, rows renormalised; 0 elsewhere, (batch, head, m, m), float64, on the CPU.
        sinks: Whether layers of the model have a learned sink.
    """

    place: int
    weights: Tensor
    included: Tensor
    pairs: Tensor
    attention: Tensor
    sinks: bool


class TextSums:
    """Sums over sentences of the deviations from uniform attention, for each layer, head and pair of positions."""

    def __init__(self, layers: tuple[int, ...], other_layers: Mapping[int, str], heads: int) -> None:
        self.layers, self.other_layers, self.texts, self.repeated = layers, other_layers, 0, 0
        # on the CPU, as not every accelerator has float64
        self.total = torch.zeros(len(layers), heads, 0, 0, dtype=torch.float64, device="cpu")
        self.squares = torch.zeros_like(self.total)
        self.rounding = torch.zeros(len(layers), 1, 0, 0, dtype=torch.float64, device="cpu")
        self.uniform = torch.zeros_like(self.rounding)
        self.counts = torch.zeros(len(layers), 0, 0, dtype=torch.int64, device="cpu")

    @property
    def length(self) -> int:
        """The number of positions of the longest text so far."""
        return self.counts.shape[-1]

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each of the sums."""
        self.total, self.squares = function(self.total), function(self.squares)
        self.rounding, self.uniform = function(self.rounding), function(self.uniform)
        self.counts = function(self.counts)

    def _grow(self, length: int) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end."""
        more = max(0, length - self.length)
        if more:
            self._change(lambda sums: nn.functional.pad(sums, (0, more, 0, more)))

    def add_processes(self, length: int, texts: int) -> None:
        """Add the sums of all other processes, up to the longest text of all, and set the number of texts of all."""
        self._grow(length)
        self._change(summed)
        self.texts = sum(gathered([texts]))

    def add(self, layer: int, weights: Tensor, pairs: Tensor) -> Tensor:
        """Add the attention (batch, head, n, n) of a batch over the included pairs (batch, m, m), m <= n.

        Returns:
            (batch, head, m, m): the attention over those pairs, rows renormalised; 0 elsewhere.
        """
        m = pairs.shape[-1]
        self._grow(m)
        included = weights[..., :m, :m].cpu().double() * pairs[:, None]  # (batch, head, m, m)
        mass = included.sum(-1, keepdim=True)
        keys = pairs.sum(-1, keepdim=True)[:, None].double()  # (batch, 1, m, 1)
        uniform = pairs[:, None] / keys.clamp(min=1)
        # a row without weight on included keys (it underflowed) has deviation 0
        deviation = torch.where(pairs[:, None] & (mass > 0), included / mass - uniform, 0.0)
        self.total[layer, :, :m, :m] += deviation.sum(0)
        self.squares[layer, :, :m, :m] += deviation.square().sum(0)
        rounding = _SOFTMAX_EPS[weights.dtype] * torch.finfo(weights.dtype).eps * uniform
        self.rounding[layer, :, :m, :m] += rounding.square().sum(0)
        self.uniform[layer, :, :m, :m] += uniform.sum(0)
        self.counts[layer, :m, :m] += pairs.sum(0)
        return deviation + uniform

    def share(self) -> Tensor:
        """Return the share (layer, head), NaN where no pair of positions is in two sentences."""
        counts = self.counts[:, None].double()
        enough = counts >= 2  # a pair in one sentence only cannot be predicted from others
        # the distance to the mean of the others is N / (N - 1) times the distance to the mean of all
        error = (self.squares - self.total.square() / counts) * (counts / (counts - 1)).square()
        error = torch.where(enough, error, 0.0).sum((-2, -1))
        squares, rounding = (torch.where(enough, sums, 0.0).sum((-2, -1)) for sums in (self.squares, self.rounding))
        return torch.where(squares > rounding, 1 - error / squares, torch.nan)
