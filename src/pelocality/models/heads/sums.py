"""The scores of each head, added up while a model runs on texts, on permuted texts and on random tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from pelocality._toeplitz import diagonal_sums
from pelocality.models.inputs.words import special_ids, special_tokens_around
from pelocality.models.layers import AttentionLayers, observe_layers
from pelocality.models.measuring.samples import hides_future
from pelocality.models.sequence_model import SequenceModel

FEWEST_TOKENS = 4  # a first token, a query, and two tokens that can change places


class StateSums:
    """Sums of hidden states over texts, by layer and position."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []  # states (n, layer, d), their squares (n, layer) and their numbers (n,)

    def add(self, states: Tensor, included: Tensor) -> None:
        """Add hidden states (layer, batch, n, d) at the included tokens (batch, n)."""
        states = states * included[..., None]
        added = [states.sum(1).movedim(1, 0), states.square().sum((1, -1)).T, included.sum(0).to(states)]
        before = self.sums or [each[:0] for each in added]
        self.sums = [pad_sequence(list(pair)).sum(1) for pair in zip(before, added, strict=True)]

    def share_and_rank(self) -> tuple[Tensor, Tensor]:
        r"""Return the share of position and the effective rank of its mean states, (layer,) each.

        With $\hat{p}_t$ the mean over texts of the states at position $t$, and $W$ their variance within positions,
        both summed over dimensions, the variance over $T$ positions is

        $$P = \frac{1}{T - 1} \sum_t \lVert \hat{p}_t - \bar{p} \rVert^2 - \frac{W}{T} \sum_t \frac{1}{N_t}$$

        where the last term is what the means of $N_t$ texts differ by anyway; the share is $P / (P + W)$. The effective
        rank is the exponential of the entropy of the singular values of $\hat{p}_t - \bar{p}$, divided by their sum.
        """
        if not self.sums:
            return torch.zeros(0), torch.zeros(0)
        several = self.sums[-1] > 1
        total, squares, counts = (each[several] for each in self.sums)
        if len(counts) < 2:
            return (torch.full(total.shape[1:2], torch.nan),) * 2
        mean, squares = total.movedim(1, 0) / counts[:, None], squares.T
        within = (squares - counts * mean.square().sum(-1)).sum(-1) / (counts - 1).sum()
        centred = mean - mean.mean(1, keepdim=True)
        position = centred.square().sum((1, 2)) / (len(counts) - 1) - within * (1 / counts).mean()
        values = torch.linalg.svdvals(centred)
        values = values / values.sum(-1, keepdim=True)
        return position / (position + within), torch.special.entr(values).sum(-1).exp()


class HeadSums:
    """Adds up the scores of each layer and head while a model runs."""

    def __init__(self, model: SequenceModel, attending: AttentionLayers, layers: tuple[int, ...], length: int) -> None:
        self.model, self.attending, self.layers, self.length, self.reach = model, attending, layers, length, length // 2
        self.per_sample: dict[str, list[Tensor]] = {}  # (batch, layer, head) each
        self.states, self.texts, self.visible = StateSums(), 0, torch.zeros(0, dtype=torch.bool)
        self.permuted = False  # whether any text was
        size = (len(layers), attending.heads)
        self.by_distance = torch.zeros(2, *size, 2 * self.reach + 1, dtype=torch.float64)  # sums, and numbers of texts
        self.products = torch.zeros(2, 4, *size, dtype=torch.float64)  # positional and symbolic

    def observe(self, inputs: Any, take: Callable[[int, Tensor, Tensor], Any]) -> list[Any]:
        """Return what a function takes of the number, the weights and the visible keys of each layer."""
        taken: dict[int, Any] = {}
        dtype = torch.promote_types(self.attending.dtype, torch.float32)

        def use(place: int, weights: Tensor, visible: Tensor) -> None:
            taken[place] = take(place, weights.to("cpu", dtype).nan_to_num(0), visible.cpu())  # NaN: padded queries

        observe_layers(self.model, self.attending, self.layers, inputs, use)
        return [taken[place] for place in range(len(self.layers))]

    def add_random(self, inputs: dict[str, Tensor], name: str) -> None:
        """Add random tokens: the attention from their second half to the tokens that a repetition would be of."""
        half = self.length // 2
        before = inputs["special_tokens_mask"][0].tolist().index(0)
        tokens = {each: inputs[each] for each in ("input_ids", "attention_mask")}

        def take(place: int, weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            block = weights[..., before + half + 1 : before + 2 * half, before + 1 : before + half]
            return block.diagonal(0, -2, -1).mean(-1), block.diagonal(1, -2, -1).mean(-1), visible[0]

        duplicate, induction, visible = (torch.stack(each) for each in zip(*self.observe(tokens, take), strict=True))
        self.visible = visible
        self._add_samples({f"duplicate{name}": duplicate, f"induction{name}": induction})

    def add_texts(self, inputs: dict[str, Tensor], included: Tensor, permutations: int, seed: int) -> None:
        """Add a batch of texts: their attention as they are, and permuted, and their hidden states.

        Those with images are not permuted, and steps from token to token are those of their positions on all axes.
        """
        special = inputs["attention_mask"].cpu().bool() & ~included
        position = torch.arange(included.shape[1], device="cpu")
        special[:, 0], included = True, included & (position < self.length)
        enough = included.sum(1) >= FEWEST_TOKENS
        if not bool(enough.any()):
            return
        kept, rows = included & enough[:, None] & (position > 0), enough.nonzero().flatten()
        special, included, keys = special[rows], included[rows], kept[rows]
        places, causal = [row.nonzero().flatten() for row in included], any(map(hides_future, self.visible))
        query = torch.stack([each[-1 if causal else len(each) // 2] for each in places])

        def take(place: int, weights: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
            weights, visible = weights[rows], visible[rows]
            pairs = included[:, :, None] & keys[:, None] & visible
            coordinates = noted[0].cpu().expand(-1, len(enough), -1)[:, rows] if noted else None
            paired = _by_distance(pairs[:, None].to(weights), self.reach, coordinates)
            mean = _by_distance(weights * pairs[:, None], self.reach, coordinates) / paired  # NaN without a pair
            learned = int(self.attending.sinks[self.attending.layers.index(self.layers[place])])
            rests = (weights * special[:, None, None]).sum(-1) + learned * (1 - weights.sum(-1))
            even = ((visible & special[:, None]).sum(-1) + learned) / (visible.sum(-1) + learned).clamp(min=1)
            rests = torch.cat([rests, even[:, None].to(rests)], 1)  # (batch, head + 1, n), the last for uniform weights
            sink = (rests * keys[:, None]).sum(-1) / keys.sum(1, keepdim=True)
            return mean, sink, weights[range(len(rows)), :, query], visible[range(len(rows)), query]

        with self.model.noting_coordinates() as noted:
            observed = self.observe(inputs, take)
        mean, sink, before, seen = (torch.stack(each) for each in zip(*observed, strict=True))
        self.by_distance += torch.stack([mean.nan_to_num(0), (~mean.isnan()).double()]).sum(2)
        near = {name: mean[..., self.reach + k] for name, k in (("previous", -1), ("self", 0), ("next", 1))}
        by_chance = sink[..., -1:].expand(mean.shape[:-1])
        self._add_samples(near | {"sink": sink[..., :-1], "sink_control": by_chance})
        moving = keys & (position != query[:, None])
        images = self.model.holds_images(inputs)
        self.permuted |= not images
        for repeat in range(0 if images else permutations):
            generators = [np.random.default_rng((seed, self.texts + row, repeat)) for row in range(len(rows))]
            target = torch.stack([_permuted_tokens(*each) for each in zip(moving, generators, strict=True)])
            ids = inputs["input_ids"].clone()
            ids[rows] = torch.empty_like(ids[rows]).scatter(1, target.to(ids.device), ids[rows])
            permuted = self.observe(inputs | {"input_ids": ids}, lambda place, weights, _: weights[rows, :, query])
            for place, (one, other, visible) in enumerate(zip(before, permuted, moving & seen, strict=True)):
                followed, both = other.gather(-1, target[:, None].expand_as(other)), visible & visible.gather(1, target)
                self.products[0, :, place] += _products(one, other, visible)
                self.products[1, :, place] += _products(one, followed, both)
        self.texts += len(rows)
        self._add_states(inputs, kept[:, : self.length])

    def _add_states(self, inputs: dict[str, Tensor], kept: Tensor) -> None:
        """Add the hidden states that the model returns, if it does, at the tokens that are kept, (batch, n)."""
        if self.model.config is None:
            return
        states = getattr(self.model.outputs(inputs, output_hidden_states=True), "hidden_states", None) or ()
        states = [each[:, : self.length].cpu().double() for each in states]
        if states and len({each.shape for each in states}) == 1 and states[0].shape[:2] == kept.shape:
            self.states.add(torch.stack(states), kept)

    def _add_samples(self, scores: Mapping[str, Tensor]) -> None:
        """Add the scores of samples, (layer, batch, head) each."""
        for name, each in scores.items():
            self.per_sample.setdefault(name, []).append(each.transpose(0, 1).double())

    def offsets(self) -> dict[str, Tensor]:
        """Return the distance with the largest mean attention, and that mean, (layer, head) each."""
        weight, place = (self.by_distance[0] / self.by_distance[1]).nan_to_num(-1.0).max(-1)
        return {"offset": (place - self.reach).double(), "offset_weight": weight}

    def correlations(self) -> dict[str, Tensor]:
        """Return how much attention stays in place, and how much follows the tokens, (layer, head) each."""
        across, one, other, size = self.products.unbind(1)
        varies = one > (8 * torch.finfo(self.attending.dtype).eps) ** 2 * size  # more than by rounding
        correlations = torch.where(varies, across / (one * other).sqrt(), torch.nan)
        return dict(zip(("positional", "symbolic"), correlations, strict=True))


def random_tokens(
    model: SequenceModel, tokenizer: Any, length: int, sequences: int, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sequences of different random tokens, and those whose first half comes twice, with special tokens."""
    before, after = special_tokens_around(tokenizer) if tokenizer is not None else ([], [])
    model.check_length(length, len(before) + len(after))
    size = model.vocabulary if tokenizer is None else min(model.vocabulary, len(tokenizer))
    special = [*special_ids(model, tokenizer), *([] if model.padding is None else [model.padding])]
    ordinary, half = np.setdiff1d(np.arange(size), special), length // 2
    if len(ordinary) < length:
        raise ValueError(f"length={length} needs as many different tokens, and the vocabulary has {len(ordinary)}")
    generator = np.random.default_rng(seed)
    plain = np.stack([generator.choice(ordinary, length, replace=False) for _ in range(sequences)])
    repeated = np.concatenate([plain[:, :half], plain[:, :half], plain[:, 2 * half :]], 1)
    special_mask = torch.tensor([1] * len(before) + [0] * length + [1] * len(after)).expand(sequences, -1)

    def inputs(rows: Any) -> dict[str, Tensor]:
        ids = torch.tensor([[*before, *row, *after] for row in rows.tolist()], device=model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "special_tokens_mask": special_mask}

    return inputs(plain), inputs(repeated)


def in_batches(inputs: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Return inputs in batches of a size."""
    number = len(next(iter(inputs.values())))
    return [{name: each[i : i + size] for name, each in inputs.items()} for i in range(0, number, size)]


def _by_distance(matrices: Tensor, reach: int, coordinates: Tensor | None) -> Tensor:
    """Return the sums of matrices (batch, head, n, n) over the pairs at each distance from -reach to reach.

    With coordinates (axis, batch, n), over the pairs with this distance on every axis.
    """
    if coordinates is not None and not bool((coordinates == coordinates[0]).all()):
        steps = (coordinates[:, :, None] - coordinates[..., None]).clamp(-reach - 1, reach + 1)
        number = (steps[0].where((steps == steps[0]).all(0), reach + 1) + reach + 1)[:, None]
        zeros = matrices.new_zeros(*matrices.shape[:-2], 2 * reach + 3)
        return zeros.scatter_add(-1, number.expand(matrices.shape).flatten(-2), matrices.flatten(-2))[..., 1:-1]
    return pad(diagonal_sums(matrices), [reach + 1 - matrices.shape[-1]] * 2)  # a negative number cuts


def _permuted_tokens(moving: Tensor, generator: np.random.Generator) -> Tensor:
    """Return the new place of each token, where those that move (n,) change places among themselves."""
    target, places = torch.arange(len(moving), device="cpu"), moving.nonzero().flatten()
    target[places] = places[torch.from_numpy(generator.permutation(len(places)))]
    return target


def _products(one: Tensor, other: Tensor, keys: Tensor) -> Tensor:
    """Return sums over texts of products of deviations from the mean over keys, (4, head).

    Args:
        one: Attention of a query, (batch, head, n).
        other: The same in another order of the tokens.
        keys: The keys that count, (batch, n).
    """
    keys = keys[:, None].to(one)
    means = ((each * keys).sum(-1, keepdim=True) / keys.sum(-1, keepdim=True).clamp(min=1) for each in (one, other))
    a, b = (keys * (each - mean) for each, mean in zip((one, other), means, strict=True))
    return torch.stack([a * b, a * a, b * b, one * one * keys]).sum((1, 3)).double()
