"""Where the published symmetry surprises: the table of the concepts page.

python examples/surprises.py
"""

import warnings

import numpy as np
import torch

from pelocality import relative_asymmetry, symmetry

warnings.simplefilter("ignore", UserWarning)  # symmetry warns about one-sided matrices
position = torch.arange(64, dtype=torch.float64)
distance = position - position[:, None]
eye = torch.eye(64, dtype=torch.float64)
cases = {
    "uniform, n = 64": torch.full((64, 64), 1 / 64, dtype=torch.float64),
    "identity, n = 64": eye,
    "causal uniform, n = 64": torch.ones(64, 64, dtype=torch.float64).tril() / (position[:, None] + 1),
    "everything on the first token, n = 64": eye[[0] * 64],
}
for n in (16, 64, 256, 1024):
    cases[f"previous token, n = {n}"] = torch.eye(n, dtype=torch.float64)[[0, *range(n - 1)]]
for n in (16, 64, 256):
    rows = np.random.default_rng(0).dirichlet(np.ones(n), (100, n))
    cases[f"random rows, mean of 100, n = {n}"] = torch.from_numpy(rows)
for tilt in (1e-2, 1e-6, 1e-12):
    cases[f"Gaussian tilted by {tilt:g}, n = 64"] = (-0.05 * distance**2 + tilt * distance).softmax(-1)
for name, matrix in cases.items():
    published, relative = symmetry(matrix).mean().item(), relative_asymmetry(matrix).mean().item()
    print(f"{name:<40} symmetry {published:.3f}   relative asymmetry {relative:.2g}")
