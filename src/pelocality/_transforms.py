"""Tensors inside the function transforms of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad


def transformed(*tensors: Tensor) -> bool:
    """Return whether any of the tensors is inside a `torch.func` transform or has a forward-mode tangent."""
    for each in tensors:
        _, tangent = forward_ad.unpack_dual(each)  # type: ignore[no-untyped-call]
        if tangent is not None or torch.func.debug_unwrap(each) is not each:
            return True
    return False


def without_vmap(states: Any, ndim: int = 0) -> Any:
    """Return a tensor inside `torch.vmap` as it is outside: its axes there before at least ``ndim`` axes inside."""
    if not isinstance(states, Tensor) or not _functorch.is_batchedtensor(states):
        return states
    inner, axes = states, 0
    while _functorch.is_batchedtensor(inner):
        inner = _functorch.get_unwrapped(inner).movedim(_functorch.maybe_get_bdim(inner), 0)
        axes += 1
    return inner[(slice(None),) * axes + (None,) * (ndim - states.ndim)]


def inside_transform() -> bool:
    """Return whether a `torch.func` transform is in force."""
    return _functorch.peek_interpreter_stack() is not None


def called_outside(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function outside of the transforms in force, whose rules do not concern it."""
    if not inside_transform():
        return function(argument)
    with temporarily_clear_interpreter_stack():
        return function(argument)


def changed_without_vmap(change: Callable[[Any], Any], states: Any) -> Any:
    """Return what a function that keeps shapes makes of a tensor inside `torch.vmap` as it is outside."""
    if not isinstance(states, Tensor):
        return change(states)
    levels, inner = [], states
    while _functorch.is_batchedtensor(inner):
        levels.append(_functorch.maybe_get_level(inner))
        inner = _functorch.get_unwrapped(inner)
    changed = change(without_vmap(states))
    for level in reversed(levels):
        changed = _functorch._add_batch_dim(changed, 0, level)
    return changed
