"""Where queries and keys lie, if not one after the other on a line: a grid, time stamps, a graph, other keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pelocality._checks import count, number, real_numbers
from pelocality._configuration import Configurable

Floats = NDArray[Any]
Integers = NDArray[np.int64]
_CPU = torch.device("cpu")
# Queries and keys that are looked at together, and those up to which what was found is kept: one number for each.
_BLOCK, _KEPT = 2**19, 2**24


@contextmanager
def _outside_of_transforms() -> Iterator[None]:
    """Compute what other computations may use, also if this one is without gradients or inside `torch.func`."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def _read_as_tensor(name: str) -> Any:
    """Return a property that reads an array, if there is one, as a tensor."""
    return property(lambda self: None if getattr(self, name) is None else as_tensor(getattr(self, name)))


class Positions(Configurable):
    """Coordinates of queries and keys, with which every metric measures distance.

        distance of i and j: |x_i - y_j|        opposite keys j and j' of query i: y_j + y_j' = 2 x_i

    with the coordinates x of queries and y of keys, and the Euclidean norm, or another one. On a line of tokens,
    x_i = y_i = i.
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
        tolerance: How far coordinates, or distances, may differ and count as equal. None: 0 for distances and for whole
            numbers, as far as the dtype has each of them; otherwise its rounding at the largest coordinate.
        norm: The p of the norm of several coordinates: 2, the Euclidean one; 1, the sum of the steps along all axes;
            infinite, the largest of these steps.
        distances: Instead of keys: the distance of every query and key, (m, n), such as the steps between the nodes of
            a graph; infinite if nothing connects them. Such positions have neither directions nor opposite keys.

    Attributes:
        keys: The coordinates of the keys, (n, d); None where distances were given.
        queries: The coordinates of the queries, (m, d); None where they are the keys.
        sequence: The number of each key's sequence, (n,); None where there is one sequence.
        distances: The distances that were given, (m, n); None where coordinates were.

    Raises:
        TypeError: Coordinates that are not real numbers.
        ValueError: Neither keys nor distances, or both; other shapes, NaN, infinite coordinates, negative distances, a
            ring that is not above 0, or a norm below 1. Also coordinates (n,) that count up from their first value
            several times, such as ``position_ids`` of packed sequences or the columns of a grid: give `packed`, or
            coordinates (n, 1). Also coordinates whose dtype loses the differences, such as seconds since 1970 in
            float32.

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

    _whole: Self | None = None  # the positions of which these are a part

    def __init__(
        self,
        keys: Any = None,
        queries: Any = None,
        *,
        before: int = 0,
        sequence: Any = None,
        ring: float | None = None,
        tolerance: float | None = None,
        norm: float = 2.0,
        distances: Any = None,
    ) -> None:
        if (keys is None) == (distances is None) or (keys is None and queries is not None):
            raise ValueError("positions need either keys= (and queries=, if these differ) or distances=, not both")
        self.before = count("before", before, least=0)
        self.ring = None if ring is None else number("ring", ring)
        if self.ring is not None and not 0 < self.ring < np.inf:
            raise ValueError(f"ring must be above 0, got {ring}")
        self.norm = number("norm", norm)
        if not self.norm >= 1:
            raise ValueError(f"norm must be at least 1, got {norm}")
        self._keys, rounding = _coordinates("keys", keys)
        self._queries, of_queries = _coordinates("queries", queries)
        if self._queries is not None and self._queries.shape[1] != self.dimensions:
            raise ValueError(f"queries must have {self.dimensions} coordinates as keys, got {self._queries.shape[1]}")
        if tolerance is not None and not 0 <= number("tolerance", tolerance) < np.inf:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        self.tolerance = max(rounding, of_queries) if tolerance is None else float(tolerance)
        if self._keys is not None:
            self._refuse_merged(self.tolerance if tolerance is None else 0.0)
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
        begins = np.diff(numbers.astype(np.int64)) != 1  # Differences of short integers overflow.
        return cls(numbers[:, None], sequence=np.append(0, np.cumsum(begins)))

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

    # ---- some queries and all keys, on any device

    def distances_of(self, rows: Any = slice(None), device: torch.device = _CPU) -> Tensor:
        """Return the distance of each of these queries to each key, (rows, n), float64, infinite between sequences."""
        if self._distances is not None:
            return as_tensor(self._distances[rows]).to(device)
        x, y = self._points(rows, device)
        norm = (
            self.norm if self.dimensions > 1 else 1.0
        )  # The sum of one difference is exact, and its root need not be.
        distance = torch.cdist(x, y, norm, compute_mode="donot_use_mm_for_euclid_dist")
        return self._in_sequences(distance, torch.inf, rows)

    def offsets_of(self, rows: Any = slice(None), device: torch.device = _CPU) -> Tensor:
        """Return the signed distance of each of these queries to each key, (rows, n), below 0 into the past.

        Raises:
            ValueError: Several coordinates, or distances, which have no sign.
        """
        if not self.has_directions:
            advice = "give one coordinate, such as positions=grid.keys[:, :1] for the rows of a grid"
            raise ValueError(f"these positions have no past and no future, which this measures; {advice}")
        x, y = self._points(rows, device)
        offset = y.T - x
        return self._in_sequences(offset.masked_fill_(offset.abs() <= self.tolerance, 0), torch.inf, rows)

    def later(self, rows: slice, device: torch.device = _CPU) -> Tensor | None:
        """Return which keys a causal mask hides from these queries, boolean (rows, n); None where no order is known.

        Tokens that are queries and keys come in their order. Of other keys, those with a larger coordinate are later.
        """
        m, n = self.shape
        if self._queries is None and m == n:
            i = torch.arange(n, device=device)
            return i > i[rows, None]
        return self.offsets_of(rows, device) > 0 if self.has_directions else None

    def steps(self, rows: slice = slice(None), device: torch.device = _CPU) -> Tensor:
        """Return which of the `profile_distances` each of these queries and keys have, (rows, n).

        An infinite distance has the number behind the last.
        """
        return self._kept(self._search_steps, rows, device)

    def _search_steps(self, rows: Any, device: torch.device) -> Tensor:
        offset = self.offsets_of(rows, device) if self.has_directions else self.distances_of(rows, device)
        ring = _searched(as_tensor(self._rings[1]).to(device), offset.abs())
        step = torch.where(offset < 0, -ring, ring) + self.here
        return step.masked_fill_(offset == torch.inf, len(self.profile_distances))

    @cached_property
    @_outside_of_transforms()
    def _rings(self) -> tuple[Floats, Floats]:
        """The distances that occur, rounded to rings, from 0 on, (r,), and how far each but the last reaches."""
        if self._whole is not None:
            return self._whole._rings
        both_ways = self._queries is None and self._distances is None  # the way back is as long
        blocks = (np.unique(self.distances_of(rows)[:, rows.start * both_ways :]) for rows in self._blocks())
        exact = np.unique(np.concatenate([[0.0], *blocks]))  # Distance 0 is a ring even where no key is.
        exact = exact[np.isfinite(exact)]
        rounding = 8 * np.finfo(float).eps * exact[-1] if self.dimensions > 1 else 0.0  # norms round
        tolerance = max(self.tolerance, rounding)
        radius, index = _levels(exact, tolerance)
        last = np.flatnonzero(np.diff(index))
        ends = exact[last] + np.minimum(tolerance, exact[last + 1] - exact[last]) / 2
        if self.ring is not None:
            radius = np.floor(radius / self.ring + 0.5) * self.ring
            radius, ends = np.unique(radius), ends[np.diff(radius) > 0]
        return radius, ends

    @property
    def profile_distances(self) -> Tensor:
        """The distances at which `distance_profile` is measured: signed, (2r - 1,), or without directions (r,)."""
        radius = self._rings[0]
        return as_tensor(np.concatenate([-radius[:0:-1], radius]) if self.has_directions else radius)

    @property
    def here(self) -> int:
        """The number of distance 0 among the `profile_distances`."""
        return len(self._rings[0]) - 1 if self.has_directions else 0

    @cached_property
    @_outside_of_transforms()
    def step_count(self) -> Integers:
        """How many queries and keys have each of the `profile_distances`, (t,)."""
        size = len(self.profile_distances) + 1
        counts = (np.bincount(self.steps(rows).numpy().ravel(), minlength=size)[:-1] for rows in self._blocks())
        return np.asarray(sum(counts))

    def displacements_of(self, rows: slice = slice(None), device: torch.device = _CPU) -> Tensor:
        """Return the number of the displacement from each of these queries to each key, (rows, n).

        Displacements are vectors; of positions that are distances, which have no direction, the distance. Vectors that
        are equal up to the tolerance are one. An infinite distance has the number behind the last.
        """
        return (partial(self._kept, self._coded_vectors) if self._vectors else self.steps)(rows, device)

    @property
    def displacement_count(self) -> int:
        """The number of different displacements."""
        return len(self._vectors[-1] if self._vectors else self.profile_distances)

    @cached_property
    @_outside_of_transforms()
    def _vectors(self) -> list[Integers]:
        """For each axis, the codes of the displacements up to there, rising; none if they are `profile_distances`."""
        if self.dimensions == 0 or (self.dimensions == 1 and self.ring is None):
            return []
        found: list[Integers] = []
        for _ in self._axes:
            blocks = [np.unique(self._coded_vectors(rows, _CPU, found)) for rows in self._blocks()]
            codes = np.unique(np.concatenate(blocks))
            found.append(codes[codes >= 0])
        return found

    def _coded_vectors(self, rows: slice, device: torch.device, found: list[Integers] | None = None) -> Tensor:
        """Return the number of the displacement from each of these queries to each key, (rows, n).

        While codes of some axes alone are ``found``, return codes up to the next axis instead: of the number of the
        displacement along these axes, and the step along the next one; -1 between sequences.
        """
        code = torch.zeros((), dtype=torch.int64, device=device)
        by_axis = self._vectors if found is None else [*found, None]
        for (axis, (of_query, of_key)), codes in zip(self._axes, by_axis, strict=False):
            queries, place = np.unique(of_query[rows], return_inverse=True)  # An axis of a grid has few places.
            steps = axis._search_steps(queries, _CPU).numpy()
            code = code * len(axis.profile_distances) + _table(steps, place, of_key, device)
            code = code if codes is None else _number_of(codes, code)
        return self._in_sequences(code, self.displacement_count if found is None else -1, rows)

    @cached_property
    def _axes(self) -> list[tuple[Self, tuple[Integers, Integers]]]:
        """The places along each axis alone, and which of them queries and keys have."""
        axes = []
        for x, y in zip(self._x.T, self._y.T, strict=True):
            (x, of_query), (y, of_key) = np.unique(x, return_inverse=True), np.unique(y, return_inverse=True)
            axes.append((type(self)(y[:, None], x[:, None], tolerance=self.tolerance), (of_query, of_key)))
        return axes

    # ---- of all queries and keys

    @property
    def has_infinite(self) -> bool:
        """Whether any query and key are infinitely far apart."""
        several = self._sequence is not None and bool(self._sequence.any())
        return several or (self._distances is not None and bool(np.isinf(self._distances).any()))

    @property
    def distance(self) -> Tensor:
        """The distance of every query and key, (m, n), float64; numbers equal up to the tolerance are equal."""
        if self.ring is not None:
            return self.distances_of()
        return torch.nn.functional.pad(self.profile_distances.abs(), (0, 1), value=torch.inf)[self.steps()]

    # ---- places

    @property
    def places(self) -> Integers:
        """The number of each key's place, (n,); keys with equal coordinates, and of one sequence, share a place."""
        return self._coded_places[0]

    @cached_property
    def has_own_places(self) -> bool:
        """Whether each key has a place of its own, in the order of the keys."""
        return np.array_equal(self.places, np.arange(self.shape[1]))

    def pairs(self, rows: slice, device: torch.device = _CPU) -> Tensor:
        """Return the places that lie opposite of each other through each of these queries, (rows, 2, pairs).

        Each pair is there once; -1 fills up.

        Raises:
            ValueError: Distances, which have no opposite.
        """
        if self._keys is None:
            raise ValueError("positions given as distances have no opposite keys, which symmetry compares")
        return self._kept(self._search_pairs, rows, device)

    def _search_pairs(self, rows: slice, device: torch.device) -> Tensor:
        places, axes = self._coded_places
        key = np.unique(places, return_index=True)[1]  # one at each place
        code = torch.zeros((), dtype=torch.int64, device=device)
        if self._sequence is not None:
            code = as_tensor(self._sequence[rows, None]).to(device)
        for x, (level, of_key, codes) in zip(self._exact[0].T, axes, strict=True):
            queries, of_query = np.unique(x[rows], return_inverse=True)
            mirrored = 2 * queries[:, None] - level
            near = np.searchsorted((level[1:] + level[:-1]) / 2, mirrored)
            near = np.where(abs(level[near] - mirrored) <= 4 * self.tolerance, near, len(level))
            code = _number_of(codes, code * (len(level) + 1) + _table(near, of_query, of_key[key], device))
        opposite = self._in_sequences(torch.where(code < len(key), code, -1), -1, rows, key)
        first = opposite > torch.arange(opposite.shape[1], device=device)  # each pair once
        query, left = first.nonzero(as_tuple=True)
        column = first.cumsum(-1)[query, left] - 1
        pairs = opposite.new_full((len(opposite), 2, max(1, opposite.shape[1] // 2)), -1)
        pairs[query, 0, column], pairs[query, 1, column] = left, opposite[query, left]
        return pairs

    @cached_property
    def _coded_places(self) -> tuple[Integers, list[tuple[Floats, Integers, Integers]]]:
        """The number of each key's place, and along each axis: levels, that of each key, and codes, rising.

        A code is the number of the place along the axes before, and the level along this one.
        """
        number, axes = np.zeros(1, np.int64) if self._sequence is None else self._sequence, []
        for y in self._exact[1].T:
            level, of_key = _levels(y, self.tolerance)
            codes, number = np.unique(number * (len(level) + 1) + of_key, return_inverse=True)
            axes.append((level, of_key, codes))
        return number, axes

    def order_of(self, which: str) -> Tensor:
        """Return the order of the "queries" or the "keys" along the line, (m,) or (n,); equal ones share a number."""
        self.offsets_of(slice(0))  # refuses several coordinates
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
        of_tokens = {"keys": self._keys, "sequence": self._sequence}
        arguments: dict[str, Any] = {name: each if each is None else each[chosen] for name, each in of_tokens.items()}
        apart = None if self._distances is None else self._distances[chosen, chosen]
        part = type(self)(**arguments, distances=apart, ring=self.ring, tolerance=self.tolerance, norm=self.norm)
        part._whole = self
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
    def _exact(self) -> tuple[Floats, Floats]:
        """The coordinates of queries and keys in float64, whole numbers from the first key on, which are exact."""
        whole = self._x.dtype.kind == self._y.dtype.kind == "i"
        x, y = ((each - self._y[0] * whole).astype(float) for each in (self._x, self._y))
        return x, y

    def _refuse_merged(self, rounding: float) -> None:
        """Refuse coordinates whose differences are lost: in float64, or in the rounding of their own dtype."""
        eps = rounding / (max(np.abs(each).max() for each in self._exact) or 1)
        for name, coordinates, points in zip(("keys", "queries"), (self._y, self._x), self._exact[::-1], strict=True):
            for given, values in zip(np.sort(coordinates, 0).T, np.sort(points, 0).T, strict=True):
                start = np.append(True, np.diff(values) > rounding)  # Values that follow closely are a run.
                width = values - values[start][start.cumsum() - 1]
                own = eps * np.abs(values[[0, -1]]).max()
                # A sum over the axes, such as a rotation, has noise of the largest axis on all of them.
                lost = (width > max(own, eps * np.abs(points).max() / 4)).any()
                lost |= ((np.diff(values) == 0) & (np.diff(given) > 0)).any()  # integers beyond float64
                lost |= own > 16 and not start.all()  # The dtype does not have every whole number.
                one_place = name == "keys" and points.shape[1] == 1 and len(values) > 1 and not start[1:].any()
                if lost or (one_place and (width[-1] > 0 or eps > 1e-12)):  # Equal numbers of float64 are one place.
                    advice = "give float64 or integers, subtract the first one, or set tolerance="
                    raise ValueError(f"{name} differ by no more than the rounding of their dtype; {advice}")

    def _points(self, rows: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        x, y = self._exact
        return as_tensor(x[rows]).to(device), as_tensor(y).to(device)

    def _in_sequences(self, values: Tensor, otherwise: float, rows: Any, keys: Any = slice(None)) -> Tensor:
        """Return values of these queries and keys, and something else where these are of two sequences; in place."""
        if self._sequence is None:
            return values
        query, key = (as_tensor(self._sequence[each]).to(values.device) for each in (rows, keys))
        return values.masked_fill_(query[:, None] != key, otherwise)

    def _blocks(self) -> list[slice]:
        m, n = self.shape
        size = max(1, _BLOCK // n)
        return [slice(start, min(start + size, m)) for start in range(0, m, size)]

    @_outside_of_transforms()
    def _kept(self, of_rows: Callable[[slice, torch.device], Tensor], rows: slice, device: torch.device) -> Tensor:
        """Return integers of these queries, which are computed once for all queries if these are few enough."""
        m, n = self.shape
        if m * n > _KEPT:
            return of_rows(rows, device)
        key = of_rows.__name__, device
        if key not in self._of_all:
            self._of_all[key] = torch.cat([of_rows(block, device).int() for block in self._blocks()])
        return self._of_all[key][rows]

    @cached_property
    def _of_all(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}


def _searched(ends: Tensor, values: Tensor) -> Tensor:
    """Return how many of the rising ends are below each value."""
    if len(ends) < 2**14:
        return torch.searchsorted(ends, values)
    ordered, order = values.flatten().sort()  # in a long table, near values are found much faster one after the other
    return torch.empty_like(order).scatter_(0, order, torch.searchsorted(ends, ordered)).reshape(values.shape)


def _number_of(codes: Integers, code: Tensor) -> Tensor:
    """Return the number of each code among rising codes, or how many there are where it is none of them."""
    known = as_tensor(codes).to(code.device)
    number = torch.searchsorted(known, code).clamp_(max=len(codes) - 1)
    return torch.where(known[number] == code, number, len(codes))


def _table(numbers: Integers, row: Integers, column: Integers, device: torch.device) -> Tensor:
    """Return the numbers of these rows and columns."""
    table, of_row, of_column = (as_tensor(each).to(device) for each in (numbers, row, column))
    return table[of_row][:, of_column]


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
    if coordinates.dtype.kind in "iu" and np.abs(coordinates.astype(float)).max() < 2**62:
        return coordinates.astype(np.int64), 0.0
    coordinates, eps = coordinates.astype(np.float64), max(_epsilon(given), float(np.finfo(float).eps))
    largest = float(np.abs(coordinates).max())
    if not largest < 1e150:  # squares must be finite
        raise ValueError(f"{name} must be finite; first tokens without a place are counted by before=")
    exact = largest <= 2 / eps and bool((coordinates == coordinates.round()).all())
    return coordinates, 0.0 if exact else 8 * eps * largest


def _epsilon(given: Any) -> float:
    """Return the rounding of floating-point numbers, in a list of the coarsest; 0 for other numbers."""
    if isinstance(given, list | tuple):
        return max(map(_epsilon, given))
    if hasattr(given, "detach"):
        return float(torch.finfo(given.dtype).eps) if given.is_floating_point() else 0.0
    dtype = np.asarray(given).dtype
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0


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


def _levels(values: Floats, tolerance: float) -> tuple[Floats, Integers]:
    """Return the different values, rising, and which of them each value is.

    Values that differ by at most the tolerance are one level. Where they follow each other so closely that a level
    would be wider than twice that, it is cut.
    """
    different, index = np.unique(values, return_inverse=True)
    if tolerance > 0 and len(different) > 1:
        run = np.concatenate([[0], np.cumsum(np.diff(different) > tolerance)])  # values that follow closely are a run
        start = different[np.unique(run, return_index=True)[1]][run]
        piece = np.where(different - start > 2 * tolerance, (different - start) // tolerance, 0)
        level = np.concatenate([[0], np.cumsum((np.diff(run) > 0) | (np.diff(piece) > 0))])
        different, index = different[np.unique(level, return_index=True)[1]], level[index]
    return different, index
