"""The published definitions as slow loops written from the equations, without code of the library."""

import math

import numpy as np

EPS64 = np.finfo(np.float64).eps


def locality(matrix):
    n = len(matrix)
    return sum(matrix[i][j] / 2.0 ** abs(i - j) for i in range(n) for j in range(n)) / n


def tolerance(pairs, rtol=None, eps=EPS64):
    """Return the largest R of a row that counts as constant."""
    largest, least = max(map(max, pairs)), min(map(min, pairs))
    if rtol is None:
        nats = 1.0 if least == 0 < largest else math.log(largest / least) if largest else 0.0
        rtol = 8 * eps + 1024 * eps * min(1, nats)
    return max(10 * EPS64, rtol * largest)


def symmetry(matrix, rtol=None, eps=EPS64):
    n = len(matrix)
    values = []
    for i in range(n):
        pairs = [(matrix[i][i - k], matrix[i][i + k]) for k in range(1, min(i, n - 1 - i) + 1)]
        if not pairs:
            continue
        d = [abs(left - right) for left, right in pairs]
        spread = max(d) - min(d)
        constant = spread <= tolerance(pairs, rtol, eps)
        values += [0.0 if constant else (x - min(d)) / spread for x in d]
    return 1 - sum(values) / len(values) if values else float("nan")


def relative_asymmetry(matrix):
    n = len(matrix)
    pairs = [(matrix[i][i - k], matrix[i][i + k]) for i in range(n) for k in range(1, min(i, n - 1 - i) + 1)]
    mass = sum(left + right for left, right in pairs)
    return sum(abs(left - right) for left, right in pairs) / mass if mass else 0.0
