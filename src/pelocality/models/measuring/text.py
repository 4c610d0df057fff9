"""Sums of attention over texts, and the metrics of each text."""

import torch
from torch import Tensor, nn

from pelocality._checks import on_float64_device
from pelocality._distributed import summed
from pelocality.models.layers import AttentionLayers, Rows
from pelocality.models.measuring.rows import FEWEST, RowSums
from pelocality.models.measuring.samples import Observed, sample_metrics
from pelocality.models.sequence_model import SequenceModel

_MOST = 2**27  # weights of a layer that are added on the device of the model, and numbers of a sum there

# error of the softmax of equal logits, in eps: half precision is rounded once, from float32
_SOFTMAX_EPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 8}


class TextSums(RowSums):
    """Sums over texts of the deviations from uniform attention, for each layer, head and pair of positions.

    Args:
        model: The model.
        attending: Its layers.
        layers: The numbers of those that are added.
        length: The number of first positions that are added.
        without_first: Of a model without token ids, how many of its tokens are left out.
    """

    def __init__(
        self, model: SequenceModel, attending: AttentionLayers, layers: tuple[int, ...], length: int, without_first: int
    ) -> None:
        super().__init__(model, attending, layers)
        self.most, self.before = length, attending.before + without_first
        # (layer, head, n, n) or (layer, 1, n, n)
        total = torch.zeros(len(layers), attending.heads, 0, 0, dtype=torch.float64, device="cpu")
        self.sums = {"total": total, "squares": total, "rounding": total[:, :1], "uniform": total[:, :1]}
        self.sums["counts"] = total[:, :1].long()

    def _grow_matrices(self, length: int, device: torch.device) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end.

        They are on the device of the weights, or of many weights on the CPU.
        """
        layers, heads, n, _ = self.sums["total"].shape
        if (more := length - n) > 0:
            device = device if layers * heads * length**2 <= _MOST else torch.device("cpu")
            shape = 0, more, 0, more
            self.sums = {name: nn.functional.pad(each.to(device), shape) for name, each in self.sums.items()}

    def add(self, number: int, included: Tensor | None, place: int, rows: Rows) -> None:
        """Add the attention to a batch of texts in one layer, and measure each text.

        Args:
            number: The number of the batch.
            included: Which of its tokens count, (batch, n); None for a model without token ids, of which those count
                that attend to themselves.
            place: The place of the layer among the added ones.
            rows: The attention of the layer.
        """
        weights, visible = map(on_float64_device, rows(slice(None)))
        if weights.numel() > _MOST:
            weights, visible = weights.cpu(), visible.cpu()
        if included is None:
            own = visible.diagonal(dim1=-2, dim2=-1).cpu()
            included = (own & (torch.arange(own.shape[1], device="cpu") >= self.before))[:, : self.before + self.most]
        super().add(number, included, place, lambda part: (weights[..., part, :], visible[:, part]))
        m, here = included.shape[1], included.to(weights.device)
        pairs = here[:, :, None] & here[:, None, :] & visible[:, :m, :m]
        attention = self._add_pairs(place, weights, pairs)
        first, *_, last = included.any(0).nonzero().flatten().tolist() * 2 or [0, -1]
        # positions are of the tokens that are measured, from the first one on
        positions = self.model.positions_of(last + 1 - first) if last >= first else None
        of_texts, part = self.per_text.get(number, {}), slice(first, last + 1)
        if positions is not None and place in of_texts:
            some = included.sum(1) >= FEWEST
            attention, pairs = (each[some.to(each.device)][..., part, part] for each in (attention, pairs))
            kept, shares = included[some, part], {"cut_share", "learned_sink"} & of_texts[place].keys()
            observed = Observed(attention, pairs, weights.dtype, positions)
            on_line, of_texts[place] = of_texts[place], sample_metrics(observed, None if bool(kept.all()) else kept)
            of_texts[place] |= {name: on_line[name] for name in shares}

    def _add_pairs(self, place: int, weights: Tensor, pairs: Tensor) -> Tensor:
        """Add the attention (batch, head, n, n) of a batch over the included pairs (batch, m, m), m <= n.

        Returns:
            (batch, head, m, m): the attention over those pairs in at least float32, rows renormalised; 0 elsewhere.
        """
        m = pairs.shape[-1]
        self._grow_matrices(m, weights.device)
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

    def add_processes(self) -> None:
        """Add the sums and the texts of all other processes, up to the longest text of all."""
        super().add_processes()
        self._grow_matrices(max((stop for _, stop in self.spans), default=0), self.sums["counts"].device)
        self.sums = {name: summed(each).cpu() for name, each in self.sums.items()}

    def share(self) -> Tensor:
        """Return the share (layer, head), NaN where no pair of positions is in two sentences."""
        counts, squares = self.sums["counts"].double(), self.sums["squares"]
        # the distance to the mean of the others is N / (N - 1) times the distance to the mean of all
        error = (squares - self.sums["total"].square() / counts) * (counts / (counts - 1)).square()
        # a pair in one sentence only cannot be predicted from others
        parts = [each.where(counts >= 2, 0.0).sum((-2, -1)) for each in (error, squares, self.sums["rounding"])]
        error, squares, rounding = parts
        return torch.where(squares > rounding, 1 - error / squares, torch.nan)
