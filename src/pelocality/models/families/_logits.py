"""The record of a family whose logits are computed from its weights."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pelocality._toeplitz import toeplitz
from pelocality.models.families._record import Architecture


@dataclass(frozen=True)
class AbsoluteInput:
    """How a family adds a table of positions to its word embeddings before the first attention module.

    The input of the first attention module is ``after_norm(norm(before_norm(words + token types + positions)))``.

    Attributes:
        table: The position embeddings.
        norm: The layer norm that the sum goes through.
        before_norm: A linear map before the norm, or None.
        after_norm: A linear map after the norm, or None.
    """

    table: nn.Embedding
    norm: nn.Module
    before_norm: nn.Module | None = None
    after_norm: nn.Module | None = None


class KnownLogits(Architecture):
    r"""A family whose logits are known: its queries, keys and positions, as terms of one equation.

    Before the mask and the softmax, the logits are

    $$s \left( q_i^{\top} k_j + u^{\top} k_j + q_i^{\top} R_{j-i} + S_{j-i}^{\top} k_j \right) + b_{j-i}$$

    with $s$ = ``scaling``, $u$ = ``content_bias``, $R$ = ``relative_keys``, $S$ = ``relative_queries`` and $b$ =
    ``relative_bias``, each absent (None) unless the family has it, and with $q$ and $k$ rotated by ``rotation`` first
    where the family has rotary embeddings. Vectors over distances run from $k = j - i = -(n-1)$ to $n-1$, so that
    index $n-1$ is the diagonal. Where a family caps its logits (``cap``), these are the logits before.

    The methods share the arguments of those of `Architecture`, and

    - ``length``: the number of positions n;
    - ``hidden``: hidden states, (batch, n, d); ``query``: queries, (batch, head, n, d_head); ``token_type_ids``:
      (batch, n).
    """

    projections: ClassVar[tuple[str, str]] = ("query", "key")
    """The submodules of an attention module that give its queries and its keys."""

    head_size: ClassVar[str] = "attention_head_size"
    """The attribute of an attention module that holds d_head."""

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys before any rotation, with biases: (batch, n, d) -> 2 x (batch, head, n, d_head).

        A rotation turns dimension f together with dimension f + d_head / 2.
        """
        size = getattr(module, self.head_size)
        query, key = (split_heads(getattr(module, name)(hidden), size) for name in self.projections)
        # In grouped-query attention, each key head serves several adjacent query heads.
        return query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)

    def attention_input(self, hidden: Tensor) -> Tensor:
        """Return the first argument of an attention module, its hidden states, as (batch, n, d)."""
        return hidden.movedim(self.token_axis, 1)

    def scaling(self, module: Any) -> float:
        """Return the factor on the query-key product, usually 1 / sqrt(d_head)."""
        return float(getattr(module, "scaling", None) or getattr(module, self.head_size) ** -0.5)

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        """Return the keys each query may attend to, padding aside: (n, n) of bool, on the CPU."""
        return toeplitz(self.visible_distances(base, module, length), length)

    def visible_distances(self, base: Any, module: Any, length: int) -> Tensor:
        """Return the signed distances j - i at which a query may attend to a key: (2n - 1,) of bool, on the CPU."""
        distance = torch.arange(1 - length, length, device="cpu")
        return distance <= 0 if self.causal(base) else torch.ones_like(distance, dtype=torch.bool)

    def cap(self, module: Any) -> float | None:
        """Return the c of soft-capped logits c tanh(x / c), or None."""
        return getattr(module, "attn_logit_softcapping", None)  # Gemma 2

    def absolute(self, base: Any) -> AbsoluteInput | None:
        """Return how absolute positions are added to the input, or None where the family has none."""
        embeddings: Any = getattr(base, "embeddings", None)
        if getattr(embeddings, "position_embeddings", None) is None:
            return None
        return AbsoluteInput(
            table=embeddings.position_embeddings,
            norm=embeddings.LayerNorm,
            before_norm=getattr(embeddings, "embed_proj", None),  # DeBERTa
            after_norm=self.after_norm(base),
        )

    def after_norm(self, base: Any) -> Any:
        """Return the linear map after the layer norm of the input, or None."""
        return getattr(base, "embeddings_project", None)  # ELECTRA: narrower than its layers

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines of rotary embeddings, each (n, d_head / 2), or None."""
        return None

    def relative_bias(self, base: Any, module: Any, length: int) -> Tensor | None:
        """Return the bias b by signed distance, as added to scaled logits: (head, 2n - 1), or None."""
        return None

    def relative_keys(self, base: Any, module: Any, length: int) -> Tensor | None:
        """Return the vectors R multiplied with queries, by signed distance: (head, 2n - 1, d_head), or None."""
        return None

    def relative_queries(self, base: Any, module: Any, length: int) -> Tensor | None:
        """Return the vectors S multiplied with keys, by signed distance: (head, 2n - 1, d_head), or None."""
        return None

    def content_bias(self, module: Any) -> Tensor | None:
        """Return the vector u multiplied with keys at any position: (head, d_head), or None."""
        return None

    def segment_logits(self, module: Any, query: Tensor, token_type_ids: Tensor) -> Tensor | None:
        """Return the logits that token types add, unscaled: (batch, head, n, n), or None."""
        return None


def split_heads(states: Tensor, size: int) -> Tensor:
    """Split the last axis into heads: (batch, n, head * size) -> (batch, head, n, size)."""
    return states.view(*states.shape[:-1], -1, size).transpose(1, 2)
