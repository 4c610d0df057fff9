"""How a model rotates queries and keys, read from these while it runs.

Every linear map of the tokens returns one vector at all of them (as in an audit), so that queries and keys differ by
their rotation alone, wherever a model computes it: in a rotary module, from a table, or inside of attention. Two
dimensions turn together if the sum of their squares is the same at every token. The angle of each token must follow
from its coordinates, or the model is refused: nothing is taken from a buffer or a family's record.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pelocality._checks import count
from pelocality.models._inference import inference
from pelocality.models.recorder import SHORT, Call, Recorder, unrotated
from pelocality.models.sequence_model import SequenceModel
from pelocality.models.token_proof import sizes_of_weights

_FARTHEST = 2**20 + 1  # places of a token: slow bands turn at the last one too
_COUNTED = 1009  # tokens of a model that takes no position ids; a prime, so that hardly another axis has its size
_ROUNDING = 2e-4, 3e-7  # radians by which angles of float32 are off near the origin, and as a share of large angles
_STILL = 1e-5  # a dimension turns if its squares differ between tokens by more, relative to their mean
_REASONS = (
    "turns queries and keys, but not by the places of its tokens",
    "has frequencies that depend on the length of its input, so give length=",
)
_MISFIT = 0.03  # the angle in radians by which the largest pair of a head may turn otherwise than those of all heads
_PAIRED = 1e-2  # two dimensions turn together if the sum of their squares differs by less than this share of each


class Rotation(NamedTuple):
    """How one attention rotates queries and keys: band f of a token at x turns by ``frequencies[f] @ (x + shift)``.

    Attributes:
        pairs: The dimensions of each band, (band, 2), of which the first turns towards the second.
        frequencies: Radians per unit of each coordinate, (1, band, axis), or (heads, band, axis) if heads differ.
        shift: What is added to coordinates, (axis,): DINOv3 counts from the centre of an image, and Llama 4 from 1,
            which [CLS] and registers, that do not turn, make a difference. 0 where all tokens turn.
        scaling: The factor of what is rotated; None where there was nothing to compare with.
        places: The coordinates of the tokens that were read, (n, axis).
        angles: Their angles in radians, (n, band), against what is not rotated, or else against the first token.
        off: By how much angles are off from those of the frequencies; 0 but for rounding.
        tolerance: By how many radians an angle may be off from one that is declared, by the precision of the model.
    """

    pairs: Tensor
    frequencies: Tensor
    shift: Tensor
    scaling: float | None
    places: Tensor
    angles: Tensor
    off: float
    tolerance: float = 1e-3

    @property
    def axis(self) -> Tensor:
        """The coordinate that turns each band, (band,); -1 for none or several."""
        turns = (self.frequencies != 0).any(0)
        return turns.int().argmax(-1).where(turns.sum(-1) == 1, -1)

    @property
    def interleaved(self) -> bool | None:
        """Whether neighbouring dimensions are a pair, and not i and i + d / 2; None for neither, or for both."""
        stride = self.pairs.diff(dim=1).flatten()
        neighbours, halves = bool((stride == 1).all()), bool((stride == len(stride)).all())
        return None if neighbours == halves else neighbours

    def same_as(self, other: "Rotation") -> bool:
        """Return whether another rotation is the same but for rounding."""
        if not torch.equal(self.pairs, other.pairs) or self.frequencies.shape != other.frequencies.shape:
            return False
        one, two = (torch.cat([each.frequencies.flatten(), torch.tensor([each.scaling])]) for each in (self, other))
        return torch.allclose(one, two, rtol=1e-3, atol=1e-3 / _FARTHEST)

    def off_from(self, angles: Tensor) -> tuple[int, float] | None:
        """Return the first place with other angles (n, band), and the largest difference; None but for rounding."""
        off = _within_half_turn(self.angles - angles).abs()
        far = (off > self.tolerance + 1e-6 * (self.places @ self.frequencies[0].mT).abs()).any(1)
        return (int(self.places[far].amax(1).min()), float(off.max())) if bool(far.any()) else None


class Run(NamedTuple):
    """What a model made of tokens that are equal.

    Attributes:
        inputs: The inputs.
        places: The coordinates (n, axis) of the tokens but those that have none.
        calls: Each self-attention of which queries or keys were seen.
    """

    inputs: Any
    places: Tensor
    calls: list[Call]


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
            still = _run(model, runs[0].inputs, runs[0].places)
    read = list[tuple[Call, Rotation | None]]()
    places = [run.places.expand(-1, runs[0].places.shape[1]) for run in runs]  # text has one coordinate on all axes
    for call, before, *others in zip(runs[0].calls, still.calls, *(run.calls for run in runs[1:]), strict=True):
        states: list[Any] = [each.states for each in (call, *others)]
        for number, reason in enumerate(_REASONS[: len(runs)], 1):  # tokens of all runs are equal
            try:
                rotation = rotation_of(torch.cat(states[:number], 1), torch.cat(places[:number]), before.states)
            except ValueError as error:
                raise ValueError(f"{model} {reason}: {error}") from None
        read.append((call, rotation))
    return read


# ---- runs


def _text_runs(model: SequenceModel, length: int | None) -> list[Run]:
    """Return runs of a text of one token id: at places given as position ids, or of many tokens, and of few."""
    most = [min(model.longest or each, each) for each in (SHORT, _COUNTED)]
    sizes = sizes_of_weights(model)
    short, long = (next((n for n in range(each, 2, -1) if not {n, n + 1} & sizes), each) for each in most)
    counted = _run(model, *text_at(model, length or short))
    if model.reads("position_ids"):
        with suppress(ValueError):  # a table of angles may have no row for a position
            far = _run(model, *text_at(model, places_apart(model, length or _FARTHEST)))
            both: Any = zip(*([call.states for call in run.calls] for run in (counted, far)), strict=True)
            pairs = ((a[:, : b.shape[1]], b[:, : a.shape[1]]) for a, b in both)
            if not all(torch.allclose(*each, atol=1e-4, rtol=1e-2) for each in pairs):  # it does not count its tokens
                return [far] if length else [far, counted]
    with suppress(ValueError):  # a table may have fewer rows
        if length is None:
            return [_run(model, *text_at(model, long)), counted]
    return [counted]


def text_at(model: SequenceModel, given: Tensor | int) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs of one token id, and places: those given (n, axis) as position ids, or so many, counted."""
    places = torch.arange(given, device="cpu")[:, None] if isinstance(given, int) else given
    ids = torch.full((1, len(places)), model.some_ids(1)[0], device=model.device)
    inputs = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if model.reads("attention_mask") else {})
    position_ids = (places.T if places.shape[1] == 1 else places.T[:, None]).to(ids.device)
    return inputs | ({} if isinstance(given, int) else {"position_ids": position_ids}), places


def _content_run(model: SequenceModel, length: int | None) -> Run:
    """Return a run of the content of a model that reads no token ids, at its positions or on a line."""
    if length is None or model.content is None:
        raise ValueError(f"length must be given, the number of tokens of {model}, which reads no token ids")
    return _run(model, model.content(0, length), content_places(model, length))


def content_places(model: SequenceModel, length: int) -> Tensor:
    """Return the coordinates (n, axis) of the content of a model that reads no token ids, or a line."""
    positions = model.positions_of(length)
    return torch.arange(length)[:, None] if positions is None else torch.as_tensor(positions.keys).cpu()


def places_apart(model: SequenceModel, farthest: int) -> Tensor:
    """Return places that show every axis of a model's position ids, (n, axis).

    The origin, 1, 2, 4... on each axis alone, and others on all axes, in a clear number.
    """
    with model.noting_coordinates() as noted:
        model.run(text_at(model, 2)[0])
    every, farthest = range(len(noted[0]) if noted else 1), min(farthest, model.longest or farthest) - 1
    steps = sorted({farthest, *(2**k for k in range(farthest.bit_length()))} - {0})
    places = [[0 for _ in every], *([step * (axis == other) for other in every] for axis in every for step in steps)]
    sizes = sizes_of_weights(model)
    while len(places) < SHORT or {len(places), len(places) + 1} & sizes:
        places.append([len(places) ** 3 * (axis + 1) % (farthest + 1) for axis in every])
    return torch.tensor(places, device="cpu")


def tokens_seen(model: SequenceModel, inputs: Any) -> list[int]:
    """Return the number of tokens of each self-attention of a model on a batch."""
    seen: list[int] = []
    model.watch(inputs, lambda attention: seen.append(attention.weights.shape[-2]), None)
    return seen


def _run(model: SequenceModel, inputs: Any, places: Tensor) -> Run:
    """Run a model with one vector at all tokens in place of each linear map of these."""
    tokens = len(places)
    if model.content is not None:  # it may add tokens of its own
        tokens = min((n for n in tokens_seen(model, inputs) if n >= tokens), default=tokens)
    recorder = Recorder(tokens, most=tokens)
    with model.explaining(inputs), recorder.observing(model.module):
        model.run(inputs)
    return Run(inputs, places, [call for call in recorder.calls if call.states is not None])


# ---- from queries and keys to a rotation


def rotation_of(states: Tensor, places: Tensor, still: Tensor | None = None) -> Rotation | None:
    """Return the rotation that explains states as `closest_rotation` does, with frequencies above 0, None for none.

    Raises:
        ValueError: The states change, but not by a rotation by these places.
    """
    rotation = closest_rotation(states, places, still)
    if rotation is None:
        return None
    if rotation.off:
        raise ValueError(f"angles are off by {rotation.off:.2g} radians from those of frequencies")
    pairs, waves, scaling = rotation.pairs, rotation.frequencies, rotation.scaling or 1.0
    leading = waves[0].gather(-1, (waves[0] != 0).int().argmax(-1, keepdim=True))  # (band, 1)
    pairs, waves = pairs.where(leading >= 0, pairs.flip(-1)), waves.where(leading >= 0, -waves)
    return rotation._replace(pairs=pairs, frequencies=waves, scaling=1.0 if abs(scaling - 1) < 1e-6 else scaling)


def closest_rotation(
    states: Tensor, places: Tensor, still: Tensor | None = None, dims: int | None = None, tolerance: float = 1e-3
) -> Rotation | None:
    """Return the rotation closest to that of states (head, n, d) that are equal but for it, None for none.

    Args:
        states: Queries and keys. Some of the first or of the last tokens may have no place.
        places: The coordinates of the others, (n, axis), from the lowest corner on.
        still: The same without rotation, at any tokens; states that are equal may be rotated by what was not
            recognised.
        dims: The number of rotated dimensions that is declared, and tried first: slow bands may hardly turn. All heads
            then have one rotation.
        tolerance: That of the rotation.

    Raises:
        ValueError: The states change, but not by a rotation of pairs of dimensions.
    """
    states, places, tokens = states.cpu().double(), places.double(), states.shape[1]
    still = states[:, :1] if still is None else still.cpu().double()
    directions = nn.functional.normalize(still, dim=-1)
    # The [CLS] of MLCD turns by angles of its own, which no rotary module returns: nothing but rotation is left out.
    recognised = not torch.equal(states[:, : still.shape[1]], still[:, :tokens])
    recognised &= torch.allclose(directions, directions[:, :1].expand_as(directions), atol=tolerance)
    if not recognised or still.shape[1] != tokens:
        still = (still if recognised else states)[:, :1]
    pairs = _pairs(states, still, dims or 0, tolerance)
    if not len(pairs):
        return None
    every, before = (torch.complex(*each[..., pairs].unbind(-1)) for each in (states, still))  # (head, n, band)
    extra, read = tokens - len(places), list[Rotation]()
    scaling = float(every[:, extra].norm() / before[:, 0].norm()) if recognised else None
    turned = every * before.conj()
    measured = turned.sum(0).angle()
    for part, waves, shift, off in _fits(turned, places, one_for_all=dims is not None):
        read.append(Rotation(pairs, waves, shift, scaling, places, measured[part], off, tolerance))
        if not off:
            return read[-1]
    across = (turned * torch.polar(torch.ones_like(measured), -measured)).imag
    if float(across.abs().max() / turned.abs().max()) > _MISFIT:
        raise ValueError("heads, or the two dimensions of a pair, turn by different angles")
    return read[0]._replace(off=min(each.off for each in read))


def waves_of(turned: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the wave vectors (1 or heads, band, axis) of bands (head, n, band), complex numbers, and the shift.

    Raises:
        ValueError: These do not turn by the places (n, axis).
    """
    fits = list(_fits(turned, places.double()))
    _, waves, shift, off = min(fits, key=lambda fit: fit[-1])
    if off:
        raise ValueError(f"angles are off by {off:.2g} radians from those of frequencies")
    return waves, shift


def _fits(turned: Tensor, places: Tensor, one_for_all: bool = False) -> Iterator[tuple[slice, Tensor, Tensor, float]]:
    """Yield the waves and the shift by which complex bands (head, n, band) may turn, and by how much these are off.

    With the tokens that have a place. Extra tokens come first or last, and halves of the heads or all turn alike.
    """
    extra = turned.shape[1] - len(places)
    by_head = [len(turned) // 2] * (not one_for_all and len(turned) % 2 == 0)
    for first, heads in itertools.product(dict.fromkeys((extra, 0)), (1, *by_head)):
        part = slice(first, first + len(places))
        origin = turned[:, -1 if extra and not first else 0, None]
        of_heads = (turned * origin.conj()).view(-1, heads, *turned.shape[1:])
        turns = of_heads.sum(0)
        placed, steps = turns[:, part], places - places[0]
        waves = _frequencies((placed * placed[:, :1].conj()).angle(), steps)
        first_place = places_at(placed[0, 0].angle(), waves[0].tolist())
        shift = first_place - places[0] if extra else torch.zeros_like(places[0])
        angles = torch.zeros_like(turns.real)
        angles[:, part] = (places + shift if extra else steps) @ waves.mT
        off = _within_half_turn(of_heads.angle() - angles).abs().max()
        yield part, waves, shift, float(off) if radians_off(of_heads.angle(), angles) > 0 else 0.0


def _pairs(states: Tensor, still: Tensor, dims: int, tolerance: float) -> Tensor:
    """Return the dimensions that turn together, (band, 2): those of which the sum of squares is that without rotation.

    Slow bands may not turn yet: pairs are all those of so many dimensions, or else of the smallest such rotation.
    """
    # Llama 4 scales queries by their position.
    squares, before = (nn.functional.normalize(each, dim=-1).square() for each in (states, still))
    change = squares - before
    change = change - change.mean(1, keepdim=True)  # (head, n, d)
    together = torch.einsum("hni,hnj->ij", change, change)
    alone = together.diagonal()
    unit = squares.mean() ** 2 * squares[..., 0].numel()
    turns = alone > _STILL**2 * unit
    turning, of_sum = turns.nonzero().flatten(), alone[:, None] + alone + 2 * together
    if not len(turning):
        return turning.new_zeros(0, 2)
    for half in ((dims + 1) // 2, *range((len(turning) + 1) // 2, len(alone) // 2 + 1)):
        room = len(alone) - 2 * half
        for start, halves in itertools.product(sorted({0, room, int(turning[0])}), (True, False)):
            every = torch.arange(start, start + 2 * half, device="cpu")
            every = every.view(2, half).T if halves else every.view(half, 2)
            if 0 <= start <= room and turns[every].sum() == len(turning):
                a, b = every[turns[every].any(1)].T
                if bool((of_sum[a, b] < _PAIRED * torch.maximum(alone[a], alone[b]) + tolerance**2 * unit).all()):
                    return every
    least, partner = of_sum[turning][:, turning].fill_diagonal_(torch.inf).min(1)
    lonely = least > _PAIRED * alone[turning]
    if bool(lonely.any()) or not torch.equal(partner[partner], torch.arange(len(partner))):
        number = int(lonely.sum()) or len(turning)
        raise ValueError(f"{number} of {len(alone)} dimensions turn with no other one, or not by the same angle")
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
        last = 0.0
        for token in alone[steps[alone, axis].argsort()].tolist():
            if (step := float(steps[token, axis])) >= 2 * last:  # products with powers of 2 are exact
                frequencies[..., axis] += _within_half_turn(turns[:, token] - step * frequencies[..., axis]) / step
                last = step
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
