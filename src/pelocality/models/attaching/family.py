"""A bias in a transformers model of token ids: its family knows its attention modules, keys and positions."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._calls import call_of
from pelocality.models.attaching.disable import disable_positions
from pelocality.models.attaching.kind import Kind, known_places, refuse_continuous_batching, transformers_parts
from pelocality.models.attaching.proof import prove_bias
from pelocality.models.families import ATTACHED
from pelocality.models.inputs.tokens import runs_of_tokens

_IMPLEMENTATIONS = ("eager", "sdpa")


class FamilyBias(Kind):
    """A bias in a transformers model of token ids, whose keys and positions its family knows."""

    def prepare(self, encoding: Any, layers: Sequence[int] | None, *, prove: bool) -> list[Any]:
        """Refuse a model to which no bias can be added exactly, and prove the bias in any other."""
        model, base, family = self.model, self.model.module, self.model.family
        if self.names:
            raise ValueError(
                f"disable is for modules whose positions are not known, but those of {model} are; leave it out"
            )
        if self.inputs is not None:
            raise ValueError(f"example_inputs is for modules that read no token ids, but {model} does; leave it out")
        _ = model.device  # this property refuses weights on the meta device
        if not family.attention_modules(base):
            raise ValueError(f"{model} has no attention module that takes a mask, to which a bias could be added")
        if reason := family.why_not_additive(base):
            raise ValueError(f"an encoding cannot be attached to {model} exactly: {reason}")
        if self.disable and (reason := family.why_positions_remain(base)):
            raise ValueError(f"the positions of {model} cannot be disabled: {reason}; use position_embeddings='keep'")
        _check_implementation(base)
        self.places = known_places(model)
        # the proof comes first, because its error for a model without attention is clearer than that for heads
        causal = prove_bias(self) if prove else bool(family.causal(base))
        return self.biases(encoding, layers, causal=causal)

    def switch_on(self, *, disable: bool) -> None:
        """Check every call of the model, and disable its positions."""
        for module in transformers_parts(self.model):
            hook = functools.partial(_check_call, self.places[0].module)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        refuse_continuous_batching(self.model)
        if disable:
            disable_positions(self.model.family, self.model.module)


# ---- checks of every call


def _check_implementation(module: Any) -> None:
    """Refuse an attention implementation that would ignore the bias."""
    implementation = module.config._attn_implementation
    if implementation not in (*_IMPLEMENTATIONS, None):
        raise ValueError(
            f"attention implementation '{implementation}' of {type(module).__name__} does not support a bias; call "
            "model.set_attn_implementation('sdpa') or 'eager'"
        )


def _check_call(attention: nn.Module, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that would ignore the bias, or that asks for attention weights that are not computed."""
    if ATTACHED not in attention._modules:  # the encoding was removed through a part of the model
        return
    _check_implementation(module)
    call = call_of(module, args, kwargs)
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            "attention_mask of four axes must be boolean, True where a query sees a key, or a float that is added to "
            f"the logits, got {mask.dtype}; pass attention_mask.bool()"
        )
    _check_inner_padding(mask, call.get("position_ids"))
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = module.config.output_attentions
    if wanted and module.config._attn_implementation == "sdpa":
        raise ValueError(
            "output_attentions=True under 'sdpa' would return no weights; call model.set_attn_implementation('eager')"
        )


def _check_inner_padding(mask: Any, position_ids: Any) -> None:
    """Refuse padding between tokens that the position ids do not count, but the distances of the encoding do.

    Args:
        mask: (batch, n) of 0 and 1, or anything else.
        position_ids: Of the last tokens of these, (batch or 1, m), or anything else.
    """
    given = isinstance(mask, Tensor) and isinstance(position_ids, Tensor)
    if not given or (mask.ndim, position_ids.ndim) != (2, 2) or torch.compiler.is_compiling():
        return
    tokens, positions = mask.bool(), position_ids.to(mask.device)
    last = positions.shape[1]
    between = runs_of_tokens(tokens) > 1
    if last > tokens.shape[1] or not bool(between.any()):
        return
    skipped = ((positions == (tokens.cumsum(1) - 1)[:, -last:]) | ~tokens[:, -last:]).all(1)
    if bool((between & skipped).any()):
        raise ValueError(
            "attention_mask has padding between tokens that position_ids skip, as with a learned prompt or a cache "
            "before padding on the left, and an attached encoding would count it; pad on the other side, or call with "
            "one text at a time"
        )
