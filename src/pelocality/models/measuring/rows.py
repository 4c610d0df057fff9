"""Metrics of each word or text from blocks of the rows of its attention: no n x n matrix is computed."""

from typing import Any

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
from pelocality.models.layers import AttentionLayers, Rows, observe_layers
from pelocality.models.measuring.provenance import provenance
from pelocality.models.measuring.result import AveragedMetrics
from pelocality.models.measuring.samples import Observed, sample_metrics
from pelocality.models.sequence_model import SequenceModel
from pelocality.positions import Positions

FEWEST = 3
"""Tokens of a text that has a symmetry."""

# Weights of all heads and texts that are measured at a time fit a core's cache, or are enough to occupy a GPU.
_BLOCK, _BLOCK_OF_GPU = 2**20, 2**26
_SHARE = 0.9  # The share of attention within a window is that of `window`.

_COMPARED = ("locality", "irregularity", "difference", "paired")
_OTHERS = ("past", "rows_with_past", "first", "cut", "gained", "most")
_SUMS = (*_COMPARED, *_OTHERS, *(f"{name}_with_sink" for name in _COMPARED), "sink")
_SHARES = ("cut_share", "learned_sink")  # these do not depend on positions


class Texts:
    """Which tokens of a batch count, and where its texts lie.

    Attributes:
        included: These tokens, (batch, n).
        spans: The first token of each text and the one behind its last.
        alike: The numbers of the texts with each span.
        whole: The tokens from the first of any text to the last of any.
        lengths: The number of tokens of each text, (batch,), on the CPU.
        chosen: The numbers of the texts that are long enough to be measured.
    """

    def __init__(self, included: Tensor, fewest: int) -> None:
        if bool((runs_of_tokens(included) > 1).any()):
            raise ValueError("a text has special tokens between its words; include them with special_tokens=True")
        self.included, self.lengths = included, included.sum(1)
        self.chosen = (self.lengths >= fewest).nonzero().flatten()
        starts = included.int().argmax(1)
        self.spans = list(zip(starts.tolist(), (starts + self.lengths).tolist(), strict=True))
        self.alike: dict[tuple[int, int], list[int]] = {}
        for text, span in enumerate(self.spans):
            self.alike.setdefault(span, []).append(text)
        counting = [span for span in self.alike if span[0] < span[1]] or [(0, 0)]
        self.whole = slice(min(start for start, _ in counting), max(stop for _, stop in counting))


class RowSums:
    """The metrics of each text, and sums over all texts by distance, in memory that grows with n and not n squared.

    Args:
        model: The model.
        attending: Its layers.
        layers: The numbers of those that are measured.
        fewest: Tokens of a text that is measured.
    """

    matrices = False
    """Whether `_add` gets weights and visible keys of all rows, instead of `Rows`."""
    texts: Texts | None
    """Those of the batch that runs; None until they are known."""

    def __init__(
        self, model: SequenceModel, attending: AttentionLayers, layers: tuple[int, ...], fewest: int = FEWEST
    ) -> None:
        self.model, self.attending, self.layers, self.fewest = model, attending, layers, fewest
        self.block = _BLOCK if model.device.type == "cpu" else _BLOCK_OF_GPU
        empty = on_float64_device(torch.zeros(len(layers), attending.heads, 1, device=model.device))
        self.mass = empty.double()  # by signed distance, (layer, head, 2n - 1)
        # the most keys that a query sees, whether one sees later keys, and whether one sees no token that counts
        self.facts = torch.zeros(len(layers), 3, dtype=torch.long, device=self.mass.device)
        self.spans: list[tuple[int, int]] = []  # (text, begin and end)
        self.per_text: dict[int, dict[str, Tensor]] = {}  # metrics (text, layer, head) by batch
        self.parts: dict[int, tuple[Tensor, ...]] = {}  # sums by name, by distance, and facts of a batch, by place
        self.placed: dict[int, dict[str, Tensor]] = {}  # metrics (text, head) of a batch by positions, by place
        self.every_layout: dict[Any, Positions | None] = {}  # of texts, by the first token and bytes of coordinates
        self.groups: dict[Any, list[int]] = {}  # the texts of a batch with each span and layout, once it runs

    def check_line(self, length: int) -> None:
        """Refuse models that are measured by matrices alone: without token ids, or with positions that are no line."""
        if self.model.content is not None or self.model.positions_of(length) is not None:
            raise ValueError("matrices=False measures token ids on a line; measure this model with matrices=True")

    def _grow(self, length: int) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end."""
        if (more := length - (self.mass.shape[-1] + 1) // 2) > 0:
            self.mass = pad(self.mass, (more, more))

    def add(self, number: int, inputs: Any, included: Tensor | None) -> None:
        """Run the model on a batch of texts, and measure each text in each layer.

        Args:
            number: The number of the batch.
            inputs: The batch, as for `observe_layers`.
            included: Which of its tokens count, (batch, n), on the CPU; None: those that attend to themselves.

        Raises:
            ValueError: There are tokens between those that count, and distances over these are not known; or a query
                sees none of those that count.
        """
        self.texts, self.parts, self.placed = None if included is None else Texts(included, self.fewest), {}, {}
        self.grid, self.groups = self.model.grid_of(inputs), {}
        with self.model.noting_coordinates() as self.coordinates:
            observe_layers(self.model, self.attending, self.layers, inputs, self._add, rows=not self.matrices)
        if self.texts is None or not self.parts:
            return
        sums, mass, facts = map(torch.stack, zip(*(self.parts[at] for at in sorted(self.parts)), strict=True))
        self.facts = self.facts.maximum(facts)
        for place in facts[:, 2].nonzero().flatten().tolist():
            raise ValueError(f"in layer {self.layers[place]} a query sees only the prefix or special tokens")
        self.spans += [each for each in self.texts.spans if each[0] < each[1]]
        self._grow(int(self.texts.lengths.max()))
        beyond = (self.mass.shape[-1] - mass.shape[-1]) // 2  # below 0 where texts begin at different tokens
        self.mass += pad(mass.sum(1), (beyond, beyond))
        if chosen := self.texts.chosen.tolist():
            n = self.texts.lengths[chosen, None].to(mass.device)
            on_line = _metrics(sums[:, :, chosen], mass[:, chosen], n)
            values = {name: each.transpose(0, 1) for name, each in on_line.items()}
            if places := [self.placed[at] for at in sorted(self.placed)]:
                by_place = {name: torch.stack([each[name] for each in places], 1) for name in places[0]}
                values = by_place | {name: values[name] for name in _SHARES if name in values}
            self.per_text[number] = values

    def _add(self, place: int, rows: Rows) -> None:
        """Measure the texts in the layer at this place among the measured ones, in blocks of rows."""
        texts: Any = self.texts
        if any(positions is not None for _, positions in self._groups()):
            raise ValueError("matrices=False measures texts on a line; measure those with images with matrices=True")
        start, stop = texts.whole.start, texts.whole.stop
        height = max(1, self.block // (len(texts.spans) * self.attending.heads * max(1, stop)))
        for first in range(start, stop, height):
            self._measure(place, *rows(slice(first, min(first + height, stop))), first)

    def _measure_matrices(self, place: int, weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Measure matrices (batch, head, n, n), also by the positions of their tokens, and return as `_measure`."""
        texts: Any = self.texts
        first = texts.whole.start
        own, uniform, seen = self._measure(place, weights[..., texts.whole, :], visible[:, texts.whole], first)
        groups = self._groups()
        if any(positions is not None for _, positions in groups):
            measured = []
            for ((start, stop), positions), members in groups.items():
                part = slice(start - first, stop - first)
                observed = own[members][..., part, part], seen[members][:, part, part], weights.dtype, positions
                measured.append(sample_metrics(Observed(*observed)))
            order = torch.tensor([text for members in groups.values() for text in members], device="cpu").argsort()
            names = [name for name in measured[0] if all(name in each for each in measured)]
            values = {name: torch.cat([each[name] for each in measured]).to(self.mass.device)[order] for name in names}
            self.placed[place] = values
        return own, uniform, seen

    def _groups(self) -> dict[Any, list[int]]:
        """Return the texts of the batch by the span and the positions, None on a line, that they share."""
        texts: Any = self.texts
        for text in () if self.groups else texts.chosen.tolist():
            (start, stop), whole = texts.spans[text], texts.whole
            if self.coordinates and not self.model.positions_are_given:
                ids = self.coordinates[0].expand(-1, len(texts.spans), -1)[:, text, start:stop].T.cpu()
                on_line = bool((ids == ids[:, :1]).all())  # all axes count a text without images
                positions = None if on_line else Positions(ids, norm=torch.inf)
            elif (positions := self.model.positions_of(whole.stop - whole.start, self.grid)) is not None:
                positions = positions.part(start - whole.start, stop - whole.start)
            key = (-1, b"") if positions is None else (start, positions.keys.numpy().tobytes())
            self.groups.setdefault(((start, stop), self.every_layout.setdefault(key, positions)), []).append(text)
        return self.groups

    @property
    def layouts(self) -> list[Positions | None]:
        """The positions of the longest text, None on a line, and of each other text that lies not as it begins."""
        if self.model.positions_are_given:
            starts, stops = zip(*self.spans, strict=True)
            return [self.model.positions_of(max(stops) - min(starts))]
        longest, *others = sorted(self.every_layout, key=lambda layout: len(layout[1]), reverse=True)
        apart = (each for each in others if each[0] != longest[0] or not longest[1].startswith(each[1]))
        return [self.every_layout[each] for each in (longest, *apart)]

    def _measure(self, place: int, weights: Tensor, visible: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Measure rows first, first + 1, ... of all texts of the batch in a layer.

        Args:
            place: The place of the layer.
            weights: The rows over all keys, (batch, head, rows, n), or without keys behind the last row that none sees.
            visible: The keys that each query sees, (batch, rows, n).
            first: The position of the first row.

        Returns:
            Over the keys from the first of any text to the last of any: the weights (batch, head, rows, m) in at least
            float32, renormalised over each text and 0 outside of it; uniform ones (batch, 1, rows, m); and the keys of
            the text that each query sees, (batch, rows, m).
        """
        texts: Any = self.texts
        tolerance, last, at = Tolerance.for_dtype(weights.dtype), first + weights.shape[-2], first - texts.whole.start
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        kept, seen = weights[..., texts.whole], visible[..., texts.whole]
        unequal = len(texts.alike) > 1
        if unequal:
            here = texts.included.to(weights.device)
            seen = seen & here[:, first:last, None] & here[:, None, texts.whole][..., : seen.shape[-1]]
            kept = kept.masked_fill(~seen[:, None], 0)
        mass, keys = kept.sum(-1), seen.sum(-1)  # (batch, head, rows), (batch, rows)
        seeing, whole = (keys > 0)[:, None], kept.shape == weights.shape and not unequal
        total = mass if whole else torch.where(seeing, weights.sum(-1), 0)
        uniform = (seen.to(weights.dtype) / keys.clamp(min=1)[..., None])[:, None]
        own = kept / mass[..., None]
        sinks = any(self.attending.sinks)
        if not whole or sinks:
            own = torch.where(mass[..., None] > 0, own, uniform)  # uniform where the weight underflowed
        diagonal = own.diagonal(at, -2, -1)
        itself = diagonal.clone()
        diagonal.zero_()  # pairs leave it out, and the past must not be what is left after a subtraction
        near, irregularity, difference, paired, past, on_first = self._statistics(own, tolerance, first)
        diagonal.copy_(itself)
        locality, of_uniform = itself + near, row_statistics(uniform[:, 0], pairs=False, first=at).numbers[1][:, None]
        several = (keys > 1)[:, None]
        rows = [locality, irregularity, difference, paired, ratio(2 * near, past), past > 0, on_first, total - mass]
        rows += [torch.where(several, each, 0) for each in (locality - of_uniform, (1 - of_uniform).expand_as(near))]
        if sinks:
            rows += [locality * mass, irregularity * (mass > 0), difference * mass, paired * mass]
            rows += [seeing.to(total) - total]
        sums = torch.stack([each.to(near.dtype) for each in rows]).sum(-1)
        length, by_distance = texts.whole.stop - texts.whole.start, diagonal_sums(own)
        before = length - (at + own.shape[-2])  # the furthest key of the past is the first token of the last row
        by_distance = pad(by_distance, (before, 2 * length - 1 - before - by_distance.shape[-1]))
        blind = seeing.sum() < int(texts.included[:, first:last].sum())
        facts = torch.stack([keys.max(), seen.triu(at + 1).any(), blind]).to(self.facts)
        part = sums.to(self.mass), by_distance.to(self.mass), facts
        if place in self.parts:
            earlier = self.parts[place]
            part = earlier[0] + part[0], earlier[1] + part[1], earlier[2].maximum(facts)
        self.parts[place] = part
        return own, uniform, seen

    def _statistics(self, rows: Tensor, tolerance: Tolerance, first: int) -> Tensor:
        """Return locality, irregularity, difference, paired, the weight beside the diagonal and that on the first key.

        Each text is measured as a matrix of its own tokens, texts of the same tokens together; (6, batch, head, rows).
        """
        texts: Any = self.texts
        measured = rows.new_zeros(6, *rows.shape[:-1])
        for (start, stop), members in texts.alike.items():
            height, before = slice(max(0, start - first), max(0, stop - first)), texts.whole.start
            keys = slice(start - before, stop - before)
            own = (rows if len(texts.alike) == 1 else rows[members])[..., height, keys]
            if own.numel():
                hidden = stop - start - own.shape[-1]
                flat = (pad(own, (0, hidden)) if hidden else own).flatten(0, 1)
                numbers = row_statistics(flat, tolerance, first=max(first - start, 0)).numbers
                of_rows = torch.cat([numbers[1:5], numbers[5:].sum(0, keepdim=True)])  # both sides: beside the diagonal
                of_rows = torch.cat([of_rows.reshape(len(of_rows), *own.shape[:2], -1), own[None, ..., 0]])
                if len(texts.alike) == 1:
                    return of_rows
                measured[:, members, :, height] = of_rows
        return measured

    def add_processes(self) -> None:
        """Add the texts of all other processes."""
        per_text = self.per_text
        if rank_and_size()[1] > 1:  # their devices may be no device of this process
            per_text = tree_map(Tensor.cpu, per_text)
        own = self.spans, per_text, self.facts.cpu(), self.every_layout
        spans, of_texts, facts, layouts = zip(*gathered([own]), strict=True)
        self.every_layout = {key: positions for some in layouts for key, positions in some.items()}
        self.spans = [each for some in spans for each in some]
        self._grow(max((stop - start for start, stop in self.spans), default=1))
        self.mass, self.facts = summed(self.mass), torch.stack(facts).amax(0)
        self.per_text = {number: metrics for batches in of_texts for number, metrics in batches.items()}

    @property
    def causal(self) -> bool:
        """Whether no query of any layer sees a later key."""
        return self.mass.shape[-1] > 1 and not bool(self.facts[:, 1].any())

    def per_sample(self, *without: str) -> dict[str, Tensor]:
        """Return the metrics of all texts by name but some, each (text, layer, head), on the CPU.

        Past locality is that of causal attention alone.
        """
        batches = [metrics for _, metrics in sorted(self.per_text.items())]
        without += () if self.causal else ("past_locality",)
        names = [name for name in (batches[0] if batches else ()) if all(name in each for each in batches)]
        names = [name for name in names if name not in without]
        return {name: torch.cat([each[name].to(self.mass.device) for each in batches]).cpu().double() for name in names}

    def result(self, *without: str, **source: Any) -> AveragedMetrics:
        """Return the result, on the CPU, without some of its metrics and with more of its provenance."""
        n, lengths = (self.mass.shape[-1] + 1) // 2, torch.tensor(self.spans, device="cpu").diff(dim=1)
        counts = (lengths > torch.arange(n, device="cpu")).sum(0)
        pairs = counts.flip(0).cumsum(0).flip(0)  # at distance k those of texts of more than k tokens
        profile = self.mass.cpu() / torch.cat([pairs[1:].flip(0), pairs])
        return AveragedMetrics(
            profile=profile if len(self.layouts) == 1 else profile[..., :0],
            counts=counts,
            most_keys=self.facts[:, 0].cpu(),
            per_sample=self.per_sample(*without),
            layers=self.layers,
            source=provenance(self.model, self.attending, causal=self.causal, **source),
            other_layers=self.attending.others,
        )


def _metrics(sums: Tensor, mass: Tensor, n: Tensor) -> dict[str, Tensor]:
    """Return metrics (layer, text, head) from `_SUMS` (layer, name, text, head), mass and lengths (text, 1)."""
    of = dict(zip(_SUMS, sums.unbind(1), strict=False))  # those with a sink are there only if heads have one
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
    return values | ({"learned_sink": of["sink"] / n} | published("_with_sink") if "sink" in of else {})
