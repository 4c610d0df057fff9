"""Models, or callables in their place: their check, their name, and the scores that they return as an array."""

from reprlib import repr as brief
from typing import Any

from numpy.typing import NDArray
from torch import nn
from transformers import Pipeline

from pelocality._checks import check_unmasked, real_numbers
from pelocality.models.sequence_model import SequenceModel


def check_callable(model: Any, loader: str) -> None:
    """Raise a TypeError unless something in place of a model can be called on texts, and is not its tokenizer."""
    is_class = isinstance(model, type) and issubclass(model, nn.Module)
    if not callable(model) or is_class or isinstance(model, Pipeline) or hasattr(model, "all_special_ids"):
        advice = f"load it with {loader}, take the .model of a pipeline, and pass the model first, then its tokenizer"
        raise TypeError(f"model must be a transformers model or a callable, got {brief(model)}; {advice}")


def name_of(model: Any) -> str:
    """Return the name of a model and of what is attached to it, or of the function in its place."""
    if isinstance(model, nn.Module):
        return SequenceModel(model).label
    return str(getattr(model, "__name__", type(model).__name__)).strip("<>")


def array_of(scores: Any) -> NDArray[Any]:
    """Return scores, which may be a tensor or a list of tensors, as an array of real numbers."""
    check_unmasked("scores", scores)
    return real_numbers("scores", scores)
