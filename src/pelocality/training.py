"""Locality and symmetry while a model trains: a callback for transformers' Trainer."""

from __future__ import annotations

import re
from typing import Any, Literal

import pandas as pd
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pelocality.architectures import pretrained
from pelocality.encodings import Encoding
from pelocality.extract import positional_attention, positional_logits
from pelocality.metrics import adjusted_locality, direction_balance, measure

Source = Literal["attention", "logits", "encodings"]
METRICS = ("locality", "symmetry", "relative_asymmetry", "adjusted_locality", "direction_balance")
_KEY = re.compile(r"pelocality/(?P<metric>\w+)/layer_(?P<layer>\d+)")


class LocalityCallback(TrainerCallback):
    """Measure the positions of a model every so many steps of its training, layer by layer.

        for A of a layer, averaged over words, and the mean over its heads:
        Loc(A), Sym(A), relative asymmetry, adjusted locality, direction balance

    The numbers go through the Trainer's own loggers, under ``pelocality/locality/layer_0`` and so on, and so into its
    ``log_history``: whatever reports training reports them, and a run that resumes from a checkpoint keeps those from
    before. Measuring changes nothing about training: no random number is drawn, and mode and attention implementation
    come back.

    Args:
        trainer: The Trainer to watch; add the callback to it with ``trainer.add_callback``.
        every: Steps between measurements; the first is before the first step, the last after the last.
        source: What is measured. ``"attention"``: identical-word attention, of any model. ``"logits"``: the
            position-only term where it has a closed form (learned tables in the first layer, T5, ALiBi, ...).
            ``"encodings"``: the encodings of this library that the model holds, in the order of its modules.
        length: Positions n.
        words: Identical words to average over, or how many to draw, as for `positional_attention`.
        seed: Seed of the words.

    Raises:
        TypeError: ``trainer`` is no Trainer.
        ValueError: ``every`` below 1, or an unknown source; when training starts, a model that the source cannot
            measure.

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
    ):
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers Trainer, got {type(trainer).__name__}")
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        if source not in ("attention", "logits", "encodings"):
            raise ValueError(f"source must be 'attention', 'logits' or 'encodings', got {source!r}")
        self.trainer, self.every, self.source = trainer, every, source
        self.length, self.words, self.seed = length, words, seed

    @property
    def table(self) -> pd.DataFrame:
        """What was measured so far, earlier runs that this one resumed included: a row per step and layer."""
        return trajectory(self.trainer.state.log_history)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model before its first step."""
        if state.global_step == 0:
            self._measure(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every so many steps."""
        if state.global_step % self.every == 0:
            self._measure(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the trained model."""
        self._measure(state, kwargs["model"])

    def _measure(self, state: TrainerState, model: nn.Module) -> None:
        measured = any(entry["step"] == state.global_step and _is_ours(entry) for entry in state.log_history)
        if not measured and state.is_world_process_zero:
            layers, matrices = self._matrices(pretrained(model))
            control = self.trainer.control
            due = control.should_log
            self.trainer.log(_entries(layers, matrices))
            control.should_log = due  # logging takes it back, and the Trainer would skip its own entry of this step

    def _matrices(self, model: Any) -> tuple[list[int], list[Tensor]]:
        """One (head, n, n) for each layer measured."""
        if self.source == "attention":
            tokenizer = self.trainer.processing_class
            result = positional_attention(
                model, tokenizer, length=self.length, words=self.words, seed=self.seed, progress=False
            )
            return list(result.layers), list(result.attention)
        if self.source == "logits":
            logits = positional_logits(model, self.length)
            return list(logits.layers), list(logits.weights())
        encodings = [module for module in model.modules() if isinstance(module, Encoding)]
        if not encodings:
            raise ValueError("source='encodings' found none in the model; attach one, or use source='attention'")
        return list(range(len(encodings))), [encoding.weights(self.length).detach() for encoding in encodings]


def trajectory(log_history: list[dict[str, Any]]) -> pd.DataFrame:
    """Read what a `LocalityCallback` logged out of a Trainer's log history.

    Args:
        log_history: ``trainer.state.log_history``, or the list of that name in a checkpoint's ``trainer_state.json``.

    Returns:
        A row per step and layer: ``step``, ``layer``, ``locality``, ``symmetry``, ``relative_asymmetry``,
        ``adjusted_locality``, ``direction_balance``; empty where nothing was logged.

    Examples:
        >>> trajectory([{"step": 0, "loss": 3.2}, {"step": 5, "pelocality/locality/layer_0": 0.25}])
           step  layer  locality
        0     5      0      0.25
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in log_history:
        for key, value in entry.items():
            match = _KEY.fullmatch(key)
            if match:
                place = (entry["step"], int(match["layer"]))
                rows.setdefault(place, {"step": place[0], "layer": place[1]})[match["metric"]] = value
    columns = [name for name in ("step", "layer", *METRICS) if any(name in row for row in rows.values())]
    return pd.DataFrame([rows[place] for place in sorted(rows)], columns=columns)


def _is_ours(entry: dict[str, Any]) -> bool:
    return any(_KEY.fullmatch(key) for key in entry)


def _entries(layers: list[int], matrices: list[Tensor]) -> dict[str, float]:
    entries: dict[str, float] = {}
    for layer, matrix in zip(layers, matrices, strict=True):
        measured = measure(matrix)
        values = {
            "locality": measured.locality,
            "symmetry": measured.symmetry,
            "relative_asymmetry": measured.relative_asymmetry,
            "adjusted_locality": adjusted_locality(matrix),
            "direction_balance": direction_balance(matrix),
        }
        entries |= {f"pelocality/{name}/layer_{layer}": value.mean().item() for name, value in values.items()}
    return entries
