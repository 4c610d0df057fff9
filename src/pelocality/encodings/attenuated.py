"""The attenuated encoding of the paper, with adjustable locality and symmetry."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, Self

import numpy as np
import torch
from torch import Tensor, nn

from pelocality._checks import check_choice, count
from pelocality._toeplitz import row_sums, toeplitz
from pelocality.encodings._checks import PerHead, per_head, positive
from pelocality.encodings._scores import masked_softmax
from pelocality.encodings.base import check_lengths
from pelocality.encodings.base_relative import RelativeEncoding, ScoreModification, inherits

Form = Literal["weights", "logits"]
_Arguments = ParamSpec("_Arguments")

_LEARNABLE = {"decay": "log_decay", "symmetry": "log_symmetry", "scale": "free_scale"}  # argument: parameter


def _named_in_words(init: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Refuse the paper's symbols as arguments, and say what they are called here."""

    @functools.wraps(init)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> None:
        for symbol, name in {"w": "decay", "s": "symmetry"}.items():
            if symbol in options:
                raise TypeError(f"the paper's {symbol} is {name}=, got {symbol}={options[symbol]!r}")
        init(*args, **options)

    return checked


def _argument(name: str, doc: str) -> property:
    """Return a property that reads an argument with one number per head, and assigns it."""

    def read(encoding: "AttenuatedEncoding") -> Tensor:
        return encoding._value(name).expand(encoding.heads)

    def assign(encoding: "AttenuatedEncoding", value: PerHead) -> None:
        encoding._assign(name, value)

    return property(read, assign, doc=doc)


class AttenuatedEncoding(RelativeEncoding):
    """Positional attention that decays with the square of distance, with adjustable locality and symmetry.

        e_ij = exp(-w (i - j)^2)    j <  i
        e_ij = exp(-s w (i - j)^2)  j >= i
        delta_ij = e_ij / sum_j e_ij,  over the visible keys of query i

    This is the Attenuated Encoding of Chen, Varoquaux and Suchanek (Findings of EMNLP 2023). `weights` returns delta.
    The sum leaves out padding, while the authors' code includes padding.

    There are two forms of the bias. The published form, ``"weights"``, is delta itself: a number between 0 and 1, and
    so a weak bias. Our form, ``"logits"``, is log e, whose softmax is delta. The table is for attention with equal
    content logits, at n = 512, w = 0.5, s = 1:

    | | locality | largest weight / smallest weight, query in the middle |
    |---|---|---|
    | no bias | 0.0058 | 1 |
    | ``form="weights"`` | 0.0074 | 1.49 |
    | ``form="weights", scale=10`` | 0.1146 | 54 |
    | ``form="logits"`` | 0.6695 | beyond float64 |

    Args:
        heads: H. An encoding with one head can serve a layer with several.
        decay: The paper's w, above 0, a number or one per head: larger is more local.
        symmetry: The paper's s, above 0, a number or one per head. 1 is symmetric, below 1 the future gets more weight,
            above 1 the past.
        form: Form of the bias.
        learnable: True: decay and symmetry are learned, one each per head. Or the names of the learned arguments, from
            ``"decay"``, ``"symmetry"`` and ``"scale"``. The first two are learned as logarithms (``log_decay``,
            ``log_symmetry``), so they stay positive.
        scale: Factor of the bias, a number or one per head. In the logits form this is equivalent to a factor of decay.
        causal: Whether the future gets -inf, and delta is normalised over the past alone.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: Decay or symmetry not above 0, not one number per head, an unknown form or name; or, with
            ``causal``, a symmetry other than 1: it would change only the masked future.

    Note:
        The symmetry metric of the paper is not monotone in s. Report `direction_balance` too, and use `from_targets` to
        get a given locality and balance. Exclude ``log_decay`` and ``log_symmetry`` from weight decay, which pulls
        both arguments to 1. In the weights form, `relative` is log e, not the bias; see `interior_bias`.

    Examples:
        >>> AttenuatedEncoding(decay=0.5, symmetry=0.2).weights(3)
        tensor([[[0.3883, 0.3514, 0.2603],
                 [0.2415, 0.3982, 0.3603],
                 [0.0777, 0.3482, 0.5741]]])
    """

    _per_head = ("decay", "symmetry", "scale")

    @_named_in_words
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
        check_choice("form", form, ("weights", "logits"))
        self.form = form
        names = _names(learnable, causal)
        self.learnable = bool(learnable) if isinstance(learnable, bool | np.bool_) else names
        self._learned = frozenset(names)
        for name, value in (("decay", decay), ("symmetry", symmetry), ("scale", scale)):
            self._assign(name, value)

    def _value(self, name: str) -> Tensor:
        """Return the current value of an argument, (1,) or (heads,)."""
        learned = name in self._learned
        # read as an attribute: in DataParallel and FSDP a parameter is not in _parameters
        stored: Tensor = getattr(self, _LEARNABLE[name] if learned else f"fixed_{name}")
        stored = stored.to(self.working_dtype)
        return positive(stored) if learned and name != "scale" else stored

    def _assign(self, name: str, value: PerHead) -> None:
        """Set an argument: a parameter if it is learned, which goes on from these numbers, or else a buffer."""
        numbers = per_head(name, value, self.heads, positive=name != "scale")
        if name == "symmetry" and self.causal and (name in self._learned or bool((numbers != 1).any())):
            raise ValueError("with causal=True, symmetry must be 1 and not learned, as the right side is hidden")
        if name not in self._learned:
            self.register_buffer(f"fixed_{name}", self._constant(numbers))
            return
        free = self._constant(numbers if name == "scale" else numbers.log()).expand(self.heads)
        if hasattr(self, _LEARNABLE[name]):
            with torch.no_grad():
                getattr(self, _LEARNABLE[name]).copy_(free)
        else:
            self.register_parameter(_LEARNABLE[name], nn.Parameter(free.clone()))

    decay = _argument("decay", "The paper's w, (heads,); it can be assigned.")
    symmetry = _argument("symmetry", "The paper's s, (heads,); it can be assigned.")
    scale = _argument("scale", "The factor of the bias, (heads,); it can be assigned.")

    @property
    def is_toeplitz(self) -> bool:  # noqa: D102
        return self.form == "logits" and inherits(self, "bias", AttenuatedEncoding)

    @property
    def future_only(self) -> str | None:  # noqa: D102
        leans = "symmetry" in self._learned or bool((self.symmetry != 1).any())
        return "symmetry" if leans else None

    def at(self, distance: Tensor) -> Tensor:
        """Return log e at signed distances, in the logits form multiplied by the scale.

        Args:
            distance: k = j - i, any shape.

        Returns:
            (heads or 1, *shape of the distances), whose softmax is delta.
        """
        trailing = (-1, *(1,) * distance.ndim)
        w, s = self._value("decay").view(trailing), self._value("symmetry").view(trailing)
        # clamped to finite numbers: infinity times a distance or scale of 0 would be NaN
        most = torch.finfo(self.working_dtype).max
        kernel = (-torch.where(distance < 0, w, (s * w).clamp(max=most)) * distance.square()).clamp(min=-most)
        return (self._value("scale").view(trailing) * kernel).clamp(-most, most) if self.form == "logits" else kernel

    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:  # noqa: D102
        if self.form == "logits":
            return super().bias(query_length, key_length, mask)
        if mask is None:
            e, factor = self._unnormalised(query_length, key_length)
            bias = toeplitz(e, query_length) * factor[..., None]
        else:
            delta = masked_softmax(self._weight_logits(query_length, key_length, mask), mask)
            bias = self._value("scale").view(-1, 1, 1) * delta
        if not self.causal:
            return bias
        future = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(key_length - query_length + 1)
        return bias.masked_fill(future, -torch.inf)

    _weight_logits = RelativeEncoding.bias  # in both forms

    def _unnormalised(self, query_length: int, key_length: int) -> tuple[Tensor, Tensor]:
        """Return e by distance, (heads or 1, q + k - 1), and its factor in each row, (heads or 1, q)."""
        e = self.by_distance(query_length, key_length).exp()
        return e, self._value("scale")[:, None] / row_sums(e, query_length)

    def interior_bias(self, length: int) -> Tensor:  # noqa: D102
        kernel = self.relative(length)
        if self.form == "logits":
            return kernel
        bias = self._value("scale")[:, None] * kernel.softmax(-1)
        return torch.where(kernel == -torch.inf, -torch.inf, bias) if self.causal else bias

    def score_modification(self, query_length: int, key_length: int | None = None) -> ScoreModification:
        """Return the ``score_mod`` of FlexAttention, as `RelativeEncoding.score_modification` describes.

        The form ``"weights"`` is normalised over all ``key_length`` keys, padding included. Use texts of one length, or
        ``form="logits"``.
        """
        if self.form == "logits":
            return super().score_modification(query_length, key_length)
        _, keys = check_lengths(query_length, key_length)
        e, rows = (each.expand(self.heads, -1) for each in self._unnormalised(query_length, keys))

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
        """Find the decay and symmetry that give a locality and direction balance.

            Loc(delta) = locality,  balance(delta) = direction_balance,  delta of `length` positions

        Both targets determine decay and symmetry uniquely. The symmetry metric cannot be a target: it is not monotone
        in s, and several encodings have the same value.

        Args:
            locality: `locality` of ``weights(length)``, a number or one per head.
            direction_balance: `direction_balance` of ``weights(length)``, a number or one per head: 0 is symmetric,
                below 0 has more weight on the left, above 0 on the right. Leave it out for a causal encoding.
            length: Number of positions. The targets hold for this length only.
            heads: H; with several targets, the number of targets. None: the number of targets.
            form: As for the class; both forms have the same delta.
            learnable: As for the class.
            scale: As for the class; in the logits form the decay is divided by it.
            causal: As for the class.

        Returns:
            The encoding.

        Raises:
            TypeError: A target that is not a number.
            ValueError: The number of targets is not heads, or the targets cannot be reached; the message names the
                range of locality that can.

        Examples:
            >>> from pelocality.metrics import locality, direction_balance
            >>> encoding = AttenuatedEncoding.from_targets(locality=0.4, direction_balance=-0.3, length=128)
            >>> encoding.decay, encoding.symmetry
            (tensor([0.0543]), tensor([2.8668]))
            >>> locality(encoding.weights(128)), direction_balance(encoding.weights(128))
            (tensor([0.4000]), tensor([-0.3000]))
        """
        from pelocality.encodings._from_targets import decay_and_symmetry

        localities = per_head("locality", locality, heads, positive=False)
        balances = per_head("direction_balance", direction_balance, heads, positive=False)
        heads = max(len(localities), len(balances)) if heads is None else count("heads", heads)
        n = count("length", length, least=2)
        targets = zip(localities.expand(heads).tolist(), balances.expand(heads).tolist(), strict=True)
        decay, symmetry = zip(*(decay_and_symmetry(a, b, n, causal) for a, b in targets), strict=True)
        scales = per_head("scale", scale, heads, positive=form == "logits")  # another sign would change delta
        w = torch.tensor(decay, dtype=torch.float64, device="cpu") / (scales if form == "logits" else 1)
        return cls(heads, w, symmetry, form, learnable, scale, causal)


def _names(learnable: bool | Sequence[str], causal: bool) -> tuple[str, ...]:
    """Return the names of the learned arguments."""
    if isinstance(learnable, bool | np.bool_):
        return () if not learnable else ("decay",) if causal else ("decay", "symmetry")
    names = (learnable,) if isinstance(learnable, str) else tuple(learnable)
    for name in names:
        check_choice("learnable", name, _LEARNABLE)
    return names
