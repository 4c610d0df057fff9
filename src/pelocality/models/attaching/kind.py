"""What the four kinds of attached encodings share: copies that fit the model, switching them on, and removing them."""

import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from pelocality.encodings import Encoding, NoEncoding
from pelocality.encodings.base import check_encoding
from pelocality.models._restore import called, override, restore_module, restoring
from pelocality.models._weights import execution_device
from pelocality.models.attaching.bias import Place, PositionalBias
from pelocality.models.attaching.disable import enable_parameters
from pelocality.models.attaching.saving import check_state_dict, mark_saved_folders
from pelocality.models.families import ATTACHED, attached_biases, no_continuous_batching
from pelocality.models.layers import requested_layers
from pelocality.models.sequence_model import SequenceModel


class Kind(ABC):
    """A kind of encoding in a model: `FamilyBias`, `ModuleBias`, `ModuleRotation` or `ProjectionRotation`.

    `attach` makes one, prepares it and installs it. Nothing in the model refers to it, so that `remove` needs none.

    Args:
        model: The model.
        disable: Whether its positions are disabled.
        names: The parts and parameters to disable in a model whose positions are not known.
        inputs: A batch that a model of unknown inputs reads.
    """

    submodule: ClassVar[type[PositionalBias]] = PositionalBias
    """What each attention module gets."""

    def __init__(self, model: SequenceModel, *, disable: bool, names: Sequence[str] = (), inputs: Any = None) -> None:
        self.model, self.disable, self.names, self.inputs = model, disable, names, inputs
        self.places: list[Place] = []

    @abstractmethod
    def prepare(self, encoding: Any, layers: Sequence[int] | None, *, prove: bool) -> list[Any]:
        """Find the places in the model, check everything, and prove the encoding on a few tokens.

        Returns:
            A copy of the encoding for each place, None where nothing is attached.

        Raises:
            TypeError: Not an encoding.
            ValueError: What does not fit or is not proved.
        """

    @abstractmethod
    def switch_on(self, *, disable: bool) -> None:
        """Change the model around the attention modules."""

    def install(self, encodings: Sequence[Any], *, disable: bool) -> None:
        """Attach encodings, one for each place or None; `remove` undoes it, also where it was interrupted."""
        base, record = self.model.module, None if self.model.adds_tokens else self.model.family
        implementation = getattr(self.model.config, "_attn_implementation", None)
        names = self.names if disable else ()
        for each, place in zip(encodings, self.places, strict=True):
            if each is not None:
                self.submodule(each, place, record, disable, names, implementation).install(place.module)
        for module in transformers_parts(self.model):
            mark_saved_folders(module)
        base.register_load_state_dict_pre_hook(check_state_dict)
        self.switch_on(disable=disable)
        if "torch._dynamo" in sys.modules:  # compiled code notices a removed submodule, but no new hook
            torch.compiler.reset()

    @contextmanager
    def trial(self, encodings: Sequence[Any], *, disable: bool) -> Iterator[None]:
        """Attach copies of encodings for the time of a block."""
        with restoring(functools.partial(remove, self.model)):
            self.install(self._fitted(encodings), disable=disable)
            yield

    def copies(
        self,
        encoding: Any,
        layers: Sequence[int] | None,
        available: Sequence[int] | None = None,
        otherwise: str = "which the model does not have",
        default: Encoding | None = None,
    ) -> list[Any]:
        """Return a copy of the encoding for each place, checked against the model.

        Args:
            encoding: One encoding, or one for each layer.
            layers: The layers that get one; None for all that are available.
            available: The layers that can get one; None for all.
            otherwise: The end of the error for layers that are not available.
            default: The encoding of layers that are not named.
        """
        every = range(len(self.places))
        numbers = requested_layers(layers, every if available is None else available, len(every), otherwise)
        encodings = [encoding] * len(numbers) if isinstance(encoding, Encoding) else encoding
        if not isinstance(encodings, Sequence) or not all(isinstance(each, Encoding) for each in encodings):
            got = f"the class {encoding.__name__}; call it" if isinstance(encoding, type) else repr(encoding)
            raise TypeError(f"encoding must be a pelocality Encoding, or a list of one per layer, got {got}")
        if len(encodings) != len(numbers):
            raise ValueError(
                f"encoding must be one, or a list of {len(numbers)}, one per layer that does not share its weights, "
                f"got a list of {len(encodings)}"
            )
        by_number = dict(zip(numbers, encodings, strict=True))
        for number, each in by_number.items():
            check_encoding(each, self.places[number].heads)
            if any(tensor.is_meta for tensor in each.state_dict().values()):
                raise ValueError(f"{type(each).__name__} is on the meta device; build it where tensors have numbers")
        return self._fitted([by_number.get(number, default) for number in every])

    def biases(self, encoding: Any, layers: Sequence[int] | None, *, causal: bool) -> list[Any]:
        """Return `copies` of a bias, and a bias of zero for layers that are not named.

        Raises:
            ValueError: A causal model, and an argument of the encoding that has no effect in it.
        """
        encodings = self.copies(encoding, layers, default=NoEncoding())
        for part in (part for each in encodings for part in each.modules()):
            if causal and isinstance(part, Encoding) and not part.causal and part.future_only is not None:
                raise ValueError(
                    f"{part.future_only} of {type(part).__name__} acts on future keys only, which this model hides: "
                    f"leave {part.future_only} at its default and do not learn it (name the other learnable parameters)"
                )
        return encodings

    def _fitted(self, encodings: Sequence[Any]) -> list[Any]:
        """Return copies on the devices of the attention modules, at least as precise as their weights."""
        return [
            None if each is None else _fitting(each, place.module, self.model.module)
            for each, place in zip(encodings, self.places, strict=True)
        ]


def _fitting(encoding: Encoding, module: nn.Module, base: Any) -> Encoding:
    weights = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    # weights of a quantised module are integers
    weights = weights or [next(parameter for parameter in base.parameters() if parameter.is_floating_point())]
    precision = functools.reduce(torch.promote_types, {weight.dtype for weight in weights}, encoding.working_dtype)
    with torch.inference_mode(False):  # a parameter made in this mode cannot be trained
        fitted = copy.deepcopy(encoding).to(execution_device(module) or weights[0].device, precision)
    return fitted.train(module.training)


def remove(model: SequenceModel) -> None:
    """Remove the encodings of a model and all that was switched on with them, also where either was interrupted."""
    base = model.module
    for module in list(base.modules()):
        if ATTACHED in module._modules:
            getattr(module, ATTACHED).uninstall(module)
    for module in list(base.modules()):
        restore_module(module, __package__)
        enable_parameters(module)
    for module in transformers_parts(model):
        # if the decoder of this encoder still has encodings, what guards saving stays
        restore_module(module, f"{__package__}.family" if attached_biases(module) else __package__)


def refuse_continuous_batching(model: SequenceModel) -> None:
    """Make a transformers model refuse to pack several prompts into one row."""
    for module in transformers_parts(model):
        override(module, "init_continuous_batching", _init_continuous_batching)


def _init_continuous_batching(model: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Refuse continuous batching before transformers starts the thread in which it would call the model."""
    if attached_biases(model):  # false if the encodings were removed through a part of the model
        no_continuous_batching()
    return called(model, "init_continuous_batching", previous)(*args, **kwargs)


def known_places(model: SequenceModel) -> list[Place]:
    """Return the attention modules of a transformers model of token ids, in the order in which they run first."""
    base, family = model.module, model.family
    return [Place(module, family.heads(base, module)) for module in family.attention_modules(base)]


def transformers_parts(model: SequenceModel) -> list[Any]:
    """Return the transformers model with its head and without, where it is one."""
    return [each for each in dict.fromkeys((model.with_head, model.module)) if isinstance(each, PreTrainedModel)]
