"""Saving and loading models with encodings attached."""

import copy
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn

from pelocality.encodings import ALiBi, AttenuatedEncoding, DistanceTable, NoEncoding
from pelocality.models import attached, load
from tests.families import assert_same_outputs, same_weights, tiny, tokens
from tests.test_models_attachment import (
    ATTACHABLE,
    WITH_CONVOLUTION,
    attach,
    hidden,
    normalised_over_keys,
    random_table,
)

N = 11
# XLNet always loads in float32, and transformers cannot load a decoder of T5 alone
SAVABLE = [name for name in ATTACHABLE if not name.startswith("xlnet") and name != "t5 decoder"]


@pytest.fixture
def transformers_log(caplog):
    """Capture what transformers logs while it loads."""
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    yield caplog
    library.removeHandler(caplog.handler)


def test_loading_in_threads_leaves_the_classes_of_transformers_as_they_were(tmp_path, monkeypatch):
    model = tiny("bert")
    attach(model, AttenuatedEncoding(1, 0.3))
    model.save_pretrained(tmp_path)
    expected, from_pretrained = hf.BertModel._keys_to_ignore_on_load_unexpected, hf.BertModel.from_pretrained

    waits = iter((0.2, 0.6))  # the second call begins before the first one ends, and ends after it

    def slow(*given, **options):
        time.sleep(next(waits))
        return from_pretrained(*given, **options)

    monkeypatch.setattr(hf.BertModel, "from_pretrained", slow)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(load, [tmp_path] * 2))) == 2
    assert hf.BertModel._keys_to_ignore_on_load_unexpected == expected


@pytest.mark.parametrize("name", [*SAVABLE, "xlnet"])
def test_a_saved_model_loads_with_exactly_the_same_weights_and_the_same_outputs(name, tmp_path):
    model, ids = tiny(name), tokens(2, N)
    if name == "xlnet":
        model = model.float()
    position_embeddings = "keep" if name == WITH_CONVOLUTION else "disable"
    attachment = attach(model, normalised_over_keys(name, learnable=True), position_embeddings=position_embeddings)
    with torch.no_grad():
        for index, encoding in enumerate(attachment.encodings):
            encoding.log_decay.add_(0.1 * index + 0.123456789)  # as training would
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, config=str(tmp_path))
    assert same_weights(load(tmp_path).state_dict(), loaded.state_dict())
    assert type(loaded) is type(model)
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))
    again = attached(loaded)
    assert again.position_embeddings == position_embeddings
    for old, new in zip(attachment.encodings, again.encodings, strict=True):
        assert torch.equal(old.log_decay, new.log_decay)
        assert new.configuration()["scale"] == 5.0
        assert new.log_decay.requires_grad
    again.remove()
    attachment.remove()
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("name", SAVABLE)
def test_transformers_refuses_a_saved_folder_and_names_the_function_that_loads_it(name, tmp_path, transformers_log):
    model = tiny(name)
    position_embeddings = "keep" if name == WITH_CONVOLUTION else "disable"
    attach(model, NoEncoding(), position_embeddings=position_embeddings)  # which has no numbers to save
    described = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert model.config.to_dict() == described | {"dtype": "float64", "architectures": [type(model).__name__]}
    for model_class in (type(model), hf.AutoModel):
        for more in ({}, {"attn_implementation": "eager", "dtype": torch.float32, "ignore_mismatched_sizes": True}):
            with pytest.raises(ValueError, match=r"load it with pelocality\.load"):
                model_class.from_pretrained(tmp_path, **more)
    assert hf.AutoConfig.from_pretrained(tmp_path).model_type == model.config.model_type
    loaded = load(tmp_path)
    assert "pelocality" not in transformers_log.text
    assert "UNEXPECTED" not in transformers_log.text
    attached(loaded).remove()
    loaded.save_pretrained(tmp_path)
    type(model).from_pretrained(tmp_path)


def test_each_layer_loads_the_encoding_that_was_saved_from_it(tmp_path):
    model, ids = tiny("bert").float(), tokens(2, N)
    table = random_table(2).float()
    attach(model, [ALiBi(2, slopes=[0.3, 0.7]), table, AttenuatedEncoding(decay=0.2, form="logits")])
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert [type(encoding) for encoding in attached(loaded).encodings] == [ALiBi, DistanceTable, AttenuatedEncoding]
    assert torch.equal(attached(loaded).encodings[1].values, table.values)
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))


def test_layers_beyond_the_ninth_stay_in_order(tmp_path):
    config = copy.deepcopy(tiny("bert").config)
    config.num_hidden_layers = 12
    model = hf.BertModel(config).eval()
    attach(model, [AttenuatedEncoding(decay=0.1 + 0.1 * layer) for layer in range(12)])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    decays = [encoding.decay.item() for encoding in attached(load(tmp_path)).encodings]
    assert decays == pytest.approx([0.1 + 0.1 * layer for layer in range(12)])


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_half_precision_is_saved_and_loaded_exactly(name, tmp_path):
    model, ids = tiny(name).to(torch.bfloat16), tokens(2, N)
    attachment = attach(model, normalised_over_keys(name, learnable=True))
    assert attachment.encodings[0].log_decay.dtype == torch.float32  # numbers that are learned keep their precision
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert attached(loaded).encodings[0].log_decay.dtype == torch.float32
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))
    model.to(torch.bfloat16)  # now the encodings too
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert attached(loaded).encodings[0].log_decay.dtype == torch.bfloat16
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(hidden(loaded, ids), hidden(model, ids))


def test_the_saved_attention_implementation_is_used_unless_another_is_given(tmp_path):
    model = tiny("bert")
    model.set_attn_implementation("eager")
    attach(model, normalised_over_keys())
    model.save_pretrained(tmp_path)
    assert load(tmp_path).config._attn_implementation == "eager"
    assert load(tmp_path, attn_implementation="sdpa").config._attn_implementation == "sdpa"


def test_a_pre_trained_model_loads_under_another_head_or_none(tmp_path):
    pretrained = hf.BertForMaskedLM(tiny("bert").config).eval()
    attach(pretrained, normalised_over_keys())
    ids = tokens(2, N)
    expected = hidden(pretrained, ids)
    pretrained.save_pretrained(tmp_path / "masked")
    classifier = load(tmp_path / "masked", model_class=hf.AutoModelForSequenceClassification, num_labels=3)
    assert isinstance(classifier, hf.BertForSequenceClassification)
    assert classifier(ids).logits.shape == (2, 3)
    assert_same_outputs(hidden(classifier, ids), expected)
    bare = load(tmp_path / "masked", model_class=hf.AutoModel)
    assert_same_outputs(hidden(bare, ids), expected)
    bare.save_pretrained(tmp_path / "bare")
    again = load(tmp_path / "bare", model_class=hf.BertForMaskedLM)
    assert_same_outputs(hidden(again, ids), expected)
    weights = pretrained.bert.state_dict()
    for loaded in (classifier.bert, bare, again.bert):
        assert same_weights({name: loaded.state_dict()[name] for name in weights}, weights)
    bare.set_attn_implementation("eager")
    assert len(bare(ids, output_attentions=True).attentions) == 3


def test_a_state_dict_is_loaded_into_a_model_with_an_equal_encoding():
    """As a trainer does when it resumes."""
    one, two, ids = tiny("bert"), tiny("bert", seed=1), tokens(2, N)
    attach(one, random_table(2))
    attach(two, DistanceTable(2, length=7, signed=True))
    two.load_state_dict(one.state_dict())
    assert same_weights(one.state_dict(), two.state_dict())
    assert_same_outputs(hidden(one, ids), hidden(two, ids))


def test_the_safetensors_file_holds_the_configuration_as_json(tmp_path):
    model = tiny("bert")
    attach(model, AttenuatedEncoding(decay=0.25))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    configuration = json.loads(bytes(tensors["encoder.layer.0.attention.self.pelocality._extra_state"].tolist()))
    assert configuration["encoding"]["type"] == "AttenuatedEncoding"
    assert configuration["encoding"]["decay"] == 0.25
    assert configuration["position_embeddings"] == "disable"
    assert configuration["attn_implementation"] == "sdpa"


def test_errors_of_loading_give_the_reason(tmp_path):
    model = tiny("bert")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds no encoding in the weights that would be loaded; load it"):
        load(tmp_path / "plain")
    attach(model, NoEncoding())
    model.save_pretrained(tmp_path / "attached")
    with pytest.raises(ValueError, match=r"no module 'encoder\.layer\.0\.attention\.self'"):
        load(tmp_path / "attached", model_class=hf.DistilBertModel, attn_implementation="eager")
    configuration = tmp_path / "attached" / "config.json"
    configuration.write_text(configuration.read_text().replace("BertModel", "MyModel"))
    with pytest.raises(ValueError, match="transformers has no class 'MyModel'; give yours as model_class"):
        load(tmp_path / "attached")
    assert isinstance(load(tmp_path / "attached", model_class=hf.BertModel), hf.BertModel)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TypeError, match=r"path must be a folder or a name on the hub, got NoEncoding\("):
        load(NoEncoding())
    with pytest.raises(ValueError, match=r"an adapter of peft, not a model; load the base model, attach .*PeftModel"):
        load(tmp_path)


def test_an_encoding_can_be_attached_to_a_wrapped_model(tmp_path):
    model, ids = tiny("bert"), tokens(1, N)
    with attach(nn.Sequential(model), normalised_over_keys()):
        model.save_pretrained(tmp_path)
        assert_same_outputs(hidden(load(tmp_path), ids), hidden(model, ids))
    assert attached(model) is None
