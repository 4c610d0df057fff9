"""Where each model family keeps attention and positions: one record a family, and the way to find it.

``architecture(model)`` is the door. The records themselves stand in files by kind: ``absolute`` (BERT, RoBERTa,
ELECTRA, DistilBERT, ALBERT, GPT-2), ``relative`` (T5, MPNet, BLOOM, XLNet), ``rotary`` (Llama, ModernBERT) and
``disentangled`` (DeBERTa, DeBERTa-v2).
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pelocality.architectures import absolute, disentangled, relative, rotary
from pelocality.architectures.record import ATTACHED, AbsoluteInput, Architecture

__all__ = ["ATTACHED", "AbsoluteInput", "Architecture", "architecture", "known_families", "pretrained"]

_RECORDS: dict[str, Architecture] = {
    model_type: record
    for record in (*absolute.RECORDS, *relative.RECORDS, *rotary.RECORDS, *disentangled.RECORDS)
    for model_type in record.model_types
}


def known_families() -> tuple[str, ...]:
    """Return the model types that have a record.

    Returns:
        The ``config.model_type`` values, sorted.

    Examples:
        >>> known_families()[:4]
        ('albert', 'bert', 'bloom', 'camembert')
    """
    return tuple(sorted(_RECORDS))


def pretrained(model: nn.Module) -> Any:
    """Return the transformers model inside a wrapper such as torch.compile, DDP or SentenceTransformer.

    Args:
        model: a transformers model, or a module that holds one.

    Returns:
        The outermost ``PreTrainedModel``.

    Raises:
        TypeError: if there is none.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> tiny = DistilBertModel(DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=9))
        >>> pretrained(nn.Sequential(tiny)) is tiny
        True
    """
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                return module
    raise TypeError(
        f"model must be a transformers PreTrainedModel or hold one, got {type(model).__name__}; "
        "load it with transformers.AutoModel.from_pretrained(...)"
    )


def architecture(model: nn.Module) -> Architecture:
    """Return the record of a model's family.

    Args:
        model: a transformers model with or without a task head, or a wrapper around one.

    Returns:
        The ``Architecture`` that answers for ``model.config.model_type``.

    Raises:
        TypeError: if there is no transformers model.
        ValueError: if the family has no record; the message lists those that have.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9, n_positions=16))
        >>> record = architecture(gpt2)
        >>> record.signal, record.causal(record.base(gpt2)), len(record.attentions(record.base(gpt2)))
        ('wpe, added to the words', True, 2)
    """
    model_type = pretrained(model).config.model_type
    if model_type not in _RECORDS:
        raise ValueError(f"model type '{model_type}' is not supported; known: {', '.join(known_families())}")
    return _RECORDS[model_type]
