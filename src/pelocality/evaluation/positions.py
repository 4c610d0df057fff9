"""The loss of a decoder at each position of long texts."""

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._batches import batches_of_equal_length
from pelocality._checks import check_several, check_tokenizer, count, on_float64_device
from pelocality._display import DisplayMixin
from pelocality._distributed import failing_together, part_of_process, summed, undivided_if_sharded, without_ddp
from pelocality.evaluation._callables import name_of
from pelocality.evaluation.likelihood import check_causal, logits_of, refuse_two_texts
from pelocality.models.sequence_model import SequenceModel
from pelocality.statistics import mean_over_runs

_ROWS = 64  # positions whose logits are in float64 at a time


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LossByPosition(DisplayMixin):
    """The loss of a decoder at each position of texts.

    To compare two models that read the same texts, use ``dataclasses.replace(one, losses=one.losses - other.losses)``.
    Its intervals are those of paired differences.

    Attributes:
        losses: (texts, positions), float64, in nats. Column p has the loss of the token at position p + 1, which the
            model predicts from the p + 1 tokens before it; NaN beyond the end of a text.
        model: Name of the model, and what was attached to it.
        cut: Number of texts that were cut to the longest length.
    """

    losses: Tensor
    model: str
    cut: int

    def to_frame(self, per_doubling: int | None = 2, confidence: float = 0.95) -> pd.DataFrame:
        """Return the mean loss over texts by position, with Student's t interval over texts.

        Args:
            per_doubling: Number of rows for each doubling of the position; None for one row for each position.
            confidence: Coverage of the intervals, in (0, 1).

        Returns:
            One row for each range of positions: its ``first`` and ``last`` position, counted from 0 (the first token
            has no loss); the number of ``texts`` that reach the last position, and only these count in this row; and
            ``loss``, ``low``, ``high``. The interval of a single text is NaN.

        Raises:
            TypeError: ``per_doubling`` is not an integer, or the confidence not a number.
            ValueError: ``per_doubling`` below 1, or a confidence outside (0, 1).
        """
        longest = self.losses.shape[1]
        firsts = list(range(1, longest + 1))
        if per_doubling is not None:
            steps = range(count("per_doubling", per_doubling) * longest.bit_length())
            starts = (round(2 ** (step / per_doubling)) for step in steps)
            firsts = sorted({start for start in starts if start <= longest})
        rows = []
        for first, after in zip(firsts, [*firsts[1:], longest + 1], strict=True):
            values = self.losses[:, first - 1 : after - 1]
            means = values[~values[:, -1].isnan()].mean(1)
            loss = mean_over_runs(means, confidence).columns("loss", ends="")
            rows.append({"first": first, "last": after - 1, "texts": len(means)} | loss)
        return pd.DataFrame(rows, columns=["first", "last", "texts", "loss", "low", "high"])

    def _headline(self) -> str:
        cut = f", {self.cut} of them cut" if self.cut else ""
        return f"{self.model}: {len(self.losses)} texts of up to {self.losses.shape[1] + 1} tokens{cut}, in nats"

    def _table(self) -> pd.DataFrame:
        return self.to_frame(per_doubling=1)


@undivided_if_sharded
def loss_by_position(
    model: nn.Module,
    texts: Iterable[Any],
    tokenizer: Any = None,
    *,
    length: int | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> LossByPosition:
    r"""Return the loss of a decoder at each position of texts, to see whether it uses distant tokens.

    $$\ell_t = -\log P(w_t \mid w_0 \dots w_{t-1}), \qquad t = 1 \dots n - 1$$

    If a model uses its whole input, its loss falls with the position. If a model was trained on shorter inputs, its
    loss rises after the length of these inputs. The beginning of an article is another kind of text than its middle, so
    compare models on the same texts.

    If ``torch.distributed`` is initialised, each process reads a part of the texts, and all return the result.

    Args:
        model: A transformers model with a causal-language-modelling head.
        texts: Strings, or tokenised batches with ``input_ids`` (and ``attention_mask`` if there is padding).
        tokenizer: The model's tokenizer; strings need it. Texts begin with the special tokens that it adds, once if a
            text begins with one too. Special tokens that it adds at the end are left out.
        length: Texts are cut to this number of tokens. None: the number that the model's configuration declares, if
            any. A greater number is accepted if the model can compute it, with a logged warning.
        batch_size: Texts of one length per forward pass.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        A `LossByPosition`.

    Raises:
        TypeError: A model that is not from transformers, one text instead of several, or texts of another kind.
        ValueError: A model that sees later tokens (a masked model) or does not predict tokens, strings without a
            tokenizer, no text of two tokens, or a length that the model has no positions for.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
        >>> result = loss_by_position(model, [{"input_ids": torch.arange(1, 41).view(2, 20)}])
        >>> result.losses.shape
        torch.Size([2, 19])
        >>> result.to_frame(per_doubling=1)[["first", "last", "texts"]].values.tolist()
        [[1, 1, 2], [2, 3, 2], [4, 7, 2], [8, 15, 2], [16, 19, 2]]
    """
    refuse_two_texts(model)
    count("batch_size", batch_size)
    if length is not None:
        count("length", length, least=2)
    subject = SequenceModel.of(without_ddp(model))
    rows = list(_rows_of_ids(texts, tokenizer))
    most = length or subject.longest or getattr(subject.config, "max_position_embeddings", None)
    cut = sum(len(ids) > most for ids in rows) if most else 0
    rows = [ids[:most] for ids in rows]
    lengths = [len(ids) for ids in rows]
    if max(lengths, default=0) < 2:
        raise ValueError("texts must hold a text of at least two tokens; the first token of a text has no loss")
    subject.check_length(max(lengths))
    losses = torch.zeros(len(rows), max(lengths) - 1, dtype=torch.float64)
    part = part_of_process(list(batches_of_equal_length(lengths, batch_size)))
    bar = tqdm(total=sum(map(len, part)), desc="loss by position", unit="text", delay=3, disable=not progress)
    with failing_together() as must_agree, bar, subject.inference():
        must_agree += [zlib.crc32(str(ids).encode()) for ids in rows]
        check_causal(subject, tokenizer, next(ids for ids in rows if len(ids) > 1)[:8])
        for chosen in part:
            if lengths[chosen[0]] > 1:
                batch = [rows[index] for index in chosen]
                of_batch = _losses_of(logits_of(subject, tokenizer, batch), batch)
                if bool(of_batch.isnan().any()):
                    raise ValueError(f"model gives NaN for text {chosen[int(of_batch.isnan().any(1).int().argmax())]}")
                losses[chosen, : len(batch[0]) - 1] = of_batch
            bar.update(len(chosen))
    losses = summed(losses)
    losses[torch.arange(1, max(lengths)) >= torch.tensor(lengths)[:, None]] = torch.nan
    return LossByPosition(losses, name_of(model), cut)


def _losses_of(logits: Tensor, ids: list[list[int]]) -> Tensor:
    """Return the loss of each token but the first, (batch, n - 1), of logits (batch, n, vocabulary)."""
    targets, parts = torch.tensor(ids)[:, 1:, None], []  # (batch, n - 1, 1)
    for start in range(0, targets.shape[1], _ROWS):
        following = targets[:, start : start + _ROWS]
        scores = on_float64_device(logits[:, start : start + following.shape[1]]).double()
        right = scores.gather(-1, following.to(scores.device)).squeeze(-1)
        parts.append((scores.logsumexp(-1) - right).cpu())
    return torch.cat(parts, 1)


def _rows_of_ids(texts: Any, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each text, without padding."""
    check_several("texts", texts)
    for text in texts:
        if isinstance(text, str):
            check_tokenizer(tokenizer)
            encoded = tokenizer(text, truncation=False, verbose=False, return_special_tokens_mask=True)
            ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
            while len(ids) > 1 and special[-1]:
                ids, special = ids[:-1], special[:-1]
            yield ids[int(ids[:1] == ids[1:2] and special[:2] == [1, 0]) :]  # a text may begin with this token too
        else:
            yield from _rows_of_batch(text)


def _rows_of_batch(batch: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the token ids of each row of a tokenised batch, or of one row without a batch axis, without padding."""
    rows, masks = batch["input_ids"], batch.get("attention_mask")
    if len(rows) and np.ndim(rows[0]) == 0:
        rows, masks = [rows], [masks]
    for row, real in zip(rows, [None] * len(rows) if masks is None else masks, strict=True):
        ids = torch.as_tensor(row)
        yield (ids if real is None else ids[torch.as_tensor(real).bool()]).tolist()
