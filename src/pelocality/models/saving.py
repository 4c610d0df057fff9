"""From disk: a model with its encodings, of the folder that ``save_pretrained`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from pelocality.encodings import Encoding
from pelocality.models._restore import restoring
from pelocality.models._state_dict import CONFIGURATION, REFUSED, guard_saving, read_configuration
from pelocality.models.attachment import attach
from pelocality.models.families import architecture, known_families
from pelocality.models.families._record import ATTACHED

# The options of from_pretrained that say where a file is.
_PLACE = ("subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")


def load(path: str | Path, *, model_class: Any = None, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with an encoding attached, and attach it again.

    ``model.save_pretrained(path)`` needs no help: the encodings are submodules, so their numbers are in the same
    safetensors files as the weights, each with its configuration as JSON. Every class of transformers refuses to load
    the folder by itself, for it would leave the encodings out, if the model that saved it was given to `attach` or is
    from here; a model around it saves as ever.

    Args:
        path: The folder, or the name of a repository on the Hugging Face hub.
        model_class: What to load it as, e.g. ``AutoModelForSequenceClassification`` to fine-tune what was pre-trained;
            None: what it was saved as.
        **options: For ``from_pretrained`` of that class, e.g. ``num_labels``, ``revision``, ``variant``, ``subfolder``
            or ``attn_implementation`` (which is the one at the time of attaching unless you say otherwise). The
            encodings are read from the files that these choose.

    Returns:
        The model in evaluation mode, its weights to the bit those of the saved one; `attached` gives its handle. Of an
        encoder-decoder model each half gets what it had.

    Raises:
        TypeError: The model class is none.
        FileNotFoundError: There is no such folder or repository, or it cannot be reached.
        ValueError: No encoding is in the weights, or not the whole of it; its type is not known; a file is damaged; or
            the model class does not fit the model, or has no place for the encoding.

    Examples:
        >>> import tempfile
        >>> from pelocality.models import attach, attached
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> attachment = attach(bert, AttenuatedEncoding(decay=0.2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bert.save_pretrained(folder)
        ...     attached(load(folder)).encodings[0]
        AttenuatedEncoding(heads=1, decay=0.2, symmetry=1.0, form='weights', learnable=False, scale=1.0, causal=False)
    """
    if options.pop("output_loading_info", False):
        raise ValueError("output_loading_info=True is not supported: load returns the model alone; leave it out")
    place = {name: options[name] for name in _PLACE if name in options}
    found = _class(options.get("config") or _configuration(path, place), model_class)
    saved = _read(str(path), options.get("variant"), place)
    if not saved:
        raise ValueError(
            f"{path} holds no encoding in the weights that would be loaded; load it with transformers, or save it "
            "again if one was attached"
        )
    notes = {name: _note(path, name, tensors) for name, tensors in saved.items()}
    options.setdefault("attn_implementation", next(iter(notes.values()))["attn_implementation"])
    options[REFUSED] = None
    with _expected(found):
        model = found.from_pretrained(path, **options)
    modules = dict(model.named_modules())
    names = {modules[now]: name for name, now in _renamed(list(saved), modules, model.base_model_prefix).items()}
    for stack, attentions in _stacks(model):
        here = [names.pop(module) for module in attentions if module in names]
        if not here:
            continue
        if len(here) < len(attentions):
            raise ValueError(f"{path} holds an encoding for {len(here)} of {len(attentions)} attention modules only")
        encodings = [_encoding(path, notes[name]["encoding"]) for name in here]
        attach(stack, encodings, position_embeddings=notes[here[0]]["position_embeddings"])
        for name, module in zip(here, attentions, strict=True):
            _fill(path, name, module.get_submodule(ATTACHED), saved[name])
    if names:
        raise ValueError(f"the model has no place for the saved encoding '{next(iter(names.values()))}'")
    guard_saving(model)
    return model


def _configuration(path: str | Path, place: dict[str, Any]) -> Any:
    """Return the configuration of the model itself."""
    try:
        return AutoConfig.from_pretrained(path, **place)
    except OSError as error:
        raise FileNotFoundError(
            f"path must be a folder that save_pretrained wrote, or a repository on the hub, got '{path}': {error}"
        ) from error


def _read(path: str, variant: str | None, place: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of every bias, by the name of the attention module it was in.

    They are looked for where ``from_pretrained`` looks for weights: what else lies in a folder may be of another model.
    """

    def find(name: str) -> str | None:
        file: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **place)
        return file

    def varied(name: str) -> str:
        stem, _, ending = name.rpartition(".")
        return name if variant is None else f"{stem}.{variant}.{ending}"

    files = [find(varied(SAFE_WEIGHTS_NAME))]
    index = find(varied(SAFE_WEIGHTS_INDEX_NAME)) if files[0] is None else None
    if index is not None:
        files = [find(name) for name in _shards(index)]
    found: dict[str, dict[str, Tensor]] = {}
    for file in files:
        for key, tensor in _encodings_in(file) if file is not None else ():
            module, _, rest = key.partition(f".{ATTACHED}.")
            found.setdefault(module, {})[rest] = tensor
    return found


def _shards(index: str) -> list[str]:
    """Return the names of the files that hold encodings."""
    try:
        shards: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return sorted({file for key, file in shards.items() if f".{ATTACHED}." in key})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index} must be JSON with a 'weight_map', as save_pretrained writes it: {error}") from error


def _encodings_in(file: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of encodings in a file of weights, by their keys."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return [(key, tensors.get_tensor(key)) for key in tensors.keys() if f".{ATTACHED}." in key]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, it is no whole safetensors file: {error}") from error


def _note(path: str | Path, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the configuration of the encoding in an attention module."""
    if CONFIGURATION not in tensors:
        raise ValueError(f"{path} holds an encoding without its configuration, in '{name}'; save it again")
    try:
        return read_configuration(name, tensors[CONFIGURATION])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _encoding(path: str | Path, configuration: dict[str, Any]) -> Encoding:
    """Make an encoding of its configuration."""
    try:
        return Encoding.from_configuration(configuration)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds an encoding that cannot be made: {error}; import the module that defines it before loading"
        ) from error


def _fill(path: str | Path, name: str, bias: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the numbers of a bias."""
    device = bias.get_buffer("encoding._like").device
    try:  # assigned, not copied: they keep the precision they were saved in
        bias.load_state_dict({key: tensor.to(device) for key, tensor in tensors.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the whole encoding of '{name}': {error}") from error


def _stacks(model: PreTrainedModel) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return what can be attached to in a model, each with its attention modules: of T5 both halves."""
    found: dict[nn.Module, tuple[nn.Module, list[nn.Module]]] = {}
    for module in model.modules():  # the outermost first, for what stands around a stack is guarded too
        if isinstance(module, PreTrainedModel) and module.config.model_type in known_families():
            record = architecture(module)
            base = record.base(module)
            found.setdefault(base, (module, list(dict.fromkeys(record.attentions(base)))))
    return list(found.values())


def _class(config: Any, model_class: Any) -> type[PreTrainedModel]:
    if model_class is None:
        name = (config.architectures or [None])[0]
        model_class = getattr(transformers, str(name), None)
        if model_class is None:
            raise ValueError(f"transformers has no class '{name}'; give yours as model_class")
    if hasattr(model_class, "_model_mapping"):  # an Auto class
        auto = model_class.__name__
        try:
            model_class = model_class._model_mapping[type(config)]
        except KeyError as error:
            raise ValueError(f"{auto} has no class for model type '{config.model_type}'; give another") from error
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise TypeError(f"model_class must be a model class of transformers, e.g. AutoModel, got {model_class!r}")
    return model_class


@contextmanager
def _expected(model_class: Any) -> Iterator[None]:
    """Have transformers expect the keys of encodings, which it reports as unexpected otherwise."""
    before = model_class._keys_to_ignore_on_load_unexpected
    with restoring(lambda: setattr(model_class, "_keys_to_ignore_on_load_unexpected", before)):
        model_class._keys_to_ignore_on_load_unexpected = [*(before or []), rf"\.{ATTACHED}\."]
        yield


def _renamed(names: list[str], modules: dict[str, nn.Module], prefix: str) -> dict[str, str]:
    """Return what the saved modules are called in the loaded model, which may have another head, or none."""
    for rename in (
        lambda name: name,
        lambda name: f"{prefix}.{name}",
        lambda name: name.removeprefix(f"{prefix}."),
    ):
        renamed = {name: rename(name) for name in names}
        if all(name in modules for name in renamed.values()):
            return renamed
    missing = next(name for name in names if name not in modules)
    raise ValueError(f"the model has no module '{missing}' to put the saved encoding into; load it as what was saved")
