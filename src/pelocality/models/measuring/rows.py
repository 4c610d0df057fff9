"""Metrics of each word or text from blocks of the rows of its attention: no n x n matrix is computed."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from pelocality._checks import on_float64_device
from pelocality._distributed import gathered, rank_and_size, summed
from pelocality._toeplitz import diagonal_sums
from pelocality.metrics._ratio import ratio
from pelocality.metrics._row_pass import row_statistics
from pelocality.metrics._tolerance import Tolerance
from pelocality.metrics.distances import narrowest, sides_of
from pelocality.models.inputs.tokens import runs_of_tokens
from pelocality.models.layers import AttentionLayers, Rows
from pelocality.models.measuring.provenance import provenance
from pelocality.models.measuring.result import AveragedMetrics
from pelocality.models.sequence_model import SequenceModel

FEWEST = 3
"""Tokens of a text that has a symmetry."""

# weights of all heads and texts at a time: about the size of a core's cache, or enough to occupy a GPU
_BLOCK, _BLOCK_OF_GPU = 2**20, 2**25
_SHARE = 0.9  # of the attention within a window, as in `window`

_COMPARED = ("locality", "irregularity", "difference", "paired")
_OTHERS = ("past", "rows_with_past", "first", "gained", "most", "cut", "sink")
_SUMS = (*_COMPARED, *_OTHERS, *(f"{name}_with_sink" for name in _COMPARED))


class RowSums:
    """The metrics of each text, and sums over all texts by distance, in memory that grows with n and not n squared.

    Args:
        model: The model.
        attending: Its layers.
        layers: The numbers of those that are measured.
    """

    def __init__(self, model: SequenceModel, attending: AttentionLayers, layers: tuple[int, ...]) -> None:
        self.model, self.attending, self.layers = model, attending, layers
        self.heads, self.sinks = attending.heads, any(attending.sinks)
        self.block = _BLOCK if model.device.type == "cpu" else _BLOCK_OF_GPU
        empty = on_float64_device(torch.zeros(len(layers), self.heads, 1, device=model.device))
        self.mass = empty.double()  # by signed distance, (layer, head, 2n - 1)
        self.most_keys, self.later = empty[:, 0, 0].long(), empty[:, 0, 0].bool()
        self.spans: list[tuple[int, int]] = []  # of each text
        self.per_text: dict[int, dict[int, dict[str, Tensor]]] = {}  # metrics (batch, head) by batch and by layer

    def check_line(self, length: int) -> None:
        """Refuse models that are measured by matrices alone: without token ids, or with positions that are no line."""
        if self.model.content is not None or self.model.positions_of(length) is not None:
            raise ValueError("matrices=False measures token ids on a line; measure this model with matrices=True")

    def _grow(self, length: int) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end."""
        if (more := length - (self.mass.shape[-1] + 1) // 2) > 0:
            self.mass = pad(self.mass, (more, more))

    def add(self, number: int, included: Tensor, place: int, rows: Rows) -> None:
        """Measure a batch of texts in one layer.

        Args:
            number: The number of the batch.
            included: Which of its tokens count, (batch, n), on the CPU.
            place: The place of the layer among the measured ones.
            rows: The attention of the layer.

        Raises:
            ValueError: There are tokens between those that count, and distances over these are not known.
        """
        if bool((runs_of_tokens(included) > 1).any()):
            raise ValueError("a text has special tokens between its words; include them with special_tokens=True")
        lengths = included.sum(1)
        starts, longest = included.int().argmax(1), int(lengths.max())
        texts = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
        alike = {tokens: [text for text, each in enumerate(texts) if each == tokens] for tokens in texts}
        if not longest:
            return
        begin, end = min(start for start, _ in alike), max(stop for _, stop in alike)
        self._grow(longest)
        sums = self.mass.new_zeros(len(texts), self.heads, len(_SUMS))
        mass = self.mass.new_zeros(len(texts), self.heads, 2 * longest - 1)
        height = max(1, self.block // (len(texts) * self.heads * end))
        for first in range(begin, end, height):
            last = min(first + height, end)
            weights, visible = rows(slice(first, last))
            for (start, stop), members in alike.items():
                top, bottom = max(first, start), min(last, stop)
                if top >= bottom:
                    continue
                these = slice(None) if len(members) == len(texts) else members
                part, tokens = slice(top - first, bottom - first), slice(start, stop)
                block = _Block.of(weights[these][..., part, :], visible[these][:, part], tokens, top - start)
                by_distance = diagonal_sums(block.weights)
                # the furthest key of the past is the first token of the last row
                at = longest - (bottom - start)
                mass[these, :, at : at + by_distance.shape[-1]] += by_distance.to(mass)
                sums[these] += block.sums(self.sinks).to(mass)
                self.most_keys[place] = self.most_keys[place].maximum(block.seen.sum(-1).max().to(self.most_keys))
                self.later[place] |= block.seen.triu(block.first + 1).any().to(self.later)
        if place == 0:  # every layer reads the same texts
            self.spans += [each for each in texts if each[0] < each[1]]
        beyond = (self.mass.shape[-1] + 1) // 2 - longest
        self.mass[place] += pad(mass.sum(0), (beyond, beyond))
        some = lengths >= FEWEST
        if bool(some.any()):
            n, some = lengths[some, None].to(mass.device), some.to(mass.device)
            self.per_text.setdefault(number, {})[place] = _metrics(sums[some], mass[some], n, self.sinks)

    def add_processes(self) -> None:
        """Add the texts of all other processes."""
        per_text = self.per_text
        if rank_and_size()[1] > 1:  # their devices may be no device of this process
            per_text = tree_map(Tensor.cpu, per_text)
        parts = gathered([(self.spans, per_text, self.most_keys.cpu(), self.later.cpu())])
        spans, of_texts, most_keys, later = zip(*parts, strict=True)
        self.spans = [each for some in spans for each in some]
        self._grow(max((stop - start for start, stop in self.spans), default=1))
        self.mass = summed(self.mass)
        self.per_text = {number: layers for batches in of_texts for number, layers in batches.items()}
        self.most_keys, self.later = torch.stack(most_keys).amax(0), torch.stack(later).any(0)

    @property
    def causal(self) -> bool:
        """Whether no query of any layer sees a later key."""
        return self.mass.shape[-1] > 1 and not bool(self.later.any())

    def per_sample(self) -> dict[str, Tensor]:
        """Return the metrics of all texts by name, each (text, layer, head), on the CPU.

        Past locality is that of causal attention alone.
        """
        batches = [[layers[place] for place in sorted(layers)] for _, layers in sorted(self.per_text.items())]
        names = [name for name in (batches[0][0] if batches else ()) if self.causal or name != "past_locality"]
        device = self.mass.device
        by_batch = [
            {name: torch.stack([each[name].to(device) for each in some], 1) for name in names} for some in batches
        ]
        return {name: torch.cat([each[name] for each in by_batch]).cpu().double() for name in names}

    def result(self, *without: str, **source: Any) -> AveragedMetrics:
        """Return the result, on the CPU, without some of its metrics and with more of its provenance."""
        n, lengths = (self.mass.shape[-1] + 1) // 2, torch.tensor(self.spans, device="cpu").diff(dim=1)
        counts = (lengths > torch.arange(n, device="cpu")).sum(0)
        pairs = counts.flip(0).cumsum(0).flip(0)  # at distance k those of texts of more than k tokens
        return AveragedMetrics(
            profile=self.mass.cpu() / torch.cat([pairs[1:].flip(0), pairs]),
            counts=counts,
            most_keys=self.most_keys,
            per_sample={name: each for name, each in self.per_sample().items() if name not in without},
            layers=self.layers,
            source=provenance(self.model, self.attending.dtype, causal=self.causal, **source),
            other_layers=self.attending.others,
        )


class _Block(NamedTuple):
    """Some rows of attention.

    Attributes:
        weights: Rows first, first + 1, ... over some tokens that sum to 1, (batch, head, rows, n), a copy.
        kept: The same before they were renormalised.
        total: The sum of each row over all keys, (batch, head, rows).
        seen: The keys that each query sees, (batch, rows, n).
        first: The position of the first row.
        tolerance: Up to which a row counts as constant.
    """

    weights: Tensor
    kept: Tensor
    total: Tensor
    seen: Tensor
    first: int
    tolerance: Tolerance

    @classmethod
    def of(cls, weights: Tensor, visible: Tensor, tokens: slice, first: int) -> Self:
        """Return the part over some tokens of rows over all keys, (batch, head, rows, m) and (batch, rows, m)."""
        tolerance = Tolerance.for_dtype(weights.dtype)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        kept, seen = weights[..., tokens], visible[..., tokens]
        mass, keys = kept.sum(-1, keepdim=True), seen.sum(-1, keepdim=True)
        if not bool(keys.all()):
            raise ValueError("a query sees only the prefix or special tokens")
        uniform = (seen / keys).to(kept.dtype)[:, None]
        own = torch.where(mass > 0, kept / mass, uniform)  # uniform where the weight underflowed
        return cls(own, kept, weights.sum(-1), seen, first, tolerance)

    def sums(self, sinks: bool) -> Tensor:
        """Return `_SUMS` over the rows, (batch, head, name). The weight of each token on itself is set to 0."""
        diagonal = self.weights.diagonal(self.first, -2, -1)
        own = diagonal.clone()
        diagonal.zero_()  # pairs leave it out, and the past must not be what is left after a subtraction
        statistics = self._statistics(self.weights)
        past, near, irregularity, difference, paired = statistics
        locality, keys = own + near, self.seen.sum(-1)[:, None]  # (batch, 1, rows)
        seen = row_statistics(self.seen.to(own.dtype), pairs=False, first=self.first).numbers[1]
        uniform = seen[:, None] / keys
        rows = (
            locality,
            irregularity,
            difference,
            paired,
            ratio(2 * near, past),
            past > 0,
            self.weights[..., 0],
            torch.where(keys > 1, locality - uniform, 0),
            torch.where(keys > 1, 1 - uniform, 0).expand_as(own),
            self.total - self.kept.sum(-1),
            1 - self.total,
            *(self._statistics(self.kept)[1:] if sinks else (past,) * 4),
        )
        return torch.stack([each.to(own.dtype).sum(-1) for each in rows], -1)

    def _statistics(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Return the weight beside the diagonal, locality, irregularity, difference and paired, (batch, head, rows)."""
        numbers = row_statistics(weights.flatten(0, 1), self.tolerance, first=self.first).numbers
        return tuple(each.view(weights.shape[:3]) for each in (numbers[5] + numbers[6], *numbers[1:5]))


def _metrics(sums: Tensor, mass: Tensor, n: Tensor, sinks: bool) -> dict[str, Tensor]:
    """Return metrics (batch, head) from `_SUMS` (batch, head, name), mass by distance, and lengths (batch, 1)."""
    of = dict(zip(_SUMS, sums.unbind(-1), strict=True))
    past, future = sides_of(mass)
    by_ring = torch.cat([mass[..., past.shape[-1], None], past + future], -1)  # (batch, head, distance)
    distance = torch.arange(by_ring.shape[-1], device=mass.device)

    def published(ending: str) -> dict[str, Tensor]:
        return {
            f"locality{ending}": of[f"locality{ending}"] / n,
            f"symmetry{ending}": 1 - ratio(of[f"irregularity{ending}"], (n - 1) ** 2 // 4, torch.nan),
            f"relative_asymmetry{ending}": ratio(of[f"difference{ending}"], of[f"paired{ending}"]),
        }

    values = published("") | {
        "past_locality": ratio(of["past"], of["rows_with_past"], torch.nan),
        "adjusted_locality": ratio(of["gained"], of["most"], torch.nan),
        "mean_distance": (by_ring * distance).sum(-1) / n,
        "sink_rate": of["first"] / (n - 1),
        "window": narrowest(by_ring, _SHARE).double(),
        "cut_share": of["cut"] / n,
    }
    return values | ({"learned_sink": of["sink"] / n} | published("_with_sink") if sinks else {})
