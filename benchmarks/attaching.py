"""Whether an encoding can be attached to a model, beside a witness that adds the same bias by its own means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pelocality import DistanceTable, attach
from pelocality.models import SequenceModel
from pelocality.models.attaching.installing import find_places

_LENGTH = 24  # beyond the sliding windows of tiny configurations
# the last serves sinks that multiply the output
_SOFTMAXES = (nn.functional.softmax, torch.softmax, Tensor.softmax, torch.logsumexp)


class AddedToLogits(TorchFunctionMode):
    """Adds a bias (head, n, n) to the argument of every softmax over n tokens, or n tokens and a sink."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias
        self.found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SOFTMAXES:
            n, logits = self.bias.shape[-1], args[0]
            if logits.ndim > 2 and logits.shape[-2] == n and logits.shape[-1] in (n, n + 1):
                self.found += 1
                sinks = logits.shape[-1] - n
                heads = len(self.bias) if logits.ndim == 4 else logits.shape[-3]
                bias = self.bias if logits.ndim == 4 else self.bias.repeat(heads // len(self.bias), 1, 1)
                bias = nn.functional.pad(bias.to(logits), (0, sinks))
                args = (torch.where(logits > -1e3, logits + bias, logits), *args[1:])
        return func(*args, **(kwargs or {}))


def random_table(heads: int) -> DistanceTable:
    """Return a signed table of random numbers, without a symmetry that would hide a wrong formula."""
    table = DistanceTable(heads, length=_LENGTH, signed=True).double()
    with torch.no_grad():
        table.values.copy_(torch.randn(table.values.shape, generator=torch.Generator().manual_seed(0)).double())
    return table


def off_by(model: Any, *, disable: bool, implementation: str = "eager") -> float:
    """Return how far outputs with an encoding are from those with the same bias added to the logits by hand.

    Args:
        model: A transformers model with eager attention; it is converted to float64.
        disable: Whether its positions are disabled; the witness sets cosines to 1, sines to 0 and tables to 0.
        implementation: The attention implementation of the attached model; the witness is always eager.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        ValueError: `attach` refuses the model.
    """
    known = SequenceModel(model.double().eval())
    model = known.module
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # the others take no float64
    inputs = _inputs(model)
    table = random_table(next(iter(find_places(known, inputs).values())).heads)
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        with AddedToLogits(table(_LENGTH).detach()) as witness, _without_positions(model, disable):
            expected = model(**inputs)[0]
        if not witness.found:
            raise ValueError("its attention computes no softmax over all keys")
        model.config._attn_implementation = implementation
        with attach(model, table, position_embeddings="disable" if disable else "keep"):
            output = model(**inputs)[0]
    present = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
    if not torch.isfinite(expected[present]).all():
        raise ValueError("it returns NaN on padded texts, also without an encoding")
    difference = (output - expected)[present].abs().max() / expected[present].abs().max()
    return float(difference.nan_to_num(nan=torch.inf))


def attaching(make: Callable[[], Any]) -> str:
    """Return what becomes of a freshly made model: "attached", "attached with its positions", or why it is refused."""
    refused = ""
    for disable in (True, False):
        try:
            off = off_by(make(), disable=disable)
        except (ValueError, TypeError, NotImplementedError) as error:
            refused = refused or str(error).partition("): ")[2] or str(error)
            continue
        if not off < 1e-5:
            return f"WRONG: off by {off:.1g}, positions {'disabled' if disable else 'kept'}"
        return "attached" if disable else f"attached with its positions ({refused})"
    return f"refused: {refused}"


def _inputs(model: Any) -> dict[str, Tensor]:
    """Return two texts, of which the second is padded; a decoder that does not run alone gets an encoder's output."""
    ids = torch.randint(6, 90, (2, _LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0  # fewer than a window: transformers returns NaN where a window holds only padding
    width = model.get_input_embeddings().weight.shape[-1]
    states = torch.linspace(-1, 1, 3 * width).view(1, 3, width).expand(2, -1, -1).to(model.dtype)
    reason: Exception | None = None
    for more in ({"attention_mask": mask}, {}, {"attention_mask": mask, "encoder_hidden_states": states}):
        inputs = {"input_ids": ids} | more
        inputs |= {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # whatever it is, the next may do
            reason = error
            continue
        return inputs
    raise ValueError(f"it cannot be run: {reason}") from reason


@contextmanager
def _without_positions(model: Any, disable: bool) -> Iterator[None]:
    """Set rotations to the identity (times the factor of YaRN), tables of positions and biases by distance to zero."""
    handles = []
    for name, module in model.named_modules() if disable else ():
        kind, last = type(module).__name__, name.rpartition(".")[2]
        if "Rotary" in kind or kind.startswith("RoFormerSinusoidal"):
            handles.append(module.register_forward_hook(_identity))
        elif last in _TABLES or ("Position" in kind and "Embedding" in kind):
            handles.append(module.register_forward_hook(_zeros))
        elif "Attention" in kind:
            handles.append(module.register_forward_pre_hook(_zero_arguments, with_kwargs=True))
            for method in _METHODS:
                if hasattr(module, method):
                    setattr(module, method, lambda *_: 0)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            for method in _METHODS:
                module.__dict__.pop(method, None)


_METHODS = ("disentangled_att_bias", "disentangled_attention_bias")
_TABLES = ("position_embeddings", "position_embedding", "wpe", "relative_attention_bias", "positions_embed")
_TABLES += ("embed_positions", "box_position_embeddings")


def _zeros(module: nn.Module, args: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def _zero_arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    given = dict(bound.arguments)
    given.pop("self")
    given |= given.pop("kwargs", {})
    for name in ("alibi", "position_bias", "position_ids", "r"):
        if given.get(name) is not None:
            given[name] = torch.zeros_like(given[name])
    return (), given


def _identity(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        cos, sin = output
        return (cos.square() + sin.square()).sqrt(), torch.zeros_like(sin)
    if output.is_complex():
        return output.abs().to(output.dtype)
    sin, cos = output.chunk(2, dim=-1)  # RoFormer's table
    return torch.cat([torch.zeros_like(sin), torch.ones_like(cos)], dim=-1)
