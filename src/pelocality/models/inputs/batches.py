"""Texts in the batches that a model runs, each of several equal texts once."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from tqdm import tqdm

from pelocality._checks import check_several, count, flag
from pelocality.models._calls import argument_names
from pelocality.models._inference import depend_on_length
from pelocality.models.inputs.tokens import token_batch, token_batches, token_tensor, tokens_first, word_numbers
from pelocality.models.inputs.words import special_ids
from pelocality.models.layers import texts_of
from pelocality.models.sequence_model import SequenceModel

_READ_HERE = ("input_ids", "attention_mask", "special_tokens_mask", "position_ids", "word_ids")


class TextBatches:
    """The batches of texts that a model runs, without texts that are equal to an earlier one.

    Texts are equal if the model reads the same tokens, with the same types and positions, and the same are included.
    With ``words``, inputs have ``word_ids`` as well, the number of each token's word and -1 for special tokens, if a
    fast tokenizer has read them, or the batch holds them.

    Attributes:
        repeated: The number of texts so far that were left out, as they are equal to an earlier one.
        checksums: One number per batch, which tells whether two processes are given the same.

    Raises:
        TypeError: As for `token_batches`, one text or batch instead of several, batches that are not mappings of token
            ids, or options of the wrong type.
        ValueError: As for `token_batches`, options that are too small, text longer than the model's positions, special
            tokens that nothing identifies, or padding without a mask.
    """

    def __init__(
        self,
        model: SequenceModel,
        texts: Iterable[Any],
        tokenizer: Any,
        special_tokens: bool,
        without_first: int,
        batch_size: int,
        progress: bool,
        words: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.progress, self.words = model, tokenizer, progress, words
        self.special_tokens = flag("special_tokens", special_tokens)
        self.without_first = count("without_first", without_first, least=0)
        count("batch_size", batch_size)
        check_several("texts", texts)
        self.batches = texts if model.content is not None else token_batches(texts, model, tokenizer, batch_size)
        self.by_length = depend_on_length(model.module)
        self.repeated, self.checksums, self._seen = 0, list[int](), set[bytes]()

    def __iter__(self) -> Iterator[tuple[Any, Tensor | None]]:
        """Yield the inputs of each call and which of their tokens to include, (batch, n).

        A model without token ids has None in the place of the tokens. Its batches, and those with images beside texts,
        are compared as a whole.
        """
        longest = 0
        for batch in tqdm(self.batches, desc="text", unit="batch", delay=3, disable=not self.progress):
            if self.model.content is not None:
                if self._is_new([batch], texts=texts_of(batch)):
                    yield batch, None
                continue
            inputs, included = _read_batch(batch, self.model, self.tokenizer, self.special_tokens, self.words)
            if included.numel() == 0:
                continue
            if self.model.holds_images(inputs):  # it is not known which of the numbers are of which text
                if self._is_new([included, inputs], texts=len(included)):
                    yield inputs, included & (included.cumsum(1) > self.without_first)
                continue
            if included.shape[1] > longest:
                longest = included.shape[1]
                self.model.check_length(longest)
            self.checksums.append(zlib.crc32(inputs["input_ids"].cpu().numpy().tobytes()))
            here = {name: each.cpu() for name, each in inputs.items()}
            new = [
                n > 0 and self._is_new([included[row, :n], {name: each[row, :n] for name, each in here.items()}])
                for row, n in enumerate(here.pop("attention_mask").sum(1).tolist())
            ]
            if not any(new):
                continue
            inputs, included = {name: each[new] for name, each in inputs.items()}, included[new]
            included = included & (included.cumsum(1) > self.without_first)
            yield from _of_one_length(inputs, included) if self.by_length else [(inputs, included)]

    def _is_new(self, inputs: Any, texts: int = 1) -> bool:
        """Return whether inputs were not seen before; count their texts as repeated if they were."""
        digest = blake2b(b"".join(bytes_of(inputs)), digest_size=16).digest()
        new = digest not in self._seen
        self._seen.add(digest)
        self.repeated += 0 if new else texts
        return new


def bytes_of(inputs: Any) -> Iterator[bytes]:
    """Yield bytes that differ where inputs differ."""
    if isinstance(inputs, Mapping):
        for name in sorted(inputs, key=str):
            yield f"{name}:".encode()
            yield from bytes_of(inputs[name])
    elif isinstance(inputs, tuple | list):
        for each in inputs:
            yield from bytes_of(each)
    elif isinstance(inputs, Tensor | np.ndarray):
        tensor = torch.as_tensor(inputs).detach().cpu().contiguous()
        yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        yield tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield f"{inputs!r},".encode()


def _of_one_length(inputs: dict[str, Tensor], included: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield consecutive texts of one length and of the same positions together, without padding."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    starts = inputs.get("position_ids", torch.zeros(len(lengths), 1))[:, 0].tolist()
    for (length, _), texts in groupby(range(len(lengths)), lambda row: (lengths[row], starts[row])):
        rows = list(texts)
        yield {name: each[rows, :length] for name, each in inputs.items()}, included[rows, :length]


def _read_batch(
    batch: Mapping[str, Any], model: SequenceModel, tokenizer: Any, special_tokens: bool, words: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch's inputs, (batch, n, ...) each, and which tokens to include, (batch, n), padding on the right."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise TypeError(f"texts must hold strings, or mappings with input_ids, got {type(batch).__name__}")
    if len(batch["input_ids"]) == 0:
        return {}, torch.ones(0, 0, dtype=torch.bool)
    masks = ["attention_mask", "special_tokens_mask"]
    if model.config is not None and model.reads("token_type_ids"):  # a tokenizer may return what a model does not read
        masks.append("token_type_ids")
    entries = {name: batch.get(name) for name in masks}
    if words:
        entries["word_ids"] = batch.get("word_ids", word_numbers(batch))
    inputs, real = token_batch(model, batch["input_ids"], **entries)
    ids, order = inputs["input_ids"], tokens_first(real)
    special = inputs.pop("special_tokens_mask", None)
    if special_tokens:
        special = torch.zeros_like(ids)
    elif special is None:
        if tokenizer is None:
            raise ValueError("special tokens cannot be identified; pass tokenizer=, or special_tokens=True")
        special = torch.isin(ids, torch.tensor(sorted(special_ids(model, tokenizer))).to(ids))
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    others = {name: each for name, each in batch.items() if name not in (*inputs, *_READ_HERE) and each is not None}
    others = {name: _as_tensors(each) for name, each in others.items()}
    with_images, beside, shape = model.holds_images(others), {}, torch.as_tensor(batch["input_ids"]).shape
    inputs["attention_mask"] = real.long()
    if not with_images:
        inputs |= _positions(batch, model, ids, real, order)
    elif batch.get("position_ids") is not None:  # of several axes
        places = token_tensor("position_ids", batch["position_ids"]).to(ids.device)
        beside["position_ids"] = (places[..., None, :] if len(shape) == 1 else places)[..., rows, order]
    for name in {*argument_names(model.whole if with_images else model.module)}.intersection(others):
        if with_images and not _is_by_token(others[name], shape):
            beside[name] = model.moved(others[name])
        else:
            inputs[name] = _as_ids(name, others[name], model, shape).to(ids.device)
    in_order = {name: each[rows, order] for name, each in inputs.items()}
    return in_order | beside, (real & ~special.bool()).gather(1, order).cpu()


def _as_tensors(values: Any) -> Any:
    """Return nested lists of numbers, such as the pixels in a row of a dataset, as a tensor, and each array as one."""
    values = tree_map(lambda each: torch.as_tensor(each) if isinstance(each, np.ndarray) else each, values)
    with suppress(TypeError, ValueError):  # lists may be uneven, or hold tensors
        return torch.as_tensor(values) if isinstance(values, list) else values
    return values


def _is_by_token(values: Any, shape: torch.Size) -> bool:
    """Return whether an entry has integers for each token of texts of a shape, (batch, n) or (n,)."""
    return isinstance(values, Tensor) and not values.is_floating_point() and values.shape[: len(shape)] == shape


def _as_ids(name: str, values: Any, model: SequenceModel, shape: torch.Size) -> Tensor:
    """Return another entry that the model reads, such as the languages of XLM, (batch, n, ...).

    Raises:
        ValueError: It is not an integer per token, so that it cannot be moved with the tokens.
    """
    tensor = torch.as_tensor(values)
    if model.config is None or not _is_by_token(tensor, shape):
        raise ValueError(f"texts hold {name}, which must be integers of the shape of input_ids; leave it out")
    return tensor.reshape(-1, *tensor.shape[len(shape) - 1 :])


def _positions(
    batch: Mapping[str, Any], model: SequenceModel, ids: Tensor, real: Tensor, order: Tensor
) -> dict[str, Tensor]:
    """Return the positions of a batch, (batch, n), if it has them and the model reads them.

    Raises:
        ValueError: A row holds several texts, or positions on several axes that differ.
    """
    if batch.get("position_ids") is None:
        return {}
    positions = token_tensor("position_ids", batch["position_ids"])
    rows = positions[0] if positions.ndim == 3 else positions
    rows = rows.expand_as(ids).to(ids.device)
    steps = rows.gather(1, order).diff(dim=1)
    if bool(((steps != 1) & real.gather(1, order)[:, 1:]).any()):
        raise ValueError("position_ids must count up by one in each row; give one text a row")
    if not model.reads("position_ids"):
        return {}
    if model.config is None or not bool((positions == rows.to(positions.device)).all()):
        raise ValueError(f"position_ids differ between axes, or are not given to {model}; leave them out")
    return {"position_ids": rows}
