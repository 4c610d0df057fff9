"""Where a bias enters: the logits of every self-attention that a module computes while it runs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pelocality._checks import HIDDEN
from pelocality.models.families import Keys
from pelocality.models.observer import (
    MASKED,
    SOFTMAXES,
    is_self_attention,
    kernel_call,
    kernel_weights,
    module_call,
    module_visible,
    unobserved,
)

_LOGSUMEXP = (torch.logsumexp, Tensor.logsumexp)  # Granite scales its output by this for its sinks
_ATTENTION = (
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
    *SOFTMAXES,
    *_LOGSUMEXP,
)


class Biased(TorchFunctionMode):
    """Adds the bias of an encoding to the logits of every self-attention, before their softmax.

    Args:
        bias: The `PositionalBias` of an attention module. Its ``note`` is called with a function that computes the
            weights before the bias is added, (..., n, n or more columns for added keys), and the visible keys.
        expected: The keys of this call of a transformers model, as its caches have them. None: queries and keys are
            of the same tokens, and attention to fewer keys is left as it is.
    """

    def __init__(self, bias: Any, expected: Keys | None) -> None:
        super().__init__()
        self.bias, self.note, self.expected = bias, bias.note, expected
        self.added = 0
        """The number of attentions that got the bias."""
        self.seen: list[tuple[int, int]] = []
        """Queries and keys of each attention, with the bias or without."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ATTENTION:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            args, kwargs = self._biased(func, args, kwargs)
        else:
            with unobserved():
                args, kwargs = self._biased(func, args, kwargs)
        return func(*args, **kwargs)

    def _biased(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a function of attention with the bias."""
        if func is functional.scaled_dot_product_attention:
            return (), self._of_kernel(kernel_call(args, kwargs))
        if func is functional.multi_head_attention_forward:
            return (), self._of_module(func, module_call(args, kwargs))
        logits, others = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
        return (self._of_softmax(logits, note=func in SOFTMAXES), *others), kwargs

    def check(self, name: str) -> None:
        """Refuse a forward pass of an attention module of this class that added no bias.

        Raises:
            ValueError: No attention was seen, or attention over other keys than the tokens and those before them.
        """
        if self.added or (self.expected is None and self.seen):  # a module may attend to other tokens in some calls
            return
        wanted = "its tokens"
        if self.expected is not None:
            queries, keys = self.expected[:2]
            wanted = f"{queries} tokens and {keys - queries} before them"
        if not self.seen:
            seen = "no call of torch's kernel, and no softmax over keys"
            raise ValueError(f"an encoding is attached to {name}, which computes no attention that torch shows: {seen}")
        found = " and ".join(f"{queries} queries and {slots} keys" for queries, slots in dict.fromkeys(self.seen))
        raise ValueError(
            f"an attached encoding has biases for {wanted}, but {name} computes attention of {found}; call the model "
            "without inputs that add other keys, or with use_cache=False"
        )

    # ---- torch's kernel

    def _of_kernel(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of torch's kernel with the bias in its mask."""
        query, mask = call["query"], call.get("attn_mask")
        groups = self._heads_among_queries(query)
        queries, slots = query.shape[-2] // groups, call["key"].shape[-2]
        self.seen.append((queries, slots))
        if (keys := self._keys(queries, slots)) is None:
            return call
        if call.get("is_causal"):
            mask = torch.ones(queries, slots, dtype=torch.bool, device=query.device).tril()
        if self.note is not None:
            self.note(lambda: kernel_weights(call | {"attn_mask": mask, "is_causal": False}))
        added = None if mask is None or mask.dtype == torch.bool else self._by_head(mask, groups)
        visible = None if mask is None else self._by_head(mask if mask.dtype == torch.bool else mask > HIDDEN, groups)
        biased = self._bias(queries, keys, slots, visible, query.dtype, added)
        if added is not None:
            biased = biased.clamp(min=_least(query))
        if groups > 1:
            biased = biased.expand(-1, query.shape[-3] * groups, -1, -1).reshape(len(biased), -1, groups, slots)
        if query.ndim == 3:  # batch and heads in one axis
            biased = biased.expand(len(query) // self.bias.heads, self.bias.heads, -1, -1).flatten(0, 1)
        return call | {"attn_mask": biased, "is_causal": False}

    def _heads_among_queries(self, query: Tensor) -> int:
        """Return how many heads of one query stand where queries stand, as transformers has them for shared keys."""
        packed = self.expected is not None and self.expected.queries == 1 < query.shape[-2]
        return query.shape[-2] if packed and query.shape[-3] * query.shape[-2] == self.bias.heads else 1

    def _by_head(self, mask: Tensor, groups: int) -> Tensor:
        """Return a mask as (batch or 1, heads or 1, query or 1, key)."""
        if groups > 1 and mask.shape[-2] == groups:
            return mask.reshape(len(mask), -1, 1, mask.shape[-1])
        if mask.ndim == 3 and len(mask) % self.bias.heads == 0 and len(mask) > 1:
            return mask.reshape(-1, self.bias.heads, *mask.shape[1:])
        return mask[(None,) * (4 - mask.ndim)]

    # ---- the function behind nn.MultiheadAttention

    def _of_module(self, function: Any, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the function behind `nn.MultiheadAttention` with the bias in its mask."""
        query, mask, padding = call["query"], call.get("attn_mask"), call.get("key_padding_mask")  # True hides
        self.seen.append((len(query), len(call["key"])))
        if not is_self_attention(call):
            return call
        n, heads, batch = len(query), call["num_heads"], query.shape[1] if query.ndim == 3 else 1
        visible = module_visible(call, HIDDEN)
        if padding is not None and padding.dtype == torch.bool:
            call["key_padding_mask"] = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, -torch.inf)
        if self.note is not None:
            wanted = {"need_weights": True, "average_attn_weights": False}
            self.note(lambda: (function(**call | wanted)[1], visible))
        added = None
        if mask is not None and mask.is_floating_point():
            added = mask.reshape(-1, heads if mask.ndim == 3 else 1, n, n)
        biased = self._bias(n, n, n, visible, query.dtype, added)
        return call | {"attn_mask": biased.expand(batch, heads, -1, -1).flatten(0, 1), "is_causal": False}

    # ---- a softmax

    def _of_softmax(self, logits: Tensor, *, note: bool) -> Tensor:
        """Return logits over keys, perhaps with the column of a sink, plus the bias; others as they are."""
        if logits.ndim < 3:
            return logits
        queries, columns = logits.shape[-2:]
        self.seen.append((queries, columns))
        sink = self.bias.sink if self.expected is None else columns - self.expected.slots == 1
        slots = columns - sink
        keys = self._keys(queries, slots)
        if keys is None or (self.expected is None and keys > queries > 1):
            return logits
        split = logits if logits.ndim > 3 else logits.reshape(-1, self.bias.heads, *logits.shape[1:])
        own = split[..., :slots]
        largest = own.detach().amax(-1, keepdim=True)
        if self.expected is None or self.expected.visible is None:
            visible = own > largest + HIDDEN
        else:  # a module may hide more keys itself, such as those that it has not selected
            visible = self.expected.visible & (own > largest + MASKED)
        if note and self.note is not None:
            self.note(lambda: (split.softmax(-1), visible & (largest > HIDDEN)))
        bias = self._bias(queries, keys, slots, visible, logits.dtype)
        biased = (own + bias).clamp(min=_least(logits))
        if sink:
            biased = torch.cat([biased, split[..., slots:]], -1)
        return biased.reshape(logits.shape)

    # ---- the bias

    def _keys(self, queries: int, slots: int) -> int | None:
        """Return the number of keys up to the last query; None for attention that gets no bias.

        Args:
            queries: The number of queries.
            slots: The number of keys, with room for later ones in a static cache.
        """
        if self.expected is None:
            return slots if slots >= queries else None
        if queries != self.expected.queries:
            return None
        if slots == queries:  # no cache, or an empty one
            return queries
        return self.expected.keys if slots == self.expected.slots >= self.expected.keys else None

    def _bias(
        self,
        queries: int,
        keys: int,
        slots: int,
        visible: Tensor | None,
        dtype: torch.dtype,
        added: Tensor | None = None,
    ) -> Tensor:
        """Return the bias plus ``added``, -inf where not ``visible``: (batch or 1, heads or 1, query, slot)."""
        self.added += 1
        if slots > keys:
            visible, added = (each if each is None else each[..., :keys] for each in (visible, added))
        biased: Tensor = self.bias.bias(queries, keys, visible, dtype, added)
        return biased if slots == keys else nn.functional.pad(biased, (0, slots - keys), value=-torch.inf)


def _least(states: Tensor) -> float:
    """Return the number that hides a key: finite in every dtype that attention may cast its logits to.

    The softmax of a row of -inf alone would be NaN.
    """
    device = states.device.type
    dtypes = [states.dtype, torch.float32]  # many families take the softmax of float64 in float32
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).min for dtype in dtypes)
