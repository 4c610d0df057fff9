"""Rotations whose frequencies depend on the longest input of a call (dynamic NTK) or of all calls before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pelocality.models._restore import restoring

_CACHED, _ORIGINAL = "max_seq_len_cached", "original_inv_freq"


def depend_on_length(model: nn.Module) -> bool:
    """Return whether the rotations of a model depend on the longest text of a batch: dynamic NTK and LongRoPE."""
    return any("dynamic" in kind or kind == "longrope" for module in model.modules() for kind in _kinds(module))


@contextmanager
def fresh_rotations(model: nn.Module) -> Iterator[None]:
    """Forget the longest input of dynamic rotations so far in a with-statement, and put it back on leaving."""
    rotary = [module for module in model.modules() if any("dynamic" in kind for kind in _kinds(module))]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in rotary]

    def undo() -> None:
        for module, values, buffers in before:
            for name in [name for name in vars(module) if name.endswith(_CACHED) and name not in values]:
                del module.__dict__[name]
            module.__dict__.update({name: each for name, each in values.items() if name.endswith(_CACHED)})
            module._buffers.update(buffers)

    with restoring(undo):
        for module in rotary:
            for name in [name for name in module._buffers if name.endswith(_ORIGINAL)]:
                kind = name.removesuffix(_ORIGINAL)  # the type of a layer, where types differ in their rotations
                module._buffers[f"{kind}inv_freq"] = module._buffers[name]
                setattr(module, f"{kind}{_CACHED}", module.original_max_seq_len)
        yield


def _kinds(module: nn.Module) -> list[str]:
    """Return how a rotary module chooses its frequencies, in the words of transformers; types of layers may differ."""
    found: Any = getattr(module, "rope_type", None)
    return [kind for kind in (found.values() if isinstance(found, dict) else [found]) if isinstance(kind, str)]
