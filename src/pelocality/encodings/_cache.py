"""The last bias of an encoding that learns nothing, kept until anything that it was made of changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pelocality.encodings._scores import transformed

# What torch keeps in every module; ``training`` is left, for a bias may depend on it.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}


@dataclass(frozen=True, eq=False)
class _Entry:
    """A bias, all that it was made of, and its version, which changes when somebody writes into it."""

    key: Hashable
    bias: Tensor
    version: int


# Equal encodings, one a layer, share their bias: it lives as long as it is the last one of any of them.
_ENTRIES: WeakValueDictionary[Hashable, _Entry] = WeakValueDictionary()


class BiasCache:
    """The last bias of an encoding.

    At every call everything that the bias depends on is read and compared: class, attributes and buffers of the
    encoding and of every module in it. Only an encoding made of nothing but constants and buffers has its bias kept.
    """

    def __init__(self) -> None:
        self._last: _Entry | None = None
        self._read: dict[str, tuple[Tensor, Hashable, Hashable]] = {}

    def get(self, encoding: nn.Module, request: Hashable, build: Callable[[], Tensor]) -> Tensor:
        """Return the bias of an encoding, built where the last one was another.

        Args:
            encoding: The encoding.
            request: What the bias depends on beside the encoding: lengths, dtype and device.
            build: Makes it.

        Returns:
            The bias. Do not write into it (if somebody does, it is built anew for the next).
        """
        try:
            content = self._content(encoding)
        except RuntimeError:  # inside `torch.func` there is no reading numbers
            content = None
        if content is None:
            return build()
        key = content, request
        entry = self._last  # read once, for replicas of DataParallel share it and run in several threads
        if entry is None or entry.key != key:
            entry = _ENTRIES.get(key)
        if entry is not None and entry.bias._version == entry.version:
            self._last = entry
            return entry.bias
        # outside inference mode, for a bias first needed in evaluation must serve training too
        with torch.inference_mode(False), torch.enable_grad():
            bias = build()
        if bias.requires_grad or type(bias) is not Tensor or transformed(bias):
            return build()  # it depends on more than the encoding holds
        self._last = _ENTRIES[key] = _Entry(key, bias, bias._version)
        return bias

    def _content(self, encoding: nn.Module) -> Hashable | None:
        """Return what a bias is made of, or None where it cannot be told by comparing constants and buffers."""
        found: list[Hashable] = []
        for name, module in encoding.named_modules():
            attributes = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            attributes.pop("_cache", None)
            learned = any(parameter is not None for parameter in module._parameters.values())
            if learned or not all(map(_is_constant, attributes.values())):
                return None
            found.append((name, type(module), tuple(attributes.items())))
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if type(buffer) is not Tensor or buffer.is_meta or buffer.requires_grad or transformed(buffer):
                    return None
                found.append((key, self._numbers(f"{name}.{key}", buffer)))
        return tuple(found)

    def _numbers(self, name: str, buffer: Tensor) -> Hashable:
        """Return a buffer's content; on an accelerator, where reading waits, read when torch notes a write to it."""
        if buffer.device.type == "cpu":
            return _bytes(buffer)
        version = None if buffer.is_inference() else buffer._version, buffer.data_ptr()
        known = self._read.get(name)
        if known is None or known[0] is not buffer or known[1] != version:
            known = self._read[name] = buffer, version, _bytes(buffer)
        return known[2]

    def __deepcopy__(self, memo: dict[int, Any]) -> BiasCache:
        return BiasCache()

    def __reduce__(self) -> tuple[type[BiasCache], tuple[()]]:
        return BiasCache, ()


def _is_constant(value: object) -> bool:
    """Return whether a value can only be replaced and not change."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (str, int, float, torch.dtype, torch.device))


def _bytes(buffer: Tensor) -> Hashable:
    """Return what a buffer holds."""
    readable = buffer.float() if buffer.dtype == torch.bfloat16 else buffer  # numpy has no bfloat16
    array = readable.cpu().numpy()
    return buffer.dtype, array.shape, array.tobytes()
