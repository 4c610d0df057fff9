"""The positions of a model, disabled while an encoding is attached, and the rotations that its attention is given."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pelocality._checks import WITHOUT_FLOAT64
from pelocality.models._calls import argument_names, call_of, changes_call
from pelocality.models.families import ATTACHED, Architecture
from pelocality.models.rotations import places_at, radians_off

# Attention modules take cosines and sines under these names.
_ANGLES = re.compile("position_embeddings|^cos|^sin|freqs|rotary")


def disable_positions(record: Architecture, base: Any) -> None:
    """Disable the position embeddings of a model, except for those among the arguments of its attention modules.

    Tables of positions and distances return zeros, for any index and so for any length. Rotary embeddings are given
    zero position ids, which is the identity rotation. No weight is changed.
    """
    for table in record.position_tables(base):
        _disable_table(table, record)
    for module in record.position_readers(base):
        module.register_forward_pre_hook(_zero_position_ids, with_kwargs=True)


def disable_named(base: nn.Module, names: Sequence[str]) -> None:
    """Disable parts and parameters of any module: they give zeros. No weight is changed.

    Raises:
        ValueError: There is no such part or parameter.
    """
    modules, parameters = dict(base.named_modules()), dict(base.named_parameters())
    for name in names:
        if name in modules:
            _disable_table(modules[name], Architecture())
        elif name in parameters:
            parent, _, attribute = name.rpartition(".")
            parametrize.register_parametrization(modules[parent], attribute, _Zeros(), unsafe=True)
            modules[parent].register_state_dict_post_hook(_keep_names)
            modules[parent].register_load_state_dict_pre_hook(_take_names)
        else:
            similar = [each for each in (*modules, *parameters) if "pos" in each.lower() and ATTACHED not in each]
            advice = f"such as {', '.join(similar[:5])}" if similar else "of named_modules() or named_parameters()"
            raise ValueError(f"disable must hold names of parts or parameters of the model, got {name!r}; {advice}")


def enable_parameters(module: nn.Module) -> None:
    """Give a module its own parameters again in the place of zeros."""
    for name in _disabled_parameters(module):
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


# ---- the rotation that an attention module is given


Angles = tuple[Tensor, ...]
"""Cosines and sines, or one complex tensor."""


def with_angles(call: dict[str, Any], new: Callable[[Angles], Angles]) -> dict[str, Any]:
    """Return the arguments of a call of an attention module with other cosines and sines.

    Args:
        call: The arguments by name.
        new: A function of the cosines and sines that the module is given.
    """
    named = {name: each for name, each in call.items() if each is not None and _ANGLES.search(name)}
    pairs = {name: each for name, each in named.items() if isinstance(each, tuple | list) and len(each) == 2}
    changed: dict[str, Any] = {name: new(tuple(each)) for name, each in pairs.items() if each[0].shape == each[1].shape}
    tensors = {name: each for name, each in named.items() if isinstance(each, Tensor)}
    changed |= {name: new((each,))[0] for name, each in tensors.items() if each.is_complex()}
    if len(tensors) == 2 and not changed:
        first, second = tensors.values()
        if first.shape == second.shape:
            changed |= zip(tensors, new((first, second)), strict=True)
    return call | changed


def without_rotation(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an attention module with cosines of 1 and sines of 0."""
    return with_angles(call, lambda angles: (torch.ones_like(angles[0]), *map(torch.zeros_like, angles[1:])))


def angles_of(call: dict[str, Any]) -> list[Angles]:
    """Return the cosines and sines, or complex tensors, among the arguments of a call."""
    every: list[Angles] = []
    with_angles(call, lambda angles: (every.append(angles), angles)[1])  # type: ignore[func-returns-value]
    return every


def turns_of(angles: Angles) -> Tensor:
    """Return the angles (batch or 1, n, band) of cosines and sines, or of complex numbers."""
    exact = torch.float32 if angles[0].device.type in WITHOUT_FLOAT64 else torch.float64
    cos, sin = angles if len(angles) == 2 else torch.view_as_real(angles[0]).unbind(-1)
    turns = torch.atan2(sin.to(exact), cos.to(exact))
    turns = turns.squeeze(-2) if turns.ndim > 2 else turns  # of all heads
    return turns.reshape(-1, *turns.shape[-2:])


def places_of(call: dict[str, Any], waves: Sequence[Sequence[float]]) -> Tensor:
    """Return the coordinates of tokens (batch or 1, n, axis) by the angles among the arguments of a call.

    Args:
        call: The arguments of an attention module by name.
        waves: How these angles turn with the coordinates, (band, axis).

    Raises:
        ValueError: The angles are not those of coordinates.
    """
    (angles,) = angles_of(call)
    turns = turns_of(angles)
    places = places_at(turns, waves)
    if not torch.compiler.is_compiling():
        expected = places @ turns.new_tensor(waves).mT
        off = radians_off(turns, expected, torch.finfo(angles[0].dtype).eps)
        if not off <= 0:
            reason = "are not those of coordinates, as in larger images than its waves tell apart"
            raise ValueError(f"angles that a model gives its attention {reason} (off by {off:.2g} radians)")
    return places


def takes_angles(module: nn.Module) -> bool:
    """Return whether a module is given cosines and sines as arguments."""
    return any(_ANGLES.search(name) for name in argument_names(module))


def note_places(attentions: Sequence[nn.Module], module: Any, args: Any, kwargs: Any) -> None:
    """Note the coordinates of tokens on several axes, which a module is called with (a hook)."""
    ids = call_of(module, args, kwargs).get("position_ids")
    if isinstance(ids, Tensor) and ids.ndim == 3:  # (axis, batch, n)
        for attention in attentions:
            if ATTACHED in attention._modules:  # not every layer has an encoding
                getattr(attention, ATTACHED).places = ids.movedim(0, -1)


# ---- a table


def _disable_table(table: nn.Module, record: Architecture) -> None:
    if type(table).forward is nn.Embedding.forward:
        table.register_forward_pre_hook(_look_up_the_first_row)
    table.register_forward_hook(functools.partial(_without_position, record))


def _look_up_the_first_row(table: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Look up the first row for every index, as an index beyond the table would raise."""
    return (torch.zeros_like(args[0]), *args[1:])


def _without_position(record: Architecture, table: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return record.without_position(output)


# ---- the position ids of a rotary module


@changes_call
def _zero_position_ids(module: Any, call: dict[str, Any]) -> None:
    if call.get("position_ids") is None:  # the default is a buffer, which ends where the table ends
        words = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
        call["position_ids"] = torch.zeros(1, words.shape[1], dtype=torch.long, device=words.device)
    call["position_ids"] = torch.zeros_like(call["position_ids"])


# ---- a parameter


class _Zeros(nn.Module):
    """Zeros in the place of a parameter, which gets no gradient."""

    def forward(self, parameter: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(parameter)


def _keep_names(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give disabled parameters their own names in a state dict (a hook)."""
    for name in _disabled_parameters(module):
        state_dict[prefix + name] = state_dict.pop(f"{prefix}parametrizations.{name}.original")


def _take_names(module: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Load disabled parameters by their own names (a hook)."""
    for name in _disabled_parameters(module):
        if prefix + name in state_dict:
            state_dict[f"{prefix}parametrizations.{name}.original"] = state_dict.pop(prefix + name)


def _disabled_parameters(module: Any) -> list[str]:
    """Return the names of the parameters of a module that give zeros."""
    chains = module.parametrizations if parametrize.is_parametrized(module) else {}
    return [name for name, chain in chains.items() if isinstance(chain[0], _Zeros)]
