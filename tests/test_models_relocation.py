"""Positions are moved into an encoding by distillation: the training, resuming, and what is refused."""

import copy
import json
import random
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer

from pelocality.encodings import AttenuatedEncoding, DistanceTable, NoEncoding, RelativeEncoding
from pelocality.models import attach, attached, distillation_loss, positional_attention, relocate

WORDS = ["the", "a", "old", "wet", "man", "dog", "mill", "saw", "found", "took", "by", "near", "it", "and", "red"]
VOCABULARY = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(3, 14))) for _ in range(120)]
OPTIONS = {"length": 12, "tokens": 300, "batch_size": 8, "held_out": 16, "every": 2, "learning_rate": 3e-3}
OPTIONS |= {"progress": False}


def make_tokenizer(special):
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        ids = [(token, VOCABULARY[token]) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **names)


def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, initializer_range=0.5,
            vocab_size=len(VOCABULARY), max_position_embeddings=32,
        )
    )  # fmt: skip


def gpt2():
    torch.manual_seed(0)
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=len(VOCABULARY), initializer_range=0.3, **ends
        )
    )  # fmt: skip


FAMILIES = {"bert": (bert, make_tokenizer(True)), "gpt2": (gpt2, make_tokenizer(False))}


def own_table(model):
    return DistanceTable.from_attention(positional_attention(model, length=12, words=4, progress=False))


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_relocated_model_comes_near_the_untouched_one_which_does_not_change(name):
    make, tokenizer = FAMILIES[name]
    model = make().train()
    before = copy.deepcopy(model)
    found = relocate(model, own_table(model), tokenizer, TEXTS, **OPTIONS)
    assert same_weights(model, before)
    assert attached(model) is None
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.model.training
    assert found.curve["tokens"].iloc[0] == 0
    assert found.curve["tokens"].iloc[-1] >= OPTIONS["tokens"]
    assert found.curve["tokens"].is_monotonic_increasing
    losses = found.curve[["token_loss", "mean_loss"]].sum(axis=1)
    assert losses.iloc[-1] < losses.iloc[0]
    handle = attached(found.model)
    assert handle.position_embeddings == "disable"
    assert all(isinstance(encoding, DistanceTable) for encoding in handle.encodings)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    changed = torch.tensor([[5, 6, 7, 8, 10]])
    found.model.eval()
    with torch.no_grad():
        outputs = [found.model(each).logits[0, :4] for each in (ids, changed)]
    assert torch.allclose(*outputs, atol=1e-5) == (name == "gpt2")  # a causal model stays causal


@pytest.mark.parametrize(("name", "frozen"), [("bert", "all"), ("gpt2", "some")])
def test_frozen_weights_are_trained_and_frozen_again(name, frozen):
    make, tokenizer = FAMILIES[name]
    model = make()
    table = own_table(model)
    free = relocate(model, table, tokenizer, TEXTS, **OPTIONS)
    for parameter in list(model.parameters())[:: 1 if frozen == "all" else 3]:
        parameter.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad() if frozen == "all" else torch.inference_mode():
        found = relocate(model, table, tokenizer, TEXTS, **OPTIONS)
    torch.testing.assert_close(found.curve.to_numpy(), free.curve.to_numpy(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.model.state_dict(), free.model.state_dict(), rtol=1e-3, atol=1e-4)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    attached(found.model).remove()
    assert [parameter.requires_grad for parameter in found.model.parameters()] == flags


def test_texts_are_read_again_until_the_tokens_are_reached():
    make, tokenizer = FAMILIES["bert"]
    model = make()
    options = OPTIONS | {"batch_size": 16, "tokens": 480}
    # 24 pieces of five tokens make a batch of 16 and one of 8
    found = relocate(model, own_table(model), tokenizer, ["the old mill"] * (24 + OPTIONS["held_out"]), **options)
    assert found.curve["tokens"].tolist() == [0, 120, 240, 360, 480]


def test_the_frozen_tables_of_kept_positions_stay():
    make, tokenizer = FAMILIES["bert"]
    model = make().requires_grad_(False).train()
    model.bert.embeddings.eval()
    found = relocate(model, NoEncoding(2), tokenizer, TEXTS, position_embeddings="keep", **OPTIONS | {"tokens": 200})
    modes = {name: module.training for name, module in found.model.named_modules()}
    assert {name: module.training for name, module in model.named_modules()}.items() <= modes.items()
    before, after = model.state_dict(), found.model.state_dict()
    assert torch.equal(*(each["bert.embeddings.position_embeddings.weight"] for each in (before, after)))
    assert not torch.equal(*(each["bert.embeddings.word_embeddings.weight"] for each in (before, after)))


class Slope(RelativeEncoding):
    """An encoding with a scalar parameter."""

    def __init__(self, slope=1.0, causal=False):
        super().__init__(1, causal)
        self.slope = torch.nn.Parameter(torch.tensor(float(slope)))

    def at(self, distance):
        return -self.slope * distance.abs()[None]


@pytest.mark.parametrize("with_folder", [True, False])
def test_an_encoding_may_have_a_scalar_parameter(with_folder, tmp_path):
    make, tokenizer = FAMILIES["bert"]
    options = OPTIONS | {"tokens": 200, "folder": tmp_path if with_folder else None}
    found = relocate(make(), Slope(), tokenizer, TEXTS, **options)
    assert attached(found.model).encodings[0].slope.item() != 1


def test_the_curve_holds_the_losses_of_the_held_out_texts():
    make, tokenizer = FAMILIES["bert"]
    model = make()
    texts = [text for text in TEXTS if len(text.split()) <= 10]  # one piece each
    found = relocate(model, NoEncoding(2), tokenizer, texts, **OPTIONS)
    last = distillation_loss(found.model, model, tokenizer, texts[-OPTIONS["held_out"] :], length=12)
    assert found.curve[["token_loss", "mean_loss"]].iloc[-1].tolist() == pytest.approx(last, abs=1e-5)
    start = copy.deepcopy(model)
    attach(start, NoEncoding(2))
    first = distillation_loss(start, model, tokenizer, texts[-OPTIONS["held_out"] :], length=12)
    assert found.curve[["token_loss", "mean_loss"]].iloc[0].tolist() == pytest.approx(first, abs=1e-5)
    headline, columns, *rows = repr(found).splitlines()  # not the modules of the model
    assert headline == "Relocation of BertForMaskedLM, loss on held-out texts"
    assert found in {found}
    assert columns.split() == ["tokens", "token_loss", "mean_loss"]
    assert len(rows) == len(found.curve)


def test_a_run_that_was_cut_off_ends_where_the_whole_one_does(tmp_path, monkeypatch):
    make, tokenizer = FAMILIES["bert"]
    model = make().train()
    before = copy.deepcopy(model)
    table = own_table(model)
    whole = relocate(model, table, tokenizer, TEXTS, folder=tmp_path / "whole", **OPTIONS)
    saved = Trainer._save_checkpoint

    def interrupted(self, *arguments, **options):
        saved(self, *arguments, **options)
        if self.state.global_step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        relocate(model, table, tokenizer, TEXTS, folder=tmp_path / "cut", **OPTIONS)
    assert same_weights(model, before)
    assert attached(model) is None
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    monkeypatch.setattr(Trainer, "_save_checkpoint", saved)
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    for step in (12, 16, 20):  # checkpoints without a state, with a part of it, and with a part of their weights
        (tmp_path / "cut" / f"checkpoint-{step}").mkdir()
    (tmp_path / "cut" / "checkpoint-16" / "trainer_state.json").write_text('{"epoch": 0.')
    for file in ("trainer_state.json", "model.safetensors"):
        (tmp_path / "cut" / "checkpoint-20" / file).write_bytes((checkpoint / file).read_bytes())
    with (tmp_path / "cut" / "checkpoint-20" / "model.safetensors").open("r+b") as weights:
        weights.truncate(100)
    for _ in range(2):  # the second time nothing is trained
        again = relocate(model, table, tokenizer, TEXTS, folder=tmp_path / "cut", **OPTIONS)
        assert again.curve["tokens"].tolist() == whole.curve["tokens"].tolist()
        torch.testing.assert_close(again.curve.to_numpy(), whole.curve.to_numpy(), rtol=1e-3, atol=1e-4)
        for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_autocast_around_the_training_does_not_keep_its_first_weights():
    curves = []
    for kept in (False, True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=kept):
            curves.append(relocate(bert(), NoEncoding(2), make_tokenizer(True), TEXTS, **OPTIONS).curve)
    pd.testing.assert_frame_equal(*curves)


def test_a_folder_of_another_run_is_refused(tmp_path):
    make, tokenizer = FAMILIES["bert"]
    model = make()
    relocate(model, NoEncoding(2), tokenizer, TEXTS, folder=tmp_path, **OPTIONS)
    for change in ({"tokens": 400}, {"seed": 1}, {"position_embeddings": "keep"}):
        with pytest.raises(ValueError, match=rf"other {next(iter(change))}.*choose another folder"):
            relocate(model, NoEncoding(2), tokenizer, TEXTS, folder=tmp_path, **(OPTIONS | change))
    with pytest.raises(ValueError, match="other texts"):
        relocate(model, NoEncoding(2), tokenizer, TEXTS[:-1], folder=tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="other start"):
        relocate(model, AttenuatedEncoding(2), tokenizer, TEXTS, folder=tmp_path, **OPTIONS)
    record = tmp_path / "relocation.json"  # of an earlier release
    record.write_text(
        json.dumps({name: each for name, each in json.loads(record.read_text()).items() if name != "steps"})
    )
    with pytest.raises(ValueError, match="other steps"):
        relocate(model, NoEncoding(2), tokenizer, TEXTS, folder=tmp_path, **OPTIONS)


def test_checkpoints_of_another_training_are_refused_and_stay(tmp_path):
    make, tokenizer = FAMILIES["bert"]
    theirs = tmp_path / "checkpoint-100" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_bytes(b"theirs")
    with pytest.raises(ValueError, match="holds a training with other tokens"):
        relocate(make(), NoEncoding(2), tokenizer, TEXTS, folder=tmp_path, **OPTIONS)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]


def test_float16_is_refused():
    make, tokenizer = FAMILIES["bert"]
    with pytest.raises(ValueError, match=r"float16.*pass model\.float\(\) or model\.bfloat16\(\)"):
        relocate(make().half(), NoEncoding(2), tokenizer, TEXTS, **OPTIONS)


def test_settings_of_accelerate_and_of_the_model_are_as_before():
    accelerate = pytest.importorskip("accelerate")
    make, tokenizer = FAMILIES["gpt2"]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier Trainer
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        found = relocate(make(), NoEncoding(2), tokenizer, TEXTS, **OPTIONS)
        assert accelerator.mixed_precision == "bf16"
        assert found.model.config.use_cache
        prepared = accelerator.prepare(found.model.transformer)
        inside = []
        prepared.h[0].register_forward_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
        prepared(torch.tensor([[5, 6]]))
        assert inside == [True]
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_record_of_a_run_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def interrupted(self, target):
        raise KeyboardInterrupt

    make, tokenizer = FAMILIES["bert"]
    options = OPTIONS | {"tokens": 200, "folder": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            relocate(make(), NoEncoding(2), tokenizer, TEXTS, **options)
    assert not (tmp_path / "relocation.json").exists()
    relocate(make(), NoEncoding(2), tokenizer, TEXTS, **options)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"texts": "a text"}, TypeError, "texts must be a list"),
        ({"texts": None}, TypeError, "texts must be a list"),
        ({"texts": []}, ValueError, "texts must hold some text"),
        ({"texts": [""]}, ValueError, "texts must hold some text"),
        ({"texts": TEXTS[:3]}, ValueError, "held_out=16; give more texts"),
        ({"tokenizer": None}, TypeError, "tokenizer"),
        ({"encoding": 3}, TypeError, "encoding must be"),
        ({"encoding": NoEncoding(3)}, ValueError, "1 or 2 heads"),
        ({"length": 2}, ValueError, "length=2"),
        ({"length": 64}, ValueError, "at most 32"),
        ({"tokens": 0}, ValueError, "tokens must be"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be"),
        ({"learning_rate": 1e30}, ValueError, "learning_rate 1e.30 is too large"),
        ({"learning_rate": "x"}, TypeError, "learning_rate must be a number, got 'x'"),
        ({"seed": 2**40}, ValueError, "seed must be"),
        ({"progress": "no"}, TypeError, "progress must be True or False"),
        ({"position_embeddings": "maybe"}, ValueError, "position_embeddings"),
    ],
)
def test_input_that_cannot_be_relocated_is_refused_and_the_model_stays(change, error, words):
    make, tokenizer = FAMILIES["bert"]
    model = make()
    before = copy.deepcopy(model)
    arguments = OPTIONS | {"encoding": NoEncoding(2), "tokenizer": tokenizer, "texts": TEXTS} | change
    with pytest.raises(error, match=words):
        relocate(model, **arguments)
    assert same_weights(model, before)
    assert attached(model) is None
    assert not model._forward_pre_hooks


def test_a_model_with_an_encoding_attached_is_refused():
    make, tokenizer = FAMILIES["bert"]
    model = make()
    with attach(model, NoEncoding(2)), pytest.raises(ValueError, match="remove it first"):
        relocate(model, NoEncoding(2), tokenizer, TEXTS, **OPTIONS)
