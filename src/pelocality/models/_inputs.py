"""Validation of tokenised text."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pelocality.models._calls import argument_names
from pelocality.models._run import device_of
from pelocality.models._weights import check_ids


def token_tensor(name: str, given: Any, ids: Tensor | None = None) -> Tensor:
    """Return token ids, or token types or a mask of the shape of ``ids``, as integers; masks hold 0 and 1 in any type.

    Raises:
        TypeError: It does not hold integers.
        ValueError: Texts of different lengths, another shape than ``ids``, or a mask with other values.
    """
    if isinstance(given, Mapping):
        raise TypeError(f"{name} must be integers, got {type(given).__name__}; pass its '{name}'")
    try:
        tensor = torch.as_tensor(given)
    except ValueError as error:
        raise ValueError(
            f"{name} holds texts of different lengths; pad them: tokenizer(..., padding=True, return_tensors='pt')"
        ) from error
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} must be integers, got {type(given).__name__}; run the tokenizer first") from error
    if name.endswith("mask"):
        if not bool(((tensor == 0) | (tensor == 1)).all()):
            meaning = "special tokens and 0 for others" if name == "special_tokens_mask" else "tokens and 0 for padding"
            raise ValueError(f"{name} must be 1 for {meaning}, got other values")
    elif tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise TypeError(f"{name} must be integers, got {tensor.dtype}; run the tokenizer first")
    if ids is not None and tensor.shape != ids.shape:
        raise ValueError(f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {tuple(tensor.shape)}")
    return tensor.long()


def token_batch(base: Any, input_ids: Any, **others: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch's inputs on the model's device, (batch, n) each, and which of its tokens are not padding.

    Args:
        base: The base transformer that will read them.
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
    check_ids(base, ids)
    padding = getattr(base.config, "pad_token_id", None)
    unmasked = "attention_mask" in others and others["attention_mask"] is None
    if unmasked and padding is not None and bool((ids == padding).any()):
        raise ValueError(
            f"input_ids holds the padding id {padding} but there is no attention_mask; pass the tokenizer's, or ones "
            "if every id is a token"
        )
    given = {name: token_tensor(name, other, ids) for name, other in others.items() if other is not None}
    inputs = {
        name: tensor.reshape(-1, ids.shape[-1]).to(device_of(base))
        for name, tensor in {"input_ids": ids, **given}.items()
    }
    if "token_type_ids" in inputs:
        _check_token_types(base, inputs["token_type_ids"])
    return inputs, inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


def _check_token_types(base: Any, types: Tensor) -> None:
    """Refuse token types of which the model has none, or fewer."""
    if "token_type_ids" not in argument_names(base):
        raise ValueError(f"{type(base).__name__} reads no token_type_ids; leave them out")
    known = getattr(base.config, "type_vocab_size", None)
    if known is not None and bool(((types < 0) | (types > max(known - 1, 0))).any()):
        raise ValueError(f"token_type_ids must be in 0..{max(known - 1, 0)} for {type(base).__name__}")


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
