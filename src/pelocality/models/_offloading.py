"""Models whose weights accelerate offloads, and loads layer by layer with a hook on each module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_HOOK = "_hf_hook"  # the attribute of a module that holds the hook of accelerate


def execution_device(module: nn.Module) -> torch.device | None:
    """Return the device on which accelerate runs a module, None where neither it nor a part of it is offloaded."""
    for part in module.modules():
        device = getattr(getattr(part, _HOOK, None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Load the offloaded weights of a module whose ``forward``, before which accelerate loads them, is not called."""
    if not hasattr(module, _HOOK):
        yield
        return
    hooked = [part for part in module.modules() if hasattr(part, _HOOK)]
    try:
        for part in hooked:
            getattr(part, _HOOK).pre_forward(part)
        yield
    finally:
        for part in hooked:
            getattr(part, _HOOK).post_forward(part, None)
