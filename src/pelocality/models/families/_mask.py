"""How a bias is added to the logits of most families: through the mask, which the attention module adds to them."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pelocality._checks import HIDDEN
from pelocality.models._calls import changes_call, hidden_argument

Bias = Callable[..., Tensor]
"""The method `pelocality.models._bias.PositionalBias.bias` of an attached encoding."""

_CACHES = ("cache", "past_key_values", "layer_past")  # the first since transformers 5.24


def add_to_mask(attention: Any, bias: Bias, call: dict[str, Any], mask_argument: str) -> None:
    """Replace the mask in a call by the bias plus the mask."""
    hidden: Tensor = call[hidden_argument(attention)]  # (batch, n, d)
    mask: Tensor | None = call.get(mask_argument)
    queries = hidden.shape[1]
    if mask is not None and mask.shape == hidden.shape[:-1] and mask.ndim == 2:
        raise ValueError(
            f"{type(attention).__name__} takes a mask of its tokens, not of queries and keys, so that a bias cannot be "
            "added to it"
        )
    keys, slots = _keys(attention, call, queries, mask)
    if slots < keys or (slots > keys and _cache(call) is None):
        raise ValueError(
            f"an attached encoding has biases for {queries} tokens and {keys - queries} before them, but the mask of "
            f"{type(attention).__name__} has {slots} keys; call the model without what adds other keys, "
            "or with use_cache=False"
        )
    if mask is None and _causal_without_mask(attention, call):
        # the kernel is not causal by itself once it is given a mask
        mask = torch.ones(queries, slots, dtype=torch.bool, device=hidden.device).tril(keys - queries)[None, None]
    visible, added = _visible_and_added(None if mask is None else mask[..., :keys])
    biased = bias(queries, keys, visible, hidden.dtype, added)
    if slots > keys:  # a static cache has room for later tokens
        biased = nn.functional.pad(biased, (0, slots - keys), value=-torch.inf)
    if mask is not None and not (mask.dtype == torch.bool and _runs_sdpa(attention)):
        # the softmax of a row of -inf alone would be NaN; SDPA gives zeros there, as for a row of False alone
        biased = biased.clamp(min=_least(hidden))
    call[mask_argument] = biased


def without_cache(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the cache of keys, which it has changed."""
    return call | {name: None for name in _CACHES if call.get(name) is not None}


def _cache(call: dict[str, Any]) -> Any:
    """Return the cache of keys in a call, or None."""
    return next((call[name] for name in _CACHES if call.get(name) is not None), None)


def _keys(attention: Any, call: dict[str, Any], queries: int, mask: Tensor | None) -> tuple[int, int]:
    """Return the number of keys up to the last query, and the number of slots for keys in the cache."""
    cache = _cache(call)
    if cache is not None and not hasattr(cache, "get_mask_sizes"):  # of continuous batching
        no_continuous_batching()
    slots = None if mask is None else mask.shape[-1]
    shared = call["shared_kv_states"] if getattr(attention, "is_kv_shared_layer", False) else None
    if shared and getattr(attention, "layer_type", None) in shared:  # the keys of an earlier layer, which cached them
        stored = shared[attention.layer_type][0].shape[-2]
        return stored if cache is None else min(stored, int(cache.get_seq_length())), slots or stored
    if cache is None:
        return queries, slots or queries
    # Zamba's modules serve several layers, and GPT-Neo's have another name for it
    layer: Any = call["layer_idx"] if "layer_idx" in call else getattr(attention, "layer_idx", None)
    layer = getattr(attention, "layer_id", None) if layer is None else layer
    # HRM-Text and Dory run layers several times, each time with another layer of the cache
    offset = call.get("cycle_offset") or call.get("cache_offset") or 0
    try:
        layer = layer + offset if offset else layer
        past = int(cache.get_seq_length(layer))  # a tensor in a static cache
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{type(attention).__name__} does not say which layer of the cache it reads, so the attached encoding "
            "cannot be added to its logits; call the model with use_cache=False"
        ) from error
    longest, first = cache.get_mask_sizes(queries, layer)
    return past + queries - int(first), slots or longest


def no_continuous_batching() -> NoReturn:
    """Raise the error of an attached model for continuous batching."""
    raise ValueError(
        "continuous batching (generate_batch) packs several prompts into one row, where an attached encoding would "
        "give wrong distances; call model.generate with padded prompts"
    )


def _visible_and_added(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return which keys a mask leaves visible, and the numbers that it adds to their logits."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise TypeError(
            "attention_mask of four axes must be boolean, True where a query sees a key, or a float that is added to "
            f"the logits, got {mask.dtype}; pass attention_mask.bool()"
        )
    return mask > HIDDEN, mask


def _causal_without_mask(attention: Any, call: dict[str, Any]) -> bool:
    """Return whether the kernel hides the future without a mask, decided as in transformers."""
    if not _runs_sdpa(attention):  # eager hides only what a mask hides
        return False
    asked = call.get("is_causal")
    return bool(getattr(attention, "is_causal", True) if asked is None else asked)


def _runs_sdpa(attention: Any) -> bool:
    config = getattr(attention, "config", None)  # where there is none (BLOOM), attention is eager
    return config is not None and config._attn_implementation == "sdpa"


def _least(hidden: Tensor) -> float:
    """Return the number that hides a key: finite in every dtype that attention may cast its logits to."""
    device = hidden.device.type
    dtypes = [hidden.dtype, torch.float32]  # many families take the softmax in float32, of float64 too
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).min for dtype in dtypes)


@changes_call
def without_bias(indexer: Any, call: dict[str, Any]) -> None:
    """Take the bias out of the mask that an indexer is given (a hook): it adds the mask to the scores of its own.

    An indexer selects the keys of each query, as in DeepSeek V3.2, and gets the mask of the attention module around it.
    """
    mask = call.get("attention_mask")
    if mask is not None and mask.is_floating_point():
        least = _least(mask)
        call["attention_mask"] = torch.zeros_like(mask).masked_fill(mask <= least, least)
