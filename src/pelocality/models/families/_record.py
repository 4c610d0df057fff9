"""The record of a model family: what every record defines, and the defaults."""

import inspect
import re
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from pelocality.models._calls import argument_names, hidden_argument
from pelocality.models._weights import reads_tokens
from pelocality.models.families._declared import DeclaredPositions

ATTACHED = "pelocality"
"""The name of an attached encoding among the submodules of an attention module, and so in a saved model's keys."""


def attached_biases(model: nn.Module) -> list[Any]:
    """Return each attached `Attached`, or the wrapper of peft around it, which forwards to the trained copy."""
    return [getattr(module, ATTACHED) for module in model.modules() if ATTACHED in module._modules]


def _rows_for_tokens(table: Any) -> int:
    """Return how many rows of a table of positions tokens read: those after the padding id, where it has one."""
    padding = getattr(table, "padding_idx", None)  # RoBERTa and MPNet count from the row after it
    skipped = getattr(table, "offset", 0) if padding is None else padding + 1  # OPT and BART skip the first two rows
    return int(getattr(table, "num_embeddings", len(table.weight)) - skipped)


# Names of modules that attend to another sequence, and of attached encodings.
_NOT_ATTENTION = re.compile(f"cross|enc_?dec|encoder_att|{ATTACHED}")

# Names and classes of modules that are looked up by position or distance, and then added to something; tables of other
# positions, such as those of boxes on a page, have other names.
_TABLES = re.compile(r"^((box_)?position_embeddings?|positions_embed|embed_positions|wpe|relative_attention_bias)$")
_TABLE_CLASSES = re.compile("Position[a-z]*Embedding")

# Buffers with one row per position (GPT-J, CTRL).
_BUFFERS = re.compile(r"(^|\.)(embed_positions|pos_encoding)$")

# Names of the number of positions in configurations: of most models, and of Whisper's decoder.
_LIMITS = ("max_position_embeddings", "max_target_positions")

# Classes of modules that are called with position ids: rotary ones, and those with a table inside.
_READERS = re.compile("Rotary|Embeddings$")

# These model types have no single (n, n) matrix of softmax attention per head.
_NOT_MEASURED = {
    "it has no attention weights": ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "fnet"),
    "it attends within windows, blocks or hash buckets, or to other tokens than its own": (
        *("longformer", "led", "reformer", "perceiver", "funnel", "canine", "longt5"),
    ),
    "its attention is the difference of two maps, which may be negative": ("diffllama",),
    "its attention to itself and to the encoder's output share one softmax": ("t5gemma2_decoder",),
}


class Architecture(DeclaredPositions):
    """Where a model keeps its attention modules and its positions.

    The defaults are what transformers guarantees of any model: attention modules call its attention interface, take a
    mask of four axes, and are followed by their rotary modules and tables of positions. They are enough to attach an
    encoding. A subclass holds what a family does differently; where its logits come from is in `KnownLogits`.

    A record has no state: its methods take the base model.

    A new family is one subclass, of this or of `KnownLogits`, in one of the files of this folder, an entry in that
    file's ``RECORDS`` and one tiny configuration in the contract test.

    The methods share their arguments:

    - ``model``: a transformers model, with or without a head; ``base``: the bare transformer in it;
    - ``module``, ``attention``: one of its attention modules;
    - ``call``: the arguments of a call of an attention module by name;
    - ``output``: what a module of ``position_tables`` returned.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    """The ``config.model_type`` values of the family."""

    mask_arguments: ClassVar[tuple[str, ...]] = ("attention_mask", "mask")
    """The names that the mask has among the arguments of attention modules."""

    token_axis: ClassVar[int] = 1
    """The axis of tokens in the hidden states that an attention module takes."""

    position_arguments: ClassVar[tuple[str, ...]] = ("alibi", "position_bias", "position_ids")
    """The arguments of an attention module that hold positions and nothing else: zeros where they are disabled."""

    position_weights: ClassVar[tuple[str, ...]] = ()
    """The parameters of an attention module that are multiplied with a position argument and nothing else."""

    position_methods: ClassVar[tuple[str, ...]] = ()
    """The methods of an attention module from queries, keys and positions to logits: zeros where they are disabled."""

    def base(self, model: Any) -> Any:
        """Return the bare transformer inside a transformers model.

        Of an encoder-decoder model the encoder is returned, of a model of images and text the language model.
        """
        base = model.base_model
        if type(base).__name__.endswith("DecoderWrapper"):  # transformers puts such a wrapper around some decoders
            base = base.decoder
        for name in ("encoder", "language_model", "text_model", "model"):
            if reads_tokens(part := getattr(base, name, None)):
                return self.base(part)
        return base.encoder if hasattr(base, "encoder") and hasattr(base, "decoder") else base

    def attention_layers(self, base: Any) -> list[nn.Module]:
        """Return the self-attention modules in the order they run; one that layers share is listed once per layer."""
        inside = list(base.named_modules())[1:]
        named = {name: module for name, module in inside if not _NOT_ATTENTION.search(name.lower())}
        calling = [module for module in named.values() if _calls_the_interface(module)]
        # Others attend to something else than tokens: Inkling 2's to the outputs of blocks.
        classes = tuple({type(module) for module in calling if self._takes_a_mask(argument_names(module))})
        if classes:  # subclasses with their own method `forward` count too
            return [module for module in named.values() if isinstance(module, classes)]
        masked = [name for name, module in named.items() if self._takes_a_mask(argument_names(module))]
        return [named[name] for name in masked if not any(other.startswith(f"{name}.") for other in masked)]

    def _takes_a_mask(self, arguments: tuple[str, ...]) -> bool:
        return not {*self.mask_arguments}.isdisjoint(arguments) and "input_ids" not in arguments

    def attention_modules(self, base: Any) -> list[nn.Module]:
        """Return `attention_layers`, each module once."""
        return list(dict.fromkeys(self.attention_layers(base)))

    def causal(self, base: Any) -> bool:
        """Return whether a token sees only itself and the tokens before it."""
        declared = self.declared_causal(base.config, base)
        return bool(getattr(self.attention_layers(base)[0], "is_causal", False) if declared is None else declared)

    def position_tables(self, base: Any) -> list[nn.Module]:
        """Return the modules that are looked up by position or distance, and whose result is added to something.

        Tables in an encoder of images or sound beside the text (GIT, Phi-4 multimodal) count other positions.
        """
        parts = [part for part in base.modules() if part is not base and isinstance(part, PreTrainedModel)]
        beside = {module for part in parts if part.main_input_name != "input_ids" for module in part.modules()}
        return [
            module
            for name, module in base.named_modules()
            if module not in beside
            and (
                (hasattr(module, "weight") and _TABLES.search(name.rpartition(".")[2]))
                or _TABLE_CLASSES.search(type(module).__name__)
            )
        ]

    def max_length(self, base: Any) -> int | None:
        """Return the number of tokens that tables and buffers of positions have rows for; None if there are none.

        Rotations and slopes, which are computed for any distance, and tables of sines that grow have no limit.
        """
        by_distance = {table for name, table in base.named_modules() if name.endswith("relative_attention_bias")}
        limited = [table for table in self.position_tables(base) if not hasattr(table, "make_weight")]
        stored = [table for table in limited if isinstance(getattr(table, "weight", None), torch.Tensor)]
        rows = [_rows_for_tokens(table) for table in stored if table not in by_distance]
        rows += [len(buffer) for name, buffer in base.named_buffers() if _BUFFERS.search(name)]
        # Nystromformer's table has two rows more than it can read
        declared = [limit for name in _LIMITS if isinstance(limit := getattr(base.config, name, None), int)]
        return min([*rows, *declared[:1]]) if rows else None

    def position_readers(self, base: Any) -> list[nn.Module]:
        """Return the modules that are called with position ids: rotary ones, and embeddings of tokens and positions."""
        return [
            module
            for module in base.modules()
            if "position_ids" in argument_names(module)
            and _READERS.search(type(module).__name__)
            and not _TABLE_CLASSES.search(type(module).__name__)
        ]

    def without_position(self, output: Any) -> Any:
        """Return what a module of `position_tables` returns where positions are disabled, in the form of its output."""
        if isinstance(output, tuple):  # I-BERT's, with the scale of its numbers
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)  # no gradient: an optimiser would decay a table that gets a gradient of zero

    def open_mask(self, attention: Any, call: dict[str, Any]) -> None:
        """Change the arguments of a call of an attention module so that every query sees every key."""
        hidden, arguments = call[hidden_argument(attention)], argument_names(attention)
        name = next(name for name in self.mask_arguments if name in arguments)
        length = hidden.shape[self.token_axis]
        by_token = call.get(name) is not None and call[name].ndim == 2  # XLM's
        call[name] = torch.ones_like(call[name]) if by_token else hidden.new_zeros(len(hidden), 1, length, length)

    def why_not_measured(self, base: Any) -> str | None:
        """Return the reason why attention is not one matrix of softmaxes per head, or None where it is."""
        reasons = (reason for reason, types in _NOT_MEASURED.items() if base.config.model_type in types)
        return next(reasons, self.why_not_additive(base))

    def why_not_additive(self, base: Any) -> str | None:
        """Return the reason why a bias cannot be added to the logits of this model exactly, or None where it can."""
        if getattr(base.config, "attention_type", None) == "block_sparse":
            return "long inputs are attended in blocks; load it with attention_type='original_full'"
        if getattr(base.config, "talking_head", False):  # DeBERTa
            return "with talking_head=True it mixes the logits of its heads, and their weights"
        return None

    def why_positions_remain(self, base: Any) -> str | None:
        """Return the reason why the model still depends on positions once they are disabled, or None."""
        # Llama 4
        if getattr(base.config, "attn_temperature_tuning", False) and 0 in (base.config.no_rope_layers or [0]):
            return "queries of layers without RoPE grow with their position (attn_temperature_tuning)"
        return None


def _calls_the_interface(module: nn.Module) -> bool:
    """Return whether a module runs its attention through the attention interface of transformers."""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())
