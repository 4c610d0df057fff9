"""A table of work, each row beside what it is compared with, and none of them for longer than its time."""

from __future__ import annotations

import gc
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.measuring import extra_mebibytes, timed_pairs

Call = Callable[[], object]
WITHIN = 3  # seconds, after which no further pair of a row begins
TITLES = ("work", "size", "ms", "compared with", "its ms", "ratio", "MiB", "its MiB")
FIGURES = ("milliseconds", "baseline_milliseconds", "ratio", "mebibytes", "baseline_mebibytes")


class TooLong(BaseException):
    """The time of a row is over; not an exception that the library could catch."""


class Row:
    """Some work, and what it is compared with, in words.

    Args:
        work: What is timed.
        baseline: What it is compared with, or nothing.
        make: Returns the call of the work and that of the baseline, if there is one, when the turn of the row comes.
        arguments: What ``make`` is given.
        size: Numbers that say how much work it is.
    """

    def __init__(self, work: str, baseline: str, make: Callable[..., tuple[Call, ...]], *arguments: Any, **size: Any):
        self.work, self.baseline, self.make, self.arguments, self.size = work, baseline, make, arguments, size
        self.figures: dict[str, float] = {}
        self.failed = ""

    def run(self, limit: float, repeats: int) -> None:
        """Fill in the figures, or why there are none."""
        try:
            with at_most(limit):
                calls = self.make(*self.arguments)
                both = (*calls, lambda: None)[:2]
                for call in both:
                    call()  # compiles, and allocates what stays
                memory = [extra_mebibytes(call) for call in both]
                pairs = timed_pairs(*both, repeats, WITHIN)
            own, other = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
            self.figures = {"milliseconds": own, "mebibytes": memory[0]}
            if len(calls) == 2:
                ratio = statistics.median(a / b for a, b in pairs)
                self.figures |= {"baseline_milliseconds": other, "baseline_mebibytes": memory[1], "ratio": ratio}
        except (Exception, TooLong) as error:
            self.failed = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            traceback.print_exc(limit=-3)

    @property
    def entry(self) -> dict[str, Any]:
        """The row as JSON values."""
        words = {"work": self.work, "size": self.size, "baseline": self.baseline, "failed": self.failed or None}
        return words | self.figures

    def __str__(self) -> str:
        own, other, *rest = (f"{self.figures[name]:,.4g}" if name in self.figures else "" for name in FIGURES)
        size = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in self.size.items())
        return _line(self.work, size, self.failed or own, self.baseline, other, *rest)


def head_lines() -> list[str]:
    """Return the titles of a table of rows in Markdown."""
    return [_line(*TITLES), _line("---", "---", "---:", "---", *["---:"] * 4)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(each.replace("|", "/") for each in cells) + " |"


def run_rows(rows: list[Row], limit: float, repeats: int) -> None:
    """Run rows within these seconds; one gets what leaves five to each behind it, or half of what is left."""
    end = time.perf_counter() + limit
    for behind, row in zip(reversed(range(len(rows))), rows, strict=True):
        left = end - time.perf_counter()
        if left > 1:
            row.run(max(left - 5 * behind, left / 2), repeats)
        else:
            row.failed = f"not run: the {limit:g} seconds of its part were over"
        print(row, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Stop what runs inside when its seconds are over, as soon as the interpreter has its turn."""

    def stop(*_: object) -> None:
        raise TooLong(f"stopped after {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
