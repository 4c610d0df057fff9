"""Time of the metrics as a multiple of reading their input once (torch.sum), with peak memory.

python -m benchmarks.metrics                  # a few minutes
python -m benchmarks.metrics --device cuda
python -m benchmarks.metrics --smoke          # seconds, to see that it runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import arguments, compiled, extra_mebibytes, machine, paired, seconds
from pelocality import locality, measure, measure_absolute, measure_relative, metrics, symmetry
from tests import witness

COMPLEMENTARY = (
    "adjusted_locality", "past_locality", "mean_distance", "direction_balance", "entropy", "sink_rate", "monotonicity",
    "distance_profile", "profile_asymmetry", "window", "half_life",
)  # fmt: skip
SMOKE, ON_CPU = [(2, 2, 64, 64), (256, 256)], [(12, 12, 512, 512), (4096, 4096)]
ON_GPU = [(192, 12, 128, 128), (12, 12, 512, 512), (4, 16, 2048, 2048), (2, 8, 4096, 4096), (1, 2, 16384, 16384)]
ROW = "| {:<48} | {:<18} | {:>10} | {:>9} | {:>10} |"


def inputs(shape: tuple[int, ...], device: str) -> Iterator[tuple[str, Tensor]]:
    """What attention looks like, and in which precision it comes."""
    logits = torch.randn(shape, device=device)
    yield "random", logits.softmax(-1)
    future = torch.ones(shape[-2:], dtype=torch.bool, device=device).triu(1)
    yield "causal", logits.masked_fill(future, -torch.inf).softmax(-1)
    yield "sharp", (8 * logits).softmax(-1)
    sink = torch.zeros(shape[-1], device=device)
    sink[0] = 8
    yield "sinks", (logits + sink).softmax(-1)
    yield "uniform", torch.zeros_like(logits).softmax(-1)
    yield "float32 of bfloat16", logits.softmax(-1).bfloat16().float()
    yield "bfloat16", logits.softmax(-1).bfloat16()
    yield "float16", logits.softmax(-1).half()


def dense(device: str, smoke: bool, repeats: int) -> None:
    for shape in SMOKE if smoke else ON_CPU if device == "cpu" else ON_GPU:
        for name, attention in inputs(shape, device):
            baseline = (attention.float() if device == "cpu" else attention).sum
            report(f"measure, {name}", shape, lambda a=attention: measure(a), baseline, repeats)
            leaf = attention.requires_grad_()
            report(f"measure with gradient, {name}", shape, lambda a=leaf: gradient(a), baseline, repeats)
            if name == "random":
                others(leaf.detach(), leaf, baseline, repeats)


def others(attention: Tensor, leaf: Tensor, baseline: Callable[[], object], repeats: int) -> None:
    shape = tuple(attention.shape)
    report("locality", shape, lambda: locality(attention), baseline, repeats)
    report("symmetry", shape, lambda: symmetry(attention), baseline, repeats)
    squares = lambda: torch.autograd.grad((leaf * leaf).sum(), leaf)  # noqa: E731
    report("(a * a).sum() with gradient", shape, squares, baseline, repeats)
    with compiled(False):
        report("measure, formula in torch", shape, lambda: measure(attention), baseline, max(3, repeats // 3))


def gradient(attention: Tensor) -> Tensor:
    numbers = measure(attention)
    return torch.autograd.grad(sum(each.sum() for each in vars(numbers).values()), attention)[0]


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

    name = "measure_absolute, to product + softmax"
    report(name, (n, width), lambda: measure_absolute(table), product_and_softmax, 1 if smoke else 3)


def every_relative(bias: Tensor) -> None:
    result = measure_relative(bias)
    _ = result.profile_asymmetry, result.window(), result.half_life()


def every_dense(attention: Tensor) -> None:
    measure(attention)
    for name in COMPLEMENTARY:
        getattr(metrics, name)(attention)


def report(
    name: str, shape: tuple[int, ...], function: Callable[[], object], baseline: Callable[[], object], repeats: int
) -> None:
    took, ratio = paired(function, baseline, repeats)
    print(ROW.format(name, str(shape), f"{1e3 * took:.2f}", f"{ratio:.2f}", f"{extra_mebibytes(function):.1f}"))


def main() -> None:
    options = arguments(__doc__.splitlines()[0], values={"device": "cuda" if torch.cuda.is_available() else "cpu"})
    torch.set_num_threads(1)
    print(f"{machine()}; medians of {options.repeats} pairs; ratio to torch.sum of the same tensor unless named\n")
    print(ROW.format("what", "input", "ms", "ratio", "extra MiB"))
    print(ROW.format("---", "---", "---:", "---:", "---:"))
    dense(options.device, options.smoke, options.repeats)
    without_matrix(options.device, options.smoke, options.repeats)
    loops(options.smoke)


if __name__ == "__main__":
    main()
