"""Batches of texts of one length."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def equally_long(items: Iterable[T], length: Callable[[T], int], batch_size: int) -> Iterator[list[T]]:
    """Yield items that are in the order of their length in batches of one length.

    Padding changes what models answer that count positions through it (BERT and GPT-2 after padding on the left), read
    the first or last place, or mix neighbours (ConvBERT).
    """
    for _, equal in itertools.groupby(items, length):
        while batch := list(itertools.islice(equal, batch_size)):
            yield batch
