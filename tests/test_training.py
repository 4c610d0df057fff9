"""The callback measures on schedule, changes nothing about training, and survives a restart."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from pelocality.encodings import AttenuatedEncoding
from pelocality.extract import positional_attention
from pelocality.metrics import locality, measure
from pelocality.training import METRICS, LocalityCallback, trajectory

ROWS = [
    {"input_ids": ids, "labels": ids} for ids in torch.randint(5, 99, (32, 16), generator=torch.manual_seed(0)).tolist()
]


def make_trainer(folder, **settings):
    set_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=99,
        max_position_embeddings=32,
    )  # fmt: skip
    options = {"max_steps": 6, "save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 4} | settings
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return Trainer(BertForMaskedLM(config), TrainingArguments(folder, **options, **quiet), train_dataset=ROWS)


def watch(trainer, **options):
    callback = LocalityCallback(trainer, **({"every": 2, "length": 12, "words": 3} | options))
    trainer.add_callback(callback)
    return callback


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_it_measures_before_during_and_after_each_layer_once(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=5)
    callback = watch(trainer)
    trainer.train()
    table = callback.table
    assert table[["step", "layer"]].to_numpy().tolist() == [[s, i] for s in (0, 2, 4, 5) for i in (0, 1)]
    assert list(table.columns) == ["step", "layer", *METRICS]
    last = locality(positional_attention(trainer.model, length=12, words=3)).mean(-1)
    assert table[table["step"] == 5]["locality"].tolist() == pytest.approx(last.tolist(), abs=1e-6)


def test_watching_changes_nothing_about_training(tmp_path):
    alone = make_trainer(tmp_path / "alone")
    alone.train()
    watched = make_trainer(tmp_path / "watched")
    watch(watched, every=1)
    watched.train()
    assert losses(alone) == losses(watched)
    for one, other in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_that_resumes_keeps_the_table_and_ends_where_the_whole_one_does(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = make_trainer(tmp_path / "whole", **settings)
    complete = watch(whole)
    whole.train()
    broken = make_trainer(tmp_path / "broken", **settings)
    watch(broken)
    broken.add_callback(Killer())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = make_trainer(tmp_path / "broken", **settings)
    callback = watch(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert callback.table.round(6).equals(complete.table.round(6))


def test_closed_form_logits_and_encodings_are_sources_too(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    callback = watch(trainer, source="logits")
    trainer.train()
    assert callback.table["layer"].unique().tolist() == [0]  # a learned table acts in the first layer

    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.model.position = AttenuatedEncoding(heads=2, decay=0.5, form="logits")
    callback = watch(trainer, source="encodings", length=20)
    trainer.train()
    wanted = measure(AttenuatedEncoding(decay=0.5).weights(20)).locality.item()
    assert callback.table["locality"].tolist() == pytest.approx([wanted] * 2, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"every": 0}, "every"), ({"source": "tables"}, "attention"), ({"source": "encodings"}, "none")],
)
def test_what_makes_no_sense_is_refused(tmp_path, options, words):
    trainer = make_trainer(tmp_path, max_steps=1)

    def train_watched():
        watch(trainer, **options)
        trainer.train()

    with pytest.raises(ValueError, match=words):
        train_watched()


def test_only_a_trainer_can_be_watched():
    with pytest.raises(TypeError, match="Trainer"):
        LocalityCallback(torch.nn.Linear(2, 2))


def test_a_history_without_measurements_is_an_empty_table():
    assert trajectory([{"step": 1, "loss": 2.0}]).empty
