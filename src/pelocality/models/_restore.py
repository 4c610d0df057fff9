"""Leaving someone's model as it was, an interrupt in the middle of restoring it included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def restoring(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` on leaving, twice: an interrupt that cuts the first call short leaves the second to finish.

    This is a generator so that it restores even where an interrupt falls between the block and its end: Python closes
    a generator that is dropped.

    Args:
        undo: restores what was recorded before; calling it again changes nothing.
    """
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and put both back on leaving.

    Args:
        model: any module.
    """
    training = [(module, module.training) for module in model.modules()]
    gradients = torch.is_grad_enabled()

    def undo() -> None:
        for module, flag in training:
            module.training = flag
        torch.set_grad_enabled(gradients)

    with restoring(undo):
        model.eval()
        torch.set_grad_enabled(False)  # not inference_mode, whose tensors a model might cache and later train with
        yield


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Have a hook called before each of these modules, with what they are given, and take it off on leaving.

    Args:
        modules: one that is listed twice is hooked once.
        hook: called with the module, its arguments and its keyword arguments.
    """
    distinct = list(dict.fromkeys(modules))

    def undo() -> None:
        for module in distinct:
            unhook(module, hook)

    with restoring(undo):
        for module in distinct:
            module.register_forward_pre_hook(hook, with_kwargs=True)
        yield


def unhook(module: nn.Module, *functions: Callable[..., Any]) -> None:
    """Take hooks that are these functions, or partials of them, off a module; also off a copy of the one they went on.

    The handle that registering returns knows only the module it was registered on.
    """
    for hooks, flags in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            if getattr(hook, "func", hook) in functions:
                flags.pop(key, None)  # first: without its hook an interrupt would leave it for good
                del hooks[key]
