"""The inverse problem: which decay and symmetry give a wanted locality and direction balance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import brentq, minimize_scalar

from pelocality._checks import count
from pelocality.encodings._checks import per_head
from pelocality.metrics.streaming import measure_relative

# Decays per squared token: below the first every weight is equal to rounding, above the last only the diagonal is left.
_FLAT, _STEEP = 1e-16, 500.0
_ONE_SIDED = math.inf


def solve(
    locality: float | Sequence[float], direction_balance: float | Sequence[float], length: int, causal: bool
) -> tuple[list[float], list[float]]:
    """Return the decays and symmetries of an attenuated encoding, one for each target.

    Args:
        locality: As for `AttenuatedEncoding.from_targets`.
        direction_balance: See there.
        length: See there.
        causal: See there.

    Returns:
        w and s, lists of equal length.

    Raises:
        TypeError: A target that is no number.
        ValueError: A target that cannot be reached, with the range that can.
    """
    n = count("length", length, least=2)
    near = _targets("locality", locality)
    lean = _targets("direction_balance", direction_balance)
    if causal and any(b not in (0.0, -1.0) for b in lean):
        raise ValueError("a causal encoding looks back only, its direction_balance is -1: leave it out")
    heads = max(len(near), len(lean))
    if {len(near), len(lean)} - {1, heads}:
        raise ValueError(f"locality and direction_balance are one per head each, got {len(near)} and {len(lean)}")
    near, lean = near * (heads // len(near)), lean * (heads // len(lean))
    pairs = [
        (_causal_decay(target, n), 1.0) if causal else _decay_and_symmetry(target, balance, n)
        for target, balance in zip(near, lean, strict=True)
    ]
    for (w, s), target in zip(pairs, near, strict=True):
        _check(w, s, target, n, causal)
    return [w for w, _ in pairs], [s for _, s in pairs]


def _decay_and_symmetry(locality: float, balance: float, n: int) -> tuple[float, float]:
    if not -1 < balance < 1:
        raise ValueError(
            f"direction_balance must lie between -1 and 1, both excluded, got {balance}; -1 is causal=True"
        )
    # the mirror image of an encoding that leans left leans right: solve for the left, whose right side is steeper
    lean = -abs(balance)

    def steep(shallow: float) -> float:
        """The decay of the right side that gives the balance."""
        least = max(shallow, _FLAT)
        if _locality_and_balance(shallow, least, n)[1] <= lean:  # balanced, or to rounding
            return shallow
        return _root(lambda c: _locality_and_balance(shallow, c, n)[1] - lean, least, 2 * _STEEP)

    least = _locality_and_balance(0.0, steep(0.0), n)[0]
    if not least < locality < 1:
        raise ValueError(
            f"locality {locality:g} with direction_balance {balance:g} cannot be reached at length {n}: with that "
            f"balance locality lies between {least:.6g} and 1, both excluded{_reachable_balance(locality, n)}"
        )
    shallow = _root(lambda a: _locality_and_balance(a, steep(a), n)[0] - locality, _FLAT, _STEEP)
    left, right = (shallow, steep(shallow)) if balance <= 0 else (steep(shallow), shallow)
    return left, right / left


def _reachable_balance(locality: float, n: int) -> str:
    """What to ask instead, for the error: the edge of reach is a flat left side under a right side of any decay."""

    def edge(c: float) -> float:
        return _locality_and_balance(0.0, c, n)[0]

    # as c grows the edge rises from uniform attention to a peak, and may fall again to uniform attention to the past
    peak = math.exp(minimize_scalar(lambda log: -edge(math.exp(log)), bounds=(math.log(_FLAT), math.log(_STEEP))).x)
    if not edge(0.0) < locality < edge(peak):
        return ""
    near = _root(lambda c: edge(c) - locality, _FLAT, peak)
    reached = f"; with that locality balances within ±{-_locality_and_balance(0.0, near, n)[1]:.6g} can"
    if locality <= edge(_ONE_SIDED):
        return reached
    far = _root(lambda c: edge(c) - locality, peak, _STEEP)
    return f"{reached}, and those beyond ±{-_locality_and_balance(0.0, far, n)[1]:.6g}"


def _causal_decay(locality: float, n: int) -> float:
    least = _locality_and_balance(0.0, _ONE_SIDED, n)[0]
    if not least < locality < 1:
        raise ValueError(
            f"locality {locality:g} cannot be reached by a causal encoding at length {n}: it lies between {least:.6g} "
            "and 1, both excluded"
        )
    return _root(lambda a: _locality_and_balance(a, _ONE_SIDED, n)[0] - locality, _FLAT, _STEEP)


def _root(residual: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of a decay crosses zero; searched in its logarithm, for decays span many magnitudes."""
    if residual(low) * residual(high) > 0:  # the target lies beyond what float64 tells apart
        raise ValueError("the targets lie too near the end of what can be reached to be told apart from it in float64")
    found = brentq(lambda log: residual(math.exp(log)), math.log(low), math.log(high), xtol=1e-14, rtol=1e-14)
    return math.exp(float(found))


def _locality_and_balance(left: float, right: float, n: int) -> tuple[float, float]:
    """Both numbers for those decays, in O(n): what row i sees are prefix sums from the middle outward."""
    squares = np.arange(1, n, dtype=np.float64) ** 2
    past = np.exp(-left * squares)
    future = np.zeros_like(past) if right == _ONE_SIDED else np.exp(-right * squares)
    halving = np.exp2(-np.arange(1, n, dtype=np.float64))

    def reach(terms: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(terms)])

    behind, ahead = reach(past), reach(future)[::-1]  # (n,), mass of row i on each side, before normalisation
    normaliser = 1 + behind + ahead
    near = float(((1 + reach(past * halving) + reach(future * halving)[::-1]) / normaliser).mean())
    off_diagonal = float(((behind + ahead) / normaliser).sum())
    balance = float(((ahead - behind) / normaliser).sum()) / off_diagonal if off_diagonal > 0 else 0.0
    return near, balance


def _check(w: float, s: float, locality: float, n: int, causal: bool) -> None:
    """Measure what was found with the library's own metric."""
    k = torch.arange(1 - n, n, dtype=torch.float64)
    bias = -torch.where(k < 0, w, s * w) * k.square()
    if causal:
        bias = torch.where(k > 0, -torch.inf, bias)
    measured = measure_relative(bias).locality.item()
    if abs(measured - locality) > 1e-8:
        raise ArithmeticError(f"locality {measured!r} was found where {locality!r} was asked for; please report this")


def _targets(name: str, value: float | Sequence[float]) -> list[float]:
    try:
        many = torch.as_tensor(value).numel()
    except (TypeError, ValueError, RuntimeError):
        many = 1  # per_head says what is wrong with it
    return [float(number) for number in per_head(name, value, max(many, 1), positive=False)]
