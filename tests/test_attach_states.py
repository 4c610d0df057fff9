"""What an attached model writes down and takes back: state dicts, checkpoints, and weights that are not there."""

import copy
import os

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.attachment import attach, attached, load
from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    NoEncoding,
    RelativeEncoding,
    SinusoidalEncoding,
)
from tests.families import tiny, tokens
from tests.test_attach import ATTACHABLE, hidden, random_table, sharing
from tests.test_encodings_cache import Pair

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
def test_the_state_of_another_encoding_is_refused(saved, other, strict):
    one, two = tiny("bert"), tiny("bert", seed=1)
    attach(one, saved)
    attach(two, other)
    with pytest.raises(RuntimeError, match=r"saved were \{'type'.*attach the saved encoding first, or load the whole"):
        two.load_state_dict(one.state_dict(), strict=strict)


def test_the_state_of_kept_positions_is_refused_where_they_are_silenced():
    one, two = tiny("bert"), tiny("bert")
    attach(one, NoEncoding(), position_embeddings="keep")
    attach(two, NoEncoding())
    with pytest.raises(RuntimeError, match="position_embeddings='keep', but attached are"):
        two.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (lambda: ALiBi(2, slopes=[0.123456789, 3.0]), lambda: ALiBi(2)),  # other numbers, other lengths as text
        (lambda: AttenuatedEncoding(2, decay=0.3, learnable=True), lambda: AttenuatedEncoding(2, learnable=True)),
        (lambda: KERPLE(2, strength=0.7), lambda: KERPLE(2)),
    ],
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_the_state_of_the_same_encoding_with_other_numbers_fits(saved, other, dtypes):
    one, two, ids = tiny("bert").to(dtypes[0]), tiny("bert", seed=1).to(dtypes[1]), tokens(2, N)
    for encoding in attach(one, saved()).encodings:
        for parameter in encoding.parameters():
            parameter.data.mul_(1.2345678)
    attach(two, other())
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(hidden(two, ids).double(), hidden(one, ids).double(), rtol=0, atol=1e-4)
    for old, new in zip(attached(one).encodings, attached(two).encodings, strict=True):
        torch.testing.assert_close(new.double()(7), old.double()(7), rtol=1e-6, atol=0)


def test_a_state_without_the_encoding_lacks_its_configuration():
    model, plain = tiny("bert"), tiny("bert").state_dict()
    attach(model, NoEncoding())
    with pytest.raises(RuntimeError, match=r"Missing key.*pelocality\.configuration"):
        model.load_state_dict(plain)
    model.load_state_dict(plain, strict=False)


def test_what_is_saved_is_the_encoding_as_it_is_then(tmp_path):
    model, ids = tiny("bert"), tokens(2, N)
    for encoding in attach(model, SinusoidalEncoding(width=8)).encodings:
        encoding.width = 16
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert attached(loaded).encodings[0].width == 16
    assert torch.equal(hidden(loaded, ids), hidden(model, ids))


# ---- checkpoints


def test_the_encoding_is_read_from_the_file_that_the_weights_are_read_from(tmp_path):
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


def test_the_options_that_say_where_a_file_is_reach_every_file(monkeypatch):
    import pelocality.attachment.saving as saving

    asked = []

    def note(path, name, **options):
        asked.append((path, name, options.pop("_raise_exceptions_for_missing_entries"), options))

    monkeypatch.setattr(saving, "cached_file", note)
    place = {"revision": "v2", "token": "x", "cache_dir": "y", "local_files_only": True, "subfolder": "z"}
    with pytest.raises(ValueError, match="holds no encoding"):
        load("me/model", variant="fp16", torch_dtype="auto", **place)
    names = ["model.fp16.safetensors", "model.safetensors.index.fp16.json"]
    assert asked == [("me/model", name, False, place) for name in names]


@pytest.mark.skipif("t5" not in ATTACHABLE, reason="T5 needs transformers 5.15")
@pytest.mark.parametrize("halves", [("encoder",), ("decoder",), ("encoder", "decoder")])
def test_each_half_of_an_encoder_decoder_model_gets_what_it_had(halves, tmp_path):
    torch.manual_seed(0)
    model, ids = hf.T5ForConditionalGeneration(tiny("t5").config).eval(), tokens(2, N)
    for half in halves:
        attach(getattr(model, half), AttenuatedEncoding(decay=0.1, scale=9.0))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    for half in ("encoder", "decoder"):
        assert (attached(getattr(loaded, half)) is not None) == (half in halves)
    with torch.no_grad():
        assert torch.equal(loaded(ids, decoder_input_ids=ids).logits, model(ids, decoder_input_ids=ids).logits)


def test_what_cannot_be_loaded_is_said_before_or_after(tmp_path):
    from safetensors.torch import load_file, save_file

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
        (["configuration"], "without its configuration"),
        (["encoding.values", "configuration"], "for 2 of 3 attention modules only"),
    ]:
        kept = {name: tensor for name, tensor in tensors.items() if name not in [prefix + each for each in lost]}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_an_encoding_that_holds_others_is_attached_saved_and_loaded(tmp_path):
    model, ids = tiny("bert"), tokens(2, N)
    table = random_table(1)
    attach(model, Pair(ALiBi(1, slopes=0.3), table))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert torch.equal(attached(loaded).encodings[2].second.values, table.values)
    assert torch.equal(hidden(loaded, ids), hidden(model, ids))


def test_an_encoding_that_could_not_be_saved_is_refused_when_attached():
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


# ---- weights


def test_no_silent_weight_of_xlnet_is_changed_by_an_optimiser():
    model = tiny("xlnet").float().train()
    model.layer[1].rel_attn.r.requires_grad_(False)  # which stays as the user wanted it
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


def test_a_part_that_was_freed_leaves_the_whole_free():
    model = hf.BertForMaskedLM(tiny("bert").config).eval()
    model.set_attn_implementation("sdpa")
    ids = tokens(1, N)
    before = model(ids).logits
    attach(model, sharing())
    attached(model.bert).remove()
    assert torch.equal(model(ids).logits, before)
    model(ids, output_attentions=True)
    with attach(model, sharing()), pytest.raises(ValueError, match="set_attn_implementation"):
        model(ids, output_attentions=True)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_a_quantised_model_can_carry_an_encoding():
    model, ids = tiny("bert").float(), tokens(2, N)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    plain = hidden(quantised, ids)
    with attach(quantised, NoEncoding(), position_embeddings="keep"):
        torch.testing.assert_close(hidden(quantised, ids), plain, rtol=0, atol=1e-5)
    with attach(quantised, sharing()) as attachment:
        assert attachment.encodings[0].decay.dtype == torch.float32
        assert not torch.allclose(hidden(quantised, ids), plain, atol=1e-3)


def test_weights_that_are_not_there_are_refused():
    with torch.device("meta"):
        model = hf.BertModel(tiny("bert").config)
        encoding = AttenuatedEncoding()
    with pytest.raises(ValueError, match=r"weights of BertModel .* are on the meta device.*load them first"):
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
def test_a_symmetry_that_a_causal_model_would_ignore_is_refused(encoding):
    model = tiny("gpt2")
    with pytest.raises(
        ValueError, match=r"symmetry of AttenuatedEncoding acts on the future alone.* leave symmetry at"
    ):
        attach(model, encoding)
    attach(model, AttenuatedEncoding(learnable=["decay"])).remove()
    model.config.is_causal = False
    attach(model, encoding).remove()
