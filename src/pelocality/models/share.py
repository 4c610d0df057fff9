"""The share of each head's attention on real text that position alone explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._checks import count
from pelocality._display import DisplayMixin
from pelocality.models._inputs import token_batch
from pelocality.models._observe import observe
from pelocality.models._run import (
    attached_encoding,
    check_length,
    eager_attention,
    find_base,
    label,
    model_name,
)
from pelocality.models._words import special_ids

# error of the softmax of equal logits, in eps: half precision is rounded once, from float32
_ROUNDING = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 8}


@dataclass(frozen=True, eq=False, repr=False)
class PositionShare(DisplayMixin):
    """The share of each head's attention on text that position explains, with the data behind it.

    Attributes:
        share: (layer, head), at most 1. About 0 where position explains nothing (slightly below it by chance), NaN
            for a head that attends uniformly, up to the rounding of the model's precision.
        layers: the model's layer numbers along the first axis; layers without attention are not included.
        prediction: the mean deviation from uniform attention at each pair of positions, (layer, head, n, n) with n the
            longest text, at most ``length``; NaN for pairs in no sentence.
        counts: the number of sentences with each pair of positions, (layer, n, n).
        sentences: number of sequences.
        model: name of the model.
        special_tokens: whether special tokens are included.
        encoding: the encoding that was attached to the model while it ran, None where there was none.
    """

    share: Tensor
    layers: tuple[int, ...]
    prediction: Tensor
    counts: Tensor
    sentences: int
    model: str
    special_tokens: bool
    encoding: str | None

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with one row per layer and head: ``layer``, ``head``, ``share``."""
        index = pd.MultiIndex.from_product([self.layers, range(self.share.shape[1])], names=["layer", "head"])
        return pd.DataFrame({"share": self.share.flatten().tolist()}, index).reset_index()

    def _headline(self) -> str:
        layers, heads = self.share.shape
        special = "special tokens counted" if self.special_tokens else "special tokens left out"
        model = label(self.model, self.encoding)
        return f"{model}: {layers} layers x {heads} heads, {self.sentences} sentences, {special}"

    def _table(self) -> pd.DataFrame:
        return self.to_frame().groupby("layer")["share"].agg(["mean", "min", "max"]).reset_index()


def position_share(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    length: int = 128,
    special_tokens: bool = False,
    progress: bool = True,
) -> PositionShare:
    r"""Return the share of each head's attention on real text that position alone explains.

    The definition is introduced here. For sentence $s$, let $D^s_{ij} = A^s_{ij} - 1/|V^s_i|$ be the deviation of
    attention from uniform over the keys $V^s_i$ that are visible to query $i$. Position predicts it as the mean over
    the *other* sentences with the same pair of positions $(i, j)$. The share is one minus the error of that prediction:

    $$1 - \frac{\sum_{s,i,j} \left(D^s_{ij} - \bar D^{-s}_{ij}\right)^2}{\sum_{s,i,j} \left(D^s_{ij}\right)^2}$$

    A head that attends by position alone has 1, a head that attends by content alone about 0 (with $N$ sentences
    $-1/(N-1)$ on average, as a sentence is never predicted from itself). Heads of a high share are positional, heads of
    a low share contextual; there is no natural threshold.

    The sums need one pass, so memory does not depend on the number of batches. Padding may be on either side: tokens
    are moved to the left before the model runs. Rows are renormalised without padding and special tokens.

    Sentences of different lengths have different numbers of keys at the same pair of positions, so even a purely
    positional head has a share slightly below 1 on them. Texts of one length avoid that.

    Args:
        model: a transformers model that ``positional_attention`` can probe, with or without a head.
        batches: tokenised batches, such as a DataLoader gives: mappings with ``input_ids`` (batch, n),
            ``attention_mask`` where there is padding, ``token_type_ids`` where the model reads them, and
            ``special_tokens_mask``. Rows of a Dataset, with no batch axis, work too. Other entries (labels) are not
            used.
        tokenizer: identifies special tokens where the batches hold no ``special_tokens_mask``.
        length: only the first positions up to this number are measured; the model still reads the whole text.
        special_tokens: include special tokens like any other token.
        progress: show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `PositionShare` with ``share`` (layer, head), at most 1, float64, on the CPU.

    Raises:
        TypeError: for something that is not a transformers model, or batches that are not mappings of token ids.
        ValueError: for a model that cannot be probed, text longer than its positions, special tokens that nothing
            identifies, padding without a mask, or fewer than two sentences.

    Examples:
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> _ = torch.manual_seed(0)
        >>> model = DistilBertModel(DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=8, vocab_size=99))
        >>> text = [{"input_ids": torch.randint(1, 99, (4, 10))} for _ in range(5)]
        >>> position_share(model, text, special_tokens=True).share.shape
        torch.Size([2, 2])
    """
    base = find_base(model)
    count("length", length, least=2)
    if isinstance(batches, Mapping):
        raise TypeError("batches must be an iterable of batches, got one batch; pass [batch]")
    sums: _Sums | None = None
    layers: tuple[int, ...] = ()
    sentences = longest = 0
    with eager_attention(model):
        for batch in tqdm(batches, desc="position share", unit="batch", delay=3, disable=not progress):
            inputs, real, included = _read(batch, base, tokenizer, special_tokens)
            if real.numel() == 0:
                continue
            if real.shape[1] > longest:
                longest = real.shape[1]
                check_length(base, longest)
            observed = observe(base, **inputs)
            if sums is None:
                layers = observed.layers
                sums = _Sums(len(layers), observed.maps[0].shape[1])
            included = included[:, :length]
            m = included.shape[1]
            for layer, (weights, visible) in enumerate(zip(observed.maps, observed.visible, strict=True)):
                sums.add(layer, weights, included[:, :, None] & included[:, None, :] & visible[:, :m, :m].cpu())
            sentences += real.shape[0]
    if sums is None:
        raise ValueError("batches is empty; pass at least two sentences (a generator can be read only once)")
    share, prediction = sums.result()
    return PositionShare(
        share=share,
        layers=layers,
        prediction=prediction,
        counts=sums.counts,
        sentences=sentences,
        model=model_name(model),
        special_tokens=special_tokens,
        encoding=attached_encoding(base),
    )


class _Sums:
    """Sums over sentences of the deviations from uniform attention, for each layer, head and pair of positions."""

    def __init__(self, layers: int, heads: int) -> None:
        self.total = torch.zeros(layers, heads, 0, 0, dtype=torch.float64)
        self.squares = torch.zeros_like(self.total)
        self.rounding = torch.zeros(layers, 1, 0, 0, dtype=torch.float64)
        self.counts = torch.zeros(layers, 0, 0, dtype=torch.int64)

    def _grow(self, length: int) -> None:
        """Pad the sums to this number of positions: the longest text is known only at the end."""
        more = max(0, length - self.counts.shape[-1])
        if more:
            self.total, self.squares, self.rounding, self.counts = (
                nn.functional.pad(sums, (0, more, 0, more))
                for sums in (self.total, self.squares, self.rounding, self.counts)
            )

    def add(self, layer: int, weights: Tensor, pairs: Tensor) -> None:
        """Add the attention (batch, head, n, n) of a batch over the included pairs (batch, m, m), m <= n."""
        m = pairs.shape[-1]
        self._grow(m)
        # on the CPU, as not every accelerator has float64
        included = weights[..., :m, :m].cpu().double() * pairs[:, None]  # (batch, head, m, m)
        mass = included.sum(-1, keepdim=True)
        keys = pairs.sum(-1, keepdim=True)[:, None].double()  # (batch, 1, m, 1)
        # a row without weight on included keys (it underflowed) has deviation 0
        deviation = torch.where(pairs[:, None] & (mass > 0), included / mass - 1 / keys, 0.0)
        self.total[layer, :, :m, :m] += deviation.sum(0)
        self.squares[layer, :, :m, :m] += deviation.square().sum(0)
        rounding = _ROUNDING[weights.dtype] * torch.finfo(weights.dtype).eps * pairs[:, None] / keys.clamp(min=1)
        self.rounding[layer, :, :m, :m] += rounding.square().sum(0)
        self.counts[layer, :m, :m] += pairs.sum(0)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the share (layer, head) and the mean deviation (layer, head, length, length)."""
        counts = self.counts[:, None].double()
        enough = counts >= 2  # a pair in one sentence only cannot be predicted from others
        if not bool(enough.any()):
            raise ValueError("no pair of positions is in two sentences; pass more text")
        # the distance to the mean of the others is N / (N - 1) times the distance to the mean of all
        error = (self.squares - self.total.square() / counts) * (counts / (counts - 1)).square()
        error = torch.where(enough, error, 0.0).sum((-2, -1))
        squares, rounding = (torch.where(enough, sums, 0.0).sum((-2, -1)) for sums in (self.squares, self.rounding))
        share = torch.where(squares > rounding, 1 - error / squares, torch.nan)
        return share, self.total / counts


def _read(
    batch: Mapping[str, Any], base: Any, tokenizer: Any, special_tokens: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return a batch's inputs, which tokens are not padding and which to include: (batch, n), padding on the right."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise TypeError(
            f"batches must hold mappings with input_ids, got {type(batch).__name__}; run the tokenizer first"
        )
    if len(batch["input_ids"]) == 0:
        return {}, torch.ones(0, 0, dtype=torch.bool), torch.ones(0, 0, dtype=torch.bool)
    others = ("attention_mask", "token_type_ids", "special_tokens_mask")
    given, real = token_batch(base, batch["input_ids"], **{name: batch.get(name) for name in others})
    ids = given["input_ids"]
    padding = getattr(base.config, "pad_token_id", None)
    if "attention_mask" not in given and padding is not None and bool((ids == padding).any()):
        raise ValueError(f"input_ids holds the padding id {padding} but there is no attention_mask; pass it along")
    if bool(((real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] > 1).any()):  # more than one run of tokens
        raise ValueError("attention_mask has holes; padding must be before or after a text, not inside it")
    special = given.pop("special_tokens_mask", None)
    if special_tokens:
        special = torch.zeros_like(ids)
    elif special is None:
        if tokenizer is None:
            raise ValueError(
                "special tokens cannot be identified; pass tokenizer=, tokenise with return_special_tokens_mask=True, "
                "or include them with special_tokens=True"
            )
        special = torch.isin(ids, torch.tensor(sorted(special_ids(base, tokenizer))).to(ids))
    order = (~real).long().argsort(dim=1, stable=True)  # real tokens first, in their order
    inputs = {name: tensor.gather(1, order) for name, tensor in {**given, "attention_mask": real.long()}.items()}
    return inputs, inputs["attention_mask"].bool(), (real & ~special.bool()).gather(1, order).cpu()
