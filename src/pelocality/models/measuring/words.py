"""Sums of attention over words, and the metrics of each word."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pelocality._distributed import summed
from pelocality.models.measuring.samples import CAUSAL, Observed, hides_future, metrics_with_sink, sample_metrics
from pelocality.positions import Positions


class WordSums:
    """Sums over words in at least float32, and the metrics of each word; the matrices of the words are not stored."""

    def __init__(self, layers: Sequence[int], sinks: bool, part: slice, words: int, places: Positions | None) -> None:
        self.layers, self.sinks, self.part, self.words, self.places = layers, sinks, part, words, places
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

    def add(self, start: int, mean: bool, place: int, weights: Tensor, visible: Tensor) -> None:
        """Add the words from ``start`` on in one layer, (word, head, n, n) and (word, n, n), or their mean."""
        if mean:
            weights, visible = weights.mean(0, keepdim=True), visible.any(0, keepdim=True)
        part = self.part
        dtype, half = weights.dtype, weights.dtype not in (torch.float32, torch.float64)
        rows = (weights.float() if half else weights)[..., part, :]
        weights, visible = rows[..., part], visible[:, part, part]
        if not self.attention.numel():
            self.attention = weights.new_zeros(len(self.layers), *weights.shape[1:])
            self.visible = visible.new_zeros(len(self.layers), *visible.shape[1:])
        whole = rows.shape == weights.shape
        attention = weights
        if not whole or half or self.sinks:
            total, mass = rows.sum(-1, keepdim=True), weights.sum(-1, keepdim=True)
            keys = visible.sum(-1, keepdim=True)[:, None]
            if bool(((mass <= 0) & (keys == 0)).any()):
                raise ValueError(f"in layer {self.layers[place]} a query sees only the prefix or special tokens")
            uniform = (visible[:, None] / keys).to(weights.dtype)
            attention = torch.where(mass > 0, weights / mass, uniform)  # uniform where the weight underflowed
        values = sample_metrics(Observed(attention, visible, dtype, self.places))
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
        of_batch = attention.sum(0) if len(attention) > 1 else attention[0]
        self.attention[place] += of_batch.to(self.attention.device)
        self.visible[place] |= visible.any(0).to(self.visible.device)
