"""Recording the softmaxes of a running model, and the block in which each of them runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pelocality.models._restore import hooked, restoring

MASKED = -5e3
"""Recorded logits at most this are hidden: half of -1e4, the weakest mask that transformers adds.

Logits of words are far above it, with the mask far below. Masks that a user passes hide from `_checks.HIDDEN` on, which
large logits or biases by distance could reach.
"""

Block = tuple[nn.ModuleList, int]
"""A list of layers, and the index of one of them."""

_SOFTMAXES = (torch.softmax, Tensor.softmax, nn.functional.softmax)


class Softmaxes(TorchFunctionMode):
    """Passes each softmax of at least n keys in ``recording`` to a callback: its logits and weights (..., n, keys)."""

    def __init__(self, use: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.use = use
        self.block: Block | None = None
        """The block that runs."""

    def enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the block that begins to run."""
        self.block = block

    @contextmanager
    def recording(self, base: nn.Module) -> Iterator[None]:
        """Record the softmaxes of a model inside the context."""
        blocks = blocks_of(base)

        def undo() -> None:
            if self in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        with hooked(blocks, lambda block, args, kwargs: self.enter(blocks[block], args, kwargs)), restoring(undo):
            self.__enter__()  # type: ignore[no-untyped-call]
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SOFTMAXES and result.ndim > 2 and result.shape[-2] <= result.shape[-1]:
            self.use(args[0] if args else kwargs["input"], result)
        return result


def blocks_of(module: nn.Module) -> dict[nn.Module, Block]:
    """Return the members of the outermost module lists, each with its list and its index in it."""
    found: dict[nn.Module, Block] = {}
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found |= {block: (child, index) for index, block in enumerate(child)}
        else:
            found |= blocks_of(child)
    return found
