"""A learned bias with one number per distance."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from pelocality._checks import count, flag
from pelocality.encodings.relative import RelativeEncoding


class DistanceTable(RelativeEncoding):
    """A bias with one free number per distance.

        bias_ij = t_|i-j|,  or t_(j-i) where the table is signed

    The unsigned table is the learnable variant in the code of Chen et al. (2023), also with ``shared``. It is always
    symmetric, so it cannot show whether a model learns symmetry; the signed one, ours, can.

    Args:
        heads: H.
        length: Number of distances of each side, 0 to length - 1. Larger distances use the last number (Shaw et al.
            2018), so the input may be longer.
        signed: Whether the past and the future have separate numbers.
        shared: Whether all heads share one table.
        learnable: Whether the numbers are a parameter; otherwise they are a buffer.
        causal: Whether the future gets -inf.

    Attributes:
        values: The numbers, initially 0: (heads or 1, length), nearest first, or (heads or 1, 2 length - 1) for
            k = -(length - 1)..length - 1 where signed.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A number of heads or a length below 1.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> table = DistanceTable.from_encoding(AttenuatedEncoding(heads=2, decay=0.5), length=64)
        >>> table.values.shape
        torch.Size([2, 64])
        >>> table(3)[0].detach()
        tensor([[0.3989, 0.2420, 0.0540],
                [0.2420, 0.3989, 0.2420],
                [0.0540, 0.2420, 0.3989]])
    """

    def __init__(
        self,
        heads: int = 1,
        length: int = 512,
        signed: bool = False,
        shared: bool = False,
        learnable: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__(heads, causal)
        self.length = count("length", length)
        self.signed, self.shared = flag("signed", signed), flag("shared", shared)
        self.learnable = flag("learnable", learnable)
        self.values: Tensor
        values = torch.zeros(1 if shared else heads, 2 * length - 1 if signed else length)
        if learnable:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    @classmethod
    def from_encoding(
        cls,
        encoding: RelativeEncoding,
        length: int,
        *,
        signed: bool | None = None,
        shared: bool = False,
        learnable: bool = True,
    ) -> Self:
        """Build a table with the `interior_bias` of another encoding.

        Args:
            encoding: Any relative encoding.
            length: As for the class.
            signed: As for the class; None: True if the encoding is not symmetric.
            shared: As for the class.
            learnable: As for the class.

        Returns:
            The table, with the device, dtype and causality of the encoding. For an `AttenuatedEncoding` in the weights
            form it holds delta, normalised over both sides (in the authors' code over one).

        Raises:
            TypeError: The encoding is not a `RelativeEncoding`.
            ValueError: signed=False but the encoding is not symmetric, shared=True but its heads differ, or the bias
                has -inf, from which nothing can be learned.
        """
        if not isinstance(encoding, RelativeEncoding):
            raise TypeError(f"encoding must be a RelativeEncoding, got {type(encoding).__name__}")
        bias = encoding.interior_bias(count("length", length)).detach()
        if encoding.causal:
            bias = torch.where(torch.arange(1 - length, length, device=bias.device) > 0, 0, bias)
        if not bool(torch.isfinite(bias).all()):
            raise ValueError(f"{type(encoding).__name__} masks some distances; a table can only hold finite numbers")
        symmetric = encoding.causal or torch.equal(bias, bias.flip(-1))
        if signed is False and not symmetric:
            raise ValueError("encoding is not symmetric, and an unsigned table is; use signed=True")
        if shared and not torch.equal(bias, bias[:1].expand_as(bias)):
            raise ValueError("the encoding's heads differ, and a shared table cannot; use shared=False")
        signed = not symmetric if signed is None else signed
        table = cls(encoding.heads, length, signed, shared, learnable, encoding.causal)
        table.to(bias.device, encoding._like.dtype)
        with torch.no_grad():
            table.values.copy_((bias if signed else bias[:, :length].flip(-1))[: len(table.values)])
        return table

    def resize(self, length: int) -> Self:
        """Return a table with the same numbers for another length.

        Args:
            length: Number of distances of each side.

        Returns:
            A new table with the same device and dtype. If longer, the new distances have the last number, so the bias
            is unchanged; if shorter, the numbers beyond are dropped.

        Raises:
            TypeError: length is not an integer.
            ValueError: length is below 1.
        """
        reach = count("length", length) - 1
        kept = torch.arange(-reach if self.signed else 0, length, device=self.values.device)
        table = type(self).from_configuration({**self.configuration(), "length": length})
        table.to(self._like.device, self._like.dtype).train(self.training)
        values = self.values.detach()[:, self._index(kept)]  # their dtype may differ from the module's after a cast
        table.values = nn.Parameter(values, self.values.requires_grad) if self.learnable else values
        return table

    def _index(self, distance: Tensor) -> Tensor:
        """Return the index into `values` of signed distances."""
        last = self.length - 1
        if self.signed:
            return distance.long().clamp(-last, last) + last
        return distance.long().abs().clamp(max=last)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        return self.values.to(self.working_dtype)[:, self._index(distance)]
