"""The rotation of queries and keys by position, recovered from the vectors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """How queries (or keys) are turned.

    Attributes:
        angles: (n, pair) in radians, relative to the first position, of the pairs in the order of their dimensions.
        sign: 1 or -1, the direction in which they were turned before ``angles`` were given the sign of the first pair.
        start: the first rotated dimension.
        layout: "half" (dimensions i and i + dims / 2) or "interleaved" (2 i and 2 i + 1).
        factor: the factor on the rotated dimensions; None where there is nothing to compare with.
        head: d_head.
        tolerance: how far an angle may be off, by the precision of the states.
    """

    angles: Tensor
    sign: int
    start: int
    layout: str
    factor: float | None
    head: int
    tolerance: float

    @property
    def dims(self) -> int:
        """The number of rotated dimensions."""
        return 2 * self.angles.shape[1]

    def frequencies(self) -> Tensor:
        """Return radians per position (pair,), from consecutive positions."""
        steps = wrapped(self.angles.diff(dim=0))
        position = torch.arange(len(steps) + 1, dtype=steps.dtype)
        total = torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])  # unwrapped
        return (total * position[:, None]).sum(0) / (position**2).sum()


def wrapped(angles: Tensor) -> Tensor:
    """Return angles between -pi and pi."""
    return torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi


def rotation_of(states: Tensor, still: Tensor | None, hints: Sequence[int] = ()) -> Rotation | str | None:
    """Return how ``states`` (head, n, d) are turned against ``still``, or against the first position if None.

    Returns:
        None if they do not differ between positions, "scaled" or "change" if they do, but not by a rotation.
    """
    compared = still is not None
    eps = torch.finfo(states.dtype).eps
    tolerance = max(1e-3, 4 * eps)
    states = states.double().cpu()
    still = states[:, :1].expand_as(states) if still is None else still.double().cpu()
    moved = ((states - still).abs().amax((0, 1)) > 1e-5 * still.abs().max()).nonzero().flatten()
    if not len(moved):
        return None
    head, first, last = states.shape[-1], int(moved[0]), int(moved[-1])
    enough = max(1e-4, 2 * eps)  # wider ones, whose further pairs stand still, fit as well but for rounding
    least, found = 0.03, None
    for dims in dict.fromkeys([*hints, head, *range(2, head + 1, 2)]):
        starts = [start for start in dict.fromkeys((0, head - dims)) if start <= first and last < start + dims]
        for start, layout in [(start, layout) for start in starts for layout in ("half", "interleaved")]:
            misfit, turn = _fit(states[..., start : start + dims], still[..., start : start + dims], layout)
            if misfit < least:
                least, found = misfit, (turn, start, layout)
            if misfit < enough:
                break
        if least < enough:
            break
    if found is None:
        return "change"
    turn, start, layout = found
    angles = turn.angle() - turn[:1].angle()
    if bool((angles.abs() < tolerance).all()):
        return "scaled"
    sign = 1 if float(torch.sin(angles[1:2, 0]).sum()) >= 0 else -1
    factor = float(turn[0].abs().mean()) if compared else None
    return Rotation(sign * angles, sign, start, layout, factor, head, tolerance)


def _fit(states: Tensor, still: Tensor, layout: str) -> tuple[float, Tensor]:
    """Return the misfit of a rotation of these dimensions, and its cos + i sin (n, pair), with any factor."""

    def pairs(x: Tensor) -> Tensor:
        if layout == "half":
            return torch.complex(*x.chunk(2, -1))
        return torch.complex(x[..., ::2], x[..., 1::2])

    turned, unturned = pairs(states), pairs(still)
    turn = (turned * unturned.conj()).sum(0) / unturned.abs().square().sum(0).clamp(min=1e-30)
    misfit = (turned - turn * unturned).abs().max() / unturned.abs().max()
    factor = turn.abs().mean(-1, keepdim=True)  # may differ between positions, not between pairs
    return float(torch.maximum(misfit, (turn.abs() / factor - 1).abs().max())), turn
