"""Where queries and keys lie, if not one after the other on a line: a grid, time stamps, a graph, other keys."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pelocality._checks import count, number, real_numbers
from pelocality._configuration import Configurable

Floats = NDArray[Any]
Integers = NDArray[np.int64]
_CPU = torch.device("cpu")


class Axis(NamedTuple):
    """Which places queries and keys have along an axis, of which a grid has few.

    Attributes:
        of_query: The number of each query's place along the axis, integers (m,).
        of_key: The number of each key's place, or that of each place of keys, integers (n,).
        numbers: A number for each place of queries and each place of keys, integers (x, y). None: places are evenly
            spaced, and the number is that of the key's place minus that of the query's.
    """

    of_query: Integers
    of_key: Integers
    numbers: Integers | None

    def at(self, rows: slice, read: Callable[[Integers], Any]) -> Any:
        """Return the number of each of these queries and each key, (rows, n), as an array or as ``read`` returns it."""
        if self.numbers is None:
            return read(self.of_key) - read(self.of_query[rows])[:, None]
        return read(self.numbers[self.of_query[rows]])[:, read(self.of_key)]

    def times(self, stride: int) -> Self:
        """Return the axis with numbers that are a multiple of its own."""
        if self.numbers is None:
            return self._replace(of_query=self.of_query * stride, of_key=self.of_key * stride)
        return self._replace(numbers=self.numbers * stride)


def _read_as_tensor(name: str) -> Any:
    """Return a property that reads an array, if there is one, as a tensor."""
    return property(lambda self: None if getattr(self, name) is None else as_tensor(getattr(self, name)))


class Positions(Configurable):
    """Coordinates of queries and keys, with which every metric measures distance.

        distance of i and j: |x_i - y_j|        opposite keys j and j' of query i: y_j + y_j' = 2 x_i

    with the coordinates x of queries and y of keys, and the Euclidean norm. On a line of tokens, x_i = y_i = i.
    Pass positions as ``positions=`` to a metric, an encoding or a `SequenceModel`. An array of coordinates is accepted
    there as well.

    Args:
        keys: Coordinates of the keys, (n,) or (n, d): patches of an image, voxels, time stamps in seconds, the number
            of a token's sentence.
        queries: Coordinates of the queries, (m,) or (m, d), if the queries are not the keys. Examples are the steps of
            a decoder that attends to frames, or the last tokens after a cache, ``queries=torch.arange(120, 128)`` of
            128 keys.
        before: The number of first tokens that have no place, such as a ViT's [CLS] and registers. Metrics leave these
            tokens out, as ``without_first`` does, and encodings have a bias of 0 there.
        sequence: The number of each key's sequence, (n,), if several sequences are packed into one input. The distance
            between two sequences is infinite. `packed` reads this argument from ``position_ids``.
        ring: The width of a ring. Metrics that average attention by distance (`distance_profile`, `window`,
            `half_life`, `monotonicity`, and of one coordinate `toeplitz_share`) round distances to multiples of this
            width. None: a ring has equal distances.
        tolerance: How far coordinates may differ and count as equal. None: the rounding of their dtype at the largest
            coordinate, 0 for integers.
        distances: Instead of keys: the distance of every query and key, (m, n), such as the steps between the nodes of
            a graph; infinite if nothing connects them. Such positions have neither directions nor opposite keys.

    Attributes:
        keys: The coordinates of the keys, (n, d); None where distances were given.
        queries: The coordinates of the queries, (m, d); None where they are the keys.
        sequence: The number of each key's sequence, (n,); None where there is one sequence.
        distances: The distances that were given, (m, n); None where coordinates were.

    Raises:
        TypeError: Coordinates that are not real numbers.
        ValueError: Neither keys nor distances, or both; other shapes, NaN, infinite coordinates, negative distances, or
            a ring that is not above 0. Also coordinates (n,) that count up from their first value several times, such
            as ``position_ids`` of packed sequences or the columns of a grid: give `packed`, or coordinates (n, 1).

    Note:
        Keys at the same place, such as the tokens of one sentence, count as one opposite key, with the mean of their
        weights.

    Examples:
        >>> from pelocality.metrics import locality, symmetry
        >>> grid = Positions.grid(8, 8)
        >>> grid
        Positions(64 places of 2 coordinates)
        >>> round_kernel = torch.softmax(-grid.distance, -1)
        >>> symmetry(round_kernel, positions=grid)
        tensor(1., dtype=torch.float64)
        >>> symmetry(round_kernel)  # the patches read as a line of 64 tokens
        tensor(0.8131, dtype=torch.float64)
        >>> Positions.packed([0, 1, 2, 0, 1]).distance[2]
        tensor([2., 1., 0., inf, inf], dtype=torch.float64)
    """

    def __init__(
        self,
        keys: Any = None,
        queries: Any = None,
        *,
        before: int = 0,
        sequence: Any = None,
        ring: float | None = None,
        tolerance: float | None = None,
        distances: Any = None,
    ) -> None:
        if (keys is None) == (distances is None) or (keys is None and queries is not None):
            raise ValueError("positions need either keys= (and queries=, if these differ) or distances=, not both")
        self.before = count("before", before, least=0)
        self.ring = None if ring is None else number("ring", ring)
        if self.ring is not None and not 0 < self.ring < np.inf:
            raise ValueError(f"ring must be above 0, got {ring}")
        self._keys, rounding = _coordinates("keys", keys)
        self._queries, of_queries = _coordinates("queries", queries)
        if self._queries is not None and self._queries.shape[1] != self.dimensions:
            raise ValueError(f"queries must have {self.dimensions} coordinates as keys, got {self._queries.shape[1]}")
        if tolerance is not None and not 0 <= number("tolerance", tolerance) < np.inf:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        self.tolerance = max(rounding, of_queries) if tolerance is None else float(tolerance)
        self._sequence = None if sequence is None else _sequences(sequence, self._keys, self._queries)
        if self._keys is not None and self._sequence is None and queries is None and np.ndim(keys) == 1:
            _refuse_packed(self._keys[:, 0])
        self._distances = None if distances is None else _distances(distances)
        if self.before and (self._queries is not None or self.shape[0] != self.shape[1]):
            raise ValueError("before= is for tokens that are queries and keys; leave it out")

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
            ValueError: A size below 1.

        Examples:
            >>> Positions.grid(2, 2).keys.tolist()
            [[0, 0], [0, 1], [1, 0], [1, 1]]
        """
        shape = [count("sizes", size) for size in sizes]
        return cls(np.indices(shape).reshape(len(shape), -1).T, before=before)

    @classmethod
    def packed(cls, position_ids: Any) -> Self:
        """Return the places of packed sequences. A sequence begins wherever a token's number does not grow by 1.

        Args:
            position_ids: The number of each token in its sequence, (n,) integers, such as 0, 1, 2, 0, 1.

        Raises:
            TypeError: Other numbers than integers.
            ValueError: Another shape.

        Examples:
            >>> Positions.packed([3, 4, 0, 0, 1]).sequence.tolist()
            [0, 0, 1, 2, 2]
        """
        numbers = real_numbers("position_ids", position_ids)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            raise TypeError("position_ids must be the integers of one input, (n,); measure a batch one row at a time")
        return cls(numbers[:, None], sequence=np.cumsum(np.diff(numbers, prepend=numbers[:1] - 1) != 1))

    def __repr__(self) -> str:
        m, n = self.shape
        who = f"{n} places" if self._queries is None and m == n else f"{m} queries, {n} keys"
        kind = f" of {self.dimensions} coordinate{'s' * (self.dimensions > 1)}" if self.dimensions else " by distances"
        more = "" if self._sequence is None else f", {self._sequence.max() + 1} sequences"
        return f"Positions({who}{kind}{more}{f', before={self.before}' * bool(self.before)})"

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # positions do not change

    def __getstate__(self) -> dict[str, Any]:
        computed = [name for name in vars(type(self)) if isinstance(vars(type(self))[name], cached_property)]
        return {name: value for name, value in vars(self).items() if name not in computed}

    keys, queries, sequence, distances = map(_read_as_tensor, ("_keys", "_queries", "_sequence", "_distances"))

    @property
    def shape(self) -> tuple[int, int]:
        """The number of queries and of keys, without the tokens that have no place."""
        if self._distances is not None:
            return self._distances.shape[0], self._distances.shape[1]
        return len(self._x), len(self._y)

    @property
    def dimensions(self) -> int:
        """The number of coordinates, 0 of distances."""
        return 0 if self._keys is None else int(self._keys.shape[1])

    @property
    def has_directions(self) -> bool:
        """Whether there is a past and a future: one coordinate."""
        return self.dimensions == 1

    @cached_property
    def is_line(self) -> bool:
        """Whether these are tokens one after the other, one unit apart, each a query and a key."""
        plain = self._queries is None and self._sequence is None and self.ring is None and not self.before
        return plain and self.has_directions and bool((np.diff(self._y[:, 0]) == 1).all())

    # ---- distances, of each step: a displacement from a query to a key, of which a grid has few

    def steps(self, rows: slice = slice(None), device: torch.device = _CPU) -> Tensor:
        """Return the number of the step from each of these queries to each key, (rows, n).

        The last number is that of keys in other sequences.

        Args:
            rows: The queries.
            device: Where the numbers are needed.
        """
        numbers: Tensor = self._numbers(rows, lambda array: as_tensor(array).to(device))
        return numbers

    def _numbers(self, rows: slice, read: Callable[[Integers], Any]) -> Any:
        axes, vectors = self._steps
        numbers = sum(axis.at(rows, read) for axis in axes)
        if self._sequence is not None:
            numbers[read(self._sequence[rows])[:, None] != read(self._sequence)] = len(vectors)
        return numbers

    @cached_property
    def step_distance(self) -> Floats:
        """The distance of each step, (t + 1,), equal where it is so up to the tolerance, infinite between sequences."""
        _, vectors = self._steps
        exact = np.linalg.norm(vectors, axis=-1) if vectors.shape[1] > 1 else abs(vectors[:, 0])
        occurs = self.step_count[:-1] > 0
        distance = np.append(exact.astype(float), np.inf)
        if self._distances is not None:
            return distance
        rounding = 8 * np.finfo(float).eps * float(exact[occurs].max(initial=0)) * (self.dimensions > 1)  # norms round
        level, index = _levels(np.append(exact[occurs].astype(float), 0.0), max(self.tolerance, rounding))
        distance[:-1][occurs] = level[index[:-1]]
        return distance

    @cached_property
    def step_offset(self) -> Floats:
        """The signed distance of each step, (t + 1,), below 0 into the past.

        Raises:
            ValueError: Several coordinates, or distances, which have no sign.
        """
        if not self.has_directions:
            advice = "give one coordinate, such as positions=grid.keys[:, :1] for the rows of a grid"
            raise ValueError(f"these positions have no past and no future, which this measures; {advice}")
        distance = self.step_distance
        return np.where(np.append(self._steps[1][:, 0] < 0, False), -distance, distance)

    @cached_property
    def step_count(self) -> Integers:
        """How many queries and keys are a step apart, (t + 1,)."""
        total = np.zeros(len(self._steps[1]) + 1, np.int64)
        m, n = self.shape
        size = max(1, max(2**19, len(total)) // n)
        for rows in (slice(start, start + size) for start in range(0, m, size)):
            total += np.bincount(self._numbers(rows, np.asarray).ravel(), minlength=len(total))
        return total

    @cached_property
    def rings(self) -> tuple[Floats, Integers]:
        """The distances that occur, from 0 on, (r,), and which of them each step has, (t + 1,), -1 for none."""
        distance = self.step_distance
        if self.ring is not None:
            distance = np.floor(distance / self.ring + 0.5) * self.ring
        distance = np.where(self.step_count > 0, distance, np.inf)
        level, index = _levels(np.append(distance, 0.0), 0.0)  # the query itself is a ring, also without a key there
        return level, index[:-1]

    @property
    def profile_distances(self) -> Tensor:
        """The distances at which `distance_profile` is measured: signed, (2r - 1,), or without directions (r,)."""
        radius = self.rings[0]
        return as_tensor(np.concatenate([-radius[:0:-1], radius]) if self.has_directions else radius)

    @cached_property
    def step_profile(self) -> Integers:
        """Which of the `profile_distances` each step has, (t + 1,), -1 for an infinite distance."""
        radius, ring = self.rings
        if not self.has_directions:
            return self.rings[1]
        signed = np.where(self.step_offset < 0, -ring, ring) + len(radius) - 1
        return np.where(ring < 0, -1, signed)

    @cached_property
    def step_displacement(self) -> Integers:
        """The number of each step's displacement, (t + 1,), from 0 on, -1 for an infinite distance.

        Displacements are vectors; of positions that are distances, which have no direction, the distance. Vectors that
        are equal up to the tolerance are one.
        """
        if self._keys is None:
            return self.rings[1]
        occurs = self.step_count[:-1] > 0
        numbers = np.full(len(occurs) + 1, -1)
        numbers[:-1][occurs] = _numbered(self._steps[1][occurs], self.tolerance)
        return numbers

    @cached_property
    def has_infinite(self) -> bool:
        """Whether any query and key are infinitely far apart."""
        return bool(self.step_count[np.isinf(self.step_distance)].any())

    @cached_property
    def distance(self) -> Tensor:
        """The distance of every query and key, (m, n), float64, on the CPU."""
        return self._of_pairs(self.step_distance)

    @cached_property
    def offset(self) -> Tensor:
        """The signed distance of every query and key, (m, n), below 0 for keys before the query."""
        return self._of_pairs(self.step_offset)

    @cached_property
    def profile_index(self) -> Tensor:
        """Which of the `profile_distances` each query and key has, (m, n), -1 for an infinite distance."""
        return self._of_pairs(self.step_profile)

    @cached_property
    def displacements(self) -> Tensor:
        """The `step_displacement` from each query to each key, (m, n), -1 for an infinite distance."""
        return self._of_pairs(self.step_displacement)

    def _of_pairs(self, table: Floats) -> Tensor:
        return as_tensor(table[self._numbers(slice(None), np.asarray)])

    def later(self, rows: slice, device: torch.device = _CPU) -> Tensor | None:
        """Return which keys a causal mask hides from these queries, boolean (rows, n); None where no order is known.

        Tokens that are queries and keys come in their order. Of other keys, those with a larger coordinate are later.
        """
        m, n = self.shape
        if self._queries is None and m == n:
            i = torch.arange(n, device=device)
            return i > i[rows, None]
        return as_tensor(self.step_offset > 0).to(device)[self.steps(rows, device)] if self.has_directions else None

    # ---- places

    @cached_property
    def places(self) -> Tensor:
        """The number of each key's place, (n,); keys with equal coordinates, and of one sequence, share a place."""
        return as_tensor(self._places)

    @cached_property
    def has_own_places(self) -> bool:
        """Whether each key has a place of its own, in the order of the keys."""
        return bool((np.diff(self._places) == 1).all()) and self._places[0] == 0

    def opposites(self, rows: slice, device: torch.device = _CPU) -> Tensor:
        """Return the place opposite of each place through each of these queries, (rows, places), -1 for none.

        Raises:
            ValueError: Distances, which have no opposite.
        """

        def read(array: Integers) -> Tensor:
            return as_tensor(array).to(device)

        sequence_of_query, sequence_of_place, axes, tables = self._mirrors
        query, place = read(sequence_of_query[rows])[:, None], read(sequence_of_place)
        opposite = query.expand(-1, len(place))
        for axis, table in zip(
            axes, tables, strict=True
        ):  # axis by axis, which places agree with the reflection so far
            at = opposite * table.shape[1] + axis.at(rows, read)
            opposite = read(table.ravel()).index_select(0, at.flatten()).reshape(at.shape)
        return torch.where((query == place) & (opposite < len(place)), opposite, -1)

    @cached_property
    def _mirrors(self) -> tuple[Integers, Integers, list[Axis], list[Integers]]:
        """The sequences of queries and places; for each axis, the place along it that lies opposite, and a table.

        The table has the combination of a combination so far (or a sequence), and a place along the axis. Its last row
        and its last number stand for none, and the last combinations are places.
        """
        if self._keys is None:
            raise ValueError("positions given as distances have no opposite keys, which symmetry compares")
        first = np.unique(self._places, return_index=True)[1]
        place = self._y[first]
        sequence = np.zeros(len(self._x), np.int64) if self._sequence is None else self._sequence
        known = of_place = np.zeros(len(place), np.int64) if self._sequence is None else self._sequence[first]
        axes, tables = [], []
        for x, y in zip(self._x.T, place.T, strict=True):
            if (even := _evenly_spaced(x, y, self.tolerance)) is not None:
                of_query, level, _ = even
                lowest = min(0, 2 * of_query.min() - level.max())
                axes.append(Axis(lowest - 2 * of_query, -level, None))
                level, levels = level - lowest, max(level.max(), 2 * of_query.max()) - lowest + 1
            else:
                values, level = _levels(y, self.tolerance)
                (xs, at_x), (ys, at_y) = np.unique(x, return_inverse=True), np.unique(y, return_inverse=True)
                axes.append(Axis(at_x, at_y, _nearest(values, 2 * xs[:, None] - ys, 4 * self.tolerance)))
                levels = len(values) + 1
            combined = np.unique(known * levels + level, return_inverse=True)[1]
            if len(axes) == self.dimensions:
                combined = np.arange(len(place))
            table = np.full((known.max() + 2, levels), combined.max() + 1)
            table[known, level] = combined
            tables.append(table)
            known = combined
        return sequence, of_place, axes, tables

    def order_of(self, which: str) -> Tensor:
        """Return the order of the "queries" or the "keys" along the line, (m,) or (n,); equal ones share a number."""
        _ = self.offset  # refuses several coordinates
        return as_tensor(_levels((self._x if which == "queries" else self._y)[:, 0], self.tolerance)[1])

    @cached_property
    def placed(self) -> Self:
        """The same positions without the first tokens that have no place."""
        return self._cut(slice(0, self.shape[1])) if self.before else self

    def part(self, start: int, stop: int) -> Self:
        """Return the positions of the tokens start..stop-1, which are queries and keys; the rings stay the same."""
        chosen = slice(max(0, start - self.before), stop - self.before)
        return self.placed if chosen == slice(0, self.shape[1]) else self._cut(chosen)

    def _cut(self, chosen: slice) -> Self:
        if self._distances is not None:
            part = type(self)(distances=self._distances[chosen, chosen], ring=self.ring)
        else:
            sequence = None if self._sequence is None else self._sequence[chosen]
            part = type(self)(self._y[chosen], sequence=sequence, ring=self.ring, tolerance=self.tolerance)
        axes, vectors = self._steps
        cut = [Axis(axis.of_query[chosen], axis.of_key[chosen], axis.numbers) for axis in axes]
        vars(part).update(_steps=(cut, vectors), step_distance=self.step_distance, rings=self.rings)
        return part

    # ---- in numpy, which neither gradients nor transformations nor a default device of torch change

    @property
    def _y(self) -> Floats:
        assert self._keys is not None
        return self._keys

    @property
    def _x(self) -> Floats:
        return self._y if self._queries is None else self._queries

    @cached_property
    def _steps(self) -> tuple[list[Axis], Floats]:
        """Axes whose numbers add up to that of a step, and the displacement of each step, (t, d)."""
        m, n = self.shape
        if self._distances is not None:
            return [_every_pair(m, n)], self._distances.reshape(-1, 1)
        counts = [(len(np.unique(x)), len(np.unique(y))) for x, y in zip(self._x.T, self._y.T, strict=True)]
        # a number for each combination of the displacements along the axes, unless that is more than there are pairs
        if self.dimensions == 1 or math.prod(of_x + of_y - 1 for of_x, of_y in counts) <= m * n:
            axes = [_displacements(x, y, self.tolerance) for x, y in zip(self._x.T, self._y.T, strict=True)]
            sizes = [len(values) for _, values in axes]
            if math.prod(sizes) <= max(m * n, math.prod(2 * (of_x + of_y) for of_x, of_y in counts)):
                strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
                vectors = np.stack(np.meshgrid(*(values for _, values in axes), indexing="ij"), -1)
                numbered = [axis.times(stride) for (axis, _), stride in zip(axes, strides, strict=True)]
                return numbered, vectors.reshape(-1, self.dimensions)
        return [_every_pair(m, n)], (self._y - self._x[:, None]).reshape(m * n, -1)

    @cached_property
    def _places(self) -> Integers:
        return _numbered(self._y, self.tolerance, 0 if self._sequence is None else self._sequence)


def _every_pair(m: int, n: int) -> Axis:
    """Return an axis that numbers every query and key by itself."""
    return Axis(np.arange(m), np.arange(n), np.arange(m * n).reshape(m, n))


def _displacements(x: Floats, y: Floats, tolerance: float) -> tuple[Axis, Floats]:
    """Return the axis of coordinates of queries and of keys, and the displacement of each of its numbers."""
    if (even := _evenly_spaced(x, y, tolerance)) is not None:
        of_query, of_key, displacement = even
        return Axis(of_query - of_query.max(), of_key, None), displacement
    (xs, of_query), (ys, of_key) = np.unique(x, return_inverse=True), np.unique(y, return_inverse=True)
    different, numbers = np.unique(ys - xs[:, None], return_inverse=True)
    return Axis(of_query, of_key, numbers.reshape(len(xs), len(ys))), different


def _evenly_spaced(x: Floats, y: Floats, tolerance: float) -> tuple[Integers, Integers, Floats] | None:
    """Return coordinates as whole multiples, the first key 0, and every displacement, rising; None if they are uneven.

    Multiples may be left out, but there are at most twice as many as coordinates.
    """
    places = np.unique(np.concatenate([x, y]))
    x, y, between = x.astype(places.dtype), y.astype(places.dtype), np.diff(places)
    between = between[between > tolerance]
    exact = between.dtype.kind == "i"
    unit = max(1, np.gcd.reduce(between, initial=0)) if exact else between.min(initial=np.inf)
    if len(between) and (places[-1] - places[0]) / unit > 2 * len(between):
        return None
    of_query, of_key = (
        (each - y.min()) // unit if exact else np.rint((each - y.min()) / unit).astype(np.int64) for each in (x, y)
    )
    size = of_key.max() - of_query.min() + of_query.max() + 1
    if exact:
        return of_query, of_key, (np.arange(size) - of_query.max()) * unit
    least, most = np.full((2, size), np.inf)
    for rows in (slice(start, start + 64) for start in range(0, len(x), 64)):
        numbers, displacement = of_key - of_query[rows, None] + of_query.max(), y - x[rows, None]
        np.minimum.at(least, numbers.ravel(), displacement.ravel())
        np.minimum.at(most, numbers.ravel(), -displacement.ravel())
    ends = np.stack([least, -most], 1)[np.isfinite(least)].ravel()  # the extremes of each number
    if (np.diff(ends)[::2] > tolerance).any() or (np.diff(ends)[1::2] <= tolerance).any():
        return None
    return of_query, of_key, np.where(least > 0, least, np.where(most > 0, -most, 0.0))


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor that any other computation may use, also if this one is without gradients."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(array))


def _coordinates(name: str, given: Any) -> tuple[Floats | None, float]:
    """Return coordinates (n, d) as int64 or float64, and the rounding of their dtype at the largest of them."""
    if given is None:
        return None, 0.0
    coordinates = real_numbers(name, given)
    if coordinates.dtype.kind == "b":
        raise TypeError(f"{name} must be coordinates, got booleans; a mask is given as mask=")
    coordinates = coordinates[:, None] if coordinates.ndim == 1 else coordinates
    if coordinates.ndim != 2 or 0 in coordinates.shape:
        raise ValueError(f"{name} must be coordinates (n,) or (n, d) of one input, got shape {coordinates.shape}")
    square = coordinates.shape[0] == coordinates.shape[1] > 3  # few points may have as many coordinates
    if square and (coordinates == coordinates.T).all() and not coordinates.diagonal().any():
        raise ValueError(f"{name} looks like a matrix of distances; give Positions(distances=...)")
    if coordinates.dtype.kind in "iu":
        return coordinates.astype(np.int64), 0.0
    coordinates = coordinates.astype(np.float64)
    largest = float(np.abs(coordinates).max())
    if not largest < 1e150:  # squares must be finite
        raise ValueError(f"{name} must be finite; first tokens without a place are counted by before=")
    precision = torch.finfo(given.dtype) if hasattr(given, "detach") else np.finfo(getattr(given, "dtype", float))
    return coordinates, 8 * float(precision.eps) * largest


def _sequences(given: Any, keys: Floats | None, queries: Floats | None) -> Integers:
    """Return the number of the sequence of each key, (n,)."""
    numbers = real_numbers("sequence", given)
    if keys is None or queries is not None or numbers.shape != (len(keys),) or numbers.dtype.kind not in "iu":
        raise ValueError(f"sequence must be an integer for each key, got {numbers.dtype} of shape {numbers.shape}")
    return np.unique(numbers, return_inverse=True)[1]


def _refuse_packed(line: Floats) -> None:
    """Refuse coordinates that may be of packed sequences, or of places that repeat."""
    step = np.diff(line)
    again = (step <= 0) & (line[1:] == line[0])
    if (step < 0).any() and bool((again | (step == 1)).all()):
        raise ValueError("positions begin again; give Positions.packed(position_ids), or coordinates (n, 1) of places")


def _distances(given: Any) -> Floats:
    """Return distances, (m, n)."""
    matrix = real_numbers("distances", given).astype(np.float64)
    if matrix.ndim != 2 or not matrix.size or not (matrix >= 0).all():
        raise ValueError("distances must be a matrix (query, key) of numbers that are at least 0, or infinite")
    return matrix


def _numbered(vectors: Floats, tolerance: float, codes: Integers | int = 0) -> Integers:
    """Return the number of each vector (..., d), from 0 on, (...); equal vectors of equal codes share a number."""
    for axis in range(vectors.shape[-1]):
        level, index = _levels(vectors[..., axis], tolerance)
        codes = np.unique(codes * len(level) + index, return_inverse=True)[1].reshape(index.shape)
    return np.asarray(codes)


def _levels(values: Floats, tolerance: float) -> tuple[Floats, Integers]:
    """Return the different finite values, rising, and which of them each value is, -1 for an infinite one.

    Values that differ by at most the tolerance are one level. Where they follow each other so closely that a level
    would be wider than twice that, it is cut.
    """
    finite = np.isfinite(values)
    different, index = np.unique(values[finite], return_inverse=True)
    levels = np.full(values.shape, -1, np.int64)
    if tolerance > 0 and len(different) > 1:
        run = np.concatenate([[0], np.cumsum(np.diff(different) > tolerance)])  # values that follow closely are a run
        start = different[np.unique(run, return_index=True)[1]][run]
        piece = np.where(different - start > 2 * tolerance, (different - start) // tolerance, 0)
        level = np.concatenate([[0], np.cumsum((np.diff(run) > 0) | (np.diff(piece) > 0))])
        different, index = different[np.unique(level, return_index=True)[1]], level[index]
    levels[finite] = index
    return different, levels


def _nearest(levels: Floats, values: Floats, tolerance: float) -> Integers:
    """Return which of the rising levels each value is, their number for none."""
    after = np.searchsorted(levels, values).clip(max=len(levels) - 1)
    before = (after - 1).clip(min=0)
    index = np.where(np.abs(levels[before] - values) < np.abs(levels[after] - values), before, after)
    return np.where(np.abs(levels[index] - values) <= tolerance, index, len(levels))
