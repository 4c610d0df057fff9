"""Text as batches of token ids, and their checks."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pelocality._checks import check_tokenizer
from pelocality.models.inputs.words import special_ids
from pelocality.models.sequence_model import SequenceModel


def token_tensor(name: str, values: Any, ids: Tensor | None = None) -> Tensor:
    """Return token ids, or token types or a mask of the shape of ``ids``, as integers; masks hold 0 and 1 in any type.

    Raises:
        TypeError: It holds no numbers.
        ValueError: Texts of different lengths, another shape than ``ids``, numbers that are no integers, or a mask with
            other values than 0 and 1.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = ValueError if isinstance(values, list | tuple) else TypeError  # lists of different lengths
        raise wrong(f"{name} must be integers, (n,) or (batch, n): {error}") from error
    is_mask, integers = name.endswith("mask"), not (tensor.is_floating_point() or tensor.dtype == torch.bool)
    if not (((tensor == 0) | (tensor == 1)).all() if is_mask else integers or not tensor.numel()):
        raise ValueError(f"{name} must be {'0 and 1' if is_mask else 'integers'}, got other values of {tensor.dtype}")
    if ids is not None and tensor.shape != ids.shape:
        raise ValueError(f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {tuple(tensor.shape)}")
    return tensor.long()


def token_batch(model: SequenceModel, input_ids: Any, **others: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch's inputs on the model's device, (batch, n) each, and which of its tokens are not padding.

    Args:
        model: The model that will read them.
        input_ids: (batch, n), or (n,) for a batch of one.
        others: Masks and token types of the same shape; None for those that are absent.

    Raises:
        TypeError: As for `token_tensor`.
        ValueError: As for `token_tensor`, for ids of another shape, or outside the vocabulary, or that hold the
            model's padding id where the attention mask is absent, or token types that the model does not have.
    """
    ids = token_tensor("input_ids", input_ids)
    if ids.ndim not in (1, 2) or not ids.shape[-1]:
        raise ValueError(f"input_ids must be (n,) or (batch, n) with at least one token, got shape {tuple(ids.shape)}")
    unmasked = others.get("attention_mask", ids) is None
    if unmasked and model.padding is not None and bool((ids == model.padding).any()):
        raise ValueError(f"input_ids holds the padding id {model.padding}; pass attention_mask, ones if it is a token")
    inputs = {name: token_tensor(name, each, ids) for name, each in others.items() if each is not None}
    if "token_type_ids" in inputs:
        types = getattr(model.config, "type_vocab_size", None)
        unknown = types is not None and bool((inputs["token_type_ids"] >= max(types, 1)).any())
        if unknown or not model.reads("token_type_ids"):
            raise ValueError(f"{model} does not read these token_type_ids; leave them out")
    model.check_ids(ids)
    inputs = {"input_ids": ids} | inputs
    inputs = {name: each.reshape(-1, ids.shape[-1]).to(model.device) for name, each in inputs.items()}
    return inputs, inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


def tokens_first(real: Tensor) -> Tensor:
    """Return the order that puts the tokens of each text before its padding, (batch, n): some models count from there.

    Raises:
        ValueError: There is padding between tokens.
    """
    if bool((runs_of_tokens(real) > 1).any()):
        raise ValueError("attention_mask has holes; padding must be before or after the tokens, not between them")
    return (~real).long().argsort(dim=1, stable=True)


def runs_of_tokens(included: Tensor) -> Tensor:
    """Return how many runs of included tokens each text has, (batch, n) of bool -> (batch,)."""
    return (included[:, 1:] & ~included[:, :-1]).sum(1) + included[:, 0]


def token_batches(texts: Iterable[Any], model: SequenceModel, tokenizer: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches as they are, and strings in tokenised batches, read as they are needed.

    Args:
        texts: Strings, or tokenised batches.
        model: The model that will read them.
        tokenizer: Its tokenizer; strings need it.
        batch_size: Strings of a batch.

    Raises:
        TypeError: Strings without a tokenizer.
        ValueError: A string that has no tokens.
    """
    for strings, items in groupby(texts, lambda item: isinstance(item, str)):
        batches = partial(_tokenised, model=model, tokenizer=tokenizer, batch_size=batch_size) if strings else iter
        yield from batches(items)


def _tokenised(texts: Iterable[str], model: SequenceModel, tokenizer: Any, batch_size: int) -> Iterator[Any]:
    """Yield the inputs of as many texts at a time, (batch, n) each."""
    check_tokenizer(tokenizer)
    special, remaining = special_ids(model, tokenizer), iter(texts)
    while batch := list(islice(remaining, batch_size)):
        encoded = tokenizer(batch, padding=False, truncation=False, verbose=False)
        for text, ids in zip(batch, encoded["input_ids"], strict=True):
            if special.issuperset(ids):
                raise ValueError(f"texts hold {brief(text)}, which has no tokens but special ones; leave it out")
        more = {} if model.config is None else encoded  # an own module reads the ids alone
        read = {name: _rectangle(rows) for name, rows in more.items() if model.reads(name)}
        words = word_numbers(encoded)
        yield read | padded(tokenizer, encoded["input_ids"]) | ({"word_ids": _rectangle(words, -1)} if words else {})


def word_numbers(encoded: Any) -> Any:
    """Return the number of each token's word in the shape of its ids, -1 for special tokens; None where none is known.

    Fast tokenizers know them.
    """
    if not getattr(encoded, "is_fast", False):
        return None
    rows = [[-1 if word is None else word for word in each.word_ids] for each in encoded.encodings]
    return rows if torch.as_tensor(encoded["input_ids"][0]).ndim else rows[0]


def padding_id(tokenizer: Any) -> int:
    """Return the id that pads; GPT-2 has none, and does not see it."""
    return tokenizer.pad_token_id or 0


def padded(tokenizer: Any, rows: Iterable[list[int]]) -> dict[str, Tensor]:
    """Return rows of token ids, padded at the end to one length, with their mask."""
    rows = list(rows)
    mask = _rectangle([1] * len(row) for row in rows)
    return {"input_ids": _rectangle(rows, padding_id(tokenizer)), "attention_mask": mask}


def _rectangle(rows: Iterable[list[int]], padding: int = 0) -> Tensor:
    """Return rows of integers as a tensor (batch, n)."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
