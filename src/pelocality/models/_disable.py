"""Taking a model's own positions from it, for a while."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._calls import Arguments, Call
from pelocality.models._restore import unhook
from pelocality.models.families._record import Architecture


def silence(record: Architecture, base: Any) -> None:
    """Silence everything that tells a model positions, but for what its attention modules are handed one by one.

    Tables of positions and distances give zeros, for any index and so for any length. Rotary embeddings are told that
    every token stands at position 0, which is the identity rotation. No weight is touched.
    """
    for table in record.position_tables(base):
        table.register_forward_pre_hook(_look_up_the_first_row)
        table.register_forward_hook(_give_zeros)
    embeddings = _embeddings(record, base)
    if embeddings is not None:
        hook = functools.partial(_stand_at_zero, Arguments.of(embeddings))
        embeddings.register_forward_pre_hook(hook, with_kwargs=True)
    rotary = record.rotary(base)
    if rotary is not None:
        rotary.register_forward_pre_hook(functools.partial(_turn_by_nothing, Arguments.of(rotary)), with_kwargs=True)


def unsilence(record: Architecture, base: Any) -> None:
    """Undo `silence`."""
    for table in record.position_tables(base):
        unhook(table, _look_up_the_first_row, _give_zeros)
    for module in (_embeddings(record, base), record.rotary(base)):
        if module is not None:
            unhook(module, _stand_at_zero, _turn_by_nothing)


def _embeddings(record: Architecture, base: Any) -> nn.Module | None:
    """Return the module that makes position ids of its own, from a buffer that ends where the table does."""
    embeddings = getattr(base, "embeddings", None)
    if embeddings is None or record.absolute(base) is None:
        return None
    module: nn.Module = embeddings
    return module


def _look_up_the_first_row(table: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (torch.zeros_like(args[0]), *args[1:])  # an index beyond the table would fail before it is silenced


def _give_zeros(table: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)  # not a product with 0: the table gets no gradient, so no optimiser changes it


def _stand_at_zero(
    arguments: Arguments, embeddings: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    call = Call(arguments, args, kwargs)
    words = call["input_ids"] if call["input_ids"] is not None else call["inputs_embeds"]
    call["position_ids"] = torch.zeros(1, words.shape[1], dtype=torch.long, device=words.device)
    return call.args, call.kwargs


def _turn_by_nothing(
    arguments: Arguments, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    call = Call(arguments, args, kwargs)
    call["position_ids"] = torch.zeros_like(call["position_ids"])
    return call.args, call.kwargs
