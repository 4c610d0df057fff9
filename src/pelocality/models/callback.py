"""Locality and symmetry while a model trains: a callback for transformers' Trainer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, Literal

import pandas as pd
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pelocality._checks import count
from pelocality.encodings import Encoding
from pelocality.metrics import adjusted_locality, direction_balance, measure
from pelocality.models._words import check_words
from pelocality.models.families._wrapper import pretrained
from pelocality.models.identical_words import positional_attention
from pelocality.models.logits import PositionalLogits, positional_logits
from pelocality.models.result import PositionalAttention

logger = logging.getLogger(__name__)

Source = Literal["attention", "logits", "encodings"]
METRICS = ("locality", "symmetry", "relative_asymmetry", "adjusted_locality", "direction_balance")
NAME = "pelocality"


class LocalityCallback(TrainerCallback):
    """Measure the locality and symmetry of a model every so many steps of its training, layer by layer.

        for A of a layer, averaged over words, and the mean over its heads:
        Loc(A), Sym(A), relative asymmetry, adjusted locality, direction balance

    The numbers are logged by the Trainer, under ``pelocality/locality/layer_0`` and so on (the first part is ``name``):
    every reporter of the Trainer gets them, and ``log_history`` holds them, also in a run that resumes from a
    checkpoint. Measuring does not change training: no random number is drawn, and mode and attention implementation
    are restored.

    Args:
        trainer: The Trainer that gets this callback, and only this one, with ``trainer.add_callback``.
        every: Steps between measurements; the first is before the first step, the last after the last. With
            ``load_best_model_at_end`` this is the model of the last step as well; the best one is loaded afterwards.
        source: The matrices to measure. ``"attention"``: identical-word attention, of any model. ``"logits"``: the
            position-only term where it has a closed form (learned tables in the first layer, T5, ALiBi, ...).
            ``"encodings"``: the encodings of this library in the model, in the order of its modules.
        length: Positions n.
        words: Words to average over, or how many to draw, as for `positional_attention`; not used for encodings and
            exact closed forms.
        seed: Seed of the words.
        name: The first part of this callback's keys. Two callbacks on one Trainer, of two sources or lengths, need
            two names.

    Raises:
        TypeError: ``trainer`` is not a Trainer, or an argument is of another type than stated.
        ValueError: ``every``, ``length`` or ``words`` below 1, no words, an empty name, or an unknown source. When
            training starts: a model that the source cannot measure, a Trainer other than ``trainer``, or one with two
            callbacks of one name.

    Note:
        In distributed training the first process measures and the others wait at the next step. Measuring costs
        ``words`` sequences of ``length`` tokens each time.

    Examples:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        ...     vocab_size=99, max_position_embeddings=32)
        >>> ids = list(range(10, 26))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     settings = TrainingArguments(folder, max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True,
        ...         logging_strategy="no", save_strategy="no")
        ...     rows = [{"input_ids": ids, "labels": ids}] * 8
        ...     trainer = Trainer(BertForMaskedLM(tiny), settings, train_dataset=rows)
        ...     callback = LocalityCallback(trainer, every=1, length=16, words=2)
        ...     trainer.add_callback(callback)
        ...     _ = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> callback.table["step"].unique().tolist(), callback.table["layer"].unique().tolist()
        ([0, 1, 2], [0, 1])
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        every: int = 500,
        source: Source = "attention",
        length: int = 64,
        words: int | list[str | int] = 16,
        seed: int = 0,
        name: str = NAME,
    ):
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers Trainer, got {type(trainer).__name__}")
        count("every", every)
        count("length", length)
        check_words(words)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        _check_name(name)
        if source not in ("attention", "logits", "encodings"):
            raise ValueError(f"source must be 'attention', 'logits' or 'encodings', got {source!r}")
        self.trainer, self.every, self.source = trainer, every, source
        self.length, self.words, self.seed, self.name = length, words, seed, name

    @property
    def table(self) -> pd.DataFrame:
        """The measurements so far, those before a resumed checkpoint included: a row per step and layer."""
        return trajectory(self.trainer.state.log_history, name=self.name)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model before its first step."""
        if state is not self.trainer.state:
            raise ValueError(
                "trainer is another Trainer than the one that trains, and the numbers would be logged there; "
                "make one callback for each: trainer.add_callback(LocalityCallback(trainer))"
            )
        callbacks = [each for each in self.trainer.callback_handler.callbacks if isinstance(each, LocalityCallback)]
        if any(each is not self and each.name == self.name for each in callbacks):
            raise ValueError(
                f"two LocalityCallbacks on this Trainer have the name {self.name!r}, and their numbers would mix; "
                "give them different names: LocalityCallback(trainer, name=...)"
            )
        if state.global_step == 0:
            self._measure(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every so many steps and after the last."""
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps or control.should_training_stop:
            self._measure(state, kwargs["model"])

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure the last model where an evaluation or another callback ends training early."""
        if control.should_training_stop:
            self._measure(state, kwargs["model"])

    on_save = on_epoch_end = on_evaluate

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model of the last step, unless that was done or the best model has replaced it."""
        best_loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if not best_loaded or state.best_global_step == state.global_step:
            self._measure(state, kwargs["model"])
        elif not self._measured(state):
            logger.warning(
                "the model of step %d was not measured: the best one, of step %s, has replaced it; add "
                "LocalityCallback after the callback that stops training",
                state.global_step,
                state.best_global_step,
            )

    def _measured(self, state: TrainerState) -> bool:
        """Return whether the model of this step was measured."""
        key = _key(self.name)
        return any(entry["step"] == state.global_step and any(map(key.fullmatch, entry)) for entry in state.log_history)

    def _measure(self, state: TrainerState, model: nn.Module) -> None:
        """Measure and log the model unless that was done at this step."""
        if state.is_world_process_zero and not self._measured(state):
            entries: dict[str, float] = {}
            for layer, matrix, adjusted in self._layers(pretrained(model)):
                measured = measure(matrix)
                values = [measured.locality, measured.symmetry, measured.relative_asymmetry]
                values += [adjusted, direction_balance(matrix)]
                for metric, value in zip(METRICS, values, strict=True):
                    entries[f"{self.name}/{metric}/layer_{layer}"] = value.mean().item()
            control = self.trainer.control
            due = control.should_log
            self.trainer.log(entries)
            control.should_log = due  # logging resets it, and the Trainer would skip its own entry of this step

    def _layers(self, model: Any) -> Iterable[tuple[int, Tensor, Tensor]]:
        """Return the number of each measured layer, its matrices (head, n, n) and their adjusted locality (head,)."""
        if self.source == "encodings":
            encodings = [module for module in model.modules() if isinstance(module, Encoding)]
            if not encodings:
                raise ValueError("source='encodings' found none in the model; attach one, or use source='attention'")
            matrices = [encoding.weights(self.length).detach() for encoding in encodings]
            return zip(range(len(matrices)), matrices, map(adjusted_locality, matrices), strict=True)
        words: dict[str, Any] = {"tokenizer": self.trainer.processing_class, "words": self.words, "seed": self.seed}
        result: PositionalAttention | PositionalLogits = (
            positional_attention(model, length=self.length, progress=False, **words)
            if self.source == "attention"
            else positional_logits(model, self.length, **words)
        )
        return zip(result.layers, result.attention, adjusted_locality(result), strict=True)


def trajectory(log_history: list[dict[str, Any]], *, name: str = NAME) -> pd.DataFrame:
    """Return the measurements of a `LocalityCallback` from a Trainer's log history.

    Args:
        log_history: ``trainer.state.log_history``, or ``log_history`` of a checkpoint's ``trainer_state.json``.
        name: The callback's name.

    Returns:
        A row per step and layer: ``step``, ``layer``, ``locality``, ``symmetry``, ``relative_asymmetry``,
        ``adjusted_locality``, ``direction_balance``; empty where nothing was logged under that name.

    Raises:
        TypeError: A name that is not a string.
        ValueError: An empty name.

    Examples:
        >>> trajectory([{"step": 0, "loss": 3.2}, {"step": 5, "pelocality/locality/layer_0": 0.25}])
           step  layer  locality
        0     5      0      0.25
    """
    _check_name(name)
    pattern = _key(name)
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in log_history:
        for key, value in entry.items():
            match = pattern.fullmatch(key)
            if match:
                index = (entry["step"], int(match["layer"]))
                rows.setdefault(index, {"step": index[0], "layer": index[1]})[match["metric"]] = value
    columns = [column for column in ("step", "layer", *METRICS) if any(column in row for row in rows.values())]
    return pd.DataFrame([rows[index] for index in sorted(rows)], columns=columns)


def encoding_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of every encoding in a model, by name, to exclude them from weight decay.

    Weight decay pulls a parameter to zero, which has different meanings: ``log_decay = 0`` of an `AttenuatedEncoding`
    is a decay of 1, not the absence of an encoding.

    Args:
        model: Any module, such as a model with an encoding attached.

    Returns:
        The parameters, named as in ``model.named_parameters()``, learned or frozen; one that several modules share
        under each of its names. Empty where no encoding is learned.

    Note:
        transformers' Trainer decays them: it excludes only layer norms and names with "bias" or "norm" in them.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> model = nn.ModuleDict({"word": nn.Linear(2, 2), "position": AttenuatedEncoding(decay=0.5, learnable=True)})
        >>> list(encoding_parameters(model))
        ['position.log_decay', 'position.log_symmetry']
        >>> class EncodingTrainer(Trainer):
        ...     def get_decay_parameter_names(self, model):
        ...         names = super().get_decay_parameter_names(model)
        ...         return [name for name in names if name not in encoding_parameters(model)]
    """
    found = {id(p) for module in model.modules() if isinstance(module, Encoding) for p in module.parameters()}
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in found}


def _key(name: str) -> re.Pattern[str]:
    """Return the pattern of the keys of a callback of this name."""
    return re.compile(re.escape(name) + r"/(?P<metric>\w+)/layer_(?P<layer>\d+)")


def _check_name(name: str) -> None:
    """Refuse a name that is not a string, or empty."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if not name:
        raise ValueError("name must not be empty")
