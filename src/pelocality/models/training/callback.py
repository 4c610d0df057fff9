"""Locality and symmetry while a model trains: a callback for transformers' Trainer."""

import re
import warnings
from typing import Any, Literal, get_args

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from pelocality import metrics
from pelocality._checks import check_choice, count
from pelocality.encodings import Encoding
from pelocality.metrics.published import measurement
from pelocality.models.constant_content import Content
from pelocality.models.families import family_of
from pelocality.models.inputs.words import check_words
from pelocality.models.logits.position import positional_logits
from pelocality.models.measuring.identical_words import positional_attention
from pelocality.models.measuring.samples import CAUSAL, PUBLISHED
from pelocality.models.sequence_model import SequenceModel
from pelocality.positions import Positions

Source = Literal["attention", "logits", "encodings"]
BIDIRECTIONAL = (*PUBLISHED, "adjusted_locality", "direction_balance")
METRICS = tuple(dict.fromkeys((*PUBLISHED, *CAUSAL, *BIDIRECTIONAL)))  # in the order of the table's columns
# A second reporter of these services writes beside the Trainer's. A second reporter of any other service would start
# another run, or empty the Trainer's.
_REPORTERS = ("tensorboard", "wandb", "mlflow", "swanlab")


class LocalityCallback(TrainerCallback):
    """Measure the locality and symmetry of each layer while a model trains.

        for A of a layer, averaged over words, and the mean over its heads:
        bidirectional: Loc(A), Sym(A), relative asymmetry, adjusted locality, direction balance
        causal: past locality, adjusted locality, mean distance, sink rate, window

    The columns for causal attention are those of a causal model's ``positional_attention(...).to_frame()``.

    The rows are written to the Trainer's ``log_history``, under ``pelocality/locality/layer_0`` and so on (the first
    part is ``name``). Checkpoints hold this history, and a resumed run continues it. If ``report_to`` names
    TensorBoard, Weights & Biases, MLflow or SwanLab, these get the rows too. Measuring does not change training: no
    random number is drawn, and mode and attention implementation are restored.

    Args:
        every: Steps between measurements. The first measurement is before the first step, the last after the last step.
        source: The matrices to measure. ``"attention"``: identical-word attention, of any model. ``"logits"``: the
            position-only term, if it has a closed form (learned tables in the first layer, T5, ALiBi, ...).
            ``"encodings"``: the encodings of this library in the model, in the order of its modules. An encoding that
            contains other encodings is measured as a whole. If peft trains an encoding, the trained copy is measured.
            In a causal model, encodings are measured under the causal mask.
        length: Positions n.
        words: Words to average over, or how many to draw, as for `positional_attention`; not used for encodings and
            exact closed forms.
        seed: Seed of the words.
        name: The first part of this callback's keys. Two callbacks on one Trainer, of two sources or lengths, need
            two names.
        prefix: As for `positional_attention`. Use True for a decoder with relative positions alone (RoPE): without a
            prefix, each layer shows only the positions that it adds itself.
        inputs: For a model that reads something else than token ids, as for `SequenceModel`. The library's functions
            bring their positions.
        vocabulary_size: For a module that is not a transformers model, as for `SequenceModel`.

    Attributes:
        log_history: The Trainer's log history of the last training.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``every``, ``length`` or ``words`` below 1, a negative seed, no words, or an unknown source. When
            training starts: a model that the source cannot measure, or two callbacks of one name.

    Note:
        Reporters that the Trainer got as objects, and other names in ``report_to``, do not get the rows, because
        Trainers do not pass reporters to callbacks. TensorBoard may show the numbers as a separate run beside the
        Trainer's. If an evaluation ends training early and ``load_best_model_at_end`` replaces the model, the model of
        the last step is not measured, and there is a warning. In distributed training, every process measures a part of
        the words and has the table, and the first process reports. Each measurement runs ``words`` sequences of
        ``length`` tokens.

    Examples:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        ...     vocab_size=99, max_position_embeddings=32)
        >>> ids = list(range(10, 26))
        >>> callback = LocalityCallback(every=1, length=16, words=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     settings = TrainingArguments(folder, max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True,
        ...         logging_strategy="no", save_strategy="no")
        ...     rows = [{"input_ids": ids, "labels": ids}] * 8
        ...     trainer = Trainer(BertForMaskedLM(tiny), settings, train_dataset=rows, callbacks=[callback])
        ...     _ = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> callback.table["step"].unique().tolist(), callback.table["layer"].unique().tolist()
        ([0, 1, 2], [0, 1])
    """

    def __init__(
        self,
        *,
        every: int = 500,
        source: Source = "attention",
        length: int = 64,
        words: int | list[str | int] = 16,
        seed: int = 0,
        name: str = "pelocality",
        prefix: bool | str | int = False,
        inputs: Content | None = None,
        vocabulary_size: int | None = None,
    ):
        check_words(words)
        check_choice("source", source, get_args(Source))
        self.every, self.length, self.seed = count("every", every), count("length", length), count("seed", seed, 0)
        if prefix is not False and source != "attention":
            raise ValueError(f"prefix is for source='attention', got source={source!r}; leave it out")
        self.source, self.words, self.name, self.prefix = source, words, name, prefix
        self.inputs, self.vocabulary_size = inputs, vocabulary_size
        self.log_history: list[dict[str, Any]] = []

    @property
    def table(self) -> pd.DataFrame:
        """The measurements so far, those before a resumed checkpoint included: a row per step and layer."""
        return trajectory(self.log_history, name=self.name)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure the model before its first step."""
        self.log_history = state.log_history
        names = [name for name in args.report_to if name in _REPORTERS and state.is_world_process_zero]
        self._reporters = [make() for make in get_reporting_integration_callbacks(names)]  # type: ignore[no-untyped-call]
        for reporter in self._reporters:
            reporter.on_train_begin(args, state, control, model=kwargs["model"])
        if state.global_step == 0:
            self._measure(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every so many steps and after the last."""
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps or control.should_training_stop:
            self._measure(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure the model of the last step, unless that was done or the best model has replaced it."""
        if self._measured(state):
            return
        if args.load_best_model_at_end and state.best_global_step not in (None, state.global_step):
            warnings.warn("the best model has replaced the last one before it was measured", stacklevel=2)
        else:
            self._measure(args, state, control, **kwargs)

    def _measured(self, state: TrainerState) -> bool:
        """Return whether the model of this step was measured under this name."""
        return bool((trajectory(state.log_history, name=self.name)["step"] == state.global_step).any())

    def _measure(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure the model and log the numbers."""
        if self._measured(state):
            raise ValueError(f"two LocalityCallbacks on this Trainer have name={self.name!r}; rename one of them")
        logs: dict[str, Any] = {"epoch": state.epoch}
        for layer, matrix, adjusted, causal, positions in self._layers(kwargs["model"], kwargs["processing_class"]):
            hidden = () if positions is None or positions.has_directions else ("past_locality", "direction_balance")
            measured = {"adjusted_locality": adjusted}
            measured |= {} if causal else vars(measurement(matrix, positions=positions))
            for metric in [name for name in (CAUSAL if causal else BIDIRECTIONAL) if name not in hidden]:
                more = {} if metric == "sink_rate" else {"positions": positions}
                values = measured[metric] if metric in measured else getattr(metrics, metric)(matrix, **more)
                logs[f"{self.name}/{metric}/layer_{layer}"] = values.mean().item()
        state.log_history.append(logs | {"step": state.global_step})
        for reporter in self._reporters:
            reporter.on_log(args, state, control, model=kwargs["model"], logs=logs)

    def _layers(self, model: Any, tokenizer: Any) -> list[tuple[int, Tensor, Tensor, bool, Positions | None]]:
        """Return each layer's number, matrices (head, n, n), adjusted locality (head,), causality and positions."""
        if self.source == "encodings":
            encodings = [module for module in model.modules() if isinstance(module, Encoding)]
            parts = {part for encoding in encodings for part in encoding.modules() if part is not encoding}
            parts |= _unused_copies(model)
            encodings = [encoding for encoding in encodings if encoding not in parts]
            if not encodings:
                raise ValueError("source='encodings' found no encoding; attach one, or use source='attention'")
            one_sided = _in_causal_attention(model)
            return [(i, *self._of_encoding(each, each in one_sided)) for i, each in enumerate(encodings)]
        options: Any = {"length": self.length, "words": self.words, "seed": self.seed, "progress": False}
        subject = SequenceModel(model, self.inputs, vocabulary_size=self.vocabulary_size)
        tokenizer = tokenizer if self.inputs is None else None
        is_attention = self.source == "attention"
        options |= {"prefix": self.prefix} if is_attention else {}
        result: Any = (positional_attention if is_attention else positional_logits)(subject, tokenizer, **options)
        shared = (result.source.causal, result.positions) if is_attention else (result.causal, None)
        layers = zip(result.layers, result.attention, metrics.adjusted_locality(result), strict=True)
        return [(*layer, *shared) for layer in layers]

    def _of_encoding(self, encoding: Encoding, causal: bool) -> tuple[Tensor, Tensor, bool, Positions | None]:
        """Return the matrices of an encoding, their adjusted locality, causality, and positions that are no line."""
        causal, positions = causal or encoding.causal, getattr(encoding, "positions", None)
        length = self.length if positions is None else positions.before + positions.shape[1]
        mask = torch.ones(1, length, length, dtype=torch.bool, device=encoding.device)
        weights = encoding.weights(length, mask=mask.tril() if causal else mask)[0].detach()
        # Causality is not read off the weights, which underflow to 0 elsewhere too.
        adjusted = metrics.adjusted_locality(weights, causal=causal, positions=positions)
        return weights, adjusted, causal, positions


def _unused_copies(model: nn.Module) -> set[nn.Module]:
    """Return all modules in copies that do not run: peft keeps the original of a module that it trains, and more."""
    unused: set[nn.Module] = set()
    wrapper: Any
    for wrapper in model.modules():
        copies, original = getattr(wrapper, "modules_to_save", None), wrapper._modules.get("original_module")
        if isinstance(copies, nn.ModuleDict) and original is not None:
            active = () if wrapper.disable_adapters else wrapper.active_adapters
            running = [copies[name] for name in active if name in copies] or [original]
            others = {original, *copies.values()}.difference(running)
            unused |= {module for copy in others for module in copy.modules()}
    return unused


def _in_causal_attention(model: nn.Module) -> set[nn.Module]:
    """Return all modules in the attention of causal transformers models: their mask hides the future of an encoding."""
    inside: set[nn.Module] = set()
    for module in (each for each in model.modules() if isinstance(each, PreTrainedModel)):
        family, base = family_of(module), family_of(module).base(module)
        if (attentions := family.attention_modules(base)) and family.causal(base):
            inside |= {part for attention in attentions for part in attention.modules()}
    return inside


def trajectory(log_history: list[dict[str, Any]], *, name: str = "pelocality") -> pd.DataFrame:
    """Return the measurements of a `LocalityCallback` from a Trainer's log history.

    Args:
        log_history: ``trainer.state.log_history``, or ``log_history`` of a checkpoint's ``trainer_state.json``.
        name: The callback's name.

    Returns:
        A row per step and layer with ``step``, ``layer`` and the metrics that the callback logged. A causal model has
        the metrics for causal attention, another model the metrics for bidirectional attention. The table is empty if
        nothing was logged under that name.

    Examples:
        >>> trajectory([{"step": 0, "loss": 3.2}, {"step": 5, "pelocality/locality/layer_0": 0.25}])
           step  layer  locality
        0     5      0      0.25
    """
    pattern = re.compile(re.escape(name) + r"/(?P<metric>\w+)/layer_(?P<layer>\d+)")
    matches = [(entry["step"], pattern.fullmatch(key), value) for entry in log_history for key, value in entry.items()]
    rows = [(step, int(match["layer"]), match["metric"], value) for step, match, value in matches if match]
    long = pd.DataFrame(rows, columns=["step", "layer", "metric", "value"])
    table = long.pivot(index=["step", "layer"], columns="metric", values="value")
    columns = [metric for metric in METRICS if metric in table]
    return table[columns].rename_axis(columns=None).reset_index()


def encoding_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of every encoding in a model, by name, to exclude them from weight decay.

    Weight decay pulls every parameter to zero. For an `AttenuatedEncoding`, ``log_decay = 0`` is a decay of 1, not the
    absence of an encoding.

    Args:
        model: Any module, such as a model with an encoding attached.

    Returns:
        The parameters, named as in ``model.named_parameters()``, learned or frozen. A parameter that several modules
        share is listed under each of its names. The dictionary is empty if no encoding is learned.

    Note:
        transformers' Trainer applies weight decay to these parameters. It excludes only layer norms, and names with
        "bias" or "norm" in them.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> model = nn.ModuleDict({"word": nn.Linear(2, 2), "position": AttenuatedEncoding(decay=0.5, learnable=True)})
        >>> list(encoding_parameters(model))
        ['position.log_decay', 'position.log_symmetry']
        >>> from transformers import Trainer
        >>> class EncodingTrainer(Trainer):
        ...     def get_decay_parameter_names(self, model):
        ...         names = super().get_decay_parameter_names(model)
        ...         return [name for name in names if name not in encoding_parameters(model)]
    """
    of_encodings = {id(p) for module in model.modules() if isinstance(module, Encoding) for p in module.parameters()}
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in of_encodings}
