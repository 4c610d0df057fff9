"""A learned bias with one number per distance."""

from typing import Self

import torch
from torch import Tensor, nn

from pelocality._checks import count, flag, on_float64_device
from pelocality._toeplitz import diagonal_sums
from pelocality.encodings._checks import PerHead, per_head
from pelocality.encodings.base_relative import RelativeEncoding
from pelocality.metrics import crop
from pelocality.metrics._by_position import past_only
from pelocality.metrics._inputs import Attention, Matrices


class DistanceTable(RelativeEncoding):
    """A bias with one free number per distance.

        bias_ij = t_|i-j|,  or t_(j-i) if the table is signed

    The unsigned table is the learnable variant in the code of Chen et al. (2023), also with ``shared``. An unsigned
    table is always symmetric, so it cannot show whether a model learns symmetry. A signed table, which is ours, can.

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
            k = -(length - 1)..length - 1 if signed.

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
            ValueError: signed=False but the encoding is not symmetric, shared=True but its heads differ, or the bias
                has -inf, from which nothing can be learned.
        """
        bias = encoding.interior_bias(count("length", length)).detach()
        if encoding.causal:
            bias = torch.where(torch.arange(1 - length, length, device=bias.device) > 0, 0, bias)
        if not bool(torch.isfinite(bias).all()):
            raise ValueError(f"{type(encoding).__name__} masks some distances; a table can only hold finite numbers")
        symmetric = encoding.causal or torch.equal(bias, bias.flip(-1))
        if signed is False and not symmetric:
            raise ValueError("encoding is not symmetric, but an unsigned table is always symmetric; use signed=True")
        if shared and not torch.equal(bias, bias[:1].expand_as(bias)):
            raise ValueError("the encoding's heads differ, but a shared table is the same for all; use shared=False")
        signed = not symmetric if signed is None else signed
        table = cls(encoding.heads, length, signed, shared, learnable, encoding.causal)
        table.to(bias.device, encoding.dtype)
        return table._with_values((bias if signed else bias[:, :length].flip(-1))[: len(table.values)])

    @classmethod
    def from_attention(
        cls, attention: Attention, *, cut: int = 1, learnable: bool = True, causal: bool | None = None
    ) -> list[Self]:
        """Build a table for each layer from measured positional attention.

            v(k) = ln sum_i A[i,i+k] - ln sum_i A[i,i],  over the queries i that see a key at distance k,

        minus its mean over k, where A is the attention without its first and last tokens, with rows renormalised. This
        is the logarithm of the `distance_profile`, relative to the attention of the same queries to themselves. It does
        not depend on the number of keys that a query sees. For a relative encoding, this is the bias.

        Args:
            attention: Positional weights (layer, head, n, n), such as the result of `positional_attention`, which
                holds the visible keys. In a tensor, the keys that get attention from any head count as visible.
            cut: How many tokens to leave out at each end, because models treat the first and last positions
                differently.
            learnable: As for the class.
            causal: As for the class. None: True if no query attends to a later key, and no result says that all keys
                are visible.

        Returns:
            One table per layer, in the model's order of layers, as `attach` accepts them. Tables are on the device of
            the attention, in float32, signed (unsigned if causal), and of length n - 2 cut. Larger distances have the
            number of the largest distance measured. If attention is 0, as outside of a sliding window, the number is
            the logarithm of the smallest float.

        Raises:
            TypeError: As for `locality`.
            ValueError: As for `locality`, not four axes, fewer than two tokens left, or attention to later keys with
                ``causal=True``.

        Note:
            Measure identical words, which show positions. In the mean attention on text, content dominates. Numbers of
            far distances come from few pairs of tokens, so measure a length of some tokens more than you need. If
            layers share their weights (ALBERT), `attach` accepts one table per group: choose one of the layers.

        Examples:
            >>> from pelocality.encodings import ALiBi
            >>> (table,) = DistanceTable.from_attention(ALiBi(heads=1, slopes=1.0).weights(5)[None])
            >>> table.length, table.values.detach()
            (3, tensor([[-0.8000,  0.2000,  1.2000,  0.2000, -0.8000]]))
        """
        if getattr(attention, "positions", None) is not None:
            raise ValueError("attention must be of tokens on a line; a table has no numbers for other positions")
        given = crop(attention, count("cut", cut, least=0), -cut or None).detach()
        inner = on_float64_device(given)
        n = inner.shape[-1]
        if inner.ndim != 4 or n < 2:
            raise ValueError(f"attention must be (layer, head, n, n), n >= 2 after the cut, got {tuple(inner.shape)}")
        if (layers := getattr(attention, "layers", None)) is not None:  # a result has layers in the requested order
            inner = inner[torch.tensor(layers, device=inner.device).argsort()]
        by_distance = diagonal_sums(inner, torch.float64)
        # the attention that the queries which see a key at each distance pay to themselves, (layer, head, 2n - 1)
        itself = inner.diagonal(dim1=-2, dim2=-1)[..., None]
        seen = _visible(attention, inner, cut)
        by_itself, everyone = (diagonal_sums(each, torch.float64) for each in (itself * seen, itself.expand_as(inner)))
        tiny = torch.finfo(torch.float32).tiny
        by_itself = torch.where(by_itself > 0, by_itself, everyone)  # no query sees a key at this distance
        values = by_distance.clamp(min=tiny).log() - by_itself.clamp(min=tiny).log()
        if causal is None and hasattr(attention, "visible") and attention.visible is None:
            causal = False
        causal = None if causal is None else flag("causal", causal)
        causal = bool(past_only(Matrices(inner.flatten(0, 1), None, causal=causal)).all())
        if causal:
            values = values[..., :n].flip(-1)  # distances from 0 on
        values = values - values.mean(-1, keepdim=True)
        table = cls(values.shape[1], n, signed=not causal, learnable=learnable, causal=causal)
        table.to(given.device)
        return [table._with_values(layer) for layer in values]

    def scaled(self, *, symmetric: PerHead = 1.0, antisymmetric: PerHead = 1.0, decay: PerHead = 0.0) -> Self:
        """Return a table with its symmetric and its antisymmetric part scaled, and a decay added.

            v'(k) = a (v(k) + v(-k)) / 2 + b (v(k) - v(-k)) / 2 - c |k|

        Use this to change trained positions. ``antisymmetric=0`` makes the table symmetric, and -1 reverses it. If both
        factors are smaller or larger than 1, the table becomes flatter or more local.

        Args:
            symmetric: a, a number or one per head of the table.
            antisymmetric: b, a number or one per head. It has no effect on an unsigned table, which has no
                antisymmetric part.
            decay: c, a number or one per head, in nats per token, like ALiBi's slope; below 0 the table is flatter.

        Returns:
            A new table of the same length; with the defaults the same numbers.

        Raises:
            TypeError: A factor that is not a number or a sequence of numbers.
            ValueError: Not one number per head of the table (one if it is shared), NaN or infinity, or factors so large
                that the result is.

        Note:
            The decay ends with the table, because all larger distances have its last number. Use `resize` first.

        Examples:
            >>> table = DistanceTable(length=2, signed=True, learnable=False)
            >>> table.values.copy_(torch.tensor([[1.0, 2.0, 4.0]]))
            tensor([[1., 2., 4.]])
            >>> table.scaled(antisymmetric=0.0).values, table.scaled(antisymmetric=-1.0).values
            (tensor([[2.5000, 2.0000, 2.5000]]), tensor([[4., 2., 1.]]))
        """
        rows, reach = len(self.values), self.length - 1
        given = {"symmetric": symmetric, "antisymmetric": antisymmetric, "decay": decay}
        v = on_float64_device(self.values.detach()).to(torch.float64)
        a, b, c = (per_head(name, value, rows, positive=False)[:, None].to(v.device) for name, value in given.items())
        reverse = v.flip(-1) if self.signed else v
        k = torch.arange(-reach if self.signed else 0, self.length, device=v.device)
        # the order of these operations: the defaults give v exactly, and b = 0 gives equal numbers at k and -k
        values = ((a + b) / 2 * v + (a - b) / 2 * reverse - c * k.abs()).to(self.values.dtype)
        # the attention of two numbers whose difference overflows is NaN or on one key
        if not bool((values.amax(-1) - values.amin(-1)).isfinite().all()):
            raise ValueError(f"symmetric, antisymmetric and decay must give numbers that {values.dtype} can hold")
        return self._with_values(values)

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
        return self._with_values(self.values.detach()[:, self._index(kept)], length)

    def _with_values(self, values: Tensor, length: int | None = None) -> Self:
        """Return a table of these numbers, otherwise like this one."""
        arguments = self.configuration() | {"length": length or self.length}
        del arguments["type"]
        table = self._from_arguments(arguments)
        table.to(self._like.device, self._like.dtype).train(self.training)
        values = values.to(self.values)  # their dtype may differ from the module's after a cast
        table.values = nn.Parameter(values, self.values.requires_grad) if self.learnable else values
        return table

    def _index(self, distance: Tensor) -> Tensor:
        """Return the index into `values` of signed distances."""
        last = self.length - 1
        within = distance.long().clamp(-last, last)
        return within + last if self.signed else within.abs()

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        return self.values.to(self.working_dtype)[:, self._index(distance)]


def _visible(attention: Attention, inner: Tensor, cut: int) -> Tensor:
    """Return the keys that each query sees, (layer, 1, n, n) of attention (layer, head, n, n) that was cut.

    A model with chunks hides keys at distances where others are visible.
    """
    visible: Tensor | None = getattr(attention, "visible", None)
    if visible is None:
        return (inner > 0).any(1, keepdim=True)
    order = torch.tensor(getattr(attention, "layers", range(len(visible)))).argsort()
    return visible[order, None, cut : cut + inner.shape[-1], cut : cut + inner.shape[-1]].to(inner.device)
