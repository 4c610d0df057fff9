"""Biases that never change, kept: built once per length, dtype and device, shared by equal encodings, bounded."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class _Entry:
    """A bias and the version it was stored with."""

    __slots__ = ("__weakref__", "bias", "version")

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias
        self.version = bias._version

    @property
    def intact(self) -> bool:
        """Whether nobody has written into the bias since."""
        return self.bias._version == self.version

    @property
    def nbytes(self) -> int:
        return self.bias.untyped_storage().nbytes()


# Copies of one encoding, one a layer, hold the same bias: it lives as long as any of their caches holds it.
_SHARED: WeakValueDictionary[Hashable, _Entry] = WeakValueDictionary()
_LOCK = threading.RLock()  # DataParallel calls replicas, which share a cache, from several threads


class BiasCache:
    """The most recently used biases of one encoding, up to a number of bytes; the newest always stays.

    Args:
        limit: Bytes that the biases of this encoding may take together; one that is larger alone is kept alone.
    """

    def __init__(self, limit: int = 256 * 2**20) -> None:
        self.limit = limit
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], Tensor]) -> Tensor:
        """Return the bias of that key, built where no equal encoding holds it.

        Args:
            key: Everything that the bias depends on.
            build: Makes it.

        Returns:
            The bias. It is shared: do not write into it (if somebody does, it is built anew for the next).
        """
        with _LOCK:
            entry = self._entries.get(key) or _SHARED.get(key)
            if entry is None or not entry.intact:
                # outside inference mode: a bias first needed in evaluation must serve training too
                with torch.inference_mode(False), torch.no_grad():
                    entry = _Entry(build())
                _SHARED[key] = entry
            self._entries[key] = entry
            self._entries.move_to_end(key)
            total = sum(kept.nbytes for kept in self._entries.values())
            while total > self.limit and len(self._entries) > 1:
                total -= self._entries.popitem(last=False)[1].nbytes
            return entry.bias

    def clear(self) -> None:
        """Let go of every bias."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> BiasCache:
        return BiasCache(self.limit)

    def __reduce__(self) -> tuple[type[BiasCache], tuple[int]]:
        return BiasCache, (self.limit,)


# What torch keeps in every module; ``training`` is left, for a bias may depend on it.
_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}

# What buffers on an accelerator held when they were last read: reading them again would wait for the device.
_READ = WeakIdKeyDictionary()


def fingerprint(encoding: nn.Module) -> Hashable | None:
    """Return everything but length, dtype and device that the bias of an encoding depends on, by content.

    That is the class, the attributes and the buffers of the encoding and of every module inside it.

    Args:
        encoding: The encoding.

    Returns:
        A key, equal where the biases are; None where nothing can be promised, so that the bias must be built: with a
        parameter, with a tensor that is an attribute (which is where DataParallel and FSDP put parameters), with an
        attribute that cannot be pickled, and on the meta device.
    """
    modules = list(encoding.named_modules())
    for _, module in modules:
        learned = any(parameter is not None for parameter in module._parameters.values())
        if learned or any(isinstance(value, Tensor) for value in module.__dict__.values()):
            return None
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            return None
    try:
        return tuple((name, type(module), _attributes(module), _buffers(module)) for name, module in modules)
    except Exception:  # pickle raises whatever an attribute raises
        return None


def _attributes(module: nn.Module) -> bytes:
    return pickle.dumps({name: value for name, value in module.__dict__.items() if name not in _TORCHS_OWN})


def _buffers(module: nn.Module) -> tuple[Hashable, ...]:
    return tuple((name, _content(buffer)) for name, buffer in module._buffers.items() if buffer is not None)


def _content(buffer: Tensor) -> Hashable:
    if buffer.device.type == "cpu":
        return _bytes(buffer)
    version = None if buffer.is_inference() else buffer._version, buffer.data_ptr()
    known = _READ.get(buffer)  # type: ignore[no-untyped-call]
    if known is None or known[0] != version:
        known = _READ[buffer] = version, _bytes(buffer)
    content: Hashable = known[1]
    return content


def _bytes(buffer: Tensor) -> Hashable:
    flat = buffer.detach().cpu().reshape(-1).view(torch.uint8)
    return buffer.dtype, buffer.shape, flat.numpy().tobytes()
