"""Every attention that a running model computes, observed where torch computes it.

The only file that knows how torch computes attention: by `scaled_dot_product_attention`, by the function behind
`torch.nn.MultiheadAttention`, or by a softmax whose result multiplies the values, or exponentials by their sum.
"""

import inspect
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from pelocality._checks import HIDDEN
from pelocality._transforms import called_outside, inside_transform, without_vmap
from pelocality.models._restore import changed, hooked, restoring

MASKED = HIDDEN / 2
"""A key whose logit is at most this is hidden: logits of words are added to a mask, and are far above this number."""

Block = tuple[nn.ModuleList, int]
"""A list of layers, and the index of a layer in it."""

_ATEN = torch.ops.aten
SOFTMAXES = (torch.softmax, Tensor.softmax, functional.softmax, torch.special.softmax, torch._softmax, _ATEN.softmax)
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, _ATEN.matmul)
BATCHED = (*MATMULS, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, _ATEN.bmm)
_EXPONENTIALS = (torch.exp, Tensor.exp, torch.exp_, Tensor.exp_, _ATEN.exp, torch.exp2, Tensor.exp2, torch.special.exp2)
# what a function of torch computes
_ROLES: dict[Any, str] = {
    **dict.fromkeys((*BATCHED, torch.einsum, torch.mm, Tensor.mm, _ATEN.mm), "product"),
    **dict.fromkeys((*SOFTMAXES, functional.softmin), "softmax"),
    **dict.fromkeys(_EXPONENTIALS, "exponential"),
    functional.scaled_dot_product_attention: "kernel",
    functional.multi_head_attention_forward: "module",
}
_KERNEL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MODULE = tuple(inspect.signature(functional.multi_head_attention_forward).parameters)
_LEAST = torch.finfo(torch.float16).tiny  # a smaller largest output is nothing
_UNUSED = 256  # softmaxes that wait for their product: as many as heads whose softmaxes come before all products
_COMPARED = 8  # queries at which the output of torch's kernel is compared where no matrix is computed
_TOLERANCE = 5e-3  # error of the product of weights and values, relative to the largest: 8-bit weights round


class Attention(NamedTuple):
    """One attention of a running model.

    Attributes:
        block: The block in which it ran, None outside of every list of layers.
        weights: The weights that multiplied the values, (..., n, n).
        visible: The keys that each query may attend to, (..., n, n), in a shape that can be broadcast to `weights`.
        sink: Whether each row had more columns than tokens, so that the weights of the tokens sum to less than 1.
        call: The number of the call of a module in which it ran, None outside of every list of modules. Members of a
            list that read the same tensors, such as heads that are modules, have one number.
        owner: The innermost module with weights that ran, such as the one that projects queries and keys.
        values: The values that the weights multiplied, (..., n or n + 1, d), None if they were not seen.
        shifted: Of n + 1 columns, weights and visible keys without the first one. Those above are without the last one.
        whole: Whether one call of a softmax or of torch's kernel computed it, outside of `torch.vmap`.
        first: The column of the softmax with which the weights begin: 1 if they were cut from behind a sink.
    """

    block: Block | None
    weights: Tensor
    visible: Tensor
    sink: bool
    call: int | None = None
    owner: nn.Module | None = None
    values: Tensor | None = None
    shifted: tuple[Tensor, Tensor] | None = None
    whole: bool = True
    first: int = 0

    def tokens(self, column: int, queries: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return weights and visible keys of the tokens, of which the first has the column 0 or 1, for some queries."""
        weights, visible = (self.weights, self.visible) if self.shifted is None or not column else self.shifted
        return weights[..., queries, :], _of_queries(visible, queries)


class KernelAttention(NamedTuple):
    """One attention by torch's kernel, of which rows are computed as they are asked for.

    Attributes:
        block: As of `Attention`.
        kernel: The arguments of the kernel by name.
        call: As of `Attention`.
        owner: As of `Attention`.
    """

    block: Block | None
    kernel: Mapping[str, Any]
    call: int | None = None
    owner: nn.Module | None = None
    sink: bool = False

    def tokens(self, column: int, queries: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return weights and visible keys for some queries, as `Attention.tokens` does."""
        return kernel_weights(kernel_queries(self.kernel, queries))


class Observer(TorchFunctionMode):
    """Passes each attention of a running model to a callback, as soon as it is computed.

    An attention has as many keys as queries; cross-attention to another number of keys is passed over.

    Args:
        use: The callback. If it returns a function, the output of the attention is what this makes of it.
        length: The number of tokens n; None for attention over any number of tokens.
        matrices: Whether to compute the weights of torch's kernel, for an `Attention`. Otherwise the callback gets a
            `KernelAttention`, and the output of the kernel is compared at a few queries.

    Raises:
        ValueError: While the model runs: torch's kernel gave another output than its arguments explain.
    """

    def __init__(self, use: Callable[[Any], Any], length: int | None = None, matrices: bool = True) -> None:
        super().__init__()
        self.use, self.length, self.matrices = use, length, matrices
        self.block: Block | None = None
        """The block that runs."""
        self.paused = False
        """Whether what is computed now is no part of the model."""
        self._call: int | None = None  # the call that runs, of a member of a list or of a part of it
        self._owner: nn.Module | None = None  # the innermost module with weights that runs
        self._outer: list[tuple[Any, ...]] = []  # the block, the call and the owner around it, outer ones first
        self._numbers = itertools.count()  # numbers of calls
        self._last: dict[int, tuple[int, list[Any]]] = {}  # by list: the last call of a member, and its inputs
        self._softmaxes: deque[tuple[Tensor, Tensor, bool]] = deque(maxlen=_UNUSED)
        """Weights, visible keys, and whether the weights are exponentials without their sum."""
        self._rows: list[tuple[Any, Tensor, Tensor]] = []  # some queries of an attention at a time

    @contextmanager
    def observing(self, module: nn.Module) -> Iterator[None]:
        """Observe a module in a with-statement."""
        blocks, members = blocks_of(module), members_of(module)
        modules = [each for each in module.modules() if each in blocks or not _is_of_torch(each)]
        modules = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]  # take no hooks
        with hooked(modules, lambda *call: self._begin(members, blocks, *call), self._end), plain_torch(), self:
            yield

    def enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the block that begins to run."""
        self.block = block

    def _begin(self, members: Mapping[nn.Module, int], blocks: Mapping[nn.Module, Block], *call: Any) -> None:
        """Note the call of a module."""
        module, args, kwargs = call
        self._outer.append((self.block, self._call, self._owner))
        if self._owner is None or next(module.parameters(), None) is not None:
            self._owner = module
        if module in members:
            self._call = self._member_call(members[module], args, kwargs)
        elif self._call is not None:
            self._call = next(self._numbers)
        if module in blocks:
            self.enter(blocks[module], args, kwargs)

    def _member_call(self, members: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of the call of a member of a list: the last one if it read the same tensors."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        read = [(weakref.ref(each), 0 if each.is_inference() else each._version) for each in tensors]
        number, before = self._last.get(members, (0, []))
        # references to one tensor are one object
        ids, earlier = ([(id(tensor), version) for tensor, version in each] for each in (read, before))
        if not ids or ids != earlier:
            number = next(self._numbers)
        self._last[members] = number, read
        return number

    def _end(self, *call: Any) -> None:
        """Note that a call of a module has ended."""
        self.block, self._call, self._owner = self._outer.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        role = None if self.paused else _ROLES.get(func)
        if role is None:
            return func(*args, **kwargs)
        change = None
        if role == "product" and self._softmaxes:
            change = self._multiply(_factors([*args, *(each for name, each in kwargs.items() if name != "out")]))
        result = func(*args, **kwargs)
        if role == "kernel":
            call = kernel_call(args, kwargs)
            if inside_transform():
                call = {name: without_vmap(each, result.ndim) for name, each in call.items()}
            change = self.see_kernel(call, without_vmap(result))
        elif role == "module":
            self._see_module(func, module_call(args, kwargs))
        elif role != "product":
            states = args[0] if args else kwargs["input"]
            overwritten = kwargs.get("out") is not None or states is result
            states = result.log() if overwritten else -states if func is functional.softmin else states
            dim = -1 if role == "exponential" else args[1] if len(args) > 1 else kwargs.get("dim")
            logits, weights = (without_vmap(_keys_last(each, dim)) for each in (states, result))
            if logits is not None and weights is not None and self._covers(*weights.shape):
                self.see_softmax(logits, weights, role == "exponential")
        return result if change is None else change(result)

    def _use(self, weights: Tensor, visible: Tensor, sink: bool = False, values: Any = None, **how: Any) -> Any:
        """Pass an attention, with more attributes of it, to the callback, and return what this returns."""
        weights = weights if weights.ndim > 2 else weights[None]  # of one head of one text
        n, columns = weights.shape[-2:]
        if self._is_part(n, columns):
            return self._join(weights, visible, values)
        of_first = (weights, visible) if n == columns else (weights[..., :n], visible[..., :n])
        shifted = None if n == columns else (weights[..., 1:], visible[..., 1:])
        if inside_transform():
            how["whole"] = False
        attention = Attention(self.block, *of_first, sink, self._call, self._owner, values, shifted, **how)
        return called_outside(self.use, attention)

    def _covers(self, *shape: int) -> bool:
        """Return whether weights (..., n, n), perhaps with the column of a sink, or a part of them are over tokens."""
        if len(shape) < 2 or self._is_part(*shape[-2:]):
            return len(shape) > 1
        return shape[-1] - shape[-2] in (0, 1) and (shape[-2] > 1 if self.length is None else shape[-2] == self.length)

    def _is_part(self, queries: int, keys: int) -> bool:
        """Return whether weights may be those of some queries alone."""
        return queries < keys and (keys - queries > 1 if self.length is None else keys == self.length)

    def _join(self, weights: Tensor, visible: Tensor, values: Tensor | None) -> Any:
        """Use an attention once the last part of its queries is seen, and return what the callback returns."""
        place = self._owner, self._call, *weights.shape[:-2], weights.shape[-1]
        if self._rows and self._rows[0][0] != place:
            self._rows.clear()
        self._rows.append((place, weights.clone(), visible.expand(weights.shape).clone()))
        queries = sum(part.shape[-2] for _, part, _ in self._rows)
        if queries < weights.shape[-1]:
            return None
        _, parts, seen = zip(*self._rows, strict=True)
        self._rows.clear()
        if queries > weights.shape[-1]:
            return None
        return self._use(torch.cat(parts, -2), torch.cat(seen, -2), False, values, whole=False)

    # ---- scaled_dot_product_attention

    def see_kernel(self, call: dict[str, Any], output: Tensor) -> Any:
        """Compute the weights of a call of torch's kernel from its arguments, and compare those of one text with it."""
        if output.ndim < 3:
            call = call | {name: call[name][None] for name in ("query", "key", "value")}
            return self.see_kernel(call, output[None])
        query, key = call["query"], call["key"]
        n, keys = query.shape[-2], key.shape[-2]
        if query.is_nested or not self._covers(*query.shape[:-1], keys) or (n != keys and not self._is_part(n, keys)):
            return None
        queries: slice | Tensor = slice(None)
        matrices = self.matrices or n < keys
        if not matrices:  # keys are converted once, not for each part of the queries
            call = {**call, "key": key.to(torch.promote_types(key.dtype, torch.float32))}
            queries = torch.linspace(0, n - 1, _COMPARED, device=query.device).long()
        weights, visible = kernel_weights(call if matrices else kernel_queries(call, queries))
        expected = _for_each_head(weights[:1], call["value"][:1].to(weights.dtype))
        off = (expected - output[:1, ..., queries, :]).abs().max() / output[:1].abs().max().clamp(min=_LEAST)
        if not off <= max(_TOLERANCE, 16 * torch.finfo(output.dtype).eps):
            raise ValueError("torch's attention kernel gives another output than its arguments, as by dropout left on")
        if matrices:
            return self._use(weights, visible, values=call["value"])
        return called_outside(self.use, KernelAttention(self.block, call, self._call, self._owner))

    # ---- torch.nn.MultiheadAttention

    def _see_module(self, function: Callable[..., Any], call: dict[str, Any]) -> None:
        """Compute the weights of a call of the function behind `torch.nn.MultiheadAttention`."""
        n = call["query"].shape[0]
        if not is_self_attention(call) or not self._covers(1, n, n):
            return
        weights = without_vmap(function(**call | {"need_weights": True, "average_attn_weights": False})[1])
        weights = weights if weights.ndim == 4 else weights[None]  # (batch, head, query, key and added keys)
        self._use(weights[..., :n], without_vmap(module_visible(call)), weights.shape[-1] > n)

    # ---- a softmax whose result multiplies the values

    def see_softmax(self, logits: Tensor, weights: Tensor, without_sum: bool = False) -> None:
        """Remember a softmax over keys until a product shows that its result multiplies the values.

        Args:
            logits: Its argument.
            weights: Its result, or the exponentials of which it may become one when they are divided by their sum.
            without_sum: Whether they are these.
        """
        visible = (logits > MASKED) | (weights > 0)  # now: a module may overwrite its logits
        self._softmaxes.append((weights, visible, without_sum))

    def _multiply(self, factors: Iterator[tuple[Tensor, Tensor | None]]) -> Any:
        """Use the softmax that is a factor of a product, if there is one, and return what the callback returns."""
        for factor, values in factors:
            for index in reversed(range(len(self._softmaxes))):
                weights, visible, without_sum = self._softmaxes[index]
                if without_sum:
                    if (divided := _divided(weights, factor)) is None:
                        continue
                    weights, visible = divided, visible & ((divided != 0) | (weights == 0))
                if (first := _first_column(factor, weights, values)) is not None:
                    del self._softmaxes[index]
                    n, m = factor.shape[-2:]
                    used, visible = factor.reshape(*weights.shape[:-1], m), visible[..., first : first + m]
                    sink = weights.shape[-1] > n
                    return self._use(used, visible, sink, values, whole=not without_sum, first=first)
        return None


@contextmanager
def plain_torch() -> Iterator[None]:
    """Call the functions of torch one by one in a with-statement: no compiled code, and no kernel of whole layers."""
    fast = torch.backends.mha.get_fastpath_enabled()  # nn.TransformerEncoder has such a kernel
    with torch.compiler.set_stance("force_eager"), restoring(lambda: torch.backends.mha.set_fastpath_enabled(fast)):
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep what is computed in a with-statement from the observers in force."""
    with ExitStack() as stack:
        for observer in observers():
            stack.enter_context(changed(observer, "paused", True))
        yield


def observers() -> list[Observer]:
    """Return the observers in force."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if isinstance(mode, Observer)]


def kernel_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `scaled_dot_product_attention` by name."""
    return dict(zip(_KERNEL, args, strict=False)) | kwargs


def module_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `multi_head_attention_forward` by name."""
    return dict(zip(_MODULE, args, strict=False)) | kwargs


def module_visible(call: Mapping[str, Any]) -> Tensor:
    """Return the keys that are visible in a self-attention by `multi_head_attention_forward`.

    Args:
        call: Its arguments by name.

    Returns:
        (batch or 1, head or 1, n, n).
    """
    query, mask, padding = call["query"], call.get("attn_mask"), call.get("key_padding_mask")
    n = len(query)
    visible = torch.ones(1, 1, n, n, dtype=torch.bool, device=query.device)
    if mask is not None:  # (n, n) or (batch * head, n, n), True hides
        shown = ~mask if mask.dtype == torch.bool else mask > HIDDEN
        visible = visible & shown.reshape(-1, call["num_heads"] if shown.ndim == 3 else 1, n, n)
    if padding is not None:  # (batch, n), True hides
        shown = ~padding if padding.dtype == torch.bool else padding > HIDDEN
        visible = visible & shown.reshape(-1, 1, 1, n)
    return visible


def is_self_attention(call: Mapping[str, Any]) -> bool:
    """Return whether the queries and keys of a call of `multi_head_attention_forward` are of the same tokens."""
    query, key = call["query"], call["key"]
    same_shape = query.shape == key.shape
    return query is key or (same_shape and (query.data_ptr() == key.data_ptr() or torch.equal(query, key)))


def kernel_weights(call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the weights of a call of `scaled_dot_product_attention`, and the keys that are visible in it.

    Args:
        call: Its arguments by name.

    Returns:
        The weights (..., n, n) in at least float32, zeros for a query that sees no key, and the visible keys in a shape
        that can be broadcast to theirs.
    """
    logits, mask = kernel_logits(call), call.get("attn_mask")
    above = None if mask is None or mask.dtype == torch.bool else logits > MASKED
    in_place = logits.device.type == "cpu" and not logits.requires_grad  # new memory takes longer than the softmax
    weights = torch.softmax(logits, -1, out=logits) if in_place else logits.softmax(-1)
    if mask is None:
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        return weights, visible.tril() if call.get("is_causal") else visible
    visible = mask if above is None else above | (weights > 0)
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0), visible


def kernel_queries(call: Mapping[str, Any], queries: slice | Tensor) -> dict[str, Any]:
    """Return a call of `scaled_dot_product_attention` with some of its queries alone."""
    query, mask = call["query"], call.get("attn_mask")
    if call.get("is_causal"):
        position = torch.arange(query.shape[-2], device=query.device)
        mask = position <= position[queries, None]
    elif mask is not None:
        mask = _of_queries(mask, queries)
    return {**call, "query": query[..., queries, :], "attn_mask": mask, "is_causal": False}


def kernel_logits(call: Mapping[str, Any]) -> Tensor:
    """Return the logits of a call of `scaled_dot_product_attention`, with its mask, (..., n, n) in at least float32."""
    query, key, mask = call["query"], call["key"], call.get("attn_mask")
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        tensors = [(name, call[name]) for name in ("query", "key", "attn_mask") if call.get(name) is not None]
        floats = [(name, each) for name, each in tensors if each.dtype not in (torch.bool, torch.float64)]
        low = {name: each.to(torch.get_autocast_dtype(device)) for name, each in floats}
        with torch.autocast(device, enabled=False):  # the kernel rounds its arguments alone
            return kernel_logits({**call, **low})
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = call["scale"] if call.get("scale") is not None else query.shape[-1] ** -0.5
    logits = _for_each_head(scale * query.to(dtype), key.to(dtype).mT)
    if call.get("is_causal"):
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is None:
        return logits
    return logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits.add_(mask)


def blocks_of(module: nn.Module) -> dict[nn.Module, Block]:
    """Return the members of the outermost module lists, each with its list and its index in it."""
    blocks: dict[nn.Module, Block] = {}
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            blocks |= {block: (child, index) for index, block in enumerate(child) if block is not None}
        else:
            blocks |= blocks_of(child)
    return blocks


def members_of(module: nn.Module) -> dict[nn.Module, int]:
    """Return the members of all lists and sequences of modules, each with a number of its list."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    return {member: number for number, each in enumerate(lists) for member in each if member is not None}


def _of_queries(visible: Tensor, queries: slice | Tensor) -> Tensor:
    """Return the rows of some queries of visible keys or a mask, (..., n or 1, n)."""
    return visible if visible.ndim < 2 or visible.shape[-2] == 1 else visible[..., queries, :]


def _for_each_head(states: Tensor, shared: Tensor) -> Tensor:
    """Return the product of (..., head, n, i) with keys or values (..., group, i, j), which adjacent heads share."""
    *_, heads, n, i = states.shape
    groups = shared.shape[-3]
    product = states.reshape(*states.shape[:-3], groups, heads // groups * n, i) @ shared
    return product.reshape(*product.shape[:-3], heads, n, product.shape[-1])


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is one of torch's without parts, in which no attention runs: hooks there take long."""
    return not module._modules and type(module).__module__.startswith("torch.nn.modules")


def _keys_last(states: Tensor, dim: Any) -> Tensor | None:
    """Return the logits or weights of a softmax over an axis with the keys last; None if they are not a matrix."""
    if states.ndim < 2 or dim not in (-1, -2, states.ndim - 1, states.ndim - 2):
        return None
    return states if dim in (-1, states.ndim - 1) else states.mT


def _factors(arguments: list[Any]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the factors of a product (..., i, j), summed over j, each with the other factor (..., j, d) if known."""
    tensors = [without_vmap(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    if len(tensors) < 2:
        return
    if not isinstance(arguments[0], str):
        *_, first, second = tensors
        yield first, second
        if min(first.ndim, second.ndim) > 1:
            yield second.mT, first.mT
        return
    terms, arrow, output = arguments[0].replace(" ", "").partition("->")
    output = output if arrow else "".join(letter for letter in terms if terms.count(letter) == 1)
    named = list(zip(tensors, terms.split(","), strict=False))
    for factor, term in named:
        if len(term) > 1:
            last_stays = term[-1] in output and term[-2] not in output
            key = term[-2] if last_stays else term[-1]
            if key in output:  # the product mixes heads, or something else than keys
                continue
            others = [(other, letters) for other, letters in named if other is not factor and key in letters]
            values = [other.movedim(letters.index(key) - len(letters), -2) for other, letters in others if key != "."]
            yield factor.mT if last_stays else factor, values[0] if len(values) == 1 else None


def _first_column(factor: Tensor, weights: Tensor, values: Tensor | None) -> int | None:
    """Return the column of weights (..., n, m) with which a factor begins that is all of them or n; None if neither."""
    n, m = weights.shape[-2:]
    if factor.shape[-1] > n and (values is None or values.shape[-2] != factor.shape[-1]):
        return None
    if factor.ndim < 2 or factor.numel() < math.prod(weights.shape[:-1]) * n or factor.shape[-2] != n:
        return None
    starts = range(m - factor.shape[-1] + 1) if factor.shape[-1] == m or factor.shape[-1] == n == m - 1 else ()
    return next((at for at in starts if _holds(factor, weights[..., at : at + factor.shape[-1]])), None)


def _divided(exponentials: Tensor, factor: Tensor) -> Tensor | None:
    """Return a factor in the shape of exponentials (..., n, m) if it is these, some set to zero, by their sum."""
    if factor.ndim < 2 or factor.shape[-2:] != exponentials.shape[-2:] or factor.numel() != exponentials.numel():
        return None
    factor = factor.reshape(exponentials.shape)
    kept = exponentials.where(factor != 0, 0)
    total = kept.sum(-1, keepdim=True)
    off = (factor * total - kept).abs() > 16 * torch.finfo(factor.dtype).eps * total
    return None if bool(off.any()) else factor


def _holds(factor: Tensor, weights: Tensor) -> bool:
    """Return whether a factor is these weights, in another shape or precision."""
    same = factor.data_ptr() == weights.data_ptr() and factor.dtype == weights.dtype
    if same and factor.numel() == weights.numel() and factor.stride()[-2:] == weights.stride()[-2:]:
        return True
    weights = weights.to(factor.dtype)
    if factor.numel() == weights.numel():
        weights = weights.reshape(factor.shape)
    elif factor.ndim != weights.ndim or any(b not in (1, a) for a, b in zip(factor.shape, weights.shape, strict=True)):
        return False
    off = (factor != weights).any(-1)
    return not bool(off.any()) or not bool((off & (factor != 0).any(-1)).any())  # rows of padding may be set to zero
