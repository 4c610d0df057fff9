"""Pre-train a small model with learned positions, none, an attenuated encoding or another one.

    python -m experiments.pretrain --output runs/story --steps 200      # the story in examples/data
    python -m experiments.pretrain books.txt.gz --output runs/learned-0 --seed 0
    python -m experiments.pretrain books.txt.gz --output runs/attenuated --encoding attenuated --decay 0.5
    torchrun --nproc_per_node 2 -m experiments.pretrain books.txt.gz --output runs/learned-0 --batch 16

Encoders predict masked words, decoders the next word. The text has one paragraph a line. Every fiftieth run of
paragraphs is held out; a WordPiece tokenizer is trained on the rest, once per text, and stored beside the output
folder. A killed run resumes from its last complete checkpoint when the same command is repeated, with the same outcome;
other flags or another text are refused, and a complete run only prints its result. The output folder holds run.json
(flags and text), checkpoints, trajectory.csv (metrics per layer; not with concat and sequence) and result.json.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from experiments.past_locality import PastLocality
from experiments.runs import DATA, claim, fingerprint, last_complete_checkpoint, lines_of, train, write_atomically
from experiments.small_models import ENCODINGS, FAMILIES, MIXED, make_model
from pelocality import LocalityCallback
from pelocality.models.training.callback import encoding_parameters, trajectory

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# flags of an attenuated encoding and their defaults
ATTENUATED = {"decay": 0.5, "symmetry": 1.0, "form": "logits", "learnable": False}
# glibc returns each large tensor to the kernel and asks for it again: half of a small model's step time on a CPU
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35)}


class EncodingTrainer(Trainer):
    """A Trainer without weight decay on encodings: decay would pull log_decay to 0, a decay of 1."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay."""
        return [name for name in super().get_decay_parameter_names(model) if name not in encoding_parameters(model)]


def split_paragraphs(path: Path) -> tuple[list[str], list[str]]:
    """Return training and held-out paragraphs; every fiftieth run of (at most) 100 paragraphs is held out."""
    lines = [line.strip() for line in lines_of(path) if line.strip()]
    run = min(100, len(lines) // 50)
    if run == 0:
        raise ValueError(f"{path} has {len(lines)} paragraphs; at least 50 are needed")
    parts: tuple[list[str], list[str]] = ([], [])
    for number, line in enumerate(lines):
        parts[number // run % 50 == 49].append(line)
    return parts


def train_tokenizer(text: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(text, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def blocks(text: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Dataset:
    """Return numbered blocks of `length` tokens, joined across paragraphs, between [CLS] and [SEP]."""
    pending: list[int] = []
    rows: list[list[int]] = []
    for ids in tokenizer(text, add_special_tokens=False)["input_ids"]:
        pending += ids
        while len(pending) >= length - 2:
            rows.append([tokenizer.cls_token_id, *pending[: length - 2], tokenizer.sep_token_id])
            pending = pending[length - 2 :]
    if not rows:
        raise ValueError(f"{len(text)} paragraphs do not fill one block of --length {length}; give a longer text")
    return Dataset.from_dict({"input_ids": rows, "number": range(len(rows))})


def prepare(arguments: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, Dataset, Dataset]:
    """Return tokenizer, training and held-out blocks: created by the first run on a text, read by later ones.

    A tokenizer trained twice on one text differs, since ties between equally frequent pieces are broken at random.
    """
    name = f"text-{arguments.vocabulary}-{arguments.length}-{fingerprint(arguments.text.read_bytes())}"
    folder = arguments.output.parent / name
    if not folder.exists():
        train_text, held_out_text = split_paragraphs(arguments.text)
        tokenizer = train_tokenizer(train_text, arguments.vocabulary)
        with TemporaryDirectory(prefix="unfinished-", dir=folder.parent) as unfinished:
            prepared = Path(unfinished) / name
            tokenizer.save_pretrained(prepared)
            blocks(train_text, tokenizer, arguments.length).save_to_disk(prepared / "train")
            blocks(held_out_text, tokenizer, arguments.length).save_to_disk(prepared / "held-out")
            with suppress(OSError):  # a parallel run was faster: use its tokenizer
                prepared.rename(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    train, held_out = (load_from_disk(folder / part) for part in ("train", "held-out"))
    if arguments.family == "gpt2":
        return tokenizer, next_words(train), next_words(held_out)
    share = arguments.masked
    # held-out masks are the same in every run
    return tokenizer, masked(train, tokenizer, share, 1 + arguments.seed), masked(held_out, tokenizer, share, seed=0)


def next_words(numbered: Dataset) -> Dataset:
    """Return the blocks with every token to predict from those before it, which the model shifts itself."""
    return numbered.with_transform(lambda batch: {"input_ids": batch["input_ids"], "labels": batch["input_ids"]})


def masked(numbered: Dataset, tokenizer: PreTrainedTokenizerFast, share: float, seed: int) -> Dataset:
    """Return the blocks with a share of their tokens to predict: 80 % masked, 10 % replaced, 10 % kept, as in BERT.

    The tokens depend on the seed and the block's number alone, so neither a restart nor the number of processes
    changes them; every block has equally many.
    """

    def mask(block: list[int], number: int) -> tuple[list[int], list[int]]:
        generator = np.random.default_rng([seed, number])
        ids = np.array(block)
        labels = np.full(len(ids), -100)
        places = 1 + generator.permutation(len(ids) - 2)[: round(share * (len(ids) - 2))]
        labels[places] = ids[places]
        fate = generator.random(len(places))
        ids[places[fate < 0.8]] = tokenizer.mask_token_id
        replaced = places[fate >= 0.9]
        ids[replaced] = generator.integers(len(SPECIAL), len(tokenizer), len(replaced))
        return ids.tolist(), labels.tolist()

    def mask_batch(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        pairs = [mask(block, number) for block, number in zip(batch["input_ids"], batch["number"], strict=True)]
        ids, labels = zip(*pairs, strict=True)
        return {"input_ids": list(ids), "labels": list(labels)}

    return numbered.with_transform(mask_batch)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the given flags, or those of this process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    story = DATA / "text.txt"
    parser.add_argument("text", type=Path, nargs="?", default=story, help="one paragraph a line; may be .gz")
    parser.add_argument("--output", type=Path, required=True, help="folder of this run")
    parser.add_argument("--family", choices=FAMILIES, default="bert")
    parser.add_argument("--encoding", choices=ENCODINGS, default="learned")
    parser.add_argument("--decay", type=float, nargs="+", help="the paper's w, or one for each head; default 0.5")
    parser.add_argument("--symmetry", type=float, nargs="+", help="the paper's s, or one for each head; default 1")
    parser.add_argument("--form", choices=("weights", "logits"), help="default logits")
    parser.add_argument("--learnable", action="store_true", default=None, help="learn decay and symmetry")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens per block; long blocks learn positions slowly")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--masked", type=float, help="share of the tokens to predict; default 0.3, BERT's is 0.15")
    parser.add_argument("--batch", type=int, default=32, help="sequences per process and step")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=100, help="steps between measurements and checkpoints")
    parser.add_argument("--words", type=int, default=16, help="identical words per measurement")
    parser.add_argument("--dropout", type=float, default=0.0, help="0 by default: short runs see no text twice")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order, masks and dropout")
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="mixed precision; default on a GPU only, as most CPUs are three times slower with it",
    )
    arguments = parser.parse_args(words)
    for name in ("decay", "symmetry"):
        given = getattr(arguments, name)
        setattr(arguments, name, given[0] if given and len(given) == 1 else given)
    for name, default in ATTENUATED.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.encoding != "attenuated":
            parser.error(f"--{name} needs --encoding attenuated, got {arguments.encoding}")
    if arguments.encoding in MIXED and arguments.family != "bert":
        parser.error(f"--encoding {arguments.encoding} needs --family bert, got {arguments.family}")
    if arguments.family == "gpt2" and arguments.masked is not None:
        parser.error("--masked needs an encoder; gpt2 predicts every next word")
    if arguments.family != "gpt2" and arguments.masked is None:
        arguments.masked = 0.3
    return arguments


def run_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what identifies a run: flags, content of the text, number of processes; no paths."""
    flags = {name: value for name, value in vars(arguments).items() if name not in ("text", "output")}
    return flags | {
        "text": fingerprint(arguments.text.read_bytes()),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def train_and_save(arguments: argparse.Namespace, result: Path) -> None:
    """Train and measure; write the result file last."""
    settings = TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=64,
        prediction_loss_only=True,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.steps // 10,
        weight_decay=0.01,
        bf16=arguments.bf16,
        seed=arguments.seed,
        logging_steps=arguments.every,
        save_steps=arguments.every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        # the model's loss is already a mean over its batch; the Trainer would multiply it by the number of devices
        average_tokens_across_devices=False,
    )
    with settings.main_process_first():
        tokenizer, train_blocks, held_out = prepare(arguments)
    checkpoint = last_complete_checkpoint(arguments.output)
    if checkpoint and PreTrainedTokenizerFast.from_pretrained(checkpoint).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the tokenizer of {arguments.output} was trained again since it started; choose another --output"
        )

    measured = arguments.encoding not in MIXED  # P is a second matrix there, which is not taken for attention
    following = LocalityCallback(every=arguments.every, length=arguments.length, words=arguments.words)
    set_seed(arguments.seed)
    trainer = EncodingTrainer(
        make_model(arguments, tokenizer),
        settings,
        train_dataset=train_blocks,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[following] if measured else [],
    )
    if arguments.family == "gpt2":
        texts = torch.tensor(held_out[:64]["input_ids"])
        trainer.add_callback(PastLocality(arguments.output, tokenizer, texts, arguments.every))
    train(trainer, checkpoint)

    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        if measured:
            trajectory(trainer.state.log_history).to_csv(arguments.output / "trajectory.csv", index=False)
        # the last batch of an epoch may be smaller
        tokens = arguments.steps * settings.train_batch_size * settings.world_size * arguments.length
        found = {"held_out_loss": loss, "held_out_perplexity": math.exp(loss), "tokens": tokens}
        write_atomically(result, json.dumps(run_settings(arguments) | found, indent=1))


def pretrained(text: Path, folder: Path, flags: Sequence[object]) -> tuple[argparse.Namespace, Any, Any, Dataset]:
    """Return the flags, the model, the tokenizer and the held-out blocks of a run, which is made or resumed first."""
    pretrain(text, {folder: flags}, workers=1)
    settings = parse([str(part) for part in (text, "--output", folder, *flags)])
    tokenizer, _, held_out = prepare(settings)
    model = make_model(settings, tokenizer)
    load_model(model, last_complete_checkpoint(folder) / "model.safetensors")
    return settings, model.eval(), tokenizer, held_out


def pretrain(text: Path, runs: dict[Path, Sequence[object]], workers: int) -> None:
    """Run this module once per folder with its flags, `workers` at a time; each run logs to a file of its name.

    Raises:
        ValueError: a folder holds another run.
        RuntimeError: a run failed, and no further one was begun; the message contains the end of its log.
    """
    commands = {folder: [str(part) for part in (text, "--output", folder, *flags)] for folder, flags in runs.items()}
    for folder, flags in commands.items():
        claim(folder, run_settings(parse(flags)))
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {"OMP_NUM_THREADS": threads} | KEEP_MEMORY | os.environ

    def one(folder: Path, flags: Sequence[str]) -> None:
        if (folder / "result.json").exists():
            return
        log = folder.parent / f"{folder.name}.log"
        with log.open("a") as file:
            command = [sys.executable, "-m", "experiments.pretrain", *flags]
            finished = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        if finished.returncode:
            raise RuntimeError(f"{folder.name} failed:\n{log.read_text()[-2000:]}")

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, commands, commands.values()):  # a failure cancels the runs that have not begun
            pass


def main() -> None:
    arguments = parse()
    claim(arguments.output, run_settings(arguments))
    result = arguments.output / "result.json"
    if not result.exists():
        train_and_save(arguments, result)
    if os.environ.get("RANK", "0") == "0":
        found = json.loads(result.read_text())
        loss, tokens = found["held_out_loss"], found["tokens"]
        print(f"{arguments.encoding}: held-out loss {loss:.3f} after {tokens:,} tokens")


if __name__ == "__main__":
    main()
