"""Matrices of tests/golden/metrics.json, rebuilt from their formulas, in float64."""

import json
import re
from pathlib import Path

import numpy as np

CASES = json.loads((Path(__file__).parent / "metrics.json").read_text())["cases"]


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def matrix(name):
    """Return the matrix of a golden case, given its name."""
    kind, n = re.fullmatch(r"(.+?)_N(\d+)(?:_.*)?", name).groups()
    n = int(n)
    i = np.arange(n, dtype=np.float64)
    behind = i[:, None] - i  # i - j, positive where the key lies in the past
    numbers = [float(x) for x in re.findall(r"(?<=[_LR])\d+\.\d+", kind)]
    if kind == "uniform":
        return np.full((n, n), 1 / n)
    if kind == "previous_token":
        return np.eye(n)[np.maximum(np.arange(n) - 1, 0)]
    if kind == "causal_uniform":
        return np.tril(np.ones((n, n))) / (i + 1)[:, None]
    if kind.startswith("gauss_w"):
        return softmax(-float(kind.removeprefix("gauss_w")) * behind**2)
    if kind.startswith("gauss_asym"):
        left, right = numbers
        return softmax(-np.where(behind > 0, left, right) * behind**2)
    if kind.startswith("alibi_bidir"):
        return softmax(-numbers[0] * abs(behind))
    if kind.startswith("alibi_causal"):
        return softmax(np.where(behind >= 0, -numbers[0] * behind, -np.inf))
    if kind == "window3":
        near = abs(behind) <= 3
        return near / near.sum(-1, keepdims=True)
    if kind == "tilt":
        return softmax(-0.1 * abs(behind) - 0.05 * behind)
    if kind == "sinusoidal_d64":
        frequency = 10000.0 ** (-2 * np.arange(32) / 64)
        if name.endswith("toeplitz_softmax"):
            return softmax(np.cos(abs(behind)[..., None] * frequency).sum(-1) / 8)
        angle = i[:, None] * frequency
        table = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(n, 64)
        return softmax(table @ table.T / 8)
    if kind == "dirichlet_rng0":
        return np.random.default_rng(0).dirichlet(np.ones(n), n)
    if kind == "integer_hash":
        weights = (7 * i[:, None] + 3 * i) % 11 + 1
        return weights / weights.sum(-1, keepdims=True)
    raise AssertionError(f"no formula for {name}")
