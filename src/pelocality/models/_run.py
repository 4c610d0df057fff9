"""Running a model, and what to know of it for that: its base, device, longest input and layers."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pelocality._checks import count
from pelocality.models._calls import argument_names
from pelocality.models._names import described
from pelocality.models._weights import embedding_weight, execution_device, token_embeddings
from pelocality.models._wrapper import pretrained, reads_tokens
from pelocality.models.families import longest_input, record_of

logger = logging.getLogger(__name__)

# a `largest_difference` that is rounding: many families take the softmax in float32, of float64 too
ROUNDING = 1e-5


def find_base(model: nn.Module) -> Any:
    """Return the base transformer without a task head or a wrapper, as the record of its family finds it.

    Raises:
        TypeError: There is no transformers model.
        ValueError: It reads no tokens, and the message names a part that does; or it has a learned prompt (peft).
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():  # of peft, also in a wrapper
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            advice = "pass model.get_base_model() to measure the model without it"
            raise ValueError(f"{type(module).__name__} has a learned prompt, which would be left out; {advice}")
    inner = pretrained(model)
    base = record_of(inner).base(inner)
    if reads_tokens(base):
        return base
    part = next((f"model.{name}" for name, module in inner.named_modules() if name and reads_tokens(module)), None)
    advice = f"pass {part}" if part else "if it returns attention weights, pass those to pelocality.measure"
    raise ValueError(f"{described(inner)} reads no input_ids, or has no token embeddings; {advice}")


def run(base: Any, *, output_attentions: Any = True, **inputs: Any) -> Any:
    """Run a base model on a batch without generation caches.

    A decoder with cross-attention reads an encoder output of one vector of zeros, so that cross-attention adds the same
    vector at every position.
    """
    accepted, config = argument_names(base), base.config
    for cache in ("use_cache", "use_mems"):
        if cache in accepted:
            inputs[cache] = False
    crosses = getattr(config, "is_encoder_decoder", False) or getattr(base, "is_decoder", False)
    crosses = crosses or any("cross" in name for name, _ in base.named_modules())
    if "encoder_hidden_states" in accepted and crosses:
        width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
        first = next(iter(inputs.values()))
        inputs["encoder_hidden_states"] = torch.zeros(len(first), 1, width, dtype=base.dtype, device=first.device)
    if output_attentions or "output_attentions" in accepted:
        inputs["output_attentions"] = output_attentions
    return base(**inputs, return_dict=True)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two outputs, relative to the largest number in the second; 0 if both are 0."""
    one, other = one.cpu().double(), other.cpu().double()  # not every device has float64
    difference = (one - other).abs().max()
    return float(difference / other.abs().max()) if difference else 0.0


def device_of(base: Any) -> torch.device:
    """Return the device for token ids: that of the embeddings, or the one where they run if offloaded.

    Raises:
        ValueError: Weights are on the meta device and not offloaded.
    """
    embeddings = token_embeddings(base)
    if embeddings is None:
        return torch.device(next(base.parameters()).device)
    device = execution_device(embeddings) or embedding_weight(base).device
    empty = execution_device(base) is None and any(weight.is_meta for weight in base.parameters())
    if empty or device.type == "meta":
        raise ValueError(
            f"weights of {type(base).__name__} are on the meta device, which holds no values; load them with "
            "from_pretrained"
        )
    return device


def check_length(base: Any, length: int, specials: int = 0) -> None:
    """Refuse lengths that the model has no positions for.

    Raises:
        TypeError: The length is not an integer.
        ValueError: It is not positive, or beyond the model's table of positions.
    """
    count("length", length)
    name = described(base)
    most, trained = longest_input(base), getattr(base.config, "max_position_embeddings", None)
    if most is not None and length + specials > most:
        with_specials = f" and {specials} special tokens" if specials else ""
        raise ValueError(
            f"length={length}{with_specials} is beyond the {most} positions of {name}; "
            f"ask for at most {most - specials}"
        )
    if most is None and isinstance(trained, int) and 0 < trained < length + specials:
        logger.warning("%s was trained on at most %d positions; %d extrapolates", name, trained, length + specials)


def requested_layers(
    layers: Sequence[int] | None, available: Sequence[int], depth: int, otherwise: str
) -> tuple[int, ...]:
    """Return the requested layers, counted from the start; all that are available for None.

    Args:
        layers: Indices into the model's layers, negative ones from the end.
        available: The layers that can be returned.
        depth: The number of the model's layers.
        otherwise: The end of the error for layers that are not available, after their list.

    Raises:
        TypeError: It is not a list.
        ValueError: There is none, an index out of range, a layer that is not available, or one named twice.
    """
    if layers is not None and not isinstance(layers, Sequence):
        raise TypeError(f"layers must be a list of indices, such as [0], got {layers!r}")
    wanted = available if layers is None else layers
    if (layers is not None and not layers) or any(
        isinstance(i, bool) or not isinstance(i, int | np.integer) or not -depth <= i < depth for i in wanted
    ):
        raise ValueError(f"layers must be indices into the model's {depth} layers, got {list(wanted)}")
    numbers = tuple(int(i) % depth for i in wanted)
    missing = sorted(set(numbers) - set(available))
    if missing or not numbers:
        raise ValueError(f"layers holds {missing or [*range(depth)]}, {otherwise}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"layers must name each layer once, got {list(wanted)}")
    return numbers
