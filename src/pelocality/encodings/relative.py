"""Encodings of distance alone: a function of one number, and everything that follows from that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pelocality._checks import count
from pelocality.encodings._scores import toeplitz
from pelocality.encodings.base import Encoding

ScoreModification = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class RelativeEncoding(Encoding):
    """An encoding whose bias is a function of the signed distance alone.

    A subclass says which function in `at`. Everything else follows, also what needs no n x n matrix: `relative` for
    `measure_relative`, and `score_modification` for FlexAttention.

    Examples:
        >>> import torch
        >>> class Linear(RelativeEncoding):
        ...     def __init__(self, heads=1, slope=1.0, causal=False):
        ...         super().__init__(heads, causal)
        ...         self.slope = slope
        ...     def at(self, distance):
        ...         return -self.slope * distance.abs()[None]
        >>> Linear(slope=0.5, causal=True)(3)
        tensor([[[-0.0000,    -inf,    -inf],
                 [-0.5000, -0.0000,    -inf],
                 [-1.0000, -0.5000, -0.0000]]])
    """

    @abstractmethod
    def at(self, distance: Tensor) -> Tensor:
        """Return the bias at signed distances, before causality.

        Args:
            distance: k = j - i, position of the key minus that of the query: negative in the past. Any shape,
                in `working_dtype`, on the module's device.

        Returns:
            (heads or 1, *shape of the distances).
        """

    @property
    def distance_alone(self) -> bool:
        """Whether the bias is `at` of the distance and nothing else, which a subclass may have changed."""
        return unchanged(self, "bias", RelativeEncoding)

    @property
    def shares_out(self) -> bool:  # noqa: D102
        return not self.distance_alone

    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:  # noqa: D102
        return toeplitz(self.by_distance(query_length, key_length), query_length)

    def relative(self, n: int) -> Tensor:  # noqa: D102
        return self.by_distance(count("n", n), n).expand(self.heads, -1)

    def profile(self, n: int) -> Tensor:
        """Return what a query far from both ends has added to its logits at every distance.

        Args:
            n: How many positions it sees to each side, itself included.

        Returns:
            (heads, 2n - 1), the past first; float32 at least. The same as `relative`, but for an encoding whose bias
            shares something out among the keys.

        Raises:
            TypeError: n is no integer.
            ValueError: n is below 1.
        """
        return self.relative(n)

    def score_modification(self, query_length: int, key_length: int | None = None) -> ScoreModification:
        """Return the bias as FlexAttention adds it: score by score, without an n x n tensor.

        Args:
            query_length: How many queries.
            key_length: How many keys; None: as many.

        Returns:
            ``score_mod(score, batch, head, query, key)``. Padding and causality are faster as a block mask, which
            leaves blocks out; a causal encoding is causal without one.

        Raises:
            TypeError: A length that is no integer.
            ValueError: A length below 1, or more queries than keys.
        """
        keys = query_length if key_length is None else key_length
        if count("key_length", keys) < count("query_length", query_length):
            raise ValueError(f"key_length must be at least query_length, got {keys} keys for {query_length} queries")
        line = self.by_distance(query_length, keys)
        shared = len(line) == 1

        def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + line[head * 0 if shared else head, key - query + query_length - 1].to(score.dtype)

        return modify

    def by_distance(self, query_length: int, key_length: int) -> Tensor:
        """Return `at`, and causality, at all distances that queries and keys have.

        Args:
            query_length: q.
            key_length: k >= q.

        Returns:
            The numbers at distances -(k - 1)..q - 1, (heads or 1, q + k - 1), in `working_dtype`.
        """
        distance = torch.arange(1 - key_length, query_length, device=self._like.device).to(self.working_dtype)
        line = self.at(distance).to(self.working_dtype)
        return torch.where(distance > 0, -torch.inf, line) if self.causal else line


def unchanged(encoding: Encoding, name: str, kind: type) -> bool:
    """Return whether a method of an encoding is that of a class, and not one of a subclass or of the object.

    Args:
        encoding: The encoding.
        name: Of the method.
        kind: The class.

    Returns:
        Whether it is.
    """
    return getattr(getattr(encoding, name), "__func__", None) is getattr(kind, name)
