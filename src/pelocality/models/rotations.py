"""How a model rotates queries and keys, read from these while it runs.

Every linear map of the tokens returns one vector at all of them (as in an audit), so that queries and keys differ by
their rotation alone, wherever a model computes it: in a rotary module, from a table, or inside of attention. Two
dimensions turn together if the sum of their squares is the same at every token. The angle of each token must follow
from its coordinates, or the model is refused: nothing is taken from a buffer or a family's record.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pelocality._checks import count
from pelocality.models._calls import argument_names, call_of
from pelocality.models._inference import inference
from pelocality.models._restore import hooked
from pelocality.models.auditing.measured import SHORT, Call, Recorder, unrotated
from pelocality.models.sequence_model import SequenceModel

_FARTHEST = 2**20  # the farthest place of a token: slow bands turn there too, and fast ones are rounded by .03 radians
_COUNTED = 1009  # tokens of a model that takes no position ids; a prime, so that hardly another axis has its size
_LARGE = 2**24  # numbers of a tensor that is a matrix of weights rather than states
_ROUNDING = 2e-4, 3e-7  # radians by which angles of float32 are off near the origin, and as a share of large angles
_STILL = 1e-5  # a dimension turns if its squares differ between tokens by more, relative to their mean
_PAIRED = 1e-2  # two dimensions turn together if the sum of their squares differs by less than this share of each


class Rotation(NamedTuple):
    """How one attention rotates queries and keys: band f of a token at x turns by ``frequencies[f] @ (x + shift)``.

    Attributes:
        pairs: The dimensions of each band, (band, 2), of which the first turns towards the second.
        frequencies: Radians per unit of each coordinate, (1, band, axis), or (heads, band, axis) if heads differ.
        shift: What is added to coordinates, (axis,): DINOv3 counts from the centre of an image, and Llama 4 from 1,
            which [CLS] and registers, that do not turn, make a difference. 0 where all tokens turn.
        scaling: The factor of what is rotated.
    """

    pairs: Tensor
    frequencies: Tensor
    shift: Tensor
    scaling: float = 1.0

    @property
    def axis(self) -> Tensor:
        """The coordinate that turns each band, (band,); -1 for none or several."""
        turns = (self.frequencies != 0).any(0)
        return turns.int().argmax(-1).where(turns.sum(-1) == 1, -1)

    def same_as(self, other: "Rotation") -> bool:
        """Return whether another rotation is the same but for rounding."""
        if not torch.equal(self.pairs, other.pairs) or self.frequencies.shape != other.frequencies.shape:
            return False
        one, two = (torch.cat([each.frequencies.flatten(), torch.tensor([each.scaling])]) for each in (self, other))
        return torch.allclose(one, two, rtol=1e-3, atol=1e-3 / _FARTHEST)


class Run(NamedTuple):
    """What a model made of tokens that are equal.

    Attributes:
        inputs: The inputs.
        places: The coordinates (n, axis) of the tokens but those that have none.
        calls: Each self-attention of which queries and keys were seen.
        states: The queries and keys of each, (head, n, d), on the CPU.
    """

    inputs: Any
    places: Tensor
    calls: list[Call]
    states: list[Tensor]


def rotation_of_model(given: Any, layer_type: str | None, length: int | None) -> tuple[Rotation, float]:
    """Return the one rotation of a model, or of its layers of a type, and the base that is declared.

    Raises:
        ValueError: There is none, or there are several; or as for `read_rotations`.
    """
    model = SequenceModel.of(given)
    if length is not None:
        count("length", length, least=2)
    config: Any = None if model.config is None else model.config.get_text_config()
    types = dict(enumerate(getattr(config, "layer_types", None) or ()))
    read = read_rotations(model, length)
    every = [(types.get(call.block[1]) if call.block else None, each) for call, each in read if each is not None]
    chosen = [(kind, each) for kind, each in every if layer_type in (None, kind)]
    if not chosen or not all(chosen[0][1].same_as(each) for _, each in chosen):
        kinds = ", ".join(sorted({kind or "all" for kind, _ in every})) or "no layers"
        advice = "name a layer_type, or pass the part of the model that is meant"
        reason = f"has several rotations, or none of layer_type={layer_type!r}: {kinds} rotate"
        raise ValueError(f"{model} {reason}; {advice}")
    kind, rotation = chosen[0]
    parameters = getattr(config, "rope_parameters", None) or {}
    declared = parameters.get(kind, parameters).get("rope_theta", getattr(config, "rope_theta", None))
    return rotation, float(declared or 10_000.0)


def read_rotations(model: SequenceModel, length: int | None = None) -> list[tuple[Call, Rotation | None]]:
    """Return each self-attention in the order in which they run, and its rotation or None.

    Args:
        model: The model. One that reads no token ids runs on its content.
        length: The number of tokens of its inputs; None: any number, for which the rotation is the same.

    Raises:
        ValueError: Queries and keys change by their place, but not by a rotation, or by other angles in longer inputs;
            or there is no length for a model that reads no token ids.
    """
    with inference(model.module), model.observable():
        runs = _text_runs(model, length) if model.content is None else [_content_run(model, length)]
        with unrotated(model.module):
            still = _run(model, runs[-1].inputs, runs[-1].places)
    places, read = runs[-1].places, list[tuple[Call, Rotation | None]]()
    for number, (call, states) in enumerate(zip(runs[-1].calls, runs[-1].states, strict=True)):
        reason = "turns queries and keys, but not by the places of its tokens"
        try:
            rotation = rotation_of(states, places)
            reason = "has frequencies that depend on the length of its input, so give length="
            if len(runs) > 1:  # tokens of all runs are equal, and text has one coordinate on all axes
                every = torch.cat([run.places.expand(-1, places.shape[1]) for run in runs])
                rotation = rotation_of(torch.cat([run.states[number] for run in runs], 1), every)
        except ValueError as error:
            raise ValueError(f"{model} {reason}: {error}") from None
        if rotation is not None:
            turned, before = (each[..., rotation.pairs.flatten()].norm() for each in (states, still.states[number]))
            scaling = float(turned / before)
            rotation = rotation._replace(scaling=1.0 if abs(scaling - 1) < 1e-6 else scaling)
        read.append((call, rotation))
    return read


# ---- runs


def _text_runs(model: SequenceModel, length: int | None) -> list[Run]:
    """Return runs of a text of one token id: counted, and at places given as position ids, or of more tokens."""
    most = [min(model.longest or each, each) for each in (SHORT, _COUNTED)]
    taken = _sizes(model)
    short, long = (next((n for n in range(each, 2, -1) if n not in taken), each) for each in most)
    runs = [_text_run(model, torch.arange(length or short)[:, None], placed=False)]
    if model.reads("position_ids"):
        with suppress(ValueError):  # a table of angles may have no row for a position
            far = _text_run(model, _places(model, runs[0].inputs, length or _FARTHEST))
            pairs = ((a[:, : b.shape[1]], b[:, : a.shape[1]]) for a, b in zip(runs[0].states, far.states, strict=True))
            if not all(torch.allclose(*each, atol=1e-4, rtol=1e-2) for each in pairs):  # it does not count its tokens
                return [*runs[: length is None], far]
    with suppress(ValueError):  # a table may have fewer rows
        if length is None:
            runs.append(_text_run(model, torch.arange(long)[:, None], placed=False))
    return runs


def _sizes(model: SequenceModel) -> set[int]:
    """Return the numbers of tokens that are the size of an axis of the weights, also with one token more."""
    return {size - more for each in model.module.parameters() for size in each.shape for more in (0, 1)}


def _text_run(model: SequenceModel, places: Tensor, *, placed: bool = True) -> Run:
    """Return a run of one token id at each of these places, given as position ids unless they are counted."""
    ids = torch.full((1, len(places)), model.some_ids(1)[0], device=model.device)
    inputs = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if model.reads("attention_mask") else {})
    position_ids = (places.T if places.shape[1] == 1 else places.T[:, None]).to(ids.device)
    return _run(model, inputs | ({"position_ids": position_ids} if placed else {}), places)


def _content_run(model: SequenceModel, length: int | None) -> Run:
    """Return a run of the content of a model that reads no token ids, at its positions or on a line."""
    if length is None or model.content is None:
        raise ValueError(f"length must be given, the number of tokens of {model}, which reads no token ids")
    return _run(model, model.content(0, length), content_places(model, length))


def content_places(model: SequenceModel, length: int) -> Tensor:
    """Return the coordinates (n, axis) of the content of a model that reads no token ids, or a line."""
    positions = model.positions_of(length)
    return torch.arange(length)[:, None] if positions is None else torch.as_tensor(positions.keys).cpu()


def _places(model: SequenceModel, inputs: Any, farthest: int) -> Tensor:
    """Return places that show every axis of a model's position ids, (n, axis).

    The origin, 1, 2, 4... on each axis alone, and neighbours of the origin on all axes, in a clear number.
    """
    axes = {1}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = call_of(module, args, kwargs).get("position_ids")
        axes.update([len(ids)] if isinstance(ids, Tensor) and ids.ndim == 3 else [])

    readers = [each for each in model.module.modules() if "position_ids" in argument_names(each)]
    with hooked(readers, before=note):
        model.run(inputs)
    every, farthest = range(max(axes)), min(farthest, model.longest or farthest) - 1
    steps = sorted({farthest, *(2**k for k in range(farthest.bit_length()))} - {0})
    places = [[0 for _ in every], *([step * (axis == other) for other in every] for axis in every for step in steps)]
    taken = _sizes(model)
    while len(places) < SHORT or len(places) in taken:
        places.append([len(places) * (axis + 1) % (farthest + 1) for axis in every])
    return torch.tensor(places, device="cpu")


def tokens_seen(model: SequenceModel, inputs: Any) -> list[int]:
    """Return the number of tokens of each self-attention of a model on a batch."""
    seen: list[int] = []
    model.watch(inputs, lambda attention: seen.append(attention.weights.shape[-2]), None)
    return seen


class _Float32(Recorder):
    """Records queries and keys of constant content, computed in float32 by a model in half precision too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or func is nn.functional.embedding:
            return _in_float32(super().__torch_function__(func, types, args, kwargs))
        if (constant := self._constant_map(func, args, kwargs)) is not None:
            return _in_float32(constant)
        return super().__torch_function__(func, types, *tree_map(_in_float32, (args, kwargs)))


def _in_float32(each: Any) -> Any:
    """Return a tensor of half precision in float32, but not large ones: weights, of which nothing is read."""
    half = isinstance(each, Tensor) and each.dtype in (torch.float16, torch.bfloat16)
    return each.float() if half and each.numel() < _LARGE else each


def _run(model: SequenceModel, inputs: Any, places: Tensor) -> Run:
    """Run a model with one vector at all tokens in place of each linear map of these."""
    tokens = len(places)
    if model.content is not None:  # it may add tokens of its own
        tokens = min((n for n in tokens_seen(model, inputs) if n >= tokens), default=tokens)
    recorder = _Float32(tokens)
    recorder.part = slice(None)
    with model.explaining(inputs), recorder.observing(model.module):
        model.run(inputs)
    calls: list[Any] = [call for call in recorder.calls if call.query is not None and call.key is not None]
    return Run(inputs, places, calls, [torch.cat([call.query, call.key]).cpu().double() for call in calls])


# ---- from queries and keys to a rotation


def rotation_of(states: Tensor, places: Tensor) -> Rotation | None:
    """Return how states (head, n, d) that are equal but for their rotation are rotated, None for not at all.

    Args:
        states: Queries and keys in float64. Some of the first or of the last tokens may have no place.
        places: The coordinates of the others, (n, axis), from the lowest corner on.

    Raises:
        ValueError: The states change, but not by a rotation by these places.
    """
    states = nn.functional.normalize(states, dim=-1)  # Llama 4 scales queries by their position
    pairs = _pairs(states)
    if not len(pairs):
        return None
    every = torch.complex(*states[..., pairs].unbind(-1))  # (head, n, band)
    return _with_still_bands(pairs, *waves_of(every, places), states.shape[-1])


def waves_of(every: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the wave vectors (1 or heads, band, axis) of bands (head, n, band), complex numbers, and the shift.

    Raises:
        ValueError: These do not turn by the places (n, axis).
    """
    places = places.double()
    extra, least = every.shape[1] - len(places), torch.inf
    by_head = [len(every) // 2] * (len(every) % 2 == 0)
    for before, heads in itertools.product(dict.fromkeys((extra, 0)), (1, *by_head)):
        part = slice(before, before + len(places))
        still = every[:, -1 if extra and not before else 0, None]
        of_heads = (every * still.conj()).view(-1, heads, *every.shape[1:])
        turns = of_heads.sum(0)
        placed, steps = turns[:, part], places - places[0]
        frequencies = _frequencies((placed * placed[:, :1].conj()).angle(), steps)
        first, by_band = placed[0, 0].angle(), frequencies[0].tolist()
        shift = places_at(first, by_band) - places[0] if extra else torch.zeros_like(places[0])
        angles = torch.zeros_like(turns.real)
        angles[:, part] = (places + shift if extra else steps) @ frequencies.mT
        off = radians_off(of_heads.angle(), angles)
        if off <= 0:
            return frequencies, shift
        least = min(least, off)
    raise ValueError(f"angles are off by {least:.2g} radians from those of frequencies")


def _pairs(states: Tensor) -> Tensor:
    """Return the dimensions that turn together, (band, 2): those of which the sum of squares is equal at all places."""
    squares = states.square()
    change = squares - squares.mean(1, keepdim=True)  # (head, n, d)
    together = torch.einsum("hni,hnj->ij", change, change)
    alone = together.diagonal()
    turning = (alone > (_STILL * squares.mean()) ** 2 * squares[..., 0].numel()).nonzero().flatten()
    if not len(turning):
        return turning.new_zeros(0, 2)
    of_sum = (alone[:, None] + alone + 2 * together)[turning][:, turning].fill_diagonal_(torch.inf)
    least, partner = of_sum.min(1)
    lonely = least > _PAIRED * alone[turning]
    if bool(lonely.any()) or not torch.equal(partner[partner], torch.arange(len(partner))):
        raise ValueError(f"dimensions {turning[lonely].tolist()} turn with no other one, or not by the same angle")
    first = turning < turning[partner]
    return torch.stack([turning[first], turning[partner][first]], 1)


def _frequencies(turns: Tensor, steps: Tensor) -> Tensor:
    """Return radians per unit (head, band, axis) of angles (head, n, band) at steps (n, axis) from the first place.

    Steps along one axis are taken from the shortest, which turns by less than pi. Each longer one corrects the
    frequency, as the number of its whole turns is known by then.
    """
    frequencies = turns.new_zeros(len(turns), turns.shape[-1], steps.shape[1])
    for axis in range(steps.shape[1]):
        alone = ((steps[:, axis] > 0) & (steps.count_nonzero(1) == 1)).nonzero().flatten()
        for token in alone[steps[alone, axis].argsort()].tolist():
            step = steps[token, axis]
            frequencies[..., axis] += _within_half_turn(turns[:, token] - step * frequencies[..., axis]) / step
    return frequencies.where(frequencies.abs() * steps.amax(0) > _STILL, 0.0)


def places_at(angles: Tensor, waves: Sequence[Sequence[float]]) -> Tensor:
    """Return the coordinates (..., axis) of tokens by the angles of their bands (..., band), from slow to fast ones."""
    turning = angles.new_tensor(waves)  # (band, axis)
    places = angles.new_zeros(*angles.shape[:-1], turning.shape[1])
    for solution in _solutions(tuple(map(tuple, waves))):
        places = places + _within_half_turn(angles - places @ turning.mT) @ solution.to(angles)
    return places


@functools.lru_cache
def _solutions(waves: tuple[tuple[float, ...], ...]) -> list[Tensor]:
    """Return least squares (band, axis) of the slowest bands, of those up to 4 times as fast, and so on to all."""
    every = torch.tensor(waves, dtype=torch.float64, device="cpu")
    speed = every.norm(dim=-1, keepdim=True)
    turning = speed[speed > 0].tolist() or [1.0]
    limits = [min(turning) * 4**step for step in range(math.ceil(math.log(max(turning) / min(turning), 4)) + 1)]
    return [torch.linalg.pinv(every.where(speed <= limit * (1 + _STILL), 0.0)).mT for limit in limits]


def _with_still_bands(pairs: Tensor, waves: Tensor, shift: Tensor, size: int) -> Rotation:
    """Return a rotation with frequencies above 0, by the order of each pair, and with the bands that do not turn.

    Dimensions that are paired with those half a rotation further leave room for these bands.
    """
    leading = waves[0].gather(-1, (waves[0] != 0).int().argmax(-1, keepdim=True))  # (band, 1)
    band, stride = pairs[:, 0] - pairs[0, 0], int(pairs[0, 1] - pairs[0, 0])
    pairs, waves = pairs.where(leading >= 0, pairs.flip(-1)), waves.where(leading >= 0, -waves)
    halves = bool((pairs.diff(dim=-1).abs() == stride).all()) and int(pairs.min()) + 2 * stride <= size
    if halves and max(len(band), int(band[-1])) < stride:
        pairs, of_turning = pairs.min() + torch.arange(2 * stride).view(2, -1).T, pairs
        pairs[band] = of_turning
        waves = waves.new_zeros(len(waves), stride, waves.shape[-1]).index_copy(1, band, waves)
    return Rotation(pairs, waves, shift)


def radians_off(angles: Tensor, expected: Tensor, eps: float = 0.0) -> float:
    """Return by how many radians angles are off expected ones beyond rounding, 0 or less for none.

    Args:
        angles: Angles, in which whole turns do not count.
        expected: Angles in the same shape.
        eps: The precision of the cosines from which they come, if that is not float32.
    """
    allowed = _ROUNDING[0] + 8 * eps + _ROUNDING[1] * expected.abs()
    return float((_within_half_turn(angles - expected).abs() - allowed).max())


def _within_half_turn(angles: Tensor) -> Tensor:
    """Return angles between -pi and pi."""
    return torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi
