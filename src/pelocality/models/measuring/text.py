"""One pass over tokenised text: sums of the attention over sentences, and the metrics of each."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pelocality._distributed import failing_together, gathered, rank_and_size, summed
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.inputs.tokens import runs_of_tokens
from pelocality.models.layers import AttentionLayers, Use, attention_layers, observe_layers
from pelocality.models.measuring.samples import metrics_with_sink, sample_metrics
from pelocality.models.sequence_model import SequenceModel

FEWEST = 3
"""Tokens of a text that has a symmetry."""

# error of the softmax of equal logits, in eps: half precision is rounded once, from float32
_SOFTMAX_EPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 8}


def text_sums(model: SequenceModel, batches: TextBatches, layers: Sequence[int] | None, length: int) -> "TextSums":
    """Return the sums over the first ``length`` tokens of all texts, of the processes together.

    Every process reads every batch, and runs the first one to find the layers that attend.

    Args:
        model: The model.
        batches: Its texts.
        layers: Layers to add, by their index in the model; None: all that have attention.
        length: The largest m.

    Raises:
        TypeError: As for `TextBatches`.
        ValueError: As for `TextBatches`, or no text.
    """
    sums: TextSums | None = None
    rank, size = rank_and_size()
    with failing_together() as must_agree:
        for number, (inputs, included) in enumerate(batches):
            if sums is None:
                known = attention_layers(model, inputs)
                sums = TextSums(known.requested(layers), known.others, known.heads)
            if number % size == rank:  # others are measured by other processes
                included = None if included is None else included[:, :length]
                first = known.before + batches.without_first
                use = _reader(sums, model, known, number, included, slice(first, first + length))
                observe_layers(model, known, sums.layers, inputs, use)
        must_agree += batches.checksums
        if sums is None:
            raise ValueError("texts is empty; pass some text (a generator can be read only once)")
    sums.add_processes()
    return sums


class TextSums:
    """Sums over sentences of the deviations from uniform attention, for each layer, head and pair of positions."""

    def __init__(self, layers: tuple[int, ...], other_layers: Mapping[int, str], heads: int) -> None:
        self.layers, self.other_layers, self.texts = layers, other_layers, 0
        self.per_text: dict[int, dict[int, dict[str, Tensor]]] = {}  # the metrics by batch and by layer
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

    def add_processes(self) -> None:
        """Add the sums and the number of texts of all other processes, up to the longest text of all."""
        self._grow(max(gathered([self.length])))
        self._change(summed)
        self.texts = sum(gathered([self.texts]))

    def add(self, layer: int, weights: Tensor, pairs: Tensor) -> Tensor:
        """Add the attention (batch, head, n, n) of a batch over the included pairs (batch, m, m), m <= n.

        Returns:
            (batch, head, m, m): the attention over those pairs, rows renormalised; 0 elsewhere.
        """
        m = pairs.shape[-1]
        self._grow(m)
        if layer == 0:  # every layer reads the same texts
            self.texts += int(pairs.flatten(1).any(1).sum())
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


def _reader(
    sums: TextSums, model: SequenceModel, known: AttentionLayers, number: int, included: Tensor | None, tokens: slice
) -> Use:
    """Return a function that adds a layer of a batch of texts, and measures each of them.

    Args:
        sums: What it adds to.
        model: The model.
        known: Its layers.
        number: The number of the batch.
        included: Which of its first m tokens are included, (batch, m); None for a model without token ids.
        tokens: The tokens of such a model that are included if they attend to themselves.
    """

    def add(place: int, weights: Tensor, visible: Tensor) -> None:
        if included is None:  # without the tokens that the model adds before
            shown = visible.diagonal(dim1=-2, dim2=-1).cpu()
            behind = torch.arange(shown.shape[1], device="cpu") >= tokens.start
            chosen = (shown & behind)[:, : tokens.stop]
        else:
            chosen = included
        m = chosen.shape[1]
        pairs = chosen[:, :, None] & chosen[:, None, :] & visible[:, :m, :m].cpu()
        attention = sums.add(place, weights, pairs)
        if bool((runs_of_tokens(chosen) > 1).any()):  # between which distances are not known
            advice = "pass its parts one by one, or include them with special_tokens=True"
            raise ValueError(f"a text has special tokens between its words; {advice}")
        measured = chosen.sum(1) >= FEWEST
        if bool(measured.any()):
            # positions are of the tokens that are measured, from the first one on
            first, *_, last = chosen.any(0).nonzero().flatten().tolist()
            positions = model.positions_of(last + 1 - first)
            part = slice(0, None) if positions is None else slice(first, last + 1)
            rows, kept = weights[measured.to(weights.device)], chosen[measured]
            values = sample_metrics(
                attention[measured][..., part, part], pairs[measured][:, part, part], kept[:, part], positions
            )
            values |= _shares(rows, kept, any(known.sinks), on_line=positions is None)
            sums.per_text.setdefault(number, {})[place] = values

    return add


def _shares(weights: Tensor, included: Tensor, sinks: bool, *, on_line: bool) -> dict[str, Tensor]:
    """Return what the rows of included tokens give to tokens that are left out and to learned sinks, (text, head)."""
    m = included.shape[1]
    rows = weights[..., :m, :].cpu().double()
    queries = included[:, None] / included.sum(1)[:, None, None]
    total = (rows.sum(-1) * queries).sum(-1)
    kept = (rows[..., :m] * included[:, None, None]).sum(-1)
    values = {"cut_share": total - (kept * queries).sum(-1)}
    if sinks:
        values["learned_sink"] = 1 - total
    if sinks and on_line:
        cropped = [row[None, :, tokens][..., tokens] for row, tokens in zip(rows[..., :m], included, strict=True)]
        as_they_are = [metrics_with_sink(each) for each in cropped]
        values |= {name: torch.cat([each[name] for each in as_they_are]) for name in as_they_are[0]}
    return values
