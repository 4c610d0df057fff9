"""Locality and symmetry while a model trains: a callback for transformers' Trainer."""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

import pandas as pd
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pelocality._checks import count
from pelocality.encodings import Encoding
from pelocality.metrics import adjusted_locality, direction_balance, measure
from pelocality.models.families._wrapper import pretrained
from pelocality.models.identical_words import positional_attention
from pelocality.models.logits import positional_logits

logger = logging.getLogger(__name__)

Source = Literal["attention", "logits", "encodings"]
METRICS = ("locality", "symmetry", "relative_asymmetry", "adjusted_locality", "direction_balance")
NAME = "pelocality"


class LocalityCallback(TrainerCallback):
    """Measure the positions of a model every so many steps of its training, layer by layer.

        for A of a layer, averaged over words, and the mean over its heads:
        Loc(A), Sym(A), relative asymmetry, adjusted locality, direction balance

    The numbers go through the Trainer's own loggers, under ``pelocality/locality/layer_0`` and so on (the first part
    is ``name``), and so into its ``log_history``: whatever reports training reports them, and a run that resumes from a
    checkpoint keeps those from before. Measuring changes nothing about training: no random number is drawn, and mode
    and attention implementation come back.

    Args:
        trainer: The Trainer to watch; add the callback to it, and to no other, with ``trainer.add_callback``.
        every: Steps between measurements; the first is before the first step, the last after the last. With
            ``load_best_model_at_end`` that is the model of the last step too, not the best one, which is loaded after.
        source: What is measured. ``"attention"``: identical-word attention, of any model. ``"logits"``: the
            position-only term where it has a closed form (learned tables in the first layer, T5, ALiBi, ...).
            ``"encodings"``: the encodings of this library that the model holds, in the order of its modules.
        length: Positions n.
        words: Identical words to average over, or how many to draw, as for `positional_attention`; of encodings and
            of closed forms, which are exact, none are needed.
        seed: Seed of the words.
        name: What the keys of this callback start with. Two callbacks on one Trainer, of two sources or lengths, need
            two names.

    Raises:
        TypeError: ``trainer`` is no Trainer, or an argument is of another type than stated.
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
        _check_words(words)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        _check_name(name)
        if source not in ("attention", "logits", "encodings"):
            raise ValueError(f"source must be 'attention', 'logits' or 'encodings', got {source!r}")
        self.trainer, self.every, self.source = trainer, every, source
        self.length, self.words, self.seed, self.name = length, words, seed, name

    @property
    def table(self) -> pd.DataFrame:
        """What was measured so far, earlier runs that this one resumed included: a row per step and layer."""
        return trajectory(self.trainer.state.log_history, name=self.name)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model before its first step."""
        if state is not self.trainer.state:
            raise ValueError(
                "LocalityCallback was made for another Trainer than the one that trains, and would log into that; "
                "make one for each: trainer.add_callback(LocalityCallback(trainer))"
            )
        others = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, LocalityCallback)]
        if any(one is not self and one.name == self.name for one in others):
            raise ValueError(
                f"two LocalityCallbacks on this Trainer have the name {self.name!r}, and their numbers would mix; "
                "give each its own: LocalityCallback(trainer, name=...)"
            )
        if state.global_step == 0:
            self._measure(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every so many steps, and after the last."""
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps:
            self._measure(state, kwargs["model"])
        self._measure_if_stopping(state, control, kwargs["model"])

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure the last model where an evaluation ends training early."""
        self._measure_if_stopping(state, control, kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure the last model where a callback behind this one ended training."""
        self._measure_if_stopping(state, control, kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the last model where a callback behind this one ended training."""
        self._measure_if_stopping(state, control, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the trained model, if it was not yet, and is that of the last step still."""
        best_came_back = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if not best_came_back or state.best_global_step == state.global_step:
            self._measure(state, kwargs["model"])
        elif not self._measured(state):
            logger.warning(
                "the model of step %d was not measured: the best one, of step %s, had taken its place; add "
                "LocalityCallback after the callback that stops training",
                state.global_step,
                state.best_global_step,
            )

    def _measure_if_stopping(self, state: TrainerState, control: TrainerControl, model: nn.Module) -> None:
        if control.should_training_stop:
            self._measure(state, model)

    def _measured(self, state: TrainerState) -> bool:
        key = _key(self.name)
        return any(entry["step"] == state.global_step and any(map(key.fullmatch, entry)) for entry in state.log_history)

    def _measure(self, state: TrainerState, model: nn.Module) -> None:
        if state.is_world_process_zero and not self._measured(state):
            measured = self._matrices(pretrained(model))
            control = self.trainer.control
            due = control.should_log
            self.trainer.log(_entries(self.name, *measured))
            control.should_log = due  # logging takes it back, and the Trainer would skip its own entry of this step

    def _matrices(self, model: Any) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """The layers measured, and for each a matrix (head, n, n) and its adjusted locality (head,)."""
        tokenizer = self.trainer.processing_class
        if self.source == "attention":
            result = positional_attention(
                model, tokenizer, length=self.length, words=self.words, seed=self.seed, progress=False
            )
            return list(result.layers), list(result.attention), list(adjusted_locality(result))
        if self.source == "logits":
            logits = positional_logits(model, self.length, tokenizer=tokenizer, words=self.words, seed=self.seed)
            return list(logits.layers), list(logits.weights()), list(adjusted_locality(logits))
        encodings = [module for module in model.modules() if isinstance(module, Encoding)]
        if not encodings:
            raise ValueError("source='encodings' found none in the model; attach one, or use source='attention'")
        layers = list(range(len(encodings)))
        matrices = [encoding.weights(self.length).detach() for encoding in encodings]
        return layers, matrices, [adjusted_locality(matrix) for matrix in matrices]


def trajectory(log_history: list[dict[str, Any]], *, name: str = NAME) -> pd.DataFrame:
    """Read what a `LocalityCallback` logged out of a Trainer's log history.

    Args:
        log_history: ``trainer.state.log_history``, or the list of that name in a checkpoint's ``trainer_state.json``.
        name: The callback's name.

    Returns:
        A row per step and layer: ``step``, ``layer``, ``locality``, ``symmetry``, ``relative_asymmetry``,
        ``adjusted_locality``, ``direction_balance``; empty where nothing was logged under that name.

    Raises:
        TypeError: A name that is no text.
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
                place = (entry["step"], int(match["layer"]))
                rows.setdefault(place, {"step": place[0], "layer": place[1]})[match["metric"]] = value
    columns = [column for column in ("step", "layer", *METRICS) if any(column in row for row in rows.values())]
    return pd.DataFrame([rows[place] for place in sorted(rows)], columns=columns)


def encoding_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of every encoding in a model, by name: what weight decay should leave alone.

    Decay pulls a parameter to zero, and what zero means differs: ``log_decay = 0`` of an `AttenuatedEncoding` is a
    decay of 1, not no encoding.

    Args:
        model: Any module, such as a model with an encoding attached.

    Returns:
        The parameters, named as in ``model.named_parameters()``, learned or frozen; one that several modules share
        under each of its names. Empty where no encoding is learned.

    Note:
        transformers' Trainer decays them: it leaves alone only layer norms, and names with "bias" or "norm" in them.

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
    return re.compile(re.escape(name) + r"/(?P<metric>\w+)/layer_(?P<layer>\d+)")


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be text, got {name!r}")
    if not name:
        raise ValueError("name must not be empty")


def _check_words(words: int | list[str | int]) -> None:
    """Refuse what no model could be asked about; whether it knows the words shows when training starts."""
    if isinstance(words, list | tuple):
        if not words:
            raise ValueError("words is empty; give at least one word, or a count to draw")
        if any(isinstance(word, bool) or not isinstance(word, str | int) for word in words):
            raise TypeError(f"words must hold strings or token ids, got {words!r}")
    elif isinstance(words, bool) or not isinstance(words, int):
        raise TypeError(f"words must be a count, or a list of words and token ids, got {words!r}")
    else:
        count("words", words)


def _entries(name: str, layers: list[int], matrices: list[Tensor], adjusted: list[Tensor]) -> dict[str, float]:
    entries: dict[str, float] = {}
    for layer, matrix, beyond_chance in zip(layers, matrices, adjusted, strict=True):
        measured = measure(matrix)
        values = {
            "locality": measured.locality,
            "symmetry": measured.symmetry,
            "relative_asymmetry": measured.relative_asymmetry,
            "adjusted_locality": beyond_chance,
            "direction_balance": direction_balance(matrix),
        }
        entries |= {f"{name}/{metric}/layer_{layer}": value.mean().item() for metric, value in values.items()}
    return entries
