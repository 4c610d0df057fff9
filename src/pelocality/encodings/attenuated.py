"""The paper's instrument: locality and symmetry turned by hand."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal, Self

import torch
from torch import Tensor, nn

from pelocality._checks import count
from pelocality.encodings._checks import PerHead, per_head, positive
from pelocality.encodings._scores import masked_softmax, toeplitz
from pelocality.encodings.relative import RelativeEncoding, ScoreModification, unchanged

Form = Literal["weights", "logits"]


class AttenuatedEncoding(RelativeEncoding):
    """Attention that falls off with the square of distance, as fast and as evenly as you say.

        e_ij = exp(-w (i - j)^2)    j <  i
        e_ij = exp(-s w (i - j)^2)  j >= i
        delta_ij = e_ij / sum_j e_ij,  over the keys that i sees

    the Attenuated Encoding of Chen, Varoquaux and Suchanek (Findings of EMNLP 2023); `weights` is delta. Padding takes
    no share, which in the authors' code it does.

    Two forms of it can be added to the logits. ``"weights"``, the published one, adds delta itself: a number between
    0 and 1, and so a weak bias. ``"logits"``, ours, adds log e, whose softmax is delta. What they make of attention
    whose content says nothing, at n = 512, w = 0.5, s = 1:

    | | locality | largest weight over smallest, of the token in the middle |
    |---|---|---|
    | no bias | 0.0058 | 1 |
    | ``form="weights"`` | 0.0074 | 1.49 |
    | ``form="weights", scale=10`` | 0.1146 | 54 |
    | ``form="logits"`` | 0.6695 | beyond float64 |

    Args:
        heads: H. One encoding of one head serves a layer of many.
        decay: The paper's w, above 0, a number or one per head: larger is more local.
        symmetry: The paper's s, above 0, a number or one per head: 1 is symmetric, below 1 leans right (to the
            future), above 1 leans left.
        form: What is added to the logits.
        learnable: True: decay and symmetry, each one per head. Or the names of what is learned, of ``"decay"``,
            ``"symmetry"`` and ``"scale"``. The first two are learned as logarithms (``log_decay``, ``log_symmetry``),
            so they stay positive.
        scale: What the bias is multiplied by, a number or one per head. In the logits form that is decay by another
            name.
        causal: Whether the future gets -inf, and delta is shared out over the past alone.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: Decay or symmetry not above 0, not one number per head, an unknown form or name; or, with
            ``causal``, a symmetry: there is no right side that it could change.

    Note:
        The published symmetry is not monotone in s: read it beside `direction_balance`, and use `from_targets` to get
        the locality and balance you want. In an optimiser, leave ``log_decay`` and ``log_symmetry`` out of weight
        decay, which would pull both to 1.

    Examples:
        >>> AttenuatedEncoding(decay=0.5, symmetry=0.2).weights(3)
        tensor([[[0.3883, 0.3514, 0.2603],
                 [0.2415, 0.3982, 0.3603],
                 [0.0777, 0.3482, 0.5741]]])
    """

    def __init__(
        self,
        heads: int = 1,
        decay: PerHead = 0.5,
        symmetry: PerHead = 1.0,
        form: Form = "weights",
        learnable: bool | Sequence[str] = False,
        scale: PerHead = 1.0,
        causal: bool = False,
    ) -> None:
        super().__init__(heads, causal)
        if form not in ("weights", "logits"):
            raise ValueError(f"form must be 'weights' or 'logits', got {form!r}")
        self.form = form
        self.learnable = learnable if isinstance(learnable, bool) else _names(learnable)
        if isinstance(self.learnable, bool):
            names: tuple[str, ...] = () if not self.learnable else ("decay",) if causal else ("decay", "symmetry")
        else:
            names = self.learnable
        self._learned = learned = frozenset(names)
        leaning = per_head("symmetry", symmetry, heads)
        if causal and (bool((leaning != 1).any()) or "symmetry" in learned):
            raise ValueError("a causal encoding has no right side: leave symmetry at 1 and do not learn it")
        self._hold("decay", per_head("decay", decay, heads), "decay" in learned)
        self._hold("symmetry", leaning, "symmetry" in learned)
        scale = per_head("scale", scale, heads, positive=False)
        if "scale" in learned:
            self.free_scale = nn.Parameter(self._working(scale.expand(heads)))
        else:
            self.register_buffer("fixed_scale", self._working(scale))

    def _hold(self, name: str, value: Tensor, learned: bool) -> None:
        if learned:
            self.register_parameter(f"log_{name}", nn.Parameter(self._working(value.log().expand(self.heads))))
        else:
            self.register_buffer(f"fixed_{name}", self._working(value))

    @property
    def decay(self) -> Tensor:
        """The paper's w, (heads,)."""
        return self._positive("decay").expand(self.heads)

    @property
    def symmetry(self) -> Tensor:
        """The paper's s, (heads,)."""
        return self._positive("symmetry").expand(self.heads)

    @property
    def scale(self) -> Tensor:
        """What the bias is multiplied by, (heads,)."""
        return self._scale().expand(self.heads)

    def _positive(self, name: str) -> Tensor:
        # read as an attribute: in DataParallel and FSDP a parameter is no entry of _parameters
        held: Tensor = getattr(self, f"log_{name}" if name in self._learned else f"fixed_{name}")
        held = held.to(self.working_dtype)
        return positive(held) if name in self._learned else held

    def _scale(self) -> Tensor:
        held: Tensor = self.free_scale if "scale" in self._learned else self.get_buffer("fixed_scale")
        return held.to(self.working_dtype)

    @property
    def distance_alone(self) -> bool:  # noqa: D102
        return self.form == "logits" and unchanged(self, "bias", AttenuatedEncoding)

    @property
    def future_only(self) -> str | None:  # noqa: D102
        leans = "symmetry" in self._learned or bool((self.symmetry != 1).any())
        return "symmetry" if leans else None

    def at(self, distance: Tensor) -> Tensor:
        """Return log e at signed distances; in the logits form times the scale.

        Args:
            distance: k = j - i, any shape.

        Returns:
            (heads or 1, *shape of the distances), of which delta is the softmax.
        """
        trailing = (-1, *(1,) * distance.ndim)
        w, s = self._positive("decay").view(trailing), self._positive("symmetry").view(trailing)
        # finite however steep: an infinity times a distance or a scale of 0 would be NaN
        most = torch.finfo(self.working_dtype).max
        kernel = (-torch.where(distance < 0, w, (s * w).clamp(max=most)) * distance.square()).clamp(min=-most)
        return (self._scale().view(trailing) * kernel).clamp(-most, most) if self.form == "logits" else kernel

    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:  # noqa: D102
        if self.form == "logits":
            return super().bias(query_length, key_length, mask)
        if mask is None:  # e and its row sums come from the line: fewer passes over (heads, n, n) than a softmax takes
            e, rows = self._shares(query_length, key_length)
            bias = toeplitz(e, query_length) * rows[..., None]
        else:
            bias = self._scale().view(-1, 1, 1) * masked_softmax(self._kernel(query_length, key_length, mask), mask)
        if not self.causal:
            return bias
        future = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(key_length - query_length + 1)
        return bias.masked_fill(future, -torch.inf)

    def _shares(self, query_length: int, key_length: int) -> tuple[Tensor, Tensor]:
        """Return e at all distances, and what those of each query are multiplied by."""
        e = self.by_distance(query_length, key_length).exp()
        return e, self._scale()[:, None] / _row_sums(e, query_length)

    def _kernel(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:
        return toeplitz(self.by_distance(query_length, key_length), query_length)

    def relative(self, n: int) -> Tensor:
        """Return log e at every distance, of which delta, `weights`, is the softmax; in the logits form times scale.

        Args:
            n: How many positions.

        Returns:
            b[k] for k = -(n-1)..n-1, the past first, (heads, 2n - 1); -inf in the future of a causal encoding. In the
            weights form this is not what is added to the logits: see `profile`.

        Raises:
            TypeError: n is no integer.
            ValueError: n is below 1.
        """
        return super().relative(n)

    def profile(self, n: int) -> Tensor:  # noqa: D102
        kernel = self.relative(n)
        if self.form == "logits":
            return kernel
        bias = self._scale()[:, None] * kernel.softmax(-1)
        return torch.where(kernel == -torch.inf, -torch.inf, bias) if self.causal else bias

    def score_modification(self, query_length: int, key_length: int | None = None) -> ScoreModification:  # noqa: D102
        added = super().score_modification(query_length, key_length)
        if self.form == "logits":
            return added
        keys = query_length if key_length is None else key_length
        e, rows = (each.expand(self.heads, -1) for each in self._shares(query_length, keys))

        def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance, row = key - query + query_length - 1, head * 0 if self.heads == 1 else head
            bias = e[row, distance] * rows[row, query]
            if self.causal:
                bias = torch.where(distance > keys - 1, -torch.inf, bias)
            return score + bias.to(score.dtype)

        return modify

    @classmethod
    def from_targets(
        cls,
        *,
        locality: float | Sequence[float],
        direction_balance: float | Sequence[float] = 0.0,
        length: int,
        heads: int | None = None,
        form: Form = "weights",
        learnable: bool | Sequence[str] = False,
        scale: PerHead = 1.0,
        causal: bool = False,
    ) -> Self:
        """Find the decay and symmetry that give a wanted locality and direction balance.

            Loc(delta) = locality,  balance(delta) = direction_balance,  delta of `length` positions

        Two numbers for two: for each lean there is one decay that gives the locality. The published symmetry is no
        target, because it is not monotone in s and one value of it belongs to several encodings.

        Args:
            locality: What `locality` shall read off ``weights(length)``, a number or one per head.
            direction_balance: What `direction_balance` shall read: 0 symmetric, below 0 leans left, above 0 right;
                a number or one per head. A causal encoding has none to choose.
            length: At how many positions. Another length gives other numbers.
            heads: H, as many as targets where those are several; None: as many as targets.
            form: As for the class; the targets are those of delta in both.
            learnable: As for the class.
            scale: As for the class; in the logits form the decay is divided by it.
            causal: As for the class.

        Returns:
            The encoding, found with scipy and measured with `measure_relative` before it is given out.

        Raises:
            TypeError: A target that is no number.
            ValueError: A number of targets that is not heads, or targets that no decay and symmetry reach, with the
                range that can be reached.

        Examples:
            >>> from pelocality.metrics import locality, direction_balance
            >>> encoding = AttenuatedEncoding.from_targets(locality=0.4, direction_balance=-0.3, length=128)
            >>> encoding.decay, encoding.symmetry
            (tensor([0.0543]), tensor([2.8668]))
            >>> locality(encoding.weights(128)), direction_balance(encoding.weights(128))
            (tensor([0.4000]), tensor([-0.3000]))
        """
        from pelocality.encodings.inverse import solve

        decay, symmetry = solve(locality, direction_balance, length, causal)
        if heads is None:
            heads = len(decay)
        elif len(decay) not in (1, count("heads", heads)):
            raise ValueError(f"locality and direction_balance must be one for each of {heads} heads, got {len(decay)}")
        scales = per_head("scale", scale, heads, positive=form == "logits")  # only a positive one leaves delta alone
        return cls(
            heads=heads,
            decay=torch.tensor(decay, dtype=torch.float64, device="cpu") / (scales if form == "logits" else 1),
            symmetry=symmetry,
            form=form,
            learnable=learnable,
            scale=scale,
            causal=causal,
        )


def _names(learnable: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(learnable, (str, Sequence, Set)):
        raise TypeError(f"learnable must be True, False or names of 'decay', 'symmetry', 'scale', got {learnable!r}")
    names = (learnable,) if isinstance(learnable, str) else tuple(learnable)
    unknown = [name for name in names if name not in ("decay", "symmetry", "scale")]
    if unknown:
        raise ValueError(f"learnable must be True, False or names of 'decay', 'symmetry', 'scale', got {unknown[0]!r}")
    return names


def _row_sums(e: Tensor, query_length: int) -> Tensor:
    """Return sum_j e_ij of every query, (heads or 1, query), from running sums outward from distance 0."""
    key_length = e.shape[-1] - query_length + 1
    past = e[:, :key_length].flip(-1).cumsum(-1)  # index m: distances -m..0
    future = torch.nn.functional.pad(e[:, key_length:], (1, 0)).cumsum(-1)  # distances 1..m
    position = torch.arange(key_length - query_length, key_length, device=e.device)
    return past[:, position] + future[:, key_length - 1 - position]
