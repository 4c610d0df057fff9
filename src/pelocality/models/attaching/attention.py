"""Where an encoding acts: on queries, keys and mask wherever a module computes self-attention.

Biases, rotations and biases computed from content are applied by one mode. Keys are rotated before they enter a cache.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pelocality._checks import HIDDEN
from pelocality.encodings import ContentEncoding, RotaryEncoding
from pelocality.encodings.attention_function import without_matrix
from pelocality.models._weights import loaded
from pelocality.models.attaching.calls import no_continuous_batching
from pelocality.models.observer import (
    BATCHED,
    SOFTMAXES,
    is_self_attention,
    kernel_call,
    kernel_weights,
    module_call,
    module_visible,
    observers,
    unobserved,
)

_LOGSUMEXP = (torch.logsumexp, Tensor.logsumexp)  # Granite scales its output by this for its sinks
_OUTPUT = "output"  # in the place of arguments: what a function of torch returns with the encoding
_KERNEL, _MODULE = functional.scaled_dot_product_attention, functional.multi_head_attention_forward


class Encoded(TorchFunctionMode):
    """Applies an encoding to every self-attention that is computed in a with-statement.

    Args:
        attached: The `Attached` of the module that runs. Its ``note`` is called with a function that computes the
            weights without a bias, (..., n, n or more columns for added keys), and the visible keys.
    """

    def __init__(self, attached: Any) -> None:
        super().__init__()
        self.attached, self.encoding, place = attached, attached.encoding, attached.place
        self.heads, self._parts = place.heads // place.parts, itertools.cycle(range(place.parts))  # of one attention
        self.by_content = isinstance(self.encoding, ContentEncoding)
        self.rotates = isinstance(self.encoding, RotaryEncoding)
        self.seen: list[tuple[int, int]] = []
        """Queries and keys of each attention, with the encoding or without."""
        self.encoded: list[tuple[int, int]] = []
        """Queries and keys of each attention that got the encoding."""
        self.cache: Any = None  # the cache that the module was given
        self.past: Any = None  # the number of tokens before the first query, None without a cache
        self.before: Any = None  # the number of keys before the key of the first query, None without a cache
        self.position_ids: Tensor | None = None  # (batch or 1, n, maybe axis), of which a rotation takes the angles
        self._angles_of_ids: Any = None
        self._turned = 0  # of these, those of earlier attentions in the call, which may be of one image after the other
        self._keys_are_rotated = False
        # how the arguments of functions of torch are changed
        self._changes: dict[Any, Callable[..., Any]] = {_KERNEL: self._change_kernel, _MODULE: self._change_module}
        self._changes |= dict.fromkeys((*SOFTMAXES, *_LOGSUMEXP), self._change_softmax)
        if self.by_content:
            self._changes |= dict.fromkeys(BATCHED, self._change_product)
        self._step = "queries and keys"  # what the next product of attention in steps is of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (change := self._changes.get(func)) is None:
            return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            args, kwargs = change(func, args, kwargs or {})
        else:
            with unobserved():
                args, kwargs = change(func, args, kwargs or {})
        return kwargs[_OUTPUT] if _OUTPUT in kwargs else func(*args, **kwargs)

    def check(self, name: str, hidden: Tensor | None) -> None:
        """Refuse a forward pass of an attention module of this class without attention over its tokens.

        Args:
            name: The class.
            hidden: The states that the module was given, None for any module, which may add tokens of its own.

        Raises:
            ValueError: No attention was seen, or attention over other keys than the tokens and those before them.
        """
        others = [] if hidden is None else [each for each in self.encoded if each[0] not in hidden.shape]
        own = self.attached.record is None
        if own and self.rotates and len(self.encoded) < sum(keys >= queries for queries, keys in self.seen):
            reason = "by einsum or in another order than product, softmax, product"
            raise ValueError(f"{name} computes attention {reason}, where no rotation of queries and keys is applied")
        if self._turned:
            raise ValueError(f"{name} attends over {self._turned} tokens beside those that it is given angles for")
        if not self.seen:
            raise ValueError(f"an encoding is attached to {name}, which computes no attention that torch shows")
        if others or not (self.encoded or hidden is None):
            shown = " and ".join(f"{q} queries and {k} keys" for q, k in dict.fromkeys(others or self.seen))
            reason = f"but {name} computes attention of {shown}; call the model without inputs that add other keys"
            raise ValueError(f"an attached encoding is for the tokens of a text and those before them, {reason}")

    # ---- queries, keys and mask

    def rotate_before_cache(self, key: Tensor, past: Any) -> Tensor:
        """Return the keys of new tokens (batch, heads, n, d) as they enter a cache.

        A cache may hold something else than keys, such as the latent vectors of DeepSeek-V2; keys that are made from
        these are rotated by each attention.
        """
        self.past = past
        if not self.rotates or key.shape[-1] != self.attached.place.key_size:
            return key
        self._keys_are_rotated = True
        with torch._C.DisableTorchFunction():  # the mode has nothing to change here
            return self._rotate(key, past)

    def _rotate(self, states: Tensor, first: Any) -> Tensor:
        """Return queries or keys (batch, heads, n, d) rotated from the position of the first one on."""
        with loaded(self.encoding, [self.encoding]):
            rotated: Tensor = self.encoding.rotate(states, *self._angles(first, states))
        return rotated

    def _angles(self, first: Any, states: Tensor) -> Any:
        """Return cosines and sines for tokens at their position ids, or from a first position on."""
        ids, n = self.position_ids, states.shape[-2]
        # counted positions of text have a table; on other devices comparing would make the host wait
        by_table = not self.attached.place.waves and states.device.type == "cpu" and not torch.compiler.is_compiling()
        counted = self.encoding.text_places(torch.arange(n, device="cpu") + first) if by_table else None
        if ids is None or (counted is not None and torch.equal(ids, counted.expand_as(ids))):
            return self.encoding.angles_from(first, n, states.device)
        if self._angles_of_ids is None:  # queries and keys have the same, (batch, heads, n, d / 2)
            if n > ids.shape[1]:  # tokens before those of an image do not turn
                ids = self.position_ids = functional.pad(ids, (0, 0, n - ids.shape[1], 0))
            angles = self.encoding.angles(ids.flatten(0, 1))
            by_head = (each.unflatten(1, ids.shape[:2]).transpose(0, 1) for each in angles)
            self._angles_of_ids = tuple(by_head)
        return tuple(each[..., self._turned : self._turned + n, :] for each in self._angles_of_ids)

    def _rotated(self, query: Tensor, key: Tensor, before: Any) -> tuple[Tensor, Tensor]:
        """Return queries (batch, heads, q, d) and keys, rotated unless these were when they entered the cache."""
        self.encoded.append((query.shape[-2], key.shape[-2]))
        if key.shape[1] % self.encoding.heads:
            raise ValueError(f"encoding has {self.encoding.heads} heads, but attention has keys of {key.shape[1]}")
        if self._keys_are_rotated:
            return self._rotate(query, self.past), key
        if query.shape[-2] != key.shape[-2]:  # the position ids of earlier keys are not known
            if self.encoding.axes > 1:
                raise ValueError("coordinates of earlier keys are not known; call the model without a cache")
            self.position_ids = None
        rotated = self._rotate(query, before), self._rotate(key, 0)
        if self.position_ids is not None:
            self._turned = (self._turned + query.shape[-2]) % self.position_ids.shape[1]
        return rotated

    def _keys_before(self, queries: int, slots: int, visible: Tensor | None) -> Any:
        """Return the number of keys before the key of the first query: a static cache has room for later ones."""
        if self.before is not None:
            return self.before
        if visible is None or slots == queries:
            return slots - queries
        return int(visible[..., -1, :].nonzero()[:, -1].max()) + 1 - queries  # keys of an earlier layer's cache

    def _bias(
        self,
        queries: int,
        slots: int,
        dtype: torch.dtype,
        visible: Tensor | None,
        added: Tensor | None = None,
        content: tuple[Tensor, Tensor, float | None] | None = None,
    ) -> Any:
        """Return what is added to logits, or the visible keys, (batch or 1, heads or 1, query, slot).

        Args:
            queries: The number of queries.
            slots: The number of keys that attention is given, some of which may come after the last query.
            dtype: That of the logits.
            visible: (..., query or 1, slot), or None where all are.
            added: Further logits, (..., query or 1, slot).
            content: Queries and keys, (batch, heads, q, d) each, and the factor of their products, for CoPE.
        """
        self.encoded.append((queries, slots))

        head = next(self._parts)

        def bias_of(keys: int, visible: Tensor | None, added: Tensor | None) -> Any:
            with loaded(self.encoding, [self.encoding]):
                if content is None:
                    bias = self.encoding.additive_mask(queries, keys, mask=visible, dtype=dtype, added=added)
                    every = self.attached.place.parts > 1 < bias.ndim and bias.shape[-3] > 1
                    return bias[..., head : head + 1, :, :] if every else bias
                query, key, scale = content
                inputs = self.encoding.attention_inputs(query, key[:, :, :keys], mask=visible, added=added, scale=scale)
                return inputs[2]

        before = self._keys_before(queries, slots, visible)
        if isinstance(before, Tensor) and not (self.by_content or self.attached.by_distance):
            before = int(before)
        if not isinstance(before, Tensor):
            keys = before + queries
            cut = (each if each is None or keys == slots else each[..., :keys] for each in (visible, added))
            bias = bias_of(keys, *cut)
            bias = functional.pad(bias, (0, slots - keys), value=False if bias.dtype == torch.bool else -torch.inf)
            return bias[(None,) * (4 - bias.ndim)]
        # reading the number would make the host wait for the device
        slot = torch.arange(slots, device=before.device)
        visible = slot < before + queries if visible is None else visible
        if self.by_content:  # CoPE counts the visible keys alone
            return bias_of(slots, visible, added)
        # keys are counted from the last query, whose key comes last in this order
        order, back = ((slot + shift) % slots for shift in (before + queries, -before - queries))
        bias = bias_of(slots, visible[..., order], None if added is None else added[..., order])[..., back]
        return bias[(None,) * (4 - bias.ndim)]

    def _without_future(self, visible: Tensor) -> Tensor:
        """Return visible keys (..., query, key) without later ones, where these have no weight by a weak float mask."""
        queries, slots = visible.shape[-2:]
        if self.attached.record is not None or not self.attached.place.causal or queries != slots:
            return visible
        return visible & torch.ones(queries, slots, dtype=torch.bool, device=visible.device).tril()

    # ---- torch's kernel

    def _change_kernel(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Apply the encoding to the arguments of torch's kernel."""
        call = kernel_call(args, kwargs)
        given, key, mask = call["query"], call["key"], call.get("attn_mask")  # (batch, group, head, n, d) too
        batch = len(given) if given.ndim > 3 else len(given) // self.heads
        # heads may stand where texts do, or, of one query that shares its key with other heads, where queries do
        query = given.reshape(batch, self.heads, -1, given.shape[-1])
        key = key.reshape(batch, -1, *key.shape[-2:])
        queries, slots = query.shape[2], key.shape[2]
        self.seen.append((queries, slots))
        self.attached.key_size = key.shape[-1]
        if slots < queries:  # attention to others than the tokens
            return (), call
        if (output := self._without_matrix(call)) is not None:
            return (), {_OUTPUT: output}
        if call.get("is_causal"):
            mask = torch.ones(queries, slots, dtype=torch.bool, device=query.device).tril()
        if mask is not None and given.ndim > 4:
            mask = mask.expand(*given.shape[:-2], *mask.shape[-2:]).flatten(1, -3)
        if self.attached.note is not None:
            by_head = {"query": query, "key": key} if given.ndim > 4 else {}
            without = call | by_head | {"attn_mask": mask, "is_causal": False}
            self.attached.note(lambda: kernel_weights(without))
        if mask is not None:
            mask = mask.reshape(-1, self.heads, queries, slots) if self._by_head(mask, given) else mask
            mask = mask[(None,) * (4 - mask.ndim)]
        added = None if mask is None or mask.dtype == torch.bool else mask
        visible = mask if added is None else self._without_future(added > HIDDEN)
        if self.rotates:
            query, key = self._rotated(query, key, self._keys_before(queries, slots, visible))
            return (), call | {"query": query.reshape(given.shape), "key": key.reshape(call["key"].shape)}
        content = None
        if self.by_content:  # heads of queries may share a key
            content = query, key.repeat_interleave(self.heads // key.shape[1], 1), call.get("scale")
        bias = self._bias(queries, slots, query.dtype, visible, added, content)
        if bias.dtype != torch.bool and added is not None:
            bias = bias.clamp(min=least(query))
        if given.ndim != 4 or given.shape[1] < self.heads:
            bias = bias.expand(batch if given.ndim == 3 else -1, self.heads, -1, -1)
            texts = len(given) if given.ndim == 3 else len(bias)
            bias = bias.reshape(texts, *given.shape[1:-1], slots)
        return (), call | {"attn_mask": bias, "is_causal": False}

    def _without_matrix(self, call: dict[str, Any]) -> Tensor | None:
        """Return the output of a call of torch's kernel with the encoding, or None where this needs the matrix."""
        query, key, mask = call["query"], call["key"], call.get("attn_mask")
        if torch.compiler.is_compiling() or self.attached.note is not None or observers():
            return None
        by_head = query.ndim == 4 and query.shape[1] == self.heads == self.attached.place.heads
        if not by_head or query.shape[2] != key.shape[2] or call.get("dropout_p"):
            return None
        if mask is not None and (mask.dtype != torch.bool or mask.ndim < 4):
            return None
        with loaded(self.encoding, [self.encoding]):
            options = mask, call.get("scale"), bool(call.get("is_causal"))
            output = without_matrix(query, key, call["value"], self.encoding, *options)
        if output is not None:
            self.encoded.append((query.shape[2], key.shape[2]))
        return output

    def _by_head(self, mask: Tensor, query: Tensor) -> bool:
        """Return whether the heads of a mask stand in the axis of texts, or in that of the one query."""
        if query.ndim == 3:
            return mask.ndim == 3 and len(mask) > 1
        return query.shape[1] < self.heads and mask.ndim == 4 and mask.shape[2] > 1

    # ---- the function behind nn.MultiheadAttention

    def _change_module(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Put the bias into the mask of the function behind `nn.MultiheadAttention`."""
        call = module_call(args, kwargs)
        query, mask, padding = call["query"], call.get("attn_mask"), call.get("key_padding_mask")  # True hides
        self.seen.append((len(query), len(call["key"])))
        if not is_self_attention(call):
            return (), call
        self._refuse_content("nn.MultiheadAttention, which projects inside torch")
        n, heads, batch = len(query), call["num_heads"], query.shape[1] if query.ndim == 3 else 1
        visible = self._without_future(module_visible(call))
        if padding is not None and padding.dtype == torch.bool:
            call["key_padding_mask"] = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, -torch.inf)
        if self.attached.note is not None:
            without = call | {"need_weights": True, "average_attn_weights": False}
            self.attached.note(lambda: (func(**without)[1], visible))
        added = None
        if mask is not None and mask.is_floating_point():
            added = mask.reshape(-1, heads if mask.ndim == 3 else 1, n, n)
        bias = self._bias(n, n, query.dtype, visible, added)
        return (), call | {"attn_mask": bias.expand(batch, heads, -1, -1).flatten(0, 1), "is_causal": False}

    # ---- attention in steps: a product, a softmax

    def _change_product(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Rotate queries (..., q, d) and keys (..., d, k) in their first product."""
        names = [name for name in ("batch1", "batch2") if name in kwargs]
        query, key = [*args, *(kwargs[name] for name in names)][-2:]
        matrices = min(query.ndim, key.ndim) > 2 and query.shape[-1] == key.shape[-2]
        if self._step != "queries and keys" or not matrices or query.shape[:-2].numel() % self.heads:
            self._step = "queries and keys" if self._step == "values" else self._step
            return args, kwargs
        if not self.rotates:
            self._refuse_content("attention in steps; call model.set_attn_implementation('sdpa')")
        self._step = "nothing before the softmax"
        self.attached.key_size = query.shape[-1]
        if self.cache is not None and self.before is None and self.cache.is_compileable:
            advice = "call model.set_attn_implementation('sdpa')"
            raise ValueError(f"keys of an earlier layer in a static cache are not rotated in steps; {advice}")
        if self.attached.place.sink and self.attached.record is None and key.shape[-1] > query.shape[-2]:
            raise ValueError("a key that is no token's has no position, so a rotation cannot be attached; use a bias")
        pair, heads = (query, key), (-1, self.heads)
        by_head = [each.flatten(1, -3) if each.ndim > 3 else each.unflatten(0, heads) for each in pair]
        before = self._keys_before(query.shape[-2], key.shape[-1], None)
        rotated, encoded = self._rotated(by_head[0], by_head[1].mT, before)
        product = rotated.reshape(query.shape), encoded.mT.reshape(key.shape)
        if names:
            return args, kwargs | dict(zip(names, product, strict=True))
        return (*args[:-2], *product), kwargs

    def _change_softmax(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Add the bias to logits over keys, perhaps with the column of a sink; leave others as they are."""
        logits, others = (args[0], args[1:]) if args else (kwargs["input"], ())
        kwargs = {name: each for name, each in kwargs.items() if name != "input"}
        as_they_are = (logits, *others), kwargs
        sinks, first = int(self.attached.place.sink), self.attached.place.first
        if logits.ndim < 3:
            return as_they_are
        queries, slots = logits.shape[-2], logits.shape[-1] - sinks
        self.seen.append((queries, slots))
        if slots < queries:
            return as_they_are
        split = logits if logits.ndim == 4 else logits.reshape(-1, self.heads, *logits.shape[-2:])
        own, noted = split[..., first : first + slots], self.attached.note is not None and func in SOFTMAXES
        if self.by_content and not noted:
            self._step = "values"
            return as_they_are
        largest = own.detach().amax(-1, keepdim=True)
        visible = self._without_future(own > largest + HIDDEN)
        if noted:
            self.attached.note(lambda: (split.softmax(-1), visible & (largest > HIDDEN)))
        bias = self._bias(queries, slots, logits.dtype, visible)
        biased = (own + bias).clamp(min=least(logits))
        biased = torch.cat([split[..., :first], biased, split[..., first + slots :]], -1) if sinks else biased
        return (biased.reshape(logits.shape), *others), kwargs

    def _refuse_content(self, where: str) -> None:
        if self.by_content:
            raise ValueError(f"{type(self.encoding).__name__} acts on queries and keys, and is not applied in {where}")


class CachedKeys:
    """A cache of transformers as an attention module with an encoding sees it.

    Args:
        cache: The cache, or the two caches of an encoder-decoder model.
        mode: The mode that runs, which is told how many tokens came before, and rotates keys as they enter the cache.
    """

    def __init__(self, cache: Any, mode: Encoded) -> None:
        self._cache, self._mode = getattr(cache, "self_attention_cache", cache), mode
        if not hasattr(self._cache, "get_mask_sizes"):
            no_continuous_batching()
        mode.cache = self._cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Cache the keys and values of new tokens, and return those of all."""
        past = self._cache.get_seq_length(layer_idx)
        past = past.clone() if isinstance(past, Tensor) else past  # a static cache adds to it in place
        rotated = self._mode.rotate_before_cache(key_states, past)
        keys, values = self._cache.update(rotated, value_states, layer_idx, *args, **kwargs)
        # a cache of a window holds its last keys alone
        self._mode.before = past if isinstance(past, Tensor) else min(past, keys.shape[-2] - key_states.shape[-2])
        return keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def least(states: Tensor) -> float:
    """Return the number that hides a key: finite in every dtype that attention may cast its logits to.

    The softmax of a row of -inf alone would be NaN.
    """
    device = states.device.type
    dtypes = [states.dtype, torch.float32]  # many families take the softmax of float64 in float32
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).min for dtype in dtypes)
