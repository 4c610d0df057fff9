"""Encodings of positions that are no line: patches of an image, time stamps, nodes of a graph."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pelocality._checks import flag
from pelocality.encodings.base import Encoding
from pelocality.encodings.base_relative import RelativeEncoding
from pelocality.encodings.buckets import T5Buckets
from pelocality.encodings.distance_table import DistanceTable
from pelocality.positions import Positions


class _PlacedEncoding(Encoding):
    """Base class of encodings of a fixed set of positions, each a query and a key.

    Args:
        heads: As for `Encoding`.
        positions: `Positions`, or coordinates (n,) or (n, d).
        causal: As for `Encoding`.
    """

    def __init__(self, heads: int, positions: Any, causal: bool = False) -> None:
        super().__init__(heads, causal)
        self.positions = Positions.of(positions)
        m, n = self.positions.shape
        if m != n or self.positions.queries is not None:
            raise ValueError(f"positions must be of tokens that are queries and keys, got {m} queries and {n} keys")
        self.register_buffer("_apart", self.positions.distance.isinf(), persistent=False)

    @property
    def depends_on_mask(self) -> bool:
        return False

    @abstractmethod
    def by_position(self) -> Tensor:
        """Return the bias of all queries and keys that have a place, (heads or 1, n, n), in `working_dtype`."""

    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:
        before, n = self.positions.before, self.positions.shape[1]
        if key_length != before + n:
            raise ValueError(f"the positions of the encoding are of {before + n} tokens, got {key_length}; see before=")
        bias = self.by_position().masked_fill(self.get_buffer("_apart"), -torch.inf)
        bias = nn.functional.pad(bias, (before, 0, before, 0))
        if self.causal:
            later = torch.ones(key_length, key_length, dtype=torch.bool, device=bias.device).triu(1)
            bias = bias.masked_fill(later, -torch.inf)
        return bias[:, key_length - query_length :]


class PositionedEncoding(_PlacedEncoding):
    """Any encoding of distance, on a grid, in time or in a graph, such as ALiBi over the patches of an image.

        bias_ij = f(x_j - x_i)  with one coordinate,  f(|x_i - x_j|)  with several

    where f is the bias of the encoding at a distance (`RelativeEncoding.at`). Tokens at an infinite distance are
    hidden, such as tokens of another packed sequence. First tokens without a place, such as [CLS], have a bias of 0, as
    queries and as keys.

    Args:
        encoding: An encoding whose bias is a function of distance. With several coordinates it must be symmetric.
        positions: `Positions`, or coordinates (n,) or (n, d), of all tokens. The input then has one length, so a
            decoder cannot generate with this encoding.

    Raises:
        TypeError: The encoding is not a `RelativeEncoding`, or depends on more than distance.
        ValueError: Positions of queries that are not the keys; an encoding that is not symmetric; or a
            `DistanceTable` or `T5Buckets` at distances that are not whole numbers (give ``Positions(..., ring=1)``).

    Examples:
        >>> from pelocality.encodings import ALiBi
        >>> ALiBi(heads=1, slopes=0.5)(4)[0, 0]
        tensor([-0.0000, -0.5000, -1.0000, -1.5000])
        >>> PositionedEncoding(ALiBi(heads=1, slopes=0.5), Positions.grid(2, 2))(4)[0, 0]
        tensor([-0.0000, -0.5000, -0.5000, -0.7071])
    """

    def __init__(self, encoding: RelativeEncoding, positions: Any) -> None:
        if not isinstance(encoding, RelativeEncoding) or not encoding.is_toeplitz:
            advice = "such as ALiBi, KERPLE, DistanceTable or an AttenuatedEncoding in the logits form"
            raise TypeError(f"encoding must be a function of distance, {advice}, got {type(encoding).__name__}")
        super().__init__(encoding.heads, positions, encoding.causal)
        self.encoding = encoding
        # infinite distances, which are hidden, are 0
        distance = nn.functional.pad(self.positions.profile_distances, (0, 1))[self.positions.steps()]
        self.register_buffer("_distance", distance.to(self.working_dtype), persistent=False)
        whole = bool((distance == distance.round()).all())
        if not whole and isinstance(encoding, DistanceTable | T5Buckets):
            raise ValueError(f"{type(encoding).__name__} has whole distances only; give Positions(..., ring=1)")
        sided = getattr(encoding, "signed", False) or isinstance(encoding, T5Buckets)
        leans = (sided or encoding.future_only is not None) and not encoding.causal
        if not self.positions.has_directions and (leans or not self._is_symmetric()):
            raise ValueError("encoding must be symmetric at positions without a past; see DisplacementTable")

    def by_position(self) -> Tensor:  # noqa: D102
        return self.encoding.at(self.get_buffer("_distance").to(self.working_dtype)).to(self.working_dtype)

    def _is_symmetric(self) -> bool:
        distance = self.positions.profile_distances.abs().to(self.working_dtype).to(self.device)
        one, other = self.encoding.at(distance), self.encoding.at(-distance)
        return one.is_meta or torch.equal(one, other)


class DisplacementTable(_PlacedEncoding):
    """A bias with one free number per displacement: a `DistanceTable` for grids.

        bias_ij = t[x_j - x_i]

    The relative position bias of Swin (Liu et al. 2021) is such a table. It has a number for every vector from patch to
    patch: (2 height - 1)(2 width - 1) on a grid. Positions that are given as distances have a number per distance.

    Args:
        heads: H.
        positions: `Positions`, or coordinates (n,) or (n, d), of all tokens: the input has one length.
        shared: Whether all heads share one table.
        learnable: Whether the numbers are a parameter; otherwise they are a buffer.
        causal: Whether later tokens get -inf.

    Attributes:
        values: The numbers, (heads or 1, displacements), initially 0; their order is that of
            ``Positions.displacements_of``.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: Heads below 1, or positions of queries that are not the keys.

    Note:
        First tokens without a place (``Positions(before=)``) have a bias of 0; BEiT's tables have three numbers more
        for them.

    Examples:
        >>> table = DisplacementTable(heads=2, positions=Positions.grid(14, 14, before=1))
        >>> table.values.shape, table(197).shape
        (torch.Size([2, 729]), torch.Size([2, 197, 197]))
    """

    def __init__(
        self, heads: int, positions: Any, shared: bool = False, learnable: bool = True, causal: bool = False
    ) -> None:
        super().__init__(heads, positions, causal)
        self.shared, self.learnable = flag("shared", shared), flag("learnable", learnable)
        self.values: Tensor
        size = self.positions.displacement_count
        index = self.positions.displacements_of().long().clamp(max=size - 1)
        self.register_buffer("_index", index, persistent=False)
        values = torch.zeros(1 if shared else heads, size)
        if learnable:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    def by_position(self) -> Tensor:  # noqa: D102
        return self.values.to(self.working_dtype)[:, self.get_buffer("_index")]
