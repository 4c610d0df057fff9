"""An encoding at work inside one attention module of somebody else's model."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.encodings import Encoding
from pelocality.encodings._scores import HIDDEN
from pelocality.models._calls import Arguments, Call
from pelocality.models._offloading import loaded
from pelocality.models._restore import unhook
from pelocality.models.families._record import ATTACHED, Architecture

_XLNET_MASKED = 1e30  # what XLNet multiplies its mask by before it subtracts it from the logits


class PositionalBias(nn.Module):
    """A copy of an encoding as a submodule of an attention module, with what is needed to add it there.

    The hook that adds it is a plain function that finds this module through the attention module it is called with.
    So a model that is copied or pickled takes its biases along, and nothing outside the model knows of them.

    Args:
        encoding: The encoding; it is not copied here.
        record: Of the model's family.
        attention: The attention module.
        silent: Whether the model's own positions are silenced.
        implementation: The model's attention implementation, for `load`.
    """

    def __init__(
        self,
        encoding: Encoding,
        record: Architecture,
        attention: nn.Module,
        *,
        silent: bool,
        implementation: str | None,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.silent = silent
        self.implementation = implementation
        self.arguments = Arguments.of(attention)
        self.mask_argument = record.mask_argument
        self.position_argument = record.position_argument if silent else None
        self.score_method = record.score_method
        self.unheard = record.position_weights if silent else ()
        self.frozen: list[str] = []

    @property
    def configuration(self) -> dict[str, Any]:
        """What `load` needs to attach the encoding again, as JSON can hold it; the numbers are in the state dict."""
        with loaded(self.encoding):
            encoding = self.encoding.configuration()
        return {
            "encoding": encoding,
            "position_embeddings": "silence" if self.silent else "keep",
            "attn_implementation": self.implementation,
        }

    def get_extra_state(self) -> Tensor:
        """Return the configuration as it is now, its JSON in bytes: safetensors hold nothing but tensors."""
        try:
            return torch.tensor(list(json.dumps(self.configuration).encode()), dtype=torch.uint8, device="cpu")
        except TypeError as error:
            raise TypeError(
                f"{type(self.encoding).__name__} cannot be saved: its arguments must be numbers, strings, booleans, "
                f"None, tensors, encodings or lists of them, each kept as an attribute of its name ({error})"
            ) from error

    def set_extra_state(self, state: Tensor) -> None:
        """Change nothing: `check_state_dict` has compared the configurations, and the numbers are loaded as usual."""

    def install(self, attention: nn.Module) -> None:
        """Enter an attention module."""
        attention.add_module(ATTACHED, self)
        for name in self.unheard:  # a gradient of zeros would still have an optimiser decay them
            weight = attention.get_parameter(name)
            if weight.requires_grad:
                self.frozen.append(name)
                weight.requires_grad_(False)
        if self.score_method is not None:
            hook = _pass_to_scores
        elif self.mask_argument == "attn_mask_h":
            hook = _add_to_subtracted_mask
        else:
            hook = _add_to_mask
        attention.register_forward_pre_hook(hook, with_kwargs=True)
        if self.score_method is not None:
            setattr(attention, self.score_method, functools.partial(_positional_scores, attention))

    def uninstall(self, attention: nn.Module) -> None:
        """Leave it again, without a trace."""
        if self.score_method is not None:
            attention.__dict__.pop(self.score_method, None)
        for name in self.frozen:
            attention.get_parameter(name).requires_grad_(True)
        unhook(attention, _add_to_mask, _add_to_subtracted_mask, _pass_to_scores)
        delattr(attention, ATTACHED)

    def of(self, queries: int, keys: int, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the bias, (batch or 1, heads or 1, query, key); ``visible`` says which keys are there."""
        with loaded(self.encoding):
            bias = self.encoding.unexpanded_bias(queries, keys, mask=visible, dtype=dtype)
        return bias if bias.ndim == 4 else bias[None]


def _add_to_mask(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Hand an attention module its mask with the bias added: what is added to the logits is one tensor to it."""
    own: PositionalBias = getattr(attention, ATTACHED)
    call = Call(own.arguments, args, kwargs)
    hidden: Tensor = call["hidden_states"]
    mask = _checked(call[own.mask_argument])
    queries = hidden.shape[1]
    keys, slots = _keys(attention, call, queries, mask)
    if mask is None and _causal_without_mask(attention, call):
        # the kernel forgets causality once there is a mask
        mask = torch.ones(queries, slots, dtype=torch.bool, device=hidden.device).tril(keys - queries)[None, None]
    visible = None
    if mask is not None and own.encoding.depends_on_mask:  # the others need not know, and this runs in every layer
        visible = (mask if mask.dtype == torch.bool else mask > HIDDEN)[..., :keys]
    bias = own.of(queries, keys, visible, hidden.dtype)
    if slots > keys:  # a static cache has room for what is still to come
        bias = nn.functional.pad(bias, (0, slots - keys))
    if mask is not None:
        least = _least(hidden)
        if mask.dtype == torch.bool:
            bias = torch.where(mask, bias, least)
        else:  # the bias of a distant key may be lower than the number that hides another
            bias = bias + mask.masked_fill(mask <= HIDDEN, -torch.inf)
        bias = bias.clamp(min=least)  # a row of nothing but -inf would be NaN
    call[own.mask_argument] = bias
    if own.position_argument is not None:
        call[own.position_argument] = torch.zeros_like(call[own.position_argument])
    return call.args, call.kwargs


def _add_to_subtracted_mask(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Do the same for XLNet, which subtracts 1e30 times a mask of (query, key, batch, head)."""
    own: PositionalBias = getattr(attention, ATTACHED)
    call = Call(own.arguments, args, kwargs)
    hidden: Tensor = call["h"]  # (query, batch, d)
    if hidden.dtype == torch.float16:
        raise ValueError("XLNet takes no bias in float16, whose numbers are too coarse for it; use bfloat16 or float32")
    memory = call["mems"]
    queries = len(hidden)
    keys = queries + (len(memory) if memory is not None and memory.ndim > 1 else 0)
    for name in ("attn_mask_h", "attn_mask_g") if call["g"] is not None else ("attn_mask_h",):
        mask = call[name]
        visible = None if mask is None else mask.permute(2, 3, 0, 1) == 0  # (batch, head or 1, query, key)
        bias = own.of(queries, keys, visible, hidden.dtype).clamp(min=-_XLNET_MASKED)
        subtracted = bias.permute(2, 3, 0, 1) / -_XLNET_MASKED
        call[name] = subtracted if mask is None else torch.where(mask > 0, mask, subtracted)
    if own.position_argument is not None:
        call[own.position_argument] = torch.zeros_like(call[own.position_argument])
    return call.args, call.kwargs


def _pass_to_scores(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Hand DeBERTa's score method the bias beside the distances, for its mask is yes or no and takes no numbers."""
    own: PositionalBias = getattr(attention, ATTACHED)
    call = Call(own.arguments, args, kwargs)
    hidden: Tensor = call["hidden_states"]
    visible = call[own.mask_argument].bool()
    bias = own.of(hidden.shape[1], hidden.shape[1], visible, hidden.dtype)
    call["relative_pos"] = (call["relative_pos"], bias)
    return call.args, call.kwargs


def _positional_scores(
    attention: Any, query: Tensor, key: Tensor, both: tuple[Tensor, Tensor], embeddings: Tensor, scale_factor: int
) -> Tensor:
    """Stand in for ``disentangled_att_bias`` of DeBERTa and ``disentangled_attention_bias`` of its second version."""
    own: PositionalBias = getattr(attention, ATTACHED)
    distances, bias = both
    if query.ndim == 3:  # version 2 keeps batch and heads in one axis
        batch = len(query) // attention.num_attention_heads
        bias = bias.expand(batch, attention.num_attention_heads, -1, -1).flatten(0, 1)
    bias = bias.to(query.dtype)
    if own.silent:
        return bias
    assert own.score_method is not None
    original: Tensor = getattr(type(attention), own.score_method)(
        attention, query, key, distances, embeddings, scale_factor
    )
    return original + bias


def _keys(attention: Any, call: Call, queries: int, mask: Tensor | None) -> tuple[int, int]:
    """Return how many keys there are up to the last query, and how many slots for keys the cache has."""
    cache = call["past_key_values"] if call["past_key_values"] is not None else call["layer_past"]
    if cache is None:
        return queries, queries if mask is None else mask.shape[-1]
    past = int(cache.get_seq_length(attention.layer_idx))  # a tensor in a static cache
    slots, first = cache.get_mask_sizes(queries, attention.layer_idx)
    return past + queries - int(first), slots if mask is None else mask.shape[-1]


def _checked(mask: Tensor | None) -> Tensor | None:
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            "attention_mask of four axes must be boolean, True where a query sees a key, or a float that is added to "
            f"the logits, got {mask.dtype}; pass attention_mask.bool()"
        )
    return mask


def _causal_without_mask(attention: Any, call: Call) -> bool:
    """Return whether the kernel would hide the future by itself, as transformers' function for it decides."""
    config = getattr(attention, "config", None)  # where there is none (BLOOM), attention is eager
    if config is None or config._attn_implementation != "sdpa":  # eager hides what a mask hides and nothing else
        return False
    asked = call["is_causal"]
    return bool(getattr(attention, "is_causal", True) if asked is None else asked)


def _least(hidden: Tensor) -> float:
    """Return the number that masks a key: finite in every precision that attention may cast its logits to."""
    device = hidden.device.type
    dtypes = [hidden.dtype, torch.float32]  # many families take the softmax in float32, of float64 too
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(dtype).min for dtype in dtypes)
