"""Validation of tokenised text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_tensor(name: str, given: Any, ids: Tensor | None = None) -> Tensor:
    """Return token ids, or token types or a mask of the shape of ``ids``, as integers; masks hold 0 and 1 in any type.

    Raises:
        TypeError: if it does not hold integers.
        ValueError: for texts of different lengths, another shape than ``ids``, or a mask with other values.
    """
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


def token_batch(input_ids: Any, **others: Any) -> dict[str, Tensor]:
    """Return token ids, and the others that are not None, as (batch, n) each; one sequence becomes a batch.

    Raises:
        TypeError: as for `token_tensor`.
        ValueError: as for `token_tensor`, or ids of another shape than (n,) or (batch, n).
    """
    ids = token_tensor("input_ids", input_ids)
    if ids.ndim not in (1, 2) or not ids.shape[-1]:
        raise ValueError(f"input_ids must be (n,) or (batch, n) with at least one token, got shape {tuple(ids.shape)}")
    given = {name: token_tensor(name, other, ids) for name, other in others.items() if other is not None}
    return {name: tensor.reshape(-1, ids.shape[-1]) for name, tensor in {"input_ids": ids, **given}.items()}
