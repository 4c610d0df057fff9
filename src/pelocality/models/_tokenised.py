"""Texts as tokenised batches."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pelocality.models._words import special_ids
from pelocality.models.families import longest_input


def token_batches(texts: Iterable[Any], base: Any, tokenizer: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches that are given as they are, and strings in tokenised batches, read as they are needed.

    Args:
        texts: Strings, or tokenised batches.
        base: The base transformer that will read them.
        tokenizer: Its tokenizer; strings need it.
        batch_size: Strings of a batch.

    Raises:
        TypeError: One text or batch instead of several, or strings among other items.
        ValueError: Strings without a tokenizer, or one that has no tokens, or more than the model can read.
    """
    if isinstance(texts, str | Mapping):
        kind = "text" if isinstance(texts, str) else "batch"
        raise TypeError(f"texts must be a list of texts or of tokenised batches, got one {kind}; pass [{kind}]")
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a list of texts or of tokenised batches, got {type(texts).__name__}")
    for number, (strings, items) in enumerate(groupby(texts, lambda item: isinstance(item, str))):
        if number:
            got = f"{type(next(items)).__name__} after {'tokenised batches' if strings else 'strings'}"
            raise TypeError(f"texts must be strings only, or tokenised batches only, got {got}")
        yield from _tokenised(items, base, tokenizer, batch_size) if strings else items


def _tokenised(texts: Iterable[str], base: Any, tokenizer: Any, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of as many texts at a time, (batch, n) each."""
    if tokenizer is None:
        raise ValueError("texts holds strings, which need a tokenizer; pass tokenizer=")
    special, longest, numbered = special_ids(base, tokenizer), longest_input(base), enumerate(texts)
    while batch := list(islice(numbered, batch_size)):
        encoded = tokenizer([text for _, text in batch], padding=False, truncation=False, verbose=False)
        for (number, text), ids in zip(batch, encoded["input_ids"], strict=True):
            if special.issuperset(ids):
                raise ValueError(f"texts[{number}], {brief(text)}, has no tokens but special ones; leave it out")
            if longest and len(ids) > longest:
                size = f"{len(ids)} tokens, the model can read {longest}"
                raise ValueError(f"texts[{number}], {brief(text)}, has {size}; shorten or split it")
        inputs = padded(tokenizer, encoded["input_ids"])
        if "token_type_ids" in encoded:
            inputs["token_type_ids"] = _rectangle(encoded["token_type_ids"])
        yield inputs


def padding_id(tokenizer: Any) -> int:
    """Return the id that pads; GPT-2 has none, and does not see it."""
    return tokenizer.pad_token_id or 0


def padded(tokenizer: Any, rows: Iterable[list[int]]) -> dict[str, Tensor]:
    """Return rows of token ids, padded at the end to one length, with their mask."""
    rows = list(rows)
    return {
        "input_ids": _rectangle(rows, padding_id(tokenizer)),
        "attention_mask": _rectangle([[1] * len(row) for row in rows]),
    }


def _rectangle(rows: Iterable[list[int]], padding: int = 0) -> Tensor:
    """Return rows of integers as a tensor (batch, n)."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
