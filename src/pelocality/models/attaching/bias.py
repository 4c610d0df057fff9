"""An encoding as a submodule of an attention module, and the hook that adds its bias."""

import json
import uuid
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.encodings import Encoding
from pelocality.models._calls import changes_call
from pelocality.models._restore import unhook
from pelocality.models._weights import loaded
from pelocality.models.families import ATTACHED, Architecture

CONFIGURATION = "_extra_state"
"""The key under which PyTorch keeps the result of ``get_extra_state`` in a state dict."""

_NAMES = ("encoding", "position_embeddings", "attn_implementation")


def read_configuration(state: Tensor) -> dict[str, Any]:
    """Return the configuration that `PositionalBias.get_extra_state` saved.

    Raises:
        ValueError: It is damaged.
    """
    try:
        configuration = json.loads(bytes(state.tolist()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"its configuration is not JSON ({error})") from error
    if not isinstance(configuration, dict) or not set(_NAMES) <= configuration.keys():
        text = json.dumps(configuration)[:200]
        raise ValueError(f"its configuration must be an object with {', '.join(_NAMES)}, got {text}")
    return configuration


class PositionalBias(nn.Module):
    """An encoding as a submodule of an attention module.

    The hook that adds its bias is a plain function that finds this module through the attention module, so that models
    can be copied and pickled.

    Args:
        encoding: The encoding, which is not copied.
        record: The record of the model's family.
        positions_disabled: Whether the model's position embeddings are disabled.
        implementation: The model's attention implementation, saved for `load`.

    Raises:
        TypeError: The encoding could not be saved.
    """

    def __init__(
        self,
        encoding: Encoding,
        record: Architecture,
        *,
        positions_disabled: bool,
        implementation: str | None,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.record = record
        self.positions_disabled = positions_disabled
        self.implementation = implementation
        self.frozen: list[str] = []
        self.key = uuid.uuid4().hex  # of this one and its copies: peft puts a copy in its place
        self.get_extra_state()  # refuses an encoding that could not be saved

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration from which `load` attaches the encoding again, for JSON; numbers are in the state dict."""
        with loaded(self.encoding, [self.encoding]):
            encoding = self.encoding.configuration()
        return {
            "encoding": encoding,
            "position_embeddings": "disable" if self.positions_disabled else "keep",
            "attn_implementation": self.implementation,
        }

    def get_extra_state(self) -> Tensor:
        """Return the current configuration as bytes of JSON, in a tensor because safetensors hold only tensors."""
        try:
            return torch.tensor(list(json.dumps(self.configuration).encode()), dtype=torch.uint8, device="cpu")
        except TypeError as error:
            raise TypeError(
                f"{type(self.encoding).__name__} cannot be saved: its arguments must be numbers, strings, booleans, "
                f"None, tensors, encodings or lists of them, each kept as an attribute of its name ({error})"
            ) from error

    def set_extra_state(self, state: Any) -> None:
        """Refuse the configuration of another encoding; numbers are loaded as usual."""
        if not isinstance(state, Tensor):  # what torch.distributed.checkpoint fills in for a shard without it
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
            except (TypeError, ValueError, RuntimeError):  # there is no such encoding, or it has other numbers
                return False
            return other.configuration() == self.encoding.configuration()

    def install(self, attention: nn.Module) -> None:
        """Add this module and its hook to an attention module."""
        attention.add_module(ATTACHED, self)
        # with gradients of zero, an optimiser would still decay the unused weights of disabled positions
        for name in self.record.position_weights if self.positions_disabled else ():
            weight = attention.get_parameter(name)
            if weight.requires_grad:
                self.frozen.append(name)
                weight.requires_grad_(False)
        attention.register_forward_pre_hook(_add_bias, with_kwargs=True)
        self.record.prepare(attention)

    def uninstall(self, attention: nn.Module) -> None:
        """Undo `install`."""
        self.record.unprepare(attention)
        for name in self.frozen:
            attention.get_parameter(name).requires_grad_(True)
        unhook(attention, _add_bias)
        delattr(attention, ATTACHED)

    def add_to(self, attention: nn.Module, call: dict[str, Any]) -> None:
        """Change the arguments of a call of the attention module so that the bias is added, as its record defines."""
        self.record.add_bias(attention, self.bias, call)
        for name in self.record.position_arguments if self.positions_disabled else ():
            if call.get(name) is not None:
                call[name] = torch.zeros_like(call[name])

    def bias(
        self, queries: int, keys: int, visible: Tensor | None, dtype: torch.dtype, added: Tensor | None = None
    ) -> Tensor:
        """Return the bias plus ``added``, -inf where not ``visible``: (batch or 1, heads or 1, query, key)."""
        with loaded(self.encoding, [self.encoding]):
            bias = self.encoding.additive_mask(queries, keys, mask=visible, dtype=dtype, added=added)
        return bias if bias.ndim == 4 else bias[None]


@changes_call
def _add_bias(attention: Any, call: dict[str, Any]) -> None:
    getattr(attention, ATTACHED).add_to(attention, call)
