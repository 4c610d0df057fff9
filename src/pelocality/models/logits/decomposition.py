"""The attention logits of real text as a sum of content, position and cross terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pelocality.encodings._scores import masked_softmax
from pelocality.models._inference import inference
from pelocality.models._restore import hooked
from pelocality.models._weights import loaded, position_parts
from pelocality.models.families import AbsoluteInput
from pelocality.models.inputs.tokens import runs_of_tokens, token_batch
from pelocality.models.layers import requested_layers
from pelocality.models.logits.terms import Terms, capped, captured_inputs, known_logits, logit_terms, queries_and_keys
from pelocality.models.sequence_model import SequenceModel

Split = Literal["table", "relative", "mean content"]


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(Terms):
    """Attention logits of a text as four terms, scaled as the model scales them.

    Each term is (layer, batch, head, n, n), or (layer, head, n, n) for an input without a batch axis. ``logits`` is
    their sum: the model's logits before the mask, up to a constant per row.

    Attributes:
        content: Gamma, content of the query against content of the key.
        content_to_position: Content of the query against the position of the key.
        position_to_content: Position of the query against content of the key.
        position: Delta, the terms without content.
        layers: The model's layer numbers along the first axis.
        visible: The keys each query may attend to, (layer, batch, n, n): padding, the causal mask, local windows.
        splits: How each layer was split: "table", "relative" or "mean content", see `decompose`.
        caps: The c of each layer that caps its logits at c tanh(logits / c) (Gemma 2), otherwise None. The terms are
            those of the logits before the cap.
    """

    layers: tuple[int, ...]
    visible: Tensor
    splits: tuple[Split, ...]
    caps: tuple[float | None, ...]

    @property
    def attention(self) -> Tensor:
        """The softmax of ``logits``, capped, over the visible keys: the model's attention, which the metrics read."""
        return masked_softmax(capped(self.logits, self.caps), self.visible.unsqueeze(-3))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.content.shape))
        return f"Decomposition({shape}; layers {list(self.layers)} by {', '.join(dict.fromkeys(self.splits))})"


def decompose(
    model: nn.Module | SequenceModel,
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

    and relative terms are added to the term they belong to. ``splits`` says how each layer was split:

    - "table": the first layer of models with a table of positions. The embeddings are a sum. The output of their layer
      norm is also a sum, if its scale is fixed at the value for the whole input. Position is the part of the table.
      Everything else counts as content, biases and token types included.
    - "relative": every layer of T5, BLOOM, XLNet and DeBERTa, and the deeper layers of MPNet. T5's, MPNet's and
      ALiBi's bias is delta. XLNet's r_r_bias . (r R) is delta and its q . (r R) content to position; r_w_bias and
      segments count as content. DeBERTa's c2p and p2c are the cross terms; its delta is zero, because DeBERTa
      leaves that term out.
    - "mean content": RoPE rotates content, so no term is additive. This split is ours. Before the rotation, queries and
      keys are split into their mean over all tokens of the call except padding, and the deviation from this mean.
      Delta is the product of the rotated means. For a given text, it depends on j - i alone. Angles that depend on the
      longest text of a batch (dynamic NTK, LongRoPE) are those of the whole batch, as in the model.

    In deeper layers "content" is the input of the layer, which depends on positions through the layers below.

    Args:
        model: A transformers model of a known family, with or without a head.
        input_ids: Token ids, (batch, n) or (n,); a batch may be empty. If a model counts positions from its padding id
            (RoBERTa, MPNet), padding ids in the text get the positions that the model gives them.
        attention_mask: 1 for tokens, 0 for padding, same shape; padding must be on the right. None: no padding, and
            no id is the model's padding id.
        token_type_ids: Segments, same shape, if the model reads them.
        layers: Layers to return, by index; by default all that can be split.

    Returns:
        A `Decomposition`, in at least float32, on the model's device. Rows of padded queries are undefined.

    Raises:
        TypeError: Something that is not a transformers model, or ids that are not integers.
        ValueError: An unknown family, attention that is not a softmax of the logits (an encoding attached, heads
            mixed), a learned prompt (peft), a text longer than its positions, ids outside its vocabulary, a padding id
            without a mask, padding on the left, quantised queries and keys, or a layer that cannot be split.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> tiny = DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=8, vocab_size=9)
        >>> parts = decompose(DistilBertModel(tiny), [3, 1, 4, 1, 5])
        >>> parts
        Decomposition(1 x 2 x 5 x 5; layers [0] by table)
        >>> torch.allclose(parts.attention.sum(-1), torch.ones(1, 2, 5))
        True
    """
    model = SequenceModel.of(model)
    family, base = known_logits(model), model.module
    inputs, real = token_batch(model, input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
    if not bool(real[:, 0].all()) or bool((runs_of_tokens(real) > 1).any()):
        raise ValueError("attention_mask must have padding on the right alone; set tokenizer.padding_side='right'")
    single = torch.as_tensor(input_ids).ndim == 1
    sequences, n = real.shape
    model.check_length(n)
    if not sequences:  # most models cannot run an empty batch: one sequence is run, and its result removed
        inputs, real = {"input_ids": inputs["input_ids"].new_zeros(1, n)}, real.new_ones(1, n)
    modules: list[Any] = family.attention_layers(base)
    absolute = family.absolute(base)
    with inference(base), loaded(base, position_parts(base, absolute)):
        splits = [_split_of(model, module, layer) for layer, module in enumerate(modules)]
        available = [layer for layer, split in enumerate(splits) if split is not None]
        chosen = requested_layers(layers, available, len(splits), "that can be split")
        captured: list[Tensor] = []  # the rows looked up in the table, then the embeddings before their layer norm
        tables = [] if absolute is None else [absolute.table, absolute.norm]
        with hooked(tables, lambda _, args, kwargs: captured.append(args[0])), captured_inputs(model) as hidden:
            model.run(inputs)
        terms = []
        for layer in chosen:
            module, position = modules[layer], None
            with loaded(base, [module]):
                query, key = queries_and_keys(model, module, hidden[layer])
                if absolute is not None and splits[layer] == "table":
                    share = _table_share(absolute, *captured)
                    with_biases, biases = (queries_and_keys(model, module, x) for x in (share, torch.zeros_like(share)))
                    position = (with_biases[0] - biases[0], with_biases[1] - biases[1])
                elif splits[layer] == "mean content":
                    position = (_mean(query, real), _mean(key, real))
                if position is not None:
                    query, key = query - position[0], key - position[1]
                terms.append(logit_terms(model, module, (query, key), position, inputs.get("token_type_ids")))
    device = terms[0].content.device
    visible = torch.stack([family.visible(base, modules[layer], n) for layer in chosen])[:, None] & real[:, None].cpu()

    cut: Any = 0 if single else slice(sequences)
    parts = {name: torch.stack([vars(each)[name].to(device) for each in terms])[:, cut] for name in vars(terms[0])}
    caps = tuple(family.cap(modules[layer]) for layer in chosen)
    split_by = tuple(split for layer in chosen if (split := splits[layer]) is not None)
    return Decomposition(**parts, layers=chosen, visible=visible.to(device)[:, cut], splits=split_by, caps=caps)


def _table_share(absolute: AbsoluteInput, rows: Tensor, summed: Tensor) -> Tensor:
    """Return the part of the first attention's input that is due to the table, (batch, n, d)."""
    norm: Any = absolute.norm
    placed = absolute.table(rows).expand(len(summed), -1, -1)
    if absolute.before_norm is not None:
        placed = absolute.before_norm(placed) - absolute.before_norm(torch.zeros_like(placed))
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon  # the second name is DeBERTa's
    scale = (summed.var(-1, keepdim=True, correction=0) + epsilon).rsqrt()
    share: Tensor = norm.weight * (placed - placed.mean(-1, keepdim=True)) * scale
    if absolute.after_norm is not None:
        share = absolute.after_norm(share) - absolute.after_norm(torch.zeros_like(share))
    return share


def _mean(states: Tensor, real: Tensor) -> Tensor:
    """Return the mean over the batch's tokens except padding, expanded to (batch, head, n, d_head)."""
    mean = states.transpose(1, 2)[real.to(states.device)].mean(0)  # (token, head, d_head) -> (head, d_head)
    return mean[:, None].expand_as(states)


def _split_of(model: SequenceModel, module: Any, layer: int) -> Split | None:
    """Return how a layer can be split into content and position, or None."""
    family, base = model.family, model.module
    if layer == 0 and family.absolute(base) is not None:
        return "table"
    if family.rotation(base, module, 1) is not None:
        return "mean content"
    with loaded(base, [module]):
        terms = (family.relative_bias, family.relative_keys, family.relative_queries)
        return "relative" if any(term(base, module, 1) is not None for term in terms) else None
