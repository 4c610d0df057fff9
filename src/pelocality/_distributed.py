"""Work divided among the processes of ``torch.distributed``: each takes a part, and all get the whole result.

Without an initialised process group, or in a group of one, each function returns what it was given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process, from 0, and the number of processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def my_part(items: Sequence[T]) -> Sequence[T]:
    """Return the items that fall to this process, every ``size``-th one; all processes must be given the same items.

    A part may be empty.
    """
    rank, size = rank_and_size()
    return items[rank::size]


def gathered(part: Sequence[T], total: int | None = None) -> list[T]:
    """Return the results of all processes, in the order of the items that `my_part` divided.

    Args:
        part: One result for each item of this process.
        total: Number of all items, which is checked.

    Raises:
        ValueError: The parts are not those of as many items: the processes were given different ones.
    """
    _, size = rank_and_size()
    parts: list[Any] = [list(part)]
    if size > 1:
        parts = [None] * size
        dist.all_gather_object(parts, list(part), group=_cpu_group(dist.group.WORLD))
    whole: list[Any] = [None] * sum(map(len, parts))
    if [len(whole[k::size]) for k in range(size)] != list(map(len, parts)) or total not in (None, len(whole)):
        raise ValueError(f"all processes must be given the same items, got {[len(each) for each in parts]} results")
    for k, each in enumerate(parts):
        whole[k::size] = each
    return whole


def summed(tensor: Tensor | None) -> Tensor | None:
    """Return the sum over all processes of a tensor, on its device; None where a process has nothing to add.

    A process without a tensor gets the sum on the CPU. None is returned where no process has one.
    """
    if rank_and_size()[1] == 1:
        return tensor
    kinds = gathered([None if tensor is None else (tensor.shape, tensor.dtype)])
    known = next((kind for kind in kinds if kind is not None), None)
    if known is None:
        return None
    mine = torch.zeros(known[0], dtype=known[1]) if tensor is None else tensor.detach().cpu().clone()
    dist.all_reduce(mine, group=_cpu_group(dist.group.WORLD))
    return mine if tensor is None else mine.to(tensor.device)


def alone(model: nn.Module) -> nn.Module:
    """Return a model without its ``DistributedDataParallel``, whose forward pass would wait for the other processes."""
    if dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


@functools.lru_cache(maxsize=1)
def _cpu_group(world: Any) -> Any:
    """Return a group that exchanges what lies on the CPU: the default one, unless it is of GPUs alone."""
    return world if "gloo" in str(dist.get_backend_config(world)) else dist.new_group(backend="gloo")
