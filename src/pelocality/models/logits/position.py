"""Position-only logits: exact where a family has them, else of the mean content of texts or of repeated words."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._toeplitz import toeplitz
from pelocality.encodings import RotaryEncoding
from pelocality.encodings._scores import masked_softmax
from pelocality.models._inference import depend_on_length, forget_longest_input
from pelocality.models._weights import embedding_weight, loaded, position_parts
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.inputs.words import choose_words
from pelocality.models.layers import requested_layers
from pelocality.models.logits.content import ByDistance, Content, mean_content
from pelocality.models.logits.terms import capped, captured_inputs, known_logits, logit_terms, queries_and_keys
from pelocality.models.measuring.result import interval_of, metric_of
from pelocality.models.rotations import read_rotations
from pelocality.models.sequence_model import SequenceModel

_REPEATS = 4  # tokens of one word, run to check that its content is the same at every position
Method = Literal["exact", "texts", "words"]


@dataclass(frozen=True, eq=False, repr=False)
class PositionalLogits:
    """Position-only logits of attention, before the mask and the softmax.

    If all layers depend on distance alone, the result holds 2n - 1 numbers for each head. The n x n matrices are made
    when they are read.

    Attributes:
        relative: Delta by distance, b[k] for k = j - i = -(n-1)..n-1, scaled as the model scales its logits,
            (layer, head, 2n - 1); None if a layer reads a table of positions. ``measure_relative`` measures this tensor
            without an n x n matrix.
        layers: The model's layer numbers along the first axis.
        visible_distances: The distances at which a query may attend to a key, (layer, 2n - 1): the causal mask and
            local windows.
        method: "exact", "texts" for the mean content of texts, or "words" for the average over repeated words.
        caps: The c of each layer that caps its logits at c tanh(logits / c) (Gemma 2), otherwise None. ``logits`` are
            those before the cap, and ``attention`` is capped.
        table: Delta (layer, head, n, n) if a layer reads a table of positions (BERT, MPNet); None otherwise.
        content: Mean queries and keys of each text or word; None if the logits are exact.
        words: The words averaged over.
        word_ids: Their token ids.
        rotations: The rotation of each layer, with the pairs of dimensions of the content, where tokens have several
            coordinates (Qwen2-VL); empty otherwise.
    """

    relative: Tensor | None
    layers: tuple[int, ...]
    visible_distances: Tensor
    method: Method
    caps: tuple[float | None, ...]
    table: Tensor | None = None
    content: Content | None = None
    words: tuple[str, ...] = ()
    word_ids: tuple[int, ...] = ()
    rotations: tuple[RotaryEncoding, ...] = ()
    _by_distance: tuple[ByDistance, ...] = ()

    @property
    def length(self) -> int:
        """The number of positions n."""
        return (self.visible_distances.shape[-1] + 1) // 2

    @property
    def causal(self) -> bool:
        """Whether no query attends to later keys."""
        return not bool(self.visible_distances[:, self.length :].any())

    @property
    def logits(self) -> Tensor:
        """Delta as matrices, (layer, head, n, n)."""
        if self.table is not None:
            return self.table
        assert self.relative is not None
        return toeplitz(self.relative, self.length)

    @property
    def visible(self) -> Tensor:
        """The keys each query may attend to, (layer, n, n)."""
        return toeplitz(self.visible_distances, self.length)

    @property
    def attention(self) -> Tensor:
        """The softmax of the logits over the visible keys, (layer, head, n, n); the metrics accept this result for it.

        Examples:
            >>> causal = torch.tensor([[True, True, False]])
            >>> PositionalLogits(torch.zeros(1, 1, 3), (0,), causal, "exact", (None,)).attention
            tensor([[[[1.0000, 0.0000],
                      [0.5000, 0.5000]]]])
        """
        return masked_softmax(capped(self.logits, self.caps), self.visible[:, None])

    def at(self, displacements: Tensor) -> Tensor:
        r"""Return the logits at displacements of several coordinates, such as of the patches of an image.

        Distances in ``relative`` are those of text, where all coordinates are the same. The equation is that of
        ``RotaryEncoding.kernel``, for the mean content.

        Args:
            displacements: $x_j - x_i$ from the query to the key, (m, axis): frames or tokens, rows and columns.

        Returns:
            (layer, head, m), in float64 where the device has it.

        Raises:
            ValueError: Tokens of the model have one coordinate, or displacements have others.
        """
        if self.content is None or not self.rotations:
            raise ValueError("tokens of the model have one coordinate, so displacements are distances, as of relative")
        content = self.content.mean() if self.method == "texts" else self.content
        both = zip(content.queries.unbind(1), content.keys.unbind(1), strict=True)
        layers = zip(self.rotations, self._by_distance, both, strict=True)
        kernels = [rotation.kernel(*pair, displacements, scale=layer.scaling) for rotation, layer, pair in layers]
        return torch.stack(kernels).mean(1)

    def interval(self, metric: str = "locality", confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        r"""Return the interval of a metric of ``attention`` over the texts or words.

        The logits are not a mean over texts, but a product of two means. So the interval is that of the jackknife. Let
        $\theta$ be the metric of all $N$ texts, and $\theta_{-s}$ the metric without text $s$. The interval is the t
        interval of the mean of $N \theta - (N - 1) \theta_{-s}$ (Tukey, 1958). It covers the choice of texts or words,
        as the interval of a `TextAverage` does. Each text left out needs the n x n matrices once, layer by layer.

        Args:
            metric: The name of a metric of ``pelocality.metrics``, such as "past_locality".
            confidence: Coverage, between 0 and 1.

        Returns:
            The lower and the upper end, each (layer, head); NaN for a single text.

        Raises:
            ValueError: Exact logits, which do not vary; an unknown metric; or a confidence outside (0, 1).
        """
        function, content = metric_of(metric), self.content
        if content is None:
            raise ValueError("exact logits do not vary over texts or words, and have no interval")
        if function is None:
            raise ValueError(f"metric must be the name of a metric of pelocality.metrics, got {metric!r}")
        n, whole = len(content.tokens), self._measured(function, content)
        values = [n * whole - (n - 1) * self._measured(function, content.without(s)) for s in range(n) if n > 1]
        return interval_of(torch.stack(values or [whole]).cpu(), confidence)

    def _measured(self, function: Callable[..., Tensor], content: Content) -> Tensor:
        """Return a metric of the attention of some of the texts or words, (layer, head)."""
        values = []
        by_layer = _logits(self._by_distance, content, self.method)
        for logits, cap, seen in zip(by_layer, self.caps, self.visible_distances, strict=True):
            matrices = capped(toeplitz(logits[None], self.length), [cap])
            values.append(function(masked_softmax(matrices, toeplitz(seen[None], self.length))))
        return torch.cat(values)

    def __repr__(self) -> str:
        heads = (self.table if self.relative is None else self.relative).shape[1]  # type: ignore[union-attr]
        of = "exact" if self.content is None else f"mean content of {len(self.content.tokens)} texts"
        of = f"average over {len(self.words)} words" if self.words else of
        of += ", causal" if self.causal else ""
        return f"PositionalLogits({len(self.layers)} layers x {heads} heads, n = {self.length}, {of})"


def positional_logits(
    model: nn.Module | SequenceModel,
    tokenizer: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    length: int,
    words: int | Sequence[str | int] = 64,
    seed: int = 0,
    special_tokens: bool = False,
    without_first: int = 0,
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> PositionalLogits:
    r"""Return the position-only logits delta of each layer and head.

    Logits are $\alpha_{ij} = (\gamma_{ij} + \delta_{ij}) / \sqrt d$, and $\delta$ is the part without content
    (Chen et al., 2023). The model's scaling is included: $1 / \sqrt d$ for most, none for T5. ``method`` says where
    delta comes from:

    - "exact": the family has terms of position alone.

        - BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT, GPT-2: first layer only. The logits of an input whose word
          embeddings are zero. Everything else is included: token type 0, the layer norm with its bias and with its
          scale for positions alone, the biases of queries and keys. (``decompose`` uses the scale for the given text
          instead, and counts biases as content.)
        - T5, BLOOM (ALiBi): every layer. The bias b[k]; any repeated word has these logits, up to a constant.
        - MPNet: every layer. The first layer as BERT's, plus the relative bias; deeper layers the relative bias.
        - XLNet, without texts: every layer. r_r_bias . (r R); its other term, q . (r R), depends on content.

    - "texts", with ``texts``: every layer of Llama and all other families with rotations, of DeBERTa and of XLNet.
      Rotations and embedded distances multiply content, so delta is computed for the mean content. With $\bar q$ and
      $\bar k$ the mean query and key before rotation over all tokens of the texts,

      $$\delta_k = s \left(\bar q^\top \rho_k \bar k + \bar q^\top R_k + S_k^\top \bar k\right) + b_k$$

      with the terms that a family has: rotations $\rho$ of RoPE, DeBERTa's c2p ($R$) and p2c ($S$), XLNet's $R$ and
      $b$. With rotations, this is the ``position`` of `decompose` on the same tokens. In SmolLM2-135M, the past
      locality of 270 heads on text has a rank correlation of .89 with the past locality of these logits. For repeated
      words, the correlation is .12.
    - "words", without ``texts``: the same families except XLNet. Delta is the average of the logits of repeated words;
      for DeBERTa it leaves out content against content, which is one number per head. A repeated word has the same
      hidden state at every position of every layer (this is checked), so the logits are exact for that word. But deep
      layers of decoders then hold the state of a first token, which differs from states on text. Prefer texts.

    Logits that depend on distance alone are computed in O(n), at any length, and the model never runs at that length.
    Angles are those of the model's own rotary module in float32. At position 100,000 they are wrong by up to .007
    radians. If angles depend on the length (dynamic NTK, LongRoPE), each text has the angles of its own length, and the
    logits have the angles of ``length``.

    Args:
        model: A transformers model of a known family, with or without a head.
        tokenizer: Its tokenizer, which reads texts and draws whole words.
        texts: Strings or tokenised batches, as for `text_average`, read whole. Equal texts count once. Texts are not
            read if the logits are exact for any text.
        length: Number of positions n, in tokens.
        words: How many words to draw, or the words themselves; without texts.
        seed: Seed of the draw.
        special_tokens: Average over special tokens like any other token.
        without_first: Leave out this many of the first included tokens of each text, as `text_average` does.
        layers: Layers to return, by index; by default all that have these logits.
        batch_size: Texts per forward pass.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        `PositionalLogits` with ``relative`` (layer, head, 2n - 1), or with ``table`` (layer, head, n, n) if there are
        absolute positions. Entries are any real number, in at least float32, on the model's device.

    Raises:
        TypeError: Something that is not a transformers model, or texts that are not a list of texts.
        ValueError: An unknown family, attention that is not a softmax of the logits (an encoding attached, heads
            mixed), a learned prompt (peft), a length beyond its positions, a layer without these logits, texts as
            `text_average` refuses them, content that is not constant over positions for a repeated word (DeBERTa-v2
            with a convolution), or quantised queries and keys.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> llama = LlamaModel(LlamaConfig(vocab_size=9, **size))
        >>> texts = [{"input_ids": [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]}]
        >>> delta = positional_logits(llama, texts=texts, special_tokens=True, length=1000)
        >>> delta
        PositionalLogits(2 layers x 2 heads, n = 1000, mean content of 2 texts, causal)
        >>> delta.relative.shape
        torch.Size([2, 2, 1999])
    """
    model = SequenceModel.of(model)
    if model.positions_of(length) is not None:
        raise ValueError(f"positional_logits need tokens on a line, but {model} has positions; pass the model itself")
    family, base = known_logits(model), model.module
    model.check_length(length)
    modules: list[Any] = family.attention_layers(base)
    absolute = family.absolute(base)
    with model.inference(), loaded(base, [modules[0], *position_parts(base, absolute)]):
        table, biased = absolute is not None, family.relative_bias(base, modules[0], 1) is not None
        terms = (family.rotation, family.relative_keys, family.relative_queries)
        with_content = any(term(base, modules[0], 1) is not None for term in terms)
        if not (table or biased or with_content):
            raise ValueError(f"{model} has no known positional terms in its logits")
        closed = range(1) if table and not biased else range(len(modules))
        chosen = requested_layers(layers, closed, len(modules), "with a closed form")
        method: Method = "exact"
        if with_content and not table:  # XLNet's bias is of no content
            method = "texts" if texts is not None else "exact" if biased else "words"
        ids, names = choose_words(model, tokenizer, words, seed) if method == "words" else ((), ())
        content = None
        if method == "texts":
            batches = TextBatches(model, texts or (), tokenizer, special_tokens, without_first, batch_size, progress)
            content = mean_content(model, batches, chosen)
            forget_longest_input(base.modules())  # the logits have the angles of `length` alone
        elif method == "words":
            batch = torch.tensor(ids, device=model.device)[:, None].expand(-1, _REPEATS)
            every = torch.ones_like(batch, dtype=torch.bool)
            content = mean_content(model, [({"input_ids": batch}, every)], chosen, constant=True)
        bar = tqdm(chosen, desc="position-only logits", unit="layer", delay=3, disable=not progress)
        relative = matrix = None
        by_distance: list[ByDistance] = []
        if table and 0 in chosen:
            matrix = torch.stack([_with_table(model, modules[layer], layer == 0, length) for layer in bar])
        else:
            for layer in bar:
                by_distance += [ByDistance.of(model, modules[layer], length, *by_distance[-1:])]
            relative = torch.stack(list(_logits(by_distance, content, method)))
    caps = tuple(family.cap(modules[layer]) for layer in chosen)
    visible = torch.stack([family.visible_distances(base, modules[layer], length) for layer in chosen]).to(model.device)
    if content is None:
        return PositionalLogits(relative, chosen, visible, method, caps, matrix)
    of_length = max(2, length) if depend_on_length(base) else None
    rotations = _rotations(model, [modules[layer] for layer in chosen], content.queries.shape[-1], of_length)
    of_content = content, names, ids, rotations, tuple(by_distance)
    return PositionalLogits(relative, chosen, visible, method, caps, matrix, *of_content)


def _rotations(
    model: SequenceModel, modules: Sequence[Any], size: int, length: int | None
) -> tuple[RotaryEncoding, ...]:
    """Return the rotation of each layer by several coordinates, with pairs of the dimensions of content (..., size)."""
    if not (getattr(model.config, "rope_parameters", None) or {}).get("mrope_section"):
        return ()
    read = {call.owner: each for call, each in read_rotations(model, length)}
    every = [each for module in modules if (each := read.get(module)) is not None]
    waves = [nn.functional.pad(each.frequencies, (0, 0, 0, size // 2 - len(each.pairs))) for each in every]
    both = zip(waves, every, strict=True)
    return tuple(RotaryEncoding.of_waves(None, each, attention_scaling=rotation.scaling) for each, rotation in both)


def _logits(by_distance: Sequence[ByDistance], content: Content | None, method: Method) -> Iterator[Tensor]:
    """Yield the logits of each layer by distance, (head, 2n - 1)."""
    if content is not None and method == "texts":
        content = content.mean()
    for place, each in enumerate(by_distance):
        if content is not None:
            yield each(content.queries[:, place], content.keys[:, place])
        elif each.bias is not None:
            yield each.bias


def _with_table(model: SequenceModel, module: Any, first: bool, length: int) -> Tensor:
    """Return a layer's logits without content, (head, n, n): for word embeddings of zero, or its relative bias."""
    if not first:
        bias = ByDistance.of(model, module, length).bias
        assert bias is not None
        return toeplitz(bias, length)
    zeros = torch.zeros(1, length, embedding_weight(model.module).shape[1], dtype=model.dtype, device=model.device)
    with loaded(model.module, [module]):
        with captured_inputs(model) as hidden:
            model.run({"inputs_embeds": zeros})
        return logit_terms(model, module, queries_and_keys(model, module, hidden[0])).logits[0].to(model.device)
