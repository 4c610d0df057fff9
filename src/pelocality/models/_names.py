"""What models, their encodings and their layers are called in results and errors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pelocality.models._wrapper import pretrained
from pelocality.models.families._record import attached_biases


def described(base: Any) -> str:
    """Return the class and type of a model, for errors; an `AttentionFunction` has no type."""
    kind = base.config.model_type
    return f"{type(base).__name__} (model type '{kind}')" if kind else type(base).__name__


def model_name(model: nn.Module) -> str:
    """Return the hub name, the end of a local folder's path, or the class."""
    inner = pretrained(model)
    return "/".join(Path(inner.config._name_or_path).parts[-2:]) or type(inner).__name__


def attached_encoding(base: nn.Module) -> str | None:
    """Return the attached encoding with ``position_embeddings`` as text, all that differ between layers, or None."""
    texts = [
        f"{type(bias.encoding).__name__}({bias.encoding.extra_repr()}), "
        f"position_embeddings='{'disable' if bias.positions_disabled else 'keep'}'"
        for bias in attached_biases(base)
    ]
    return "; ".join(dict.fromkeys(texts)) or None


def label(model: str, encoding: str | None) -> str:
    """Return the name of a model with the class of its attached encoding."""
    return model if encoding is None else f"{model} with {encoding.split('(')[0]} attached"


def other_layers_note(others: Mapping[int, str]) -> tuple[str, ...]:
    """Return a note that says what the layers without attention are, if there are any."""
    kinds = ", ".join(f"{layer} {kind}" for layer, kind in others.items())
    return (f"layers without attention: {kinds}",) if others else ()


def name_with_encoding(model: nn.Module) -> str:
    """Return the name of a model with the class of its attached encoding, if any."""
    return label(model_name(model), attached_encoding(pretrained(model)))
