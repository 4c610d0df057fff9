"""Sums of attention over words, and the metrics of each word."""

import torch
from torch import Tensor

from pelocality._distributed import summed
from pelocality.models.layers import AttentionLayers
from pelocality.models.measuring.rows import RowSums
from pelocality.models.sequence_model import SequenceModel


class WordSums(RowSums):
    """Sums over words in at least float32, and the metrics of each word; the matrices of the words are not stored.

    Args:
        model: The model.
        attending: Its layers.
        layers: The numbers of those that are added.
        length: The number of positions n.
    """

    matrices = True

    def __init__(self, model: SequenceModel, attending: AttentionLayers, layers: tuple[int, ...], length: int) -> None:
        super().__init__(model, attending, layers, fewest=1)
        shape = len(layers), attending.heads, length, length
        dtype = torch.promote_types(attending.dtype, torch.float32)
        self.attention = torch.zeros(shape, dtype=dtype, device=model.device)  # (layer, head, n, n)
        self.visible = torch.zeros(len(layers), length, length, dtype=torch.bool, device=model.device)

    def _add(self, place: int, weights: Tensor, visible: Tensor) -> None:  # type: ignore[override]
        """Add the words in one layer, (word, head, n, n) and (word, n, n); of content that is no word, their mean."""
        if self.model.content is not None:
            weights, visible = weights.mean(0, keepdim=True), visible.any(0, keepdim=True)
        own, _, seen = self._measure_matrices(place, weights, visible)
        self.attention[place] += (own.sum(0) if len(own) > 1 else own[0]).to(self.attention.device)
        self.visible[place] |= seen.any(0).to(self.visible.device)

    def add_processes(self) -> None:
        """Add the words of all other processes."""
        super().add_processes()
        self.attention, self.visible = summed(self.attention), summed(self.visible.int()) > 0
