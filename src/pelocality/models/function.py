"""Any function from token ids to attention as a model: a module of your own, another framework, recorded attention."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from pelocality._checks import count
from pelocality.metrics._inputs import float_tensor


class AttentionFunction(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A function from token ids to attention, as a model that can be measured.

    ``positional_attention``, ``text_average``, ``position_share`` and ``dependency_accuracy`` take it where they take a
    transformers model. A function that is an ``nn.Module`` is run in evaluation mode, without gradients; call
    ``.eval()`` on modules that a function uses: a function that is random is refused.

    Args:
        function: Takes token ids (batch, n), on its own device if it is a module, and returns attention
            (batch, head, n, n) layer by layer, as tensors or arrays; rows sum to 1. An attention mask is not passed on:
            texts of a batch must have one length; of strings that differ in length take ``batch_size=1``.
        vocabulary_size: Ids are 0 to this number - 1.
        name: What results call it.

    Raises:
        TypeError: The function cannot be called, or the vocabulary size is not an integer.
        ValueError: It is not positive.

    Examples:
        >>> from pelocality import positional_attention
        >>> def previous_token(ids):
        ...     batch, n = ids.shape
        ...     weights = torch.eye(n).roll(-1, -1)
        ...     weights[0] = torch.eye(n)[0]
        ...     return [weights.expand(batch, 1, n, n)]
        >>> model = AttentionFunction(previous_token, vocabulary_size=100, name="previous token")
        >>> positional_attention(model, length=8, words=4).to_frame()["past_locality"].tolist()
        [1.0]
    """

    def __init__(self, function: Callable[[Tensor], Any], vocabulary_size: int, name: str = "") -> None:
        if not callable(function):
            raise TypeError(f"function must take token ids and return attention, got {type(function).__name__}")
        count("vocabulary_size", vocabulary_size)
        super().__init__(PretrainedConfig())
        self.config._name_or_path = name or getattr(function, "__name__", type(function).__name__)
        self.function = function
        weights = function.parameters() if isinstance(function, nn.Module) else ()
        device = next((weight.device for weight in weights), None)
        self.embeddings = nn.Embedding(vocabulary_size, 1, device=device)  # for its size and the device of the ids

    def get_input_embeddings(self) -> nn.Module:
        """Return a table of the vocabulary's size."""
        return self.embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        """Return the attention to a batch of ids."""
        if attention_mask is not None and not bool(attention_mask.all()):
            advice = "give batches of texts of one length, or strings with batch_size=1"
            raise ValueError(f"the function reads ids alone, not padding; {advice}")
        maps, (batch, n) = list(self.function(input_ids)), input_ids.shape
        for layer, shape in enumerate(map(np.shape, maps)):
            if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, n, n):
                wanted = f"a list of attention weights, ({batch}, heads, {n}, {n}) for each layer"
                raise ValueError(f"the function must return {wanted}, got shape {tuple(shape)} for layer {layer}")
        return BaseModelOutput(attentions=tuple(map(_tensor, maps)))

    def check_repeats(self, input_ids: Tensor) -> None:
        """Raise a ValueError if the function gives other attention to the same ids the second time."""
        for one, other in zip(*(self(input_ids).attentions for _ in range(2)), strict=True):
            if not torch.allclose(one, other, rtol=0, atol=1e-3, equal_nan=True):
                advice = "as with dropout; call .eval() on its modules"
                raise ValueError(f"the function returns other attention to the same ids, {advice}")


def _tensor(weights: Any) -> Tensor:
    """Return weights as a tensor of floats."""
    return float_tensor("attention", weights if isinstance(weights, Tensor) else np.array(weights))
