"""The most attended other word of each word of a sentence, for each head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from pelocality._batches import batches_of_equal_length
from pelocality._checks import check_tokenizer
from pelocality.evaluation.dependencies._sentences import NO_TOKENS
from pelocality.models.layers import AttentionLayers, observe_layers
from pelocality.models.sequence_model import SequenceModel

Words = Sequence[str]


def most_attended(
    model: nn.Module | SequenceModel, tokenizer: Any, sentences: Sequence[Words], batch_size: int, progress: bool
) -> tuple[list[NDArray[np.int16] | None], tuple[int, ...], bool]:
    """Return the most attended word of each word, by sentence, without keeping attention maps.

    Args:
        model: A transformers model.
        tokenizer: Its fast tokenizer.
        sentences: The words of each sentence.
        batch_size: Sentences of one length in tokens per forward pass.
        progress: Show a progress bar.

    Returns:
        For each sentence (words, layer, head): the index of the word, -1 where no other word is attended to,
        ``NO_TOKENS`` for a word without tokens; None for sentences longer than the model. Then the layers of the model
        that the layer axis stands for, and whether a token saw a later one in any of them.

    Raises:
        TypeError: A model that is not from transformers.
        ValueError: A tokenizer without alignment, or a model that cannot be probed.
    """
    model = SequenceModel.of(model)
    check_alignment(tokenizer)
    limit = model.longest
    attended: list[NDArray[np.int16] | None] = [None] * len(sentences)
    attending: AttentionLayers | None = None
    looks_ahead = False
    encoded: Any = tokenizer([list(words) for words in sentences], is_split_into_words=True) if sentences else {}
    lengths = [len(ids) for ids in encoded.get("input_ids", ())]
    fits = [i for i, length in enumerate(lengths) if not limit or length <= limit]
    readable = ("input_ids", "attention_mask", *(["token_type_ids"] if model.reads("token_type_ids") else []))
    names = [name for name in readable if name in encoded]
    bar = tqdm(total=len(fits), desc="dependency heads", unit="sentence", delay=3, disable=not progress)
    with bar:
        for batch in batches_of_equal_length([lengths[i] for i in fits], batch_size):
            chosen = [fits[place] for place in batch]
            inputs = {name: torch.tensor([encoded[name][i] for i in chosen], device=model.device) for name in names}
            model.check_ids(inputs["input_ids"])
            words = [len(sentences[i]) for i in chosen]
            membership = _membership([encoded.word_ids(i) for i in chosen], max(words))
            attending = attending or AttentionLayers(model, inputs)
            most: list[Tensor] = []  # layer by layer, (batch, words, head)

            def use(_: int, weights: Tensor, seen: Tensor, most: list[Tensor] = most, of: Tensor = membership) -> None:
                nonlocal looks_ahead
                looks_ahead = looks_ahead or bool(seen.triu(1).any())
                most.append(_most_attended_words(weights, of).cpu())

            observe_layers(model, attending, attending.layers, inputs, use)
            words_of_heads = torch.stack(most, dim=2)
            for row, i in enumerate(chosen):
                attended[i] = words_of_heads[row, : words[row]].numpy().astype(np.int16)  # (words, layer, head)
            bar.update(len(chosen))
    return attended, () if attending is None else attending.layers, looks_ahead


def word_attention(weights: Tensor, membership: Tensor) -> Tensor:
    """Return attention between words from attention between tokens.

    Attention to a word is the sum over its tokens, attention from a word the mean over its tokens (Clark et al.,
    2019, section 4.1); attention to special tokens is excluded.

    Args:
        weights: (batch, head, n, n).
        membership: (batch, n, words), 1 where a token belongs to a word.

    Returns:
        (batch, head, words, words), rows sum to at most 1; a word without tokens has a row of zeros.

    Examples:
        >>> of_word = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])  # two tokens, then one
        >>> tokens = torch.tensor([[[[0.1, 0.1, 0.8], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]]]])
        >>> word_attention(tokens, of_word)
        tensor([[[[0.3000, 0.7000],
                  [0.8000, 0.2000]]]])
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)  # half precision would give ties
    membership = membership.to(weights.device, dtype)
    to_words = weights.to(dtype) @ membership[:, None]  # (batch, head, n, words)
    sizes = membership.sum(1).clamp(min=1)[:, None, :, None]
    return membership.transpose(1, 2)[:, None] @ to_words / sizes


def check_alignment(tokenizer: Any) -> None:
    """Refuse a tokenizer that joins the words that it is given."""
    check_tokenizer(tokenizer)
    split = tokenizer(["the", "cat"], is_split_into_words=True, add_special_tokens=False)["input_ids"]
    whole = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", " the cat")]
    if split not in whole:
        raise ValueError("tokenizer loses spaces between words; load it with add_prefix_space=True")


def _membership(word_ids: Sequence[Sequence[int | None]], words: int) -> Tensor:
    """Return (batch, n, words), 1 where a token belongs to a word; special tokens belong to none."""
    ids = torch.tensor([[-1 if word is None else word for word in row] for row in word_ids])
    return (ids[..., None] == torch.arange(words)).float()


def _most_attended_words(weights: Tensor, membership: Tensor) -> Tensor:
    """Return the most attended other word of each word, -1 or ``NO_TOKENS`` for none: (batch, words, head)."""
    attention = word_attention(weights, membership)
    attention.diagonal(dim1=-2, dim2=-1).zero_()  # a word is not its own head (Clark et al., 2019)
    most, word = attention.max(-1)  # (batch, head, words)
    word = torch.where(most > 0, word, -1).transpose(1, 2)
    has_tokens = membership.to(word.device).any(1)  # (batch, words)
    return torch.where(has_tokens[..., None], word, NO_TOKENS)
