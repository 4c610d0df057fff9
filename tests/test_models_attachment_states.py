"""State dicts, checkpoints, adapters and offloaded weights of attached models."""

import copy
import functools
import os
import types

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    NoEncoding,
    RelativeEncoding,
    SinusoidalEncoding,
)
from pelocality.models import attached, load, positional_attention
from tests.families import add_adapter, assert_same_outputs, family_of, same_weights, tiny, tokens
from tests.test_encodings_modules import Pair
from tests.test_models_attachment import attach, hidden, normalised_over_keys, random_table

N = 11


def decay(model):
    return round(attached(model).encodings[0].decay.item(), 6)


# ---- state dicts


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (AttenuatedEncoding(decay=0.2, scale=5.0), AttenuatedEncoding(decay=0.2, scale=5.0, form="logits")),
        (SinusoidalEncoding(width=8), SinusoidalEncoding(width=64)),
        (KERPLE(2), KERPLE(2, kernel="power")),
        (NoEncoding(), SinusoidalEncoding(width=8)),
        (DistanceTable(2, 5), DistanceTable(2, 6)),
        (AttenuatedEncoding(learnable=True), AttenuatedEncoding()),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_the_state_dict_of_another_encoding_is_refused(saved, other, strict):
    one, two = tiny("bert"), tiny("bert", seed=1)
    attach(one, saved)
    attach(two, other)
    with pytest.raises(RuntimeError, match=r"^the weights were saved with \{'encoding': \{'type'.*load the whole"):
        two.load_state_dict(one.state_dict(), strict=strict)


def test_the_state_dict_of_kept_positions_is_refused_where_they_are_disabled():
    one, two = tiny("bert"), tiny("bert")
    attach(one, NoEncoding(), position_embeddings="keep")
    attach(two, NoEncoding())
    with pytest.raises(RuntimeError, match=r"'position_embeddings': 'keep', .*attached here is"):
        two.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (lambda: ALiBi(2, slopes=[0.123456789, 3.0]), lambda: ALiBi(2)),  # numbers whose JSON has another length
        (lambda: AttenuatedEncoding(2, decay=0.3, learnable=True), lambda: AttenuatedEncoding(2, learnable=True)),
        (lambda: KERPLE(2, strength=0.7), lambda: KERPLE(2)),
    ],
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_the_state_dict_of_the_same_encoding_with_other_numbers_is_loaded(saved, other, dtypes):
    one, two, ids = tiny("bert").to(dtypes[0]), tiny("bert", seed=1).to(dtypes[1]), tokens(2, N)
    for encoding in attach(one, saved()).encodings:
        for parameter in encoding.parameters():
            parameter.data.mul_(1.2345678)
    attach(two, other())
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(hidden(two, ids).double(), hidden(one, ids).double(), rtol=0, atol=1e-4)
    for old, new in zip(attached(one).encodings, attached(two).encodings, strict=True):
        torch.testing.assert_close(new.double()(7), old.double()(7), rtol=1e-6, atol=0)


EQUAL = {
    "decay": lambda: AttenuatedEncoding(2, decay=[0.2, 0.2]),
    "slopes": lambda: ALiBi(2, slopes=[0.5, 0.5]),
    "symmetry of targets": lambda: AttenuatedEncoding.from_targets(locality=[0.5, 0.6], length=16),
    "one target": lambda: AttenuatedEncoding.from_targets(locality=0.5, direction_balance=0.2, heads=2, length=16),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_an_encoding_whose_heads_have_equal_numbers_is_saved_and_loaded(make, tmp_path):
    model, ids = tiny("bert"), tokens(2, N)
    attach(model, make())
    model.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))


@pytest.mark.parametrize("slopes", [(1.0, [1.0, 2.0]), ([1.0, 2.0], 1.0), ([1.0, 1.0], [1.0, 2.0])])
def test_one_slope_for_all_heads_and_one_for_each_load_into_one_another(slopes):
    one, two, ids = tiny("bert"), tiny("bert", seed=1), tokens(2, N)
    for model, numbers in zip((one, two), slopes, strict=True):
        attach(model, ALiBi(2, slopes=numbers))
    two.load_state_dict(one.state_dict())
    assert_same_outputs(hidden(two, ids), hidden(one, ids))
    assert attached(two).encodings[0].configuration() == attached(one).encodings[0].configuration()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_weights_without_the_encoding_are_refused(layers, strict):
    model = hf.BertForMaskedLM(hf.BertConfig(**tiny("bert").config.to_dict() | {"num_hidden_layers": layers}))
    plain = model.state_dict()
    attach(model, NoEncoding())
    with pytest.raises(
        RuntimeError, match=r"bert\.encoder\.layer\.0\.attention\.self.* come without one; load them before"
    ):
        model.load_state_dict(plain, strict=strict)
    attached(model).remove()
    model.load_state_dict(plain, strict=strict)


def test_some_of_the_weights_can_be_loaded_into_an_attached_model():
    """A head, one matrix, and shards of any size, as in a checkpoint of several files."""
    one, two = (hf.BertForMaskedLM(tiny("bert").config) for _ in range(2))
    for model in (one, two):
        attach(model, random_table(2))
    whole = one.state_dict()
    for wanted in ("cls.", "query.weight", "pelocality.encoding.values", "pelocality._extra_state"):
        two.load_state_dict({key: value for key, value in whole.items() if wanted in key}, strict=False)
    for size in (1, 2, 5, 17):
        for model in (one, two):
            nn.init.normal_(model.bert.encoder.layer[1].attention.self.pelocality.encoding.values)
        whole = one.state_dict()
        keys = list(whole)
        for start in range(0, len(keys), size):
            two.load_state_dict({key: whole[key] for key in keys[start : start + size]}, strict=False)
        assert same_weights(two.state_dict(), whole)


def test_the_configuration_is_that_of_the_time_of_saving(tmp_path):
    model, ids = tiny("bert"), tokens(2, N)
    for encoding in attach(model, SinusoidalEncoding(width=8)).encodings:
        encoding.width = 16
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert attached(loaded).encodings[0].width == 16
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))


# ---- checkpoints


def test_the_encoding_and_the_weights_are_read_from_the_same_file(tmp_path):
    model = tiny("bert").float()
    for number, options in [(0.7, {"variant": "v2"}), (0.9, {})]:
        with attach(model, AttenuatedEncoding(decay=number)):
            model.save_pretrained(tmp_path, **options)
    for number in (0.1, 0.2):
        with attach(model, AttenuatedEncoding(decay=number)):
            model.save_pretrained(tmp_path / f"step{number}", max_shard_size="20KB")
    os.link(tmp_path / "model.v2.safetensors", tmp_path / "zzz.safetensors")
    assert decay(load(tmp_path)) == 0.9
    assert decay(load(tmp_path, variant="v2")) == 0.7
    assert decay(load(tmp_path, subfolder="step0.1")) == 0.1
    assert decay(load(tmp_path / "step0.2")) == 0.2
    with pytest.raises(ValueError, match="holds no encoding in the weights that would be loaded"):
        load(tmp_path, variant="v3")


def test_the_options_that_locate_files_apply_to_every_file(monkeypatch):
    import pelocality.models.attaching.loading as loading

    asked = []

    def note(path, name, **options):
        asked.append((path, name, options.pop("_raise_exceptions_for_missing_entries"), options))

    monkeypatch.setattr(loading, "cached_file", note)
    place = {"revision": "v2", "token": "x", "cache_dir": "y", "local_files_only": True, "subfolder": "z"}
    with pytest.raises(ValueError, match="holds no encoding"):
        load("me/model", config=hf.BertConfig(architectures=["BertModel"]), variant="fp16", torch_dtype="auto", **place)
    names = ["model.fp16.safetensors", "model.safetensors.index.fp16.json"]
    assert asked == [("me/model", name, False, place) for name in names]


@pytest.mark.parametrize("halves", [("encoder",), ("decoder",), ("encoder", "decoder")])
def test_the_encodings_of_encoder_and_decoder_are_saved_and_loaded(halves, tmp_path):
    torch.manual_seed(0)
    model, ids = hf.T5ForConditionalGeneration(tiny("t5").config).eval(), tokens(2, N)
    for half in halves:
        attach(getattr(model, half), AttenuatedEncoding(decay=0.1, scale=9.0))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    for half in ("encoder", "decoder"):
        assert (attached(getattr(loaded, half)) is not None) == (half in halves)
    with torch.no_grad():
        outputs = [each(ids, decoder_input_ids=ids).logits for each in (loaded, model)]
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(*outputs)


def test_transformers_refuses_a_folder_with_an_encoding_in_the_decoder_alone(tmp_path):
    model = hf.T5ForConditionalGeneration(tiny("t5").config)
    attachment = attach(model, NoEncoding())
    attach(model.decoder, NoEncoding())
    attachment.remove()
    for folder, whole in (("removed", lambda: model), ("loaded", lambda: load(tmp_path / "removed"))):
        whole().save_pretrained(tmp_path / folder)
        with pytest.raises(ValueError, match=r"load it with pelocality\.load"):
            hf.T5ForConditionalGeneration.from_pretrained(tmp_path / folder)
    attached(model.decoder).remove()
    model.save_pretrained(tmp_path / "plain")
    hf.T5ForConditionalGeneration.from_pretrained(tmp_path / "plain")


def test_errors_of_loading_name_the_option_or_what_is_missing(tmp_path):
    model = tiny("bert")
    attach(model, DistanceTable(2, 4))
    model.save_pretrained(tmp_path)
    for options, kind, message in [
        ({"output_loading_info": True}, ValueError, "load returns the model alone"),
        ({"model_class": "BertModel"}, TypeError, "must be a model class of transformers"),
        ({"model_class": nn.Linear}, TypeError, "must be a model class of transformers"),
        ({"model_class": hf.AutoModelForSeq2SeqLM}, ValueError, "AutoModelForSeq2SeqLM has no class for model type"),
        ({"num_hidden_layers": 2}, ValueError, r"no module 'encoder\.layer\.2\.attention\.self'"),
    ]:
        with pytest.raises(kind, match=message):
            load(tmp_path, **options)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "encoder.layer.1.attention.self.pelocality."
    for lost, message in [
        (["encoding.values"], r"not hold the whole encoding of 'encoder\.layer\.1"),
        (["_extra_state"], "without its configuration"),
        (["encoding.values", "_extra_state"], "for 2 of 3 attention modules only"),
    ]:
        kept = {name: tensor for name, tensor in tensors.items() if name not in [prefix + each for each in lost]}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_errors_of_loading_name_the_damaged_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path must be a folder that save_pretrained wrote.* got '.*nowhere'"):
        load(tmp_path / "nowhere")
    model = tiny("bert")
    attach(model, DistanceTable(2, 4))
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole, key = load_file(weights), "encoder.layer.1.attention.self.pelocality._extra_state"
    for text, message in [
        (b"{", "in 'encoder.layer.1.attention.self' that .* its configuration is not JSON"),
        (b"\xff", "in 'encoder.layer.1.attention.self' that .* its configuration is not JSON"),
        (b"[]", "must be an object with encoding, position_embeddings, attn_implementation, got \\[\\]"),
        (b'{"encoding": {}}', "must be an object with encoding, position_embeddings"),
        (b'{"encoding": {"type": "Mine"}, "position_embeddings": "keep", "attn_implementation": "sdpa"}',
         "encoding type 'Mine' is not known.*import the module that defines it before loading"),
    ]:  # fmt: skip
        damaged = whole | {key: torch.tensor(list(text), dtype=torch.uint8)}
        save_file(damaged, weights, {"format": "pt"})
        with pytest.raises(ValueError, match=message) as error:
            load(tmp_path)
        assert str(tmp_path) in str(error.value)
    save_file(whole, weights, {"format": "pt"})
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(tmp_path)
    weights.unlink()
    for index in ("{", "{}", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must be JSON with a 'weight_map'"):
            load(tmp_path)


def test_an_encoding_that_holds_others_is_attached_saved_and_loaded(tmp_path):
    model, ids = tiny("bert"), tokens(2, N)
    table = random_table(1)
    attach(model, Pair(ALiBi(1, slopes=0.3), table))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert torch.equal(attached(loaded).encodings[2].second.values, table.values)
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))


class Total(RelativeEncoding):
    """A custom encoding that contains any number of encodings."""

    def __init__(self, parts):
        super().__init__(2)
        self.parts = self.kept(parts)

    kept = nn.ModuleList

    def at(self, distance):
        return sum(part.at(distance) for part in self.parts)


def test_an_encoding_that_holds_a_list_of_others_is_saved_with_their_numbers_or_refused(tmp_path, monkeypatch):
    model, parts = tiny("bert"), [random_table(2), ALiBi(2)]
    attach(model, Total(parts))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert same_weights(loaded.state_dict(), model.state_dict())
    torch.testing.assert_close(attached(loaded).encodings[0](N), parts[0](N) + parts[1](N))
    monkeypatch.setattr(Total, "kept", list)  # in which their numbers are no part of the state dict
    with pytest.raises(TypeError, match=r"encodings in a list are not moved, .* in a torch\.nn\.ModuleList"):
        attach(tiny("bert"), Total(parts))


def test_an_encoding_that_cannot_be_saved_is_refused():
    class Called(RelativeEncoding):
        def __init__(self, function, heads=1):
            super().__init__(heads)
            self.function = function

        def at(self, distance):
            return self.function(distance)[None]

    model = tiny("bert")
    with pytest.raises(TypeError, match="Called cannot be saved: its arguments must be numbers, strings"):
        attach(model, Called(torch.abs))
    assert attached(model) is None
    attach(model, Pair(SinusoidalEncoding(base=np.float32(50.0)), NoEncoding()))


ROWS = [{"input_ids": ids, "labels": ids} for ids in tokens(24, N).tolist()]


def make_trainer(folder, encoding, **settings):
    """A Trainer over a tiny model; ``encoding=None`` attaches none."""
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(tiny("bert").config)
    if encoding is not None:
        attach(model, encoding)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4} | settings
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return hf.Trainer(model, hf.TrainingArguments(folder, **options, **quiet), train_dataset=ROWS, eval_dataset=ROWS)


@pytest.mark.parametrize("encoding", [AttenuatedEncoding(learnable=True), ALiBi(2, slopes=[0.5, 0.5])])
def test_a_resumed_training_ends_with_the_weights_of_the_uninterrupted_one(encoding, tmp_path):
    whole = make_trainer(tmp_path, encoding)
    whole.train()
    resumed = make_trainer(tmp_path, encoding)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=1e-6)
    assert same_weights(load(tmp_path / "checkpoint-4").state_dict(), whole.model.state_dict())
    with pytest.raises(ValueError, match=r"load it with pelocality\.load"):
        hf.BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-4")


def test_a_trainer_loads_the_best_attached_model(tmp_path):
    trainer = make_trainer(tmp_path, AttenuatedEncoding(learnable=True), eval_strategy="steps", eval_steps=2,
                           load_best_model_at_end=True, learning_rate=0.1)  # fmt: skip
    trainer.train()
    best = load(trainer.state.best_model_checkpoint)
    assert same_weights(best.state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize(
    ("saved", "attached_now", "message"),
    [
        (None, AttenuatedEncoding(), "come without one"),
        (NoEncoding(), AttenuatedEncoding(), "the weights were saved with {'encoding': {'type': 'NoEncoding'"),
        (
            AttenuatedEncoding(),
            AttenuatedEncoding(form="logits"),
            "the weights were saved with {'encoding': {'type': 'A",
        ),
    ],
)
def test_a_trainer_refuses_to_resume_from_weights_without_the_encoding_or_with_another(
    saved, attached_now, message, tmp_path
):
    make_trainer(tmp_path, saved, max_steps=2).train()
    with pytest.raises(RuntimeError, match=message):
        make_trainer(tmp_path, attached_now).train(resume_from_checkpoint=True)


def test_an_accelerator_saves_and_loads_the_state_of_an_attached_model(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    one, two, other = (hf.BertModel(tiny("bert").config) for _ in range(3))
    for model, encoding in ((one, random_table(2)), (two, random_table(2, seed=1)), (other, NoEncoding())):
        attach(model, encoding)
    accelerator.prepare(one)
    accelerator.save_state(tmp_path)
    accelerator._models[:] = [two]
    accelerator.load_state(tmp_path)
    assert same_weights(two.state_dict(), one.state_dict())
    accelerator._models[:] = [other]
    with pytest.raises(RuntimeError, match="the weights were saved with"):
        accelerator.load_state(tmp_path)


def test_weights_of_distributed_checkpoints_are_loaded_whole_and_in_part():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    one, two, ids = tiny("bert"), tiny("bert", seed=1), tokens(1, N)
    for model in (one, two):
        attach(model, random_table(2))
    state = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    some = StateDictOptions(strict=False, full_state_dict=True)
    set_model_state_dict(two, {name: state[name] for name in state if "encoder" not in name}, options=some)
    set_model_state_dict(two, state, options=some)
    assert_same_outputs(two(ids)[0], one(ids)[0])


def test_the_experts_of_a_loaded_model_run_as_asked(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8}
    model = hf.Qwen3MoeModel(hf.Qwen3MoeConfig(vocab_size=99, head_dim=4, **sizes, **experts))
    attach(model, ALiBi(4))
    model.save_pretrained(tmp_path)
    assert load(tmp_path, experts_implementation="eager").config._experts_implementation == "eager"
    assert load(tmp_path).config._experts_implementation == model.config._experts_implementation


def test_a_save_pretrained_of_the_users_own_is_called_and_put_back(tmp_path):
    model, folders = tiny("bert"), []

    def save(self, folder, **options):
        folders.append(folder)
        type(self).save_pretrained(self, folder, **options)

    model.save_pretrained = own = types.MethodType(save, model)
    with attach(model, NoEncoding()):
        model.save_pretrained(tmp_path / "attached")
        copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    assert model.save_pretrained is own
    model.save_pretrained(tmp_path / "removed")
    assert folders == [tmp_path / name for name in ("attached", "copy", "removed")]
    assert attached(load(tmp_path / "copy")) is not None


def test_weights_that_are_saved_without_the_encoding_are_those_of_a_plain_model(tmp_path):
    model = tiny("bert")
    attach(model, NoEncoding())
    plain = {name: weight for name, weight in model.state_dict().items() if ".pelocality." not in name}
    model.save_pretrained(tmp_path, state_dict=dict(plain))  # which transformers empties
    assert same_weights(hf.BertModel.from_pretrained(tmp_path).state_dict(), plain)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    with pytest.raises(ValueError, match=r"pelocality\.load"):
        hf.BertModel.from_pretrained(tmp_path)


# ---- adapters


def adapted(model, **more):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], **more)).eval()


@pytest.mark.filterwarnings("ignore:peft loads this adapter")
def test_an_adapter_trains_saves_and_loads_an_encoding_in_modules_to_save(tmp_path):
    peft = pytest.importorskip("peft")
    bases = [hf.BertForMaskedLM(tiny("bert").config).eval() for _ in range(3)]
    for base in bases[1:]:
        base.load_state_dict(bases[0].state_dict())
    ids = tokens(2, N)
    handle = attach(bases[0], AttenuatedEncoding(learnable=True))
    model = adapted(bases[0], modules_to_save=["pelocality"])
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad and "log_" in name}
    assert len(trained) == 6
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.5)
    assert [each.decay.item() for each in attached(model).encodings] == pytest.approx([0.8244] * 3, abs=1e-4)
    model.save_pretrained(tmp_path)
    attach(bases[1], AttenuatedEncoding(learnable=True))
    again = peft.PeftModel.from_pretrained(bases[1], tmp_path).eval()
    assert_same_outputs(again(ids).logits, model(ids).logits)
    attach(bases[2], AttenuatedEncoding(learnable=True, form="logits"))
    with pytest.raises(RuntimeError, match="the weights were saved with"):
        peft.PeftModel.from_pretrained(bases[2], tmp_path)
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_same_outputs(load(tmp_path / "merged")(ids).logits, model(ids).logits)
    handle.remove()
    assert attached(model) is None
    attached(again).remove()
    assert_same_outputs(again(ids).logits, model(ids).logits)


def test_the_handle_removes_the_trained_copy_that_peft_leaves_in_place_of_the_encoding():
    base, ids = tiny("bert"), tokens(2, N)
    before = hidden(base, ids)
    with attach(base, AttenuatedEncoding(learnable=True)) as handle:
        merged = adapted(base, modules_to_save=["pelocality"]).merge_and_unload()
        assert attached(merged).encodings[0] is not handle.encodings[0]
    assert attached(merged) is None
    assert_same_outputs(hidden(merged, ids), before)


@pytest.mark.parametrize(("family", "table"), [("bert", "position_embeddings"), ("gpt2", "wpe")])
def test_positions_are_restored_where_an_adapter_was_put_around_their_table(family, table):
    peft = pytest.importorskip("peft")
    model, ids = tiny(family), tokens(2, N)
    expected = model(ids)[0]
    attach(model, random_table(2))
    around = peft.get_peft_model(model, peft.LoraConfig(target_modules=[table]))
    attached(around).remove()
    assert_same_outputs(around(ids)[0], expected)  # a new adapter adds zeros


def test_a_model_with_adapters_is_refused():
    model = adapted(tiny("bert"))
    with pytest.raises(
        ValueError, match=r"PeftModel has adapters.*modules_to_save=\['pelocality'\].*get_base_model\(\)"
    ):
        attach(model, NoEncoding())
    with pytest.raises(ValueError, match="PeftModel has adapters"):
        attach(nn.DataParallel(model), NoEncoding())
    with attach(model.get_base_model(), NoEncoding()):
        assert attached(model) is not None
    peft = pytest.importorskip("peft")
    model = hf.BertForMaskedLM(tiny("bert").config)
    add_adapter(model, peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match=r"BertForMaskedLM has adapters.*to model\.base_model"):
        attach(model, NoEncoding())
    attach(model.base_model, NoEncoding()).remove()
    bare = hf.BertModel(tiny("bert").config)
    add_adapter(bare, peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match=r"BertModel has adapters.*after model\.delete_adapter\(name\)"):
        attach(bare, NoEncoding())
    bare.delete_adapter("default")
    attach(bare, NoEncoding()).remove()


# ---- weights


def test_no_unused_weight_of_xlnet_is_changed_by_an_optimiser():
    model = tiny("xlnet").float().train()
    model.layer[1].rel_attn.r.requires_grad_(False)  # frozen by the user, and so after removal
    before = copy.deepcopy(model.state_dict())
    attachment = attach(model, AttenuatedEncoding(learnable=True))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    (model(tokens(2, N))[0] * torch.randn(2, N, 16)).sum().backward()
    optimiser.step()
    clone = copy.deepcopy(model)
    attachment.remove()
    attached(clone).remove()
    for restored in (model, clone):
        after = restored.state_dict()
        for layer in range(3):
            for name in ("r", "r_r_bias"):
                assert torch.equal(after[f"layer.{layer}.rel_attn.{name}"], before[f"layer.{layer}.rel_attn.{name}"])
                assert restored.get_parameter(f"layer.{layer}.rel_attn.{name}").requires_grad == (
                    (layer, name) != (1, "r")
                )
        assert not torch.equal(after["layer.0.rel_attn.q"], before["layer.0.rel_attn.q"])


def test_removal_through_a_part_of_the_model_frees_the_whole_model():
    model = hf.BertForMaskedLM(tiny("bert").config).eval()
    model.set_attn_implementation("sdpa")
    ids = tokens(1, N)
    before = model(ids).logits
    attach(model, normalised_over_keys())
    attached(model.bert).remove()
    assert_same_outputs(model(ids).logits, before)
    model(ids, output_attentions=True)
    with attach(model, normalised_over_keys()), pytest.raises(ValueError, match="set_attn_implementation"):
        model(ids, output_attentions=True)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_an_encoding_can_be_attached_to_a_quantised_model():
    model, ids = tiny("bert").float(), tokens(2, N)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    plain = hidden(quantised, ids)
    with attach(quantised, NoEncoding(), position_embeddings="keep"):
        torch.testing.assert_close(hidden(quantised, ids), plain, rtol=0, atol=1e-5)
    with attach(quantised, normalised_over_keys()) as attachment:
        assert attachment.encodings[0].decay.dtype == torch.float32
        assert not torch.allclose(hidden(quantised, ids), plain, atol=1e-3)
        expected = hidden(quantised, ids)
    attach(model, normalised_over_keys())
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    torch.testing.assert_close(hidden(quantised, ids), expected, rtol=0, atol=1e-5)
    quantised.load_state_dict(quantised.state_dict())
    attached(quantised).remove()
    torch.testing.assert_close(hidden(quantised, ids), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", [AttenuatedEncoding(1, learnable=True), Pair(ALiBi(2), random_table(2))])
@pytest.mark.parametrize(("way", "attached_first"), [("cpu", False), ("cpu", True), ("disk", False), ("disk", True)])
@pytest.mark.parametrize("name", ["bert", "t5", "xlnet", "mpnet"])
def test_an_encoding_can_be_attached_to_an_offloaded_model(name, way, attached_first, encoding, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny(name), tokens(2, N)
    before = hidden(model, ids)
    attachment = attach(model, encoding)
    expected = hidden(model, ids)
    if not attached_first:
        attachment.remove()
    offload, folder = getattr(accelerate, f"{way}_offload"), [str(tmp_path)] if way == "disk" else []
    offload(model, *folder)
    if not attached_first:
        attachment = attach(model, encoding)
    for _ in range(2):
        assert_same_outputs(hidden(model, ids), expected)
        assert all(
            weight.is_meta == (attached_first or "pelocality" not in key) for key, weight in model.named_parameters()
        )
    assert model.state_dict()[next(key for key in model.state_dict() if key.endswith("_extra_state"))].numel() > 50
    attachment.remove()
    assert_same_outputs(hidden(model, ids), before)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_forward_pass_that_is_replaced_after_attaching_is_refused_and_a_wrapped_one_runs(name):
    model, ids = tiny(name), tokens(1, N)
    attach(model, ALiBi(model.config.num_attention_heads))
    expected = hidden(model, ids)
    attention = family_of(model).attention_modules(model)[0]
    own = attention.forward
    attention.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    assert_same_outputs(hidden(model, ids), expected)
    attention.forward = types.MethodType(type(attention).forward, attention)
    with pytest.raises(ValueError, match=r"forward pass of \w+Attention was replaced after an encoding was attached"):
        hidden(model, ids)
    attached(model).remove()
    hidden(model, ids)


@pytest.mark.parametrize("name", ["xlnet", "mpnet"])  # one whose attention modules have hooks, one whose have none
def test_an_encoding_and_the_hooks_of_accelerate_are_removed_in_either_order(name):
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny(name), tokens(2, N)
    before = hidden(model, ids)
    for attached_first in (False, True):
        attachment = attach(model, random_table(2)) if attached_first else None
        accelerate.cpu_offload(model, torch.device("cpu"))
        attachment = attachment or attach(model, random_table(2))
        expected = hidden(model, ids)
        attachment.remove()
        assert_same_outputs(hidden(model, ids), before)
        attachment = attach(model, random_table(2))
        assert_same_outputs(hidden(model, ids), expected)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert_same_outputs(hidden(model, ids), expected)
        attachment.remove()
        assert_same_outputs(hidden(model, ids), before)


@pytest.mark.parametrize("prove", [True, False])
def test_a_layer_on_the_meta_device_is_refused(prove):
    model = tiny("bert")
    model.encoder.layer[1].to("meta")
    for use in (lambda: attach(model, ALiBi(2), prove=prove), lambda: positional_attention(model, length=4, words=2)):
        with pytest.raises(ValueError, match=r"BertModel are on the meta device.*load them with from_pretrained"):
            use()
    assert attached(model) is None


def test_weights_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = hf.BertModel(tiny("bert").config)
        encoding = AttenuatedEncoding()
    with pytest.raises(ValueError, match=r"BertModel are on the meta device.*load them with from_pretrained"):
        attach(model, NoEncoding())
    with pytest.raises(ValueError, match="AttenuatedEncoding is on the meta device"):
        attach(tiny("bert"), encoding)


@pytest.mark.parametrize(
    "encoding",
    [
        AttenuatedEncoding(symmetry=0.5),
        AttenuatedEncoding(learnable=True),
        Pair(NoEncoding(), AttenuatedEncoding(symmetry=2.0, form="logits")),
    ],
)
def test_a_symmetry_without_effect_in_a_causal_model_is_refused(encoding):
    model = tiny("gpt2")
    with pytest.raises(
        ValueError, match=r"symmetry of AttenuatedEncoding acts on future keys only.* leave symmetry at"
    ):
        attach(model, encoding)
    attach(model, AttenuatedEncoding(learnable=["decay"])).remove()
    model.config.is_causal = False
    attach(model, encoding).remove()
