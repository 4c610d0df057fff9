"""Where each model family keeps attention and positions: one record per family.

``record_of(model)`` returns the record. Records are in one file per kind of position: ``absolute`` (BERT, RoBERTa,
ELECTRA, DistilBERT, ALBERT, GPT-2, LUKE), ``relative`` (T5, MPNet, BLOOM, XLNet), ``rotary`` (Llama, ModernBERT,
RoFormer) and ``disentangled`` (DeBERTa, DeBERTa-v2).
"""

from torch import nn

from pelocality.models._wrapper import pretrained as pretrained
from pelocality.models.families import absolute, disentangled, relative, rotary
from pelocality.models.families._logits import AbsoluteInput as AbsoluteInput, KnownLogits as KnownLogits
from pelocality.models.families._record import Architecture as Architecture, attached_biases, rows_for_tokens

_RECORDS: dict[str, Architecture] = {
    model_type: record
    for record in (*absolute.RECORDS, *relative.RECORDS, *rotary.RECORDS, *disentangled.RECORDS)
    for model_type in record.model_types
}


_ANY = Architecture()

# The longest input in configurations: usual, of Whisper's decoder, of MPT.
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")


def known_families() -> tuple[str, ...]:
    """Return the model types whose logits the library computes from the weights.

    Returns:
        The ``config.model_type`` values, sorted.

    Examples:
        >>> known_families()[:4]
        ('albert', 'bert', 'bloom', 'camembert')
    """
    return tuple(sorted(name for name, record in _RECORDS.items() if isinstance(record, KnownLogits)))


def known_logits(model: nn.Module) -> KnownLogits:
    """Return the record of a model's family, by which its logits are computed from its weights.

    Args:
        model: A transformers model with or without a task head, or a wrapper around one.

    Returns:
        The ``KnownLogits`` of ``model.config.model_type``.

    Raises:
        TypeError: ``model`` is not and does not hold a transformers model.
        ValueError: The logits of the family are not known; the message lists the families whose are.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9, n_positions=16))
        >>> record = known_logits(gpt2)
        >>> record.causal(record.base(gpt2)), len(record.attention_layers(record.base(gpt2)))
        (True, 2)
    """
    record = record_of(model)
    if not isinstance(record, KnownLogits):
        model_type = pretrained(model).config.model_type
        raise ValueError(f"model type '{model_type}' is not supported; known: {', '.join(known_families())}")
    return record


def record_of(model: nn.Module) -> Architecture:
    """Return the record of a model's family, or the one of all families that have none.

    Args:
        model: A transformers model with or without a task head, or a wrapper around one.

    Returns:
        The ``Architecture`` of ``model.config.model_type``; for a family without a record one with the defaults.

    Raises:
        TypeError: ``model`` is not and does not hold a transformers model.

    Examples:
        >>> from transformers import GPTNeoXConfig, GPTNeoXModel
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> neox = GPTNeoXModel(GPTNeoXConfig(vocab_size=9, **size))
        >>> [type(module).__name__ for module in record_of(neox).attention_layers(neox)]
        ['GPTNeoXAttention', 'GPTNeoXAttention']
    """
    return _RECORDS.get(pretrained(model).config.model_type, _ANY)


def longest_input(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a model has positions for, special tokens included.

    Args:
        model: A transformers model, or a wrapper around one.

    Returns:
        The number of tokens; None without a limit, which positions have that are computed for any distance, or a table
        of torch's own class that an attached encoding has disabled. For a family whose logits are not known
        ``config.max_position_embeddings``, or ``max_target_positions`` or ``max_seq_len`` where it is absent, less the
        rows up to the padding id of a table that is counted from there.

    Raises:
        TypeError: ``model`` is not and does not hold a transformers model.

    Examples:
        >>> from transformers import RobertaConfig, RobertaModel
        >>> small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> longest_input(RobertaModel(RobertaConfig(**small, max_position_embeddings=42)))  # two rows are never read
        40
    """
    record = record_of(model)
    base = record.base(model)
    tables = (table for table in record.position_tables(base) if isinstance(table, nn.Embedding))
    # a table of a class of its own looks its rows up before they are replaced
    if positions_disabled(model) and all(type(table).forward is nn.Embedding.forward for table in tables):
        return None
    if isinstance(record, KnownLogits):
        return record.max_length(base)
    most = next((limit for name in _LIMITS if (limit := getattr(base.config, name, None))), None)
    counted = [table for table in record.position_tables(base) if getattr(table, "padding_idx", None) is not None]
    return most and min([most, *(rows for table in counted if (rows := rows_for_tokens(table)) > 0)])


def positions_disabled(model: nn.Module) -> bool:
    """Return whether an attached encoding has disabled a model's position embeddings.

    Args:
        model: A transformers model, or a wrapper around one.

    Returns:
        True or False.

    Raises:
        TypeError: ``model`` is not and does not hold a transformers model.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> tiny = DistilBertModel(DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=9))
        >>> positions_disabled(tiny)
        False
    """
    return any(bias.positions_disabled for bias in attached_biases(record_of(model).base(model)))
