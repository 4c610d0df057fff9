"""Batches of texts of one length."""

import itertools
from collections.abc import Iterator, Sequence


def batches_of_equal_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of texts in batches of one length, the shortest first.

    Rotations that depend on the longest text so far (dynamic NTK) are then those of a text alone.

    Padding changes what models answer that count positions through it (BERT and GPT-2 after padding on the left), read
    the first or last place, or mix neighbours (ConvBERT).
    """
    in_order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, equal in itertools.groupby(in_order, lengths.__getitem__):
        while batch := list(itertools.islice(equal, batch_size)):
            yield batch
