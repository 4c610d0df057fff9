"""The logits of real text, taken apart into content and position."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pelocality.encodings._scores import masked_softmax
from pelocality.models._restore import hooked
from pelocality.models._run import (
    captured_inputs,
    check_length,
    device_of,
    eager_attention,
    layer_indices,
    refuse_attached,
    run,
)
from pelocality.models._terms import Pair, Terms, logit_terms, position_parts, queries_and_keys
from pelocality.models._weights import check_ids, loaded
from pelocality.models.families import architecture
from pelocality.models.families._record import AbsoluteInput, Architecture

Split = Literal["table", "relative", "mean content"]


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition:
    """Pre-softmax logits of a text as four terms, scaled as the model scales them; their sum is ``logits``.

    All are (layer, batch, head, n, n), or (layer, head, n, n) for an input without a batch axis.

    Attributes:
        content: gamma, content of the query against content of the key.
        content_to_position: content of the query against the position of the key.
        position_to_content: position of the query against content of the key.
        position: delta, all that no content enters.
        layers: the layers of the model that the first axis stands for.
        visible: the keys each query may attend to, (layer, batch, n, n): padding, the causal mask, local windows.
        splits: how each layer was taken apart: "table", "relative" or "mean content", see `decompose`.
    """

    content: Tensor
    content_to_position: Tensor
    position_to_content: Tensor
    position: Tensor
    layers: tuple[int, ...]
    visible: Tensor
    splits: tuple[Split, ...]

    @property
    def logits(self) -> Tensor:
        """The sum of the four terms: the model's own logits before the mask, up to a constant per row."""
        return self.content + self.content_to_position + self.position_to_content + self.position

    def weights(self) -> Tensor:
        """Return the softmax of the sum over the visible keys: the model's own attention, rows sum to 1."""
        return masked_softmax(self.logits, self.visible.unsqueeze(-3))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.content.shape))
        return f"Decomposition({shape}; layers {list(self.layers)} by {', '.join(dict.fromkeys(self.splits))})"


def decompose(
    model: nn.Module,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Decomposition:
    r"""Return the logits of a text as content, position and the two cross terms between them.

    With queries $q_i = q^c_i + q^p_i$ and keys $k_j = k^c_j + k^p_j$ split into content and position,

    $$q_i^\top k_j = \underbrace{q^{c\top}_i k^c_j}_{\gamma} + q^{c\top}_i k^p_j + q^{p\top}_i k^c_j
      + \underbrace{q^{p\top}_i k^p_j}_{\delta}$$

    and relative terms join the cell they belong to. How a layer is split stands in ``splits``:

    - "table": the first layer of models with a table of positions. The embeddings are a sum, and so is what the layer
      norm makes of it once its scale is held at the value that the whole sum gives it. Position is the share of the
      table; all else that does not depend on position, biases and token types included, counts as content.
    - "relative": every layer of T5, BLOOM, XLNet and DeBERTa, and the deeper layers of MPNet. T5's, MPNet's and
      ALiBi's bias is delta. XLNet's r_r_bias . (r R) is delta and its q . (r R) content to position; r_w_bias and
      segments count as content. DeBERTa's c2p and p2c are the cross terms; its delta is zero, as it leaves that term
      out.
    - "mean content": RoPE turns content itself, so nothing is additive. Ours: queries and keys are split, before they
      are rotated, into their mean over all real tokens of the call and the rest. Delta is what the rotation does to the
      mean and depends on j - i alone: position as average content sees it. It depends on the text given.

    In deeper layers "content" is whatever the layer reads, and that knows positions from the layers below.

    Args:
        model: a transformers model of a known family, with or without a head.
        input_ids: token ids, (batch, n) or (n,); a batch may be empty. Where a model counts positions from its
            padding id (RoBERTa, MPNet), position is what the model itself makes of such ids in the text.
        attention_mask: 1 for tokens, 0 for padding, same shape; padding has to stand on the right.
        token_type_ids: segments, same shape, where the model reads them.
        layers: layers to return, by index; by default all that can be split.

    Returns:
        A `Decomposition`, in at least float32, on the model's device. Rows of padded queries mean nothing.

    Raises:
        TypeError: for something that is no transformers model, or ids that are not integers.
        ValueError: for an unknown family, a text longer than its positions, ids outside its vocabulary, padding on
            the left, quantised queries and keys, or a layer that cannot be split.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> tiny = DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=8, vocab_size=9)
        >>> parts = decompose(DistilBertModel(tiny), [3, 1, 4, 1, 5])
        >>> parts
        Decomposition(1 x 2 x 5 x 5; layers [0] by table)
        >>> torch.allclose(parts.weights().sum(-1), torch.ones(1, 2, 5))
        True
    """
    record = architecture(model)
    base = record.base(model)
    refuse_attached(record, base)
    inputs, real, single = _read(base, input_ids, attention_mask, token_type_ids)
    sequences, n = real.shape
    check_length(base, n)
    if not sequences:  # most models cannot run an empty batch: one sequence is run, and cut off
        inputs, real = {"input_ids": inputs["input_ids"].new_zeros(1, n)}, real.new_ones(1, n)

    modules: list[Any] = record.attentions(base)
    with eager_attention(model), loaded(base, position_parts(record, base)):
        kinds = [_split_of(record, base, module, layer) for layer, module in enumerate(modules)]
        chosen = _chosen(layers, kinds, type(base).__name__)
        terms = _terms(record, base, modules, chosen, kinds, inputs, real)
    device = terms[0].content.device
    sees = torch.stack([record.visible(base, modules[layer], n) for layer in chosen]).to(device)  # (layer, n, n)
    visible = sees[:, None] & real[:sequences, None, :].to(device)  # (layer, batch, n, n)

    def stacked(name: str) -> Tensor:
        parts = torch.stack([getattr(part, name).to(device) for part in terms])  # (layer, batch, head, n, n)
        return parts[:, 0] if single else parts[:, :sequences]

    return Decomposition(
        content=stacked("content"),
        content_to_position=stacked("content_to_position"),
        position_to_content=stacked("position_to_content"),
        position=stacked("position"),
        layers=chosen,
        visible=visible[:, 0] if single else visible,
        splits=tuple(split for layer in chosen if (split := kinds[layer]) is not None),
    )


def _read(
    base: Any, input_ids: Any, attention_mask: Tensor | None, token_type_ids: Tensor | None
) -> tuple[dict[str, Tensor], Tensor, bool]:
    """Return the inputs as batches on the model's device, which tokens are real, and whether it was one sequence."""
    ids = _tensor("input_ids", input_ids)
    if ids.ndim not in (1, 2) or not ids.shape[-1]:
        raise ValueError(f"input_ids must be (n,) or (batch, n) with at least one token, got shape {tuple(ids.shape)}")
    check_ids(base, ids)
    inputs = {"input_ids": ids}
    for name, given in (("attention_mask", attention_mask), ("token_type_ids", token_type_ids)):
        if given is not None:
            inputs[name] = _tensor(name, given)
            if inputs[name].shape != ids.shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {tuple(inputs[name].shape)}"
                )
    if "token_type_ids" in inputs and "token_type_ids" not in inspect.signature(base.forward).parameters:
        raise ValueError(f"{type(base).__name__} reads no token_type_ids; leave them out")
    types = getattr(base.config, "type_vocab_size", None)
    if "token_type_ids" in inputs and types is not None:
        given = inputs["token_type_ids"]
        if bool(((given < 0) | (given > max(types - 1, 0))).any()):
            raise ValueError(f"token_type_ids must be in 0..{max(types - 1, 0)} for {type(base).__name__}")
    inputs = {name: tensor.reshape(-1, ids.shape[-1]).to(device_of(base)) for name, tensor in inputs.items()}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    if not bool(real[:, 0].all()) or bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError(
            "attention_mask must mark tokens on the left and padding on the right; set padding_side='right'"
        )
    return inputs, real, ids.ndim == 1


def _tensor(name: str, given: Any) -> Tensor:
    """Return what the user gave as a tensor of integers; a mask may hold 0 and 1 in any type."""
    try:
        tensor = torch.as_tensor(given)
    except ValueError as error:
        raise ValueError(f"{name} holds texts of different lengths; pad them: tokenizer(..., padding=True)") from error
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} must be integers, got {type(given).__name__}; run the tokenizer first") from error
    if name == "attention_mask":
        if not bool(((tensor == 0) | (tensor == 1)).all()):
            raise ValueError("attention_mask must be 1 for tokens and 0 for padding, and holds something else")
    elif tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise TypeError(f"{name} must be integers, got {tensor.dtype}; run the tokenizer first")
    return tensor.long()


def _terms(
    record: Architecture,
    base: Any,
    modules: list[Any],
    chosen: tuple[int, ...],
    kinds: list[Split | None],
    inputs: dict[str, Tensor],
    real: Tensor,
) -> list[Terms]:
    """Run the model once and take the chosen layers apart."""
    absolute = record.absolute(base)
    rows: list[Tensor] = []  # of the table, as the model looks them up
    summed: list[Tensor] = []  # the embeddings just before their layer norm
    tables, norms = ([], []) if absolute is None else ([absolute.table], [absolute.norm])
    with (
        hooked(tables, lambda _, args, kwargs: rows.append(args[0])),
        hooked(norms, lambda _, args, kwargs: summed.append(args[0])),
        captured_inputs(record, base) as hidden,
    ):
        run(base, **inputs)
    terms = []
    for layer in chosen:
        module, states = modules[layer], hidden[layer]
        with loaded(base, [module]):
            query, key = queries_and_keys(record, base, module, states)
            position: Pair | None = None
            if kinds[layer] == "table":
                assert absolute is not None
                placed = _table_share(absolute, rows[0], summed[0])
                with_position = queries_and_keys(record, base, module, placed)
                biases = queries_and_keys(record, base, module, torch.zeros_like(placed))
                position = (with_position[0] - biases[0], with_position[1] - biases[1])
            elif kinds[layer] == "mean content":
                position = (_mean(query, real), _mean(key, real))
            if position is not None:
                query, key = query - position[0], key - position[1]
            terms.append(logit_terms(record, base, module, (query, key), position, inputs.get("token_type_ids")))
    return terms


def _table_share(absolute: AbsoluteInput, rows: Tensor, summed: Tensor) -> Tensor:
    """Return the share of the table's rows in what the first attention reads, at the norm's scale: (batch, n, d)."""
    norm: Any = absolute.norm
    placed = absolute.table(rows).expand(len(summed), -1, -1)
    if absolute.before_norm is not None:
        placed = absolute.before_norm(placed) - absolute.before_norm(torch.zeros_like(placed))
    scale = (summed.var(-1, keepdim=True, correction=0) + getattr(norm, absolute.epsilon_name)).rsqrt()
    share: Tensor = norm.weight * (placed - placed.mean(-1, keepdim=True)) * scale
    if absolute.after_norm is not None:
        share = absolute.after_norm(share) - absolute.after_norm(torch.zeros_like(share))
    return share


def _mean(states: Tensor, real: Tensor) -> Tensor:
    """Return the mean over the batch's real tokens, laid out for every token: (batch, head, n, d_head)."""
    mean = states.transpose(1, 2)[real.to(states.device)].mean(0)  # (token, head, d_head) -> (head, d_head)
    return mean[:, None].expand_as(states)


def _split_of(record: Architecture, base: Any, module: Any, layer: int) -> Split | None:
    if layer == 0 and record.absolute(base) is not None:
        return "table"
    if record.rotation(base, module, 1) is not None:
        return "mean content"
    with loaded(base, [module]):
        terms = (record.relative_bias, record.relative_keys, record.relative_queries)
        return "relative" if any(term(base, module, 1) is not None for term in terms) else None


def _chosen(layers: Sequence[int] | None, kinds: list[Split | None], name: str) -> tuple[int, ...]:
    splittable = tuple(layer for layer, kind in enumerate(kinds) if kind is not None)
    chosen = splittable if layers is None else layer_indices(layers, len(kinds))
    beyond = sorted(set(chosen) - set(splittable))
    if beyond or not chosen:
        raise ValueError(
            f"{name} cannot be split into content and position in layers {beyond or [*range(len(kinds))]}: "
            "its positions enter with the words at the first layer, and later layers read both mixed; "
            "use layers=[0], or position_share"
        )
    return chosen
