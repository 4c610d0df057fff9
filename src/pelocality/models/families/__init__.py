"""What is known of the weights of each model family: where attention and positions are kept.

``family_of(module)`` returns the `Architecture` of a model. Families stand in a file per kind of position: ``absolute``
(BERT, RoBERTa, ELECTRA, DistilBERT, ALBERT, GPT-2), ``relative`` (T5, MPNet, BLOOM, MPT, XLNet), ``rotary``
(Llama and others with rotations, ModernBERT, RoFormer) and ``disentangled`` (DeBERTa, DeBERTa-v2).
"""

from typing import Any

from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

from pelocality.models.families import absolute, disentangled, relative, rotary
from pelocality.models.families._declared import LAYOUTS as LAYOUTS, UNDECLARED as UNDECLARED, Window as Window
from pelocality.models.families._logits import AbsoluteInput as AbsoluteInput, KnownLogits as KnownLogits
from pelocality.models.families._record import (
    ATTACHED as ATTACHED,
    Architecture as Architecture,
    attached_biases as attached_biases,
)

_FAMILIES: dict[str, Architecture] = {
    model_type: family
    for family in (*absolute.RECORDS, *relative.RECORDS, *rotary.RECORDS, *disentangled.RECORDS)
    for model_type in family.model_types
}
_ANY = Architecture()

_NOT_OF_TRANSFORMERS = Architecture(interleaved=None, direction=None, sections=None)


def known_families() -> tuple[str, ...]:
    """Return the model types whose logits the library computes from the weights.

    Returns:
        The ``config.model_type`` values, sorted.

    Examples:
        >>> known_families()[:4]
        ('albert', 'apertus', 'arcee', 'bert')
    """
    return tuple(sorted(name for name, family in _FAMILIES.items() if isinstance(family, KnownLogits)))


def family_of(module: nn.Module) -> Architecture:
    """Return what is known of the family of a model, by its ``config.model_type``; the defaults for unknown families.

    Examples:
        >>> from transformers import GPTNeoXConfig, GPTNeoXModel
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> neox = GPTNeoXModel(GPTNeoXConfig(vocab_size=9, **size))
        >>> [type(module).__name__ for module in family_of(neox).attention_layers(neox)]
        ['GPTNeoXAttention', 'GPTNeoXAttention']
    """
    return family_named(getattr(getattr(module, "config", None), "model_type", ""))


def family_named(model_type: str) -> Architecture:
    """Return what is known of the family of a ``config.model_type``."""
    return _FAMILIES.get(model_type, _ANY if model_type in CONFIG_MAPPING_NAMES else _NOT_OF_TRANSFORMERS)


def longest_input(family: Architecture, base: Any) -> int | None:
    """Return the largest number of tokens that a bare transformer has positions for, special tokens included.

    Returns:
        The number of tokens. None without a limit: for positions that are computed for any distance, and for a table of
        torch's own class that an attached encoding has disabled.
    """
    tables = [table for table in family.position_tables(base) if isinstance(table, nn.Embedding)]
    # A table of a class of its own looks its rows up before they are replaced.
    if positions_disabled(base) and all(type(table).forward is nn.Embedding.forward for table in tables):
        return None
    return family.max_length(base)


def positions_disabled(module: nn.Module) -> bool:
    """Return whether an attached encoding has disabled the position embeddings of a model."""
    return any(bias.positions_disabled for bias in attached_biases(module))
