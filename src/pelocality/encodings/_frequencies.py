"""Where the frequencies of a rotation come from: a base, a scaling for long inputs, or numbers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pelocality._checks import count, number, real_numbers
from pelocality.encodings._rotary_angles import RotaryAngles

_FIXED = ("default", "linear", "yarn", "llama3")


def rope_types(module: nn.Module) -> list[str]:
    """Return how a rotary module chooses its frequencies, in the words of transformers; types of layers may differ."""
    found: Any = getattr(module, "rope_type", None)
    return [kind for kind in (found.values() if isinstance(found, dict) else [found]) if isinstance(kind, str)]


def by_length(kind: str) -> bool:
    """Return whether the frequencies of a ``rope_type`` depend on the length of the input."""
    return "dynamic" in kind or kind == "longrope"


def checked_scaling(scaling: Any) -> dict[str, Any] | None:
    """Return a copy of ``rope_parameters``, with the name of today for what they once called type."""
    if scaling is None:
        return None
    given = dict(scaling)
    kind = given.setdefault("rope_type", given.pop("type", None))
    given.pop("type", None)
    if kind not in _FIXED:  # others depend on the length of the input
        raise ValueError(f"scaling needs a 'rope_type' of {', '.join(_FIXED)}, got {scaling!r}; or use frequencies=")
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


def checked_frequencies(frequencies: Any, heads: int, bands: int, axes: int) -> Tensor:
    """Return frequencies as (1, bands) or (heads, bands), of several axes (..., axes), in float64."""
    values = torch.as_tensor(real_numbers("frequencies", frequencies), dtype=torch.float64, device="cpu")
    shape = (bands,) if axes == 1 else (bands, axes)
    values = values[None] if values.ndim == len(shape) else values
    if values.shape[1:] != shape or values.shape[0] not in (1, heads):
        given = tuple(values.shape)
        raise ValueError(f"frequencies must be {shape}, or {(heads, *shape)} for {heads} heads, got shape {given}")
    if not bool(torch.isfinite(values.float()).all()):
        raise ValueError("frequencies must be finite in float32, got NaN or infinity")
    return values


def checked_pairs(interleaved: bool, pairs: Any, dim: int) -> tuple[bool, tuple[tuple[int, ...], ...] | None]:
    """Return whether the pairs of dimensions are neighbours, and the pairs, None where they are these or halves."""
    if pairs is None:
        return interleaved, None
    array = torch.as_tensor(pairs, device="cpu")
    dimensions = set(array.flatten().tolist())
    if array.shape != (dim // 2, 2) or array.is_floating_point() or len(dimensions) < dim or min(dimensions) < 0:
        raise ValueError(f"pairs must be {dim} different dimensions, two for each frequency, got {pairs}")
    band = torch.arange(dim, device="cpu")
    for neighbours, usual in ((False, band.view(2, -1).T), (True, band.view(-1, 2))):
        if torch.equal(array, usual):
            return neighbours, None
    return False, tuple(map(tuple, array.tolist()))
