"""The logits of one attention module as a sum of terms, computed from the weights of its family."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pelocality._distributed import refuse_sharded
from pelocality._toeplitz import toeplitz
from pelocality.models._calls import call_of, hidden_argument
from pelocality.models._restore import hooked
from pelocality.models._weights import refuse_quantised
from pelocality.models.families import KnownLogits, known_families
from pelocality.models.observer import blocks_of
from pelocality.models.sequence_model import SequenceModel

_REPLACED = "its attention modules were replaced by others"


@dataclass(frozen=True, eq=False)
class Terms:
    """Pre-softmax logits as four terms, each (batch, head, n, n)."""

    content: Tensor
    content_to_position: Tensor
    position_to_content: Tensor
    position: Tensor

    @property
    def logits(self) -> Tensor:
        """The sum of the four terms: the model's logits before the mask, up to a constant per row."""
        return self.content + self.content_to_position + self.position_to_content + self.position


QueriesAndKeys = tuple[Tensor, Tensor]  # each (batch, head, n, d_head)


def known_logits(model: SequenceModel) -> KnownLogits:
    """Return the family of a model, by which its logits are computed from its weights.

    Raises:
        ValueError: The logits of the family are not known, an encoding is attached, or attention is not the softmax of
            the logits, with the reason.
    """
    family = known_projections(model)
    if any(not bias.is_rotation or bias.encoding.heads > 1 for bias in model.encodings):
        raise ValueError(f"{model} has an attached encoding, which its logits lack; use positional_attention")
    return family


def known_projections(model: SequenceModel) -> KnownLogits:
    """Return the family of a model, whose queries and keys are known; an encoding may be attached.

    Raises:
        ValueError: The logits of the family are not known, or attention is not their softmax, with the reason.
    """
    family = model.family
    if not isinstance(family, KnownLogits):
        raise ValueError(f"the logits of {model} are not known; known model types: {', '.join(known_families())}")
    refuse_sharded(model.module)
    # Other libraries put modules of their own in the places of the family's (TransformerLens's bridge, for one)
    blocks, layers = blocks_of(model.module), family.attention_layers(model.module)
    own = [each for each in layers if any(c.__module__.startswith("transformers.") for c in type(each).__mro__)]
    inside = {module for each in own for module in each.modules()}
    every_block_has_one = own and not any(inside.isdisjoint(block.modules()) for block in blocks)
    reason = family.why_not_measured(model.module)
    if not every_block_has_one or len(own) < len(layers) or not blocks.keys().isdisjoint(own):
        reason = _REPLACED
    if reason:
        raise ValueError(f"the logits of {model} are not known: {reason}")
    return family


@contextmanager
def captured_inputs(
    model: SequenceModel, take: Callable[[int, Tensor], Any] = lambda layer, hidden: hidden
) -> Iterator[list[Any]]:
    """Collect the input hidden states (batch, n, d) of each self-attention, or what a function takes of them."""
    collected: list[Any] = []

    def collect(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = call_of(module, args, kwargs)[hidden_argument(module)]
        collected.append(take(len(collected), model.family.attention_input(hidden)))

    layers = model.family.attention_layers(model.module)
    with hooked(layers, collect):
        yield collected
    if len(collected) != len(layers):  # modules that are held by others in their places, and not called
        raise ValueError(f"the logits of {model} are not known: {_REPLACED}")


def queries_and_keys(model: SequenceModel, module: Any, hidden: Tensor) -> QueriesAndKeys:
    """Return queries and keys in at least float32, before any rotation."""
    refuse_quantised(model.module, module)
    query, key = model.family.project(module, hidden)
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.to(dtype), key.to(dtype)


def logit_terms(
    model: SequenceModel,
    module: Any,
    content: QueriesAndKeys,
    position: QueriesAndKeys | None = None,
    token_type_ids: Tensor | None = None,
) -> Terms:
    r"""Return the logits of queries and keys that are sums of a content part and a position part.

    With $q = q^c + q^p$ and $k = k^c + k^p$ the equation of ``KnownLogits`` has the terms

    - content: $s\,(q^c + u)^\top k^c$
    - content to position: $s\,(q^{c\top} k^p + q^{c\top} R)$
    - position to content: $s\,(q^{p\top} k^c + S^\top k^c)$
    - position: $s\,(q^{p\top} k^p + q^{p\top} R + S^\top k^p) + b$

    Without a position part, only the relative terms depend on position.
    """
    family, base = model.family, model.module
    query, key = content
    length, scaling = query.shape[-2], family.scaling(module)
    query_p, key_p = position if position is not None else (torch.zeros_like(query), torch.zeros_like(key))
    if (rotation := family.rotation(base, module, length)) is not None:
        cos, sin = (angles.to(query.device) for angles in rotation)
        query, key, query_p, key_p = (rotated(x, cos, sin) for x in (query, key, query_p, key_p))

    keys, queries = family.relative_keys(base, module, length), family.relative_queries(base, module, length)

    def by_query(states: Tensor) -> Tensor | float:
        return 0.0 if keys is None else along_queries(states @ keys.to(states).mT)

    def by_key(states: Tensor) -> Tensor | float:
        return 0.0 if queries is None else along_queries((states @ queries.to(states).mT).flip(-1)).mT

    content_bias, bias = family.content_bias(module), family.relative_bias(base, module, length)
    segments = None if token_type_ids is None else family.segment_logits(module, query, token_type_ids)
    of_content = (query if content_bias is None else query + content_bias[:, None]) @ key.mT
    of_position = query_p @ key_p.mT + by_query(query_p) + by_key(key_p)
    return Terms(
        content=scaling * (of_content if segments is None else of_content + segments),
        content_to_position=scaling * (query @ key_p.mT + by_query(query)),
        position_to_content=scaling * (query_p @ key.mT + by_key(key)),
        position=scaling * of_position + (0.0 if bias is None else toeplitz(bias.to(query), length)),
    )


def capped(logits: Tensor, caps: Sequence[float | None]) -> Tensor:
    """Return c tanh(logits / c) in the layers that cap their logits: (layer, ...)."""
    if not any(caps):
        return logits
    return torch.stack([x if c is None else c * (x / c).tanh() for x, c in zip(logits, caps, strict=True)])


def along_queries(scores: Tensor) -> Tensor:
    """Gather each query's score at each key's distance j - i: (batch, head, n, 2n - 1) -> (batch, head, n, n)."""
    position = torch.arange(scores.shape[-2], device=scores.device)
    index = position[None, :] - position[:, None] + len(position) - 1
    return scores.gather(-1, index.expand(*scores.shape[:-1], -1))


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys (batch, head, n, d_head) by angles whose cosines and sines are (n, d_head / 2) each."""
    one, other = states.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
