"""Work divided among the processes of ``torch.distributed``: each takes a part, and all get the whole result.

Without an initialised process group, or in a group of one, each function returns what it was given.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process, from 0, and the number of processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def part_of_process(items: Sequence[T]) -> Sequence[T]:
    """Return the items of this process, some in a row or none; all processes must be given the same items."""
    rank, size = rank_and_size()
    return items[len(items) * rank // size : len(items) * (rank + 1) // size]


def gathered(part: Iterable[T], total: int | None = None) -> list[T]:
    """Return the results of all processes in the order of the processes.

    Args:
        part: The results of this process, such as one for each item of `part_of_process`.
        total: Number of all results, which is checked.

    Raises:
        ValueError: The results are not as many: the processes were given different items.
    """
    parts: list[Any] = [list(part)]
    if rank_and_size()[1] > 1:
        parts *= rank_and_size()[1]
        dist.all_gather_object(parts, parts[0], group=_cpu_group(dist.group.WORLD))
    whole = list(itertools.chain(*parts))
    if total not in (None, len(whole)):
        raise ValueError(f"all processes must be given the same items, got {list(map(len, parts))} results")
    return whole


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over all processes of a tensor of the same shape in each, on its device."""
    if rank_and_size()[1] == 1:
        return tensor
    total = tensor.detach().cpu().clone()
    dist.all_reduce(total, group=_cpu_group(dist.group.WORLD))
    return total.to(tensor.device)


@contextmanager
def failing_together() -> Iterator[list[Any]]:
    """Fail on all processes where one fails inside the context, instead of waiting for it after the context.

    Inside, no process may wait for another. What must be the same in all, such as their input, goes into the list.

    Raises:
        RuntimeError: Another process failed.
        ValueError: The lists differ.
    """
    same: list[Any] = []
    try:
        yield same
    except Exception as error:
        gathered([f"{type(error).__name__}: {error}"])
        raise
    lists: list[Any] = gathered([same])
    if failed := [each for each in lists if isinstance(each, str)]:
        raise RuntimeError(f"another process failed: {failed[0]}")
    if any(each != same for each in lists):
        raise ValueError("all processes must be given the same words or batches; each selects its part by itself")


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which each process holds a part of the weights, so that no process can run it alone.

    Raises:
        ValueError: The model is sharded.
    """
    if rank_and_size()[1] > 1:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.tensor import DTensor

        parts = [*model.modules(), *model.parameters()]
        if any(isinstance(part, FullyShardedDataParallel | DTensor) for part in parts):
            advice = "load all its weights in each process, or spread it over the devices of one with device_map"
            raise ValueError(f"{type(model).__name__} is sharded over processes, so no process can run it; {advice}")


def without_ddp(model: nn.Module) -> nn.Module:
    """Return a model without its ``DistributedDataParallel``, whose forward pass would wait for the other processes.

    Raises:
        ValueError: The model is sharded over processes.
    """
    refuse_sharded(model)
    if dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


@functools.lru_cache(maxsize=1)
def _cpu_group(world: Any) -> Any:
    """Return a group that exchanges what lies on the CPU: the default one, unless it is of GPUs alone."""
    return world if "gloo" in str(dist.get_backend_config(world)) else dist.new_group(backend="gloo")
