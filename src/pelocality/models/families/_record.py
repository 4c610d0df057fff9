"""The record of a model family: what every record defines, and the defaults."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pelocality.models.families._calls import Call
from pelocality.models.families._mask import Bias, add_to_mask
from pelocality.models.families._wrapper import pretrained

ATTACHED = "pelocality"
"""The name of an attached encoding among the submodules of an attention module, and so in a saved model's keys."""


@dataclass(frozen=True)
class AbsoluteInput:
    """How a family adds a table of positions to its word embeddings before the first attention module.

    The input of the first attention module is ``after_norm(norm(before_norm(words + token types + positions)))``.

    Attributes:
        table: the position embeddings.
        offset: the row of ``table`` that the first token reads.
        norm: the layer norm that the sum goes through.
        token_types: the token-type (segment) embeddings, or None.
        before_norm: a linear map before the norm, or None.
        after_norm: a linear map after the norm, or None.
        epsilon_name: the attribute of the norm that holds the epsilon added to the variance.
    """

    table: nn.Embedding
    offset: int
    norm: nn.Module
    token_types: nn.Embedding | None = None
    before_norm: nn.Module | None = None
    after_norm: nn.Module | None = None
    epsilon_name: str = "eps"

    @classmethod
    def from_embeddings(cls, embeddings: Any, *, offset: int = 0, **others: Any) -> Self:
        """Return that of an embeddings module with the attribute names of BERT's."""
        token_types = getattr(embeddings, "token_type_embeddings", None)
        return cls(embeddings.position_embeddings, offset, embeddings.LayerNorm, token_types, **others)


class Architecture(ABC):
    r"""Where one model family keeps its attention modules, its queries and keys, and its positions.

    A record has no state: its methods take the base model. Before the mask and the softmax, the logits of every family
    here are

    $$s \left( q_i^{\top} k_j + u^{\top} k_j + q_i^{\top} R_{j-i} + S_{j-i}^{\top} k_j \right) + b_{j-i}$$

    with $s$ = ``scaling``, $u$ = ``content_bias``, $R$ = ``relative_keys``, $S$ = ``relative_queries`` and $b$ =
    ``relative_bias``, each absent (None) unless the family has it, and with $q$ and $k$ rotated by ``rotation`` first
    where the family has rotary embeddings. Vectors over distances run from $k = j - i = -(n-1)$ to $n-1$, so that
    index $n-1$ is the diagonal.

    A new family is one subclass in one of the files of this folder, an entry in that file's ``RECORDS`` and one tiny
    configuration in the contract test.
    """

    model_types: ClassVar[tuple[str, ...]]
    """The ``config.model_type`` values of the family."""

    decoder: ClassVar[bool | None] = None
    """Whether the family is causal; None: where ``config.is_decoder`` is set."""

    projections: ClassVar[tuple[str, str]] = ("query", "key")
    """The submodules of an attention module that give its queries and its keys."""

    head_size: ClassVar[str] = "attention_head_size"
    """The attribute of an attention module that holds d_head."""

    mask_argument: ClassVar[str] = "attention_mask"
    """The argument of an attention module that is its mask."""

    position_argument: ClassVar[str | None] = None
    """The argument of an attention module that holds positions and nothing else, or None."""

    position_weights: ClassVar[tuple[str, ...]] = ()
    """The parameters of an attention module that are multiplied with `position_argument` and nothing else."""

    def base(self, model: Any) -> Any:
        """Return the bare transformer inside ``model``, without a task head or a wrapper."""
        return pretrained(model).base_model

    @abstractmethod
    def attentions(self, base: Any) -> list[nn.Module]:
        """Return the self-attention modules in the order they run; one that layers share is listed once per layer."""

    def attention_modules(self, base: Any) -> list[nn.Module]:
        """Return `attentions`, each module once."""
        return list(dict.fromkeys(self.attentions(base)))

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys before any rotation, with biases: (batch, n, d) -> 2 x (batch, head, n, d_head)."""
        size = getattr(module, self.head_size)
        query, key = (heads(getattr(module, name)(hidden), size) for name in self.projections)
        return query, key

    def attention_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the hidden states (batch, n, d) among the arguments of a call of an attention module."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden

    def scaling(self, module: Any) -> float:
        """Return the factor on the query-key product, usually 1 / sqrt(d_head)."""
        return float(module.scaling)

    def causal(self, base: Any) -> bool:
        """Return whether a token sees only itself and the tokens before it."""
        decoder = self.decoder if self.decoder is not None else getattr(base.config, "is_decoder", False)
        # config.is_causal = False makes any decoder of transformers bidirectional
        return bool(decoder) and getattr(base.config, "is_causal", None) is not False

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        """Return the keys each query may attend to, padding aside: (n, n) of bool."""
        everything = torch.ones(length, length, dtype=torch.bool)
        return everything.tril() if self.causal(base) else everything

    def absolute(self, base: Any) -> AbsoluteInput | None:
        """Return how absolute positions are added to the input, or None where the family has none."""
        return None

    def position_tables(self, base: Any) -> list[nn.Embedding]:
        """Return the embeddings that are looked up by position or distance and then added to something."""
        absolute = self.absolute(base)
        return [] if absolute is None else [absolute.table]

    def rotary(self, base: Any) -> nn.Module | None:
        """Return the module whose call (states, positions, ...) gives the angles of rotary embeddings, or None."""
        module: nn.Module | None = getattr(base, "rotary_emb", None)
        return module

    def add_bias(self, attention: Any, bias: Bias, call: Call) -> None:
        """Change the arguments of a call of an attention module so that the bias is added to its logits."""
        add_to_mask(attention, bias, call, self.mask_argument)

    def prepare(self, attention: nn.Module) -> None:  # noqa: B027 - most families need nothing here
        """Change an attention module for which `add_bias` is not enough."""

    def unprepare(self, attention: nn.Module) -> None:  # noqa: B027
        """Undo `prepare`; a second call does nothing."""

    def not_additive(self, base: Any) -> str | None:
        """Return the reason why a bias cannot be added to the logits of this model exactly, or None where it can."""
        return None

    def positions_remain(self, base: Any) -> str | None:
        """Return the reason why the model still depends on positions once they are disabled, or None."""
        return None

    def max_length(self, base: Any) -> int | None:
        """Return the number of tokens the position table has rows for, or None without a limit."""
        absolute = self.absolute(base)
        return None if absolute is None else absolute.table.num_embeddings - absolute.offset

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines of rotary embeddings, each (n, d_head), or None."""
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


def heads(states: Tensor, size: int) -> Tensor:
    """Split the last axis into heads: (batch, n, head * size) -> (batch, head, n, size)."""
    return states.view(*states.shape[:-1], -1, size).transpose(1, 2)


def by_distance(matrix: Tensor) -> Tensor:
    """Return the diagonals of a matrix that depends on j - i alone: (..., n, n) -> (..., 2n - 1)."""
    # the first column upwards is j - i = -(n-1)..-1, the first row is 0..n-1
    return torch.cat([matrix[..., 1:, 0].flip(-1), matrix[..., 0, :]], dim=-1)
