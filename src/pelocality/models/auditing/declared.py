"""What a model's configuration declares of each layer's positions, by the published formulas.

None of it calls transformers' own functions for angles, slopes, buckets or masks: a mistake in those is found only by a
second implementation of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
)

from pelocality.encodings.buckets import bucket_of
from pelocality.models.auditing.families import declarations, head_size

DEFAULT_BASE = 10_000.0
_SCALINGS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings (Su et al., 2021) as declared.

    Attributes:
        base: The base of the geometric series of frequencies.
        dims: The number of rotated dimensions.
        scaling: "default" or the name of a scaling with a published formula.
        options: The options of the scaling.
        trained: The length from which the scaling starts or to which it refers.
        layout: Which dimensions are a pair, "half" or "interleaved"; None where it is not known.
        direction: 1 where the first of a pair is rotated towards the second, -1 for the reverse; None likewise.
    """

    base: float
    dims: int
    scaling: str
    options: Mapping[str, Any]
    trained: int
    layout: str | None = None
    direction: int | None = None

    def frequencies(self, length: int) -> Tensor:
        """Return radians per position (dims / 2,), of a sequence of this length."""
        base, scaling, options, dims = self.base, self.scaling, self.options, self.dims
        if scaling == "dynamic":  # NTK-aware, by the length of the sequence (emozilla, 2023)
            over = max(length, self.trained) / self.trained
            base *= (options["factor"] * over - (options["factor"] - 1)) ** (dims / (dims - 2))
        plain: Tensor = base ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)
        if scaling == "linear":  # Chen et al., 2023
            return plain / float(options["factor"])
        if scaling == "yarn":  # Peng et al., 2023
            return _yarn(plain, base, self.trained, options)
        if scaling == "llama3":  # Grattafiori et al., 2024
            return _llama3(plain, self.trained, options)
        if scaling == "longrope":  # Ding et al., 2024
            name = "long_factor" if length > self.trained else "short_factor"
            return plain / torch.tensor(options[name], dtype=torch.float64, device="cpu")
        if scaling == "proportional":  # Gemma 4: frequencies of the whole head, zero for the slowest
            rotated = int(options.get("partial_rotary_factor", 1.0) * dims // 2)
            plain[rotated:] = 0
            return plain / float(options.get("factor", 1.0))
        return plain

    @property
    def attention_factor(self) -> float:
        """The factor on cosines and sines."""
        given, factor = self.options.get("attention_factor"), self.options.get("factor")
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if given is not None:
            return float(given)
        if factor is None:
            factor = self.options["max_position_embeddings"] / self.trained
        if factor <= 1:
            return 1.0
        if self.scaling == "longrope":
            return math.sqrt(1 + math.log(float(factor)) / math.log(self.trained))
        one, all_dims = self.options.get("mscale"), self.options.get("mscale_all_dim")
        if one and all_dims:
            return float((0.1 * one * math.log(factor) + 1) / (0.1 * all_dims * math.log(factor) + 1))
        return 0.1 * math.log(factor) + 1


def _yarn(plain: Tensor, base: float, trained: int, options: Mapping[str, Any]) -> Tensor:
    """Return frequencies that are kept where their wavelength is short, and divided where it is long."""
    dims, factor = 2 * len(plain), options.get("factor")
    if factor is None:
        factor = options["max_position_embeddings"] / trained

    def dimension(rotations: float) -> float:
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(options.get("beta_fast") or 32), dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high = high + 0.001 if high == low else high
    divided = ((torch.arange(len(plain), dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = plain * (1 - divided) + plain / factor * divided
    return mixed


def _llama3(plain: Tensor, trained: int, options: Mapping[str, Any]) -> Tensor:
    """Return frequencies divided where their wavelength is long, kept where it is short, and blended between."""
    low, high, factor = (float(options[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    rotations = trained * plain / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


def rotary(config: Any, layer: int) -> Rotary | str | None:
    """Return the rotary embeddings declared for a layer, None for none, "undeclared" where it is not known."""
    family, kind = declarations(config), layer_type(config, layer)
    config = of_layer(config, layer)
    uses = getattr(config, "no_rope_layers", None)  # 1 where a layer has RoPE, despite the name
    if uses and layer < len(uses) and not uses[layer]:
        return None
    if family.rotary_only_in_windows and getattr(config, "sliding_window", None) and kind != "sliding_attention":
        return None
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping) and "rope_type" not in parameters and kind in parameters:
        parameters = parameters[kind]
        if parameters is None:
            return None
    bases = getattr(config, "layer_rope_theta", None) or ()
    base_of_layer = bases[layer] if layer < len(bases) else None
    if base_of_layer == 0 or getattr(config, "use_mem_rope", True) is False or family.slopes(config) is not None:
        return None
    if (dims := family.rotary_dims(config)) is not None:
        return Rotary(DEFAULT_BASE, dims, "default", {}, 0, family.layout, family.direction)
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        return None if family.table(config) is not None or family.no_rotary_by_default else "undeclared"
    if getattr(config, "position_embedding_type", "") is None:
        return None
    share = parameters.get("partial_rotary_factor") or 1.0
    scaling = parameters.get("rope_type", "default")
    if scaling not in _SCALINGS:
        return "undeclared"
    head = getattr(config, "qk_rope_head_dim", None)
    dims = head or int(head_size(config) * (1.0 if scaling == "proportional" else share))
    most = getattr(config, "max_position_embeddings", 0) or 0
    trained = most if scaling == "dynamic" else parameters.get("original_max_position_embeddings") or most
    return Rotary(
        base=float(base_of_layer or parameters["rope_theta"]),
        dims=dims,
        scaling=scaling,
        options={"max_position_embeddings": most, **parameters},
        trained=trained,
        layout=family.layout,
        direction=family.direction,
    )


def of_layer(config: Any, layer: int) -> Any:
    """Return the configuration of a layer, where layers may differ in their sizes."""
    if not hasattr(config, "per_layer_config"):
        return config
    # num_hidden_layers of an encoder-decoder model may be the encoder's, and the decoder may have more layers
    return config.per_layer_config[min(layer, config.num_hidden_layers - 1)]


def layer_type(config: Any, layer: int) -> str | None:
    """Return the declared type of a layer, such as "sliding_attention", or None."""
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    return types[layer] if types and layer < len(types) else None


def buckets(config: Any, length: int) -> Tensor | None:
    """Return T5's bucket (Raffel et al., 2020) of each query and key (n, n), or None where the model has none."""
    number = getattr(config, "relative_attention_num_buckets", None)
    if not number:
        return None
    farthest = getattr(config, "relative_attention_max_distance", 128)
    position = torch.arange(length, device="cpu")
    return bucket_of(position - position[:, None], number, farthest, bool(getattr(config, "is_decoder", False)))


def causal(base: Any, config: Any) -> bool | None:
    """Return whether queries see no later key; None where it is not known."""
    if (given := getattr(config, "is_causal", None)) is not None:
        return bool(given)
    if (of_family := declarations(config).causal(config)) is not None:
        return of_family
    if (wide := getattr(config, "use_bidirectional_attention", None)) is not None:
        return wide is not True and wide != "all"
    half = type(base).__name__
    if half.endswith("Encoder") and config.model_type != "bert-generation":
        return False
    if getattr(config, "is_encoder_decoder", False):
        return True if half.endswith("Decoder") else None
    model_type = config.model_type
    if model_type in MASKED or model_type == "bert-generation" or hasattr(config, "relative_attention_num_buckets"):
        return bool(getattr(config, "is_decoder", False))
    return True if model_type in CAUSAL or model_type.removesuffix("_text") in WITH_IMAGES else None


def window(config: Any, layer: int) -> tuple[str, int] | str | None:
    """Return ("window", keys) or ("chunks", size) of a layer, None for none, "undeclared" where it is not known.

    A causal window counts the query itself; another one is the distance to either side.
    """
    kind, size = layer_type(config, layer), getattr(of_layer(config, layer), "sliding_window", None)
    if kind == "chunked_attention":
        return "chunks", config.attention_chunk_size
    if kind in ("full_attention", "attention", "hybrid", "global"):
        return None
    if kind == "local":  # GPT-Neo
        return "window", config.window_size
    if kind is None:
        return ("window", size) if size and getattr(config, "use_sliding_window", True) is not False else None
    return ("window", size) if size and kind in ("sliding_attention", "hybrid_sliding") else "undeclared"
