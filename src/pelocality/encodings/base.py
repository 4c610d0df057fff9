"""The base class of all encodings: the interface that metrics, layers and models use."""

import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from pelocality._checks import count, described, flag
from pelocality._configuration import Configurable
from pelocality.encodings._scores import masked_softmax

_HALF = (torch.float16, torch.bfloat16)


class Encoding(Configurable, nn.Module, ABC):
    """Base class of positional encodings: a module whose call returns the bias that attention adds to its logits.

        attention = softmax(q k^T / sqrt(d) + bias)

    A subclass implements `bias`. Each call builds the bias anew, with gradients. Positions and constants are float32 or
    wider, whatever the model's precision. Only the finished bias is cast.

    Args:
        heads: H. An encoding with one head can serve a layer with several heads, which then share it.
        causal: Whether keys after the query are masked with -inf.

    Note:
        A subclass must store each argument of its constructor as an attribute of the same name, as scikit-learn's
        estimators do; `configuration` reads them.
    """

    # arguments that are one number or one per head; the fixed ones are buffers, fixed_ before their name
    _per_head: tuple[str, ...] = ()

    def __init__(self, heads: int = 1, causal: bool = False) -> None:
        super().__init__()
        self.heads = count("heads", heads)
        self.causal = flag("causal", causal)
        self._like: Tensor
        # an empty tensor that records the dtype and device of the module
        self.register_buffer("_like", torch.empty(0), persistent=False)

    @property
    def depends_on_mask(self) -> bool:
        """Whether the bias depends on the mask, as one that is normalised over the visible keys does.

        Otherwise `forward` passes no mask to `bias`, and one tensor serves every batch.
        """
        return True

    @property
    def future_only(self) -> str | None:
        """Name of the argument that affects future keys only, or None; `attach` refuses it in a causal model."""
        return None

    @abstractmethod
    def bias(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:
        """Return the additive bias, in `working_dtype`.

        Args:
            query_length: q.
            key_length: k >= q; query i has position k - q + i.
            mask: (batch or 1, heads or 1, query or 1, key), True where a query sees a key; always None unless
                `depends_on_mask`.

        Returns:
            (heads or 1, query, key), or (batch, heads or 1, query, key) if it depends on the mask; -inf where
            attention must be zero.
        """

    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the bias that attention adds to its logits after they were divided by sqrt(d).

        Args:
            query_length: Number of queries, q.
            key_length: Number of keys, k >= q; None: q. The last query is at the position of the last key, so with
                k - q cached keys the bias is the last q rows of the square one.
            mask: Nonzero where a key is visible: (batch, key) as a tokenizer's ``attention_mask``, (batch, query, key)
                or (batch, heads, query, key). Hidden keys do not get -inf here (attention masks them); they are only
                excluded from normalisation over keys.
            dtype: Dtype of the result; None: the module's.

        Returns:
            (heads, query, key), or (batch, heads, query, key) if it depends on the mask; on the module's device. If the
            mask differs between heads, the bias of an encoding with one head has the mask's number of heads.

        Raises:
            TypeError: A length that is not an integer, a mask of floats, or a dtype that is not floating-point.
            ValueError: A length below 1, more queries than keys, or a mask of the wrong shape.
        """
        return self._expand_heads(self._one_bias(query_length, key_length, mask, dtype))

    def weights(self, length: int, *, mask: Tensor | None = None) -> Tensor:
        """Return the positional attention of the encoding: attention whose content logits are all equal.

            A = softmax(bias)

        Args:
            length: Number of positions, n.
            mask: As for `forward`; hidden keys get 0, and rows are normalised over the visible ones.

        Returns:
            (heads, n, n), or (batch, heads, n, n) with a mask; float32 or wider; each row sums to 1, or is 0 if it is
            fully masked.

        Raises:
            TypeError: A length that is not an integer.
            ValueError: A length below 1, or the mask has the wrong shape.
        """
        visible = self._checked_mask(mask, count("length", length), length)
        logits = self._weight_logits(length, length, visible).to(self.working_dtype)
        return self._expand_heads(masked_softmax(logits, visible))

    def relative(self, length: int) -> Tensor:
        """Return the logits by distance whose softmax is `weights`, if the encoding is a function of distance.

        Not always the bias that attention adds: that of the paper's published form is their softmax.

            A_ij = softmax_j b[j - i],  j = 0..n-1

        Args:
            length: Number of positions, n.

        Returns:
            b[k] for k = -(n-1)..n-1, (heads, 2n - 1), as `measure_relative` takes it; -inf where a distance is masked;
            float32 or wider.

        Raises:
            TypeError: The encoding depends on more than distance.
        """
        raise TypeError(f"{type(self).__name__} depends on more than distance; measure its weights(length)")

    @property
    def device(self) -> torch.device:
        """Device of the module, on which biases are built."""
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the module, to which `forward` casts the bias unless it is given another."""
        return self._like.dtype

    @property
    def working_dtype(self) -> torch.dtype:
        """Dtype in which biases are built: float32, or float64 after ``.double()``."""
        return torch.promote_types(self.dtype, torch.float32)

    def _constant(self, value: Tensor) -> Tensor:
        """Return an argument of the constructor in the dtype and on the device of the module."""
        return value.to(self.device, self.working_dtype, copy=True)

    def extra_repr(self) -> str:  # noqa: D102
        short = f"heads={self.heads!r}, causal={self.causal!r}"
        if any(hasattr(weight, "full_tensor") for weight in self.parameters()):
            return short  # sharded over processes, of which one alone may print
        try:
            arguments = self.configuration()
        except TypeError:  # printing a module must not fail
            return short
        shown = {name: getattr(self, name) if name == "positions" else each for name, each in arguments.items()}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if name != "type")

    def _weight_logits(self, query_length: int, key_length: int, mask: Tensor | None) -> Tensor:
        """Return the logits whose softmax over the visible keys is `weights`, (heads or 1, query, key)."""
        return self.bias(query_length, key_length, mask)

    def _one_bias(self, queries: int, keys: int | None, mask: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Return the bias of `forward`, with a single head if all heads are equal."""
        queries, keys = check_lengths(queries, keys)
        visible = self._checked_mask(mask, queries, keys)
        bias = self.bias(queries, keys, visible if self.depends_on_mask else None)
        return cast(bias.to(self.working_dtype), self.dtype if dtype is None else dtype)

    def additive_mask(
        self,
        query_length: int,
        key_length: int,
        *,
        mask: Tensor | None,
        dtype: torch.dtype,
        added: Tensor | None = None,
    ) -> Tensor:
        """Return the bias with -inf at hidden keys, as attention adds it to its logits.

        Args:
            query_length: q.
            key_length: k >= q.
            mask: (batch or 1, heads or 1, query or 1, key) of booleans, True where a query sees a key; None: all True.
            dtype: Dtype of the logits.
            added: Further logits to add, broadcastable to the shape of the mask.

        Returns:
            (heads or 1, query, key), or (batch or 1, heads or 1, query, key) with a mask. Rounded last, so that in half
            precision the largest visible bias of a query is exact.
        """
        exact = torch.promote_types(dtype, self.working_dtype)
        bias = self._one_bias(query_length, key_length, mask, exact)
        return cast(bias if added is None else bias + added, dtype, mask)

    def attention_inputs(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        added: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the queries, keys and mask with which attention applies the encoding.

            attention = softmax(scale q k^T + mask) V

        This encoding adds a bias; a `ContentEncoding` may rotate queries and keys, or compute a bias from them.

        Args:
            query: (batch, heads, q, d).
            key: (batch, heads, k, d), k >= q; the last query is at the position of the last key.
            mask: As for `additive_mask`.
            added: As for `additive_mask`.
            scale: Factor of the scores; None: 1 / sqrt(d).

        Returns:
            Queries and keys of the same shapes, and floats to add to the logits, or booleans, True where a query sees a
            key; None where all see all.
        """
        return query, key, self.additive_mask(query.shape[-2], key.shape[-2], mask=mask, dtype=query.dtype, added=added)

    def _expand_heads(self, scores: Tensor) -> Tensor:
        return scores.expand(*scores.shape[:-3], max(self.heads, scores.shape[-3]), -1, -1)

    def _checked_mask(self, mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
        """Return the user's mask as (batch or 1, heads or 1, query or 1, key) of booleans."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.is_floating_point():
            raise TypeError(f"mask must be a tensor of booleans or integers (0: hidden), got {described(mask)}")
        shape = tuple(mask.shape)
        while 2 <= mask.ndim < 4:
            mask = mask.unsqueeze(1)
        heads = mask.shape[1:2] if self.heads == 1 else (1, self.heads)
        if mask.ndim != 4 or mask.shape[1] not in heads or mask.shape[2] not in (1, queries) or mask.shape[3] != keys:
            wanted = f"(batch, [[head,] query,] key) with 1 or {self.heads} heads, {queries} queries and {keys} keys"
            raise ValueError(f"mask must be {wanted}, got shape {shape}")
        return mask if mask.dtype == torch.bool else mask != 0

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", {}).get(prefix[:-1])) is not None:
            metadata["arguments"] = self._choices()  # no tensor holds these arguments

    def _choices(self) -> dict[str, Any]:
        """Return the arguments that determine the bias of a state dict and are not in it."""
        arguments = inspect.signature(type(self)).parameters.keys() - {*self._per_head, "heads", "learnable"}
        values = {name: getattr(self, name, None) for name in sorted(arguments)}
        if "positions" in values:
            values["positions"] = zlib.crc32(repr(self.configuration()["positions"]).encode())
        return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        local_metadata, _, _, _, errors = options
        saved, own = local_metadata.get("arguments", {}), self._choices()
        errors += [
            f"{prefix[:-1] or type(self).__name__} has {name}={own[name]!r}, the state was saved with {name}={value!r};"
            " build the encoding with the same arguments"
            for name, value in saved.items()
            if name in own and own[name] != value
        ]
        for name in (f"fixed_{argument}" for argument in self._per_head):
            # the buffer takes the shape of the state: one number for all heads, or one per head
            here, saved_shape = self._buffers.get(name), getattr(state_dict.get(prefix + name), "shape", None)
            if here is not None and saved_shape in ((1,), (self.heads,)) and here.shape != saved_shape:
                self._buffers[name] = here.new_empty(saved_shape)
        super()._load_from_state_dict(state_dict, prefix, *options)
        if self._like.is_meta and options[0].get("assign_to_params_buffers"):
            # `_like` is not in the state, and goes to the device of the tensors in the state
            tensors = (each for key, each in state_dict.items() if key.startswith(prefix) and isinstance(each, Tensor))
            device = next((each.device for each in tensors), torch.get_default_device())
            self._like = torch.empty(0, dtype=self.dtype, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, after in self._buffers.items():
            exact = before[name]
            # constants keep their precision; only the finished bias is cast
            if name != "_like" and exact is not None and after is not None and after.dtype in _HALF:
                self._buffers[name] = exact.to(after.device)
        return self


def check_lengths(query_length: Any, key_length: int | None) -> tuple[int, int]:
    """Return the number of queries and of keys; as many keys as queries if None is given."""
    if isinstance(query_length, Tensor) and query_length.ndim > 1:
        raise TypeError("query_length must be a number of tokens; biased_attention takes queries, keys and values")
    queries = count("query_length", query_length)
    keys = queries if key_length is None else count("key_length", key_length)
    if keys < queries:
        raise ValueError(f"key_length must be at least query_length, got {keys} keys for {queries} queries")
    return queries, keys


def check_encoding(encoding: Any, heads: int) -> None:
    """Raise an error unless this is an encoding that a layer with so many heads can use."""
    if not isinstance(encoding, Encoding):
        raise TypeError(f"encoding must be a pelocality.encodings.Encoding, got {described(encoding)}")
    if encoding.heads not in (1, heads):
        raise ValueError(f"encoding must have 1 or {heads} heads, as the attention has, got {encoding.heads}")


def cast(bias: Tensor, dtype: torch.dtype, visible: Tensor | None = None) -> Tensor:
    """Return a bias in another precision, with nearly the same softmax and -inf at hidden keys.

    If the largest number of a row is so far from 0 that neighbouring numbers of the new dtype differ by 1/16 or more
    there, the row is shifted so that its largest number is 0: the softmax stays the same. Without visible keys, which
    may be known later, there is no new -inf. With them it is new only where the weight is 0.

    Args:
        bias: (..., query, key), in `working_dtype`.
        dtype: Dtype of the model.
        visible: Booleans that broadcast with the bias, True where a query sees a key; None: all True.

    Returns:
        (..., query, key).
    """
    if visible is not None:
        bias = torch.where(visible, bias, -torch.inf)
    narrow = torch.finfo(dtype)
    if narrow.eps > torch.finfo(bias.dtype).eps:
        largest = bias.detach().amax(-1, keepdim=True)
        far = (largest.abs() * narrow.eps > 1 / 16) & (largest != -torch.inf)
        bias = bias - torch.where(far, largest, 0)
        if visible is None:
            bias = torch.where(bias == -torch.inf, bias, bias.clamp(min=narrow.min))
    return bias.to(dtype)
