"""What the configuration of a model declares of its positions, by the published formulas.

None of it calls transformers' own functions for angles, slopes, buckets or masks: a mistake in those is found only by a
second implementation of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
)

from pelocality.encodings._rotary_angles import SCALINGS, RotaryAngles
from pelocality.encodings.buckets import bucket_of

UNDECLARED = "undeclared"

Window = tuple[str, int] | str | None
"""("window", keys up to the query, or the distance to either side), ("chunks", size), None for all keys, or a word."""

LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "blocks": lambda pair, sizes: torch.bucketize(pair, sizes.cumsum(0), right=True).clamp(max=2),
    "turns": lambda pair, sizes: torch.where(pair < 3 * sizes[pair % 3], pair % 3, 0),
    "time last": lambda pair, sizes: torch.where(pair < sizes[1] + sizes[2], 1 + pair % 2, 0),
}
"""The axis of pairs of dimensions by the number of those of time, height and width: how M-RoPE may lay them out."""


class DeclaredPositions:
    """What configurations declare of positions, which `audit` compares with what a model runs.

    A family's record has attributes and methods for what its configuration leaves out. Families that differ in
    attributes alone are instances: ``Architecture("xglm", table="sinusoidal", first_row=2)``.

    The methods take ``config``, the configuration of the text model, and ``layer``, the number of a layer.
    """

    table: ClassVar[str | None] = None
    """The table at the input, "learned" or "sinusoidal"."""

    first_row: ClassVar[int | None] = 0
    """The row of it that the first token reads; None for the one after the padding id."""

    to_base: ClassVar[bool] = False
    """Whether the slowest sines of the table have the frequency 1 / 10,000, as in tensor2tensor; or are faster."""

    maps_words: ClassVar[bool] = False
    """Whether words of the width of positions are yet mapped or normed before positions are added."""

    counts_tokens: ClassVar[bool] = False
    """Whether positions are counted from the first token, padding left out."""

    interleaved: ClassVar[bool | None] = False
    """Whether dimension 2f is rotated together with 2f + 1, and not f with f + d / 2; None where nothing says."""

    direction: ClassVar[int | None] = 1
    """1 where the first of a pair is rotated towards the second, -1 for the reverse, None where nothing says."""

    rotates_by_default: ClassVar[bool | None] = None
    """Whether a model rotates, with base 10,000, though its configuration has no options for it; None: nothing says."""

    sections: ClassVar[str | None] = "blocks"
    """How pairs of time, height and width lie in M-RoPE: "blocks", "turns", "time last", None where nothing says."""

    rotates_in_windows_alone: ClassVar[bool] = False
    """Whether layers without a window have no rotation where others have one."""

    relative_terms: ClassVar[bool | None] = False
    """Whether content meets embeddings of distances; None where nothing says."""

    def __init__(self, *model_types: str, **facts: Any) -> None:
        """Make a record, or that of families of these types, which differ in attributes with these values."""
        vars(self).update(facts | ({"model_types": model_types} if model_types else {}))

    def declared_table(self, config: Any) -> tuple[str, int] | None:
        """Return the table at the input, and the row of it that the first token reads, or None."""
        if self.table is None or _has_rotary(config) or not getattr(config, "position_biased_input", True):  # DeBERTa
            return None
        return self.table, int(config.pad_token_id) + 1 if self.first_row is None else self.first_row

    def declared_sinusoids(self, rows: Tensor, width: int) -> Tensor:
        """Return rows of a sinusoidal table, all sines before all cosines (Vaswani et al., 2017): (row, width)."""
        number = torch.arange((width + 1 - self.to_base) // 2, dtype=torch.float64, device="cpu")
        angles = rows[:, None] * 10_000 ** -(number / (width // 2 - 1 if self.to_base else width / 2))
        return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width - 2 * len(number)))

    def word_factor(self, config: Any, width: int) -> float:
        """Return the factor on word embeddings before positions are added."""
        options = ("scale_embedding", "rescale_embeddings", "scale_sqrt_depth")
        scaled = config.model_type == "ctrl" or any(getattr(config, name, False) for name in options)
        return float(width**0.5) if scaled else 1.0

    def declared_slopes(self, config: Any) -> Tensor | None:
        """Return the slopes of ALiBi (head,), or None."""
        return None

    def declared_buckets(self, config: Any, length: int) -> Tensor | None:
        """Return T5's bucket (Raffel et al., 2020) of each query and key (n, n), or None."""
        number = getattr(config, "relative_attention_num_buckets", None)
        if not number:
            return None
        farthest = getattr(config, "relative_attention_max_distance", 128)
        position = torch.arange(length, device="cpu")
        return bucket_of(position - position[:, None], number, farthest, bool(getattr(config, "is_decoder", False)))

    def declared_rotation(self, config: Any, layer: int) -> RotaryAngles | str | None:
        """Return the rotary embeddings of a layer, None for none, "undeclared" where they are not known."""
        its_type, config = layer_type(config, layer), _of_layer(config, layer)
        in_windows = self.rotates_in_windows_alone and getattr(config, "sliding_window", None)
        base = _member(getattr(config, "layer_rope_theta", None), layer)
        parameters: Any = getattr(config, "rope_parameters", None)
        by_type = isinstance(parameters, Mapping) and "rope_type" not in parameters and its_type in parameters
        parameters = parameters[its_type] if by_type else parameters
        if (
            # 1 where a layer has RoPE, despite the name
            _member(getattr(config, "no_rope_layers", None), layer) == 0
            or (by_type and parameters is None)
            or (in_windows and its_type != "sliding_attention")
            or base == 0
            or getattr(config, "position_embedding_type", "") is None
            or getattr(config, "use_mem_rope", True) is False
            or self.declared_slopes(config) is not None
        ):
            return None
        if self.rotates_by_default or _has_rotary(config):
            return RotaryAngles(getattr(config, "rotary_dim", None) or head_size(config))
        if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
            declared = self.rotates_by_default is False or self.declared_table(config) is not None
            return None if declared else UNDECLARED
        scaling = parameters.get("rope_type", "default")
        if scaling not in SCALINGS:
            return UNDECLARED
        share = 1.0 if scaling == "proportional" else parameters.get("partial_rotary_factor") or 1.0
        longest = getattr(config, "max_position_embeddings", 0) or 0
        return RotaryAngles(
            dims=getattr(config, "qk_rope_head_dim", None) or int(head_size(config) * share),
            base=float(base or parameters["rope_theta"]),
            scaling=scaling,
            options={"max_position_embeddings": longest, **parameters},
            trained=(scaling != "dynamic" and parameters.get("original_max_position_embeddings")) or longest,
        )

    def declared_axes(self, rotary: Any) -> Tensor | None:
        """Return the axis of each pair, 0 for time, 1 for height, 2 for width (M-RoPE, Wang et al., 2024), or None."""
        if self.sections is None or len(sizes := getattr(rotary, "options", {}).get("mrope_section", ())) != 3:
            return None
        sizes = [sizes[2], *sizes[:2]] if self.sections == "time last" else sizes
        return LAYOUTS[self.sections](torch.arange(rotary.dims // 2, device="cpu"), torch.tensor(sizes, device="cpu"))

    def declared_causal(self, config: Any, base: Any) -> bool | None:
        """Return whether queries of a bare transformer see no later key; None where it is not known."""
        if (given := getattr(config, "is_causal", getattr(config, "causal", None))) is not None:
            return bool(given)
        if (wide := getattr(config, "use_bidirectional_attention", None)) is not None:
            return wide is not True and wide != "all"
        may_decode = config.model_type == "bert-generation"  # despite the name of its class
        if type(base).__name__.endswith("Encoder") and not may_decode:
            return False
        if getattr(config, "is_encoder_decoder", False):
            return True if type(base).__name__.endswith("Decoder") else None
        if may_decode or config.model_type in MASKED or hasattr(config, "relative_attention_num_buckets"):
            return bool(getattr(config, "is_decoder", False))
        causal = config.model_type in CAUSAL or config.model_type.removesuffix("_text") in WITH_IMAGES
        return True if causal else None

    def declared_window(self, config: Any, layer: int) -> Window:
        """Return ("window", keys) or ("chunks", size) of a layer, None for none, "undeclared" where it is not known.

        A causal window counts the query itself; another one is the distance to either side.
        """
        its_type, size = layer_type(config, layer), getattr(_of_layer(config, layer), "sliding_window", None)
        if its_type == "chunked_attention":
            return "chunks", config.attention_chunk_size
        if its_type in ("full_attention", "attention", "hybrid", "global"):
            return None
        if its_type == "local":  # GPT-Neo
            return "window", config.window_size
        if its_type is None:
            return ("window", size) if size and getattr(config, "use_sliding_window", True) is not False else None
        return ("window", size) if size and its_type in ("sliding_attention", "hybrid_sliding") else UNDECLARED


def head_size(config: Any) -> int:
    """Return d_head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _has_rotary(config: Any) -> bool:
    """Return whether the configuration of ESM has rotations in the place of its table."""
    return getattr(config, "position_embedding_type", None) == "rotary"


def layer_type(config: Any, layer: int) -> str | None:
    """Return the declared type of a layer, such as "sliding_attention", or None."""
    return _member(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None), layer)


def _member(by_layer: Any, layer: int) -> Any:
    """Return what a list of a configuration says of a layer; None without a list, or with one that is too short."""
    return by_layer[layer] if by_layer and layer < len(by_layer) else None


def _of_layer(config: Any, layer: int) -> Any:
    """Return the configuration of a layer, where layers may differ in their sizes."""
    if not hasattr(config, "per_layer_config"):
        return config
    # The num_hidden_layers of an encoder-decoder model may be the encoder's, and the decoder may have more layers.
    return config.per_layer_config[min(layer, config.num_hidden_layers - 1)]
