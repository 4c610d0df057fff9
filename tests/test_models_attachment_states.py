"""State dicts, trainers, adapters and offloaded weights of attached models."""

import copy
import functools
import types

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    NoEncoding,
    RelativeEncoding,
    RotaryEncoding,
    SinusoidalEncoding,
)
from pelocality.models import attached, load, positional_attention
from tests.families import (
    add_adapter,
    assert_same_outputs,
    family_of,
    quantised,
    same_weights,
    small,
    tiny,
    tiny_any,
    tokens,
)
from tests.test_encodings_modules import Pair
from tests.test_models_attachment import attach, hidden, normalised_over_keys, random_table
from tests.test_models_loading import Total

N = 11


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
        (NoEncoding(), None),  # which is attached beside the positions
    ],
)
def test_the_state_dict_of_another_encoding_is_refused(saved, other):
    one, two = tiny("bert"), tiny("bert", seed=1)
    attach(one, saved)
    attach(two, other or saved, position_embeddings="disable" if other else "keep")
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"^the weights were saved with \{'encoding': \{'type'.*load the whole"):
            two.load_state_dict(one.state_dict(), strict=strict)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (lambda: ALiBi(2, slopes=[0.123456789, 3.0]), lambda: ALiBi(2)),  # numbers whose JSON has another length
        (lambda: AttenuatedEncoding(2, decay=0.3, learnable=True), lambda: AttenuatedEncoding(2, learnable=True)),
        (lambda: KERPLE(2, strength=0.7), lambda: KERPLE(2)),
        (lambda: ALiBi(2, slopes=1.0), lambda: ALiBi(2, slopes=[1.0, 2.0])),  # one slope for all heads, one for each
        (lambda: ALiBi(2, slopes=[1.0, 2.0]), lambda: ALiBi(2, slopes=1.0)),
        (lambda: random_table(2), lambda: DistanceTable(2, length=7, signed=True)),
        (lambda: RotaryEncoding(4, base=9.0, learnable=True), lambda: RotaryEncoding(4, base=9.0, learnable=True)),
    ],
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_the_state_dict_of_the_same_encoding_with_other_numbers_is_loaded(saved, other, dtypes, tmp_path):
    one, two, ids = tiny("bert").to(dtypes[0]), tiny("bert", seed=1).to(dtypes[1]), tokens(2, N)
    for encoding in attach(one, saved()).encodings:
        for parameter in encoding.parameters():
            parameter.data.mul_(1.2345678)
    attach(two, other())
    torch.save(one.state_dict(), tmp_path / "weights.pt")
    two.load_state_dict(torch.load(tmp_path / "weights.pt"))
    torch.testing.assert_close(hidden(two, ids).double(), hidden(one, ids).double(), rtol=0, atol=1e-4)
    for old, new in zip(attached(one).encodings, attached(two).encodings, strict=True):
        for name, tensor in old.double().state_dict().items():
            torch.testing.assert_close(new.double().state_dict()[name], tensor, rtol=1e-6, atol=0)


def test_weights_without_the_encoding_are_missing_and_with_it_unexpected():
    model, plain = (hf.BertForMaskedLM(tiny("bert").config) for _ in range(2))
    attach(model, random_table(2))
    with pytest.raises(RuntimeError, match=r"Missing key.*pelocality"):
        model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*pelocality"):
        plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict(), strict=False)
    assert same_weights(model.state_dict() | plain.state_dict(), model.state_dict())


def test_some_of_the_weights_can_be_loaded_into_an_attached_model():
    """A head, one matrix, and shards of any size, as in a checkpoint of several files."""
    one, two = (hf.BertForMaskedLM(tiny("bert").config) for _ in range(2))
    for model in (one, two):
        attach(model, random_table(2))
    whole = one.state_dict()
    for wanted in ("cls.", "query.weight", "pelocality.encoding.values", "pelocality._extra_state"):
        two.load_state_dict({key: value for key, value in whole.items() if wanted in key}, strict=False)
    for size in (1, 5):
        for model in (one, two):
            nn.init.normal_(model.bert.encoder.layer[1].attention.self.pelocality.encoding.values)
        whole = one.state_dict()
        keys = list(whole)
        for start in range(0, len(keys), size):
            two.load_state_dict({key: whole[key] for key in keys[start : start + size]}, strict=False)
        assert same_weights(two.state_dict(), whole)


def test_an_encoding_that_cannot_be_saved_is_refused(monkeypatch):
    class Called(RelativeEncoding):
        def __init__(self, function, heads=1):
            super().__init__(heads)
            self.function = function

        def at(self, distance):
            return self.function(distance)[None]

    model = tiny("bert")
    with pytest.raises(TypeError, match="is not JSON"):
        attach(model, Called(torch.abs))
    monkeypatch.setattr(Total, "kept", list)  # in which their numbers are no part of the state dict
    with pytest.raises(TypeError, match=r"encodings in a list are not moved, .* in a torch\.nn\.ModuleList"):
        attach(model, Total([random_table(2), ALiBi(2)]))
    assert attached(model) is None
    attach(model, Pair(SinusoidalEncoding(base=np.float32(50.0)), NoEncoding()))


# ---- trainers and checkpoints


ROWS = [{"input_ids": ids, "labels": ids} for ids in tokens(24, N).tolist()]


def make_trainer(folder, encoding):
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(tiny("bert").config)
    attach(model, encoding)
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options = {"load_best_model_at_end": True, "learning_rate": 0.1, "per_device_train_batch_size": 4}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    settings = hf.TrainingArguments(folder, **steps, **options, **quiet)
    return hf.Trainer(model, settings, train_dataset=ROWS, eval_dataset=ROWS)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_resumes_and_loads_the_best_model(tmp_path):
    encoding, first = AttenuatedEncoding(learnable=True), str(tmp_path / "checkpoint-2")
    whole = make_trainer(tmp_path, encoding)
    whole.train()
    best = load(whole.state.best_model_checkpoint)
    assert same_weights(best.state_dict(), whole.model.state_dict())
    resumed = make_trainer(tmp_path, encoding)
    resumed.train(resume_from_checkpoint=first)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="the weights were saved with"):
        make_trainer(tmp_path, AttenuatedEncoding(form="logits")).train(resume_from_checkpoint=first)


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


# ---- adapters


def adapted(model, targets=("query", "value"), **more):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets), **more)).eval()


ADAPTED = {
    "bert": (lambda: tiny("bert"), normalised_over_keys(learnable=True), ("query", "value")),
    "llama": (lambda: tiny("llama"), RotaryEncoding(4, base=50.0, learnable=True), ("q_proj",)),
    "gpt_neox": (lambda: tiny_any("gpt_neox"), AttenuatedEncoding(learnable=["decay"]), ("query_key_value",)),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_trains_saves_and_loads_an_encoding_in_modules_to_save(name, tmp_path):
    peft, (make, encoding, targets) = pytest.importorskip("peft"), ADAPTED[name]
    base, ids = make().float(), tokens(1, N)
    plain = hidden(base, ids)
    handle = attach(base, encoding)
    model = adapted(base, targets, modules_to_save=["pelocality"])
    trained = [weight for key, weight in model.named_parameters() if weight.requires_grad and "pelocality" in key]
    assert len(trained) == sum(len(list(each.parameters())) for each in handle.encodings)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight.add_(0.1)
    with pytest.warns(UserWarning, match="an adapter that is saved alone"):
        model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="an adapter that is saved alone") as warned:
        model.state_dict()
    assert sum("saved alone" in str(each.message) for each in warned) == 1
    again = make().float()
    attach(again, encoding)
    assert_same_outputs(peft.PeftModel.from_pretrained(again, tmp_path).eval()(ids)[0], model(ids)[0])
    with pytest.warns(UserWarning, match="the adapter is for a model with an encoding"):
        peft.PeftModel.from_pretrained(make().float(), tmp_path)
    other = make().float()
    attach(other, NoEncoding())
    with pytest.raises(RuntimeError, match="the weights were saved with"):
        peft.PeftModel.from_pretrained(other, tmp_path)
    merged = copy.deepcopy(model).merge_and_unload()
    assert attached(merged).encodings[0] is not handle.encodings[0]
    merged.save_pretrained(tmp_path / "merged")
    assert_same_outputs(load(tmp_path / "merged")(ids)[0], model(ids)[0])
    handle.remove()
    assert attached(model) is None
    with model.disable_adapter():
        assert_same_outputs(model(ids)[0], plain)


def test_an_adapter_of_transformers_is_saved_beside_the_encoding(tmp_path, recwarn):
    peft = pytest.importorskip("peft")
    model, ids = hf.BertForMaskedLM(tiny("bert").config).eval(), tokens(1, N)
    plain = copy.deepcopy(model)
    attach(model, normalised_over_keys())
    expected = hidden(model, ids)
    add_adapter(model, peft.LoraConfig(target_modules=["query"], init_lora_weights=False))
    assert not torch.allclose(hidden(model, ids), expected)
    model.save_pretrained(tmp_path)
    attached(model).save(tmp_path)
    assert any("saved alone" in str(each.message) for each in recwarn)
    load(tmp_path, plain).load_adapter(str(tmp_path))
    assert_same_outputs(plain.eval()(ids).logits, model(ids).logits)
    attached(model).remove()
    recwarn.clear()
    model.save_pretrained(tmp_path)
    assert not any("saved alone" in str(each.message) for each in recwarn)


@pytest.mark.parametrize(("family", "table"), [("bert", "position_embeddings"), ("gpt2", "wpe")])
def test_positions_are_restored_where_an_adapter_was_put_around_their_table(family, table):
    model, ids = tiny(family), tokens(2, N)
    expected = model(ids)[0]
    attach(model, random_table(2))
    around = adapted(model, [table])
    attached(around).remove()
    assert_same_outputs(around(ids)[0], expected)  # a new adapter adds zeros


def test_a_model_with_adapters_is_refused():
    peft, config = pytest.importorskip("peft"), tiny("bert").config
    around, masked, bare = adapted(tiny("bert")), hf.BertForMaskedLM(config), hf.BertModel(config)
    for each in (masked, bare):
        add_adapter(each, peft.LoraConfig(target_modules=["query"]))
    for model, message in [
        (around, r"PeftModel has adapters.*modules_to_save=\['pelocality'\].*get_base_model\(\)"),
        (nn.DataParallel(around), "PeftModel has adapters"),
        (masked, r"BertForMaskedLM has adapters.*to model\.base_model"),
        (bare, r"BertModel has adapters.*after model\.delete_adapter\(name\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            attach(model, NoEncoding())
    bare.delete_adapter("default")
    for model in (around.get_base_model(), masked.base_model, bare):
        attach(model, NoEncoding()).remove()


# ---- weights


def test_no_unused_weight_is_changed_by_an_optimiser():
    model = tiny("xlnet").float().train()
    model.layer[1].rel_attn.r.requires_grad_(False)  # frozen by the user, and so after removal
    before = copy.deepcopy(model.state_dict())
    attachment = attach(model, AttenuatedEncoding(learnable=True))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    (model(tokens(2, N))[0] * torch.randn(2, N, 16)).sum().backward()
    optimiser.step()
    assert (attachment.encodings[0].decay - 0.5).abs().item() > 1e-3
    clone = copy.deepcopy(model)
    attachment.remove()
    attached(clone).remove()
    for restored in (model, clone):
        after = restored.state_dict()
        for name in (f"layer.{layer}.rel_attn.{part}" for layer in range(3) for part in ("r", "r_r_bias")):
            assert torch.equal(after[name], before[name])
            assert restored.get_parameter(name).requires_grad == (name != "layer.1.rel_attn.r")
        assert not torch.equal(after["layer.0.rel_attn.q"], before["layer.0.rel_attn.q"])


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_an_encoding_can_be_attached_to_a_quantised_model():
    model, ids = tiny("bert").float(), tokens(2, N)
    rounded = quantised(model)
    plain = hidden(rounded, ids)
    with attach(rounded, NoEncoding(), position_embeddings="keep"):
        torch.testing.assert_close(hidden(rounded, ids), plain, rtol=0, atol=1e-5)
    with attach(rounded, normalised_over_keys()) as attachment:
        assert attachment.encodings[0].decay.dtype == torch.float32
        expected = hidden(rounded, ids)
        assert not torch.allclose(expected, plain, atol=1e-3)
    attach(model, normalised_over_keys())
    rounded = quantised(model)
    torch.testing.assert_close(hidden(rounded, ids), expected, rtol=0, atol=1e-5)
    rounded.load_state_dict(rounded.state_dict())
    attached(rounded).remove()
    torch.testing.assert_close(hidden(rounded, ids), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize(
    ("name", "way", "encoding"),
    [
        ("bert", "cpu", AttenuatedEncoding(1, learnable=True)),
        ("t5", "disk", Pair(ALiBi(2), random_table(2))),
        ("xlnet", "cpu", Pair(ALiBi(2), random_table(2))),  # whose attention modules have hooks
        ("mpnet", "disk", AttenuatedEncoding(1, learnable=True)),  # whose have none
        ("llama", "cpu", RotaryEncoding(4, base=50.0, learnable=True)),
    ],
)
def test_an_encoding_and_the_hooks_of_accelerate_are_put_on_and_removed_in_either_order(
    name, way, encoding, attached_first, tmp_path
):
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny(name), tokens(2, N)
    before = hidden(model, ids)
    attachment = attach(model, encoding)
    expected = hidden(model, ids)
    if not attached_first:
        attachment.remove()
    offload, folder = getattr(accelerate, f"{way}_offload"), [str(tmp_path)] if way == "disk" else []
    offload(model, *folder)
    attachment = attachment if attached_first else attach(model, encoding)
    for _ in range(2):
        assert_same_outputs(hidden(model, ids), expected)
        assert all(
            weight.is_meta == (attached_first or "pelocality" not in key) for key, weight in model.named_parameters()
        )
    assert model.state_dict()[next(key for key in model.state_dict() if key.endswith("_extra_state"))].numel() > 50
    attachment.remove()
    assert_same_outputs(hidden(model, ids), before)
    attachment = attach(model, encoding)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_same_outputs(hidden(model, ids), expected)
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
    with pytest.raises(ValueError, match=r"forward pass of \w+Attention was replaced"):
        hidden(model, ids)
    attached(model).remove()
    hidden(model, ids)


@pytest.mark.parametrize("prove", [True, False])
def test_what_is_on_the_meta_device_is_refused(prove):
    model = tiny("bert")
    model.encoder.layer[1].to("meta")
    with torch.device("meta"):
        whole, encoding = hf.BertModel(tiny("bert").config), AttenuatedEncoding()
    for use in (
        lambda: attach(model, ALiBi(2), prove=prove),
        lambda: attach(whole, ALiBi(2), prove=prove),
        lambda: positional_attention(model, length=4, words=2),
    ):
        with pytest.raises(ValueError, match="meta device"):
            use()
    assert attached(model) is None
    bert = tiny("bert")
    with pytest.raises((NotImplementedError, ValueError), match="meta tensor"):
        attach(bert, encoding, prove=prove)
    assert attached(bert) is None


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
    clip = hf.CLIPTextModel(small(hf.CLIPTextConfig, eos_token_id=2))
    for each in (model, clip):
        with pytest.raises(ValueError, match="symmetry of AttenuatedEncoding, which acts on future keys only"):
            attach(each, encoding)
    attach(model, AttenuatedEncoding(learnable=["decay"])).remove()
    model.config.is_causal = False
    attach(model, encoding).remove()
