"""The rotation of queries and keys by position, recovered from the vectors themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """How queries (or keys) are rotated in one run.

    Attributes:
        angles: (n, pair) in radians, relative to the first position, of the pairs in the order of their dimensions.
        positions: (n,), of these angles.
        length: The number of positions of the whole run.
        layout: Which dimensions are a pair: "half" for i and i + d / 2, "interleaved" for neighbours.
        factor: The factor on the rotated dimensions; None where there is nothing to compare with.
        head: D_head.
        tolerance: How far an angle may be off, by the precision of the states.
    """

    angles: Tensor
    positions: Tensor
    length: int
    layout: str
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
        return 1 if float(torch.sin(self.angles[1:2, 0]).sum()) >= 0 else -1

    @property
    def frequencies(self) -> Tensor:
        """Radians per position (pair,), from consecutive positions, of either direction."""
        steps = self.direction * wrapped(self.angles.diff(dim=0))
        position = torch.arange(len(steps) + 1, dtype=steps.dtype, device=steps.device)
        total = torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])  # angles that grow beyond pi
        return (total * position[:, None]).sum(0) / (position**2).sum()

    @property
    def base(self) -> float | None:
        """The base of the first two frequencies, None for a single one."""
        frequencies = self.frequencies
        if len(frequencies) < 2 or frequencies[1] <= 0:
            return None
        return float((frequencies[0] / frequencies[1]) ** len(frequencies))

    def same_as(self, other: Self) -> bool:
        """Return whether another rotation is the same but for rounding."""
        if self.angles.shape != other.angles.shape or not self.pairs_as(other.layout):
            return False
        return bool(wrapped(self.angles - other.angles).abs().max() < self.tolerance)

    def first_difference(self, other: Self) -> int | None:
        """Return the first position with other angles than another rotation of these positions, None if all agree."""
        if self.angles.shape != other.angles.shape:
            return None
        allowed = max(self.tolerance, other.tolerance) + 1e-6 * self.positions[:, None]
        off = (wrapped(self.angles - other.angles).abs() > allowed).any(1)
        return int(self.positions[off][0]) if bool(off.any()) else None

    def pairs_as(self, layout: str) -> bool:
        """Return whether dimensions are paired in this layout; two dimensions are one pair in either."""
        return self.dims == 2 or self.layout == layout


def wrapped(angles: Tensor) -> Tensor:
    """Return angles between -pi and pi."""
    return torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi


def rotation_of(
    states: Tensor | None, unrotated: Tensor | None, positions: Tensor, length: int, hints: Sequence[int]
) -> Rotation | str | None:
    """Return how ``states`` (head, n, d) are rotated against ``unrotated``, or against the first position if None.

    Args:
        states: Queries or keys, None where they were not seen.
        unrotated: The same without rotation.
        positions: (n,), their positions.
        length: The number of positions of the whole run.
        hints: Numbers of rotated dimensions to try first.

    Returns:
        None if they do not differ between positions, "scaled" or "change" if they do, but not by a rotation, "unseen"
        for None or zeros.
    """
    if states is None or not bool(states.any()):  # some states of untrained models are zero, such as ZAYA's keys
        return "unseen"
    compared = unrotated is not None
    eps = torch.finfo(states.dtype).eps
    tolerance = max(1e-3, 4 * eps)
    states = states.cpu().double()
    unrotated = states[:, :1].expand_as(states) if unrotated is None else unrotated.cpu().double()
    differing = ((states - unrotated).abs().amax((0, 1)) > 1e-5 * unrotated.abs().max()).nonzero().flatten()
    if not len(differing):
        return None
    head, first, last = states.shape[-1], int(differing[0]), int(differing[-1])
    planes = [
        (slice(start, start + dims), layout)
        for dims in dict.fromkeys([*hints, head, *range(2, head + 1, 2)])
        for start in dict.fromkeys((0, head - dims))
        if start <= first and last < start + dims
        for layout in ("half", "interleaved")
    ]
    least, rotation, paired = 0.03, None, ""
    for part, layout in planes:
        misfit, found = _fit(states[..., part], unrotated[..., part], layout)
        if misfit < least:
            least, rotation, paired = misfit, found, layout
        # a rotation of more dimensions, whose further pairs do not turn, would fit too, up to rounding
        if misfit < max(1e-4, 2 * eps):
            break
    if rotation is None:
        return "change"
    angles = rotation.angle() - rotation[:1].angle()
    if bool((angles.abs() < tolerance).all()):
        return "scaled"
    factor = float(rotation[0].abs().mean()) if compared else None
    return Rotation(angles, positions, length, paired, factor, head, tolerance)


def _fit(states: Tensor, unrotated: Tensor, layout: str) -> tuple[float, Tensor]:
    """Return the misfit of a rotation of these dimensions, and its cos + i sin (n, pair), with any factor."""

    def pairs(x: Tensor) -> Tensor:
        if layout == "half":
            return torch.complex(*x.chunk(2, -1))
        return torch.complex(x[..., ::2], x[..., 1::2])

    after, before = pairs(states), pairs(unrotated)
    rotation = (after * before.conj()).sum(0) / before.abs().square().sum(0).clamp(min=1e-30)
    misfit = (after - rotation * before).abs().max() / before.abs().max()
    factor = rotation.abs().mean(-1, keepdim=True)  # may differ between positions, not between pairs
    return float(torch.maximum(misfit, (rotation.abs() / factor - 1).abs().max())), rotation
