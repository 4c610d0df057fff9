"""Paired timings and peak memory, shared by the benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pelocality.metrics import _row_pass as rows


def arguments(description: str, values: dict[str, str] | None = None, **flags: str) -> argparse.Namespace:
    """Parse the flags of a benchmark; further flags are switches, with their help, or have the values by default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of runs; the medians are reported")
    for name, words in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=words)
    for name, value in (values or {}).items():
        parser.add_argument(f"--{name}", default=value)
    return parser.parse_args()


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes; on a GPU by its own clock, and what was queued before does not count."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    function()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000


def timed_pairs(
    function: Callable[[], object], baseline: Callable[[], object], repeats: int, within: float = math.inf
) -> list[tuple[float, float]]:
    """Return the seconds of two functions, run in turn: of this many pairs, or fewer where they take a while."""
    pairs, end = [], time.perf_counter() + within
    while len(pairs) < repeats and (not pairs or time.perf_counter() < end):
        pairs.append((seconds(function), seconds(baseline)))
    return pairs


def paired(function: Callable[[], object], baseline: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of the function and median of its ratio to the baseline, run in turn."""
    function(), baseline()
    pairs = timed_pairs(function, baseline, repeats)
    return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)


def extra_mebibytes(function: Callable[[], object]) -> float:
    """Peak resident memory while the function runs, beyond what was resident before (Linux), or on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return float("nan")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the function would be served from pages that are resident already
    clear.write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    function()
    return max(0.0, _status("VmHWM") - before) / 1024


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1])


@contextlib.contextmanager
def compiled(wanted: bool) -> Iterator[None]:
    """Run the metrics with a compiler or in plain torch."""
    engine = rows._engine
    rows._engine = engine if wanted else lambda device: None
    try:
        yield
    finally:
        rows._engine = engine


def machine() -> str:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    threads = "one thread" if threads == 1 else f"{threads} threads"
    return f"{names[0] if names else platform.machine()}{gpu}, torch {torch.__version__}, {threads}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
