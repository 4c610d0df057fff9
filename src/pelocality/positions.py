"""Where queries and keys lie, if not one after the other on a line: a grid, time stamps, a graph, other keys."""

import copy
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from pelocality._checks import count, number, real_numbers
from pelocality._configuration import Configurable

_BITS = 40  # coordinates and distances that agree in so many leading bits of the largest are equal


class Pairs(NamedTuple):
    """The pairs of places that are point reflections of each other through a query.

    Attributes:
        left: A place of each pair, by its number, integers (query, pair).
        right: The place opposite.
        exists: Which entries are pairs, boolean (query, pair); rows are padded.
    """

    left: Tensor
    right: Tensor
    exists: Tensor


class Positions(Configurable):
    """Coordinates of queries and keys, by which every metric measures distance.

        distance of i and j: |x_i - y_j|        opposite keys j and j' of query i: y_j + y_j' = 2 x_i

    with the coordinates x of queries and y of keys, and the Euclidean norm. On a line of tokens, x_i = y_i = i.
    Positions are passed as ``positions=`` to a metric, an encoding or a `SequenceModel`; where positions are asked for,
    an array of coordinates does as well.

    Args:
        keys: Coordinates of the keys, (n,) or (n, d): patches of an image, voxels, time stamps in seconds, the number
            of a token's sentence. Integers that count up from their first value again and again, such as the
            ``position_ids`` of packed sequences (0, 1, 2, 0, 1), are separate sequences: the distance between two of
            them is infinite.
        queries: Coordinates of the queries, (m,) or (m, d), where those are not the keys: the frames that a decoder
            attends to, or the last tokens before a cache, ``queries=torch.arange(120, 128)`` of 128 keys.
        before: The number of first tokens that have no place, such as a ViT's [CLS] and registers. Metrics leave them
            out, as ``without_first`` does; encodings have a bias of 0 there.
        ring: The width of a ring: distances are rounded to its multiples where attention is averaged by distance
            (`distance_profile`, `window`, `half_life`, `monotonicity`). None: only equal distances are one ring.
        distances: Instead of keys: the distance of every query and key, (m, n), such as the steps between the nodes of
            a graph; infinite where nothing connects them. Such positions have neither directions nor opposite keys.

    Raises:
        TypeError: Coordinates that are not real numbers.
        ValueError: Neither keys nor distances, or both; other shapes, NaN, infinite coordinates, negative distances, or
            a ring that is not above 0.

    Note:
        Keys at the same place, such as the tokens of one sentence, count together where opposite keys are compared, by
        the mean of their weights.

    Examples:
        >>> from pelocality.metrics import locality, symmetry
        >>> grid = Positions.grid(8, 8)
        >>> round_kernel = torch.softmax(-grid.distance, -1)
        >>> symmetry(round_kernel, positions=grid)
        tensor(1., dtype=torch.float64)
        >>> symmetry(round_kernel)  # the patches read as a line of 64 tokens
        tensor(0.8131, dtype=torch.float64)
        >>> Positions([0, 1, 2, 0, 1]).distance[2]
        tensor([2., 1., 0., inf, inf], dtype=torch.float64)
    """

    def __init__(
        self,
        keys: Any = None,
        queries: Any = None,
        *,
        before: int = 0,
        ring: float | None = None,
        distances: Any = None,
    ) -> None:
        if (keys is None) == (distances is None) or (keys is None and queries is not None):
            raise ValueError("positions are either coordinates, keys= and if need be queries=, or distances=")
        self.before = count("before", before, least=0)
        self.ring = None if ring is None else number("ring", ring)
        if self.ring is not None and not 0 < self.ring < np.inf:
            raise ValueError(f"ring must be above 0, got {ring}")
        self.keys = None if keys is None else _coordinates("keys", keys)
        self.queries = None if queries is None else _coordinates("queries", queries)
        self.distances = None if distances is None else _distances(distances)
        if self.before and self.queries is not None:
            raise ValueError("before= is for tokens that are queries and keys; leave it out with queries=")
        if self.queries is not None and self.keys is not None and self.queries.shape[1] != self.keys.shape[1]:
            axes = f"{self.queries.shape[1]} and {self.keys.shape[1]} coordinates"
            raise ValueError(f"queries and keys must have as many coordinates, got {axes}")

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return positions as they are, and coordinates (n,) or (n, d) as positions."""
        return given if isinstance(given, cls) else cls(given)

    @classmethod
    def grid(cls, *sizes: int, before: int = 0) -> Self:
        """Return the places of a grid, the last axis fastest, as the patches of an image are read.

        Args:
            sizes: The number of places along each axis: (height, width) of an image, or (depth, height, width).
            before: As for the class.

        Raises:
            TypeError: A size that is not an integer.
            ValueError: No size, or one below 1.

        Examples:
            >>> Positions.grid(2, 2).keys.tolist()
            [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
        """
        if not sizes:
            raise ValueError("sizes must name the places along each axis, such as Positions.grid(14, 14)")
        axes = [torch.arange(count("sizes", size), dtype=torch.float64, device="cpu") for size in sizes]
        return cls(torch.cartesian_prod(*axes).reshape(-1, len(axes)), before=before)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of queries and of keys, without the tokens that have no place."""
        if self.distances is not None:
            return self.distances.shape[0], self.distances.shape[1]
        return len(self._queries), len(self._keys)

    @property
    def dimensions(self) -> int:
        """The number of coordinates, 0 of distances."""
        return 0 if self.keys is None else self.keys.shape[1]

    @property
    def has_directions(self) -> bool:
        """Whether there is a past and a future: one coordinate."""
        return self.dimensions == 1

    @property
    def is_line(self) -> bool:
        """Whether these are tokens one after the other, one unit apart, each a query and a key."""
        if not self.has_directions or self.queries is not None or self.ring is not None:
            return False
        return bool((self._keys.diff(dim=0) == 1).all())

    @cached_property
    def distance(self) -> Tensor:
        """The distance of every query and key, (m, n), float64, on the CPU."""
        if self.distances is not None:
            return self.distances
        found = self._displacement.abs().squeeze(-1) if self.has_directions else self._displacement.norm(dim=-1)
        return torch.where(self._apart, torch.inf, found)

    @cached_property
    def offset(self) -> Tensor:
        """The signed distance of every query and key, (m, n), below 0 for keys before the query.

        Raises:
            ValueError: Several coordinates, or distances, which have no sign.
        """
        if not self.has_directions:
            kind = f"{self.dimensions} coordinates" if self.dimensions else "distances"
            advice = "give one coordinate, such as positions=grid.keys[:, 0] for the rows of a grid"
            raise ValueError(f"positions of {kind} have no past and no future, which this measures; {advice}")
        return torch.where(self._apart, torch.inf, self._displacement.squeeze(-1))

    @cached_property
    def later(self) -> Tensor | None:
        """Which keys a causal mask hides, boolean (m, n); None where no order is known.

        Tokens that are queries and keys come in their order. Of other keys, those with a larger coordinate are later.
        """
        m, n = self.shape
        if self.queries is None and m == n:
            return torch.ones(n, n, dtype=torch.bool, device="cpu").triu(1)
        return self.offset > 0 if self.has_directions else None

    @cached_property
    def rings(self) -> tuple[Tensor, Tensor]:
        """The distances that occur, from 0 on, (r,), and which of them each query and key has, (m, n), -1 for none."""
        distance = self.distance.numpy()
        if self.ring is not None:
            distance = np.round(distance / self.ring) * self.ring
        level, number = _levels(np.append(distance, 0.0))  # the query itself is a ring, also where no key lies there
        return torch.from_numpy(level), torch.from_numpy(number[:-1].reshape(self.shape))

    @cached_property
    def profile_distances(self) -> Tensor:
        """The distances at which `distance_profile` is measured: signed, (2r - 1,), or without directions (r,)."""
        radius = self.rings[0]
        return torch.cat([-radius[1:].flip(0), radius]) if self.has_directions else radius

    @cached_property
    def profile_index(self) -> Tensor:
        """Which of the `profile_distances` each query and key has, (m, n), -1 for an infinite distance."""
        radius, ring = self.rings
        if not self.has_directions:
            return ring
        signed = torch.where(self.offset < 0, -ring, ring) + len(radius) - 1
        return torch.where(ring < 0, -1, signed)

    def ring_of_each_query(self, chosen: Tensor) -> Tensor:
        """Return the number of each chosen key's distance among those that occur for its query, (m, n), -1 for others.

        Args:
            chosen: Which keys count, boolean (m, n).
        """
        rings = torch.where(chosen, self.rings[1], -1).numpy()
        found = np.full_like(rings, -1)
        for row, into in zip(rings, found, strict=True):
            into[row >= 0] = np.unique(row[row >= 0], return_inverse=True)[1]
        return torch.from_numpy(found)

    @cached_property
    def displacements(self) -> Tensor:
        """The number of the displacement from each query to each key, (m, n), from 0 on, -1 for an infinite distance.

        Displacements are vectors; of positions that are distances, which have no direction, the distance.
        """
        if self.keys is None:
            return self.rings[1]
        axes = [_levels(axis)[1] for axis in self._displacement.numpy().transpose(2, 0, 1)]
        codes = np.ravel_multi_index(axes, [int(axis.max()) + 1 for axis in axes])
        return torch.from_numpy(_levels(np.where(self.distance.isinf(), np.inf, codes))[1])

    @cached_property
    def places(self) -> Tensor:
        """The number of each key's place, (n,); keys with equal coordinates, and of one sequence, share a place."""
        return torch.from_numpy(np.unique(self._codes(self._keys, self._sequence), return_inverse=True)[1])

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of places that lie opposite of each other, for every query.

        Raises:
            ValueError: Distances, which have no opposite.
        """
        if self.keys is None:
            advice = "give coordinates, or measure what needs distance alone, such as locality"
            raise ValueError(f"positions of distances have no opposite keys, which symmetry compares; {advice}")
        first = np.unique(self.places, return_index=True)[1]
        place, sequence = self._keys[first], self._sequence[first]
        of_query = self._sequence[:, None] if self.queries is None else torch.zeros(1, 1, dtype=torch.int64)
        known = self._codes(place, sequence)
        wanted = self._codes(2 * self._queries[:, None] - place, of_query)
        order = np.argsort(known)
        opposite = order[np.searchsorted(known, wanted, sorter=order).clip(max=len(known) - 1)]
        exists = (known[opposite] == wanted) & (np.arange(len(place)) < opposite)  # each pair once
        exists &= (sequence == of_query).numpy()
        query, left = np.nonzero(exists)
        numbers = exists.sum(1)
        column = np.arange(len(query)) - np.repeat(numbers.cumsum() - numbers, numbers)
        left_of, right_of = np.zeros((2, len(exists), max(1, numbers.max(initial=0))), np.int64)
        left_of[query, column], right_of[query, column] = left, opposite[query, left]
        valid = np.arange(left_of.shape[1]) < numbers[:, None]
        return Pairs(*map(torch.from_numpy, (left_of, right_of, valid)))

    def after(self, before: int) -> Self:
        """Return the same places, with this number of first tokens that have none."""
        found = copy.copy(self)
        found.before = before
        return found

    def part(self, start: int, stop: int) -> Self:
        """Return the positions of the tokens start..stop-1, which are queries and keys; the rings stay the same."""
        start, stop = max(0, start - self.before), stop - self.before
        if not self.before and (start, stop) == (0, self.shape[1]):
            return self
        chosen = slice(start, stop)
        if self.keys is None:
            found = type(self)(distances=self.distance[chosen, chosen], ring=self.ring)
        else:
            found = type(self)(self.keys[chosen], ring=self.ring)
        found.__dict__["rings"] = self.rings[0], self.rings[1][chosen, chosen]
        return found

    @property
    def _keys(self) -> Tensor:
        assert self.keys is not None
        return self.keys

    @property
    def _queries(self) -> Tensor:
        return self._keys if self.queries is None else self.queries

    @cached_property
    def _displacement(self) -> Tensor:
        return self._keys - self._queries[:, None]  # (m, n, d)

    @cached_property
    def _sequence(self) -> Tensor:
        """The number of each key's sequence, (n,): 0, and one more wherever integers begin again."""
        step = self._keys.diff(dim=0).flatten()
        again = step < 0
        packed = self.has_directions and self.queries is None and bool(again.any())
        if packed and bool((again & (self._keys[1:, 0] == self._keys[0, 0]) | (step == 1)).all()):
            return torch.nn.functional.pad(again.cumsum(0), (1, 0))
        return torch.zeros(len(self._keys), dtype=torch.int64, device="cpu")

    @property
    def _apart(self) -> Tensor:
        """Which queries and keys are of different sequences, (m, n)."""
        m, n = self.shape
        of_query = self._sequence[:, None] if self.queries is None else torch.zeros(m, 1, dtype=torch.int64)
        return (self._sequence != of_query).expand(m, n)

    def _codes(self, points: Tensor, sequence: Tensor) -> np.ndarray:
        """Return an integer for each point (..., d) of a sequence (...), the same for points that are equal."""
        unit = _unit(float((self._keys - self._keys[0]).abs().max()))
        rounded = ((points - self._keys[0]) / unit).round().long().numpy()
        factors = np.random.default_rng(0).integers(2**62, size=rounded.shape[-1]) | 1
        found: np.ndarray = (rounded * factors).sum(-1) + sequence.numpy() * (2**61 - 1)  # wraps around
        return found


def _coordinates(name: str, given: Any) -> Tensor:
    """Return coordinates as float64 (n, d) on the CPU."""
    found = torch.tensor(real_numbers(name, given), dtype=torch.float64, device="cpu")
    found = found[:, None] if found.ndim == 1 else found
    if found.ndim != 2 or 0 in found.shape:
        advice = "those of several sequences are measured one sequence at a time"
        raise ValueError(f"{name} must be coordinates (n,) or (n, d), got shape {tuple(found.shape)}; {advice}")
    if found.shape[0] == found.shape[1] > 3 and bool((found == found.T).all()):
        raise ValueError(f"{name} looks like a matrix of distances; give Positions(distances=...)")
    if not bool(found.isfinite().all()):
        raise ValueError(f"{name} must be finite; first tokens without a place are counted by before=")
    return found


def _distances(given: Any) -> Tensor:
    """Return distances as float64 (m, n) on the CPU."""
    found = torch.tensor(real_numbers("distances", given), dtype=torch.float64, device="cpu")
    if found.ndim != 2 or 0 in found.shape:
        raise ValueError(f"distances must be a matrix (query, key), got shape {tuple(found.shape)}")
    if not bool((found >= 0).all()):
        raise ValueError("distances must be at least 0, infinite where nothing connects a query and a key")
    return found


def _unit(largest: float) -> float:
    """Return the power of two below which differences are rounding, beside numbers up to the largest."""
    return 2.0 ** (int(np.ceil(np.log2(largest))) - _BITS) if largest > 0 else 1.0


def _levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different finite values, rising, and which of them each value is, -1 for an infinite one."""
    finite = np.isfinite(values)
    rounded = np.round(values[finite] / _unit(float(np.abs(values[finite]).max(initial=0))))
    _, first, number = np.unique(rounded, return_index=True, return_inverse=True)
    index = np.full(values.shape, -1)
    index[finite] = number
    return values[finite][first], index
