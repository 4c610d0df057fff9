"""Biases that never change, kept: built once per length, dtype and device, shared by equal encodings, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


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
