"""Disabling the position embeddings of a model while an encoding is attached."""

import functools
from typing import Any

import torch
from torch import nn

from pelocality.models._calls import changes_call
from pelocality.models._restore import unhook
from pelocality.models.families import Architecture


def disable_positions(record: Architecture, base: Any) -> None:
    """Disable the position embeddings of a model, except for those among the arguments of its attention modules.

    Tables of positions and distances return zeros, for any index and so for any length. Rotary embeddings are given
    zero position ids, which is the identity rotation. No weight is changed.
    """
    for table in record.position_tables(base):
        if type(table).forward is nn.Embedding.forward:
            table.register_forward_pre_hook(look_up_the_first_row)
        table.register_forward_hook(functools.partial(_without_position, record))
    for module in record.position_readers(base):
        module.register_forward_pre_hook(_zero_position_ids, with_kwargs=True)


def enable_positions(base: nn.Module) -> None:
    """Undo `disable_positions`, also where peft has put its layers around a table since."""
    for module in base.modules():
        unhook(module, look_up_the_first_row, return_zeros, _without_position, _zero_position_ids)


def look_up_the_first_row(table: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Look up the first row for every index (a hook), as an index beyond the table would raise."""
    return (torch.zeros_like(args[0]), *args[1:])


def return_zeros(table: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return zeros in the place of what a table of positions returns (a hook)."""
    return Architecture().without_position(output)


def _without_position(record: Architecture, table: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return record.without_position(output)


@changes_call
def _zero_position_ids(module: Any, call: dict[str, Any]) -> None:
    if call.get("position_ids") is None:  # they would be read from a buffer as long as the table
        words = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
        call["position_ids"] = torch.zeros(1, words.shape[1], dtype=torch.long, device=words.device)
    call["position_ids"] = torch.zeros_like(call["position_ids"])
