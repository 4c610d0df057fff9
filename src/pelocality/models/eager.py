"""Eager attention for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pelocality.models._restore import inference, restoring


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode with eager attention, without gradients, and restore it on exit.

    Eager attention is the only implementation that returns weights. The training flag of every module and the
    attention implementation of every configuration are restored, also after an error or interrupt; weights are not
    changed.

    Args:
        model: A transformers model, or a wrapper around one.

    Returns:
        A context manager.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> tiny = DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=9)
        >>> model = DistilBertModel(tiny).train()
        >>> with eager_attention(model):
        ...     model.training, model.config._attn_implementation
        (False, 'eager')
        >>> model.training, model.config._attn_implementation
        (True, 'sdpa')
    """
    # the attribute that transformers documents; the public setter only warns for families without the interface
    implementations = [(config, config._attn_implementation) for config in configurations(model)]

    def undo() -> None:
        for config, implementation in implementations:  # outer first: setting one also sets those inside it
            config._attn_implementation = implementation
        for module in model.modules():  # hooks for output_attentions=True cannot be pickled, and come back when needed
            module.__dict__.pop("_output_capturing_hooks_installed", None)
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__module__", None) == "transformers.utils.output_capturing":
                    del module._forward_hooks[key]

    with inference(model), restoring(undo):
        for config, _ in implementations:
            config._attn_implementation = "eager"
        yield


def configurations(model: nn.Module) -> list[Any]:
    """Return every configuration with an attention implementation, outer ones before those inside them."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for config in configs:  # grows by the configurations inside
        configs += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    found = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
    return list(found.values())
