"""Sums of attention over texts, and the metrics of each text."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pelocality._distributed import gathered, summed
from pelocality.models.inputs.tokens import runs_of_tokens
from pelocality.models.layers import AttentionLayers
from pelocality.models.measuring.samples import metrics_with_sink, sample_metrics
from pelocality.positions import Positions

FEWEST = 3
"""Tokens of a text that has a symmetry."""

# error of the softmax of equal logits, in eps: half precision is rounded once, from float32
_SOFTMAX_EPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 8}


class TextSums:
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
        self.layers, self.sinks, self.positions_of = layers, any(attending.sinks), positions_of
        self.most, self.first = length, attending.before + without_first
        self.texts = 0
        self.per_text: dict[int, dict[int, dict[str, Tensor]]] = {}  # metrics (batch, head) by batch and by layer
        # (layer, head, n, n) or (layer, 1, n, n), on the CPU, as not every accelerator has float64
        total = torch.zeros(len(layers), attending.heads, 0, 0, dtype=torch.float64, device="cpu")
        self.sums = {"total": total, "squares": total, "rounding": total[:, :1], "uniform": total[:, :1]}
        self.sums["counts"] = total[:, :1].long()

    def _grow(self, length: int) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end."""
        if (more := length - self.sums["counts"].shape[-1]) > 0:
            self.sums = {name: nn.functional.pad(each, (0, more, 0, more)) for name, each in self.sums.items()}

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
        if bool((runs_of_tokens(tokens) > 1).any()):  # between which distances are not known
            raise ValueError("a text has special tokens between its words; include them with special_tokens=True")
        m = tokens.shape[1]
        pairs = tokens[:, :, None] & tokens[:, None, :] & visible[:, :m, :m].cpu()
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
        attention, pairs = attention[measured][..., part, part], pairs[measured][:, part, part]
        values = sample_metrics(attention, pairs, kept[:, part], positions)
        values |= self._shares(weights[measured.to(weights.device)], kept, on_line=positions is None)
        self.per_text.setdefault(number, {})[place] = values

    def _add_matrices(self, place: int, weights: Tensor, pairs: Tensor) -> Tensor:
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
        rounding = _SOFTMAX_EPS[weights.dtype] * torch.finfo(weights.dtype).eps * uniform
        added = {"total": deviation, "squares": deviation.square(), "rounding": rounding.square(), "uniform": uniform}
        for name, each in (added | {"counts": pairs[:, None]}).items():
            self.sums[name][place, :, :m, :m] += each.sum(0)
        return deviation + uniform

    def _shares(self, weights: Tensor, tokens: Tensor, *, on_line: bool) -> dict[str, Tensor]:
        """Return what the rows of included tokens give to tokens that are left out and to learned sinks, by head."""
        m = tokens.shape[1]
        rows = weights[..., :m, :].cpu().double()
        queries = tokens[:, None] / tokens.sum(1)[:, None, None]
        total = (rows.sum(-1) * queries).sum(-1)
        kept = (rows[..., :m] * tokens[:, None, None]).sum(-1)
        values = {"cut_share": total - (kept * queries).sum(-1)} | ({"learned_sink": 1 - total} if self.sinks else {})
        if self.sinks and on_line:
            cropped = [row[None, :, each][..., each] for row, each in zip(rows[..., :m], tokens, strict=True)]
            as_they_are = [metrics_with_sink(each) for each in cropped]
            values |= {name: torch.cat([each[name] for each in as_they_are]) for name in as_they_are[0]}
        return values

    def add_processes(self) -> None:
        """Add the sums and the texts of all other processes, up to the longest text of all."""
        parts = gathered([(self.sums["counts"].shape[-1], self.texts, self.per_text)])
        self._grow(max(length for length, _, _ in parts))
        self.sums = {name: summed(each) for name, each in self.sums.items()}
        self.texts = sum(texts for _, texts, _ in parts)
        self.per_text = {number: layers for *_, batches in parts for number, layers in batches.items()}

    def per_sample(self) -> dict[str, Tensor]:
        """Return the metrics of all texts by name, each (text, layer, head).

        Names that a layer or a batch lacks are left out, such as past locality where layers differ in causality.
        """
        batches = [[layers[place] for place in sorted(layers)] for _, layers in sorted(self.per_text.items())]
        every = [values for layers in batches for values in layers]
        names = [name for name in every[0] if all(name in values for values in every)] if every else []
        return {name: torch.cat([torch.stack([each[name] for each in some], 1) for some in batches]) for name in names}

    def share(self) -> Tensor:
        """Return the share (layer, head), NaN where no pair of positions is in two sentences."""
        counts, squares = self.sums["counts"].double(), self.sums["squares"]
        # the distance to the mean of the others is N / (N - 1) times the distance to the mean of all
        error = (squares - self.sums["total"].square() / counts) * (counts / (counts - 1)).square()
        # a pair in one sentence only cannot be predicted from others
        parts = [each.where(counts >= 2, 0.0).sum((-2, -1)) for each in (error, squares, self.sums["rounding"])]
        error, squares, rounding = parts
        return torch.where(squares > rounding, 1 - error / squares, torch.nan)
