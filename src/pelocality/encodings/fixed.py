"""Baselines with a fixed bias: no encoding, a window, and the sinusoidal encoding."""

import math

import torch
from torch import Tensor

from pelocality._checks import count, on_float64_device
from pelocality.encodings._checks import per_head
from pelocality.encodings.base_relative import RelativeEncoding


class NoEncoding(RelativeEncoding):
    """No positional signal: a bias of zero.

        bias_ij = 0

    Use this encoding as a control. With ``causal=True``, a model is the decoder without positional encoding of Haviv et
    al. (2022), which still learns positions from the number of visible keys.

    Args:
        heads: H.
        causal: Whether the future gets -inf.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A number of heads below 1.

    Examples:
        >>> NoEncoding().weights(2)
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        return torch.zeros_like(distance)[None]


class FixedWindow(RelativeEncoding):
    """Equal attention to all keys within a window, and none beyond.

        bias_ij = 0 if |i - j| <= width, else -inf

    The sliding window of Beltagy et al. (Longformer, 2020), without its global tokens.

    Args:
        heads: H.
        width: Number of tokens on each side of the query; 0: only the token itself.
        causal: Whether the future gets -inf too.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A width below 0.

    Note:
        A query whose whole window is padding is fully masked; its attention is 0.

    Examples:
        >>> FixedWindow(width=1).weights(4)[0, 1]
        tensor([0.3333, 0.3333, 0.3333, 0.0000])
    """

    def __init__(self, heads: int = 1, width: int = 3, causal: bool = False) -> None:
        super().__init__(heads, causal)
        self.width = count("width", width, least=0)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        return torch.where(distance.abs() <= self.width, 0.0, -torch.inf).to(distance.dtype)[None]


class SinusoidalEncoding(RelativeEncoding):
    """The sinusoidal encoding, as a table to add to embeddings and as the bias that follows from it.

        P[i, 2f] = sin(i w_f),  P[i, 2f+1] = cos(i w_f),  w_f = base^(-2f/d)
        bias_ij = p_i p_j^T / sqrt(d) = sum_f cos((i - j) w_f) / sqrt(d)

    The table is that of Vaswani et al. (2017). The product of two rows is a symmetric function of their distance. These
    are the positional logits of a model whose W_q and W_k are the identity.

    Args:
        heads: H, all equal.
        width: d, the width of the table, even.
        base: Of the frequencies; the longest wavelength is 2 pi base^(1 - 2/d) tokens.
        causal: Whether the future gets -inf.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An odd width, or a base not above 0 or not finite.

    Note:
        The bias does not decrease monotonically with distance, and hardly at all beyond a few hundred tokens.

    Examples:
        >>> SinusoidalEncoding(width=4).table(2)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    def __init__(self, heads: int = 1, width: int = 64, base: float = 10000.0, causal: bool = False) -> None:
        super().__init__(heads, causal)
        if count("width", width, least=2) % 2:
            raise ValueError(f"width must be even, a sine and a cosine for each wave, got {width}")
        self.width, self.base = width, per_head("base", base, 1).item()

    def table(self, length: int) -> Tensor:
        """Return the embeddings to add to the input.

        Args:
            length: Number of positions, n.

        Returns:
            (n, width), between -1 and 1, sines and cosines alternating; float32 or wider, on the module's device.

        Raises:
            TypeError: A length that is not an integer.
            ValueError: A length below 1.
        """
        i = on_float64_device(torch.arange(count("length", length), device=self._like.device))
        angle = i[:, None] * self._frequencies(i.device)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(self._like.device, self.working_dtype)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        exact = on_float64_device(distance).to(torch.float64)[..., None]
        waves = torch.zeros_like(exact[..., 0])
        for part in torch.split(self._frequencies(exact.device), 16):  # all together take width / 2 times the memory
            waves = waves + (exact * part).cos().sum(-1)
        return (waves / math.sqrt(self.width)).to(distance)[None]

    def _frequencies(self, device: torch.device) -> Tensor:
        """Return w_f, (width / 2,), in float64: angles in float32 have errors above 0.001 at n = 10^5."""
        f = torch.arange(0, self.width, 2, device=device, dtype=torch.float64)
        return self.base ** (-f / self.width)
