"""Where the published symmetry surprises: the table of the concepts page.

python examples/surprises.py
"""

import warnings

import numpy as np
import torch

from pelocality import relative_asymmetry, symmetry


def tilted_gaussian(n: int, tilt: float) -> torch.Tensor:
    position = torch.arange(n, dtype=torch.float64)
    distance = position - position[:, None]
    return (-0.05 * distance**2 + tilt * distance).softmax(-1)


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)  # one-sided matrices are the point here
    eye = torch.eye(64, dtype=torch.float64)
    cases = {
        "uniform, n = 64": torch.full((64, 64), 1 / 64, dtype=torch.float64),
        "identity, n = 64": eye,
        "causal uniform, n = 64": torch.ones(64, 64, dtype=torch.float64).tril()
        / torch.arange(1, 65, dtype=torch.float64)[:, None],
        "everything on the first token, n = 64": eye[[0] * 64],
    }
    for n in (16, 64, 256, 1024):
        cases[f"previous token, n = {n}"] = torch.eye(n, dtype=torch.float64)[[0, *range(n - 1)]]
    for n in (16, 64, 256):
        rows = np.random.default_rng(0).dirichlet(np.ones(n), (100, n))
        cases[f"random rows, mean of 100, n = {n}"] = torch.from_numpy(rows)
    for tilt in (1e-2, 1e-6, 1e-12):
        cases[f"Gaussian tilted by {tilt:g}, n = 64"] = tilted_gaussian(64, tilt)
    for name, matrix in cases.items():
        published, relative = symmetry(matrix).mean().item(), relative_asymmetry(matrix).mean().item()
        print(f"{name:<40} symmetry {published:.3f}   relative asymmetry {relative:.2g}")


if __name__ == "__main__":
    main()
