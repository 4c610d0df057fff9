"""Position-only logits, in closed form where a family has one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._toeplitz import diagonals, toeplitz
from pelocality.encodings._scores import masked_softmax
from pelocality.models._restore import inference
from pelocality.models._weights import embedding_weight, loaded
from pelocality.models.inputs.words import choose_words
from pelocality.models.logits.terms import (
    captured_inputs,
    known_logits,
    logit_terms,
    position_parts,
    queries_and_keys,
)
from pelocality.models.sequence_model import SequenceModel, requested_layers

_REPEATS = 4  # tokens of one word, run to check that its content is the same at every position


@dataclass(frozen=True, eq=False, repr=False)
class PositionalLogits:
    """Position-only logits of attention, before the mask and the softmax.

    Attributes:
        logits: Delta, scaled as the model scales its logits, (layer, head, n, n).
        relative: The same by distance, b[k] for k = j - i = -(n-1)..n-1, (layer, head, 2n - 1), where every layer
            depends on k alone; None otherwise. ``measure_relative`` measures it without an n x n matrix.
        layers: The model's layer numbers along the first axis.
        visible: The keys each query may attend to, (layer, n, n): the causal mask and local windows.
        causal: Whether no query attends to later keys.
        method: "exact", or "average" over the words in ``words``.
        words: The words averaged over; empty where the logits are exact.
        word_ids: Their token ids.
    """

    logits: Tensor
    relative: Tensor | None
    layers: tuple[int, ...]
    visible: Tensor
    causal: bool
    method: Literal["exact", "average"]
    words: tuple[str, ...] = ()
    word_ids: tuple[int, ...] = ()

    @property
    def attention(self) -> Tensor:
        """The softmax of the logits over the visible keys, (layer, head, n, n); the metrics accept this result for it.

        Examples:
            >>> causal = torch.ones(1, 2, 2).tril() > 0
            >>> PositionalLogits(torch.zeros(1, 1, 2, 2), None, (0,), causal, True, "exact").attention
            tensor([[[[1.0000, 0.0000],
                      [0.5000, 0.5000]]]])
        """
        return masked_softmax(self.logits, self.visible[:, None])

    def __repr__(self) -> str:
        layers, heads, n, _ = self.logits.shape
        words = f", average over {len(self.words)} words" if self.method == "average" else ", exact"
        causal = ", causal" if self.causal else ""
        return f"PositionalLogits({layers} layers x {heads} heads, n = {n}{words}{causal})"


def positional_logits(
    model: nn.Module | SequenceModel,
    tokenizer: Any = None,
    *,
    length: int,
    words: int | Sequence[str | int] = 64,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    progress: bool = True,
) -> PositionalLogits:
    r"""Return the position-only correlation delta of each layer and head.

    Logits are $\alpha_{ij} = (\gamma_{ij} + \delta_{ij}) / \sqrt d$, and $\delta$ is the part without content
    (Chen et al., 2023). Where it has a closed form depends on the family. The model's scaling is
    included: $1 / \sqrt d$ for most, none for T5.

    - BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT, GPT-2: exact, first layer only. The logits of an input whose word
      embeddings are zero. Everything else is included: token type 0, the layer norm with its bias and with its scale
      for positions alone, the biases of queries and keys. (``decompose`` uses the scale for the given text instead,
      and counts biases as content.)
    - T5, BLOOM (ALiBi): exact, every layer. The bias b[k]; any repeated word has these logits, up to a constant.
    - MPNet: exact, every layer. The first layer as BERT's, plus the relative bias; deeper layers the relative bias.
    - XLNet: exact, every layer. r_r_bias . (r R); its other positional term, q . (r R), depends on content.
    - DeBERTa, DeBERTa-v2: average over words, every layer. c2p + p2c of one repeated word, as the model has no
      position-only term; the word's content term, one number per head, is left out. With absolute positions at its
      input (no released model): exact, first layer, as BERT's.
    - Llama, ModernBERT (RoPE): average over words, every layer. The whole logits of one repeated word.

    In a RoPE or DeBERTa model one repeated word has the same hidden state at every position of every layer (this is
    checked), so the logits are exact for that word. The average over words is of logits;
    ``positional_attention`` averages weights, and gives other numbers.

    Args:
        model: A transformers model of a known family, with or without a head.
        tokenizer: Its tokenizer, to draw whole words; used for averages only.
        length: Number of positions n, in tokens.
        words: How many words to draw, or the words themselves; used for averages only.
        seed: Seed of the draw.
        layers: Layers to return, by index; by default all that have a closed form.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        `PositionalLogits` of (layer, head, n, n), any real number, in at least float32, on the model's device.

    Raises:
        TypeError: Something that is not a transformers model.
        ValueError: An unknown family, attention that is not a softmax of the logits (an encoding attached, heads
            mixed), a learned prompt (peft), a length beyond its positions, a layer without a closed form, content that
            is not constant over positions for a repeated word (DeBERTa-v2 with a convolution), or quantised queries and
            keys.

    Examples:
        >>> from transformers import T5Config, T5EncoderModel
        >>> t5 = T5EncoderModel(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2))
        >>> delta = positional_logits(t5, length=16)
        >>> delta
        PositionalLogits(2 layers x 2 heads, n = 16, exact)
        >>> delta.attention.shape, delta.relative.shape
        (torch.Size([2, 2, 16, 16]), torch.Size([2, 2, 31]))
    """
    model = SequenceModel.of(model)
    family, base = known_logits(model), model.module
    model.check_length(length)
    modules: list[Any] = family.attention_layers(base)
    with inference(base), loaded(base, [modules[0], *position_parts(model)]):
        table, biased = family.absolute(base) is not None, family.relative_bias(base, modules[0], 1) is not None
        content_terms = (family.rotation, family.relative_keys, family.relative_queries)
        with_content = any(term(base, modules[0], 1) is not None for term in content_terms)
        if not (table or biased or with_content):
            raise ValueError(f"{type(base).__name__} has no known positional terms in its logits")
        averaged = with_content and not (table or biased)  # every positional term needs the content of some word
        closed = range(len(modules)) if biased or averaged else range(1)
        chosen = requested_layers(
            layers,
            closed,
            len(modules),
            f"in which {type(base).__name__} has no position-only logits: its positions are added to the words before "
            "the first layer; use layers=[0], or positional_attention for the deeper ones",
        )
        ids, names = choose_words(model, tokenizer, words, seed) if averaged else ((), ())
        bar = tqdm(chosen, desc="position-only logits", unit="layer", delay=3, disable=not progress)
        if averaged:
            logits = _constant_content(model, bar, ids, length)
        else:
            logits = [_exact(model, modules[layer], table and layer == 0, length) for layer in bar]
    device = logits[0].device
    stacked = torch.stack([part.to(device) for part in logits])
    visible = [family.visible(base, modules[layer], length).to(device) for layer in chosen]
    return PositionalLogits(
        logits=stacked,
        relative=None if table and 0 in chosen else diagonals(stacked),
        layers=chosen,
        visible=torch.stack(visible),
        causal=family.causal(base),
        method="average" if ids else "exact",
        words=names,
        word_ids=ids,
    )


def _exact(model: SequenceModel, module: Any, table: bool, length: int) -> Tensor:
    """Return a layer's logits without content, (head, n, n): for word embeddings of zero, or its relative bias."""
    base, dtype = model.module, model.dtype
    with loaded(base, [module]):
        if not table:
            bias = model.family.relative_bias(base, module, length)
            assert bias is not None
            return toeplitz(bias.to(model.device, torch.promote_types(dtype, torch.float32)), length)
        width = embedding_weight(base).shape[1]
        with captured_inputs(model) as hidden:
            model.run({"inputs_embeds": torch.zeros(1, length, width, dtype=dtype, device=model.device)})
        return logit_terms(model, module, queries_and_keys(model, module, hidden[0])).logits[0]


def _constant_content(model: SequenceModel, layers: Iterable[int], ids: tuple[int, ...], length: int) -> list[Tensor]:
    """Return the logits of each of the layers under one repeated word, averaged over words: (head, n, n) each."""
    base = model.module
    batch = torch.tensor(ids, device=model.device)[:, None].expand(-1, _REPEATS)
    with captured_inputs(model) as hidden:
        model.run({"input_ids": batch})
    logits = []
    for layer in layers:
        module, states = model.family.attention_layers(base)[layer], hidden[layer]
        spread = (states - states[:, :1]).abs().max() / states.abs().max()
        if spread > (1e-3 if states.dtype in (torch.float32, torch.float64) else 0.1):
            raise ValueError(
                f"{type(base).__name__} does not keep the content of a repeated word constant over positions "
                f"(layer {layer} differs by {float(spread):.2g}), so its logits have no closed form; "
                "use positional_attention"
            )
        with loaded(base, [module]):
            queries, keys = queries_and_keys(model, module, states[:, :1])
            total = states.new_zeros(())
            for query, key in zip(queries, keys, strict=True):  # (head, 1, d_head) each
                content = (query.expand(1, -1, length, -1), key.expand(1, -1, length, -1))
                terms = logit_terms(model, module, content)
                if model.family.rotation(base, module, 1) is None:  # one word's content is the same number everywhere
                    terms = replace(terms, content=torch.zeros_like(terms.content))
                total = total + terms.logits[0]
            logits.append(total / len(ids))
    return logits
