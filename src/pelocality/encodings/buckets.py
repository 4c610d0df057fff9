"""T5's learned bias on buckets of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pelocality._checks import count
from pelocality.encodings.relative import RelativeEncoding


class T5Buckets(RelativeEncoding):
    """A learned number for every bucket of distances, buckets growing wider with distance.

        bucket(d) = d                                                              d < b/2
        bucket(d) = b/2 + floor(b/2 ln(d / (b/2)) / ln(max_distance / (b/2)))      at most b - 1

    of each side's b buckets: half of all, or all where the encoding is causal (Raffel et al., JMLR 2020).

    Args:
        heads: H.
        buckets: How many there are; both sides together where not causal, the past (and the token itself) first.
        max_distance: From which distance on all fall into the last bucket.
        causal: Whether the future gets -inf, and the past all buckets.

    Attributes:
        relative_attention_bias: The numbers, an ``nn.Embedding`` of (buckets, heads), 0 at first. It has the name and
            shape that it has in transformers, so its ``state_dict`` loads.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: Too few buckets, or a max_distance within the buckets of one distance each.

    Note:
        T5 itself does not divide its logits by sqrt(d); a table taken from it expects that.

    Examples:
        >>> T5Buckets(heads=1).bucket(torch.tensor([-200, -8, -1, 0, 1, 8, 200]))
        tensor([15,  8,  1,  0, 17, 24, 31])
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, causal: bool = False) -> None:
        super().__init__(heads, causal)
        self.buckets = count("buckets", buckets, least=2 if causal else 4)
        self.max_distance = max_distance
        count("max_distance", max_distance, least=self._exact + 1)
        self.relative_attention_bias = nn.Embedding(buckets, heads)
        nn.init.zeros_(self.relative_attention_bias.weight)

    @property
    def _side(self) -> int:
        return self.buckets if self.causal else self.buckets // 2

    @property
    def _exact(self) -> int:
        return self._side // 2

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of signed distances.

        Args:
            distance: k = j - i, any shape.

        Returns:
            Indices of the same shape, 0 to buckets - 1.
        """
        away = (-distance).clamp(min=0) if self.causal else distance.abs()
        further = torch.log(away.clamp(min=1).float() / self._exact) / math.log(self.max_distance / self._exact)
        wide = (self._exact + (further * (self._side - self._exact)).long()).clamp(max=self._side - 1)
        bucket = torch.where(away < self._exact, away.long(), wide)
        return bucket if self.causal else bucket + self._side * (distance > 0)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        table = self.relative_attention_bias.weight.to(self.working_dtype)
        return table.T[:, self.bucket(distance)]
