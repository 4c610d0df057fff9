"""An encoding as a submodule of an attention module, whose forward pass then applies it."""

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pelocality.encodings import Encoding
from pelocality.models._calls import call_of, changes_call, hidden_argument
from pelocality.models._restore import called, override, override_forward
from pelocality.models._weights import loaded
from pelocality.models.attaching.attention import CachedKeys, Encoded
from pelocality.models.attaching.calls import caches_of
from pelocality.models.attaching.positions import angles_of, places_of, takes_angles, with_angles, without_rotation
from pelocality.models.families import ATTACHED, Architecture
from pelocality.models.observer import unobserved

CONFIGURATION = "_extra_state"
"""The key under which PyTorch keeps the result of ``get_extra_state`` in a state dict."""


class Place(NamedTuple):
    """How a module computes attention, itself and not in a part of it.

    Attributes:
        heads: The number of its heads.
        sink: Whether its softmax has one more column than keys.
        first: The column of the first token: 1 behind such a column, otherwise 0.
        parts: How many attentions it computes in one call, one for each of its heads; 1 where one computes them all.
        waves: How the angles that it is given turn with coordinates, (band, axis), if these are read from the angles.
        causal: Whether no query saw a later key.
        key_size: The dimensions of its keys, if these enter a cache and no later layer reads them from there; or else
            0. Such keys are rotated once, before they enter the cache.
    """

    heads: int
    sink: bool = False
    causal: bool = False
    key_size: int = 0
    first: int = 0
    parts: int = 1
    waves: Sequence[Sequence[float]] = ()


def read_configuration(state: Tensor) -> dict[str, Any]:
    """Return the configuration that `Attached.get_extra_state` saved."""
    return json.loads(bytes(state.tolist()))


class Attached(nn.Module):
    """An encoding as a submodule of an attention module.

    The functions that apply it find this module through the attention module, so that models can be copied and
    pickled.

    Args:
        encoding: The encoding, which is not copied.
        place: How the attention module computes attention.
        record: What is known of a transformers model of token ids; None for any other module.
        positions_disabled: Whether the model's position embeddings are disabled.
        disabled: The names of the parts and parameters that are disabled in a module without a record.
        implementation: The model's attention implementation, saved for `load`.
        is_rotation: Whether the encoding takes the place of the model's own rotation.

    Raises:
        TypeError: The encoding could not be saved.
    """

    def __init__(
        self,
        encoding: Encoding,
        place: Place,
        record: Architecture | None,
        positions_disabled: bool,
        disabled: Sequence[str],
        implementation: str | None,
        is_rotation: bool,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.record = record
        self.place = place
        self.positions_disabled, self.disabled = positions_disabled, tuple(disabled)
        self.implementation, self.is_rotation = implementation, is_rotation
        self.by_distance = _depends_on_distance_alone(encoding)
        self.places: Tensor | None = None  # coordinates of tokens on several axes, in the last call
        self.takes_position_ids = False  # whether its last call had position ids, and the encoding is a rotation
        self.gives_angles = False  # whether parts of the attention module are given angles
        self.own_angles: list[tuple[Tensor, ...]] = []  # those of the model, in the last call
        self.key_size = 0  # dimensions of the keys of its last attention
        self.frozen: list[str] = []
        self.note: Callable[[Callable[[], tuple[Tensor, Tensor]]], None] | None = None
        self.key = ""  # that of the plan
        self.get_extra_state()  # an encoding that could not be saved is refused here

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration from which `load` attaches the encoding again, for JSON; numbers are in the state dict."""
        with loaded(self.encoding, [self.encoding]):
            encoding = self.encoding.configuration()
        return {
            "encoding": encoding,
            "position_embeddings": "disable" if self.positions_disabled else "keep",
            "attn_implementation": self.implementation,
            "module": self.place._asdict(),
            "disabled": list(self.disabled),
            "is_rotation": self.is_rotation,
            "reads_tokens": self.record is not None,
        }

    def get_extra_state(self) -> Tensor:
        """Return the current configuration as bytes of JSON, in a tensor because safetensors hold only tensors."""
        return torch.tensor(list(json.dumps(self.configuration).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Refuse the configuration of another encoding; numbers are loaded as usual."""
        if not isinstance(state, Tensor):  # torch.distributed.checkpoint fills in another object for a missing shard
            return
        saved, here = read_configuration(state), self.configuration
        same_positions = saved["position_embeddings"] == here["position_embeddings"]
        if not same_positions or not self._differs_in_numbers_alone(saved["encoding"]):
            advice = "attach the saved encoding first, or load the whole model with pelocality.load"
            raise RuntimeError(f"the weights were saved with {saved}, attached here is {here}; {advice}")

    def _differs_in_numbers_alone(self, configuration: dict[str, Any]) -> bool:
        """Return whether an encoding of that configuration equals this one, given the numbers in its state dict."""
        with loaded(self.encoding, [self.encoding]):
            try:
                other = Encoding.from_configuration(configuration)
                other.to(self.encoding.device, self.encoding.dtype)
                other.load_state_dict(self.encoding.state_dict(), assign=True)
            except (TypeError, ValueError, RuntimeError):  # no such encoding, or one of other shapes
                return False
            return other.configuration() == self.encoding.configuration()

    def install(self, attention: nn.Module) -> None:
        """Add this module to a module that computes attention, whose logits then get the bias."""
        attention.add_module(ATTACHED, self)
        disables = self.positions_disabled and not self.is_rotation
        record = self.record if self.record is not None and disables else Architecture()
        # An optimiser would decay the unused weights of disabled positions if their gradients were zero.
        for name in record.position_weights:
            weight = attention.get_parameter(name)
            if weight.requires_grad:
                self.frozen.append(name)
                weight.requires_grad_(False)
        for name in record.position_methods:
            override(attention, name, _no_logits)
        attention.register_forward_pre_hook(_check_forward)
        for part in attention.modules():
            if self.is_rotation and part is not attention and takes_angles(part):
                self.gives_angles = True
                part.register_forward_pre_hook(functools.partial(_give_own_angles, attention), with_kwargs=True)
        override(attention, "_replicate_for_data_parallel", _replicate)
        override_forward(attention, _forward)

    def uninstall(self, attention: nn.Module) -> None:
        """Undo what `install` has done, except for hooks and methods."""
        for name in self.frozen:
            attention.get_parameter(name).requires_grad_(True)
        delattr(attention, ATTACHED)

    def run(self, attention: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the forward pass of the attention module returns with the encoding."""
        mode, hidden = Encoded(self), None
        if self.record is not None:
            args, kwargs = (), self.without_positions(call_of(attention, args, kwargs))
            hidden = kwargs[hidden_argument(attention)]
            several = getattr(self.encoding, "axes", 1) > 1 and self.places is not None
            ids: Any = self.places if several else kwargs.get("position_ids")
            fits = isinstance(ids, Tensor) and ids.ndim == 2 + several
            if self.is_rotation and fits and ids.shape[1] == hidden.shape[self.record.token_axis]:
                self.takes_position_ids, mode.position_ids = True, ids
            kwargs |= {name: CachedKeys(cache, mode) for name, cache in caches_of(kwargs).items()}
        elif self.place.waves and self.positions_disabled:
            if self.is_rotation:
                with nullcontext() if torch.compiler.is_compiling() else unobserved():
                    mode.position_ids = places_of(call_of(attention, args, kwargs), self.place.waves)
            still = changes_call(lambda module, call: call.update(without_rotation(call)))
            args, kwargs = still(attention, args, kwargs)
        with mode:
            output = forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            mode.check(type(attention).__name__, hidden)
        return output

    def without_positions(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the attention module without the positions that are disabled."""
        if self.is_rotation:
            if self.gives_angles:
                self.own_angles = angles_of(call)
            return without_rotation(call)
        names = self.record.position_arguments if self.record is not None and self.positions_disabled else ()
        return call | {name: torch.zeros_like(call[name]) for name in names if call.get(name) is not None}


def _depends_on_distance_alone(encoding: Encoding) -> bool:
    """Return whether an encoding counts keys from the query alone, and so from any other key as well."""
    with loaded(encoding, [encoding]), suppress(TypeError), torch.no_grad():
        encoding.relative(1)
        return True
    return False


def _forward(attention: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Run an attention module with its encoding."""
    forward, attached = called(attention, "forward", previous), attention._modules.get(ATTACHED)
    if attached is None:  # the encoding was removed after another library had replaced the method
        return forward(*args, **kwargs)
    return attached.run(attention, forward, args, kwargs)


def _give_own_angles(attention: Any, part: nn.Module, args: Any, kwargs: Any) -> Any:
    """Give a part of an attention module, such as one that selects keys, the angles of the model (a hook)."""
    attached = attention._modules.get(ATTACHED)
    if attached is None or not attached.own_angles:
        return None
    return (), with_angles(call_of(part, args, kwargs), lambda angles: attached.own_angles[0])


def _replicate(attention: Any, previous: Callable[..., Any] | None) -> Any:
    """Return the copy of an attention module for another device of nn.DataParallel, whose own forward adds the bias."""
    replica = called(attention, "_replicate_for_data_parallel", previous)()
    replica.__dict__["forward"] = functools.partial(_forward, replica, None)
    return replica


def _no_logits(attention: Any, previous: Any, query: Tensor, key: Tensor, *others: Any) -> Tensor:
    """Return logits of zero in the place of those of positions, (..., query, key)."""
    return query.new_zeros(*query.shape[:-1], key.shape[-2])


def _check_forward(attention: nn.Module, args: Any) -> None:
    """Refuse a call whose forward pass would add no bias, because another library has replaced the method.

    The hook also keeps nn.TransformerEncoderLayer from computing the attention of this module in a kernel of its own.
    """
    if torch.compiler.is_compiling():
        return
    for name in ("forward", "_old_forward"):  # accelerate keeps a method inside its hooks as _old_forward
        function = attention.__dict__.get(name)
        while function is not None:
            if getattr(function, "func", None) is _forward:
                return
            function = getattr(function, "__wrapped__", None)
    advice = "remove the encoding before the change, and attach it again afterwards"
    raise ValueError(f"the forward pass of {type(attention).__name__} was replaced after attaching; {advice}")
