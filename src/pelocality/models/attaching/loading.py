"""Loading a model with its encodings from the folder that ``save_pretrained`` wrote."""

import copy
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.utils.hub import cached_file

from pelocality.encodings import Encoding, RotaryEncoding
from pelocality.models._restore import changed, restoring_on_error
from pelocality.models.attaching.attach import attach
from pelocality.models.attaching.installing import Plan, batch_for, find_places, fitted, reading, remove
from pelocality.models.attaching.saving import FILE
from pelocality.models.attaching.submodule import CONFIGURATION, Place, read_configuration
from pelocality.models.families import ATTACHED, attached_biases, family_of
from pelocality.models.sequence_model import SequenceModel

# Version 0.2 saved a sentence in place of an option, so that transformers alone refused the folder.
_BLOCKING_KEY = "experts_implementation"
# The options of from_pretrained that locate files.
_LOCATION = ("subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
# A class of transformers is told which keys to expect for the time of a call.
_LOCK = threading.Lock()


def load(path: str | Path, model: Any = None, *, model_class: Any = None, **options: Any) -> Any:
    """Load a model that was saved with an encoding attached, or attach saved encodings to a model.

    ``model.save_pretrained(path)`` saves everything: the encodings are submodules, so their numbers are in the files of
    the weights, each with its configuration as JSON. ``attachment.save(path)`` writes the encodings alone.

    Args:
        path: The folder, or the name of a repository on the Hugging Face hub.
        model: A module to which encodings that `Attachment.save` wrote are attached; None: the model in the folder.
        model_class: The class to load, e.g. ``AutoModelForSequenceClassification`` to fine-tune a pre-trained model;
            None: the class that was saved.
        **options: For ``from_pretrained`` of that class, e.g. ``num_labels``, ``revision``, ``variant``, ``subfolder``
            or ``attn_implementation`` (by default that of the model when the encoding was attached). The encodings are
            read from the files that these options choose.

    Returns:
        The model in evaluation mode, with exactly the saved weights; `attached` returns its handle. In an
        encoder-decoder model the encodings of encoder and decoder are both attached again. A given ``model`` is changed
        in place, and returned.

    Raises:
        TypeError: There is no model class that fits the model.
        FileNotFoundError: There is no such folder or repository, or it cannot be reached.
        ValueError: The weights hold no encoding, or an encoding of unknown type; the model class has no attention
            module for the encoding.

    Note:
        The model classes of transformers load such a folder without the encodings. They then log a report that names
        the numbers of the encodings as unexpected.

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
    location = {name: options[name] for name in _LOCATION if name in options}
    loaded_class = None
    if model is None:
        config = options.get("config", path)
        config = _configuration(config, location) if isinstance(config, str | Path) else config
        loaded_class = _class(config, model_class)
    saved = read_encodings(path, options.get("variant"), location)
    if not saved:
        raise ValueError(f"{path} holds no encoding in the weights that would be loaded; load it with transformers")
    configurations = {name: _restored(path, name, tensors) for name, tensors in saved.items()}
    if loaded_class is not None:
        options.setdefault("attn_implementation", next(iter(configurations.values()))["attn_implementation"])
        options.setdefault(_BLOCKING_KEY, None)
        with _LOCK:
            expected = [*(loaded_class._keys_to_ignore_on_load_unexpected or []), rf"\.{ATTACHED}\."]
            with changed(loaded_class, "_keys_to_ignore_on_load_unexpected", expected):
                model = loaded_class.from_pretrained(path, **options)
    elif attached_biases(model):
        raise ValueError(f"{type(model).__name__} has an encoding attached already; remove it first")
    names = _names_by_module(list(saved), model)
    rest = {module: configurations[name] for module, name in names.items()}
    parts = _parts(model, rest)
    with restoring_on_error(lambda: list(map(remove, parts))):
        for part in parts:
            if inside := {module: rest.pop(module) for module in part.module.modules() if module in rest}:
                _install(path, part, inside)
        if rest:
            raise ValueError(f"the model has no attention module for the saved encoding '{names[next(iter(rest))]}'")
        for module, name in names.items():
            attached: Any = module.get_submodule(ATTACHED)
            numbers = {key: tensor.to(attached.encoding.device) for key, tensor in saved[name].items()}
            attached.load_state_dict(numbers, assign=True)  # so that numbers keep the dtype in which they were saved
    return model


def _configuration(path: str | Path, location: dict[str, Any]) -> Any:
    """Return the configuration of the model itself."""
    try:
        return AutoConfig.from_pretrained(path, **location)
    except OSError as error:
        rule = "a folder that save_pretrained of a model wrote, or a repository on the hub that can be reached"
        raise FileNotFoundError(f"path must be {rule}, got '{path}'") from error


def read_encodings(
    path: str | Path, variant: str | None = None, location: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each encoding by the name of its attention module, from the files that `load` reads."""
    saved: dict[str, dict[str, Tensor]] = {}
    for file in _files(str(path), "" if variant is None else f".{variant}", location):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                module, attached, name = key.partition(f".{ATTACHED}.")
                if attached:
                    saved.setdefault(module, {})[name] = tensors.get_tensor(key)
    return saved


def _files(path: str, infix: str, location: Mapping[str, Any]) -> list[str]:
    """Return the files of weights that hold encodings, of a model in one file or in shards."""

    def find(name: str) -> str | None:
        file: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **location)
        return file

    if whole := find(FILE) or find(f"model{infix}.safetensors"):
        return [whole]
    if (index := find(f"model.safetensors.index{infix}.json")) is None:
        return []
    shards: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
    names = {file for key, file in shards.items() if f".{ATTACHED}." in key}
    return [file for name in sorted(names) if (file := find(name))]


def _restored(path: str | Path, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the configuration saved for an attention module, with the encoding itself in it."""
    try:
        configuration = read_configuration(tensors[CONFIGURATION])
        return configuration | {"encoding": Encoding.from_configuration(configuration["encoding"])}
    except (KeyError, TypeError, ValueError) as error:
        advice = "if its class is your own, import the module that defines it before loading"
        raise ValueError(f"{path} holds an encoding in '{name}' that cannot be made: {error}; {advice}") from error


def _parts(model: nn.Module, saved: Mapping[nn.Module, Mapping[str, Any]]) -> list[SequenceModel]:
    """Return the parts of a model that `attach` was given: both halves of T5; or the model, if it reads no tokens."""
    parts: dict[nn.Module, SequenceModel] = {}
    of_text = {module for module, each in saved.items() if _reads_tokens(each)}
    for module in model.modules():  # the model with its head comes before the part without it
        base = family_of(module).base(module) if isinstance(module, PreTrainedModel) else None
        if base is not None and base not in parts and not of_text.isdisjoint(base.modules()):
            parts[base] = SequenceModel(module)
    return [*parts.values(), *([reading(model)] if len(of_text) < len(saved) else [])]


def _install(path: str | Path, part: SequenceModel, saved: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Attach encodings that `Attached.configuration` describes to these modules of a model."""
    one = next(iter(saved.values()))
    replaces, positions = one.get("is_rotation", False), one["position_embeddings"]
    encodings = [configuration["encoding"] for configuration in saved.values()]
    if not replaces and _reads_tokens(one):
        attentions = part.family.attention_modules(part.module)
        if len(saved) < len(attentions) and not isinstance(encodings[0], RotaryEncoding):
            raise ValueError(f"{path} holds an encoding for {len(saved)} of {len(attentions)} attention modules only")
    if "module" not in one:  # version 0.2 saved a transformers model without its places
        every = list(find_places(part, batch_for(part, None)))
        layers = [number for number, module in enumerate(every) if module in saved]
        ordered = [saved[every[number]]["encoding"] for number in layers]
        attach(part, ordered, position_embeddings=positions, layers=layers, prove=False)
        return
    places = {module: Place(**configuration["module"]) for module, configuration in saved.items()}
    own = encodings if replaces else ()
    plan = Plan(part, positions == "disable", one["disabled"], places=places, own=own)
    plan.install(fitted(plan, encodings), disable=plan.disable)


def _reads_tokens(configuration: Mapping[str, Any]) -> bool:
    """Return whether an encoding was saved from a transformers model of token ids."""
    return bool(configuration.get("reads_tokens", "module" not in configuration))


def _class(config: Any, model_class: Any) -> type[PreTrainedModel]:
    """Return the model class to load: this one, that of an Auto class, or the one that was saved."""
    name = (config.architectures or [None])[0]
    chosen: Any = getattr(transformers, str(name), None) if model_class is None else model_class
    if hasattr(chosen, "_model_mapping"):  # an Auto class
        chosen = chosen._model_mapping.get(type(config), None)
    if not (isinstance(chosen, type) and issubclass(chosen, PreTrainedModel)):
        saved = f"model type '{config.model_type}' and class '{name}'"
        raise TypeError(f"model_class must be a model class that fits {saved}, got {model_class!r}")
    return chosen


def _names_by_module(names: list[str], model: nn.Module) -> dict[nn.Module, str]:
    """Return the saved name of each attention module; the loaded model may have another head, or none."""
    modules, prefix = dict(model.named_modules()), f"{getattr(model, 'base_model_prefix', '')}."
    for own in (names, _renamed(names, model)):
        for now in (own, [prefix + name for name in own], [name.removeprefix(prefix) for name in own]):
            if modules.keys() >= set(now):
                return {modules[new]: old for new, old in zip(now, names, strict=True)}
    missing, advice = next(name for name in names if name not in modules), "load it with the class that was saved"
    raise ValueError(f"the model has no module '{missing}' to attach the saved encoding to; {advice}")


def _renamed(names: list[str], model: nn.Module) -> list[str]:
    """Return the names under which transformers has loaded these modules: those of the hub may be older."""
    conversions = copy.deepcopy(getattr(model, "_weight_conversions", None) or [])  # a conversion notes its use
    ending = f".{ATTACHED}.{CONFIGURATION}"
    keys = [name + ending for name in names]
    for conversion in conversions:
        if isinstance(conversion, WeightRenaming):
            keys = [conversion.rename_source_key(key)[0] for key in keys]
    return [key.removesuffix(ending) for key in keys]
