"""The keys of a call of an attention module, as the caches of transformers hold them."""

from typing import Any, NoReturn


def caches_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the caches among the arguments of a call, by the names that they have (the first since 5.24)."""
    names = ("cache", "past_key_values", "layer_past")
    return {name: call[name] for name in names if call.get(name) is not None}


def without_cache(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the cache of keys, which it has changed."""
    return call | dict.fromkeys(caches_of(call))


def no_continuous_batching() -> NoReturn:
    """Raise the error of an attached model for continuous batching."""
    raise ValueError(
        "continuous batching (generate_batch) packs several prompts into one row, where an attached encoding would "
        "give wrong distances; call model.generate with padded prompts"
    )
