"""Shared by the studies that fine-tune the models of `cells`: their flags, the healed models, and the training."""

import argparse
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    set_seed,
)

from experiments import cells
from experiments.runs import DATA, fine_tuning_arguments, last_complete_checkpoint, packaged_model, train
from pelocality import load


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str], output: Path) -> None:
    """Add the flags of the model, of healing and of fine-tuning."""
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="for healing, one paragraph a line")
    parser.add_argument("--model", type=Path, help="folder of an encoder that `attach` takes; default: MiniLM")
    parser.add_argument("--cells", nargs="+", choices=names, default=list(names))
    parser.add_argument("--tokens", type=int, default=100_000, help="of healing")
    parser.add_argument("--length", type=int, default=64, help="tokens of a table, a piece of text and a pair, at most")
    parser.add_argument("--words", type=int, default=32, help="identical words that positions are measured on")
    parser.add_argument("--held-out", type=int, default=128, help="pieces of text that are not healed on")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast, on a CPU as on a GPU")
    workers = 6 if torch.cuda.is_available() else 1
    parser.add_argument("--workers", type=int, default=workers, help="runs at a time; several fill a GPU, default 6")
    parser.add_argument("--output", type=Path, default=output, help="folder for runs, table and figure")
    parser.add_argument("--smoke", action="store_true", help="a tiny untrained model and little data: to see it run")


SMOKE = {"tokens": 400, "length": 24, "words": 2, "held_out": 8, "epochs": 1.0, "batch": 8}


def source(arguments: argparse.Namespace) -> Path:
    """Return the folder of the model to start from; with --smoke a tiny BERT, made once."""
    if arguments.smoke:
        cells.load(cells.paragraphs(arguments.text), arguments.output, smoke=True)
        return Path(arguments.output / "model")
    return Path(arguments.model or packaged_model())


def texts(arguments: argparse.Namespace, seed: int) -> tuple[list[str], list[str]]:
    """Return as many paragraphs as healing reads, in an order of the seed, and others that no seed heals on."""
    every = cells.paragraphs(arguments.text)
    tenth = max(1, len(every) // 10)
    order = np.random.default_rng(seed).permutation(range(tenth, len(every)))
    words, found = arguments.tokens + arguments.held_out * arguments.length, []
    for place in order:
        found.append(every[place])
        words -= len(every[place].split())
        if words <= 0:
            break
    return found, every[:tenth]


def healed_folder(cell: str, seed: int, arguments: argparse.Namespace) -> Path:
    """Return the folder of the model of a cell, which `relocate` has trained towards the untouched one."""
    start = source(arguments)
    folder: Path = arguments.output / "healed" / f"{cell.replace(' ', '-')}-{seed}"
    if cell == "original" or folder.exists():
        return start if cell == "original" else folder
    model, tokenizer = AutoModel.from_pretrained(start).eval(), AutoTokenizer.from_pretrained(start)
    model.to(device())
    checkpoints = folder.with_name(f"{folder.name}-checkpoints")
    options = {name: getattr(arguments, name) for name in ("tokens", "length", "held_out", "bf16", "words")}
    read = texts(arguments, seed)[0]
    found = cells.relocated(cell, model, tokenizer, read, folder=checkpoints, seed=seed, **options)
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    found.model.save_pretrained(unfinished)
    found.curve.to_csv(unfinished / "curve.csv", index=False)
    unfinished.rename(folder)
    shutil.rmtree(checkpoints)
    return folder


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    """Return the context of bfloat16 with --bf16, on this machine's device."""
    return torch.autocast(device(), torch.bfloat16, enabled=arguments.bf16)


def device() -> str:
    """Return the device to train on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def with_new_head(path: Path, cell: str, seed: int, **head: Any) -> nn.Module:
    """Return the model of a cell from a folder, with its encoding if it has one, below a new head."""
    set_seed(seed)  # of the head's weights
    if cell == "original":
        return AutoModelForSequenceClassification.from_pretrained(path, **head).to(device())
    return load(path, model_class=AutoModelForSequenceClassification, **head).to(device())


def tokenized(rows: Dataset, tokenizer: Any, length: int) -> Dataset:
    """Return texts, or pairs of texts, as tokens beside their label."""
    texts = [name for name in ("premise", "hypothesis") if name in rows.column_names]
    return rows.map(
        lambda batch: tokenizer(*(batch[name] for name in texts), truncation=True, max_length=length),
        batched=True,
        remove_columns=[name for name in rows.column_names if name != "label"],
    )


def fine_tune(
    model: nn.Module,
    tokenizer: Any,
    rows: Dataset,
    seed: int,
    folder: Path,
    arguments: argparse.Namespace,
    loss: Callable[..., Any] | None = None,
) -> Trainer:
    """Return the Trainer of a model that it has trained on the rows; checkpoints in the folder are for resuming."""
    trainer = Trainer(
        model,
        fine_tuning_arguments(
            folder,
            seed,
            arguments,
            use_cpu=not torch.cuda.is_available(),
            logging_strategy="no",
            disable_tqdm=True,
            average_tokens_across_devices=False,  # the loss is a mean over the batch
        ),
        train_dataset=tokenized(rows, tokenizer, arguments.length),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=loss,
    )
    trainer.remove_callback(PrinterCallback)
    train(trainer, last_complete_checkpoint(folder))
    model.eval()
    return trainer


def forget_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of a run whose result is stored."""
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)


def side_by_side(run: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """Yield what a function returns for each of the jobs, in their order, several processes at a time."""
    if workers == 1:
        yield from (run(*job) for job in jobs)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))  # of each process
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, *zip(*jobs, strict=True))
