"""Moving a trained model's positions into an encoding: a copy that has it is distilled from the unchanged model."""

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model
from torch import nn
from transformers import TrainerState, TrainingArguments

from pelocality._checks import count, flag, number
from pelocality._display import DisplayMixin
from pelocality.encodings import Encoding
from pelocality.models.attaching.attach import Positions, attach
from pelocality.models.sequence_model import SequenceModel
from pelocality.models.training.distillation import DistillationLoss, DistillationTrainer, pieces


@dataclass(frozen=True, eq=False, repr=False)
class Relocation(DisplayMixin):
    """A model whose positions were moved into an encoding.

    Attributes:
        model: A trained copy of the model, with the encodings attached.
        curve: A row per evaluation: ``tokens`` seen in training, and the held-out losses ``token_loss`` and
            ``mean_loss`` of `distillation_loss`; the first row is before training.
    """

    model: nn.Module
    curve: pd.DataFrame

    def _headline(self) -> str:
        return f"{type(self.model).__name__}, loss on held-out texts"

    def _table(self) -> pd.DataFrame:
        return self.curve


@torch.inference_mode(False)  # training needs gradients, also if the caller disabled them
def relocate(
    model: nn.Module | SequenceModel,
    encoding: Encoding | Sequence[Encoding],
    tokenizer: Any,
    texts: Iterable[str],
    *,
    tokens: int = 250_000,
    length: int = 48,
    batch_size: int = 64,
    learning_rate: float = 3e-4,
    held_out: int = 256,
    every: int = 50,
    position_embeddings: Positions = "disable",
    folder: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Relocation:
    """Train a copy of a model, with an encoding in place of positions, to return the hidden states of the model.

        loss = mean_t (1 - cos(h_t, r_t)) + 1 - cos(mean_t h_t, mean_t r_t)

    with h the last hidden states of the copy and r the last hidden states of the unchanged model. AdamW in
    transformers' Trainer trains all weights, with a warm-up and a linear decay, without dropout. Weights that the model
    has frozen are trained too, except tables of positions, because these may be fixed. The model is not changed.

    Args:
        model: A model that `attach` accepts, with or without a head. In the head, only weights that are also weights of
            the embeddings are trained.
        encoding: As for `attach`: one encoding, or a list with one encoding per layer.
            ``DistanceTable.from_attention(positional_attention(...))`` starts nearest to the model's own positions.
        tokenizer: Its tokenizer.
        texts: Texts like those the model will read, cut into pieces of at most ``length`` tokens, special tokens
            included. All texts are read again if they hold fewer than ``tokens`` tokens.
        tokens: Tokens to train on, with special tokens and without padding. The curve has the number that was read.
        length: Tokens of a piece.
        batch_size: Pieces per step.
        learning_rate: The largest value of the learning rate.
        held_out: The number of pieces kept for the curve, from the end of the texts.
        every: Steps between evaluations, and between checkpoints.
        position_embeddings: As for `attach`.
        folder: Folder for checkpoints. The same call continues from the last checkpoint. None: no checkpoints.
        seed: Seed of the order of the pieces.
        progress: Show the Trainer's progress bar.

    Returns:
        A `Relocation` with the trained copy and its held-out loss during training. The copy has the device and the
        modes of the model, and the same weights are frozen.

    Raises:
        TypeError: Something that is not a transformers model, a tokenizer, an encoding, texts or a number.
        ValueError: As for `attach`; a length beyond the model's positions, token ids beyond its vocabulary, too few
            texts, a model in float16, a learning rate that is not above 0 or with which the loss becomes NaN or
            infinite, or a folder that holds another relocation or checkpoints of another training.
        ImportError: Accelerate is missing (the ``train`` extra).

    Note:
        The Trainer seeds the random generators of this process.

    Examples:
        >>> from pelocality import DistanceTable, positional_attention
        >>> from pelocality.models import distillation_loss
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"?": 0, "the": 1, "old": 2, "mill": 3}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> bert = BertModel(BertConfig(vocab_size=4, **sizes))
        >>> tables = DistanceTable.from_attention(positional_attention(bert, length=8, words=[1, 2]))
        >>> options = {"tokens": 48, "length": 8, "batch_size": 8, "held_out": 8, "progress": False}
        >>> found = relocate(bert, tables, tokenizer, ["the old mill"] * 32, **options)
        >>> found.curve["tokens"].tolist()
        [0, 48]
        >>> distillation_loss(bert, bert, tokenizer, ["the old mill"], length=8).token_loss < 1e-6
        True
    """
    tokens, batch_size = count("tokens", tokens), count("batch_size", batch_size)
    held_out, every, seed = count("held_out", held_out), count("every", every), count("seed", seed, 0, 2**32 - 1)
    learning_rate, progress = number("learning_rate", learning_rate), flag("progress", progress)
    teacher = SequenceModel.of(model)
    if teacher.dtype == torch.float16:  # the least number that AdamW adds to its denominator is 0 there
        raise ValueError("model is in float16, in which AdamW cannot train it; pass model.float() or model.bfloat16()")
    teacher.check_length(length)
    rows = pieces(tokenizer, texts, length, teacher)
    if len(rows) <= held_out:
        raise ValueError(f"texts hold {len(rows)} pieces of {length} tokens, and held_out={held_out}; give more texts")
    trained = copy.deepcopy(teacher.given)
    copied = SequenceModel(trained)
    student, frozen = copied.module, _frozen(copied)
    attach(trained, encoding, position_embeddings=position_embeddings)
    steps = _steps(rows[:-held_out], tokens, batch_size)
    checkpoint = None
    if folder is not None:
        settings: dict[str, Any] = {"tokens": tokens, "length": length, "held_out": held_out, "batch_size": batch_size}
        settings |= {"learning_rate": learning_rate, "every": every, "seed": seed, "steps": steps}
        settings |= {"position_embeddings": position_embeddings, "texts": _digest(rows), "start": _digest(student)}
        checkpoint = _claim(Path(folder), settings)
    with TemporaryDirectory() as temporary, _state_of_accelerate_kept(), _settings_kept(copied):
        arguments = TrainingArguments(
            output_dir=temporary if folder is None else str(folder),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            learning_rate=learning_rate,
            warmup_steps=steps // 10,
            seed=seed,
            eval_strategy="steps",
            eval_steps=every,
            eval_on_start=True,
            logging_strategy="no",
            save_strategy="no" if folder is None else "steps",
            save_steps=every,
            save_total_limit=2,
            report_to="none",
            include_num_input_tokens_seen="non_padding",
            disable_tqdm=not progress,
            use_cpu=teacher.device.type == "cpu",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        data = {"train_dataset": rows[:-held_out], "eval_dataset": rows[-held_out:]}
        trainer = DistillationTrainer(teacher, tokenizer, model=student, args=arguments, **data)
        _train(trainer, frozen, checkpoint)
    curve = _curve(trainer.state.log_history)
    if not np.isfinite(curve).all(axis=None):
        raise ValueError(f"learning_rate {learning_rate} is too large: the held-out loss is not finite any more")
    return Relocation(trained, curve)


@contextmanager
def _state_of_accelerate_kept() -> Iterator[None]:
    """Restore accelerate's settings of this process, such as its mixed precision, which a Trainer replaces."""
    from accelerate.state import AcceleratorState, GradientState, PartialState  # an extra, needed here alone

    states = [each._shared_state for each in (AcceleratorState, GradientState, PartialState)]
    before = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)


@contextmanager
def _settings_kept(model: SequenceModel) -> Iterator[None]:
    """Restore what a Trainer changes of a model beside its weights: device, modes and ``use_cache``."""
    device, modes = model.device, [(module, module.training) for module in model.given.modules()]
    use_cache = getattr(model.config, "use_cache", None)
    yield  # if training fails, the model is not returned and needs no restoring
    model.given.to(device)
    for module, training in modes:
        module.training = training
    if use_cache is not None:
        model.config.use_cache = use_cache
    model.module.__dict__.pop("_is_accelerate_prepared", None)  # a later Trainer would not prepare it


def _train(trainer: DistillationTrainer, frozen: list[nn.Parameter], checkpoint: Path | None) -> None:
    """Train all weights to the last step, from a checkpoint if there is one, and freeze the given weights again."""
    if checkpoint is not None and checkpoint.name == f"checkpoint-{trainer.args.max_steps}":
        # The Trainer would train a step more.
        load_model(trainer.model, checkpoint / "model.safetensors")  # type: ignore[arg-type]
        trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        return
    for weight in frozen:
        weight.requires_grad_(True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    for weight in frozen:
        weight.requires_grad_(False)


def _frozen(model: SequenceModel) -> list[nn.Parameter]:
    """Return the frozen weights of a model, except the weights of positions, because these may be fixed."""
    family, base = model.family, model.module
    of_positions = {weight for table in family.position_tables(base) for weight in table.parameters()}
    for attention in family.attention_modules(base):
        of_positions |= {attention.get_parameter(name) for name in family.position_weights}
    weights = set(base.parameters()) - of_positions
    return [weight for weight in weights if weight.is_floating_point() and not weight.requires_grad]


def _steps(rows: list[list[int]], tokens: int, batch_size: int) -> int:
    """Return the number of batches that hold about this many tokens; the last batch of an epoch may be smaller."""
    of_epoch = sum(map(len, rows))
    per_epoch = math.ceil(len(rows) / batch_size)
    epochs, rest = divmod(tokens, of_epoch)
    return epochs * per_epoch + min(per_epoch, math.ceil(rest * len(rows) / (batch_size * of_epoch)))


def _curve(log_history: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the held-out losses of a history; a step that a resumed run evaluated again has one row."""
    history = pd.DataFrame([row for row in log_history if "eval_token_loss" in row])
    history = history.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
    tokens = history["num_input_tokens_seen"].astype(int)
    return pd.DataFrame({"tokens": tokens, **{name: history[f"eval_{name}"] for name in DistillationLoss._fields}})


# ---- the folder of checkpoints


def _claim(folder: Path, settings: dict[str, Any]) -> Path | None:
    """Record the settings in the folder, or check them; return its last complete checkpoint."""
    record = folder / "relocation.json"
    # The Trainer would resume from the checkpoints of another training, and delete them.
    if not record.exists() and not any(folder.glob("checkpoint-*")):
        folder.mkdir(parents=True, exist_ok=True)
        written = record.with_suffix(".writing")
        written.write_text(json.dumps(settings, indent=1))
        written.replace(record)  # so that the file is never half written
    recorded = json.loads(record.read_text()) if record.exists() else {}
    if differing := [name for name in settings if recorded.get(name) != settings[name]]:
        raise ValueError(f"folder {folder} holds a training with other {', '.join(differing)}; choose another folder")
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_whole(path)]
    return max(complete, key=lambda path: int(path.name.partition("-")[2]), default=None)


def _digest(content: Any) -> str:
    """Return a short hash of the pieces, or of all numbers of a model."""
    is_model = isinstance(content, nn.Module)
    digest = hashlib.sha256(b"" if is_model else json.dumps(content).encode())
    for name, tensor in sorted(content.state_dict().items()) if is_model else ():
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # a scalar has no bytes to view
        digest.update(name.encode() + numbers.numpy().tobytes())
    return digest.hexdigest()[:16]


def _is_whole(state: Path) -> bool:
    """Return whether the weights of a checkpoint, and the file that ends it, were written to their ends."""
    try:
        json.loads(state.read_text())
        with safe_open(state.with_name("model.safetensors"), "pt"):
            pass
    except (ValueError, OSError, SafetensorError):
        return False
    return True
