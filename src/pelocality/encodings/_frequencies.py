"""Where the frequencies of a rotation come from: a base, a scaling for long inputs, numbers, or a model."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pelocality._checks import count, number, real_numbers
from pelocality.encodings._rotary_angles import RotaryAngles

_FIXED = ("default", "linear", "yarn", "llama3")


class Rotation(NamedTuple):
    """The rotation of a rotary module for one type of layers, or for all (None)."""

    place: str
    layer_type: str | None
    frequencies: Tensor
    scaling: float
    base: float


def rotations_of(model: nn.Module) -> list[Rotation]:
    """Return the rotations of a transformers model.

    Raises:
        ValueError: Frequencies depend on the length of the input.
    """
    found = []
    for place, module in model.named_modules():
        if any(map(by_length, rope_types(module))):
            raise ValueError(f"the frequencies of {type(model).__name__} depend on the length; use another rope_type")
        for name in frequency_buffers(module):
            layer_type = name.removesuffix("inv_freq").rstrip("_") or None
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            base = parameters.get(layer_type, parameters).get("rope_theta", 10000.0)
            found.append(Rotation(place, layer_type, module.get_buffer(name).detach(), scaling_of(module, name), base))
    return found


def rope_types(module: nn.Module) -> list[str]:
    """Return how a rotary module chooses its frequencies, in the words of transformers; types of layers may differ."""
    found: Any = getattr(module, "rope_type", None)
    return [kind for kind in (found.values() if isinstance(found, dict) else [found]) if isinstance(kind, str)]


def by_length(kind: str) -> bool:
    """Return whether the frequencies of a ``rope_type`` depend on the length of the input."""
    return "dynamic" in kind or kind == "longrope"


def frequency_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers of a rotary module of transformers that hold frequencies in use."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    return [name for name in names if not name.endswith(("original_inv_freq", "long_inv_freq"))]


def scaling_name(frequencies: str) -> str:
    """Return the name of the attribute with the attention scaling that belongs to a buffer of frequencies."""
    return frequencies.replace("inv_freq", "attention_scaling")


def scaling_of(module: nn.Module, frequencies: str) -> float:
    """Return the attention scaling that belongs to a buffer of frequencies, 1 without one."""
    return float(getattr(module, scaling_name(frequencies), 1.0))


def checked_scaling(scaling: Any) -> dict[str, Any] | None:
    """Return a copy of ``rope_parameters``, with the name of today for what they once called type."""
    if scaling is None:
        return None
    given = dict(scaling)
    kind = given.setdefault("rope_type", given.pop("type", None))
    given.pop("type", None)
    if kind not in _FIXED:  # others depend on the length of the input
        raise ValueError(
            f"scaling must have a 'rope_type' of {', '.join(_FIXED)}, got {scaling!r}; or use frequencies="
        )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("scaling must not have a partial_rotary_factor; dim is the number of dimensions that rotate")
    if kind != "default" and not 0 < (factor := number("factor of the scaling", given.get("factor"))) < math.inf:
        raise ValueError(f"factor of the scaling must be above 0 and finite, got {factor}")
    if kind in ("yarn", "llama3"):
        count("original_max_position_embeddings of the scaling", given.get("original_max_position_embeddings"))
    return given


def published_frequencies(dim: int, base: float, scaling: dict[str, Any] | None) -> tuple[Tensor, float]:
    """Return the frequencies of a base and a scaling, (1, dim / 2), and the attention scaling."""
    options = scaling or {"rope_type": "default"}
    trained = options.get("original_max_position_embeddings", 0)
    angles = RotaryAngles(dim, base, options["rope_type"], options, trained)
    return angles.frequencies()[None], angles.attention_factor


def checked_frequencies(frequencies: Any, heads: int, bands: int) -> Tensor:
    """Return frequencies as (1, bands) or (heads, bands), in float64."""
    values = torch.as_tensor(real_numbers("frequencies", frequencies), dtype=torch.float64, device="cpu")
    values = values[None] if values.ndim == 1 else values
    if values.ndim != 2 or values.shape[0] not in (1, heads) or values.shape[1] != bands:
        given = tuple(values.shape)
        raise ValueError(f"frequencies must be ({bands},), or ({heads}, {bands}) for {heads} heads, got shape {given}")
    if not bool(torch.isfinite(values.float()).all()):
        raise ValueError("frequencies must be finite in float32, got NaN or infinity")
    return values
