"""The protocol that every encoding keeps, so that metrics, layers and models take any of them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from pelocality._checks import count, flag
from pelocality.encodings._cache import BiasCache
from pelocality.encodings._checks import plain
from pelocality.encodings._scores import masked_softmax

_HALF = (torch.float16, torch.bfloat16)


class Encoding(nn.Module, ABC):
    """What every encoding is: a module whose call gives the bias that attention adds to its logits.

        attention = softmax(q k^T / sqrt(d) + bias)

    A subclass says what the bias is in `bias`; this class does the rest. The last bias of an
    encoding without parameters is kept and reused; with parameters it is built at every call, with gradients. Positions
    and numbers are float32 at least, whatever the model's precision, and only the finished bias is cast.

    Args:
        heads: H. An encoding of one head serves a layer of many: all of them share it.
        causal: Whether a query sees no key after its own: those get -inf.

    Note:
        A subclass keeps each argument of its constructor as an attribute of the same name, as scikit-learn's
        estimators do; `configuration` reads them.
    """

    def __init__(self, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = count("heads", heads)
        self.causal = flag("causal", causal)
        self._cache = BiasCache()
        self._like: Tensor
        # holds nothing but the dtype and device that the module was moved to
        self.register_buffer("_like", torch.empty(0), persistent=False)

    @property
    def shares_out(self) -> bool:
        """Whether the bias depends on which keys are there, as something shared out among them does.

        Where it does not, `forward` hands no mask to `bias`, and one tensor serves every batch.
        """
        return True

    @property
    def future_only(self) -> str | None:
        """The argument that acts on the future alone, or None; `attach` refuses it where the future is hidden."""
        return None

    @abstractmethod
    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:
        """Return the additive bias, in `working_dtype`.

        Args:
            query_length: q.
            key_length: k >= q; query i stands at position k - q + i.
            mask: (batch or 1, heads or 1, query or 1, key), True where a query sees a key; ignored where nothing
                is shared out among the keys.

        Returns:
            (heads or 1, query, key), or (batch, heads or 1, query, key) where the mask changes it. -inf where no
            attention may go.
        """

    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the bias that attention adds to its logits, after they were divided by sqrt(d).

        Args:
            query_length: How many queries, q.
            key_length: How many keys, k >= q; None: as many as queries. The last query stands at the last key, so with
                k - q cached keys the biases are the last q rows of the square ones.
            mask: Which keys are there, nonzero where one is: (batch, key) as a tokenizer's ``attention_mask``, or
                (batch, query, key), or (batch, heads, query, key) where it differs. Padding does not get -inf here
                (masking is attention's work), it only takes no share of what is shared out.
            dtype: Of the answer; None: the module's own.

        Returns:
            (heads, query, key), or (batch, heads, query, key) where the mask changes it; on the module's device. Do
            not write into it: equal encodings share it. A mask that tells heads apart gives an encoding of one head
            as many as the mask has.

        Raises:
            TypeError: A length that is no integer, a mask of floats, or a dtype that is no float.
            ValueError: A length below 1, more queries than keys, or a mask that does not fit.
        """
        return self._every_head(self.distinct(query_length, key_length, mask=mask, dtype=dtype))

    def weights(self, n: int, *, mask: Tensor | None = None) -> Tensor:
        """Return the attention that the encoding stands for: what its bias gives where content says nothing.

            A = softmax(bias)

        Args:
            n: How many positions.
            mask: As for `forward`; keys that are not there get 0, and the rows are shared out among the others.

        Returns:
            (heads, n, n), or (batch, heads, n, n) with a mask; float32 at least; each row sums to 1, or is 0 where a
            query sees nothing.

        Raises:
            TypeError: A length that is no integer.
            ValueError: A length below 1, or a mask that does not fit.
        """
        visible = self._visible(mask, count("n", n), n)
        return self._every_head(masked_softmax(self._kernel(n, n, visible).to(self.working_dtype), visible))

    def relative(self, n: int) -> Tensor:
        """Return the bias at every distance, of which `weights` are the softmax, where distance alone decides.

            A_ij = softmax_j b[j - i],  j = 0..n-1

        Args:
            n: How many positions.

        Returns:
            b[k] for k = -(n-1)..n-1, the past first, (heads, 2n - 1), as `measure_relative` takes it; -inf where a
            distance is masked; float32 at least.

        Raises:
            TypeError: The encoding depends on more than distance.
        """
        raise TypeError(f"{type(self).__name__} depends on more than distance; measure its weights(n)")

    def configuration(self) -> dict[str, Any]:
        """Return what `from_configuration` makes an equal encoding of, as JSON can hold it.

        Returns:
            ``{"type": ..., argument: value, ...}``. Numbers that were learned are in the ``state_dict`` (and, rounded
            to their precision, here where they are arguments). An encoding that was an argument stands there with
            its own configuration.

        Raises:
            TypeError: An argument of the constructor is not kept as an attribute of its name.
        """
        names = inspect.signature(type(self)).parameters
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise TypeError(f"{type(self).__name__} must keep its argument '{missing[0]}' as an attribute of that name")
        return {"type": type(self).__name__, **{name: _written(getattr(self, name)) for name in names}}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Self:
        """Make an encoding from its configuration.

        Args:
            configuration: What `configuration` returned. An encoding of your own is found once its class is imported.

        Returns:
            The encoding.

        Raises:
            ValueError: No such type.
        """
        arguments = dict(configuration)
        name = arguments.pop("type", None)
        known = {kind.__name__: kind for kind in (cls, *_descendants(cls)) if not inspect.isabstract(kind)}
        if name not in known:
            raise ValueError(f"encoding type {name!r} is not known; known: {', '.join(sorted(known))}")
        found: type[Self] = known[name]  # type: ignore[assignment]  # one of its subclasses
        return found(**{name: _read(value) for name, value in arguments.items()})

    @property
    def working_dtype(self) -> torch.dtype:
        """The precision biases are built in: float32, or float64 after ``.double()``."""
        return torch.promote_types(self._like.dtype, torch.float32)

    def _working(self, value: Tensor) -> Tensor:
        """A number of the constructor as the module holds it."""
        return value.to(self._like.device, self.working_dtype, copy=True)

    def extra_repr(self) -> str:  # noqa: D102
        try:
            named = {name: value for name, value in self.configuration().items() if name != "type"}
        except TypeError:  # printing a module must not fail
            return f"heads={self.heads!r}, causal={self.causal!r}"
        return ", ".join(f"{name}={value!r}" for name, value in named.items())

    def _kernel(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:
        """Logits whose softmax over the visible keys is `weights`, (heads or 1, query, key)."""
        return self.bias(query_length, key_length, mask)

    def distinct(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return what `forward` does, with one head where all heads are alike, so that a mask is added to it once.

        Args:
            query_length: As for `forward`, and so the rest.
            key_length: See there.
            mask: See there.
            dtype: See there.

        Returns:
            (heads or 1, query, key), or (batch, heads or 1, query, key) where the mask changes it.

        Raises:
            TypeError: As for `forward`.
            ValueError: As for `forward`.
        """
        queries = count("query_length", query_length)
        keys = queries if key_length is None else count("key_length", key_length)
        if keys < queries:
            raise ValueError(f"key_length must be at least query_length, got {keys} keys for {queries} queries")
        dtype = self._like.dtype if dtype is None else dtype
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
        visible = self._visible(mask, queries, keys)
        if not self.shares_out:
            visible = None

        def build() -> Tensor:
            return cast(self.bias(queries, keys, visible).to(self.working_dtype), dtype)

        # a mask may change from call to call; a compiler folds what is fixed by itself
        if visible is not None or torch.compiler.is_compiling():
            return build()
        return self._cache.get(self, (queries, keys, dtype, self._like.device), build)

    def additive_mask(
        self,
        query_length: int,
        key_length: int,
        *,
        mask: Tensor | None,
        dtype: torch.dtype,
        added: Tensor | None = None,
    ) -> Tensor:
        """Return what attention adds to its logits: the bias, and -inf where a key is hidden.

        Args:
            query_length: q.
            key_length: k >= q.
            mask: (batch or 1, heads or 1, query or 1, key) of booleans, True where a query sees a key; None: it sees
                all.
            dtype: Of the logits.
            added: What is added to them beside the bias, of the same shape.

        Returns:
            (heads or 1, query, key), or (batch or 1, heads or 1, query, key) with a mask. Rounded last, so that in half
            precision the largest bias that a query sees is exact.
        """
        if mask is None and added is None:
            return self.distinct(query_length, key_length, dtype=dtype)
        exact = torch.promote_types(dtype, self.working_dtype)
        bias = self.distinct(query_length, key_length, mask=mask, dtype=exact)
        bias = bias if added is None else bias + added
        return cast(bias if mask is None else torch.where(mask, bias, -torch.inf), dtype)

    def _every_head(self, scores: Tensor) -> Tensor:
        return scores.expand(*scores.shape[:-3], max(self.heads, scores.shape[-3]), -1, -1)

    def _visible(self, mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
        visible = _visible(mask, queries, keys)
        if visible is not None and self.heads > 1 and visible.shape[1] not in (1, self.heads):
            raise ValueError(f"mask must have 1 head or the encoding's {self.heads}, got {visible.shape[1]}")
        return visible

    def _numbers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._buffers.items() if name != "_like" and buffer is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = self._numbers()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in exact:
            after = self._buffers[name]
            if after is not None and after.dtype in _HALF:  # numbers keep their precision, the finished bias is cast
                self._buffers[name] = before.to(after.device)
        return self


def _visible(mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
    """The user's mask as (batch or 1, heads or 1, query or 1, key) of booleans."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.is_floating_point():
        kind = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a tensor of booleans or integers, nonzero where a key is there, got {kind}")
    shapes = {2: (slice(None), None, None), 3: (slice(None), None)}
    if mask.ndim not in (2, 3, 4) or mask.shape[-1] != keys or (mask.ndim > 2 and mask.shape[-2] not in (1, queries)):
        raise ValueError(
            f"mask must be (batch, key), (batch, query, key) or (batch, heads, query, key) with {queries} queries and "
            f"{keys} keys, got shape {tuple(mask.shape)}"
        )
    shaped = mask[shapes.get(mask.ndim, ())]
    return shaped if shaped.dtype == torch.bool else shaped != 0


def _written(value: Any) -> Any:
    """An argument as JSON can hold it, encodings among them."""
    if isinstance(value, Encoding):
        return value.configuration()
    return [_written(each) for each in value] if isinstance(value, (list, tuple)) else plain(value)


def _read(value: Any) -> Any:
    """Undo `_written`."""
    if isinstance(value, dict) and "type" in value:
        return Encoding.from_configuration(value)
    return [_read(each) for each in value] if isinstance(value, list) else value


def cast(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a finished bias, so that its softmax is that of the exact one.

    Args:
        bias: (..., query, key), in `working_dtype`.
        dtype: Of the model.

    Returns:
        The bias in that precision, with nothing masked that was not. Where it is coarser and the largest bias of a row
        so far from 0 that neighbouring numbers there differ by more than 1/16, the row is shifted to have 0 as its
        largest: a softmax does not see that, and what is far below is rounded instead.
    """
    narrow = torch.finfo(dtype)
    if narrow.eps > torch.finfo(bias.dtype).eps:
        largest = bias.detach().amax(-1, keepdim=True)
        far = (largest.abs() * narrow.eps > 1 / 16) & (largest != -torch.inf)
        bias = bias - torch.where(far, largest, 0)
        bias = torch.where(bias == -torch.inf, bias, bias.clamp(min=narrow.min))
    return bias.to(dtype)


def _descendants(kind: type[Encoding]) -> list[type[Encoding]]:
    return [found for child in kind.__subclasses__() for found in (child, *_descendants(child))]
