"""From disk: a model with its encodings, of the folder that ``save_pretrained`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from pelocality.architectures import ATTACHED
from pelocality.attachment.handle import attach
from pelocality.encodings import Encoding


def load(path: str | Path, *, model_class: Any = None, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with an encoding attached, and attach it again.

    ``model.save_pretrained(path)`` needs no help: the encodings are submodules, their numbers and their configuration
    tensors in the same safetensors file. Plain transformers says of such a folder that it has unexpected keys, each
    with "pelocality" in its name, and loads the model without them.

    Args:
        path: The folder, or the name of a repository on the Hugging Face hub.
        model_class: What to load it as, e.g. ``AutoModelForSequenceClassification`` to fine-tune what was pre-trained;
            None: what it was saved as.
        **options: For ``from_pretrained`` of that class, e.g. ``num_labels``, ``dtype`` or ``attn_implementation``
            (which is the one at the time of attaching unless you say otherwise).

    Returns:
        The model in evaluation mode, its outputs to the bit those of the saved one; `attached` gives its handle.

    Raises:
        ValueError: No encoding is in the folder, its type is not known, or the model class has no place for it.

    Examples:
        >>> import tempfile
        >>> from pelocality.attachment import attach, attached
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> from transformers import BertConfig, BertModel
        >>> bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
        >>> attachment = attach(bert, AttenuatedEncoding(decay=0.2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bert.save_pretrained(folder)
        ...     attached(load(folder)).encodings[0]
        AttenuatedEncoding(heads=1, decay=0.2, symmetry=1.0, form='weights', learnable=False, scale=1.0, causal=False)
    """
    folder = (
        Path(path)
        if Path(path).is_dir()
        else Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))
    )
    saved = _read(folder)
    if not saved:
        raise ValueError(f"{path} holds no encoding; load it with transformers")
    notes = {name: json.loads(bytes(tensors["configuration"].tolist())) for name, tensors in saved.items()}
    first = next(iter(notes.values()))
    options.setdefault("attn_implementation", first["attn_implementation"])
    model = _without_warning(_class(folder, model_class), folder, options)
    modules = dict(model.named_modules())
    names = _renamed(list(saved), modules, model.base_model_prefix)
    order = list(modules)
    names = dict(sorted(names.items(), key=lambda pair: order.index(pair[1])))
    encodings = [Encoding.from_configuration(notes[name]["encoding"]) for name in names]
    attach(model, encodings, position_embeddings=first["position_embeddings"])
    for name, now in names.items():
        bias = modules[now].get_submodule(ATTACHED)
        tensors = {key: tensor.to(bias.get_buffer("configuration").device) for key, tensor in saved[name].items()}
        bias.register_buffer("configuration", tensors["configuration"])  # its length may differ in the last digit
        bias.load_state_dict(tensors, assign=True)  # not copied: they keep the precision they were saved in
    return model


def _read(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of every bias, by the name of the attention module it was in."""
    found: dict[str, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors file is no dictionary
                module, separator, rest = key.partition(f".{ATTACHED}.")
                if separator:
                    found.setdefault(module, {})[rest] = tensors.get_tensor(key)
    return found


def _class(folder: Path, model_class: Any) -> type[PreTrainedModel]:
    config = AutoConfig.from_pretrained(folder)
    if model_class is None:
        model_class = getattr(transformers, config.architectures[0], None)
        if model_class is None:
            raise ValueError(f"transformers has no class '{config.architectures[0]}'; give yours as model_class")
    if hasattr(model_class, "_model_mapping"):  # an Auto class
        model_class = model_class._model_mapping[type(config)]
    found: type[PreTrainedModel] = model_class
    return found


def _without_warning(model_class: type[PreTrainedModel], folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    """Load the model itself; that the keys of the encodings are none of its own is no news here."""
    ignored = [*(model_class._keys_to_ignore_on_load_unexpected or []), rf"\.{ATTACHED}\."]
    disguise = {
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "_keys_to_ignore_on_load_unexpected": ignored,
    }
    disguised: Any = type(model_class.__name__, (model_class,), disguise)
    model: PreTrainedModel = disguised.from_pretrained(folder, **options)
    model.__class__ = model_class
    return model


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
    raise ValueError(f"the model has no module '{names[0]}' to put the saved encoding into; load it as what was saved")
