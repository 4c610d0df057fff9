"""Checks, on a few tokens, the guarantees of `attach`.

`attach` calls `prove` before it returns. The model is run as it is, with a bias of zero, with a bias that differs at
every head and distance, with its positions disabled and its masks opened, and as it is again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pelocality._checks import HIDDEN
from pelocality.encodings import DistanceTable, Encoding, NoEncoding
from pelocality.models._calls import call_of, changes_call, hidden_argument
from pelocality.models._restore import changed, hooked, inference
from pelocality.models.attaching.bias import PositionalBias
from pelocality.models.families import ATTACHED
from pelocality.models.families._mask import without_cache
from pelocality.models.observer import Observer, blocks_of
from pelocality.models.sequence_model import ROUNDING, SequenceModel, largest_difference

Trial = Callable[[Callable[[int], Encoding], bool], AbstractContextManager[None]]
"""Attaches an encoding of so many heads with positions disabled or not, and removes it on leaving."""

_TOKENS = 7
_ORDER = [3, 0, 6, 2, 5, 1, 4]


class NotProvedError(ValueError):
    """A guarantee of `attach` that does not hold for a model."""


def prove(model: SequenceModel, trial: Trial, *, disable: bool) -> bool:
    """Check the guarantees of `attach` on a few tokens; the model is left as it was.

    Args:
        model: The model.
        trial: Attaches an encoding for the time of a block.
        disable: Whether positions are disabled.

    Returns:
        Whether the model is causal: later tokens have no effect on earlier ones.

    Raises:
        ValueError: A check failed; the message names it.
    """
    hooks = _hooks(model.module)
    advice = f"; remove its hooks if one of them is the reason: {', '.join(hooks)}" if hooks else ""
    with inference(model.module):
        try:
            return _prove(model, trial, disable=disable)
        except Exception as error:
            reason = str(error)
            if not isinstance(error, NotProvedError):
                reason = f"it could not be run on {_TOKENS} tokens: {type(error).__name__}: {reason[:200]}"
            raise ValueError(f"an encoding cannot be attached to {model}: {reason}{advice}") from error


def _prove(model: SequenceModel, trial: Trial, *, disable: bool) -> bool:
    ids, mask, before = _first_run(model)
    tolerance = _tolerance(before)
    effects = _effects(before)
    with trial(NoEncoding, False):
        _check_equal(_run(model, ids, **mask), before, "with a bias of zero its outputs differ from those without")
    with _compared_logits(model), trial(_trial_encoding, disable):
        biased = _effects(_run(model, ids, **mask))
    for what, effect in effects.items():
        if effect <= ROUNDING and not biased[what] <= tolerance:
            raise NotProvedError(f"with a bias, {what} are not hidden any longer")
    if disable:
        _check_equivariance(model, trial, ids)
    _check_equal(_run(model, ids, **mask), before, "after removal its outputs differ from those before")
    later = effects["later tokens"]
    if model.family.causal(model.module):
        return later <= tolerance
    return later <= ROUNDING and _sees_first_token(model, ids, mask, before)


def _trial_encoding(heads: int) -> Encoding:
    """Return a bias that differs between all distances and between heads, by whole numbers, which every dtype holds."""
    table = DistanceTable(heads, length=_TOKENS, signed=True)
    numbers = torch.arange(table.values.numel()).view(table.values.shape)
    with torch.no_grad():
        table.values.copy_(5 * numbers % 17 - 8)
    return table


def _tokens(model: SequenceModel) -> Tensor:
    """Return four rows of token ids: text, the same with another last token, and with other last two tokens, twice."""
    text = torch.tensor(model.some_ids(_TOKENS + 2), device=model.device)
    ids = text[:_TOKENS].repeat(4, 1)
    ids[1, -1], ids[2, -2:] = text[-1], text[-2:]
    return ids


def _first_run(model: SequenceModel) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return token ids, the mask with which the model runs, and its output.

    The last two tokens of the last two rows are padding where the model takes such a mask.
    """
    ids = _tokens(model)
    mask = torch.ones_like(ids)
    mask[2:, -2:] = 0
    try:
        return ids, {"attention_mask": mask}, _run(model, ids, attention_mask=mask)
    except Exception:
        return ids, {}, _run(model, ids)


def _run(model: SequenceModel, ids: Tensor, **mask: Tensor) -> Tensor:
    """Return the last hidden states, (batch, n, d)."""
    output: Tensor = model.run({"input_ids": ids, **mask})[0]
    if output.ndim != 3 or output.shape[:2] != ids.shape:
        raise NotProvedError(f"its output has the shape {tuple(output.shape)}, wanted (batch, tokens, width)")
    return output


def _sees_first_token(model: SequenceModel, ids: Tensor, mask: dict[str, Tensor], before: Tensor) -> bool:
    """Return whether the first token changes later outputs: not where attention ends in weights that are still zero."""
    changed = ids.clone()
    changed[:, 0] = ids[1, -1]
    return largest_difference(_run(model, changed, **mask)[0, 1:], before[0, 1:]) > ROUNDING


def _effects(states: Tensor) -> dict[str, float]:
    """Return by how much some tokens change the outputs of others: those after a token, and padding."""
    return {
        "later tokens": largest_difference(states[0, :-1], states[1, :-1]),
        "tokens of padding": largest_difference(states[2, :-2], states[3, :-2]),
    }


def _tolerance(states: Tensor) -> float:
    """Return the largest difference of two outputs, as in `largest_difference`, that is rounding."""
    return max(ROUNDING, 8 * torch.finfo(states.dtype).eps)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal but for rounding."""
    return largest_difference(one, other) <= _tolerance(other)  # not >, so that NaN is not equal


def _check_equal(one: Tensor, other: Tensor, problem: str) -> None:
    seen = torch.ones(other.shape[:2], dtype=torch.bool, device=other.device)
    seen[2:, -2:] = False  # the output at padding is undefined
    if not _same(one[seen], other[seen]):
        raise NotProvedError(f"{problem}, by up to {float((one[seen] - other[seen]).abs().max()):.3g}")


# ---- the logits


def _logits(attention: Any, call: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the hidden states that an attention module gives, and the arguments of its softmaxes over all keys."""
    observer = _Logits(_TOKENS)
    config = getattr(attention, "config", SimpleNamespace())  # BLOOM's attention has none, and is eager
    with changed(config, "_attn_implementation", "eager"), observer.observing(attention):
        states = _states(attention.forward(**call))
    return states, observer.found


class _Logits(Observer):
    """Collects the arguments of all softmaxes over the tokens."""

    def __init__(self, length: int) -> None:
        super().__init__(lambda attention: None, length)
        self.found: list[Tensor] = []

    def see_softmax(self, logits: Tensor, weights: Tensor) -> None:
        """Collect the argument of a softmax."""
        self.found.append(logits.detach().clone())


@contextmanager
def _compared_logits(model: SequenceModel) -> Iterator[None]:
    """Check at every call of an attention module that the bias, and nothing else, was added to its logits."""
    calls: dict[nn.Module, dict[str, Any]] = {}

    def remember(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[attention] = without_cache(call_of(attention, args, kwargs))  # DiffusionGemma always fills one

    def compare(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        attached = getattr(attention, ATTACHED)
        disabled = attached.positions_disabled
        zero = PositionalBias(NoEncoding(), model.family, positions_disabled=disabled, implementation=None)
        zero.to(_states(output)[0].device).add_to(attention, calls[attention])
        _, without = _logits(attention, calls[attention])
        again, biased = _logits(attention, without_cache(call_of(attention, args, kwargs)))
        for one, other in zip(_states(output), again, strict=True):
            _check_equal(one, other, "its attention implementation gives another output with a bias than 'eager'")
        weights = [each for name, each in attention.named_parameters() if ATTACHED not in name]
        if without and _constant(without) and any(bool(weight.any()) for weight in weights):
            raise NotProvedError("without positions its logits do not depend on the tokens either")
        _check_logits(biased, without, attached, _states(output)[0].dtype)

    modules = model.family.attention_modules(model.module)
    with hooked(modules, remember, compare):
        yield
    if len(calls) < len(modules):
        raise NotProvedError(f"{len(modules) - len(calls)} of its {len(modules)} attention modules did not run")


def _check_logits(biased: list[Tensor], without: list[Tensor], attached: Any, dtype: torch.dtype) -> None:
    """Check that two lists of logits (..., query, key or sink) differ by the bias, but for a constant per row."""
    if not biased or len(biased) != len(without):
        raise NotProvedError("its attention computes no softmax over all keys")
    bias = attached.encoding(_TOKENS)  # (head, query, key)
    for one, other in zip(biased, without, strict=True):
        one, other = (logits.reshape(4, -1, *logits.shape[-2:]).cpu().double() for logits in (one, other))
        expected = nn.functional.pad(bias.cpu().double(), (0, one.shape[-1] - _TOKENS))  # sinks get no bias
        if one.shape != other.shape or one.shape[1] % len(expected):
            raise NotProvedError(f"its logits have {one.shape[1]} heads, the encoding has {len(expected)}")
        if one.shape[-1] > _TOKENS + 1:
            raise NotProvedError("it attends to more keys than its tokens and a sink")
        visible = other > HIDDEN
        if not torch.equal(visible, one > HIDDEN):
            raise NotProvedError("a bias changes which keys are hidden")
        difference = (one - other - expected).masked_fill(~visible, 0)
        constant = difference.diagonal(dim1=-2, dim2=-1)[..., None]  # a token always sees itself
        off = (difference - constant).masked_fill(~visible, 0)[:2].abs().max()  # two rows have padding
        scale = max(16.0, float(other[visible].abs().max()))
        if not off <= 8 * max(torch.finfo(torch.float32).eps, torch.finfo(dtype).eps) * scale:
            raise NotProvedError(f"the bias does not enter its logits exactly, it is off by {float(off):.3g}")


def _constant(logits: list[Tensor]) -> bool:
    """Return whether all logits of visible keys are the same."""
    visible = [each[each > HIDDEN] for each in logits]
    return all(bool((each == each[0]).all()) for each in visible)


def _states(output: Any) -> list[Tensor]:
    """Return the hidden states in the output of an attention module."""
    first = output[0] if isinstance(output, tuple) else output
    return [first] if isinstance(first, Tensor) else list(first)


def _hooks(base: nn.Module) -> list[str]:
    """Return the names of the user's hooks on a model, each with its module."""
    return [
        f"{getattr(hook, '__qualname__', type(hook).__name__)} on {name}"
        for name, module in base.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not getattr(hook, "__module__", "").startswith("transformers.")  # which records attention with hooks
    ]


# ---- the order of tokens


def _check_equivariance(model: SequenceModel, trial: Trial, ids: Tensor) -> None:
    """Check that tokens in another order give the same outputs in that order, once positions and masks are disabled.

    In a model with other layers between those of attention or beside them, each attention module is checked on its own.
    """
    rows = torch.stack([ids[0], ids[0, _ORDER]])
    problems: list[nn.Module] = []

    def permute(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not hybrid:
            return
        name, call = hidden_argument(attention), call_of(attention, args, kwargs)
        again = attention.forward(**without_cache(call) | {name: call[name][:, _ORDER]})
        pairs = zip(_states(output), _states(again), strict=True)
        if not all(_same(other, one[:, _ORDER]) for one, other in pairs):
            problems.append(attention)

    hybrid = _is_hybrid(model)
    family = model.family
    opened = hooked(family.attention_modules(model.module), changes_call(family.open_mask), permute)
    with opened, trial(NoEncoding, True):
        one, other = _run(model, rows)
    if not _same(one[_ORDER], other) and (problems or not hybrid):
        raise NotProvedError("with positions disabled and all masks opened, its outputs depend on the order of tokens")


def _is_hybrid(model: SequenceModel) -> bool:
    """Return whether layers have no attention, or a state space beside it (Falcon-H1)."""
    base = model.module
    attentions = set(model.family.attention_modules(base))
    attends: dict[nn.ModuleList, set[bool]] = {}
    for layer, (layers, _) in blocks_of(base).items():
        attends.setdefault(layers, set()).add(not attentions.isdisjoint(layer.modules()))
    return {True, False} in attends.values() or any("A_log" in module._parameters for module in base.modules())
