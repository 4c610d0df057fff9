"""The modules of a model that compute attention, each of which gets an encoding."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from pelocality.models._restore import hooked
from pelocality.models.layers import first_column, heads_lead, texts_of
from pelocality.models.observer import Attention
from pelocality.models.sequence_model import SequenceModel


class Place(NamedTuple):
    """A module that computes attention itself, not in a part of it.

    Attributes:
        module: The module.
        heads: The number of its heads.
        sink: Whether its softmax has one more column than keys.
        causal: Whether no query saw a later key.
    """

    module: nn.Module
    heads: int
    sink: bool = False
    causal: bool = False


def known_places(model: SequenceModel) -> list[Place]:
    """Return the attention modules of a transformers model of token ids, in the order in which they run first."""
    base, family = model.module, model.family
    return [Place(module, family.heads(base, module)) for module in family.attention_modules(base)]


def find_places(model: SequenceModel, inputs: Any) -> list[Place]:
    """Return the modules that compute self-attention on a batch, in the order in which they run first.

    Raises:
        ValueError: No attention was seen, or attention outside of every part of the model, or with heads before texts,
            or behind a key that is no token's.
    """
    running: list[nn.Module] = []
    found: dict[nn.Module, Place] = {}
    first: list[Tensor] = []
    values: list[Tensor | None] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.pop()

    def note(attention: Attention) -> None:
        shape, owner = attention.weights.shape, running[-1]
        values.append(attention.values)
        if not found:
            first.append(attention.weights)
        heads = shape[1] if len(shape) > 3 else shape[0] // texts_of(inputs)
        causal = not bool(attention.visible.broadcast_to(shape).triu(1).any())
        before = found.setdefault(owner, Place(owner, heads, attention.sink, causal))
        found[owner] = before._replace(causal=before.causal and causal)

    with hooked(model.module.modules(), enter, leave, last=True):
        model.watch(inputs, note, None)
    if not found:
        raise ValueError(f"an encoding cannot be attached to {model}: it computed no attention on the example_inputs")
    if heads_lead(model, inputs, first[0]):
        reason = "its attention has heads before texts in its shape, and an encoding needs (batch, head, n, n)"
        raise ValueError(f"an encoding cannot be attached to {model}: {reason}")
    if first_column(model, inputs, values):
        raise ValueError(f"an encoding cannot be attached to {model}: its first key is no token's")
    return list(found.values())
