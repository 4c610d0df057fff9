"""The learned bias of T5 for buckets of distances."""

import math

import torch
from torch import Tensor, nn

from pelocality._checks import count
from pelocality.encodings.base_relative import RelativeEncoding


class T5Buckets(RelativeEncoding):
    """A learned bias with one number per bucket of distances, with wider buckets for larger distances.

        bucket(d) = d                                                              d < b/2
        bucket(d) = b/2 + floor(b/2 ln(d / (b/2)) / ln(max_distance / (b/2)))      at most b - 1

    with b buckets for each side: half of all buckets, or all if the encoding is causal (Raffel et al., JMLR 2020).

    Args:
        heads: H.
        buckets: Number of buckets. If not causal, this number is for both sides, the past and the token itself first.
        max_distance: All distances from this one on are in the last bucket.
        causal: Whether the future gets -inf, and the past uses all buckets.

    Attributes:
        relative_attention_bias: The numbers, an ``nn.Embedding`` of (buckets, heads), initially 0. Name and shape are
            those of transformers, so its ``state_dict`` loads.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: Too few buckets, or a max_distance within the buckets that hold a single distance.

    Note:
        T5 does not divide its logits by sqrt(d): its table is learned for undivided logits.

    Examples:
        >>> T5Buckets(heads=1).bucket(torch.tensor([-200, -8, -1, 0, 1, 8, 200]))
        tensor([15,  8,  1,  0, 17, 24, 31])
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, causal: bool = False) -> None:
        super().__init__(heads, causal)
        self.buckets = count("buckets", buckets, least=2 if causal else 4)
        self.max_distance = count("max_distance", max_distance, least=buckets // (2 if causal else 4) + 1)
        self.relative_attention_bias = nn.Embedding(buckets, heads)
        nn.init.zeros_(self.relative_attention_bias.weight)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of signed distances.

        Args:
            distance: k = j - i, any shape.

        Returns:
            Indices of the same shape, 0 to buckets - 1.
        """
        return bucket_of(distance, self.buckets, self.max_distance, self.causal)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        table = self.relative_attention_bias.weight.to(self.working_dtype)
        return table.T[:, self.bucket(distance)]


def bucket_of(distance: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Return the bucket of signed distances k = j - i, of the same shape, by the equation of `T5Buckets`."""
    side = buckets if causal else buckets // 2
    exact = side // 2  # buckets of a side that hold a single distance
    away = (-distance).clamp(min=0) if causal else distance.abs()
    further = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (further * (side - exact)).long()).clamp(max=side - 1)
    bucket = torch.where(away < exact, away.long(), wide)
    return bucket if causal else bucket + side * (distance > 0)
