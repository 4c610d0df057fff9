"""The keys of a call of an attention module, as the caches of transformers hold them."""

from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from pelocality._checks import HIDDEN

_CACHES = ("cache", "past_key_values", "layer_past")  # the first since transformers 5.24


class Keys(NamedTuple):
    """The keys of a call of an attention module.

    Attributes:
        queries: The number of queries.
        keys: The number of keys up to the last query.
        slots: The number of keys that attention is given: a static cache has room for later tokens.
        visible: The slots that each query may attend to, (batch or 1, heads or 1, query or 1, slot), None if the mask
            is not an argument of the module.
    """

    queries: int
    keys: int
    slots: int
    visible: Tensor | None


def without_cache(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the cache of keys, which it has changed."""
    return call | {name: None for name in _CACHES if call.get(name) is not None}


def cached_keys(attention: Any, call: dict[str, Any], queries: int, mask: Any) -> Keys:
    """Return the keys of a call of an attention module with a mask of four axes; others are not looked at."""
    visible = None
    if isinstance(mask, Tensor) and mask.ndim == 4:
        visible = mask > HIDDEN if mask.is_floating_point() else mask.bool()
    cache = next((call[name] for name in _CACHES if call.get(name) is not None), None)
    if cache is not None and not hasattr(cache, "get_mask_sizes"):  # a cache of continuous batching
        no_continuous_batching()
    slots = None if visible is None else visible.shape[-1]
    shared = call["shared_kv_states"] if getattr(attention, "is_kv_shared_layer", False) else None
    if shared and getattr(attention, "layer_type", None) in shared:  # the keys of an earlier layer, which cached them
        stored = shared[attention.layer_type][0].shape[-2]
        keys = stored if cache is None else min(stored, int(cache.get_seq_length()))
        return Keys(queries, keys, slots or stored, visible)
    if cache is None:
        return Keys(queries, queries, queries, visible)
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
    return Keys(queries, past + queries - int(first), slots or longest, visible)


def no_continuous_batching() -> NoReturn:
    """Raise the error of an attached model for continuous batching."""
    raise ValueError(
        "continuous batching (generate_batch) packs several prompts into one row, where an attached encoding would "
        "give wrong distances; call model.generate with padded prompts"
    )
