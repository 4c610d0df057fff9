"""What the order of words does to a model, by intervention: two neighbours change places, or others replace them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from tqdm import tqdm

from pelocality._checks import check_choice, count, flag, on_float64_device
from pelocality._display import DisplayMixin
from pelocality.metrics._tolerance import HALF
from pelocality.models._inference import inference
from pelocality.models._restore import hooked
from pelocality.models.function import AttentionFunction
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.layers import layer_numbers
from pelocality.models.measuring.influence import hidden_states, layers_and_run, single_texts, with_states
from pelocality.models.sequence_model import SequenceModel, equal_but_for_rounding, largest_difference
from pelocality.models.token_proof import with_another
from pelocality.statistics import mean_over_runs

_LEAK = 0.01  # of a movement by exchanged position ids, from which there is another position term beside these
_COLUMNS = ("share", "locality", "content_locality", "balance")


@dataclass(frozen=True, eq=False, repr=False)
class OrderUse(DisplayMixin):
    """How far the tokens of texts move if two neighbouring words change places, and if others replace them.

    Attributes:
        exchanged: The mean movement by exchange, (text, layer, side, distance), float64. Side 0 are tokens that have
            the pair on their left, side 1 those that have it on their right; distance 1 comes first. NaN where a text
            has no such pair. Of layers in units of the variance of their states over the text, of the output in nats.
        replaced: The same of the same pairs, where two words of another text replace them.
        layers: The numbers of the layers in the model, and "output" for the distribution of the next word.
        change: What was exchanged: "words", "ids" of positions, or "tokens" where nothing says which are one word.
        direct: Whether each layer read the unchanged states of all tokens but the pair.
        model: The name of the model, with the encoding that was attached.
    """

    exchanged: Tensor
    replaced: Tensor
    layers: tuple[int | str, ...]
    change: str
    direct: bool
    model: str

    @property
    def share(self) -> Tensor:
        """The movement by exchange over that by replacement, sums over distances, (text, layer): 0 without order."""
        return self.exchanged.nansum((-2, -1)) / self.replaced.nansum((-2, -1))

    @property
    def locality(self) -> Tensor:
        """How near the exchanged pairs are that move a token, (text, layer): 1 if all of them are next to it."""
        return _locality(self.exchanged)

    @property
    def content_locality(self) -> Tensor:
        """The same of replaced pairs: what a layer reads of near tokens, whatever their order."""
        return _locality(self.replaced)

    @property
    def balance(self) -> Tensor:
        """The movement by pairs on the right less that by pairs on the left, over both, (text, layer), -1 to 1."""
        left, right = self.exchanged.nansum(-1).unbind(-1)
        return (right - left) / (left + right)

    def to_frame(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return the numbers of each layer as a table, means over texts with Student's t interval.

        Args:
            confidence: Coverage of the intervals.

        Returns:
            A row for each layer: the share of content, the locality beside that of replacement, and the balance, each
            with its interval in columns such as ``share_low`` and ``share_high``.
        """
        values = {name: getattr(self, name) for name in _COLUMNS}
        return pd.DataFrame(
            {"layer": layer} | _means({name: each[:, place] for name, each in values.items()}, confidence)
            for place, layer in enumerate(self.layers)
        )

    def profile(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return the mean movement over texts by layer and signed distance, below 0 for pairs on the left.

        Args:
            confidence: Coverage of the intervals, Student's t over texts.

        Returns:
            A row for each layer and distance: ``exchanged`` and ``replaced``, each with its interval.
        """
        rows, reach = [], self.exchanged.shape[-1]
        for place, layer in enumerate(self.layers):
            for distance in (*range(-reach, 0), *range(1, reach + 1)):
                at = slice(None), place, int(distance > 0), abs(distance) - 1
                moves = {"exchanged": self.exchanged[at], "replaced": self.replaced[at]}
                rows.append({"layer": layer, "distance": distance} | _means(moves, confidence))
        return pd.DataFrame(rows)

    def _headline(self) -> str:
        read = "read directly by each layer" if self.direct else "through all layers"
        return f"{self.model}: exchange of {self.change} in {len(self.exchanged)} texts, {read}"

    def _table(self) -> pd.DataFrame:
        return self.to_frame()[["layer", "share", "share_low", "share_high", *_COLUMNS[1:]]]


def order_use(
    model: nn.Module | SequenceModel,
    texts: Iterable[Any],
    tokenizer: Any = None,
    *,
    change: Literal["words", "ids"] = "words",
    direct: bool = False,
    output: bool = False,
    reach: int = 16,
    every: int = 1,
    special_tokens: bool = False,
    without_first: int | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> OrderUse:
    r"""Return how far tokens move if two neighbouring words change places, against others that replace the two.

    $$D^l(d) = \operatorname{mean}_{i, p} \frac{\lVert h^l_i(p) - h^l_i \rVert^2}
                                             {\operatorname{mean}_k \lVert h^l_k - \bar h^l \rVert^2}, \qquad
      \mathrm{share}^l = \frac{\sum_d D^l_\text{exchanged}(d)}{\sum_d D^l_\text{replaced}(d)}$$

    with $h^l_i$ the hidden state of token $i$ behind layer $l$, $h^l_i(p)$ the same after the two words of pair $p$
    changed places, or after two words of another text with as many tokens replaced them, and $d$ the signed distance
    from $i$ to the nearer end of the pair. Tokens of the pair do not count. The definition is introduced here.

    The **share of content** is the number to report: 0 for a model that knows no order, exactly; 1 where the order of
    two words matters as much as which words these are. The locality of exchange says little alone, as it mostly repeats
    how near a layer reads at all: it stands beside that of replacement.

    **Direct reading.** What moves behind a layer was read there, or came through tokens that had moved before. With
    ``direct=True``, every layer reads the unchanged states of all tokens but the pair, so that its row shows what this
    layer itself reads of order. In one attention layer that is the squared step of attention from key to key, which
    ``step_profile`` and ``step_balance`` measure without an intervention.

    **Position ids.** In an encoder, exchanged position ids move all other tokens as exchanged words do. In a decoder
    they show what the positions tell of order, and words what positions and the causal mask tell together.

    Args:
        model: A transformers model, or any module as for ``influence``, of token ids.
        texts: As for ``text_average``, two or more. Words are those of a fast tokenizer, which reads strings, or whose
            batches are given; other batches may hold ``word_ids`` (batch, n), the number of each token's word and -1
            for special tokens. Without these each token is a word, and ``change`` of the result is "tokens".
        tokenizer: As for ``text_average``.
        change: "words" exchanges the tokens of two words; "ids" leaves them, and exchanges their position ids.
        direct: Whether each layer reads the unchanged states of all tokens but the pair.
        output: Also measure what the head of the model gives each token: in a decoder the distribution of the next
            word, KL(before || after) in nats. If direct, it shows what the last layer reads.
        reach: The largest distance that counts.
        every: Change every k-th pair of each text only, at a k-th of the cost.
        special_tokens: Include special tokens like any other token; each is a word.
        without_first: Leave out this many of the included tokens of each text. None: 1 in a model in which no token
            moves an earlier one, as its first token is often a sink, with a state far from all others; otherwise 0.
        batch_size: Changed texts per forward pass, all of one length.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        An `OrderUse`. A text with p pairs costs 2 p + 1 passes of its tokens.

    Raises:
        TypeError: As for ``text_average``, or an `AttentionFunction`, which has no hidden states.
        ValueError: As for ``text_average``, a model that reads no token ids or fails, fewer than two texts with
            neighbouring words, or ``output`` of a model without a head; with "ids" a model that counts positions from
            another number (give ``position_ids``), or has positions beside its position ids, such as an attached bias
            that counts rows. That is proved: words and position ids are exchanged together, which may move nothing.
            Half precision is refused with "ids", as its rounding would hide such positions.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> from pelocality import NoEncoding, attach
        >>> _ = torch.manual_seed(0)
        >>> bert = BertModel(BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
        >>> bert = bert.double()
        >>> texts = [{"input_ids": torch.randint(1, 99, (4, 12))}]
        >>> result = order_use(bert, texts, special_tokens=True)
        >>> result.share.shape, bool((result.share > 0).all())
        (torch.Size([4, 2]), True)
        >>> with attach(bert, NoEncoding()):
        ...     bool((order_use(bert, texts, special_tokens=True).share < 1e-12).all())
        True
    """
    model = SequenceModel.of(model)
    check_choice("change", change, ("words", "ids"))
    flag("direct", direct)
    flag("output", output)
    count("reach", reach)
    count("every", every)
    count("without_first", without_first or 0, least=0)
    if isinstance(model, AttentionFunction) or model.content is not None:
        raise TypeError(f"model must be a module that reads token ids and has hidden states, got {model}")
    batches = TextBatches(model, texts, tokenizer, special_tokens, 0, batch_size, progress=False, words=True)
    read: Any = (zip(single_texts(each), included, strict=True) for each, included in batches)  # type: ignore[arg-type]
    rows = [(inputs, included) for batch in read for inputs, included in batch if inputs["input_ids"].shape[1] > 2]
    words = [inputs.pop("word_ids", None) for inputs, _ in rows]
    if not rows:
        raise ValueError("texts hold no text of three tokens; pass some text (a generator can be read only once)")
    one = rows[0][0]
    with model.explaining(one), inference(model.given):
        blocks, *_, axes, _ = layers_and_run(model, one)
    modules = [model.module if block is None else block[0][block[1]] for block in blocks]
    run = partial(_run, model, list(zip(modules, axes, strict=True)))
    if without_first is None:
        before, after = (run(each)[1][-1][:, :-1] for each in (one, with_another(one, -1)))
        # A causal mask leaves earlier tokens as they are, but for the order of sums in mixtures of experts.
        without_first = int(largest_difference(after, before) <= max(torch.finfo(before.dtype).eps / 8, 1e-6))
    if change == "ids":
        _check_position_ids(run, one, model)
        rows = [(_with_position_ids(inputs), included) for inputs, included in rows]
    alone = [_text_of(*row, of_words, without_first) for row, of_words in zip(rows, words, strict=True)]
    moved = []
    for number, text in enumerate(tqdm(alone, desc="order use", unit="text", delay=3, disable=not progress)):
        others = [_replacement(alone, number, place) for place in range(len(text.pairs))]
        pairs = [pair for pair in zip(text.pairs, others, strict=True) if pair[1] is not None][::every]
        if pairs:
            moved.append(_moves(partial(run, output=output), text, pairs, change == "ids", direct, reach, batch_size))
    if not moved:
        raise ValueError("texts hold no two texts with neighbouring words of as many tokens; pass more or longer texts")
    exchanged, replaced = torch.stack(moved).unbind(1)
    if not bool((replaced.nansum((0, 2, 3)) > 0).all()):
        raise ValueError(
            f"no word moves another in some layer of {model}: texts are too short, or layers mix no tokens"
        )
    what = "tokens" if change == "words" and any(each is None for each in words) else change
    layers: tuple[int | str, ...] = (*layer_numbers(model.config, list(blocks))[0], *["output"] * output)
    return OrderUse(exchanged, replaced, layers, what, direct, model.label)


class _Text(NamedTuple):
    """A text alone, without padding.

    Attributes:
        inputs: The inputs of its call, (1, n, ...) each.
        included: Which of its tokens count, (n,).
        pairs: Where two neighbouring words begin, meet and end.
    """

    inputs: dict[str, Tensor]
    included: Tensor
    pairs: list[tuple[int, int, int]]


def _text_of(inputs: dict[str, Tensor], included: Tensor, words: Tensor | None, first: int) -> _Text:
    """Return a text with its pairs, without some first of its included tokens, from the number of each token's word."""
    n = inputs["input_ids"].shape[1]
    included = included[:n] & (included[:n].cumsum(0) > first)
    of_word = range(n) if words is None else words[0].tolist()
    starts = [i for i in range(n) if i == 0 or of_word[i] < 0 or of_word[i] != of_word[i - 1]] + [n]
    pairs = [pair for pair in zip(starts, starts[1:], starts[2:], strict=False) if included[pair[0] : pair[2]].all()]
    return _Text(inputs, included, pairs)


def _with_position_ids(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of a text with position ids, which count from 0 where there are none."""
    ids = inputs["input_ids"]
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None], **inputs}


def _replacement(texts: list[_Text], number: int, place: int) -> Tensor | None:
    """Return two words of another text, not the same ones, with as many tokens as a pair; None if there are none.

    The search begins at the place of the pair in the next text.
    """
    ids, (start, _, stop) = texts[number].inputs["input_ids"][0], texts[number].pairs[place]
    others = texts[number + 1 :] + texts[:number]
    spans = ((other, span) for other in others for span in other.pairs[place:] + other.pairs[:place])
    words = (other.inputs["input_ids"][0, s:e] for other, (s, _, e) in spans if e - s == stop - start)
    return next((each for each in words if not torch.equal(each, ids[start:stop])), None)


def _run(
    model: SequenceModel, calls: list[tuple[nn.Module, int]], inputs: Any, put: Any = None, output: bool = False
) -> tuple[list[Any], list[Any], Any]:
    """Return what each layer reads and returns, (batch, n, ...), and the log-probabilities of an output or None.

    Args:
        model: The model.
        calls: The layers in the order in which they run, each with its axis of tokens.
        inputs: The inputs of a call.
        put: From the place of a layer among them and what it would read to what it reads instead.
        output: Whether the head runs too.
    """
    reads, states = list[Any](), list[Any]()

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        read, axis = hidden_states((args, kwargs)), calls[len(reads)][1]
        reads.append(None if read is None else read.movedim(axis, 1))
        if read is not None and put is not None:
            return with_states(args, kwargs, read, put(len(reads) - 1, reads[-1]).movedim(1, axis))
        return None

    def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        states.append(hidden_states(result).movedim(calls[len(states)][1], 1))  # type: ignore[union-attr]

    hooks = hooked([module for module, _ in calls], before, after, last=True)
    with model.explaining(inputs), inference(model.given), hooks:
        if output:
            logits = getattr(model.with_head(**inputs, use_cache=False), "logits", None)
            if not isinstance(logits, Tensor) or logits.shape[:2] != inputs["input_ids"].shape:
                raise ValueError("output=True needs a head that scores the words at each token")
            return reads, states, on_float64_device(logits).double().log_softmax(-1)  # small differences count
        model.run(inputs)
    return reads, states, None


def _check_position_ids(run: Callable[..., Any], inputs: dict[str, Tensor], model: SequenceModel) -> None:
    """Refuse a model that has positions beside its position ids, which would seem to tell little of order.

    Where two tokens change places with their words, positions and states, no layer may move a token beside them.
    """
    placed, n = _with_position_ids(inputs), inputs["input_ids"].shape[1]
    reads, states, _ = run(placed)
    if states[-1].dtype in HALF:
        reason = f"{model} computes in {states[-1].dtype}, whose rounding hides other positions"
        raise ValueError(f"{reason}; pass model.float(), or change='words'")
    if not equal_but_for_rounding(run(inputs)[1][-1], states[-1]):
        raise ValueError(f"{model} does not count positions from 0; give position_ids=, or pass change='words'")
    first = (n - 2) // 2
    order = [*range(first), first + 1, first, *range(first + 2, n)]
    exchanged = {name: each[:, order] for name, each in placed.items()}
    embedded, together, _ = run(exchanged, lambda layer, _: reads[layer][:, order])
    by_ids = run(placed | {"position_ids": exchanged["position_ids"]}, lambda layer, _: reads[layer])[1]
    beside = [place for place in (first - 1, first + 2) if 0 <= place < n]
    leaks = [embedded[0] is not None and not equal_but_for_rounding(embedded[0], reads[0][:, order])]
    for of_layer in zip(together, by_ids, states, strict=True):
        *moved, state = (each[:, beside] for each in of_layer)
        leak, most = (largest_difference(each, state) for each in moved)
        leaks.append(leak > max(_LEAK * most, _rounding(state)))
    if any(leaks):
        raise ValueError(f"{model} has positions beside its position_ids; pass change='words'")


def _rounding(states: Tensor) -> float:
    """Return a relative difference of hidden states that is rounding: a softmax may be float32 in any model."""
    return 16 * max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)


def _moves(
    run: Callable[..., Any], text: _Text, pairs: list[Any], by_ids: bool, direct: bool, reach: int, batch_size: int
) -> Tensor:
    """Return the mean movement by exchange and by replacement, (2, layer, side, distance)."""
    inputs, n = text.inputs, len(text.included)
    reads, states, scores = run(inputs)
    counted = [each[0, text.included.to(each.device)].flatten(1).float() for each in states]
    variances = [(each - each.mean(0)).square().sum(-1).mean() for each in counted]
    token = torch.arange(n, device="cpu")
    start, stop = torch.tensor([(start, stop) for (start, _, stop), _ in pairs], device="cpu").T[..., None]
    distance = torch.where(token < start, start - token, token - stop + 1)  # (pair, n), below 1 within the pair
    column = distance - 1 + reach * (token < start)
    column[(distance < 1) | (distance > reach) | ~text.included] = 2 * reach  # of tokens that do not count

    changed = "position_ids" if by_ids else "input_ids"
    exchanged, replaced = (inputs[name].repeat(len(pairs), 1) for name in (changed, "input_ids"))
    for row, ((s, m, e), other) in enumerate(pairs):
        exchanged[row, s:e] = exchanged[row, s:e].roll(m - s if by_ids else s - m)
        replaced[row, s:e] = other
    profiles = []
    for name, rows in ((changed, exchanged), ("input_ids", replaced)):
        sums = torch.zeros(len(states) + (scores is not None), 2 * reach + 1, dtype=torch.float64, device="cpu")
        for part in torch.arange(len(pairs), device="cpu").split(batch_size):  # type: ignore[no-untyped-call]
            batch = {key: each.expand(len(part), *each.shape[1:]) for key, each in inputs.items()}
            put = partial(_frozen, reads, (distance[part] < 1).to(rows.device)) if direct else None
            _, after, new_scores = run(batch | {name: rows[part]}, put)
            moved = [(a - b).flatten(2).float().square().sum(-1) for a, b in zip(after, states, strict=True)]
            moved = [each / variance for each, variance in zip(moved, variances, strict=True)]
            if scores is not None:
                moved.append(kl_div(new_scores, scores, reduction="none", log_target=True).sum(-1))
            sums.index_add_(1, column[part].flatten(), torch.stack([each.cpu().double().flatten() for each in moved]))
        means = sums / column.flatten().bincount(minlength=2 * reach + 1)  # NaN where there is no pair
        profiles.append(means[:, :-1].unflatten(1, (2, reach)))
    return torch.stack(profiles)


def _frozen(unchanged: list[Any], within: Tensor, layer: int, read: Tensor) -> Tensor:
    """Return what a layer reads, (batch, n, ...), with all tokens but those of a pair as in the unchanged text."""
    return torch.where(within.view(*within.shape, *[1] * (read.ndim - 2)), read, unchanged[layer])


def _locality(moves: Tensor) -> Tensor:
    """Return the locality of movement (..., side, distance), by halves from distance 1 on."""
    nearness = torch.exp2(-torch.arange(moves.shape[-1], dtype=torch.float64, device="cpu"))
    return (moves * nearness).nansum((-2, -1)) / moves.nansum((-2, -1))


def _means(values: dict[str, Tensor], confidence: float) -> dict[str, float]:
    """Return the means of numbers of texts with their intervals as columns; texts without a number are left out."""
    row: dict[str, float] = {}
    for name, each in values.items():
        row |= mean_over_runs(each[~each.isnan()], confidence).columns(name)
    return row
