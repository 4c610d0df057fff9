"""What the scripts with long runs share: a folder holds one run, and a run that was cut off goes on where it was."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_model
from transformers import Trainer, TrainerState


def fingerprint(held: bytes) -> str:
    """A name for what a file holds, wherever it lies."""
    return hashlib.sha256(held).hexdigest()[:16]


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there complete or not at all, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def claim(folder: Path, ingredients: dict[str, Any]) -> None:
    """Note in a folder what its run is made of, before the run starts or goes on.

    Raises:
        ValueError: the folder holds a run made of something else, or one that does not say of what.
    """
    note, asked = folder / "run.json", json.loads(json.dumps(ingredients))
    if not note.exists():
        if any(folder.glob("checkpoint-*")) or (folder / "result.json").exists():
            raise ValueError(f"{folder} holds a run and not what it was made of; choose another --output")
        write_whole(note, json.dumps(asked, indent=1))
    held = json.loads(note.read_text())
    other = [name for name in {**held, **asked} if held.get(name) != asked.get(name)]
    if other:
        was, wanted = (", ".join(f"{name} {of.get(name)}" for name in other) for of in (held, asked))
        raise ValueError(f"{folder} holds a run with {was}, not {wanted}; choose another --output")


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint whose state was written to the end; the Trainer writes that file last."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = [path for path, step in steps.items() if step.isdecimal()]
    for path in sorted(found, key=lambda path: int(steps[path]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return path
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)  # cut off while it was written
    return None


def train(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train to the end, from a checkpoint where there is one.

    A checkpoint of the last step is only read: a Trainer that resumes there makes one step more.
    """
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step >= state.max_steps:
            load_model(trainer.model, checkpoint / "model.safetensors")
            trainer.state = state
            return
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
