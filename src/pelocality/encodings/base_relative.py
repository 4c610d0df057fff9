"""Base class of encodings whose bias is a function of distance."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pelocality._checks import count
from pelocality._toeplitz import toeplitz
from pelocality.encodings.base import Encoding, check_lengths

ScoreModification = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class RelativeEncoding(Encoding):
    """Base class of encodings whose bias is a function of the signed distance alone.

    A subclass implements that function, `at`. Two methods need no n x n matrix: `relative`, for `measure_relative`, and
    `score_modification`, for FlexAttention.

    Args:
        heads: As for `Encoding`.
        causal: As for `Encoding`.

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
            distance: k = j - i, position of the key minus position of the query, negative for earlier keys. Any shape,
                in `working_dtype`, on the module's device.

        Returns:
            (heads or 1, *shape of the distances).
        """

    @property
    def is_toeplitz(self) -> bool:
        """Whether the bias is the Toeplitz matrix of `by_distance`, that is, no subclass has overridden `bias`."""
        return inherits(self, "bias", RelativeEncoding)

    @property
    def depends_on_mask(self) -> bool:  # noqa: D102
        return not self.is_toeplitz

    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:  # noqa: D102
        return toeplitz(self.by_distance(query_length, key_length), query_length)

    def relative(self, length: int) -> Tensor:  # noqa: D102
        return self.by_distance(count("length", length), length).expand(self.heads, -1)

    def interior_bias(self, length: int) -> Tensor:
        """Return the bias by distance of a query far from both ends of the sequence.

        Args:
            length: Number of positions on each side of the query, itself included, n.

        Returns:
            (heads, 2n - 1), the most negative distance first; float32 or wider. The same as `relative`, except for an
            encoding whose bias is normalised over keys.

        Raises:
            TypeError: A length that is not an integer.
            ValueError: A length below 1.
        """
        return self.relative(length)

    def score_modification(self, query_length: int, key_length: int | None = None) -> ScoreModification:
        """Return the ``score_mod`` of FlexAttention that adds the bias to each score, without an n x n tensor.

        Args:
            query_length: Number of queries.
            key_length: Number of keys; None: as many as queries.

        Returns:
            ``score_mod(score, batch, head, query, key)``. A causal encoding is causal without a block mask, but a block
            mask for padding and causality is faster, because it skips blocks.

        Raises:
            TypeError: A length that is not an integer.
            ValueError: A length below 1, or more queries than keys.

        Note:
            For 64 dimensions in half precision, the default blocks of FlexAttention need more shared memory than an
            H100 has ("No valid triton configs"). With these options it compiles, forward and backward::

                options = {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8}
                options |= {f"bwd_BLOCK_{each}": 64 for each in ("M1", "N1", "M2", "N2")}
                options |= {"bwd_num_stages": 2, "bwd_num_warps": 4}
                modify = encoding.score_modification(n)
                torch.compile(flex_attention)(query, key, value, score_mod=modify, kernel_options=options)
        """
        bias = self.by_distance(*check_lengths(query_length, key_length))
        shared = len(bias) == 1

        def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + bias[head * 0 if shared else head, key - query + query_length - 1].to(score.dtype)

        return modify

    def by_distance(self, query_length: int, key_length: int) -> Tensor:
        """Return `at` for all distances between queries and keys, with -inf in the future if causal.

        Args:
            query_length: q.
            key_length: k >= q.

        Returns:
            The bias at distances -(k - 1)..q - 1, (heads or 1, q + k - 1), in `working_dtype`.

        Raises:
            ValueError: `at` returns another shape.
        """
        distance = torch.arange(1 - key_length, query_length, device=self._like.device).to(self.working_dtype)
        bias = self.at(distance)
        compiling = torch.compiler.is_compiling()  # a check of shapes would compile for one length only
        if not compiling and bias.shape not in ((1, len(distance)), (self.heads, len(distance))):
            wanted = f"({self.heads} or 1, {len(distance)}): its heads, then the shape of the distances"
            raise ValueError(f"{type(self).__name__}.at must return {wanted}, got {tuple(bias.shape)}")
        bias = bias.to(self.working_dtype)
        return torch.where(distance > 0, -torch.inf, bias) if self.causal else bias


def inherits(encoding: Encoding, method: str, defined_in: type) -> bool:
    """Return whether a method is the one defined in a class, overridden neither in a subclass nor on the object."""
    return getattr(getattr(encoding, method), "__func__", None) is getattr(defined_in, method)
