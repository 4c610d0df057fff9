"""Rotations in a model that has none: the outputs of the projections of queries and keys are rotated."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.encodings import RotaryEncoding
from pelocality.models._calls import call_of
from pelocality.models._weights import loaded
from pelocality.models.attaching.bias import PositionalBias
from pelocality.models.attaching.disable import disable_positions
from pelocality.models.attaching.kind import Kind
from pelocality.models.attaching.proof import NotProvedError, check_same, outputs_of, proving
from pelocality.models.attaching.rotary.modules import refuse_causal, refuse_options, rotary_places
from pelocality.models.families import ATTACHED, KnownLogits


class PositionalProjection(PositionalBias):
    """A rotary encoding as a submodule of an attention module whose projections then return rotated states."""

    encoding: RotaryEncoding
    record: KnownLogits
    first = 0  # the position of the first token of a call is the number of cached keys

    def install(self, attention: nn.Module) -> None:  # noqa: D102
        super().install(attention)
        for name in self.record.projections:
            getattr(attention, name).register_forward_hook(functools.partial(_rotate, attention))

    def run(self, attention: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the attention module after a check that the hooks on its projections are there."""
        for name in self.record.projections:
            hooks = getattr(attention, name)._forward_hooks.values()
            if not any(getattr(hook, "func", None) is _rotate for hook in hooks):
                raise ValueError(
                    f"'{name}' of {type(attention).__name__} was replaced after a rotary encoding was attached, and "
                    "would not rotate; remove the encoding before the change, and attach it again afterwards"
                )
        call = self.without_positions(call_of(attention, args, kwargs))
        expected = self.record.keys(attention, call)
        self.first = expected.keys - expected.queries
        return forward(**call)


class ProjectionRotation(Kind):
    """A rotation of a model that has none of its own: of the outputs of its projections of queries and keys."""

    submodule = PositionalProjection

    def prepare(self, encoding: Any, layers: Sequence[int] | None, *, prove: bool) -> list[Any]:
        """Refuse a model whose queries and keys are not the outputs of two projections, and prove the rotation."""
        refuse_options(self)
        self.places = rotary_places(self.model)
        self._check_projections()
        encodings = self.copies(encoding, layers)
        refuse_causal(self.model, encodings)
        if prove:
            self._prove(next(each.dim for each in encodings if each is not None))
        return encodings

    def switch_on(self, *, disable: bool) -> None:
        """Disable the positions of the model."""
        if disable:
            disable_positions(self.model.family, self.model.module)

    def _check_projections(self) -> None:
        """Refuse queries and keys that are not the outputs of two projections, multiplied with each other alone."""
        model = self.model
        family, module = model.family, self.places[0].module if self.places else None
        reason = None
        if not isinstance(family, KnownLogits):
            reason = "it has no rotary module (inv_freq), and its queries and keys are not known to the library"
        elif any(not isinstance(getattr(module, name, None), nn.Module) for name in family.projections):
            reason = "one projection gives its queries, keys and values"
        elif any(term(model.module, module, 1) is not None for term in (family.relative_keys, family.relative_queries)):
            reason = "its queries and keys are multiplied with vectors of distances too"
        if reason:
            raise ValueError(f"a rotary encoding cannot be attached to {model}: {reason}")

    def _prove(self, dim: int) -> None:
        """Check that angles of zero change nothing, that others do, and that removal restores the model.

        Args:
            dim: The number of dimensions that are rotated.

        Raises:
            ValueError: A check failed; the message names it.
        """
        model, rotation = self.model, RotaryEncoding(dim)

        def outputs(encoding: RotaryEncoding) -> list[Tensor]:
            with self.trial([encoding] * len(self.places), disable=False):
                return outputs_of(model, inputs)

        with proving(model, "a rotary encoding") as (inputs, before):
            check_same(outputs(rotation.scaled(0)), before, "with angles of zero its outputs are others")
            if all(map(torch.equal, outputs(rotation), before)):
                raise NotProvedError("its projections are rotated, and its outputs stay the same")


def _rotate(attention: Any, projection: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return queries or keys, (batch, n, heads * d), rotated by the encoding (a hook)."""
    rotation = getattr(attention, ATTACHED)
    states = output.view(*output.shape[:-1], rotation.heads, -1).transpose(1, 2)
    with loaded(rotation.encoding, [rotation.encoding]):
        position = torch.arange(rotation.first, rotation.first + states.shape[-2], device=states.device)
        rotated: Tensor = rotation.encoding.rotate(states, *rotation.encoding.angles(position))
    return rotated.transpose(1, 2).flatten(2)
