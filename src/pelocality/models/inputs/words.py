"""Inputs of constant content: rows of one repeated word, drawn from a vocabulary or given, or a model's own content."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from pelocality._checks import check_tokenizer, count
from pelocality.models.sequence_model import SequenceModel

# Words are tokenised after this one, because most tokenizers treat the start of a text differently.
_BEFORE = "a"


@dataclass(frozen=True)
class Probe:
    """Inputs of constant content.

    Attributes:
        inputs: From the number of the first word and a number of words to the inputs of one call.
        names: The words as text.
        ids: Their token ids.
        prefix: The tokens before the words, as text.
        before: The number of tokens before the words.
        fed: The number of tokens before and after the words.
    """

    inputs: Callable[[int, int], Any]
    names: tuple[str, ...]
    ids: tuple[int, ...] = ()
    prefix: tuple[str, ...] = ()
    before: int = 0
    fed: int = 0


def constant_content(
    model: SequenceModel, length: int, words: int | Sequence[str | int], seed: int, surrounded: bool
) -> Probe:
    """Return samples of a model's own content."""
    first, length = count("seed", seed, 0), count("length", length)
    if not isinstance(words, int | np.integer) or surrounded:
        raise ValueError(f"words must be a number, without special_tokens and prefix: {model} reads no token ids")
    names = tuple(f"sample {first + i}" for i in range(count("words", words)))
    return Probe(lambda start, size: model.content(first + start, length), names)


def repeated_words(
    model: SequenceModel,
    tokenizer: Any,
    length: int,
    words: int | Sequence[str | int],
    seed: int,
    special_tokens: bool,
    prefix: bool | str | int,
) -> Probe:
    """Return rows of one repeated word each."""
    if special_tokens and prefix is not False:
        raise ValueError("special_tokens=True and prefix both feed tokens before the words; give one of them")
    before, after = special_tokens_around(tokenizer) if special_tokens else ([], [])
    if prefix is True:
        tokens = [getattr(each, "bos_token_id", None) for each in (tokenizer, model.config)]
        if tokens == [None, None]:
            raise ValueError("prefix=True needs a beginning-of-text token, and there is none; give a word or an id")
        before = [next(token for token in tokens if token is not None)]
    elif prefix is not False:
        before = [_token_id(tokenizer, prefix, "prefix")]
    ids, names = choose_words(model, tokenizer, words, seed)
    model.check_length(length, len(before) + len(after))
    model.check_ids(torch.tensor([*before, *after], device="cpu"), "input_ids" if prefix is False else "prefix")
    fed = () if prefix is False else _decoded(tokenizer, before)
    if fed and before[0] in ids:
        raise ValueError(f"words holds the prefix {fed[0]!r}, which must differ from the words; give another prefix")
    rows = torch.tensor([[*before, *[word] * length, *after] for word in ids], device=model.device)
    around = len(before), len(before) + len(after)
    return Probe(lambda start, size: {"input_ids": rows[start : start + size]}, names, ids, fed, *around)


def choose_words(
    model: SequenceModel, tokenizer: Any, words: int | Sequence[str | int], seed: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token ids of the words and their text.

    Raises:
        TypeError: ``words`` is neither a count nor a sequence of strings and ids, or ``tokenizer`` not a tokenizer.
        ValueError: A word is not one token or comes twice, an id is outside the vocabulary or the padding that the
            model counts positions from, or too few words exist.
    """
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    check_words(words)
    if isinstance(words, int | np.integer):
        ids = drawn_words(model, tokenizer, words, seed)
    else:
        ids = [_token_id(tokenizer, word) for word in words]
        if len(set(ids)) < len(ids):
            raise ValueError(f"words holds a word more than once, got {words!r}; intervals count words")
        tables = [part for name, part in model.module.named_modules() if "position" in name.rpartition(".")[2]]
        if any(getattr(table, "padding_idx", None) in ids for table in tables):  # RoBERTa counts positions past it
            raise ValueError(f"words holds the padding id {model.padding}, for which {model} counts no positions")
    model.check_ids(torch.tensor(ids, device="cpu"), "words")
    return tuple(ids), tuple(text.strip() for text in _decoded(tokenizer, ids))


def _decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return each token as text, its id without a tokenizer."""
    return tuple(str(token) if tokenizer is None else tokenizer.decode([token]) for token in ids)


def check_words(words: Any) -> None:
    """Refuse all but a count or a sequence of strings and token ids; no model is needed."""
    if isinstance(words, int | np.integer):
        count("words", words)
    elif isinstance(words, str | bytes) or not isinstance(words, Sequence) or not words:
        raise TypeError(f"words must be a count, or a list of words and token ids that is not empty, got {words!r}")


def special_ids(model: SequenceModel, tokenizer: Any = None) -> set[int]:
    """Return the ids of special tokens: the tokenizer's, or those the configuration names (often not all).

    A tokenizer's unknown word is a word, unless its id has another purpose too, as in GPT-2.
    """
    if tokenizer is None:
        settings = {} if model.config is None else model.config.to_dict()
        named = [value for key, value in settings.items() if key.endswith("_token_id") and value is not None]
        return {token for value in named for token in (value if isinstance(value, list | tuple) else [value])}
    check_tokenizer(tokenizer)
    others = {token for name, token in tokenizer.special_tokens_map.items() if name != "unk_token"}
    unknown = set() if tokenizer.unk_token in others else {tokenizer.unk_token_id}
    return set(tokenizer.all_special_ids) - unknown


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after one sentence."""
    check_tokenizer(tokenizer)
    tokens = tokenizer(_BEFORE, return_special_tokens_mask=True)
    ids, special = tokens["input_ids"], tokens["special_tokens_mask"]
    first, last = special.index(0), len(ids) - special[::-1].index(0)
    return ids[:first], ids[last:]


def _token_id(tokenizer: Any, word: str | int, name: str = "words") -> int:
    """Return the token id of a word, which may be a text or an id, in an argument of this name."""
    if isinstance(word, int | np.integer) and not isinstance(word, bool):
        return int(word)
    check_tokenizer(tokenizer)
    tokens = _tokens_of(word, tokenizer)  # type: ignore[arg-type]  # a tokenizer refuses what is no text
    if len(tokens) != 1 or tokens == [tokenizer.unk_token_id]:
        raise ValueError(f"{name} must be single tokens, but {word!r} is {tokenizer.convert_ids_to_tokens(tokens)}")
    return tokens[0]


def drawn_words(model: SequenceModel, tokenizer: Any, number: int, seed: int) -> list[int]:
    """Return token ids of words, drawn without replacement, each id as likely as any other."""
    size = model.vocabulary if tokenizer is None else min(model.vocabulary, len(tokenizer))
    order = np.random.default_rng(count("seed", seed, least=0)).permutation(size)
    special = special_ids(model, tokenizer)
    words = (token for token in order.tolist() if token not in special)
    drawn = list(islice((token for token in words if tokenizer is None or _is_word(token, tokenizer)), number))
    if len(drawn) < number:
        raise ValueError(f"words={number} is more than the {len(drawn)} words in this vocabulary; ask for fewer")
    return drawn


def _is_word(token: int, tokenizer: Any) -> bool:
    """Return whether a token decodes to a word of letters that the tokenizer encodes as this token.

    Letters may have marks after them: the vowel signs of Hindi or Thai, the points of Hebrew.
    """
    text = tokenizer.decode([token]).strip()
    letters = text[:1].isalpha() and all(unicodedata.category(each)[0] in "LM" for each in text)
    return letters and token != tokenizer.unk_token_id and _tokens_of(text, tokenizer) == [token]


def _tokens_of(word: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a word in the middle of a text."""
    texts = [_BEFORE, f"{_BEFORE} {word}", word]
    before, both, alone = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    return both[len(before) :] if both[: len(before)] == before else alone
