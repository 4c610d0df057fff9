"""The rotation of queries and keys by position, recovered from the vectors themselves."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pelocality.encodings._rotary_angles import RotaryAngles


@dataclass(frozen=True, eq=False)
class Rotation:
    """How queries (or keys) are rotated in one run.

    Attributes:
        angles: (n, pair) in radians, of the pairs in the order of their dimensions; relative to the first position
            where there is nothing to compare with.
        positions: (n, 1), or (n, pair) where pairs have axes, relative to the first one.
        length: The number of positions of the whole run.
        interleaved: Whether neighbouring dimensions are a pair, and not i and i + d / 2.
        factor: The factor on the rotated dimensions; None where there is nothing to compare with.
        head: D_head.
        tolerance: How far an angle may be off, by the precision of the states.
    """

    angles: Tensor
    positions: Tensor
    length: int
    interleaved: bool
    factor: float | None
    head: int
    tolerance: float

    @property
    def dims(self) -> int:
        """The number of rotated dimensions."""
        return 2 * self.angles.shape[1]

    @property
    def direction(self) -> int:
        """1 where the first pair (a, b) is rotated from a to b, -1 where from b to a; from consecutive positions."""
        return 1 if float(torch.sin(self.angles[:2, 0].diff()).sum()) >= 0 else -1

    def frequencies(self) -> Tensor:
        """Return radians per position (pair,), from consecutive positions, of either direction."""
        steps = self.direction * _within_half_turn(self.angles.diff(dim=0))
        position = torch.arange(len(steps) + 1, dtype=steps.dtype, device=steps.device)
        total = torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])  # angles that grow beyond pi
        return (total * position[:, None]).sum(0) / (position**2).sum()

    def pairs_as(self, interleaved: bool | None) -> bool:
        """Return whether dimensions are paired so; None is any pairing, and two dimensions are one pair in either."""
        return self.dims == 2 or interleaved in (None, self.interleaved)

    def same_as(self, other: Self) -> bool:
        """Return whether another rotation is the same but for rounding."""
        return self.dims == other.dims and self.pairs_as(other.interleaved) and self.off_from(other) is None

    def off_from(self, other: "Self | RotaryAngles", direction: int = 1) -> tuple[int, float] | None:
        """Return the first position with other angles than another rotation of these positions, and by how much.

        Args:
            other: That rotation, or the angles that are declared.
            direction: The direction of these angles.

        Returns:
            The position, and the largest difference at any position; None if all agree but for rounding.
        """
        if isinstance(other, RotaryAngles):
            angles = direction * self.positions * other.frequencies(self.length)
            allowed = self.tolerance + 1e-6 * angles.abs()
        else:
            angles, allowed = other.angles, max(self.tolerance, other.tolerance) + 1e-6 * self.positions.abs()
        off = _within_half_turn(self.angles - angles).abs()
        far = (off > allowed).any(1)
        return (int(self.positions[far][0].abs().max()), float(off.max())) if bool(far.any()) else None


def _within_half_turn(angles: Tensor) -> Tensor:
    """Return angles between -pi and pi."""
    return torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi


def rotation_of(
    states: Tensor | None, unrotated: Tensor | None, positions: Tensor, length: int, hints: Iterable[int]
) -> Rotation | str | None:
    """Return how ``states`` (head, n, d) are rotated against ``unrotated``, or against the first position if None.

    Args:
        states: Queries or keys, None where they were not seen.
        unrotated: The same without rotation; states that are equal to it may be rotated by what was not recognised.
        positions: (1, n) or (pair, n), their positions.
        length: The number of positions of the whole run.
        hints: Numbers of rotated dimensions to try first.

    Returns:
        None if they do not differ between positions, "scaled" or "change" if they do, but not by a rotation, "unseen"
        for None or zeros.
    """
    if states is None or not bool(states.any()):  # some states of untrained models are zero, such as ZAYA's keys
        return "unseen"
    same = unrotated is None or torch.equal(states, unrotated)
    eps = torch.finfo(states.dtype).eps
    tolerance = max(1e-3, 4 * eps)
    before = states[:, :1].expand_as(states) if unrotated is None or same else unrotated
    states, before = (each.cpu().double() for each in (states, before))
    differing = ((states - before).abs().amax((0, 1)) > 1e-5 * before.abs().max()).nonzero().flatten()
    if not len(differing):
        return None
    head, first, last = states.shape[-1], int(differing[0]), int(differing[-1])
    planes = [
        (slice(start, start + dims), interleaved)
        for dims in dict.fromkeys([*hints, head, *range(2, head + 1, 2)])
        for start in dict.fromkeys((0, head - dims))
        if start <= first and last < start + dims
        for interleaved in (False, True)
    ]
    least, rotation, paired = 0.03, None, False
    for part, interleaved in planes:
        misfit, turns = _fit(states[..., part], before[..., part], interleaved)
        if misfit < least:
            least, rotation, paired = misfit, turns, interleaved
        # A rotation of more dimensions, whose further pairs do not turn, would fit too, up to rounding.
        if misfit < max(1e-4, 2 * eps):
            break
    if rotation is None:
        return "change"
    angles = rotation.angle() - rotation[:1].angle()
    if bool((angles.abs() < tolerance).all()):
        return "scaled"
    angles, factor = (angles, None) if same else (rotation.angle(), float(rotation[0].abs().mean()))
    positions = (positions - positions[:, :1] if len(positions) in (1, angles.shape[1]) else positions[:1]).T
    return Rotation(angles, positions, length, paired, factor, head, tolerance)


def _fit(states: Tensor, before: Tensor, interleaved: bool) -> tuple[float, Tensor]:
    """Return the misfit of a rotation of these dimensions, and its cos + i sin (n, pair), with any factor."""

    def pairs(x: Tensor) -> Tensor:
        return torch.complex(x[..., ::2], x[..., 1::2]) if interleaved else torch.complex(*x.chunk(2, -1))

    after, before = pairs(states), pairs(before)
    rotation = (after * before.conj()).sum(0) / before.abs().square().sum(0).clamp(min=1e-30)
    misfit = (after - rotation * before).abs().max() / before.abs().max()
    factor = rotation.abs().mean(-1, keepdim=True)  # may differ between positions, not between pairs
    return float(torch.maximum(misfit, (rotation.abs() / factor - 1).abs().max())), rotation
