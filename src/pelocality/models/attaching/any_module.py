"""A bias in any module: at every softmax or kernel of torch by which it computes attention."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models._restore import hooked
from pelocality.models.attaching.bias import Place
from pelocality.models.attaching.disable import disable_named
from pelocality.models.attaching.kind import Kind, refuse_continuous_batching
from pelocality.models.attaching.proof import prove_bias
from pelocality.models.layers import first_column, heads_lead, texts_of
from pelocality.models.observer import Attention
from pelocality.models.sequence_model import SequenceModel


class ModuleBias(Kind):
    """A bias in a module that is no transformers model of token ids; its attention is found on a batch."""

    def prepare(self, encoding: Any, layers: Sequence[int] | None, *, prove: bool) -> list[Any]:
        """Find the modules that compute attention on the batch, and prove the bias on it."""
        model = self.model
        if self.disable and not self.names:
            advice = "name what holds positions, disable=[...], or add the encoding to them, position_embeddings='keep'"
            raise ValueError(f"the positions of {model} are not known; {advice}")
        if self.names and not self.disable:
            raise ValueError(
                f"position_embeddings='keep' keeps what disable={list(self.names)} names; give one of them"
            )
        if self.inputs is None and model.content is not None:
            raise ValueError(f"example_inputs must be a batch that {model} reads, got None")
        if self.inputs is None:
            self.inputs = {"input_ids": torch.tensor([model.some_ids(7), model.some_ids(8)[1:]])}
        self.inputs = model.moved(self.inputs)
        self.places = _find_places(model, self.inputs)
        causal = prove_bias(self) if prove else all(place.causal for place in self.places)
        return self.biases(encoding, layers, causal=causal)

    def switch_on(self, *, disable: bool) -> None:
        """Disable the named parts and parameters."""
        refuse_continuous_batching(self.model)
        if disable:
            disable_named(self.model.module, self.names)


def reading(model: nn.Module, inputs: Any = None) -> SequenceModel:
    """Return the `SequenceModel` of a model that reads no token ids, or none that are known."""
    return SequenceModel(model, inputs=lambda sample, length: inputs)


def install_saved(model: nn.Module, saved: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Attach encodings that `PositionalBias.configuration` describes to these modules of a model."""
    names = next(iter(saved.values()))["disabled"]
    kind = ModuleBias(reading(model), disable=bool(names), names=names)
    kind.places = [Place(module, **configuration["module"]) for module, configuration in saved.items()]
    kind.install([configuration["encoding"] for configuration in saved.values()], disable=kind.disable)


def _find_places(model: SequenceModel, inputs: Any) -> list[Place]:
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
        raise ValueError(f"an encoding cannot be attached to {model}: its first key does not belong to a token")
    return list(found.values())
