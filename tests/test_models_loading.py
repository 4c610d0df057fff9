"""Encodings saved with a model, or alone, and loaded."""

import copy
import json
import logging
import os
import pickle
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from pelocality.encodings import (
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    RelativeEncoding,
    RotaryEncoding,
    SinusoidalEncoding,
)
from pelocality.models import attached, load
from pelocality.models.attaching import loading
from tests.families import EVERY, assert_same_outputs, base_of, same_weights, small, tiny, tiny_any, tokens
from tests.test_encodings_modules import Pair
from tests.test_models_attachment import WITH_CONVOLUTION, attach, hidden, normalised_over_keys, random_table
from tests.test_models_attachment_modules import IDS
from tests.test_models_sequence_model import Own, seeded
from tests.test_models_unknown_families import BESIDE_IMAGES

N = 11
# XLNet always loads in float32, and transformers cannot load a decoder of T5 alone
SAVABLE = [name for name in EVERY if name not in ("xlnet one way", "t5 decoder")]
SAVABLE += ["qwen3", "gpt_oss", "jamba", "opt", "roformer", "gemma3", "mixtral", "t5gemma2"]


@pytest.fixture
def transformers_log(caplog):
    """Capture what transformers logs while it loads."""
    library = logging.getLogger("transformers")
    before = library.level
    library.addHandler(caplog.handler)
    library.setLevel(logging.WARNING)  # another test may have made transformers quiet
    yield caplog
    library.setLevel(before)
    library.removeHandler(caplog.handler)


def assert_same_models(one, other):
    """Compare the weights of two models exactly, and their outputs."""
    assert type(one) is type(other)
    assert same_weights(one.state_dict(), other.state_dict())
    assert_same_outputs(hidden(one, tokens(2, N)), hidden(other, tokens(2, N)))


def saved(folder, encoding, name="bert", **options):
    """Save a tiny model with an encoding, and return it."""
    model = tiny(name)
    attach(model, encoding, **options)
    model.save_pretrained(folder)
    return model


# ---- every model


def build(name):
    if name == "t5gemma2":
        return BESIDE_IMAGES[name][0]().float().eval()
    model = tiny(name) if name in EVERY else tiny_any(name)
    return model.float() if name == "xlnet" or name not in EVERY else model


@pytest.mark.parametrize("name", SAVABLE)
def test_a_saved_model_loads_with_exactly_the_same_weights_and_the_same_outputs(name, tmp_path):
    model, positions = build(name), "keep" if name == WITH_CONVOLUTION else "disable"
    encoding = normalised_over_keys(name, learnable=True) if name in EVERY else random_table(2).float()
    attachment = attach(model, encoding, position_embeddings=positions)
    with torch.no_grad():
        for index, parameter in enumerate(each for one in attachment.encodings for each in one.parameters()):
            parameter.add_(0.1 * index + 0.123456789)  # as training would
    described = model.config.to_dict()
    model.save_pretrained(tmp_path)
    written = {"dtype": str(model.dtype).removeprefix("torch."), "architectures": [type(model).__name__]}
    assert model.config.to_dict() == described | written or name == "t5gemma2"
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.pt"))
    loaded = load(tmp_path)
    assert_same_models(loaded, model)
    again = attached(loaded)
    assert again.position_embeddings == positions
    for old, new in zip(attachment.encodings, again.encodings, strict=True):
        assert old.configuration() == new.configuration()
        assert all(parameter.requires_grad for parameter in new.parameters())
    again.remove()
    attachment.remove()
    assert_same_models(loaded, model)


def test_transformers_loads_the_folder_without_the_encodings_and_reports_them(tmp_path, transformers_log):
    model = saved(tmp_path, AttenuatedEncoding(decay=0.2, learnable=True))
    loaded = load(tmp_path)
    assert "pelocality" not in transformers_log.text
    plain = hf.BertModel.from_pretrained(tmp_path)
    assert "LOAD REPORT" in transformers_log.text
    report = next(line for line in transformers_log.text.splitlines() if "pelocality" in line)
    assert "UNEXPECTED" in report
    assert attached(plain) is None
    for each in (model, loaded):
        attached(each).remove()
        assert_same_models(each, plain)
    transformers_log.clear()
    loaded.save_pretrained(tmp_path / "removed")
    hf.BertModel.from_pretrained(tmp_path / "removed")
    assert "UNEXPECTED" not in transformers_log.text


def old_folder(folder):
    """Rewrite a folder as version 0.2 wrote it: configurations of three keys, and a sentence in place of an option."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("pelocality._extra_state")]:
        whole = json.loads(bytes(weights[name].tolist()))
        old = {key: whole[key] for key in ("encoding", "position_embeddings", "attn_implementation")}
        weights[name] = torch.tensor(list(json.dumps(old).encode()), dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["experts_implementation"] = "This folder holds an encoding; load it with pelocality.load"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layers", [None, [0, 2]])
@pytest.mark.parametrize("name", ["bert", "llama", "bias of llama"])
def test_folders_of_version_0_2_are_loaded(name, layers, tmp_path):
    family = name.removeprefix("bias of ")
    rotation = RotaryEncoding.from_model(tiny("llama")).with_heads(2).scaled([0.5, 2.0])
    encoding = rotation if name == "llama" else normalised_over_keys(family, learnable=True)
    model = saved(tmp_path, encoding, family, layers=layers)
    old_folder(tmp_path)
    loaded = load(tmp_path)
    assert_same_outputs(hidden(loaded, tokens(2, N)), hidden(model, tokens(2, N)))
    assert repr(attached(loaded)) == repr(attached(model))
    loaded.save_pretrained(tmp_path / "again")
    assert_same_models(load(tmp_path / "again"), loaded)


# ---- encodings alone


FRESH = {
    "bert": (lambda: tiny("bert"), normalised_over_keys(learnable=True), {}),
    "llama": (lambda: tiny("llama"), RotaryEncoding(4, base=50.0, learnable=True), {}),
    "own": (lambda: seeded(Own).eval(), AttenuatedEncoding(3, decay=0.3), {"disable": ["positions"]}),
}


@pytest.mark.parametrize("name", FRESH)
def test_encodings_saved_alone_are_attached_to_a_model(name, tmp_path):
    make, encoding, options = FRESH[name]
    model, other, ids = make(), make(), IDS
    attachment = attach(model, encoding, **options | ({"example_inputs": IDS} if name == "own" else {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # as training would
    attachment.save(tmp_path / "new")
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["pelocality.safetensors"]
    other.load_state_dict({key: each for key, each in model.state_dict().items() if "pelocality" not in key})
    assert load(tmp_path / "new", other) is other
    assert same_weights(other.state_dict(), model.state_dict())
    with torch.no_grad():
        outputs = [each(ids) if name == "own" else each(ids)[0] for each in (other, model)]
    assert_same_outputs(*outputs)
    with pytest.raises(ValueError, match="has an encoding attached already"):
        load(tmp_path / "new", other)
    for each in (other, model):
        attached(each).remove()
    assert same_weights(other.state_dict(), model.state_dict())
    with pytest.raises(ValueError, match="has no module"):
        load(tmp_path / "new", tiny("gpt2"))


# ---- one model


def test_loading_in_threads_leaves_the_classes_of_transformers_as_they_were(tmp_path, monkeypatch):
    saved(tmp_path, AttenuatedEncoding(1, 0.3))
    expected, from_pretrained = hf.BertModel._keys_to_ignore_on_load_unexpected, hf.BertModel.from_pretrained
    waits = iter((0.1, 0.3))  # the second call begins before the first one ends, and ends after it

    def slow(*given, **options):
        time.sleep(next(waits))
        return from_pretrained(*given, **options)

    monkeypatch.setattr(hf.BertModel, "from_pretrained", slow)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(load, [tmp_path] * 2))) == 2
    assert hf.BertModel._keys_to_ignore_on_load_unexpected == expected


def test_each_layer_loads_its_own_encoding_also_beyond_the_ninth_and_from_shards(tmp_path):
    config = copy.deepcopy(tiny("bert").config)
    config.num_hidden_layers = 12
    model = hf.BertModel(config).eval()
    table = random_table(2).float()
    decays = [layer / 9 for layer in range(1, 11)]
    attach(model, [ALiBi(2, slopes=[0.3, 0.7]), table, *(AttenuatedEncoding(decay=each) for each in decays)])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path)
    assert_same_models(loaded, model)
    encodings = attached(loaded).encodings
    assert torch.equal(encodings[1].values, table.values)
    assert [each.decay.item() for each in encodings[2:]] == pytest.approx(decays)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_half_precision_is_saved_and_loaded_exactly(name, tmp_path):
    model = tiny(name).to(torch.bfloat16)
    attachment = attach(model, normalised_over_keys(name, learnable=True))
    for dtype in (torch.float32, torch.bfloat16):  # numbers that are learned keep their precision
        assert attachment.encodings[0].log_decay.dtype == dtype
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert loaded.dtype == torch.bfloat16
        assert_same_models(loaded, model)
        model.to(torch.bfloat16)  # now the encodings too


def test_a_pre_trained_model_loads_under_another_head_or_none(tmp_path):
    pretrained, ids = hf.BertForMaskedLM(tiny("bert").config).eval(), tokens(2, N)
    pretrained.set_attn_implementation("eager")
    attach(pretrained, normalised_over_keys())
    expected = hidden(pretrained, ids)
    pretrained.save_pretrained(tmp_path / "masked")
    classifier = load(tmp_path / "masked", model_class=hf.AutoModelForSequenceClassification, num_labels=3)
    assert isinstance(classifier, hf.BertForSequenceClassification)
    assert classifier.config._attn_implementation == "eager"
    assert classifier(ids).logits.shape == (2, 3)
    bare = load(tmp_path / "masked", model_class=hf.AutoModel, attn_implementation="sdpa")
    assert bare.config._attn_implementation == "sdpa"
    bare.save_pretrained(tmp_path / "bare")
    again = load(tmp_path / "bare", model_class=hf.BertForMaskedLM, config=str(tmp_path / "bare"))
    weights = pretrained.bert.state_dict()
    for loaded in (classifier.bert, bare, again.bert):
        torch.testing.assert_close(hidden(loaded, ids), expected, rtol=0, atol=1e-6)
        own = loaded.state_dict()
        # the configuration names the implementation too
        assert all(torch.equal(own[name], weight) for name, weight in weights.items() if "_extra_state" not in name)


class Total(RelativeEncoding):
    """A custom encoding that contains any number of encodings."""

    def __init__(self, parts):
        super().__init__(2)
        self.parts = self.kept(parts)

    kept = nn.ModuleList

    def at(self, distance):
        return sum(part.at(distance) for part in self.parts)


SAVED_ENCODINGS = {
    "equal decays": lambda: AttenuatedEncoding(2, decay=[0.2, 0.2]),
    "equal slopes": lambda: ALiBi(2, slopes=[0.5, 0.5]),
    "symmetry of targets": lambda: AttenuatedEncoding.from_targets(locality=[0.5, 0.6], length=16),
    "one target": lambda: AttenuatedEncoding.from_targets(locality=0.5, direction_balance=0.2, heads=2, length=16),
    "two encodings": lambda: Pair(ALiBi(1, slopes=0.3), random_table(1)),
    "a list of encodings": lambda: Total([random_table(2), ALiBi(2)]),
}


@pytest.mark.parametrize("make", SAVED_ENCODINGS.values(), ids=SAVED_ENCODINGS)
def test_encodings_of_every_form_are_saved_and_loaded(make, tmp_path):
    model = saved(tmp_path, make())
    model.load_state_dict(model.state_dict())
    loaded = load(tmp_path)
    assert_same_models(loaded, model)
    torch.testing.assert_close(attached(loaded).encodings[0](N), make().double()(N))


def test_the_configuration_is_json_of_the_time_of_saving(tmp_path):
    model = saved(tmp_path, SinusoidalEncoding(width=8))
    for encoding in attached(model).encodings:
        encoding.width = 16
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    configuration = json.loads(bytes(tensors["encoder.layer.0.attention.self.pelocality._extra_state"].tolist()))
    assert configuration["encoding"]["type"] == "SinusoidalEncoding"
    assert configuration["position_embeddings"] == "disable"
    assert configuration["attn_implementation"] == "sdpa"
    assert attached(load(tmp_path)).encodings[0].width == 16
    assert_same_models(load(tmp_path), model)


# ---- what is around the attached model


_BART = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in
         {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
_EXPERTS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 8,
            "num_experts": 2, "num_experts_per_tok": 1}  # fmt: skip
WHOLES = {  # a model, and the part of it that is given to `attach`
    "bert": (lambda: hf.BertForMaskedLM(tiny("bert").config), lambda model: model.bert),
    "decoder of t5": (lambda: hf.T5ForConditionalGeneration(tiny("t5").config), lambda model: model.decoder),
    "decoder of bart": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=99, d_model=16, **_BART)),
        lambda model: model.get_decoder(),
    ),
    "encoder of bert2bert": (
        lambda: hf.EncoderDecoderModel(
            encoder=tiny("bert").float(),
            decoder=hf.BertLMHeadModel(small(hf.BertConfig, is_decoder=True, add_cross_attention=True)),
        ),
        lambda model: model.encoder,
    ),
    "llava": (  # whose weights have older names on the hub
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                text_config=small(hf.LlamaConfig, num_key_value_heads=2),
                vision_config=small(hf.CLIPVisionConfig, image_size=8, patch_size=4),
                image_token_index=98,
            )
        ),
        lambda model: model.model.language_model,
    ),
    "experts": (lambda: hf.Qwen3MoeForCausalLM(small(hf.Qwen3MoeConfig, **_EXPERTS)), lambda model: model.model),
}


def plainly(model, folder):
    model.save_pretrained(folder)


def state_given(model, folder):
    weights = model.state_dict()
    model.save_pretrained(folder, state_dict=weights)


def by_trainer(model, folder):
    settings = hf.TrainingArguments(folder, report_to="none", use_cpu=True)
    hf.Trainer(model, settings).save_model(folder)


OTHERWISE = [(name, save) for name in ("bert", "decoder of t5") for save in (state_given, by_trainer)]


@pytest.mark.parametrize(("name", "save"), [*((name, plainly) for name in WHOLES), *OTHERWISE])
def test_a_model_around_the_attached_one_is_saved_and_loaded(name, save, tmp_path):
    make, part = WHOLES[name]
    model = make().float().eval()
    attachment = attach(part(model), ALiBi(base_of(part(model)).config.num_attention_heads))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        save(model, tmp_path / "first")
    loaded = load(tmp_path / "first")
    for each in (loaded, pickle.loads(pickle.dumps(copy.deepcopy(loaded)))):  # saved again
        each.save_pretrained(tmp_path / "again")
        assert same_weights(load(tmp_path / "again").state_dict(), model.state_dict())
    assert type(loaded) is type(model)
    attachment.remove()
    save(model, tmp_path / "plain")
    assert type(model).from_pretrained(tmp_path / "plain", output_loading_info=True)[1]["unexpected_keys"] == set()
    if name == "experts":
        eager = load(tmp_path / "first", experts_implementation="eager")
        assert eager.config._experts_implementation == "eager"
        assert loaded.config._experts_implementation == model.config._experts_implementation


def test_the_encodings_of_encoder_and_decoder_are_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model, ids = hf.T5ForConditionalGeneration(tiny("t5").config).eval(), tokens(2, N)
    for half in (model.encoder, model.decoder):
        attach(half, AttenuatedEncoding(decay=0.1, scale=9.0))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert None not in (attached(loaded.encoder), attached(loaded.decoder))
    with torch.no_grad():
        outputs = [each(ids, decoder_input_ids=ids).logits for each in (loaded, model)]
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(*outputs)


def test_an_encoding_can_be_attached_to_a_wrapped_model(tmp_path):
    model, ids = tiny("bert"), tokens(1, N)
    with attach(nn.Sequential(model), normalised_over_keys()):
        model.save_pretrained(tmp_path)
        assert_same_outputs(hidden(load(tmp_path), ids), hidden(model, ids))
    assert attached(model) is None


# ---- files and errors


def decay(model):
    return round(attached(model).encodings[0].decay.item(), 6)


def test_the_encoding_and_the_weights_are_read_from_the_same_file(tmp_path):
    model = tiny("bert").float()
    for number, folder, options in [
        (0.7, tmp_path, {"variant": "v2"}),
        (0.9, tmp_path, {}),
        (0.1, tmp_path / "step", {"max_shard_size": "20KB"}),
    ]:
        with attach(model, AttenuatedEncoding(decay=number)):
            model.save_pretrained(folder, **options)
    os.link(tmp_path / "model.v2.safetensors", tmp_path / "zzz.safetensors")
    assert decay(load(tmp_path)) == 0.9
    assert decay(load(tmp_path, variant="v2")) == 0.7
    assert decay(load(tmp_path, subfolder="step")) == decay(load(tmp_path / "step")) == 0.1
    with pytest.raises(ValueError, match="holds no encoding in the weights that would be loaded"):
        load(tmp_path, variant="v3")


def test_the_options_that_locate_files_apply_to_every_file(monkeypatch):
    asked = []

    def note(path, name, **options):
        asked.append((path, name, options.pop("_raise_exceptions_for_missing_entries"), options))

    monkeypatch.setattr(loading, "cached_file", note)
    place = {"revision": "v2", "token": "x", "cache_dir": "y", "local_files_only": True, "subfolder": "z"}
    with pytest.raises(ValueError, match="holds no encoding"):
        load("me/model", config=hf.BertConfig(architectures=["BertModel"]), variant="fp16", torch_dtype="auto", **place)
    names = ["pelocality.safetensors", "model.fp16.safetensors", "model.safetensors.index.fp16.json"]
    assert asked == [("me/model", name, False, place) for name in names]


def test_errors_of_loading_name_the_option_or_what_is_missing(tmp_path):
    saved(tmp_path, DistanceTable(2, 4))
    for options, kind, message in [
        ({"model_class": "BertModel"}, TypeError, "model_class must be"),
        ({"model_class": nn.Linear}, TypeError, "model_class must be"),
        ({"model_class": hf.AutoModelForSeq2SeqLM}, TypeError, "model_class must be .* model type 'bert'"),
        ({"model_class": hf.DistilBertModel, "attn_implementation": "eager"}, ValueError, r"no module 'encoder\.layer"),
        ({"num_hidden_layers": 2}, ValueError, r"no module 'encoder\.layer\.2\.attention\.self'"),
    ]:
        with pytest.raises(kind, match=message):
            load(tmp_path, **options)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    configuration = tmp_path / "config.json"
    configuration.write_text(configuration.read_text().replace("BertModel", "MyModel"))
    with pytest.raises(TypeError, match=r"model_class must be .* class 'MyModel'"):
        load(tmp_path)
    assert isinstance(load(tmp_path, model_class=hf.BertModel), hf.BertModel)
    tiny("bert").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds no encoding in the weights that would be loaded; load it"):
        load(tmp_path / "plain")


OLD = b'"position_embeddings": "keep", "attn_implementation": "sdpa"}'


def test_a_damaged_file_is_an_error(tmp_path):
    saved(tmp_path, DistanceTable(2, 4))
    weights, prefix = tmp_path / "model.safetensors", "encoder.layer.1.attention.self.pelocality."
    whole, numbers, key = load_file(weights), prefix + "encoding.values", prefix + "_extra_state"
    for lost, text, message in [
        ([numbers], None, r"Missing key\(s\)(.|\n)*values"),
        ([key], None, "in 'encoder.layer.1.attention.self' that cannot be made: '_extra_state'"),
        ([numbers, key], None, "for 2 of 3 attention modules only"),
        ([], b"{", "in 'encoder.layer.1.attention.self' that cannot be made"),
        ([], b"\xff", "in 'encoder.layer.1.attention.self' that cannot be made"),
        ([], b"[]", "in 'encoder.layer.1.attention.self' that cannot be made"),
        ([], b'{"encoding": {}}', "in 'encoder.layer.1.attention.self' that cannot be made"),
        ([], b'{"encoding": {"type": "Mine"}, ' + OLD, "'Mine' is not known.*import the module that defines it before"),
    ]:
        damaged = whole if text is None else whole | {key: torch.tensor(list(text), dtype=torch.uint8)}
        damaged = {name: tensor for name, tensor in damaged.items() if name not in lost}
        save_file(damaged, weights, {"format": "pt"})
        with pytest.raises((ValueError, RuntimeError), match=message):
            load(tmp_path)
    save_file(whole, weights, {"format": "pt"})
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SafetensorError):
        load(tmp_path)
    weights.unlink()
