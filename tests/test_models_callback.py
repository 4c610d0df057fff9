"""The callback measures on schedule, does not change training, and resumes from checkpoints."""

import contextlib
import itertools
import re
from typing import ClassVar

import pandas as pd
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5Model,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    ViTConfig,
    ViTModel,
    set_seed,
)
from transformers.integrations import integration_utils

from pelocality import Positions
from pelocality.encodings import KERPLE, ALiBi, AttenuatedEncoding, DistanceTable, PositionedEncoding, T5Buckets
from pelocality.metrics import adjusted_locality, locality, measure
from pelocality.models import SequenceModel, attach, identical_patches, positional_attention
from pelocality.models.measuring.samples import CAUSAL
from pelocality.models.training.callback import BIDIRECTIONAL, LocalityCallback, encoding_parameters, trajectory
from tests.test_encodings_modules import Pair

ROWS = [
    {"input_ids": ids, "labels": ids} for ids in torch.randint(5, 99, (32, 16), generator=torch.manual_seed(0)).tolist()
]


PREFIX = re.compile("pelocality/")


def make_trainer(folder, **settings):
    set_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=99,
        max_position_embeddings=32,
    )  # fmt: skip
    options = {"max_steps": 6, "save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 4} | settings
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(folder, **options, **quiet)
    return Trainer(BertForMaskedLM(config), arguments, train_dataset=ROWS, eval_dataset=ROWS[:8])


def add_callback(trainer, **options):
    callback = LocalityCallback(**({"every": 2, "length": 12, "words": 3} | options))
    trainer.add_callback(callback)
    return callback


def first_row(model, **options):
    """Return the table of a callback on a model before its first step."""
    callback = LocalityCallback(**({"length": 12, "words": 3} | options))
    arguments = TrainingArguments(report_to="none", use_cpu=True)
    callback.on_train_begin(arguments, TrainerState(), None, model=model, processing_class=None)
    return callback.table


def bert():
    return make_trainer(None).model


def mistral(**more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return MistralForCausalLM(MistralConfig(vocab_size=99, num_key_value_heads=1, **sizes, **more))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Interrupter(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_each_layer_is_measured_once_before_during_and_after_training(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=5)
    callback = add_callback(trainer)
    trainer.train()
    table = callback.table
    assert table[["step", "layer"]].to_numpy().tolist() == [[s, i] for s in (0, 2, 4, 5) for i in (0, 1)]
    assert list(table.columns) == ["step", "layer", *BIDIRECTIONAL]
    last = locality(positional_attention(trainer.model, length=12, words=3)).mean(-1)
    assert table[table["step"] == 5]["locality"].tolist() == pytest.approx(last.tolist(), abs=1e-6)


def test_the_callback_does_not_change_training(tmp_path):
    alone = make_trainer(tmp_path / "alone")
    alone.train()
    watched = make_trainer(tmp_path / "watched")
    add_callback(watched, every=1)
    watched.train()
    assert losses(alone) == pytest.approx(losses(watched), rel=1e-5)


def test_a_resumed_run_has_the_same_table_as_an_uninterrupted_one(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = make_trainer(tmp_path / "whole", **settings)
    complete = add_callback(whole)
    whole.train()
    broken = make_trainer(tmp_path / "broken", **settings)
    add_callback(broken)
    broken.add_callback(Interrupter())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = make_trainer(tmp_path / "broken", **settings)
    callback = add_callback(resumed)
    resumed.train(resume_from_checkpoint=True)
    pd.testing.assert_frame_equal(callback.table, complete.table, rtol=1e-4)


def test_closed_form_logits_and_encodings_can_be_measured():
    model = bert()
    assert first_row(model, source="logits")["layer"].tolist() == [0]  # a learned table acts in the first layer
    model.position = AttenuatedEncoding(heads=2, decay=0.5, form="logits")
    expected = measure(AttenuatedEncoding(decay=0.5).weights(20)).locality.item()
    assert first_row(model, source="encodings", length=20)["locality"].tolist() == pytest.approx([expected], abs=1e-6)


def test_an_encoding_that_contains_others_is_one_layer():
    model, whole = bert(), Pair(ALiBi(2), Pair(ALiBi(2), KERPLE(2)))
    attach(model, whole)
    expected = measure(whole.weights(20)).locality.mean().item()
    table = first_row(model, source="encodings", length=20)
    assert table["layer"].tolist() == [0, 1]
    assert table["locality"].tolist() == pytest.approx([expected] * 2, abs=1e-6)


@pytest.mark.parametrize("source", ["attention", "logits"])
def test_chance_is_uniform_over_the_window_of_the_model(source):
    model = mistral(sliding_window=3)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.q_proj.weight)  # uniform over the keys it sees
    table = first_row(model, source=source)
    assert table["past_locality"].min() > 0.5
    assert table["adjusted_locality"].abs().max() < 1e-6


@pytest.mark.parametrize("source", ["attention", "logits", "encodings"])
def test_causal_models_have_the_columns_of_their_frame(source):
    model = mistral()
    model.position = AttenuatedEncoding(heads=2, decay=0.5, causal=True)
    table = first_row(model, source=source, prefix=5 if source == "attention" else False)
    assert list(table.columns) == ["step", "layer", *CAUSAL]
    if source == "attention":
        result = positional_attention(model, length=12, words=3, prefix=5)
        expected = result.to_frame("layer")[[f"{name}_of_mean" for name in CAUSAL]].to_numpy()
        assert table[list(CAUSAL)].to_numpy() == pytest.approx(expected, abs=1e-6)


def test_an_encoding_attached_to_a_causal_model_is_measured_behind_its_mask():
    model = mistral()
    attach(model, ALiBi(2))
    table = first_row(model, source="encodings")
    assert list(table.columns) == ["step", "layer", *CAUSAL]
    expected = adjusted_locality(ALiBi(2, causal=True).weights(12)).mean().item()
    assert table["adjusted_locality"].tolist() == pytest.approx([expected] * 2, abs=1e-6)


def test_the_halves_of_an_encoder_decoder_are_told_apart():
    model = T5Model(T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2))
    attach(model.encoder, ALiBi(2))
    attach(model.decoder, ALiBi(2))
    assert first_row(model, source="encodings")["symmetry"].isna().tolist() == [False, True]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_encoding_that_peft_trains_is_measured_once_by_the_copy_that_runs(enabled):
    peft = pytest.importorskip("peft")
    model = bert()
    attach(model, AttenuatedEncoding(heads=2, decay=0.5, learnable=True))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=["pelocality"]))
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name and "log_decay" in name:
            parameter.data.fill_(0.0)  # a decay of 1
    expected = locality(AttenuatedEncoding(decay=1.0 if enabled else 0.5).weights(12)).item()
    with contextlib.nullcontext() if enabled else model.disable_adapter():
        table = first_row(model, source="encodings")
    assert table["layer"].tolist() == [0, 1]
    assert table["locality"].tolist() == pytest.approx([expected] * 2, abs=1e-6)


def test_images_and_encodings_of_a_grid_are_measured_on_it():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model, inputs = ViTModel(ViTConfig(image_size=16, patch_size=4, **sizes)), identical_patches(4)
    result = positional_attention(SequenceModel(model, inputs=inputs), length=16, words=2)
    table = first_row(model, inputs=inputs, length=16, words=2)
    expected = locality(result.attention, positions=Positions.grid(4, 4)).mean(-1).tolist()
    assert table["locality"].tolist() == pytest.approx(expected, abs=1e-6)
    encoding = PositionedEncoding(ALiBi(2), Positions.grid(4, 4, before=1))
    attach(model, encoding, example_inputs={"pixel_values": torch.randn(1, 3, 16, 16)}, position_embeddings="keep")
    assert (first_row(model, source="encodings", inputs=inputs)["symmetry"] == 1).all()


def test_causal_and_other_encodings_have_the_columns_of_each():
    model = bert()
    model.position = nn.ModuleList([AttenuatedEncoding(decay=0.5), AttenuatedEncoding(decay=0.5, causal=True)])
    table = first_row(model, source="encodings")
    assert table["symmetry"].isna().tolist() == [False, True]
    assert table["past_locality"].isna().tolist() == [True, False]


def test_a_bidirectional_encoding_whose_weights_underflow_is_not_causal():
    model = bert()
    model.position = encoding = AttenuatedEncoding(decay=0.5, symmetry=300.0)
    assert not encoding.weights(12).triu(1).any()
    table = first_row(model, source="encodings")
    assert list(table.columns) == ["step", "layer", *BIDIRECTIONAL]
    expected = adjusted_locality(encoding.weights(12), causal=False).item()
    assert table["adjusted_locality"].tolist() == pytest.approx([expected], abs=1e-6)


def test_encoding_parameters_are_only_those_of_encodings():
    shared = DistanceTable(heads=2, length=8)
    learned = [AttenuatedEncoding(heads=2, decay=0.5, learnable=True), KERPLE(heads=2), T5Buckets(heads=2)]
    model = nn.ModuleDict({"first": shared, "second": shared, "others": nn.ModuleList(learned), "own": nn.Linear(2, 2)})
    assert list(encoding_parameters(model)) == [
        "first.values",
        "second.values",
        "others.0.log_decay",
        "others.0.log_symmetry",
        "others.1.log_strength",
        "others.1.free_curvature",
        "others.2.relative_attention_bias.weight",
    ]
    assert encoding_parameters(model["own"]) == {}


def test_two_callbacks_with_two_names_both_measure(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.model.position = AttenuatedEncoding(heads=2, decay=0.5, form="logits")
    attention = add_callback(trainer)
    encoding = add_callback(trainer, source="encodings", length=20, name="encoding at 20")
    trainer.train()
    assert attention.table[["step", "layer"]].to_numpy().tolist() == [[s, i] for s in (0, 2, 3) for i in (0, 1)]
    wanted = measure(AttenuatedEncoding(decay=0.5).weights(20)).locality.item()
    assert encoding.table["step"].tolist() == [0, 2, 3]
    assert encoding.table["locality"].tolist() == pytest.approx([wanted] * 3, abs=1e-6)
    history = trainer.state.log_history
    assert trajectory(history).equals(attention.table)
    assert trajectory(history, name="encoding at 20").equals(encoding.table)
    assert trajectory(history, name="encoding").empty


def test_two_callbacks_of_one_name_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    add_callback(trainer)
    add_callback(trainer, length=20)
    with pytest.raises(ValueError, match="name='pelocality'"):
        trainer.train()


class Reference(TrainerCallback):
    """Measures the locality of the model at every step."""

    def __init__(self):
        self.localities = {}

    def on_step_end(self, args, state, control, **kwargs):
        result = positional_attention(kwargs["model"], length=12, words=3, progress=False)
        self.localities[state.global_step] = locality(result).mean(-1).tolist()


class Stopper(TrainerCallback):
    """Ends training at a given step, otherwise like EarlyStoppingCallback."""

    def __init__(self, step):
        self.step = step

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            control.should_training_stop = True


def train_and_load_best(tmp_path, unit, saved, *, stops=False):
    trainer = make_trainer(
        tmp_path, max_steps=-1 if unit == "epoch" else 5, num_train_epochs=3, learning_rate=1.0,
        lr_scheduler_type="constant", eval_strategy=unit, save_strategy=saved, eval_steps=1, save_steps=1,
        load_best_model_at_end=True, per_device_train_batch_size=16, save_only_model=True,
        metric_for_best_model="rank", greater_is_better=False,
    )  # fmt: skip
    ranks = itertools.count()
    trainer.compute_metrics = lambda _: {"rank": next(ranks)}  # the first model evaluated is the best
    witness = Reference()
    trainer.add_callback(witness)
    if stops:
        trainer.add_callback(Stopper(3))
    callback = add_callback(trainer, every=100)
    trainer.train()
    return trainer, callback, witness.localities


@pytest.mark.parametrize(("unit", "saved"), [("steps", "best"), ("epoch", "epoch")])
def test_the_last_row_is_the_model_of_the_last_step_when_the_best_is_loaded(tmp_path, unit, saved):
    trainer, callback, localities = train_and_load_best(tmp_path, unit, saved)
    best, last = trainer.state.best_global_step, trainer.state.global_step
    assert best < last
    table = callback.table
    assert table["step"].unique().tolist() == [0, last]
    assert table[table["step"] == last]["locality"].tolist() == pytest.approx(localities[last], abs=1e-4)
    assert localities[last] != pytest.approx(localities[best], abs=1e-3)


def test_a_last_model_that_was_replaced_before_measuring_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="the best model has replaced the last one"):
        _, callback, _ = train_and_load_best(tmp_path, "epoch", "best", stops=True)
    assert callback.table["step"].unique().tolist() == [0]


def test_a_training_that_an_evaluation_ends_is_measured_at_its_last_step(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=9, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(Stopper(3))
    callback = add_callback(trainer, every=100)
    trainer.train()
    assert callback.table["step"].unique().tolist() == [0, 3]


class FakeReporter(TrainerCallback):
    """Keeps what a tracker would get, by the process that sent it."""

    logged: ClassVar[list[dict]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append({"step": state.global_step} | logs)


@pytest.mark.parametrize(("name", "rank", "reported"), [("wandb", 0, True), ("dvclive", 0, False), ("wandb", 1, False)])
def test_the_reporters_of_the_arguments_get_the_numbers_once_from_the_first_process(
    tmp_path, monkeypatch, name, rank, reported
):
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, FakeReporter)
    monkeypatch.setattr(FakeReporter, "logged", [])
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.args.report_to = [name]  # the Trainer itself has none
    monkeypatch.setattr(TrainingArguments, "process_index", property(lambda _: rank))
    callback = add_callback(trainer, every=1)
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if any(map(PREFIX.match, entry))]
    assert [entry["step"] for entry in measured] == [0, 1, 2]  # every process has them, as the Trainer's own
    assert FakeReporter.logged == (measured if reported else [])
    assert callback.table["step"].unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"length": 0}, {"words": 0}, {"source": "a"}, {"prefix": True, "source": "logits"}],
)
def test_invalid_values_are_refused_by_the_constructor(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LocalityCallback(**options)


@pytest.mark.parametrize(
    "options", [{"every": 2.5}, {"length": "a"}, {"words": []}, {"words": "abc"}, {"words": True}, {"seed": "x"}]
)
def test_invalid_types_are_refused_by_the_constructor(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        LocalityCallback(**options)


def test_a_model_that_the_source_cannot_measure_is_refused():
    with pytest.raises(ValueError, match="source='encodings'"):
        first_row(bert(), source="encodings")


def test_a_history_without_measurements_is_an_empty_table():
    assert trajectory([{"step": 1, "loss": 2.0}]).empty
