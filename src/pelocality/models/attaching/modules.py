"""An encoding in any module: its bias is added to the logits where torch computes attention.

Models of transformers that read token ids have their own way (``attachment``), which also knows caches of keys.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from pelocality._checks import HIDDEN
from pelocality.encodings import DistanceTable, Encoding, NoEncoding
from pelocality.models._restore import called, hooked, override, restore_method, restoring, unhook
from pelocality.models.attaching.bias import PositionalBias
from pelocality.models.attaching.disable import enable_positions, look_up_the_first_row, return_zeros
from pelocality.models.attaching.saving import unmark_saved_folders
from pelocality.models.families import ATTACHED, Architecture
from pelocality.models.layers import first_column, heads_lead, texts_of
from pelocality.models.observer import (
    SOFTMAXES,
    Attention,
    active,
    is_self_attention,
    kernel_call,
    kernel_weights,
    module_call,
    module_visible,
)
from pelocality.models.sequence_model import ROUNDING, SequenceModel, largest_difference

_EXACT = 1e-5  # how far a weight may be from the softmax of logits and bias, in float32


class Place(NamedTuple):
    """A module that computes attention itself, not in a part of it.

    Attributes:
        module: The module.
        heads: The number of its heads.
        sink: Whether its softmax has one more column than keys.
        causal: Whether no query saw a later key.
    """

    module: nn.Module
    heads: int
    sink: bool
    causal: bool


class ModuleBias(PositionalBias):
    """An encoding as a submodule of a module that computes attention, and the change of its forward pass."""

    def __init__(self, encoding: Encoding, place: Place, disabled: Sequence[str], implementation: str | None) -> None:
        self.heads, self.sink, self.causal, self.disabled = place.heads, place.sink, place.causal, tuple(disabled)
        super().__init__(encoding, Architecture(), positions_disabled=bool(disabled), implementation=implementation)
        self.note: Callable[[Callable[[], tuple[Tensor, Tensor]]], None] | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration of any attached encoding, with what is known of the module around it."""
        place = {"heads": self.heads, "sink": self.sink, "causal": self.causal}
        return super().configuration | {"module": place, "disabled": list(self.disabled)}

    def install(self, attention: nn.Module) -> None:
        """Add this module to a module that computes attention, whose logits then get the bias."""
        attention.add_module(ATTACHED, self)
        attention.register_forward_pre_hook(_leave_the_fast_path)
        override(attention, "forward", _forward_with_bias)

    def uninstall(self, attention: nn.Module) -> None:
        """Undo `install`."""
        restore_method(attention, "forward", _forward_with_bias)
        unhook(attention, _leave_the_fast_path)
        delattr(attention, ATTACHED)


def _forward_with_bias(attention: Any, previous: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    mode = Biased(getattr(attention, ATTACHED))
    with mode if torch.compiler.is_compiling() else active(mode):
        return called(attention, "forward", previous)(*args, **kwargs)


def _leave_the_fast_path(attention: nn.Module, args: Any) -> None:
    """Do nothing: nn.TransformerEncoderLayer computes the attention of modules without hooks in one kernel."""


class Biased(TorchFunctionMode):
    """Adds the bias of an encoding to the logits of every self-attention.

    Args:
        bias: The encoding. Its ``note`` is called with a function that computes the weights before the bias is added,
            (..., n, n), and the visible keys.
    """

    def __init__(self, bias: ModuleBias) -> None:
        super().__init__()
        self.bias, self.note = bias, bias.note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return func(**self._of_kernel(kernel_call(args, kwargs)))
        if func is functional.multi_head_attention_forward:
            return func(**self._of_module(func, module_call(args, kwargs)))
        if func in SOFTMAXES:
            logits, others = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
            return func(self._of_softmax(logits), *others, **kwargs)
        return func(*args, **kwargs)

    def _of_kernel(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of torch's kernel with the bias in its mask."""
        query, mask = call["query"], call.get("attn_mask")
        queries, keys = query.shape[-2], call["key"].shape[-2]
        if keys < queries:
            return call
        if call.get("is_causal"):
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        if self.note is not None:
            self.note(lambda: kernel_weights(call | {"attn_mask": mask, "is_causal": False}))
        added = None if mask is None or mask.dtype == torch.bool else self._by_head(mask)
        visible = None if mask is None else self._by_head(mask if mask.dtype == torch.bool else mask > HIDDEN)
        biased = self.bias.bias(queries, keys, visible, query.dtype, added)
        if added is not None:
            biased = biased.clamp(min=torch.finfo(query.dtype).min)  # the softmax of a row of -inf would be NaN
        if query.ndim == 3:  # batch and heads in one axis
            biased = biased.expand(len(query) // self.bias.heads, self.bias.heads, -1, -1).flatten(0, 1)
        return call | {"attn_mask": biased, "is_causal": False}

    def _by_head(self, mask: Tensor) -> Tensor:
        """Return a mask as (batch or 1, heads or 1, query or 1, key)."""
        if mask.ndim == 3 and len(mask) % self.bias.heads == 0 and len(mask) > 1:
            return mask.reshape(-1, self.bias.heads, *mask.shape[1:])
        return mask[(None,) * (4 - mask.ndim)]

    def _of_module(self, function: Any, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the function behind `nn.MultiheadAttention` with the bias in its mask."""
        query, mask, padding = call["query"], call.get("attn_mask"), call.get("key_padding_mask")  # True hides
        if not is_self_attention(call):
            return call
        n, heads, batch = len(query), call["num_heads"], query.shape[1] if query.ndim == 3 else 1
        visible = module_visible(call, HIDDEN)
        if padding is not None and padding.dtype == torch.bool:
            call["key_padding_mask"] = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, -torch.inf)
        if self.note is not None:
            wanted = {"need_weights": True, "average_attn_weights": False}
            self.note(lambda: (function(**call | wanted)[1][..., :n], visible))
        added = None
        if mask is not None and mask.is_floating_point():
            added = mask.reshape(-1, heads if mask.ndim == 3 else 1, n, n)
        biased = self.bias.bias(n, n, visible, query.dtype, added)
        return call | {"attn_mask": biased.expand(batch, heads, -1, -1).flatten(0, 1), "is_causal": False}

    def _of_softmax(self, logits: Tensor) -> Tensor:
        """Return logits over keys, perhaps with the column of a sink, plus the bias; others as they are."""
        if logits.ndim < 3:
            return logits
        queries, keys = logits.shape[-2], logits.shape[-1] - self.bias.sink
        if keys < queries or (keys > queries and queries > 1):
            return logits
        split = logits if logits.ndim > 3 else logits.reshape(-1, self.bias.heads, *logits.shape[1:])
        own = split[..., :keys]
        visible = own > HIDDEN
        if self.note is not None:
            self.note(lambda: (split.softmax(-1)[..., :keys], visible))
        depends = self.bias.encoding.depends_on_mask
        bias = self.bias.bias(queries, keys, visible if depends else None, logits.dtype)
        biased = torch.where(visible, own + bias.clamp(min=torch.finfo(bias.dtype).min), own)
        return torch.cat([biased, split[..., keys:]], -1).reshape(logits.shape)


def find_places(model: SequenceModel, inputs: Any) -> list[Place]:
    """Return the modules that compute self-attention on a batch, in the order in which they run first.

    Raises:
        ValueError: No attention was seen, or attention outside of every part of the model, or with heads before texts.
    """
    running: list[nn.Module] = []
    found: dict[nn.Module, Place] = {}
    first: list[Tensor] = []
    values: list[Tensor | None] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.pop()

    def note(attention: Attention) -> None:
        shape, owner = attention.weights.shape, running[-1]
        values.append(attention.values)
        if not found:
            first.append(attention.weights)
        heads = shape[1] if len(shape) > 3 else shape[0] // texts_of(inputs)
        causal = not bool(attention.visible.broadcast_to(shape).triu(1).any())
        before = found.setdefault(owner, Place(owner, heads, attention.sink, causal))
        found[owner] = before._replace(causal=before.causal and causal)

    with hooked(model.module.modules(), enter, leave, last=True):
        model.watch(inputs, note, None)
    if not found:
        raise ValueError(f"an encoding cannot be attached to {model}: it computed no attention on the example_inputs")
    if heads_lead(model, inputs, first[0]):
        reason = "its attention has heads before texts in its shape, and an encoding needs (batch, head, n, n)"
        raise ValueError(f"an encoding cannot be attached to {model}: {reason}")
    if first_column(model, inputs, values):
        raise ValueError(f"an encoding cannot be attached to {model}: its first key is no token's")
    return list(found.values())


def install(encodings: Sequence[Encoding], places: Sequence[Place], base: Any, disable: Sequence[str]) -> None:
    """Add encodings to modules that compute attention, and disable tables of positions; `undo` undoes it."""
    implementation = getattr(getattr(base, "config", None), "_attn_implementation", None)
    for encoding, place in zip(encodings, places, strict=True):
        ModuleBias(encoding, place, disable, implementation).install(place.module)
    modules, parameters = dict(base.named_modules()), dict(base.named_parameters())
    for name in disable:
        if name in modules:
            if type(modules[name]).forward is nn.Embedding.forward:
                modules[name].register_forward_pre_hook(look_up_the_first_row)
            modules[name].register_forward_hook(return_zeros)
        elif name in parameters:
            parent, _, attribute = name.rpartition(".")
            parametrize.register_parametrization(modules[parent], attribute, _Zeros(), unsafe=True)
            modules[parent].register_state_dict_post_hook(_keep_names)
            modules[parent].register_load_state_dict_pre_hook(_take_names)
        else:
            similar = [each for each in (*modules, *parameters) if "pos" in each.lower() and ATTACHED not in each]
            advice = f"such as {', '.join(similar[:5])}" if similar else "of named_modules() or named_parameters()"
            raise ValueError(f"disable must hold names of parts or parameters of the model, got {name!r}; {advice}")


def install_saved(base: Any, saved: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Add encodings that `ModuleBias.configuration` describes to these parts of a bare model."""
    places = [Place(module, **configuration["module"]) for module, configuration in saved.items()]
    configurations = list(saved.values())
    install([each["encoding"] for each in configurations], places, base, configurations[0]["disabled"])


def _keep_names(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give disabled parameters their own names in a state dict (a hook)."""
    for name in _disabled_parameters(module):
        state_dict[prefix + name] = state_dict.pop(f"{prefix}parametrizations.{name}.original")


def _take_names(module: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Load disabled parameters by their own names (a hook)."""
    for name in _disabled_parameters(module):
        if prefix + name in state_dict:
            state_dict[f"{prefix}parametrizations.{name}.original"] = state_dict.pop(prefix + name)


def _disabled_parameters(module: Any) -> list[str]:
    """Return the names of the parameters of a module that give zeros."""
    chains = module.parametrizations if parametrize.is_parametrized(module) else {}
    return [name for name, chain in chains.items() if isinstance(chain[0], _Zeros)]


class _Zeros(nn.Module):
    """Zeros in the place of a parameter, which gets no gradient."""

    def forward(self, parameter: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(parameter)


def undo(root: nn.Module) -> None:
    """Undo `install`, also where it was interrupted."""
    for module in list(root.modules()):
        if isinstance(module._modules.get(ATTACHED), ModuleBias):
            getattr(module, ATTACHED).uninstall(module)
        for name in _disabled_parameters(module):
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "hook", hook) in (_keep_names, _take_names):
                    del hooks[key]
        if isinstance(module, PreTrainedModel):
            unmark_saved_folders(module)
    enable_positions(root)


def prove(model: SequenceModel, places: Sequence[Place], inputs: Any, disable: Sequence[str]) -> None:
    """Refuse a module for which a batch does not show that the bias, and nothing else, is added.

    1. A bias of zero changes no output. 2. A trial bias enters every softmax exactly: the weights are those of the
    softmax of logits and bias, and hidden keys stay hidden. 3. After removal the outputs are those before.

    Raises:
        ValueError: A check failed; the message names it.
    """
    before = _outputs(model, inputs)

    @contextmanager
    def trial(make: Callable[[int], Encoding], disabled: Sequence[str]) -> Iterator[None]:
        with restoring(lambda: undo(model.module)):
            install([make(place.heads).to(model.device) for place in places], places, model.module, disabled)
            yield

    with trial(lambda heads: NoEncoding(), ()):
        _check_same(model, _outputs(model, inputs), before, "with a bias of zero its outputs differ from those without")
    seen = _Seen()
    with trial(_trial_encoding, disable):
        biases = [getattr(place.module, ATTACHED) for place in places]
        for bias in biases:
            bias.note = functools.partial(seen.note, bias)
        model.watch(inputs, seen.see, None)
    if {id(bias) for bias, *_ in seen.plain.values()} != set(map(id, biases)) or seen.unbiased:
        reason = f"{len(seen.biased)} attentions ran, {len(seen.plain)} got the bias"
        raise ValueError(f"an encoding cannot be attached to {model}: {reason}")
    for place, (bias, weights, visible) in seen.plain.items():
        _check_weights(model, bias, weights, visible, seen.biased[place])
    _check_same(model, _outputs(model, inputs), before, "after removal its outputs differ from those before")


class _Seen:
    """The attentions of a run with trial encodings.

    Attributes:
        biased: The weights of every attention, in the order of the run.
        plain: By the place of an attention in this order: its encoding, and what the attention is without the bias.
    """

    def __init__(self) -> None:
        self.biased: list[Tensor] = []
        self.plain: dict[int, tuple[ModuleBias, Tensor, Tensor]] = {}
        self._noting = False

    @property
    def unbiased(self) -> bool:
        """Whether an attention that got a bias was not seen afterwards."""
        return any(place >= len(self.biased) for place in self.plain)

    def note(self, bias: ModuleBias, plain: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Note an attention before it gets the bias."""
        self._noting = True  # the attention computed here is not one of the model
        self.plain[len(self.biased)] = (bias, *plain())
        self._noting = False

    def see(self, attention: Attention) -> None:
        """Note an attention as the model computes it."""
        if not self._noting:
            self.biased.append(attention.weights)


def _check_weights(model: SequenceModel, bias: ModuleBias, plain: Tensor, visible: Tensor, biased: Tensor) -> None:
    """Check that weights (..., n, n) are the softmax of logits and bias, given those without the bias."""
    n = plain.shape[-1]
    plain, biased = (each.reshape(-1, bias.heads, n, n).cpu().double() for each in (plain, biased))
    visible = visible.cpu().broadcast_to(*visible.shape[:-2], n, n)
    visible = visible.reshape(-1, visible.shape[-3] if visible.ndim > 2 else 1, n, n)
    logits = plain.log() + bias.encoding(n).detach().cpu().double()
    sink = (1 - plain.sum(-1, keepdim=True)).clamp(min=0) if bias.sink else torch.zeros(())
    exact = logits.exp() / (logits.exp().sum(-1, keepdim=True) + sink)
    rows = visible.any(-1, keepdim=True) & (plain.sum(-1, keepdim=True) > 0)
    off = float((exact - biased).masked_fill(~rows, 0).abs().max())
    if not off <= max(_EXACT, 64 * torch.finfo(model.dtype).eps):
        raise ValueError(
            f"an encoding cannot be attached to {model}: the bias does not enter its softmax exactly, weights are off "
            f"by {off:.3g}"
        )


def _trial_encoding(heads: int) -> Encoding:
    """Return a bias that differs between distances and between heads, of numbers that every dtype holds."""
    table = DistanceTable(heads, length=9, signed=True)
    numbers = torch.arange(table.values.numel()).view(table.values.shape)
    table.values.detach().copy_((5 * numbers % 17 - 8) / 4)
    return table


def _outputs(model: SequenceModel, inputs: Any) -> list[Tensor]:
    """Return the tensors of floats that a model returns."""

    def tensors(output: Any) -> Iterator[Tensor]:
        if isinstance(output, Tensor) and output.is_floating_point():
            yield output
        elif isinstance(output, dict):
            yield from (each for part in output.values() for each in tensors(part))
        elif isinstance(output, list | tuple):
            yield from (each for part in output for each in tensors(part))

    try:
        return list(tensors(model.outputs(inputs)))
    except Exception as error:
        raise ValueError(
            f"an encoding cannot be attached to {model}: it fails on the example_inputs with {type(error).__name__}: "
            f"{error}"
        ) from error


def _check_same(model: SequenceModel, one: list[Tensor], other: list[Tensor], problem: str) -> None:
    """Refuse outputs that differ by more than rounding."""
    allowed = max(ROUNDING, 8 * torch.finfo(model.dtype).eps)
    pairs = zip(one, other, strict=True)
    if not all(largest_difference(a.nan_to_num(), b.nan_to_num()) <= allowed for a, b in pairs):
        raise ValueError(f"an encoding cannot be attached to {model}: {problem}")
