"""A model's attention with what its maps do not say: which of its layers they belong to, and which keys are visible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pelocality.models._restore import hooked, restoring
from pelocality.models._run import attentions
from pelocality.models.families._record import Architecture

# half of -1e4, the smallest mask that transformers adds: logits of words come nowhere near, with or without it
_HIDDEN = -5e3
_Place = tuple[nn.ModuleList, int]  # a list of layers, and the index of one of them


@dataclass(frozen=True)
class Observed:
    """What one pass of a model showed.

    Attributes:
        maps: attention (batch, head, n, n), for each layer that has it.
        layers: the numbers of those layers in the model, counted from 0.
        depth: the number of layers of the model, those without attention included.
        visible: the keys that each query may attend to, (batch or 1, n, n) for each of ``maps``, on its device.
    """

    maps: tuple[Tensor, ...]
    layers: tuple[int, ...]
    depth: int
    visible: tuple[Tensor, ...]


def observe(base: Any, record: Architecture | None, **inputs: Tensor) -> Observed:
    """Run a base model and return its attention, the layers it belongs to, and which keys were visible.

    Of a family without a record, the softmax of every layer is read as it runs: its logits hold the mask that the
    model itself built, be it a window, chunks or a prefix, and the block in which it runs is the layer. Weights alone
    would not do, as they underflow to 0 on keys that are visible.

    Args:
        base: from `find_base`.
        record: from `find_base`.
        inputs: passed to the model.

    Returns:
        An `Observed`.

    Raises:
        ValueError: as for `attentions`, or layers that differ in their number of heads.
    """
    if record is not None:  # every layer of these has attention
        maps = attentions(base, **inputs)
        n, device = maps[0].shape[-1], maps[0].device
        seen = tuple(record.visible(base, module, n)[None].to(device) for module in record.attentions(base))
        return Observed(maps, tuple(range(len(maps))), len(maps), seen)
    blocks = _blocks(base)
    softmaxes = _Softmaxes()

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        softmaxes.place = blocks[block]

    with hooked(blocks, enter), softmaxes.on():
        maps = attentions(base, **inputs)
    found = _matched(maps, softmaxes.seen)
    heads = sorted({weights.shape[1] for weights in maps})
    if len(heads) > 1:
        raise ValueError(
            f"{type(base).__name__} (model type '{base.config.model_type}') cannot be probed: its layers have "
            f"different numbers of heads ({', '.join(map(str, heads))})"
        )
    layers, depth = _numbers([None if softmax is None else softmax.place for softmax in found])
    visible = tuple(
        (weights > 0 if softmax is None else softmax.visible.reshape(weights.shape)).any(1)
        for weights, softmax in zip(maps, found, strict=True)
    )
    return Observed(maps, layers, depth, visible)


@dataclass(frozen=True)
class _Softmax:
    """One softmax: the layer that ran, the keys that its logits leave visible, and its result, both (..., n, n)."""

    place: _Place | None
    visible: Tensor
    weights: Tensor


class _Softmaxes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The softmaxes over (..., n, n) that run while this is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: _Place | None = None
        self.seen: list[_Softmax] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen for the while."""

        def undo() -> None:
            if self in _get_current_dispatch_mode_stack():
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        with restoring(undo):
            self.__enter__()  # type: ignore[no-untyped-call]
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and result.ndim > 2 and result.shape[-1] == result.shape[-2]:
            # a key is hidden where it has no weight, nor its logits would let it have any
            self.seen.append(_Softmax(self.place, (args[0] > _HIDDEN) | (result > 0), result))
        return result


def _matched(maps: tuple[Tensor, ...], softmaxes: list[_Softmax]) -> list[_Softmax | None]:
    """Return the softmax that gave each map, None where none did; both are in the order in which they ran."""
    found: list[_Softmax | None] = []
    start = 0
    for weights in maps:
        rest = range(start, len(softmaxes))
        index = next((i for i in rest if _same(softmaxes[i].weights, weights)), None)
        found.append(None if index is None else softmaxes[index])
        start = start if index is None else index + 1
    return found


def _same(given: Tensor, weights: Tensor) -> bool:
    """Return whether weights (batch, head, n, n) are the result of a softmax, whose batch and heads may be one axis."""
    if given.numel() != weights.numel() or given.shape[-1] != weights.shape[-1]:
        return False
    alike = given.reshape(weights.shape).to(weights.dtype)
    return given.data_ptr() == weights.data_ptr() or torch.equal(alike, weights)


def _blocks(module: nn.Module) -> dict[nn.Module, _Place]:
    """Return the members of the outermost module lists, each with its list and its place there."""
    found: dict[nn.Module, _Place] = {}
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found |= {block: (child, index) for index, block in enumerate(child)}
        else:
            found |= _blocks(child)
    return found


def _numbers(places: list[_Place | None]) -> tuple[tuple[int, ...], int]:
    """Return the numbers of the layers and the depth; counted as they ran where no list of layers tells them apart.

    One block that runs several times, as ALBERT's does, is such a case.
    """
    known = [place for place in places if place is not None]
    numbers = tuple(index for _, index in known)
    if (
        len(known) == len(places)
        and len({blocks for blocks, _ in known}) == 1
        and list(numbers) == sorted(set(numbers))
    ):
        return numbers, len(known[0][0])
    return tuple(range(len(places))), len(places)
