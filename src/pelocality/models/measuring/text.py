"""Sums of attention over texts, and the metrics of each text."""

import torch
from torch import Tensor, nn

from pelocality._checks import on_float64_device
from pelocality._distributed import summed
from pelocality.models.layers import AttentionLayers
from pelocality.models.measuring.rows import RowSums, Texts
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
        without_first: Of a model without token ids, how many of its tokens are left out, those of its own included.
    """

    matrices = True

    def __init__(
        self, model: SequenceModel, attending: AttentionLayers, layers: tuple[int, ...], length: int, without_first: int
    ) -> None:
        super().__init__(model, attending, layers)
        self.most, self.first = length, max(attending.before, without_first)
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

    def _add(self, place: int, weights: Tensor, visible: Tensor) -> None:  # type: ignore[override]
        """Add the attention in one layer, (batch, head, n, n) and (batch, n, n), and measure each text."""
        weights, visible = map(on_float64_device, (weights, visible))
        if weights.numel() > _MOST:
            weights, visible = weights.cpu(), visible.cpu()
        if self.texts is None:
            # behind its input a model may have more tokens of its own
            stop = min(self.first + self.most, visible.shape[-1] - self.attending.added + self.attending.before)
            own = visible.diagonal(dim1=-2, dim2=-1)[:, :stop].cpu()
            self.texts = Texts(own & (torch.arange(own.shape[1], device="cpu") >= self.first), self.fewest)
        part = self.texts.whole
        if part.start == part.stop:
            return
        own, uniform, pairs = self._measure_matrices(place, weights, visible)
        self._grow_matrices(part.stop, weights.device)
        deviation = own - uniform
        rounding = _SOFTMAX_EPS[weights.dtype] * torch.finfo(weights.dtype).eps * uniform
        added = {"total": deviation, "squares": deviation.square(), "rounding": rounding.square(), "uniform": uniform}
        for name, each in (added | {"counts": pairs[:, None]}).items():
            total = self.sums[name][place, :, part, part]
            total += (each.sum(0) if len(each) > 1 else each[0]).to(total.device)

    def add_processes(self) -> None:
        """Add the sums and the texts of all other processes, up to the longest text of all."""
        super().add_processes()
        self._grow_matrices(max((stop for _, stop in self.spans), default=0), self.sums["counts"].device)
        self.sums = {name: summed(each) for name, each in self.sums.items()}

    def share(self) -> Tensor:
        """Return the share (layer, head), NaN where no pair of positions is in two sentences."""
        counts, squares = self.sums["counts"].double(), self.sums["squares"]
        # the distance to the mean of the others is N / (N - 1) times the distance to the mean of all
        error = (squares - self.sums["total"].square() / counts) * (counts / (counts - 1)).square()
        # a pair in one sentence only cannot be predicted from others
        parts = [each.where(counts >= 2, 0.0).sum((-2, -1)) for each in (error, squares, self.sums["rounding"])]
        error, squares, rounding = parts
        return torch.where(squares > rounding, 1 - error / squares, torch.nan).cpu()
