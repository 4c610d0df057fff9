"""The influence of each position on the hidden states at each other: locality and symmetry without attention."""

import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from pelocality._checks import count
from pelocality._distributed import fully_sharded
from pelocality.models._calls import call_of
from pelocality.models._inference import inference
from pelocality.models._restore import changed, hooked
from pelocality.models._weights import token_embeddings
from pelocality.models.function import AttentionFunction
from pelocality.models.inputs.batches import bytes_of
from pelocality.models.layers import texts_of
from pelocality.models.measuring.identical_words import positional_attention
from pelocality.models.measuring.result import PositionalAttention
from pelocality.models.measuring.samples import hides_future
from pelocality.models.measuring.text_averages import TextAverage, text_average
from pelocality.models.observer import Attention, Block, blocks_of, plain_torch
from pelocality.models.sequence_model import (
    SequenceModel,
    configurations,
    equal_but_for_rounding,
    largest_difference,
    map_tensors,
)
from pelocality.models.token_proof import clear_lengths, same_numbers, text_of

# Numbers of the hidden states of tangents that run as one batch: more are not faster on a CPU.
_AT_A_TIME, _AT_A_TIME_ON_GPU = 2**19, 2**25
_STEPS = (1e-3, 1e-4)  # steps of finite differences, relative to the embeddings: large ones may route tokens otherwise
_Map = Callable[[Tensor], tuple[Tensor, ...]]  # from embeddings, or a direction of these, to every layer
_Way = Callable[[_Map, Tensor], _Map]  # from that of embeddings, and embeddings, to that of directions
_FAR = 0.1  # from the finite difference, relative to it: far above rounding, far below a part without derivative


class Influence(SequenceModel):
    r"""A model whose attention is the influence of its positions on each other, in the place of a model.

    `influence` explains it, and is all that most need. ``positional_attention`` and ``text_average`` measure an
    `Influence` as any model.

    Args:
        model: As for `influence`.
        directions: As for `influence`.
        seed: As for `influence`.

    Raises:
        TypeError: As for `SequenceModel`, or a function, which has no hidden states.
        ValueError: As for `SequenceModel`, or directions or a seed that are too small.
    """

    declares_attention = True

    def __init__(self, model: nn.Module | SequenceModel, directions: int = 2, seed: int = 0) -> None:
        model = SequenceModel.of(model)
        if isinstance(model, AttentionFunction):
            raise TypeError("model must be a module, whose hidden states have derivatives, got an AttentionFunction")
        vars(self).update(vars(model))
        self.directions, self.seed = count("directions", directions), count("seed", seed, least=0)
        self._way: _Way | None = None  # to derivatives, found on the first text
        self._axes: dict[nn.Module, int] | None = None  # of tokens in the hidden states that modules return

    def why_not_measured(self) -> str | None:
        """Return None: no attention is needed."""
        return None

    def changed_token(self, inputs: Any, other: Any) -> int | None:
        """Return the only position whose hidden states before the first layer differ between two inputs, or None."""
        with self.explaining(inputs), inference(self.module), self.observable():
            texts = [next(single_texts(self.moved(each))) for each in (inputs, other)]
            before = [layers_and_run(self, each, self._axes or {})[1] for each in texts]
        moved = torch.sub(*before).abs().amax(-1).flatten()
        return int(moved.argmax()) if int((moved > _FAR * moved.max()).sum()) == 1 else None

    def watch(self, inputs: Any, use: Callable[[Attention], None], length: int | None, **options: Any) -> Any:
        """Pass the influence in each layer to a callback, as the attention of one head.

        Raises:
            ValueError: The model fails, or an operation of it has no derivative.
        """
        with self.explaining(inputs), self.inference(), self.observable(), _differentiable(self.module):
            inputs = self.moved(inputs)
            images = self._call_with_images(inputs) if self.holds_images(inputs) else None
            tokens = inputs if images is None else {name: inputs[name] for name in ("input_ids", "attention_mask")}
            # what is read from a device is read before it has work to do
            texts = [(text, self._seed_of(text)) for text in single_texts(tokens)]
            by_text = [self._layers(*text, row, images) for row, text in enumerate(texts)]
            if bool((torch.cat([total.sum(-1) for layers in by_text for _, total in layers]) == 0).any()):
                what = "some of its hidden states depend on no input embedding"
                raise ValueError(f"{what}: a part of it has no derivative")
        for parts in zip(*by_text, strict=True):
            n = max(len(total) for _, total in parts)
            rows = [total / total.sum(-1, keepdim=True) for _, total in parts]
            padded = [nn.functional.pad(each, (0, n - len(each), 0, n - len(each))) for each in rows]
            weights = torch.stack(padded)[:, None]
            visible = torch.ones_like(weights, dtype=torch.bool)
            # other zeros than the future's are no mask: influence from far away may underflow
            use(Attention(parts[0][0], weights, visible.tril() if hides_future(weights > 0) else visible, False))

    def _seed_of(self, inputs: Any) -> int:
        """Return the seed of the directions of a text."""
        content = inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
        return zlib.crc32(b"".join(bytes_of(content)), self.seed)

    def _call_with_images(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors with which the whole model calls its language model on a batch with images."""
        calls: list[dict[str, Any]] = []
        with hooked([self.module], before=lambda *call: calls.append(call_of(*call))):
            self.run(inputs)
        return {k: each for k, each in calls[0].items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(each))}

    def _layers(self, inputs: Any, seed: int, row: int, images: Any) -> list[tuple[Block | None, Tensor]]:
        """Return the mean squares (n, n) of each layer's derivatives on one text, with the block that it is of.

        Args:
            inputs: The text.
            seed: That of its directions.
            row: Its number in the batch.
            images: What the language model reads of a batch with images; None if there are none.
        """
        if self._axes is None:
            self._axes = {} if self.content else _axes_of_tokens(self, inputs)
        blocks, states, n, axes, run = layers_and_run(self, images or inputs, self._axes, images is not None)
        if images is not None:
            n = inputs["input_ids"].shape[1]
            states, run = _of_one_text(states, run, row, n)
        width = states.numel() // n
        if self.directions > width:
            raise ValueError(f"directions={self.directions} is more than the {width} dimensions of its embeddings")
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randn(n, width, self.directions, generator=generator, dtype=torch.float64, device="cpu")
        directions = torch.linalg.qr(drawn).Q.to(states)  # (n, d, k): orthonormal at each position

        if self._way is None:
            sharded = fully_sharded(self.given) is not None  # its weights are freed before a gradient reads them
            ways = (_in_forward_mode,) if sharded else (_in_forward_mode, _backward_twice)
            self._way = _way(run, states, directions[..., 0].reshape(states.shape), ways)
        derivative = self._way(run, states)

        def squares(tangent: Tensor) -> tuple[Tensor, ...]:
            """Return the squared norm of the derivative at each position of each layer, (n,) each."""
            changes = derivative(tangent.reshape(states.shape))
            return tuple(_by_position(each, axis).square().sum(-1) for each, axis in zip(changes, axes, strict=True))

        size = max(1, (_AT_A_TIME if states.device.type == "cpu" else _AT_A_TIME_ON_GPU) // (n * max(n, width)))
        rows: list[tuple[Tensor, ...]] = []  # one row for each pair of a direction and a position
        for pairs in torch.arange(n * self.directions, device=states.device).split(size):  # type: ignore[no-untyped-call]
            number, position = pairs // n, pairs % n
            tangents = torch.zeros(len(pairs), n, width, dtype=states.dtype, device=states.device)
            tangents[torch.arange(len(pairs), device=states.device), position] = directions[position, :, number]
            rows.append(_mapped(squares, tangents))
        totals = [torch.cat(parts).reshape(-1, n, n).mean(0).T for parts in zip(*rows, strict=True)]  # (query, key)
        return list(zip(blocks, totals, strict=True))


def influence(
    model: nn.Module | SequenceModel,
    texts: Iterable[Any] | None = None,
    tokenizer: Any = None,
    *,
    directions: int = 2,
    seed: int = 0,
    **options: Any,
) -> PositionalAttention | TextAverage:
    r"""Return how much each position of a model influences the hidden states at each other, layer by layer.

    $$A^l_{ij} = \frac{\lVert J^l_{ij} \rVert_F^2}{\sum_k \lVert J^l_{ik} \rVert_F^2}, \qquad
      J^l_{ij} = \frac{\partial h^l_i}{\partial e_j}$$

    with $h^l_i$ the hidden state at position $i$ behind layer $l$, and $e_j$ the input embedding at position $j$,
    before positions are added. The matrix is computed for each text, or each repeated word, and averaged as attention
    is. The definition is introduced here; no attention is needed, so that state space models, convolutions, Fourier
    mixing, hybrids, mixtures of experts and modules of your own are measured as transformers are.

    Attention says what one layer mixes. The influence is that of all layers up to $l$, residual connections included,
    and through these most of it is a position's own: locality is near 1 in the first layers of every residual model.
    Compare layers and models, or metrics that leave the diagonal out (``past_locality``, ``direction_balance``).

    **Estimator.** $\lVert J_{ij} \rVert_F^2 = d\, \mathbb{E} \lVert J_{ij} v \rVert^2$ for a random unit vector $v$
    in $d$ dimensions. For each position $j$ as many vectors are drawn as there are ``directions``, orthonormal ones,
    so that the estimate of the squared norm has no bias, and with $d$ directions no error. One run with $v$ at $j$
    gives column $j$ in all layers; the runs of all $j$ are one batch. A run is the derivative of a gradient; where
    forward mode has another derivative, it is one in forward mode. The row's ratio has a small bias, and an error that
    averages out over positions and texts; the documentation has both by number of directions.

    **Cost.** Per text, ``directions`` times n runs on n tokens, of which each costs about as much as a forward pass.
    Memory does not grow with the number of texts; it holds the gradient's graph of one text.

    The first time, the derivative is compared with finite differences, which refuses models with parts that have no
    derivative and do not say so. These may carry up to a tenth of the derivative unnoticed. Half precision has too few
    digits to compare.

    Args:
        model: Any differentiable model, as for ``positional_attention``. In a module that is no transformers model the
            input embedding is the output of the first part that reads the token ids. A model of images or sound has
            none; the hidden states that its first block reads are in its place, also of texts with images. Layers are
            the members of the module list that runs most, and their hidden states what each returns, before the norm
            behind the last one; a module without such a list has one layer, its output (batch, n, d).
        texts: As for ``text_average``; None for repeated words, as in ``positional_attention``.
        tokenizer: The tokenizer of the model, as for these.
        directions: The number of random directions for each position, at most d.
        seed: Seed of the directions, and of the words that are drawn. The directions of a text depend on its tokens and
            the seed alone, so that models with equal ids and width are compared in equal directions.
        options: Of ``text_average`` if there are texts, otherwise of ``positional_attention``, which needs ``length``.

    Returns:
        A `TextAverage` of texts, otherwise a `PositionalAttention`, with one head: ``attention`` is the influence
        (layer, 1, n, n), and metrics, intervals, frames and plots are of it. Of causal models it is 0 above the
        diagonal.

    Raises:
        TypeError: As for these, or an `AttentionFunction`, which has no hidden states.
        ValueError: As for these, a model that mixes no positions or returns other numbers of them, more directions than
            dimensions, or an operation that has no derivative in forward mode and none of its gradient.

    Examples:
        >>> from transformers import MambaConfig, MambaModel, logging
        >>> logging.set_verbosity_error()  # kernels that are not installed are named otherwise
        >>> _ = torch.manual_seed(0)
        >>> mamba = MambaModel(MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2))
        >>> result = influence(mamba, length=12, words=4)
        >>> result.attention.shape, result.source.causal
        (torch.Size([2, 1, 12, 12]), True)
        >>> from pelocality import direction_balance
        >>> direction_balance(result).flatten().tolist()
        [-1.0, -1.0]
    """
    view = Influence(model, directions, seed)
    if texts is None:
        return positional_attention(view, tokenizer, seed=seed, **options)
    return text_average(view, texts, tokenizer=tokenizer, **options)


def _axes_of_tokens(model: SequenceModel, inputs: Any) -> dict[nn.Module, int]:
    """Return which axis of the hidden states that each module returns is the tokens, counted from the last.

    Found at a number of tokens that is the size of no other axis, or on a text if the model reads no such number.
    """
    axes: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        states = hidden_states(result)
        if states is not None and list(states.shape).count(length) == 1:
            axes[module] = list(states.shape).index(length) - states.ndim

    modules = [each for each in model.module.modules() if not isinstance(each, torch.jit.ScriptModule)]
    for text in (text_of(model, clear_lengths(model)[0]), inputs):
        length = text["input_ids"].shape[1]
        try:
            with hooked(modules, after=note, last=True):
                model.run(text)
            break
        except Exception:  # it reads no text of that length
            axes.clear()
    return axes


def layers_and_run(
    model: SequenceModel, inputs: Any, axes: Mapping[nn.Module, int] | None = None, several: bool = False
) -> tuple[tuple[Block | None, ...], Tensor, int, tuple[int, ...], _Map]:
    """Return what the derivatives of a model on one text are taken of, found in one run.

    Args:
        model: The model.
        inputs: The text.
        axes: The axis of tokens in the hidden states that modules return; (batch, n, d) of others. None: to be found.
        several: Whether there are several texts, with embeddings (batch, n, d).

    Returns:
        The block of each layer (None for a model without blocks), the embeddings of the text, the number of positions
        n, the axis of positions of each layer, and a function that runs the model with other embeddings and returns the
        hidden states of each layer.
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    axes = _axes_of_tokens(model, inputs) if axes is None else axes
    blocks, embeddings = blocks_of(model.module), token_embeddings(model.module)
    embedded: list[tuple[nn.Module, Tensor]] = []
    ran: list[tuple[nn.Module, Tensor]] = []  # blocks, with the hidden states that each read
    output: list[tuple[Tensor | None, Tensor | None]] = []  # what the model read and returned

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        read, states = hidden_states((args, kwargs)), hidden_states(result)
        if module is model.module:
            output.append((read, states))
        if module in blocks and read is not None and states is not None and read.shape == states.shape:
            ran.append((module, read))
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        reads_ids = module is embeddings or (embeddings is None and ids is not None and same_numbers(first, ids))
        if ids is not None and states is not None and states is result and reads_ids:
            embedded.append((module, result))

    modules = (each for each in model.module.modules() if not isinstance(each, torch.jit.ScriptModule))
    with hooked(modules, after=note, last=True):
        model.run(inputs)
    n = None if ids is None else ids.shape[1]
    by_token = [(block, read) for block, read in ran if n in (None, read.shape[axes.get(block, -2)])]
    dropped, ran = bool(ran) and not by_token, by_token
    lists = [id(blocks[block][0]) for block, _ in ran]  # the layers are the list that runs most, or last of several
    ran = [each for each, one in zip(ran, lists, strict=True) if one == max(reversed(lists), key=lists.count)]
    outputs = tuple(block for block, _ in ran) or (model.module,)
    first, returned = (ran[0][1], ran[-1][1]) if ran else output[-1]
    source, states = embedded[0] if embedded else (outputs[0], first)
    if states is None or returned is None:
        raise ValueError("it has no hidden states (batch, n, d) of floats, neither embeddings nor an output")
    n = states.shape[-2] if n is None else n
    placed = states.ndim == 3 and (several or states.shape[:2] in ((1, n), (n, 1)))
    of_layers = tuple(axes.get(each, -2) for each in outputs)
    if not placed or returned.shape[of_layers[-1]] != n:
        raise ValueError(f"its hidden states are {tuple(states.shape)}, then {tuple(returned.shape)}, not (1, {n}, d)")
    if dropped:
        warnings.warn(f"the layers of {model} have no axis of {n} tokens, so its output is one layer", stacklevel=2)
    states = states.clone(memory_format=torch.contiguous_format)

    def run(others: Tensor) -> tuple[Tensor, ...]:
        layers: list[Any] = []
        replaced: list[nn.Module] = []

        def replace(module: nn.Module, args: Any, kwargs: Any, *result: Any) -> Any:
            if replaced and not (result and same_numbers(result[0], states)):  # the same tokens may be embedded again
                return None
            replaced.append(module)
            if result:
                return others
            return with_states(args, kwargs, hidden_states((args, kwargs)), others)

        with ExitStack() as stack:
            if embedded:  # other hooks see an output that is replaced; that of gradient checkpointing would fail on it
                stack.enter_context(changed(source, "_forward_hooks", OrderedDict()))
            before, after = (None, replace) if embedded else (replace, None)
            stack.enter_context(hooked([source], before, after, last=True))
            stack.enter_context(hooked(outputs, after=lambda *call: layers.append(hidden_states(call[-1])), last=True))
            model.run(inputs)
        return tuple(layers)

    return tuple(blocks[block] for block, _ in ran) or (None,), states, n, of_layers, run


def _of_one_text(states: Tensor, run: _Map, row: int, n: int) -> tuple[Tensor, _Map]:
    """Return the embeddings (1, n, d) of one text of a batch, and the function that runs it beside the others."""

    def run_one(others: Tensor) -> tuple[Tensor, ...]:
        text = torch.cat([others, states[row : row + 1, n:]], 1)
        return tuple(each[row : row + 1, :n] for each in run(torch.cat([states[:row], text, states[row + 1 :]])))

    return states[row : row + 1, :n], run_one


def _way(run: _Map, states: Tensor, tangent: Tensor, ways: tuple[_Way, ...]) -> _Way:
    """Return one of the ways to the derivative in any direction: by gradients, unless forward mode says something else.

    Gradients are faster. A part that is run without them, or has another one than its derivative, is right in forward
    mode alone.

    Raises:
        Exception: That of forward mode if neither way is one.
        ValueError: The derivative in the given direction is not that of finite differences.
    """
    changes: dict[_Way, tuple[Tensor, ...]] = {}
    errors = []
    for way in ways:
        try:
            changes[way] = way(run, states)(tangent)
        except Exception as error:
            errors.append(error)
    if not changes:
        raise errors[-1] if isinstance(errors[-1], torch.OutOfMemoryError) else errors[0]
    same = len(changes) > 1 and all(map(equal_but_for_rounding, *changes.values()))
    way = _backward_twice if same or _in_forward_mode not in changes else _in_forward_mode
    if states.dtype in (torch.float32, torch.float64):
        _compare_with_differences(run, states, tangent, changes[way][-1])
    return way


def _compare_with_differences(run: _Map, states: Tensor, tangent: Tensor, change: Tensor) -> None:
    """Refuse a model with parts that have no derivative and say nothing, such as rounding or ``detach``."""
    differences = []
    for step in (each * float(states.norm() / tangent.norm()) for each in _STEPS):
        ahead, behind = (run(states + sign * step * tangent)[-1] for sign in (1, -1))
        differences.append(largest_difference(change, (ahead - behind) / (2 * step)))
    if not min(differences) <= _FAR:
        raise ValueError("its derivative is not that of finite differences: a part has none (rounding, detach)")


def _in_forward_mode(run: _Map, states: Tensor) -> _Map:
    """Return the derivative in a direction, in forward mode."""
    return lambda tangent: torch.func.jvp(run, (states,), (tangent,))[1]


def _backward_twice(run: _Map, states: Tensor) -> _Map:
    """Return the derivative in a direction v as that of the gradient: J v = d(J^T u)/du v for any u, here 0.

    In forward mode where the graph of the gradient does not fit into memory.
    """
    try:
        with torch.enable_grad():
            states = states.detach().requires_grad_()
            layers = run(states)
            weights = [torch.zeros_like(each, requires_grad=True) for each in layers]
            (gradient,) = torch.autograd.grad(layers, states, weights, create_graph=True)
    except torch.OutOfMemoryError:
        return _in_forward_mode(run, states.detach())
    return lambda tangent: torch.autograd.grad(gradient, weights, tangent, retain_graph=True)


def hidden_states(states: Any) -> Tensor | None:
    """Return the first tensor of floats with three axes or more in the arguments or the output of a module, or None."""
    if isinstance(states, Tensor):
        return states if states.is_floating_point() and states.ndim > 2 else None
    parts = states.values() if isinstance(states, Mapping) else states if isinstance(states, tuple | list) else ()
    return next((first for each in parts if (first := hidden_states(each)) is not None), None)


def with_states(args: Any, kwargs: Any, read: Tensor | None, others: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a call of a module with other hidden states in the place of those that it reads."""
    swapped = {name: others if each is read else each for name, each in kwargs.items()}
    return tuple(others if each is read else each for each in args), swapped


def _by_position(states: Tensor, axis: int) -> Tensor:
    """Return hidden states of one text by position, (n, d), to be squared."""
    return states.to(torch.promote_types(states.dtype, torch.float32)).movedim(axis, 0).flatten(1)


def _mapped(function: Callable[[Tensor], tuple[Tensor, ...]], batch: Tensor) -> tuple[Tensor, ...]:
    """Return what a function gives for each member of a batch, at once where its operations can be batched."""
    try:
        return torch.vmap(function)(batch)
    except Exception:  # operations without a batching rule raise errors of many types; one at a time takes less memory
        return tuple(map(torch.stack, zip(*map(function, batch), strict=True)))


def single_texts(inputs: Any) -> Iterator[Any]:
    """Yield each text of a batch alone, without padding."""
    texts, masked = texts_of(inputs), isinstance(inputs, Mapping) and {"input_ids", "attention_mask"} <= inputs.keys()
    for row in range(texts):
        one = map_tensors(inputs, lambda each: each[row : row + 1] if each.ndim and len(each) == texts else each)  # noqa: B023
        yield {name: each[:, : int(one["attention_mask"].sum())] for name, each in one.items()} if masked else one


@contextmanager
def _differentiable(module: nn.Module) -> Iterator[None]:
    """Switch kernels that have no derivative in forward mode to those that have one, in a with-statement."""
    rescaled: list[Any] = [each for each in module.modules() if getattr(each, "layers_are_rescaled", None) is False]
    with ExitStack() as stack:
        for config in reversed(configurations(module)):  # setting an outer one also sets those inside
            if getattr(config, "_experts_implementation", None) is not None:
                stack.enter_context(changed(config, "_experts_implementation", "eager"))
        for each in rescaled:  # RWKV would divide its weights
            stack.enter_context(changed(each, "layers_are_rescaled", False))
            stack.enter_context(changed(each.config, "rescale_every", 0))
        stack.enter_context(plain_torch())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
