"""The share of each head's attention on real text that position alone explains."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from torch import Tensor, nn

from pelocality._display import DisplayMixin
from pelocality.models.measuring.provenance import Provenance, other_layers_note, over_texts, provenance, share_notes
from pelocality.models.measuring.text import text_sums
from pelocality.models.sequence_model import SequenceModel, label


@dataclass(frozen=True, eq=False, repr=False)
class PositionShare(DisplayMixin):
    """The share of each head's attention on text that position explains, with the data behind it.

    Attributes:
        share: (layer, head), at most 1. About 0 where position explains nothing, by chance below it, with three texts
            down to -0.5; NaN for a head that attends uniformly, up to the rounding of the model's precision.
        layers: The model's layer numbers along the first axis; layers without attention are not included.
        prediction: The mean deviation from uniform attention at each pair of positions, (layer, head, n, n) with n the
            longest text, at most ``length``; NaN for pairs in no text.
        counts: The number of different texts with each pair of positions, (layer, n, n).
        source: The `Provenance`.
        other_layers: What the model's layers without attention are, by number.
    """

    share: Tensor
    layers: tuple[int, ...]
    prediction: Tensor
    counts: Tensor
    source: Provenance
    other_layers: Mapping[int, str] = field(default_factory=dict)

    def to_frame(self) -> pd.DataFrame:
        """Return the share of every head as a table.

        Returns:
            A DataFrame with one row per layer and head: ``layer``, ``head`` and ``share``, at most 1.

        Examples:
            >>> import torch
            >>> from transformers import GPT2Config, GPT2Model
            >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=99))
            >>> text = [{"input_ids": torch.randint(99, (4, 10))}]
            >>> position_share(model, text, special_tokens=True).to_frame()[["layer", "head"]].to_numpy().tolist()
            [[0, 0], [0, 1], [1, 0], [1, 1]]
        """
        index = pd.MultiIndex.from_product([self.layers, range(self.share.shape[1])], names=["layer", "head"])
        return pd.DataFrame({"share": self.share.flatten().tolist()}, index).reset_index()

    def _headline(self) -> str:
        layers, heads = self.share.shape
        model = label(self.source.model, self.source.encoding)
        return f"{model}: {layers} layers x {heads} heads, {over_texts(self.source)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading the share, one sentence each; usually empty."""
        first = int((self.counts.diagonal(dim1=-2, dim2=-1)[0] > 0).long().argmax())
        sink = self.prediction[..., first + 1 :, first].nan_to_num().mean(-1)
        return (*other_layers_note(self.other_layers), *share_notes(self.source, self.layers, sink))

    def _table(self) -> pd.DataFrame:
        return self.to_frame().groupby("layer")["share"].agg(["mean", "min", "max"]).reset_index()


def position_share(
    model: nn.Module | SequenceModel,
    texts: Iterable[Any],
    *,
    tokenizer: Any = None,
    length: int = 128,
    special_tokens: bool = False,
    without_first: int = 0,
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> PositionShare:
    r"""Return the share of each head's attention on real text that position alone explains.

    The definition is introduced here. For text $s$, let $D^s_{ij} = A^s_{ij} - 1/|V^s_i|$ be the deviation of
    attention from uniform over the keys $V^s_i$ that are visible to query $i$. Position predicts it as the mean over
    the *other* texts with the same pair of positions $(i, j)$. The share is one minus the error of that prediction:

    $$1 - \frac{\sum_{s,i,j} \left(D^s_{ij} - \bar D^{-s}_{ij}\right)^2}{\sum_{s,i,j} \left(D^s_{ij}\right)^2}$$

    A head that attends by position alone has 1, a head that attends by content alone about 0 (with $N$ texts
    $-1/(N-1)$ on average, as a text is never predicted from itself). Heads of a high share are positional, heads of
    a low share contextual; there is no natural threshold.

    The sums need one pass, so memory does not depend on the number of batches. Padding may be on either side: tokens
    are moved to the left before the model runs. Rows are renormalised without padding and special tokens.

    Texts of different lengths have different numbers of keys at the same pair of positions, so even a purely
    positional head has a share slightly below 1 on them. Texts of one length avoid that.

    Where ``torch.distributed`` is initialised, every process is given the same texts, measures a part of them, and
    returns the result.

    Args:
        model: A transformers model that ``positional_attention`` can probe, with or without a head.
        texts: Strings; or tokenised batches, such as a DataLoader gives: mappings with ``input_ids`` (batch, n),
            ``attention_mask`` where there is padding, and ``special_tokens_mask``. Rows of a Dataset, with no batch
            axis, work too. Other entries are given to the model if it reads them (``token_type_ids``,
            ``position_ids``, XLM's ``langs``), and not used otherwise (labels). Texts are read once, one batch at a
            time, and may be a generator. Equal texts count once.
        tokenizer: Reads strings, special tokens included, and identifies special tokens; not needed for batches with a
            ``special_tokens_mask``.
        length: Only the first positions up to this number are measured, with rows renormalised over them; the model
            still reads the whole text.
        special_tokens: Include special tokens like any other token.
        without_first: Leave out this many of the included tokens of each text, from its first on: 1 for an attention
            sink, which would count as position.
        layers: Layers to return, by their index in the model; by default all that have attention.
        batch_size: Strings per forward pass, padded to the longest of them; 1 for models that mix neighbours and so see
            the padding (ConvBERT). Batches are run as they are; but where rotations depend on the longest text of a
            batch (dynamic NTK, LongRoPE), texts of other lengths are run one after the other.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `PositionShare` with ``share`` (layer, head), at most 1, float64, on the CPU.

    Raises:
        TypeError: Something that is not a transformers model, one text instead of several, strings beside batches, or
            batches that are not mappings of token ids.
        ValueError: A model that cannot be probed, text longer than its positions, a string without tokens, strings
            without a tokenizer, special tokens that nothing identifies, padding without a mask, ``position_ids`` that
            start again within a row (packed texts), an entry that the model reads and that is not an integer per
            token, unknown layers, or fewer than two different texts.
        RuntimeError: Another process failed.

    Examples:
        >>> import torch
        >>> from transformers import DistilBertConfig, DistilBertModel
        >>> _ = torch.manual_seed(0)
        >>> model = DistilBertModel(DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=8, vocab_size=99))
        >>> text = [{"input_ids": torch.randint(1, 99, (4, 10))} for _ in range(5)]
        >>> position_share(model, text, special_tokens=True).share.shape
        torch.Size([2, 2])
    """
    model = SequenceModel.of(model)
    sums = text_sums(
        model,
        texts,
        layers,
        tokenizer=tokenizer,
        length=length,
        special_tokens=special_tokens,
        without_first=without_first,
        batch_size=batch_size,
        progress=progress,
    )
    if not bool((sums.counts >= 2).any()):
        equal = f" ({sums.repeated} are equal to another one and do not count)" if sums.repeated else ""
        raise ValueError(f"no pair of positions is in two texts{equal}; pass more text")
    return PositionShare(
        share=sums.share(),
        layers=sums.layers,
        prediction=sums.total / sums.counts[:, None],
        counts=sums.counts,
        source=provenance(
            model, sums.counts > 0, special_tokens=special_tokens, texts=sums.texts, repeated=sums.repeated
        ),
        other_layers=sums.other_layers,
    )
