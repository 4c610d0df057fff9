"""A cache of the last bias of each encoding without parameters, valid until anything that it depends on changes."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from pelocality._transforms import transformed

# Attributes that torch sets in every module, except ``training``, on which a bias may depend.
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}


@dataclass(frozen=True, eq=False)
class _Entry:
    """A bias and its version, which changes when it is written to."""

    bias: Tensor
    version: int


# Equal encodings, such as one per layer, share a bias; it is freed when it is no longer the last one of any of them.
_ENTRIES: WeakValueDictionary[Hashable, _Entry] = WeakValueDictionary()
_LAST: WeakKeyDictionary[nn.Module, _Entry] = WeakKeyDictionary()
_READ = WeakTensorKeyDictionary()  # buffers on accelerators, whose content is read again only after a write


def cached_bias(encoding: nn.Module, request: Hashable, build: Callable[[], Tensor]) -> Tensor:
    """Return the bias of an encoding, from the cache if it is valid.

    Every call reads and compares everything that the bias of an encoding of this library depends on: its class,
    attributes and buffers. The bias is cached only if all of these are constants and buffers. Inside a dispatch mode,
    such as FakeTensorMode, in which tensors may be without numbers, the cache is neither read nor written to.

    Args:
        encoding: The encoding.
        request: Everything else that the bias depends on: lengths, dtype and device.
        build: Function that builds the bias.

    Returns:
        The bias, for attention alone: users get one of their own. After a write that torch records, the next call
        builds it again.
    """
    if _get_current_dispatch_mode() is not None:
        return build()
    try:
        content = _content(encoding)
    except RuntimeError:  # inside `torch.func` numbers cannot be read
        content = None
    if content is None:
        return build()
    key = content, request
    entry = _ENTRIES.get(key)
    if entry is None or entry.bias._version != entry.version:
        # a bias that is built in evaluation may be used in training, which an inference tensor may not
        with torch.inference_mode(False), torch.enable_grad():
            bias = build()
        entry = _ENTRIES[key] = _Entry(bias, bias._version)
    _LAST[encoding] = entry  # keeps it
    return entry.bias


def _content(encoding: nn.Module) -> Hashable | None:
    """Return the constants and buffers of an encoding of ours, or None if the bias may depend on anything else.

    A class of the user's may read what changes: random numbers, a global, an attribute of its class.
    """
    attributes = {key: value for key, value in vars(encoding).items() if key not in _TORCH_ATTRIBUTES}
    ours = type(encoding).__module__.startswith("pelocality.") and not encoding._modules
    learned = any(parameter is not None for parameter in encoding._parameters.values())
    if not ours or learned or not all(map(_is_constant, attributes.values())):
        return None
    found: list[Any] = [type(encoding), tuple(attributes.items())]
    for key, buffer in encoding._buffers.items():
        if buffer is None:
            continue
        if type(buffer) is not Tensor or buffer.is_meta or buffer.requires_grad or transformed(buffer):
            return None
        found.append((key, _tensor_content(buffer)))
    return tuple(found)


def _is_constant(value: object) -> bool:
    """Return whether a value is immutable."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (str, int, float, torch.dtype, torch.device))


def _tensor_content(buffer: Tensor) -> Hashable:
    """Return the dtype, shape and bytes of a buffer."""
    on_accelerator = buffer.device.type != "cpu"
    version = None if buffer.is_inference() else buffer._version, buffer.data_ptr()
    if on_accelerator and buffer in _READ and _READ[buffer][0] == version:
        known: Hashable = _READ[buffer][1]
        return known
    readable = buffer.float() if buffer.dtype == torch.bfloat16 else buffer  # numpy has no bfloat16
    array = readable.cpu().numpy()
    content = buffer.dtype, array.shape, array.tobytes()
    if on_accelerator:
        _READ[buffer] = version, content
    return content
