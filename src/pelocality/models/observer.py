"""Every attention that a running model computes, observed where torch computes it.

The only file that knows how torch computes attention: by `scaled_dot_product_attention`, by the function behind
`torch.nn.MultiheadAttention`, or by a softmax whose result multiplies the values.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from pelocality.models._restore import hooked, restoring

MASKED = -5e3
"""A key whose logit is at most this is hidden: half of -1e4, the weakest mask that transformers adds.

Logits of words are far above this number, and far below it once a mask is added. Masks that a user passes hide from
`_checks.HIDDEN` on, which large logits or biases by distance could reach.
"""

Block = tuple[nn.ModuleList, int]
"""A list of layers, and the index of a layer in it."""

SOFTMAXES = (torch.softmax, Tensor.softmax, functional.softmax)
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
BATCHED = (*MATMULS, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm)
PRODUCTS = (*BATCHED, torch.einsum)
_KERNEL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MODULE = tuple(inspect.signature(functional.multi_head_attention_forward).parameters)
_LEAST = torch.finfo(torch.float16).tiny  # a smaller largest output is nothing
_TOLERANCE = 5e-3  # of the product of weights and values, relative to the largest number: rounding of 8-bit weights


class Attention(NamedTuple):
    """One attention of a running model.

    Attributes:
        block: The block in which it ran, None outside of every list of layers.
        weights: The weights that multiplied the values, (..., n, n).
        visible: The keys that each query may attend to, (..., n, n), in a shape that can be broadcast to `weights`.
        sink: Whether each row had more columns than keys, so that the weights of the keys sum to less than 1.
    """

    block: Block | None
    weights: Tensor
    visible: Tensor
    sink: bool


class Observer(TorchFunctionMode):
    """Passes each attention of a running model to a callback, as soon as it is computed.

    The outputs of the model do not change. An attention has as many keys as queries; cross-attention to another number
    of keys is passed over.

    Args:
        use: The callback.
        length: The number of tokens n; None for attention over any number of tokens.

    Raises:
        ValueError: While the model runs: torch's kernel gave another output than its arguments explain.
    """

    def __init__(self, use: Callable[[Attention], None], length: int | None = None) -> None:
        super().__init__()
        self.use, self.length = use, length
        self.block: Block | None = None
        """The block that runs."""
        self.paused = False
        """Whether what is computed now is no part of the model."""
        self._softmax: tuple[Tensor, Tensor] | None = None  # the last logits and weights, until they multiply values

    @contextmanager
    def observing(self, module: nn.Module) -> Iterator[None]:
        """Observe a module in a with-statement."""
        blocks = blocks_of(module)
        fast = torch.backends.mha.get_fastpath_enabled()  # of nn.TransformerEncoder: a kernel that no mode can see

        with (
            hooked(blocks, lambda block, args, kwargs: self.enter(blocks[block], args, kwargs)),
            torch.compiler.set_stance("force_eager"),  # compiled code calls no function of torch
            restoring(lambda: torch.backends.mha.set_fastpath_enabled(fast)),
        ):
            torch.backends.mha.set_fastpath_enabled(False)
            with active(self):
                yield

    def enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the block that begins to run."""
        self.block = block

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self._softmax is not None and func in PRODUCTS:
            self._multiply([*args, *kwargs.values()])
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            self.see_kernel(kernel_call(args, kwargs), result)
        elif func is functional.multi_head_attention_forward:
            self._see_module(func, module_call(args, kwargs))
        elif func in SOFTMAXES and self._covers(*result.shape):
            self.see_softmax(args[0] if args else kwargs["input"], result)
        return result

    def _covers(self, *shape: int) -> bool:
        """Return whether weights of a shape (..., n, n), perhaps with the column of a sink, are over the tokens."""
        if len(shape) < 3 or shape[-1] - shape[-2] not in (0, 1):
            return False
        return shape[-2] > 1 if self.length is None else shape[-2] == self.length

    # ---- scaled_dot_product_attention

    def see_kernel(self, call: dict[str, Any], output: Tensor) -> None:
        """Compute the weights of a call of torch's kernel from its arguments, and compare those of one text with it."""
        query, key = call["query"], call["key"]
        if query.is_nested or not self._covers(*query.shape[:-1], key.shape[-2]) or query.shape[-2] != key.shape[-2]:
            return
        weights, visible = kernel_weights(call)
        value = _for_every_head(call["value"], query)[:1].to(weights.dtype)
        off = (weights[:1] @ value - output[:1]).abs().max() / output[:1].abs().max().clamp(min=_LEAST)
        if not off <= max(_TOLERANCE, 16 * torch.finfo(output.dtype).eps):
            reason = "torch's attention kernel gives another output than the softmax of its arguments"
            off_by = f"(off by {float(off):.1g} of the largest)"
            raise ValueError(f"{reason} {off_by}, as with dropout that is always on")
        self.use(Attention(self.block, weights, visible, False))

    # ---- torch.nn.MultiheadAttention

    def _see_module(self, function: Callable[..., Any], call: dict[str, Any]) -> None:
        """Compute the weights of a call of the function behind `torch.nn.MultiheadAttention`."""
        n = call["query"].shape[0]
        if not is_self_attention(call) or not self._covers(1, n, n):
            return
        weights = function(**call | {"need_weights": True, "average_attn_weights": False})[1]
        weights = weights if weights.ndim == 4 else weights[None]  # (batch, head, query, key and added keys)
        self.use(Attention(self.block, weights[..., :n], module_visible(call, MASKED), weights.shape[-1] > n))

    # ---- a softmax whose result multiplies the values

    def see_softmax(self, logits: Tensor, weights: Tensor) -> None:
        """Remember a softmax over keys until a product shows that its result multiplies the values."""
        self._softmax = logits, weights

    def _multiply(self, arguments: list[Any]) -> None:
        """Use the last softmax if it is a factor of a product."""
        assert self._softmax is not None
        logits, weights = self._softmax
        n = weights.shape[-2]
        for factor in _tensors(arguments):
            whole = factor.numel() >= math.prod(weights.shape[:-1]) * n
            if whole and factor.shape[-2:] in (weights.shape[-2:], (n, n)) and _holds(factor, weights):
                self._softmax = None
                used = factor[..., :n].reshape(*weights.shape[:-1], n)
                visible = (logits[..., :n] > MASKED) | (weights[..., :n] > 0)
                self.use(Attention(self.block, used, visible, weights.shape[-1] > n))
                return


@contextmanager
def active(mode: TorchFunctionMode) -> Iterator[None]:
    """Put a mode into force in a with-statement; an interrupt at its end does not leave the mode in force."""

    def undo() -> None:
        if mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    with restoring(undo):
        mode.__enter__()  # type: ignore[no-untyped-call]
        yield


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep what is computed in a with-statement from the observers in force."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    observers = [mode for mode in stack if isinstance(mode, Observer) and not mode.paused]

    def undo() -> None:
        for observer in observers:
            observer.paused = False

    with restoring(undo):
        for observer in observers:
            observer.paused = True
        yield


def kernel_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `scaled_dot_product_attention` by name."""
    return dict(zip(_KERNEL, args, strict=False)) | kwargs


def module_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `multi_head_attention_forward` by name."""
    return dict(zip(_MODULE, args, strict=False)) | kwargs


def module_visible(call: Mapping[str, Any], hidden: float) -> Tensor:
    """Return the keys that are visible in a self-attention by `multi_head_attention_forward`.

    Args:
        call: Its arguments by name.
        hidden: A float mask hides a key if it is at most this number.

    Returns:
        (batch or 1, head or 1, n, n).
    """
    query, mask, padding = call["query"], call.get("attn_mask"), call.get("key_padding_mask")
    n = len(query)
    visible = torch.ones(1, 1, n, n, dtype=torch.bool, device=query.device)
    if mask is not None:  # (n, n) or (batch * head, n, n), True hides
        shown = ~mask if mask.dtype == torch.bool else mask > hidden
        visible = visible & shown.reshape(-1, call["num_heads"] if shown.ndim == 3 else 1, n, n)
    if padding is not None:  # (batch, n), True hides
        shown = ~padding if padding.dtype == torch.bool else padding > hidden
        visible = visible & shown.reshape(-1, 1, 1, n)
    return visible


def is_self_attention(call: Mapping[str, Any]) -> bool:
    """Return whether the queries and keys of a call of `multi_head_attention_forward` are of the same tokens."""
    query, key = call["query"], call["key"]
    return query is key or (
        query.shape == key.shape and (query.data_ptr() == key.data_ptr() or torch.equal(query, key))
    )


def kernel_weights(call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the weights of a call of `scaled_dot_product_attention`, and the keys that are visible in it.

    Args:
        call: Its arguments by name.

    Returns:
        The weights (..., n, n) in at least float32, zeros for a query that sees no key, and the visible keys in a shape
        that can be broadcast to theirs.
    """
    query, mask, n = call["query"], call.get("attn_mask"), call["query"].shape[-2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = _for_every_head(call["key"], query)
    scale = call["scale"] if call.get("scale") is not None else query.shape[-1] ** -0.5
    logits = (scale * query.to(dtype)) @ key.to(dtype).transpose(-1, -2)
    if mask is None:
        visible = torch.ones(n, n, dtype=torch.bool, device=query.device)
        if call.get("is_causal"):
            logits.masked_fill_(~visible.tril_(), -torch.inf)
        return logits.softmax(-1), visible
    if mask.dtype == torch.bool:
        visible = mask
        logits.masked_fill_(~mask, -torch.inf)
    else:
        logits += mask
        visible = logits > MASKED
    weights = logits.softmax(-1)
    visible = visible if mask.dtype == torch.bool else visible | (weights > 0)
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0), visible


def blocks_of(module: nn.Module) -> dict[nn.Module, Block]:
    """Return the members of the outermost module lists, each with its list and its index in it."""
    found: dict[nn.Module, Block] = {}
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found |= {block: (child, index) for index, block in enumerate(child) if block is not None}
        else:
            found |= blocks_of(child)
    return found


def _for_every_head(states: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries: groups of adjacent heads share them."""
    groups = query.shape[-3] // states.shape[-3]
    return states if groups == 1 else states.repeat_interleave(groups, -3)


def _tensors(arguments: list[Any]) -> Iterator[Tensor]:
    """Return the matrices among the arguments of a product, those in lists included."""
    for each in arguments:
        if isinstance(each, list | tuple):
            yield from _tensors(list(each))
        elif isinstance(each, Tensor) and each.ndim > 2:
            yield each


def _holds(factor: Tensor, weights: Tensor) -> bool:
    """Return whether a factor is these weights: in another shape or precision, or without the column of a sink."""
    weights = weights[..., : factor.shape[-1]]
    if factor.data_ptr() == weights.data_ptr() and factor.dtype == weights.dtype:
        return True
    weights = weights.to(factor.dtype)
    if factor.numel() == weights.numel():
        weights = weights.reshape(factor.shape)
    elif factor.ndim != weights.ndim or any(b not in (1, a) for a, b in zip(factor.shape, weights.shape, strict=True)):
        return False
    off = (factor != weights).any(-1)
    return not bool(off.any()) or not bool((off & (factor != 0).any(-1)).any())  # rows of padding may be set to zero
