"""ALiBi: attention with linear biases."""

import math

import torch
from torch import Tensor

from pelocality.encodings._checks import PerHead, per_head
from pelocality.encodings.base_relative import RelativeEncoding


class ALiBi(RelativeEncoding):
    """A bias that decreases linearly with distance, with a different slope for each head.

        bias_ij = -m_h |i - j|,  m_h = 2^(-8 h / H),  h = 1..H

    The encoding is that of Press, Smith and Lewis (ICLR 2022). Their models have ``causal=True``. Without it, the bias
    is symmetric, as in encoders. If H is not a power of two, the slopes of the next smaller power come first, then
    every other slope of the next larger power, as in the authors' code and in BLOOM.

    Args:
        heads: H.
        slopes: m, a number or one per head, above 0; None: as in the equation.
        causal: Whether the future gets -inf.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: Not one slope per head, or one not above 0.

    Note:
        BLOOM adds m_h j instead of -m_h (i - j), which has the same softmax.

    Examples:
        >>> ALiBi(heads=4).slopes
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    _per_head = ("slopes",)

    def __init__(self, heads: int, slopes: PerHead | None = None, causal: bool = False) -> None:
        super().__init__(heads, causal)
        numbers = published_slopes(heads) if slopes is None else slopes
        self.register_buffer("fixed_slopes", self._constant(per_head("slopes", numbers, heads)))

    @property
    def slopes(self) -> Tensor:
        """The slope m of every head, (heads,)."""
        return self.get_buffer("fixed_slopes").expand(self.heads)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        slopes = self.get_buffer("fixed_slopes").to(self.working_dtype)
        return -slopes.view(-1, *(1,) * distance.ndim) * distance.abs()


def published_slopes(heads: int) -> Tensor:
    """Return the slopes of the paper, (heads,)."""
    smaller = 2 ** math.floor(math.log2(heads))
    first = torch.arange(1, smaller + 1, dtype=torch.float64, device="cpu") / smaller
    between = (torch.arange(heads - smaller, dtype=torch.float64, device="cpu") + 0.5) / smaller
    return torch.exp2(-8 * torch.cat([first, between]))
