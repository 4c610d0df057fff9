"""Base class of encodings that act on queries and keys, or compute their bias from them."""

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor

from pelocality.encodings.base import Encoding


class ContentEncoding(Encoding):
    """Base class of encodings that need the queries and keys: rotations, and positions that depend on content.

    A subclass implements `attention_inputs`. There is no bias and no positional attention without content, so the
    methods of `Encoding` that return these raise an error.

    Args:
        heads: As for `Encoding`.
        causal: As for `Encoding`.
    """

    @abstractmethod
    def attention_inputs(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        added: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def visible_keys(self, queries: int, keys: int, mask: Tensor | None) -> Tensor | None:
        """Return the keys that each query sees by the mask and by causality, or None where all see all.

        Args:
            queries: q.
            keys: k >= q.
            mask: (batch or 1, heads or 1, q or 1, k) of booleans, or None.

        Returns:
            Booleans that broadcast to (batch, heads, q, k).
        """
        if not self.causal:
            return mask
        past = torch.ones(queries, keys, dtype=torch.bool, device=self.device).tril(keys - queries)[None, None]
        return past if mask is None else past & mask

    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> NoReturn:  # noqa: D102
        raise TypeError(
            f"{type(self).__name__} has no bias and no weights without queries and keys; call "
            "attention_inputs(query, key), or use it in biased_attention or PositionalSelfAttention; measure rotations "
            "with measure_relative(rotary.kernel(query, key, length))"
        )

    def relative(self, length: int) -> Any:  # noqa: D102
        return self.bias(length, length, None)
