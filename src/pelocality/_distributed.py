"""Work divided among the processes of ``torch.distributed``: each takes a part, and all get the whole result.

Without an initialised process group, or in a group of one, each function returns what it was given. So it does where
the weights of the model are divided instead, as the processes can then run it only together.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
P = ParamSpec("P")
_undivided = ContextVar("_undivided", default=False)


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process, from 0, and the number of processes among which work is divided."""
    return (0, 1) if _undivided.get() or not several_processes() else (dist.get_rank(), dist.get_world_size())


def several_processes() -> bool:
    """Return whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def undivided_if_sharded(function: Callable[P, T]) -> Callable[P, T]:
    """Let each process do all the work of a function whose first argument is a model with weights divided among them.

    They can run such a model only together, equally often.
    """

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        model: Any = args[0] if args else options.get("model")
        before = _undivided.set(_undivided.get() or _is_sharded(getattr(model, "given", model)))
        try:
            return function(*args, **options)
        finally:
            _undivided.reset(before)

    return run


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


def fully_sharded(model: Any) -> Any:
    """Return the outermost part of a model whose weights ``fully_shard`` gathers while it runs, or None."""
    if not (dist.is_available() and dist.is_initialized() and isinstance(model, nn.Module)):
        return None
    from torch.distributed.fsdp import FSDPModule

    return next((part for part in model.modules() if isinstance(part, FSDPModule)), None)


def _is_sharded(model: Any) -> bool:
    """Return whether each process holds a part of the weights of a model alone."""
    if not several_processes() or not isinstance(model, nn.Module):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    parts = [*model.modules(), *model.parameters()]
    return any(isinstance(part, DTensor | FSDPModule | FullyShardedDataParallel) for part in parts)


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose attention no process sees whole (tensor parallelism), or that hides its weights (FSDP1).

    Raises:
        ValueError: The model is sharded, and not by ``fully_shard`` alone.
    """
    if not _is_sharded(model):
        return
    from torch.distributed.tensor import DTensor

    whole = fully_sharded(model) is not None
    tensors = (each for each in model.parameters() if isinstance(each, DTensor))
    if not whole or any(sum(not place.is_replicate() for place in each.placements) > 1 for each in tensors):
        advice = "use fully_shard, load all its weights in each process, or spread it over devices with device_map"
        raise ValueError(f"{type(model).__name__} is sharded over processes, so that none sees all heads; {advice}")


def without_ddp(model: Any) -> Any:
    """Return a model without its ``DistributedDataParallel``, whose forward pass would wait for other processes."""
    parallel = dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel)
    return model.module if parallel else model


@functools.lru_cache(maxsize=1)
def _cpu_group(world: Any) -> Any:
    """Return a group that exchanges what lies on the CPU: the default one, unless it is of GPUs alone."""
    return world if "gloo" in str(dist.get_backend_config(world)) else dist.new_group(backend="gloo")
