"""Models whose weights accelerate keeps elsewhere and fetches layer by layer, by a hook on each module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_HOOK = "_hf_hook"  # where accelerate keeps its hook


def execution_device(module: nn.Module) -> torch.device | None:
    """Return where accelerate runs a module, None where it has no hook on it or on a part of it."""
    for part in module.modules():
        device = getattr(getattr(part, _HOOK, None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Fetch the weights of a module whose ``forward`` is not called, which is what accelerate waits for."""
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
