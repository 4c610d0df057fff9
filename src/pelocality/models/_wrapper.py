"""Finding the transformers model inside a wrapper."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pelocality.models._calls import argument_names
from pelocality.models._weights import token_embeddings


def pretrained(model: nn.Module) -> Any:
    """Return the transformers model inside a wrapper such as torch.compile, DataParallel or SentenceTransformer.

    Args:
        model: A transformers model, or a module that holds one.

    Returns:
        The outermost ``PreTrainedModel``.

    Raises:
        TypeError: There is no transformers model.
        ValueError: There are several side by side.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> tiny = DistilBertModel(DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=9))
        >>> pretrained(nn.Sequential(tiny)) is tiny
        True
    """
    given: Any = model
    found = _outermost(model) if isinstance(model, nn.Module) else []
    within = {module for each in found for module in each.modules() if module is not each}
    found = [each for each in dict.fromkeys(found) if each not in within]
    if len(found) > 1:
        names = ", ".join(type(each).__name__ for each in found)
        raise ValueError(f"model holds {len(found)} transformers models side by side ({names}); pass one of them")
    if not found:
        got, advice = type(model).__name__, "load it with transformers.AutoModel.from_pretrained(...)"
        if isinstance(given, type):
            got = f"the class {given.__name__}"
        elif isinstance(given, nn.Module):
            advice = (
                "a module of your own is measured as AttentionFunction(module, vocabulary_size=...), its attention "
                "weights by pelocality.measure, and gets an encoding by biased_attention or PositionalSelfAttention"
            )
        elif hasattr(given, "all_special_ids"):
            advice = "that is a tokenizer: pass the model first, then its tokenizer"
        elif hasattr(given, "model"):
            advice = "pass its .model"
        raise TypeError(f"model must be a transformers PreTrainedModel or hold one, got {got}; {advice}")
    return found[0]


def reads_tokens(module: Any) -> bool:
    """Return whether something is a transformers model that turns token ids into vectors."""
    if not isinstance(module, PreTrainedModel) or "input_ids" not in argument_names(module):
        return False
    return token_embeddings(module) is not None


def _outermost(module: nn.Module) -> list[PreTrainedModel]:
    """Return the transformers models in a module that are not inside another one."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]
