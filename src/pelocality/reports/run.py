"""A report of one model: every part, or the reason why the model does not support it."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

import pelocality
from pelocality._checks import check_file, check_several, count, flag
from pelocality.models import SequenceModel
from pelocality.reports.contents import Part, plain
from pelocality.reports.inputs import default_texts, load_model
from pelocality.reports.position_parts import bands, heads, kernels, positions, profiles
from pelocality.reports.result import Report
from pelocality.reports.subject import Subject, reason_of
from pelocality.reports.text_parts import classes, depth, order, share, sinks

_LENGTH = 64

logger = logging.getLogger(__name__)
PARTS: dict[str, tuple[str, Callable[[Subject], Part]]] = {
    "positions": ("Which positions does the model run?", positions),
    "heads": ("How local and how symmetric is each head?", heads),
    "profiles": ("How does attention vary with distance?", profiles),
    "kernels": ("What do positions alone add to the logits?", kernels),
    "bands": ("Which frequencies of its rotations does the model use?", bands),
    "sinks": ("Where does attention rest?", sinks),
    "share": ("How much of the attention on text is position?", share),
    "classes": ("What is each head?", classes),
    "depth": ("What do all layers do together?", depth),
    "order": ("Does the model see the order of words?", order),
}
_VERSIONS = ("torch", "transformers", "numpy")


def report(
    model: nn.Module | SequenceModel | str | Path,
    tokenizer: Any = None,
    path: str | Path | None = None,
    *,
    texts: Iterable[Any] | None = None,
    length: int | None = None,
    words: int = 32,
    seed: int = 0,
    twins: bool = True,
    progress: bool = True,
    **loading: Any,
) -> Report:
    """Return all measurements of a model, as plain numbers and as one HTML page.

    Each part has figures, a sentence on how to read them, a sentence on what is notable, the numbers as a table, and
    the line of code that makes them. The sentence on what is notable is computed from the numbers. If the model does
    not support a part, the part holds the reason. The page is one file that loads nothing, and opens offline.

    The numbers are from few words and texts, as a first look. Intervals in the tables are over these words and texts.

    Args:
        model: A transformers model or a `SequenceModel` of any module; or a hub name, a local folder or a ``.gguf``
            file, which `load_model` reads with its tokenizer.
        tokenizer: Its tokenizer; None for the tokenizer of its name or folder, if there is one.
        path: Where to write the page, or the numbers if it ends in ``.json``; None writes nothing.
        texts: Paragraphs as strings, or tokenised batches as `text_average` accepts them; None: a story that was
            written for this library. `text_batches` joins and cuts strings, so that all texts have one length.
        length: Positions of words and texts; None: 64, or as many as the model has.
        words: The number of repeated words.
        seed: Seed of words, directions, shuffles and random weights.
        twins: Whether each number stands beside that of the same configuration with random weights, and of this model
            without positions. They take about as long again as the model alone, and the memory of a second model.
        progress: Show a progress bar over the parts.
        loading: Arguments of `load_model`, for a model that is given by its name: ``device``, ``dtype``, ``revision``.

    Returns:
        A `Report`.

    Raises:
        TypeError: Something that is not a model, or an argument of the wrong type.
        ValueError: A length, a number of words or a seed below what can be measured, a length beyond the positions of
            the model, or a model that supports no part.
        OSError: There is no model of this name, or the folder of ``path`` does not exist.
        ImportError: Matplotlib is not installed, and a page is to be written.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        >>> result = report(BertModel(BertConfig(vocab_size=99, **size)), length=12, words=2, progress=False)
        >>> result
        Report(BertModel: 7 parts, without bands, share, order)
        >>> result["bands"].reason
        'texts need a tokenizer, or texts= as batches of what the model reads'
    """
    count("words", words)
    count("seed", seed, least=0)
    if length is not None:
        count("length", length, least=4)
    flag("twins", twins)
    if path is not None:
        check_file("path", path, ".html", ".json")
        if Path(path).suffix != ".json":
            import matplotlib  # noqa: F401 (if it is missing, this fails before the model runs)
    name = ""
    if isinstance(model, str | Path):
        name = f"./{Path(model).absolute().name}" if Path(model).exists() else str(model)  # no path of this machine
        model, its_tokenizer = load_model(model, **loading)
        tokenizer = its_tokenizer if tokenizer is None else tokenizer
    elif loading:
        raise TypeError(f"{', '.join(loading)} must come with the name of a model, which is loaded with it")
    measured = SequenceModel.of(model)
    items = default_texts() if texts is None else texts
    check_several("texts", items)
    items = list(items)
    strings = all(isinstance(item, str) for item in items)
    if length is not None:
        measured.check_length(length)
    n = length or min(_LENGTH, measured.longest - 4 if measured.longest else _LENGTH)
    lines, batches = (items, None) if strings else (None, items)
    subject = Subject(measured, tokenizer, lines, batches, n, words, seed, twins)
    parts = []
    start = time.monotonic()
    bar = tqdm(PARTS.items(), desc="report", unit="part", disable=not progress)
    for key, (title, make) in bar:
        bar.set_postfix_str(key)
        parts.append(replace(_part_or_reason(key, make, subject), key=key, title=title))
    if all(part.reason for part in parts):
        raise ValueError(f"model supports no part of a report; the first reason: {parts[0].reason}")
    command = f"pelocality report {name or 'MODEL'} --length {n} --words {words} --seed {seed}"
    command += "".join(f" --{option} {value}" for option, value in loading.items())
    command += (" --text FILE" if texts is not None else "") + ("" if twins else " --no-twins")
    result = Report(
        name=_name_of(measured, name),
        parts=tuple(parts),
        facts=_facts_of(subject, parts),
        source={
            "command": command,
            "python": _lines_before(name, subject, loading),
            "texts": "a story written for this library" if texts is None else "the caller's",
            "settings": {"length": n, "words": words, "seed": seed},
            "versions": {"pelocality": pelocality.__version__, **{library: version(library) for library in _VERSIONS}},
            "seconds": round(time.monotonic() - start, 1),
        },
        missing=subject.missing,
    )
    if path is not None:
        result.save(path)
    return result


def _name_of(model: SequenceModel, name: str) -> str:
    """Return the name of a model, of a local file or folder its end alone: a page is mailed."""
    local = name.startswith("./") or Path(getattr(model.config, "_name_or_path", "")).is_absolute()
    return Path(name or model.name).name.removesuffix(".gguf") if local else model.name


def _part_or_reason(key: str, make: Callable[[Subject], Part], subject: Subject) -> Part:
    """Return a part with plain numbers, or with the library's reason why the model does not support it."""
    try:
        part = make(subject)
    except (TypeError, ValueError, NotImplementedError) as error:
        logger.info("a report without %s", key, exc_info=True)
        return Part(reason=reason_of(error))
    charts = tuple(replace(each, **{name: plain(value) for name, value in vars(each).items()}) for each in part.charts)
    numbers = {"by_layer": plain(part.by_layer), "beside": plain(part.beside)}
    return replace(part, charts=charts, notes=tuple(part.notes), **numbers)


def _facts_of(subject: Subject, parts: list[Part]) -> dict[str, Any]:
    """Return what the model is."""
    model = subject.model
    config = model.config.get_text_config() if model.config is not None else None
    trial = vars(subject).get("trial")  # None if no part computed it
    facts = {
        "class": type(model.with_head).__name__,
        "type": getattr(config, "model_type", ""),
        "layers": len(trial.layers) if trial else getattr(config, "num_hidden_layers", None),
        "heads": trial.attention.shape[1] if trial else getattr(config, "num_attention_heads", None),
        "width": getattr(config, "hidden_size", None),
        "parameters": sum(each.numel() for each in model.with_head.parameters()),
        "positions": model.longest or getattr(config, "max_position_embeddings", None),
        "causal": trial.source.causal if trial else None,
        "precision": str(model.dtype).removeprefix("torch."),
        "attached": model.encoding,
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _lines_before(name: str, subject: Subject, loading: Mapping[str, Any]) -> list[str]:
    """Return the lines before the code of the parts."""
    options = "".join(f", {option}={value!r}" for option, value in loading.items())
    model = f'load_model("{name}"{options})' if name else "...  # as passed to report"
    model = f"model, tokenizer = {model}"
    length = subject.length + (subject.first if "trial" in vars(subject) else 0)
    texts = ["texts = ...  # as passed to report"]
    if subject.batches is None:
        texts = ["lines = ...  # the paragraphs, one per item", f"texts = text_batches(lines, tokenizer, {length})"]
    imports = ["from pelocality import *", "from pelocality.reports import load_model, order_pairs, text_batches"]
    return [*imports, model, *texts]
