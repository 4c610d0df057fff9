"""A model as this library runs it: what runs and on what, and all that is known of it, found once."""

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from pelocality._checks import count
from pelocality._distributed import fully_sharded
from pelocality.metrics._inputs import PositionsLike
from pelocality.models._calls import argument_names, call_of
from pelocality.models._inference import inference
from pelocality.models._restore import hooked, placed, restoring
from pelocality.models._weights import embedding_weight, execution_device, reads_tokens, token_embeddings
from pelocality.models.constant_content import Content, Patches, patches_of
from pelocality.models.families import attached_biases, family_of, longest_input, positions_disabled
from pelocality.models.observer import Observer
from pelocality.positions import Positions

logger = logging.getLogger(__name__)

_OBSERVED = ("eager", "sdpa", None)


class SequenceModel:
    """A model as this library runs it.

        SequenceModel
        |-- given                  the model or module that was passed
        |-- with_head              the transformers model in it, with its head
        |-- module                 the bare module that runs, on device, in dtype
        |-- family                 what is known of the weights of its family
        |-- what it reads          vocabulary and padding, or content; positions_of(length), grid_of(images), longest
        |-- what is attached       encodings, encoding (as text), positions_disabled
        |-- what results call it   name, label
        `-- how it runs
            |-- run(inputs)            one call, as the model is
            |-- outputs(inputs)        in evaluation mode, without gradients
            `-- watch(inputs, use)     the same, and use(attention) at each attention, layer by layer

    Every function of ``pelocality.models`` builds a `SequenceModel` of the model that it is given. Build it yourself
    for a module that is no transformers model, or that reads something else than token ids, and pass it in the place of
    the model.

    Args:
        model: A transformers model, with or without a head, a wrapper around one (DataParallel, torch.compile, peft,
            SentenceTransformer), or any module. Of an encoder-decoder model the encoder is measured, of a model of
            images and text the language model, in which the whole model puts the images of a text.
        inputs: For a model that reads something else than token ids: a function from the number of a sample and a
            number of positions to the inputs of one call (a tensor, a tuple or a dict), which hold the same content at
            every position. Ready functions: ``identical_patches``, ``steady_sound``, ``steady_spectrum`` and
            ``periodic_series``. None: identical patches of a transformers model of images, token ids of any other.
        vocabulary_size: For a module that is no transformers model: it reads token ids, from 0 to this number - 1, as
            its first argument.
        name: What results call the model; by default its hub name, or its class.
        positions: Where the tokens that are measured lie, if not one after the other on a line: `Positions` of as many
            tokens, coordinates, or a function from their number to positions. None: those that ``inputs`` comes with
            (``identical_patches`` has the grid of each batch, by its pixels), or the position ids by which a model of
            images and text rotates each text with images, or else a line. Results carry them, so that metrics and
            plots measure distance by them.

    Attributes:
        given: The model that was given.
        module: The module that runs: of a transformers model the bare transformer without a head.
        with_head: The transformers model that was given, with its head.
        family: What is known of the weights of its family, an ``Architecture``.
        content: The function ``inputs``; None for a model that reads token ids.

    Raises:
        TypeError: Something that is not a module, or a module that neither is nor holds one transformers model, without
            ``inputs`` and ``vocabulary_size``.
        ValueError: A transformers model that reads neither token ids nor images in patches, without ``inputs``.

    Examples:
        >>> class Own(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.words, self.positions = nn.Embedding(50, 8), nn.Embedding(32, 8)
        ...         self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        ...     def forward(self, ids):
        ...         return self.layers(self.words(ids) + self.positions(torch.arange(ids.shape[1])))
        >>> from pelocality import positional_attention
        >>> positional_attention(SequenceModel(Own(), vocabulary_size=50), length=16, words=4).attention.shape
        torch.Size([2, 2, 16, 16])
    """

    declares_attention = False
    """Whether its user says what attention is, so that nothing is proved."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Content | None = None,
        *,
        vocabulary_size: int | None = None,
        name: str = "",
        positions: Callable[[int], PositionsLike] | PositionsLike | None = None,
    ) -> None:
        makes_content = getattr(inputs, "__annotations__", {}).get("return") is Content
        if inputs is not None and (makes_content or not callable(inputs)):
            raise TypeError(f"inputs must be a function such as identical_patches(size) returns, got {inputs!r}")
        content: Any = patches_of(_bare(model)) if inputs is None and vocabulary_size is None else inputs
        self.given, self.content, self._name = model, content, name
        self._on_grid = positions is None and isinstance(content, Patches)
        placed = getattr(content, "positions", None) if positions is None else positions
        self._positions = placed if placed is None or callable(placed) else Positions.of(placed)
        self.positions_are_given = placed is not None and not self._on_grid
        """Whether its tokens lie where its user, or its content, says, whatever a batch holds."""
        self._made: dict[tuple[Any, ...], Positions] = {}  # by number and grid, as pairs take a while to find
        self.axes: list[Any] | None = None
        """What each of its attentions is of, once that is proved."""
        self.text_by_text = False
        """Whether the module computes texts one after the other, so that `run` vectorises it over them."""
        if isinstance(self._positions, Positions) and self._positions.keys is None:
            raise ValueError("positions of distances have no opposite keys, which results compare; give coordinates")
        self._vocabulary = None if vocabulary_size is None else count("vocabulary_size", vocabulary_size)
        own = isinstance(model, nn.Module) and (content is not None or vocabulary_size is not None)
        inside = _transformers_models(model)
        self.module: Any = _bare(model) if own else _transformer(model, inside)
        self.family: Any = family_of(self.module)
        self.with_head: Any = inside[0] if inside else self.module
        self.whole: Any = getattr(self.with_head, "base_model", self.module)
        """A transformers model without its head: `module`, or the model of images and text around it."""

    @classmethod
    def of(cls, model: Any) -> "SequenceModel":
        """Return the `SequenceModel` of a model to measure or change; a `SequenceModel` is returned as it is.

        Raises:
            TypeError: As for the class.
            ValueError: As for the class, or a learned prompt (peft), which would be left out.
        """
        described = model if isinstance(model, SequenceModel) else cls(model)
        for module in described.given.modules():
            if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
                raise ValueError("model has a learned prompt, which would be left out; pass model.get_base_model()")
        return described

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self}"

    def __str__(self) -> str:
        """Return the class and type of the model, for errors."""
        model_type = getattr(self.config, "model_type", "")
        return type(self.module).__name__ + (f" (model type '{model_type}')" if model_type else "")

    # ---- what is known of it

    @property
    def config(self) -> Any:
        """The configuration of a transformers model, or None."""
        return self.module.config if isinstance(self.module, PreTrainedModel) else None

    @property
    def name(self) -> str:
        """The hub name, the end of a local folder's path, or the class."""
        inner = self.module if self.config is None else self.with_head
        path = "" if self.config is None else "/".join(Path(inner.config._name_or_path).parts[-2:])
        return self._name or path or type(inner).__name__.removeprefix("FSDP")  # The prefix is that of fully_shard.

    @property
    def encodings(self) -> list[Any]:
        """Each attached encoding, with its settings, in the order of the attention modules."""
        return attached_biases(self.module)

    @property
    def encoding(self) -> str | None:
        """The attached encodings with ``position_embeddings`` as text, all that differ between layers, or None."""
        return _encoding_text(self.module)

    @property
    def label(self) -> str:
        """The name of the model with the class of its attached encoding, if any."""
        return label(self.name, _encoding_text(self.with_head))

    @property
    def device(self) -> torch.device:
        """The device of the inputs: that of the token embeddings, or the device where offloaded ones run.

        Raises:
            ValueError: Weights are on the meta device and not offloaded.
        """
        embeddings = token_embeddings(self.module)
        weight = next(self.module.parameters(), None) if embeddings is None else embedding_weight(self.module)
        device = execution_device(self.module if embeddings is None else embeddings)
        device = device or (torch.get_default_device() if weight is None else weight.device)
        offloaded = execution_device(self.module) is not None
        if device.type == "meta" or (not offloaded and any(each.is_meta for each in self.module.parameters())):
            raise ValueError(f"weights of {self} are on the meta device, without values; use from_pretrained")
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the model."""
        if self.config is not None:
            return self.module.dtype
        floats = (each.dtype for each in self.module.parameters() if each.is_floating_point())
        return next(floats, torch.get_default_dtype())

    @property
    def vocabulary(self) -> int:
        """The number of token ids.

        Raises:
            ValueError: The model reads no token ids.
        """
        if self._vocabulary is None and self.content is not None:
            raise ValueError(f"{self} reads no token ids, which are needed here; give a batch that it reads")
        return self._vocabulary or len(embedding_weight(self.module))

    @property
    def padding(self) -> int | None:
        """The token id that the configuration names as padding, or None."""
        return getattr(self.config, "pad_token_id", None)

    @property
    def adds_tokens(self) -> bool:
        """Whether the model may put tokens of its own before its input: any but a transformers model of token ids."""
        return self.config is None or self.content is not None

    def holds_images(self, inputs: Any) -> bool:
        """Return whether a batch has numbers beside its text, such as pixels, which only the `whole` model reads."""
        if self.config is None or self.content is not None or not isinstance(inputs, Mapping):
            return False
        beside = {*argument_names(self.whole)}.difference(argument_names(self.module)).intersection(inputs)
        leaves = tree_leaves([inputs[name] for name in beside])
        numbers = [each for each in leaves if isinstance(each, Tensor)]
        return any(each.is_floating_point() or each.dtype == torch.uint8 for each in numbers)

    @contextmanager
    def noting_coordinates(self) -> Iterator[list[Tensor]]:
        """Note the position ids of several axes (axis, batch or 1, n) by which a model of token ids rotates last."""
        noted: list[Tensor] = []

        def note(module: Any, args: Any, kwargs: Any) -> None:
            ids = call_of(module, args, kwargs).get("position_ids")
            if isinstance(ids, Tensor) and ids.ndim == 3:
                noted[:] = [ids]

        readers = [each for each in self.module.modules() if "position_ids" in argument_names(each)]
        with hooked(readers if self.content is None else [], before=note):
            yield noted

    @property
    def positions_disabled(self) -> bool:
        """Whether an attached encoding has disabled the position embeddings."""
        return positions_disabled(self.module)

    @property
    def longest(self) -> int | None:
        """The largest number of positions, special tokens included; None without a limit."""
        return longest_input(self.family, self.module) if self.config is not None else None

    def grid_of(self, inputs: Any) -> tuple[int, int] | None:
        """Return the rows and columns of patches of a batch; None of a model that is not measured on such a grid.

        Raises:
            ValueError: It is, and the batch holds no images.
        """
        return self.content.grid_of(inputs) if self._on_grid else None

    def positions_of(self, length: int, grid: tuple[int, int] | None = None) -> Positions | None:
        """Return where the tokens that are measured lie, by their number and the `grid_of` images; None for a line.

        Raises:
            ValueError: Positions of another number of tokens.
        """
        positions = self._positions
        if positions is None:
            return None
        if callable(positions):
            tokens = (length, grid) if self._on_grid else (length,)
            positions = self._made.get(tokens) or self._made.setdefault(tokens, Positions.of(positions(*tokens)))
        if positions.shape != (length, length):
            raise ValueError(f"positions are of {positions.shape[1]} tokens, and {length} are measured; see length=")
        return None if positions.placed.is_line else positions.placed

    def reads(self, argument: str, *, with_head: bool = False) -> bool:
        """Return whether the module that runs, or the model with its head, takes an argument of this name."""
        return argument in argument_names(self.with_head if with_head else self.module)

    def why_not_measured(self) -> str | None:
        """Return the reason why the attention of the model is not one matrix of softmaxes per head, or None."""
        return None if self.config is None else self.family.why_not_measured(self.module)

    def some_ids(self, number: int) -> list[int]:
        """Return ids of the second half of the vocabulary, without padding; they come again where it is small."""
        size, padding = self.vocabulary, self.padding
        ids = [token for token in range(size // 2, min(size, size // 2 + number + 1)) if token != padding]
        return (ids * number)[:number]

    def with_random_weights(self, seed: int = 0) -> "SequenceModel":
        """Return a model of the same configuration with the random weights of a seed, without attached encodings.

        Raises:
            ValueError: The module that runs is no transformers model, so that it has no configuration.
        """
        if self.config is None:
            raise ValueError(f"{self} has no configuration, by which random weights could be drawn")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            drawn = type(self.with_head)(copy.deepcopy(self.with_head.config))
        model = SequenceModel(drawn.to(self.device, self.dtype).eval(), self.content)
        model._positions, model._on_grid = self._positions, self._on_grid
        return model

    # ---- checks of arguments

    def check_ids(self, ids: Tensor, name: str = "input_ids") -> None:
        """Refuse token ids outside the vocabulary, in an argument of this name.

        Raises:
            ValueError: There is such an id.
        """
        if self._vocabulary is None and self.content is not None:
            return
        outside, last = ids[(ids < 0) | (ids >= self.vocabulary)], self.vocabulary - 1
        if outside.numel():
            raise ValueError(f"{name} must be in 0..{last}, got {int(outside[0])}; is this the model's tokenizer?")

    def check_length(self, length: int, specials: int = 0) -> None:
        """Refuse a length that the model has no positions for.

        Raises:
            TypeError: The length is not an integer.
            ValueError: The length is not positive, or beyond the model's table of positions.
        """
        count("length", length)
        most, trained = self.longest, getattr(self.config, "max_position_embeddings", None)
        if most is not None and length + specials > most:
            left = most - specials
            raise ValueError(f"length={length} is beyond the {most} positions of {self}; at most {left} fit a text")
        if most is None and isinstance(trained, int) and 0 < trained < length + specials:
            logger.warning("%s was trained on at most %d positions; %d extrapolates", self, trained, length + specials)

    # ---- running it

    def inference(self) -> AbstractContextManager[None]:
        """Put the given model into evaluation mode without gradients in a with-statement, and restore both."""
        return inference(self.given)

    def run(self, inputs: Any, **options: Any) -> Any:
        """Run the model on a batch: a dict of arguments, a tuple of them, or the only one.

        A transformers model runs without generation caches. A decoder with cross-attention reads an encoder output of
        one vector of zeros, so that cross-attention adds the same vector at every position.
        """
        if self.content is not None:
            inputs = self.moved(inputs)
        if not isinstance(inputs, Mapping):
            return self._call(*inputs) if isinstance(inputs, tuple) else self._call(inputs)
        if self.config is None and self.content is None:
            ids = self._ids_without_padding(inputs)
            return torch.vmap(lambda text: self._call(text[None]))(ids) if self.text_by_text else self._call(ids)
        if self.config is None:
            return self._call(**inputs)
        if self.holds_images(inputs):
            return self.whole(**inputs, **options, use_cache=False, return_dict=True)
        inputs = {**inputs, **options}
        inputs |= {name: False for name in ("use_cache", "use_mems", "output_attentions") if self.reads(name)}
        if "encoder_hidden_states" not in inputs and self.reads("encoder_hidden_states") and self._crosses:
            width = getattr(self.config, "cross_attention_hidden_size", None) or self.config.hidden_size
            first = next(iter(inputs.values()))
            shape = len(first), 3 if first.shape[1] == 1 else 1, width  # there are more or fewer keys than tokens
            inputs["encoder_hidden_states"] = torch.zeros(shape, dtype=self.dtype, device=first.device)
        return self._call(**inputs, return_dict=True)

    def _call(self, *args: Any, **named: Any) -> Any:
        """Call the module that runs; in a model of ``fully_shard`` from its root, which gathers the weights."""
        root = fully_sharded(self.given)
        if root is None or self.module not in root.modules():
            return self.module(*args, **named)
        forward = self.module.forward if root is self.module else self.module
        with restoring(root.reshard), placed(root, "forward", forward):  # a root would keep the gathered weights
            return root(*args, **named)

    @functools.cached_property
    def _crosses(self) -> bool:
        """Whether the model has cross-attention."""
        decodes = getattr(self.config, "is_encoder_decoder", False) or getattr(self.module, "is_decoder", False)
        return decodes or any("cross" in name for name, _ in self.module.named_modules())

    def _ids_without_padding(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the token ids of a batch for a module that reads them alone."""
        if "attention_mask" in inputs and not bool(inputs["attention_mask"].all()):
            raise ValueError(f"{self} reads no padding; give texts of one length, or strings with batch_size=1")
        return inputs["input_ids"]

    def watch(
        self, inputs: Any, use: Callable[..., Any], length: int | None, *, matrices: bool = True, **options: Any
    ) -> Any:
        """Run the model on a batch in evaluation mode, and pass each attention over n tokens to a callback.

        Args:
            inputs: As for `run`.
            use: Called with each `Attention` as soon as it is computed; may return a function that changes its output.
            length: The number of tokens n, None for any number.
            matrices: Whether the weights of torch's kernel are computed; otherwise `use` gets a `KernelAttention`.
            options: More arguments of a transformers model.

        Raises:
            ValueError: The model fails, with the reason; an error of the callback is passed on.
        """
        of_callback: list[Exception] = []

        def use_and_remember(attention: Any) -> Any:
            try:
                return use(attention)
            except Exception as error:
                of_callback.append(error)
                raise

        observing = Observer(use_and_remember, length, matrices).observing(self.module)
        with self.explaining(inputs, of_callback), self.inference(), self.observable(), observing:
            return self.run(inputs, **options)

    @contextmanager
    def explaining(self, inputs: Any, but: Sequence[Exception] = ()) -> Iterator[None]:
        """Raise a ValueError with the reason where the model fails on a batch, but pass some errors on."""
        try:
            yield
        except Exception as error:
            if error in but or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"it fails with {type(error).__name__}: {error}"
            if "index out of range in self" in str(error):  # torch's message for a lookup beyond a table
                reason = "it has no row for every position; ask for fewer tokens"
            ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
            reason = reason if ids is None else f"on {len(ids)} x {ids.shape[1]} tokens {reason}"
            raise ValueError(f"{self} cannot be probed: {reason}") from error

    def unprobed(self, reason: str) -> ValueError:
        """Return the error for a model whose attention cannot be measured, with what to write instead."""
        way = "measure(weights)"
        if self.content is None:
            way = "positional_attention(AttentionFunction(lambda ids: [weights_of_layer, ...], vocabulary_size=...))"
        return ValueError(f"{self} cannot be probed: {reason}; if you have its weights (batch, head, n, n), pass {way}")

    def outputs(self, inputs: Any, **options: Any) -> Any:
        """Run the model on a batch in evaluation mode without gradients; arguments as for `watch`."""
        with self.inference(), restoring(self._forget_hooks):
            return self.run(inputs, **options)

    def equal_states(self, inputs: Any, positions: slice) -> bool:
        """Return whether a repeated word has equal hidden states at all its positions in every layer."""
        if self.config is None or positions.stop - positions.start < 2:
            return False
        with self.observable():  # FlexAttention would be compiled for this run alone
            states = getattr(self.outputs(inputs, output_hidden_states=True), "hidden_states", None)
        if not states or any(layer.ndim < 2 or layer.shape[-2] < positions.stop for layer in states):
            return False
        return all(_equal_rows(layer[..., positions, :]) for layer in states)

    def _forget_hooks(self) -> None:
        """Remove the hooks by which transformers captures hidden states: they cannot be pickled, and come back."""
        for module in self.given.modules():
            module.__dict__.pop("_output_capturing_hooks_installed", None)
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__module__", None) == "transformers.utils.output_capturing":
                    del module._forward_hooks[key]

    def moved(self, inputs: Any) -> Any:
        """Return the inputs of a call on the device of the model, floats in its precision."""
        device, dtype = self.device, self.dtype
        return map_tensors(inputs, lambda each: each.to(device, dtype if each.is_floating_point() else each.dtype))

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Switch kernels that torch's functions do not show to torch's own kernel, in a with-statement."""
        before = [(config, config._attn_implementation) for config in configurations(self.module)]
        hidden = [config for config, implementation in before if implementation not in _OBSERVED]

        def undo() -> None:
            for config, implementation in before if hidden else ():  # setting an outer one also sets those inside
                config._attn_implementation = implementation

        with restoring(undo):
            for config in hidden:
                config._attn_implementation = "sdpa" if getattr(self.module, "_supports_sdpa", False) else "eager"
            yield


def map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the inputs of a call with each tensor changed, lists as tuples."""
    if isinstance(inputs, Mapping):
        return {name: map_tensors(each, change) for name, each in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(map_tensors(each, change) for each in inputs)
    return change(inputs) if isinstance(inputs, Tensor) else inputs


def label(name: str, encoding: str | None) -> str:
    """Return the name of a model with the class of its attached encoding."""
    return name if encoding is None else f"{name} with {encoding.split('(')[0]} attached"


def _encoding_text(module: nn.Module) -> str | None:
    """Return the encodings attached to a module as text, all that differ, or None."""
    texts = [
        f"{type(bias.encoding).__name__}({bias.encoding.extra_repr()}), "
        f"position_embeddings='{'disable' if bias.positions_disabled else 'keep'}'"
        for bias in attached_biases(module)
    ]
    return "; ".join(dict.fromkeys(texts)) or None


ROUNDING = 1e-5
"""A `largest_difference` that is rounding: many families take the softmax in float32, of float64 too."""


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two outputs, relative to the largest number in the second; 0 if both are 0."""
    one, other = one.cpu().double(), other.cpu().double()  # some devices have no float64
    difference = (one - other).abs().max()
    return float(difference / other.abs().max()) if difference else 0.0


def equal_but_for_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal but for rounding."""
    # <=, because NaN is unequal
    return largest_difference(one, other) <= max(ROUNDING, 8 * torch.finfo(other.dtype).eps)


def configurations(module: nn.Module) -> list[Any]:
    """Return every configuration with an attention implementation, outer ones before those inside them."""
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    for config in configs:  # the list grows by the configurations inside
        configs += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


# ---- finding what runs


def _transformer(model: Any, inside: list[Any]) -> Any:
    """Return the bare transformer that reads token ids in a model, of the transformers models inside it."""
    if len(inside) != 1:
        ways = "model first: of from_pretrained(...), or SequenceModel(module, vocabulary_size=...) or (inputs=...)"
        got = f"{type(model).__name__} with {len(inside)}"
        raise TypeError(f"model must be a transformers PreTrainedModel or hold one, got {got}; pass the {ways}")
    whole = inside[0]
    base = family_of(whole).base(whole)
    if reads_tokens(base):
        return base
    readers = [f"model.{name}" for name, module in whole.named_modules() if name and reads_tokens(module)]
    advice, name = [*readers, "SequenceModel(model, inputs=...)"][0], f"model type '{whole.config.model_type}'"
    raise ValueError(f"{name} reads no input_ids, or has no token embeddings; pass {advice}")


def _bare(model: nn.Module) -> nn.Module:
    """Return a module without the wrappers of torch, and a transformers model without its head."""
    inner: Any = model
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(inner, parallel) or type(inner).__name__ == "OptimizedModule":  # of torch.compile
        inner = inner.module if isinstance(inner, parallel) else inner._orig_mod
    if isinstance(inner, PreTrainedModel) and inner.main_input_name in argument_names(inner.base_model):
        inner = inner.base_model  # the bare DINOv3 reads hidden states, no images
    return inner


def _transformers_models(model: Any) -> list[Any]:
    """Return the transformers models in a module that are not inside another one."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    models = [module for module in modules if isinstance(module, PreTrainedModel)]
    within = {part for each in models for part in each.modules() if part is not each}
    return [each for each in models if each not in within]


def _equal_rows(states: Tensor) -> bool:
    """Return whether rows (..., n, d) are equal up to rounding, in most of their dimensions: a few may be huge."""
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)  # a softmax may be float32 in any model
    states = states.double() if states.device.type == "cpu" else states.float()
    spread, size = (states - states[..., :1, :]).abs().amax(-2), states.abs().amax(-2)
    return bool((spread / size.clamp(min=torch.finfo(torch.float32).tiny)).median() < eps**0.5)
