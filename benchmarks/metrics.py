"""Time of the metrics as a multiple of reading their input once (torch.sum), with peak memory.

python -m benchmarks.metrics            # a few minutes
python -m benchmarks.metrics --smoke    # seconds, to see that it runs
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.measuring import arguments, compiled, extra_mebibytes, machine, paired, seconds
from pelocality import locality, measure, measure_absolute, measure_relative, metrics, symmetry
from tests import witness

COMPLEMENTARY = (
    "adjusted_locality", "past_locality", "mean_distance", "direction_balance", "entropy", "sink_rate", "monotonicity",
    "distance_profile", "profile_asymmetry", "window", "half_life",
)  # fmt: skip
ROW = "| {:<44} | {:<18} | {:>10} | {:>9} | {:>10} |"


def dense(device: str, smoke: bool, repeats: int) -> None:
    for shape in [(2, 2, 64, 64), (256, 256)] if smoke else [(12, 12, 512, 512), (4096, 4096)]:
        dense_shape(torch.randn(shape, device=device).softmax(-1), repeats)


def dense_shape(attention: torch.Tensor, repeats: int) -> None:
    shape = tuple(attention.shape)
    for fast in (False,) if attention.is_cuda else (False, True):
        backend = "numba" if fast else "torch"
        with compiled(fast):
            report(f"measure (both, one pass), {backend}", shape, lambda: measure(attention), attention.sum, repeats)
            report(f"locality, {backend}", shape, lambda: locality(attention), attention.sum, repeats)
            report(f"symmetry, {backend}", shape, lambda: symmetry(attention), attention.sum, repeats)
    leaf = attention.clone().requires_grad_()
    with compiled(False):
        report("measure + backward, torch", shape, lambda: backward(leaf), attention.sum, max(3, repeats // 3))


def backward(attention: torch.Tensor) -> None:
    attention.grad = None
    result = measure(attention)
    (result.locality.sum() + result.symmetry.sum()).backward()


def loops(smoke: bool) -> None:
    """The definitions as written, in Python: what the numbers above replace."""
    n = 64 if smoke else 512
    attention = torch.randn(n, n, dtype=torch.float64).softmax(-1)
    matrix = attention.tolist()
    slow = seconds(lambda: (witness.locality(matrix), witness.symmetry(matrix)))
    print(ROW.format("both, loops over a list", str((n, n)), f"{1e3 * slow:.1f}", "", ""))
    _, ratio = paired(lambda: measure(attention), attention.sum, 5)
    print(ROW.format("measure on the same, float64", str((n, n)), "", f"{ratio:.1f}", ""))


def without_matrix(device: str, smoke: bool, repeats: int) -> None:
    n = 4096 if smoke else 1_000_000
    distance = torch.arange(-(n - 1), n, device=device, dtype=torch.float64)
    bias = -0.01 * distance.abs()
    report("every metric, measure_relative", (2 * n - 1,), lambda: every_relative(bias), bias.sum, repeats)
    i = torch.arange(256 if smoke else 2048, device=device)
    attention = bias[i - i[:, None] + n - 1].softmax(-1)
    shape = tuple(attention.shape)
    report("every metric, of the matrix", shape, lambda: every_dense(attention), attention.sum, min(3, repeats))
    n, width = (512, 16) if smoke else (32_768, 64)
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(n, width)) / 3).float().to(device)

    def product_and_softmax() -> None:
        for start in range(0, n, 64):
            (table[start : start + 64] @ table.T).softmax(-1)

    for fast in (False, True) if device == "cpu" else (False,):
        name = f"measure_absolute, {'numba' if fast else 'torch'}, to product + softmax"
        with compiled(fast):
            report(name, (n, width), lambda: measure_absolute(table), product_and_softmax, 1 if smoke else 3)


def every_relative(bias: torch.Tensor) -> None:
    result = measure_relative(bias)
    _ = result.profile_asymmetry, result.window(), result.half_life()


def every_dense(attention: torch.Tensor) -> None:
    measure(attention)
    for name in COMPLEMENTARY:
        getattr(metrics, name)(attention)


def report(name: str, shape: tuple[int, ...], function: object, baseline: object, repeats: int) -> None:
    took, ratio = paired(function, baseline, repeats)
    print(ROW.format(name, str(shape), f"{1e3 * took:.1f}", f"{ratio:.2f}", f"{extra_mebibytes(function):.1f}"))


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    print(f"{machine()}; medians of {options.repeats} pairs; ratio to torch.sum of the same tensor unless named\n")
    print(ROW.format("what", "input", "ms", "ratio", "extra MiB"))
    print(ROW.format("---", "---", "---:", "---:", "---:"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense(device, options.smoke, options.repeats)
    without_matrix(device, options.smoke, options.repeats)
    loops(options.smoke)


if __name__ == "__main__":
    main()
