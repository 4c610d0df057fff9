"""A device that computes on the CPU and refuses tensors of another device, as a GPU does.

`torch.device("pretended")` exists in a process from the import of this module on.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree, backend_registration

NAME = "pretended"
_aten = torch.ops.aten
# what a GPU does with tensors of two devices: copies, and indices that are on the CPU
_FROM_ANYWHERE = {_aten._to_copy.default, _aten.copy_.default}
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


refused: set[torch.dtype] = set()  # of which it has no tensors, as Apple's GPUs have none of float64


class OnDevice(Tensor):
    """A tensor on the pretended device; `numbers` is the same tensor on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnDevice":
        if numbers.dtype in refused:
            raise TypeError(f"{NAME} has no {numbers.dtype}")
        tensor = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.numbers = numbers
        return tensor

    # PyTorch's own methods know no memory of a subclass
    def tolist(self) -> Any:
        return self.numbers.tolist()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, *args, **kwargs or {})


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of PyTorch on the CPU; its result is on the pretended device if it would be there on a GPU."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    here = [each for each in tensors if isinstance(each, OnDevice)]
    others = [each for each in tensors if not isinstance(each, OnDevice) and each.dim()]  # a GPU reads single numbers
    indices = operation in _INDEXING and isinstance(args[0], OnDevice)
    if here and others and not indices and operation not in _FROM_ANYWHERE:
        raise RuntimeError(f"expected all tensors on one device, got {NAME} and {others[0].device} in {operation}")
    if operation is _aten._local_scalar_dense.default:
        return args[0].numbers.item()
    target = kwargs.get("device")
    stays = isinstance(args[0], OnDevice) if operation is _aten.copy_.default else bool(here)
    if target is not None:
        stays = torch.device(target).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu")}
    given = {id(each.numbers): each for each in here}
    args, kwargs = pytree.tree_map_only(OnDevice, lambda each: each.numbers, (args, kwargs))
    result = operation(*args, **kwargs)
    for each in here:
        if each.shape != each.numbers.shape:  # of an operation with out=
            with torch._C._DisableTorchDispatch():
                each.data = OnDevice(each.numbers)
    if not stays:
        return result.clone() if id(result) in given else result
    return pytree.tree_map_only(Tensor, lambda each: given[id(each)] if id(each) in given else OnDevice(each), result)


class _Backend(backend_registration._DummyBackendModule):
    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
_LIBRARIES = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
_LIBRARIES[0].fallback(_run, "PrivateUse1")  # operations without a tensor of the device: torch.zeros(device=...)
_LIBRARIES[1].impl("_to_copy", lambda *args, **kwargs: _run(_aten._to_copy.default, *args, **kwargs), "PrivateUse1")
