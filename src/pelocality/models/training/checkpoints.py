"""The folder of a relocation: its settings, by which another run is refused, and its last complete checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn


def claim(folder: str | Path, settings: dict[str, Any]) -> Path | None:
    """Record the settings in the folder, or check them; return its last complete checkpoint."""
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder must be the path of a folder, or None for no checkpoints, got {folder!r}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be the path of a folder, or None for no checkpoints; {folder} is a file")
    record = folder / "relocation.json"
    if not record.exists():
        if any(folder.glob("checkpoint-*")):  # the Trainer would resume from them, and delete them
            raise ValueError(f"folder {folder} holds checkpoints of another training; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        written = record.with_suffix(".writing")
        written.write_text(json.dumps(settings, indent=1))
        written.replace(record)  # whole or not at all
    try:
        found = dict(json.loads(record.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"folder has a damaged {record.name} ({error}); remove {folder} or choose another") from error
    differing = [name for name in settings if found.get(name) != settings[name]]
    if differing:
        raise ValueError(f"folder {folder} holds a relocation with other {', '.join(differing)}; choose another folder")
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_whole(path)]
    return max(complete, key=lambda path: int(path.name.partition("-")[2]), default=None)


def digest(content: Any) -> str:
    """Return a short hash of the pieces, or of all numbers of a model."""
    if isinstance(content, nn.Module):
        found = hashlib.sha256()
        for name, tensor in sorted(content.state_dict().items()):
            numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # a scalar has no bytes to view
            found.update(name.encode() + numbers.numpy().tobytes())
        return found.hexdigest()[:16]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _is_whole(state: Path) -> bool:
    """Return whether the weights of a checkpoint, and the file that ends it, were written to their ends."""
    try:
        json.loads(state.read_text())
        with safe_open(state.with_name("model.safetensors"), "pt"):
            pass
    except (ValueError, OSError, SafetensorError):
        return False
    return True
