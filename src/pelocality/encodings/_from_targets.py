"""Find the decay and symmetry of an attenuated encoding that has a given locality and direction balance."""

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

# Decays per squared token: below the first all weights are equal up to rounding, above the second all but the diagonal
# are 0.
_FLAT, _STEEP = 1e-16, 500.0


def decay_and_symmetry(locality: float, balance: float, n: int, causal: bool) -> tuple[float, float]:
    """Return the decay w and the symmetry s of an attenuated encoding of n positions with one head.

    Args:
        locality: As in `AttenuatedEncoding.from_targets`.
        balance: Its direction balance.
        n: Number of positions.
        causal: Whether the encoding is causal.

    Raises:
        ValueError: A target that cannot be reached.
    """
    if causal and balance not in (0.0, -1.0):
        raise ValueError("a causal encoding attends to the past only, its direction_balance is -1: leave it out")
    if not causal and not -1 < balance < 1:
        raise ValueError(f"direction_balance must lie between -1 (causal=True) and 1, both excluded, got {balance}")
    # solve for a balance to the left, where the right side has the larger decay, and exchange the sides if necessary
    leftward = -abs(balance)

    def steep(shallow: float) -> float:
        """Return the decay of the right side that gives the balance."""
        least = max(shallow, _FLAT)
        if causal:
            return math.inf
        if _locality_and_balance(shallow, least, n)[1] <= leftward:  # the balance is 0, up to rounding
            return shallow
        return _root(lambda c: _locality_and_balance(shallow, c, n)[1] - leftward, least, 2 * _STEEP)

    least = _locality_and_balance(0.0, steep(0.0), n)[0]
    if not least < locality < 1:
        raise ValueError(f"locality must lie between {least:.6g} and 1, both excluded, at length {n}, got {locality:g}")
    shallow = _root(lambda a: _locality_and_balance(a, steep(a), n)[0] - locality, _FLAT, _STEEP)
    if causal or balance <= 0:
        return shallow, 1.0 if causal else steep(shallow) / shallow
    return steep(shallow), shallow / steep(shallow)


def _root(residual: Callable[[float], float], low: float, high: float) -> float:
    """Return the decay at which a function is zero; searched over its logarithm, since decays span many magnitudes."""
    logarithm = brentq(lambda log: residual(math.exp(log)), math.log(low), math.log(high), xtol=1e-14, rtol=1e-14)
    return math.exp(float(logarithm))


def _locality_and_balance(left: float, right: float, n: int) -> tuple[float, float]:
    """Return locality and direction balance for the decays of both sides, in O(n) from prefix sums over distances."""
    squares = np.arange(1, n, dtype=np.float64) ** 2
    past = np.exp(-left * squares)
    future = np.exp(-right * squares)  # 0 for a causal encoding
    halving = np.exp2(-np.arange(1, n, dtype=np.float64))

    def prefix_sums(terms: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(terms)])

    behind, ahead = prefix_sums(past), prefix_sums(future)[::-1]  # (n,), sum of row i on each side, not normalised
    normaliser = 1 + behind + ahead
    weighted = 1 + prefix_sums(past * halving) + prefix_sums(future * halving)[::-1]
    locality = float((weighted / normaliser).mean())
    off_diagonal = float(((behind + ahead) / normaliser).sum())
    balance = float(((ahead - behind) / normaliser).sum()) / off_diagonal if off_diagonal > 0 else 0.0
    return locality, balance
