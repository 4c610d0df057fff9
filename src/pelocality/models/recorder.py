"""What each attention of a running model does with positions, recorded from the calls that the model makes.

The model runs unchanged but for one thing: every linear map of the tokens returns the same vector at each of them.
Queries and keys then differ between tokens by position alone, whatever the weights are and whatever the layers below
have done, and the long runs that a window of some thousand tokens needs cost no products.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pelocality.metrics._tolerance import HALF
from pelocality.models._restore import changed, hooked
from pelocality.models.families import Window, attached_biases
from pelocality.models.observer import BATCHED, MASKED, MATMULS, Block, Observer, kernel_call, kernel_logits

SHORT = 61  # positions that are compared one by one; a prime, so that hardly another axis has its size
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)  # names of classes
_LOOKUPS = (nn.functional.embedding, torch.index_select, Tensor.index_select, Tensor.__getitem__)
_LARGE = 2**24  # numbers of a tensor that is a matrix of weights rather than states


class Reach(NamedTuple):
    """Which keys (n, n) the queries see, whether none lies after its query, the window, and whether padding is seen."""

    visible: Tensor
    causal: bool
    window: Window
    padding: bool


class Lookup(NamedTuple):
    """A table of which rows were read by position: the table (row, d), the rows (n,) or (n, n), and the block."""

    block: Block | None
    table: Tensor
    rows: Tensor


class Call(NamedTuple):
    """One attention, of the first positions that are compared one by one.

    Attributes:
        block: The block in which it ran.
        query: (head, n, d_head) as they enter the product, or None where they were not seen.
        key: (head of keys, n, d_head), likewise.
        logits: (head, n, n) before the softmax, masked ones far below the others, in float64 on the CPU.
        weights: (head, n, n), likewise.
        reach: Which keys are visible, over the full length of the run.
        sinks: The weight of learned sinks (head, n), likewise, or None where rows sum to 1 over the sequence.
        owner: The module that computed it.
    """

    block: Block | None
    query: Tensor | None
    key: Tensor | None
    logits: Tensor
    weights: Tensor
    reach: Reach
    sinks: Tensor | None = None
    owner: nn.Module | None = None

    @property
    def states(self) -> Tensor | None:
        """Queries and keys that were seen and are not zero, as more heads (head, n, d_head) on the CPU, or None."""
        seen = [each.cpu() for each in (self.query, self.key) if each is not None and bool(each.any())]
        return torch.cat(seen) if seen else None


class NoRowError(Exception):
    """A position for which a table has no row."""


class _LayersBeginError(Exception):
    """The first block is called."""


class Recorder(Observer):
    """Records the attentions and the lookups by position of one sequence of n tokens (batch of 1).

    Every softmax over the tokens counts as attention: with constant content the product with the values shows nothing.

    Args:
        tokens: The number of tokens, padding included.
        constant: Whether every linear map of the tokens returns the same vector at each of them.
        real: The tokens that are not padding.
        change: Called with each function of torch that runs, and its result. The model runs as it is, and stops before
            its first block.
        most: The number of tokens that are compared one by one.
    """

    def __init__(
        self, tokens: int, constant: bool = True, real: slice = slice(None), change: Any = None, most: int = SHORT
    ) -> None:
        super().__init__(lambda attention: None, tokens)
        self.tokens, self.constant, self.real, self.change = tokens, constant and change is None, real, change
        start, stop, _ = real.indices(tokens)
        self.part = slice(start, min(stop, start + most))  # the tokens that are compared one by one
        self.input_states: Tensor | None = None  # the states (1, n, ...) before the first block
        self.output: Any = None  # the output (1, n, d) of a model that ran to its end
        self.calls: list[Call] = []
        self.lookups: list[Lookup] = []
        self._factors: tuple[Tensor, Tensor] | None = None
        self._maps = 0  # linear maps so far: the seed of the next vector
        self._reaches: dict[tuple[Tensor | None, bool], Reach] = {}  # layers share masks
        self._in_half = False

    @contextmanager
    def observing(self, module: nn.Module) -> Iterator[None]:
        """Observe a module in a with-statement, until it ends or its first block is called."""
        self._in_half = self.constant and any(each.dtype in HALF for each in module.parameters())
        maps = [each for each in module.modules() if hasattr(each, "out_features") and type(each) is not nn.Linear]
        with suppress(_LayersBeginError), super().observing(module), hooked(maps, after=self._mapped):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch: on constant content in float32, also of a model in half precision."""
        result = self._run(func, types, args, kwargs or {})
        return _in_float32(result) if self._in_half else result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch and record it, or return something constant in its place."""
        if self.paused:
            return func(*args, **kwargs)
        if self.constant and (constant := self._constant_map(func, args, kwargs)) is not None:
            return constant
        if func in _LOOKUPS:
            self._see_lookup(func, [*args, *kwargs.values()])
        elif self._in_half:
            args, kwargs = tree_map(_in_float32, (args, kwargs))
        if self.constant and func is nn.functional.scaled_dot_product_attention:
            call = kernel_call(args, kwargs)
            output = call["query"].new_zeros(*call["query"].shape[:-1], call["value"].shape[-1])
            self.see_kernel(call, output)
            return output
        result = super().__torch_function__(func, types, args, kwargs)
        if self.change is not None:
            self.change(func, result)
        if func in BATCHED and result.ndim > 2 and result.shape[-2:] == (self.tokens, self.tokens):
            *_, first, second = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            self._factors = (first, second.transpose(-1, -2))
        return result

    def _constant_map(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return one vector at every token in place of a linear map of the tokens; None for anything else."""
        if func is nn.functional.linear:
            states, size = args[0], (args[1] if len(args) > 1 else kwargs["weight"]).shape[0]
        elif func in (torch.addmm, Tensor.addmm):
            states, size = args[1], args[2].shape[-1]
        elif func in MATMULS and args[0].ndim == 3 and args[1].ndim == 2:
            states, size = args[0], args[1].shape[-1]
        else:
            return None
        if self.tokens not in states.shape[:-1] or size == self.tokens:
            return None
        self._maps += 1
        seeded = torch.Generator("cpu").manual_seed(self._maps)
        vector = torch.randn(size, generator=seeded, device="cpu")
        return vector.to(states.device, states.dtype).expand(*states.shape[:-1], size).clone()

    def _mapped(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """Return one vector at every token in place of the output of a module that is a linear map."""
        replaced = self.constant and isinstance(output, Tensor)
        return self._constant_map(nn.functional.linear, (output, output.flatten(0, -2).mT), {}) if replaced else None

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        """Note the block that begins to run, and the states before the first one."""
        super().enter(block, args, kwargs)
        for each in (*args, *kwargs.values()):
            if self.input_states is None and isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 2:
                self.input_states = each
        if self.change is not None and self.input_states is not None:
            raise _LayersBeginError

    def see_kernel(self, call: dict[str, Any], output: Tensor) -> None:
        """Record a call of torch's kernel, with the logits that it does not hand out."""
        n, part, mask, causal = self.tokens, self.part, call.get("attn_mask"), bool(call.get("is_causal"))
        if call["query"].shape[-2] != n or call["key"].shape[-2] != n:
            return
        if (mask, causal) not in self._reaches:
            seen = torch.ones(n, n, dtype=torch.bool, device=call["query"].device) if mask is None else mask
            seen = seen if seen.dtype == torch.bool else seen > MASKED
            self._reaches[mask, causal] = self._reach(seen.tril() if causal else seen)
        query, key = (call[name][..., part, :] for name in ("query", "key"))
        corner = None if mask is None else mask.broadcast_to(*mask.shape[:-2], n, n)[..., part, part]
        logits = _flat(kernel_logits(call | {"query": query, "key": key, "attn_mask": corner}))
        weights, reach = logits.softmax(-1).cpu().double(), self._reaches[mask, causal]
        query, key, logits = _flat(query), _flat(key), logits.cpu().double()
        self.calls.append(Call(self.block, query, key, logits, weights, reach, owner=self._owner))

    def see_softmax(self, logits: Tensor, weights: Tensor, without_sum: bool = False) -> None:
        """Record an attention that is computed step by step."""
        n, part, factors, self._factors = self.tokens, self.part, self._factors, None
        if without_sum or weights.shape[-2] != n or (weights.shape[-1] > n and factors is None):  # with a learned sink
            return
        logits, weights = _flat(logits), _flat(weights)
        reach = self._reach(((logits > MASKED) | (weights > 0))[..., :n])
        query, key = (None, None) if factors is None else (_flat(each)[:, part] for each in factors)
        logits, weights = (each[:, part].cpu().double() for each in (logits, weights))
        sinks = weights[..., n:].sum(-1) if weights.shape[-1] > n else None
        self.calls.append(
            Call(self.block, query, key, logits[..., part], weights[..., part], reach, sinks, self._owner)
        )

    def _reach(self, visible: Tensor) -> Reach:
        """Return the reach of the tokens from visible keys (..., n, n); a window without a name is "irregular"."""
        every = _flat(visible.broadcast_to(*visible.shape[:-2], self.tokens, self.tokens)).any(0)
        visible, seen_by_tokens = every[self.real, self.real], every[self.real].any(0)
        seen_by_tokens[self.real] = False
        padding = bool(seen_by_tokens.any())
        n, distance = len(visible), distances(len(visible), visible.device)
        seen = distance[visible]
        behind, ahead = (int(seen.amax()), int(-seen.amin())) if len(seen) else (0, 0)
        causal = ahead <= 0 and n > 1
        if torch.equal(visible, (distance <= behind) & (distance >= -ahead)):
            limit = None if max(behind, ahead) == n - 1 else ("window", behind + 1 if causal else behind)
            return Reach(visible, causal, limit if causal or behind == ahead else "irregular", padding)
        chunk = max(int((~visible[:, 0]).int().argmax()), 1)  # the first query that does not see the first key
        number = torch.arange(n, device=visible.device) // chunk
        same = (number[:, None] == number) & ((distance >= 0) | (not causal))
        return Reach(visible, causal, ("chunks", chunk) if torch.equal(visible, same) else "irregular", padding)

    def _see_lookup(self, func: Any, named: list[Any]) -> None:
        """Record the rows of a table that were read, one for each token or for each pair of tokens."""
        rows, table = named[:2] if func is nn.functional.embedding else (named[-1], named[0])
        rows = rows[0] if isinstance(rows, tuple) else rows
        shape = {self.tokens: (self.tokens,), self.tokens**2: (self.tokens, self.tokens)}
        if not (isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64) and rows.numel() in shape):
            return
        if table.is_floating_point() and table.ndim == 2 and bool((rows != rows.flatten()[0]).any()):
            first = 0 if func is nn.functional.embedding else -len(table)
            if (missing := rows[(rows < first) | (rows >= len(table))]).numel():
                raise NoRowError(f"a table of {len(table)} rows has no row {int(missing[0])}")
            self.lookups.append(Lookup(self.block, table.detach(), rows.reshape(shape[rows.numel()])))


def _in_float32(each: Any) -> Any:
    """Return a tensor of half precision in float32, but not large ones: weights, of which nothing is read."""
    half = isinstance(each, Tensor) and each.dtype in HALF
    return each.float() if half and each.numel() < _LARGE else each


def _flat(states: Tensor) -> Tensor:
    """Return (n, d), (1, head, n, d) or (head, n, d) as (head, n, d)."""
    return states.reshape(-1, *states.shape[-2:])


def distances(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the distance i - j from each query back to each key: (n, n)."""
    position = torch.arange(n, device=device)
    return position[:, None] - position


@contextmanager
def unrotated(model: nn.Module) -> Iterator[None]:
    """Run a model with angles of 0 in a with-statement, as far as these are made by rotary modules."""
    rotary = [each for each in model.modules() if _ROTARY.search(type(each).__name__)]
    with ExitStack() as still, hooked(rotary, after=_without_angles, last=True):
        for each in attached_biases(model):
            if each.is_rotation:  # an attached rotation takes the place of what these modules return
                still.enter_context(changed(each, "encoding", each.encoding.scaled(0.0)))
        yield


def _without_angles(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Replace cosines and sines in the output of a module by 1 and 0."""
    if isinstance(output, Tensor) and output.is_complex():
        return torch.ones_like(output)
    pair = output if isinstance(output, tuple) and all(isinstance(each, Tensor) for each in output) else ()
    if len(pair) != 2 or pair[0].shape != pair[1].shape:
        return None
    cos, sin = pair
    squares = cos.float() ** 2 + sin.float() ** 2
    if not bool((squares - squares.mean()).abs().max() < 0.02 * squares.mean()):
        return None  # queries and keys come in such pairs too
    if not bool(cos[..., 0, :].any()):  # sines come first, and those of position 0 are 0
        return torch.zeros_like(cos), torch.ones_like(sin)
    return torch.ones_like(cos), torch.zeros_like(sin)
