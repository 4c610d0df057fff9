"""Find the scale of a model's rotation that gives its heads a past locality."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from scipy.optimize import brentq
from torch import nn

from pelocality._checks import number
from pelocality.encodings import RotaryEncoding
from pelocality.metrics.without_matrix import measure_relative
from pelocality.models.attaching.attachment import attach
from pelocality.models.logits.content import ByDistance
from pelocality.models.logits.position import positional_logits
from pelocality.models.sequence_model import SequenceModel

# Scales are searched from 1/16 to 16, in steps by the fourth root of 2.
_STEPS = [2 ** (step / 4) for step in range(-16, 17)]


def rotary_from_targets(
    model: nn.Module | SequenceModel,
    tokenizer: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    past_locality: float,
    length: int = 64,
    **options: Any,
) -> RotaryEncoding:
    r"""Return a model's rotation, scaled so that its position-only logits have a past locality.

    The past locality is measured on the softmax of `positional_logits` over the past, as the mean over all layers and
    heads. Queries and keys of the texts are those of the model before the change. If several scales reach the target,
    the scale nearest to 1 is chosen.

    Args:
        model: A causal transformers model of a known family with one rotation for all layers.
        tokenizer: As for `positional_logits`.
        texts: As for `positional_logits`; a few texts are enough.
        past_locality: The target, between 0 and 1.
        length: Number of positions n, in tokens; values are comparable only at equal n.
        **options: Other arguments of `positional_logits`, such as ``without_first=1``.

    Returns:
        The encoding, for `attach`.

    Raises:
        TypeError: As for `positional_logits`.
        ValueError: As for `positional_logits`; a model that has several rotations, or that is not causal; or a past
            locality that no scale from 1/16 to 16 reaches. The message has the range that is reached.

    Note:
        Attention on text differs in past locality from the logits of the mean content (.26 and .31 in SmolLM2-135M),
        and changes less. After the rotation is attached, deeper layers read other content.

    Examples:
        >>> from pelocality import past_locality
        >>> from transformers import LlamaConfig, LlamaModel
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> llama = LlamaModel(LlamaConfig(vocab_size=9, **size))
        >>> options = {"texts": [{"input_ids": [[3, 1, 4, 1, 5]]}], "special_tokens": True, "length": 16}
        >>> now = past_locality(positional_logits(llama, **options)).mean()
        >>> with attach(llama, rotary_from_targets(llama, past_locality=now, **options)):
        ...     now - past_locality(positional_logits(llama, **options)).mean() < 1e-4
        tensor(True)
    """
    model = SequenceModel.of(model)
    target = number("past_locality", past_locality)
    own = RotaryEncoding.from_model(model.module)
    found = positional_logits(model, tokenizer, texts, length=length, **options)
    content, seen = found.content, found.visible_distances[:, None]
    assert content is not None  # a model with rotations has content
    if not found.causal:
        raise ValueError(f"{model} is not causal, and past_locality is for decoders; scale its rotation yourself")
    modules = [model.family.attention_layers(model.module)[layer] for layer in found.layers]
    mean = content.mean()

    def reached(scale: float) -> float:
        with attach(model, own.scaled(scale), prove=False), torch.no_grad():
            logits = [
                ByDistance.of(model, module, length)(mean.queries[:, place], mean.keys[:, place])
                for place, module in enumerate(modules)
            ]
        causal = torch.where(seen, torch.stack(logits), -torch.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # symmetry is meaningless here, and measuring warns of that
            return float(measure_relative(causal).past_locality.nanmean())

    values = [reached(scale) - target for scale in _STEPS]
    crossings = [i for i in range(len(values) - 1) if values[i] * values[i + 1] <= 0]
    if not crossings:
        bounds = f"between {min(values) + target:.3f} and {max(values) + target:.3f}"
        raise ValueError(f"past_locality must be {bounds} for {model} at length {length}, got {past_locality}")
    nearest = min(crossings, key=lambda i: abs(math.log(_STEPS[i] * _STEPS[i + 1])))
    low, high = math.log(_STEPS[nearest]), math.log(_STEPS[nearest + 1])
    return own.scaled(math.exp(brentq(lambda log: reached(math.exp(log)) - target, low, high, xtol=1e-6)))
