"""What is known about a model family: the questions every record answers, and the usual answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pelocality.models.families._calls import Call
from pelocality.models.families._mask import AttachedBias, add_to_mask
from pelocality.models.families._wrapper import pretrained

ATTACHED = "pelocality"
"""The name of an attached encoding among the submodules of an attention module, and so in a saved model's keys."""


@dataclass(frozen=True)
class AbsoluteInput:
    """How a family adds a table of positions to its words before the first attention module.

    The input of the first attention module is ``after_norm(norm(before_norm(words + token types + positions)))``.

    Attributes:
        table: the position embeddings.
        offset: the row of ``table`` that the first token reads.
        norm: the layer norm that the sum goes through.
        token_types: the token-type (segment) embeddings, or None.
        before_norm: a linear map before the norm, or None.
        after_norm: a linear map after the norm, or None.
        epsilon_name: the attribute of the norm that holds what it adds to the variance.
    """

    table: nn.Embedding
    offset: int
    norm: nn.Module
    token_types: nn.Embedding | None = None
    before_norm: nn.Module | None = None
    after_norm: nn.Module | None = None
    epsilon_name: str = "eps"


class Architecture(ABC):
    r"""Where one model family keeps its attention, its queries and keys, and its sense of position.

    A record holds facts, never state: it answers about a base model that is handed to it. Before the mask and the
    softmax, the logits of every family here are

    $$s \left( q_i^{\top} k_j + u^{\top} k_j + q_i^{\top} R_{j-i} + S_{j-i}^{\top} k_j \right) + b_{j-i}$$

    with $s$ = ``scaling``, $u$ = ``content_bias``, $R$ = ``relative_keys``, $S$ = ``relative_queries`` and $b$ =
    ``relative_bias``, each absent (None) unless the family has it, and with $q$ and $k$ rotated by ``rotation`` first
    where the family has rotary embeddings. Vectors over distances run from $k = j - i = -(n-1)$ to $n-1$, so that
    index $n-1$ is the diagonal.

    A new family is one subclass in one of the files of this folder, an entry in that file's ``RECORDS`` and one tiny
    configuration in the contract test.
    """

    model_types: ClassVar[tuple[str, ...]]
    """The ``config.model_type`` values that this record speaks for."""

    signal: ClassVar[str]
    """Where the family's positional signal lives, in words."""

    mask_argument: ClassVar[str] = "attention_mask"
    """The argument in which an attention module is given its mask."""

    position_argument: ClassVar[str | None] = None
    """The argument that brings an attention module positions and nothing else, or None."""

    position_weights: ClassVar[tuple[str, ...]] = ()
    """The parameters of an attention module that meet `position_argument` and nothing else."""

    def base(self, model: Any) -> Any:
        """Return the bare transformer inside ``model``, without a task head or a wrapper."""
        return pretrained(model).base_model

    @abstractmethod
    def attentions(self, base: Any) -> list[nn.Module]:
        """Return the self-attention modules as they run; one that layers share is listed once a layer."""

    @abstractmethod
    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys before any rotation, with biases: (batch, n, d) -> 2 x (batch, head, n, d_head)."""

    def attention_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the hidden states (batch, n, d) out of the arguments an attention module was called with."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden

    def scaling(self, module: Any) -> float:
        """Return the factor on the query-key product, usually 1 / sqrt(d_head)."""
        return float(module.scaling)

    def causal(self, base: Any) -> bool:
        """Return whether a token sees only itself and what stands before it."""
        return bool(getattr(base.config, "is_decoder", False)) and looks_back(base)

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        """Return the keys each query may attend to, padding aside: (n, n) of bool."""
        everything = torch.ones(length, length, dtype=torch.bool)
        return everything.tril() if self.causal(base) else everything

    def absolute(self, base: Any) -> AbsoluteInput | None:
        """Return how absolute positions enter the input, or None where none do."""
        return None

    def position_tables(self, base: Any) -> list[nn.Embedding]:
        """Return the embeddings that are looked up by position or distance and then added to something."""
        absolute = self.absolute(base)
        return [] if absolute is None else [absolute.table]

    def rotary(self, base: Any) -> nn.Module | None:
        """Return the module whose call (states, positions, ...) gives the angles of rotary embeddings, or None."""
        return None

    def add_bias(self, attention: Any, attached: AttachedBias, call: Call) -> None:
        """Change the arguments of a call of an attention module so that an attached bias is added to its logits."""
        add_to_mask(attention, attached, call, self.mask_argument)

    def prepare(self, attention: nn.Module) -> None:  # noqa: B027 - most families need nothing here
        """Change an attention module for which `add_bias` is not enough."""

    def unprepare(self, attention: nn.Module) -> None:  # noqa: B027
        """Undo `prepare`; do nothing if that was done already."""

    def not_additive(self, base: Any) -> str | None:
        """Return why a bias cannot be added to the logits of this model exactly, or None where it can."""
        return None

    def positions_remain(self, base: Any) -> str | None:
        """Return what would still tell this model positions with all of the above disabled, or None."""
        return None

    def max_length(self, base: Any) -> int | None:
        """Return the number of tokens the position table has rows for, or None where nothing ends."""
        absolute = self.absolute(base)
        return None if absolute is None else absolute.table.num_embeddings - absolute.offset

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines of rotary embeddings, each (n, d_head), or None."""
        return None

    def relative_bias(self, base: Any, module: Any, length: int) -> Tensor | None:
        """Return the bias b by signed distance, as added to scaled logits: (head, 2n - 1), or None."""
        return None

    def relative_keys(self, base: Any, module: Any, length: int) -> Tensor | None:
        """Return the vectors R that queries meet by signed distance: (head, 2n - 1, d_head), or None."""
        return None

    def relative_queries(self, base: Any, module: Any, length: int) -> Tensor | None:
        """Return the vectors S that keys meet by signed distance: (head, 2n - 1, d_head), or None."""
        return None

    def content_bias(self, module: Any) -> Tensor | None:
        """Return the vector u that meets keys wherever they stand: (head, d_head), or None."""
        return None

    def segment_logits(self, module: Any, query: Tensor, token_type_ids: Tensor) -> Tensor | None:
        """Return what token types add to the unscaled logits themselves: (batch, head, n, n), or None."""
        return None


def looks_back(base: Any) -> bool:
    """Return whether a decoder is causal: ``config.is_causal = False`` makes any of transformers look both ways."""
    return getattr(base.config, "is_causal", None) is not False


def heads(states: Tensor, size: int) -> Tensor:
    """Split the last axis into heads: (batch, n, head * size) -> (batch, head, n, size)."""
    return states.view(*states.shape[:-1], -1, size).transpose(1, 2)


def by_distance(matrix: Tensor) -> Tensor:
    """Read a matrix that depends on j - i alone as a vector over distances: (..., n, n) -> (..., 2n - 1)."""
    # the first column upwards is j - i = -(n-1)..-1, the first row is 0..n-1
    return torch.cat([matrix[..., 1:, 0].flip(-1), matrix[..., 0, :]], dim=-1)
