"""Disabling a model's own position embeddings while an encoding is attached."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._restore import unhook
from pelocality.models.families._calls import Arguments, Call
from pelocality.models.families._record import Architecture


def disable_positions(record: Architecture, base: Any) -> None:
    """Disable what tells a model positions, except for the arguments of its attention modules.

    Tables of positions and distances return zeros, for any index and so for any length. Rotary embeddings are given
    zero position ids, which is the identity rotation. No weight is changed.
    """
    for table in record.position_tables(base):
        table.register_forward_pre_hook(_look_up_the_first_row)
        table.register_forward_hook(_return_zeros)
    embeddings = _embeddings(record, base)
    if embeddings is not None:
        hook = functools.partial(_zero_position_ids, Arguments.of(embeddings))
        embeddings.register_forward_pre_hook(hook, with_kwargs=True)
    rotary = record.rotary(base)
    if rotary is not None:
        rotary.register_forward_pre_hook(functools.partial(_identity_rotation, Arguments.of(rotary)), with_kwargs=True)


def enable_positions(record: Architecture, base: Any) -> None:
    """Undo `disable_positions`."""
    for table in record.position_tables(base):
        unhook(table, _look_up_the_first_row, _return_zeros)
    for module in (_embeddings(record, base), record.rotary(base)):
        if module is not None:
            unhook(module, _zero_position_ids, _identity_rotation)


def _embeddings(record: Architecture, base: Any) -> nn.Module | None:
    """Return the module that makes position ids itself, from a buffer that is as long as the table."""
    embeddings = getattr(base, "embeddings", None)
    if embeddings is None or record.absolute(base) is None:
        return None
    module: nn.Module = embeddings
    return module


def _look_up_the_first_row(table: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (torch.zeros_like(args[0]), *args[1:])  # an index beyond the table would fail


def _return_zeros(table: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)  # not a product with 0: the table gets no gradient, so no optimiser changes it


def _zero_position_ids(
    arguments: Arguments, embeddings: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    call = Call(arguments, args, kwargs)
    words = call["input_ids"] if call["input_ids"] is not None else call["inputs_embeds"]
    call["position_ids"] = torch.zeros(1, words.shape[1], dtype=torch.long, device=words.device)
    return call.args, call.kwargs


def _identity_rotation(
    arguments: Arguments, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    call = Call(arguments, args, kwargs)
    call["position_ids"] = torch.zeros_like(call["position_ids"])
    return call.args, call.kwargs
