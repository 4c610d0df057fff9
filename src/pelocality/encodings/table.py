"""A number for every distance, learned."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from pelocality._checks import count, flag
from pelocality.encodings.relative import RelativeEncoding


class DistanceTable(RelativeEncoding):
    """A free number for every distance, added to the logits.

        bias_ij = t_|i-j|,  or t_(j-i) where the table is signed

    The unsigned table is the learnable variant in the code of Chen et al. (2023), ``shared`` the one whose heads share
    it. It is symmetric whatever it learns, so it cannot show that symmetry emerges; the signed one, ours, can.

    Args:
        heads: H.
        length: How many distances each side has, 0 to length - 1. Any further one is taken as the last (Shaw et al.
            2018), so longer inputs work, and inputs need not have exactly that length.
        signed: Whether the two sides have numbers of their own.
        shared: Whether all heads share one table.
        learnable: Whether the numbers are learned; otherwise they are kept in a buffer.
        causal: Whether the future gets -inf.

    Attributes:
        values: The numbers, 0 at first: (heads or 1, length), nearest first, or (heads or 1, 2 length - 1) for
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
        """Make a table that starts as another encoding: its bias on a query far from both ends.

        Args:
            encoding: Any relative encoding.
            length: As for the class.
            signed: As for the class; None: signed where the encoding is not symmetric.
            shared: As for the class.
            learnable: As for the class.

        Returns:
            The table, on the encoding's device, of its dtype, causal where it is. An `AttenuatedEncoding` in its
            weights form gives delta, shared out over both sides (the authors' code shares it out over one).

        Raises:
            TypeError: It is no relative encoding.
            ValueError: Unsigned from an encoding that is not symmetric, shared from heads that differ, or -inf in the
                bias, which could never be learned away.
        """
        if not isinstance(encoding, RelativeEncoding):
            raise TypeError(f"encoding must be a relative one, got {type(encoding).__name__}")
        line = encoding.profile(count("length", length)).detach()
        if encoding.causal:
            line = torch.where(torch.arange(1 - length, length, device=line.device) > 0, line.new_zeros(()), line)
        if not bool(torch.isfinite(line).all()):
            raise ValueError(f"{type(encoding).__name__} masks some distances; a table can only hold finite numbers")
        symmetric = encoding.causal or torch.equal(line, line.flip(-1))
        if signed is False and not symmetric:
            raise ValueError("encoding is not symmetric, and an unsigned table is; use signed=True")
        if shared and not torch.equal(line, line[:1].expand_as(line)):
            raise ValueError("the encoding's heads differ, and a shared table cannot; use shared=False")
        table = cls(
            encoding.heads, length, not symmetric if signed is None else signed, shared, learnable, encoding.causal
        )
        table.to(line.device, encoding._like.dtype)
        return table._filled(line if table.signed else line[:, :length].flip(-1))

    def resize(self, length: int) -> Self:
        """Return the table for another length.

        Args:
            length: How many distances each side shall have.

        Returns:
            A new table on the same device, of the same dtype. Longer: the new distances start as the last one, which
            is what they were taken as, so nothing changes until they learn. Shorter: what lies beyond is forgotten.

        Raises:
            TypeError: length is no integer.
            ValueError: length is below 1.
        """
        reach = count("length", length) - 1
        kept = torch.arange(-reach if self.signed else 0, length, device=self.values.device)
        arguments = {**self.configuration(), "length": length}
        arguments.pop("type")
        table = type(self)(**arguments).to(self._like.device, self._like.dtype).train(self.training)
        values = self.values.detach()[:, self._index(kept)]  # in a precision of their own, where a model was cast
        table.values = nn.Parameter(values, self.values.requires_grad) if self.learnable else values
        return table

    def _filled(self, values: Tensor) -> Self:
        with torch.no_grad():
            self.values.copy_(values[: len(self.values)])
        return self

    def _index(self, distance: Tensor) -> Tensor:
        last = self.length - 1
        if self.signed:
            return distance.long().clamp(-last, last) + last
        return distance.long().abs().clamp(max=last)

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        return self.values.to(self.working_dtype)[:, self._index(distance)]
