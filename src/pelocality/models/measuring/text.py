"""Sums of attention over texts, and the metrics of each text."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pelocality._checks import on_float64_device
from pelocality._distributed import gathered, summed
from pelocality.models.inputs.tokens import runs_of_tokens
from pelocality.models.layers import AttentionLayers
from pelocality.models.measuring.samples import Observed, SampleMetrics, metrics_with_sink, sample_metrics
from pelocality.positions import Positions

FEWEST = 3
"""Tokens of a text that has a symmetry."""

_MOST = 2**27  # numbers of a sum on the device of the model

# error of the softmax of equal logits, in eps: half precision is rounded once, from float32
_SOFTMAX_EPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 8}


def check_runs(tokens: Tensor) -> None:
    """Refuse texts whose measured tokens (batch, n) have others between them: distances over these are not known."""
    if bool((runs_of_tokens(tokens) > 1).any()):
        raise ValueError("a text has special tokens between its words; include them with special_tokens=True")


class TextSums(SampleMetrics):
    """Sums over texts of the deviations from uniform attention, for each layer, head and pair of positions.

    Args:
        attending: The layers of the model.
        layers: The numbers of those that are added.
        length: The number of first positions that are added.
        without_first: Of a model without token ids, how many of its tokens are left out; None: ``add`` is told.
        positions_of: From a number of tokens to their positions, None for a line.
    """

    def __init__(
        self,
        attending: AttentionLayers,
        layers: tuple[int, ...],
        length: int,
        without_first: int,
        positions_of: Callable[[int], Positions | None],
    ) -> None:
        super().__init__()
        self.layers, self.sinks, self.positions_of = layers, any(attending.sinks), positions_of
        self.most, self.first = length, attending.before + without_first
        self.texts = 0
        # (layer, head, n, n) or (layer, 1, n, n)
        total = torch.zeros(len(layers), attending.heads, 0, 0, dtype=torch.float64, device="cpu")
        self.sums = {"total": total, "squares": total, "rounding": total[:, :1], "uniform": total[:, :1]}
        self.sums["counts"] = total[:, :1].long()

    def _grow(self, length: int, device: torch.device) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end.

        They are on the device of the weights, or of many weights on the CPU.
        """
        layers, heads, n, _ = self.sums["total"].shape
        if (more := length - n) > 0:
            device = device if layers * heads * length**2 <= _MOST else torch.device("cpu")
            shape = 0, more, 0, more
            self.sums = {name: nn.functional.pad(each.to(device), shape) for name, each in self.sums.items()}

    def add(self, number: int, included: Tensor | None, place: int, weights: Tensor, visible: Tensor) -> None:
        """Add the attention to a batch of texts in one layer, and measure each text.

        Args:
            number: The number of the batch.
            included: Which of its tokens count, (batch, n); None for a model without token ids, of which those count
                that attend to themselves.
            place: The place of the layer among the added ones.
            weights: (batch, head, n, n).
            visible: The keys that each query sees, (batch, n, n).
        """
        if included is None:
            own = visible.diagonal(dim1=-2, dim2=-1).cpu()
            behind = torch.arange(own.shape[1], device="cpu") >= self.first
            tokens = (own & behind)[:, : self.first + self.most]
        else:
            tokens = included[:, : self.most]
        check_runs(tokens)
        weights, visible = on_float64_device(weights), on_float64_device(visible)
        m, here = tokens.shape[1], tokens.to(weights.device)
        pairs = here[:, :, None] & here[:, None, :] & visible[:, :m, :m]
        if place == 0:  # every layer reads the same texts
            self.texts += int(tokens.any(1).sum())
        attention = self._add_matrices(place, weights, pairs)
        measured = tokens.sum(1) >= FEWEST
        if not bool(measured.any()):
            return
        # positions are of the tokens that are measured, from the first one on
        first, *_, last = tokens.any(0).nonzero().flatten().tolist()
        positions = self.positions_of(last + 1 - first)
        part, kept = slice(0, None) if positions is None else slice(first, last + 1), tokens[measured]
        if not bool(measured.all()):
            attention, pairs, weights = (each[measured.to(each.device)] for each in (attention, pairs, weights))
        observed = Observed(attention[..., part, part], pairs[:, part, part], weights.dtype, positions)
        whole = kept[:, part]
        values = sample_metrics(observed, None if bool(whole.all()) else whole)
        values |= self._shares(weights, kept, on_line=positions is None)
        self.per_text.setdefault(number, {})[place] = values

    def _add_matrices(self, place: int, weights: Tensor, pairs: Tensor) -> Tensor:
        """Add the attention (batch, head, n, n) of a batch over the included pairs (batch, m, m), m <= n.

        Returns:
            (batch, head, m, m): the attention over those pairs in at least float32, rows renormalised; 0 elsewhere.
        """
        m = pairs.shape[-1]
        self._grow(m, weights.device)
        included = weights[..., :m, :m].double() * pairs[:, None]  # (batch, head, m, m)
        mass = included.sum(-1, keepdim=True)
        keys = pairs.sum(-1, keepdim=True)[:, None].double()  # (batch, 1, m, 1)
        uniform = pairs[:, None] / keys.clamp(min=1)
        attention = torch.where(mass > 0, included / mass, uniform)  # uniform where the weight underflowed
        deviation = attention - uniform
        rounding = _SOFTMAX_EPS[weights.dtype] * torch.finfo(weights.dtype).eps * uniform
        added = {"total": deviation, "squares": deviation.square(), "rounding": rounding.square(), "uniform": uniform}
        for name, each in (added | {"counts": pairs[:, None]}).items():
            total = self.sums[name][place, :, :m, :m]
            total += each.sum(0).to(total.device)
        return attention.to(torch.promote_types(weights.dtype, torch.float32))

    def _shares(self, weights: Tensor, tokens: Tensor, *, on_line: bool) -> dict[str, Tensor]:
        """Return what the rows of included tokens give to tokens that are left out and to learned sinks, by head."""
        m, here = tokens.shape[1], tokens.to(weights.device)
        rows = weights[..., :m, :]
        queries = here[:, None] / here.sum(1)[:, None, None]
        total = (rows.sum(-1, dtype=torch.float64) * queries).sum(-1)
        kept = (rows[..., :m] * here[:, None, None]).sum(-1, dtype=torch.float64)
        values = {"cut_share": total - (kept * queries).sum(-1)} | ({"learned_sink": 1 - total} if self.sinks else {})
        if self.sinks and on_line:
            cropped = [row[None, :, each][..., each] for row, each in zip(rows[..., :m], here, strict=True)]
            as_they_are = [metrics_with_sink(each) for each in cropped]
            values |= {name: torch.cat([each[name] for each in as_they_are]) for name in as_they_are[0]}
        return values

    def add_processes(self) -> None:
        """Add the sums and the texts of all other processes, up to the longest text of all."""
        parts = gathered([(self.sums["counts"].shape[-1], self.texts, self.per_text)])
        self._grow(max(length for length, _, _ in parts), self.sums["counts"].device)
        self.sums = {name: summed(each).cpu() for name, each in self.sums.items()}
        self.texts = sum(texts for _, texts, _ in parts)
        self.per_text = {number: layers for *_, batches in parts for number, layers in batches.items()}

    def share(self) -> Tensor:
        """Return the share (layer, head), NaN where no pair of positions is in two sentences."""
        counts, squares = self.sums["counts"].double(), self.sums["squares"]
        # the distance to the mean of the others is N / (N - 1) times the distance to the mean of all
        error = (squares - self.sums["total"].square() / counts) * (counts / (counts - 1)).square()
        # a pair in one sentence only cannot be predicted from others
        parts = [each.where(counts >= 2, 0.0).sum((-2, -1)) for each in (error, squares, self.sums["rounding"])]
        error, squares, rounding = parts
        return torch.where(squares > rounding, 1 - error / squares, torch.nan)
