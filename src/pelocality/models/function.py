"""Any function from token ids to attention as a model: another framework, recorded attention, a custom kernel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pelocality.metrics._inputs import float_tensor
from pelocality.models._inference import inference
from pelocality.models.observer import Attention
from pelocality.models.sequence_model import SequenceModel


class AttentionFunction(SequenceModel):
    """A function from token ids to attention, as a model that can be measured.

    Pass an `AttentionFunction` to ``positional_attention``, ``text_average`` or ``dependency_accuracy`` in the place of
    a model. If the function is an ``nn.Module``, it is run in evaluation mode, without gradients. Call ``.eval()`` on
    other modules that the function uses, because a random function raises an error. If torch computes the attention of
    a module, no function is needed: pass ``SequenceModel(module, vocabulary_size=...)``.

    Args:
        function: Reads token ids (batch, n), on its own device if it is a module. Returns attention (batch, head, n, n)
            layer by layer, as tensors or arrays, whose rows sum to 1. A key to which no head gives any weight counts as
            hidden from its query. The function gets no attention mask, so texts of a batch must have one length. If
            strings differ in length, use ``batch_size=1``.
        vocabulary_size: Ids are 0 to this number - 1.
        name: The name in results.

    Raises:
        TypeError: The vocabulary size is not an integer.
        ValueError: The vocabulary size is not positive.

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

    adds_tokens = False
    """The shape of the attention is checked, and recorded attention knows no other ids."""
    declares_attention = True

    def __init__(self, function: Callable[[Tensor], Any], vocabulary_size: int, name: str = "") -> None:
        self.function, self._repeats = function, False
        module = function if isinstance(function, nn.Module) else nn.Module()
        name = name or getattr(function, "__name__", type(function).__name__)
        super().__init__(module, vocabulary_size=vocabulary_size, name=name)

    def __str__(self) -> str:
        """Return the name of the class, for errors."""
        return type(self).__name__

    def watch(self, inputs: Any, use: Callable[[Attention], None], length: int | None, **options: Any) -> Any:
        """Pass the attention of each layer to a callback."""
        ids = self._ids_without_padding(inputs)
        maps = self._attention(ids)
        if not self._repeats:
            pairs = zip(maps, self._attention(ids), strict=True)
            self._repeats = all(torch.allclose(*pair, rtol=0, atol=1e-3, equal_nan=True) for pair in pairs)
            if not self._repeats:
                raise ValueError("function returns other attention for the same ids; call .eval() on its modules")
        for weights in maps:
            use(Attention(None, weights, (weights > 0).any(1, keepdim=True), False))

    def run(self, inputs: Any, **options: Any) -> Any:
        """Return the attention of each layer: a function has no hidden states."""
        return self._attention(inputs["input_ids"])

    def _attention(self, ids: Tensor) -> list[Tensor]:
        """Return the attention to a batch of ids, (batch, head, n, n) layer by layer."""
        batch, n = ids.shape
        with inference(self.module), self.explaining({"input_ids": ids}):
            maps = list(self.function(ids))
        for shape in map(np.shape, maps):
            if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, n, n):
                rule = f"each layer of its list must be ({batch}, heads, {n}, {n})"
                raise ValueError(f"{self} cannot be probed: {rule}, got {tuple(shape)}")
        return [float_tensor("attention", each if isinstance(each, Tensor) else np.array(each)) for each in maps]
