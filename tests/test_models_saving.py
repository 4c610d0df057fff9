"""What a model around the attached one saves: a folder that transformers refuses, an adapter with a warning."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers as hf

from pelocality.encodings import AttenuatedEncoding, NoEncoding
from pelocality.models import attached, load
from tests.families import add_adapter, assert_same_outputs, same_weights, small, tiny, tokens
from tests.test_models_attachment import attach, random_table

N = 11
REFUSAL = r"load it with pelocality\.load"
_BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
WHOLES = {  # a model, and the part of it that is given to `attach`
    "bert": (lambda: hf.BertForMaskedLM(tiny("bert").config), lambda model: model.bert),
    "decoder of t5": (lambda: hf.T5ForConditionalGeneration(tiny("t5").config), lambda model: model.decoder),
    "decoder of bart": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=99, **_BART)),
        lambda model: model.get_decoder(),
    ),
    "encoder of bert2bert": (
        lambda: hf.EncoderDecoderModel(
            encoder=tiny("bert").float(),
            decoder=hf.BertLMHeadModel(small(hf.BertConfig, is_decoder=True, add_cross_attention=True)),
        ),
        lambda model: model.encoder,
    ),
}


def build(name):
    make, part = WHOLES[name]
    model = make().float().eval()
    return model, part(model)


def plainly(model, folder):
    model.save_pretrained(folder)


def of_the_class(model, folder):
    hf.PreTrainedModel.save_pretrained(model, folder)


def state_given(model, folder):
    weights = model.state_dict()
    model.save_pretrained(folder, state_dict=weights)


def by_trainer(model, folder):
    settings = hf.TrainingArguments(folder, report_to="none", use_cpu=True)
    hf.Trainer(model, settings).save_model(folder)


def described(model):
    return {name: each for name, each in model.config.to_dict().items() if name not in ("dtype", "architectures")}


SAVERS = [plainly, of_the_class, state_given, by_trainer]


@pytest.mark.parametrize("name", WHOLES)
@pytest.mark.parametrize("save", SAVERS)
def test_transformers_refuses_what_a_model_around_the_attached_one_saves(name, save, tmp_path):
    model, part = build(name)
    attachment = attach(part, NoEncoding(), position_embeddings="keep")
    before = described(model)
    for folder in (tmp_path / "first", tmp_path / "again"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            save(model, folder)
        with pytest.raises(ValueError, match=REFUSAL):
            type(model).from_pretrained(folder)
        loaded = load(folder)
        assert type(loaded) is type(model)
        assert same_weights(loaded.state_dict(), model.state_dict())
    assert save is by_trainer or described(model) == before
    attachment.remove()
    save(model, tmp_path / "plain")
    assert type(model).from_pretrained(tmp_path / "plain", output_loading_info=True)[1]["unexpected_keys"] == set()


def test_a_model_with_the_configuration_of_an_attached_one_is_saved_as_usual(tmp_path):
    model, part = build("bert")
    attach(part, NoEncoding())
    other = hf.BertForMaskedLM(model.config)
    model.save_pretrained(tmp_path / "attached")
    other.save_pretrained(tmp_path / "other")
    hf.BertForMaskedLM.from_pretrained(tmp_path / "other")


def test_copies_of_a_model_around_the_attached_one_are_saved_with_the_refusal(tmp_path):
    model, part = build("bert")
    attach(part, random_table(2).float())
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    again.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSAL):
        hf.BertForMaskedLM.from_pretrained(tmp_path)
    attached(again).remove()
    assert not again.bert._state_dict_hooks
    assert same_weights(load(tmp_path).state_dict(), model.state_dict())


def test_a_model_whose_weights_have_older_names_on_the_hub_is_saved_and_loaded(tmp_path):
    config = hf.LlavaConfig(
        text_config=small(hf.LlamaConfig, num_key_value_heads=2),
        vision_config=small(hf.CLIPVisionConfig, image_size=8, patch_size=4),
        image_token_index=98,
    )
    model = hf.LlavaForConditionalGeneration(config)
    attach(model.model.language_model, random_table(2).float())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSAL):
        hf.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    again = load(tmp_path)
    assert same_weights(again.state_dict(), model.state_dict())
    again.save_pretrained(tmp_path / "again")
    assert same_weights(load(tmp_path / "again").state_dict(), model.state_dict())


def test_the_experts_of_a_model_around_the_attached_one_are_saved_and_loaded(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(vocab_size=99, head_dim=4, **sizes, **experts))
    attach(model.model, NoEncoding())
    model.save_pretrained(tmp_path)
    assert same_weights(load(tmp_path).state_dict(), model.state_dict())


def test_the_weights_of_a_model_around_the_attached_one_are_refused_by_a_plain_one():
    model, part = build("bert")
    attach(part, NoEncoding())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*pelocality"):
        build("bert")[0].load_state_dict(model.state_dict())


# ---- adapters


def adapted(model, modules_to_save, way):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=modules_to_save)
    if way == "peft":
        return peft.get_peft_model(model, settings).eval()
    add_adapter(model, settings)
    return model.eval()


@pytest.mark.parametrize("modules_to_save", [["pelocality"], None])
@pytest.mark.parametrize("way", ["peft", "transformers"])
@pytest.mark.parametrize("inner", [False, True])
def test_an_adapter_of_an_attached_model_is_saved_with_a_warning(modules_to_save, way, inner, tmp_path):
    peft = pytest.importorskip("peft")
    model, part = build("bert")
    plain = build("bert")[0]
    plain.load_state_dict(model.state_dict())
    attach(part if inner else model, AttenuatedEncoding(learnable=True))
    model = adapted(model, modules_to_save, way)
    for folder in (tmp_path / "first", tmp_path / "again"):
        with pytest.warns(UserWarning, match=r"attach the same encoding.*AttenuatedEncoding") as warned:
            model.save_pretrained(folder)
        assert sum("attach" in str(each.message) for each in warned) == 1
    attach(plain, AttenuatedEncoding(learnable=True))
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "first").eval()
    ids = tokens(1, N)
    with torch.no_grad():
        assert_same_outputs(again(ids).logits, model(ids).logits)


def test_an_adapter_of_a_model_whose_encoding_was_removed_is_saved_without_a_warning(tmp_path):
    model, part = build("bert")
    attach(part, NoEncoding())
    around = adapted(model, None, "peft")
    around.state_dict()
    attached(around).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        around.save_pretrained(tmp_path)


def test_a_model_with_a_merged_adapter_is_saved_with_the_refusal(tmp_path):
    model, part = build("bert")
    attach(part, AttenuatedEncoding(learnable=True))
    merged = adapted(model, ["pelocality"], "peft").merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        merged.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSAL):
        hf.BertForMaskedLM.from_pretrained(tmp_path)
    ids = tokens(1, N)
    with torch.no_grad():
        assert_same_outputs(load(tmp_path)(ids).logits, merged(ids).logits)
