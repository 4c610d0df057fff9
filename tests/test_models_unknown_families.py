"""Identical-word probing of families without a record, and of models that cannot be probed."""

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.encodings import ALiBi
from pelocality.models import SequenceModel, attach, attached, decompose, positional_attention, reflection_gap
from tests.families import UNKNOWN, small, tiny

N = 12
WORDS = [7, 9, 30, 55]


@pytest.mark.parametrize("name", UNKNOWN)
def test_families_without_a_record_are_probed(name):
    model = UNKNOWN[name]().eval()
    with pytest.raises(ValueError, match="not known"):
        decompose(model, [7, 9])
    result = positional_attention(model, length=N, words=WORDS)
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        one = model(torch.full((1, N), WORDS[0]), output_attentions=True).attentions
    torch.testing.assert_close(positional_attention(model, length=N, words=WORDS[:1]).attention, torch.cat(one))
    assert result.attention.shape == (2, 2, N, N)


REFUSED = {
    "mamba": (lambda: hf.MambaModel(hf.MambaConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1)), "no attention"),
    "fnet": (lambda: hf.FNetModel(hf.FNetConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1)), "no attention"),
    "longformer": (lambda: hf.LongformerModel(small(hf.LongformerConfig, attention_window=4)), "window"),
    "big_bird": (lambda: hf.BigBirdModel(small(hf.BigBirdConfig, attention_type="block_sparse")), "original_full"),
    "fsmt": (
        lambda: hf.FSMTModel(
            hf.FSMTConfig(src_vocab_size=99, tgt_vocab_size=99, d_model=8, encoder_layers=1, decoder_layers=1,
                          encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2)
        ),
        r"no token embeddings; pass SequenceModel\(model, inputs=",
    ),
    "vision-encoder-decoder": (
        lambda: hf.VisionEncoderDecoderModel(
            hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
                hf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
                small(hf.BertConfig, is_decoder=True, add_cross_attention=True),
            )
        ),
        r"no token embeddings; pass model\.decoder",
    ),
    "audio-spectrogram-transformer": (
        lambda: hf.ASTModel(hf.ASTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)),
        "input_ids",
    ),
    "deberta": (lambda: hf.DebertaModel(small(hf.DebertaConfig, talking_head=True)), "mixes the logits"),
}  # fmt: skip


_TEXT = {
    "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16,
           "image_size": 8, "patch_size": 4}  # fmt: skip
_GEMMA = {"mm_tokens_per_image": 4, "vision_config": _VISION}


def t5gemma2():
    encoder = hf.T5Gemma2EncoderConfig(text_config=_TEXT, **_GEMMA)
    return hf.T5Gemma2Model(hf.T5Gemma2Config(encoder=encoder, decoder=_TEXT, vocab_size=99))


# models of images and text, and where the model of the text is in them
BESIDE_IMAGES = {
    "gemma3": (
        lambda: hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=_TEXT, **_GEMMA)),
        "model.language_model",
    ),
    "t5gemma2": (t5gemma2, "encoder.text_model"),
    "llama4": (
        lambda: hf.Llama4ForConditionalGeneration(
            hf.Llama4Config(
                text_config=_TEXT | {"layer_types": None, "num_local_experts": 2, "intermediate_size_mlp": 16,
                                     "no_rope_layers": [1, 1], "pad_token_id": 0},
                vision_config=_VISION | {"num_attention_heads": 2, "vision_output_dim": 16, "projector_input_dim": 16,
                                         "projector_output_dim": 16},
            )
        ),
        "language_model.model",
    ),
    "clip": (
        lambda: hf.CLIPModel(
            hf.CLIPConfig(
                text_config={**_VISION, "vocab_size": 99, "num_hidden_layers": 2, "num_attention_heads": 2},
                vision_config=_VISION,
            )
        ),
        "text_model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_probed_are_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"model type '{name}'(.|\n)*{reason}"):
        positional_attention(make(), length=N, words=WORDS)


def bart():
    return hf.BartModel(
        hf.BartConfig(vocab_size=99, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
                      decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2)
    )  # fmt: skip


def test_of_an_encoder_decoder_model_the_encoder_is_probed_unless_the_decoder_is_passed():
    model = bart()
    result = positional_attention(model, length=N, words=WORDS)
    assert result.source.model_class == "BartEncoder"
    assert not result.source.causal
    torch.testing.assert_close(
        positional_attention(model.get_encoder(), length=N, words=WORDS).attention, result.attention
    )
    assert positional_attention(model.get_decoder(), length=N, words=WORDS).source.causal


@pytest.mark.parametrize("name", BESIDE_IMAGES)
def test_beside_images_the_model_of_the_text_is_measured_and_given_encodings(name):
    make, text = BESIDE_IMAGES[name]
    model = make().eval()
    part = model.get_submodule(text)
    assert SequenceModel(model).module is SequenceModel(part).module is part
    result = positional_attention(model, length=N, words=WORDS)
    assert torch.equal(result.attention, positional_attention(part, length=N, words=WORDS).attention)
    assert result.source.model_class == type(part).__name__
    with attach(model, ALiBi(2)):
        assert len(attached(part).encodings) == len(result.layers) == 2
        assert SequenceModel(model).longest is SequenceModel(part).longest is None
        assert SequenceModel(model).positions_disabled


def test_the_positions_of_an_image_encoder_beside_the_text_are_no_limit():
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    model = hf.GitModel(small(hf.GitConfig, max_position_embeddings=40, vision_config=vision)).eval()
    assert SequenceModel(model).longest == 40
    assert positional_attention(model, length=N, words=WORDS[:1]).length == N


def test_limits_of_another_name_in_the_configuration_are_known():
    halves = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    whisper = hf.WhisperConfig(vocab_size=99, d_model=16, max_target_positions=70, pad_token_id=0, **halves)
    decoder = hf.WhisperModel(whisper).eval().get_decoder()
    mpt = hf.MptModel(hf.MptConfig(vocab_size=99, d_model=16, n_heads=2, n_layers=2, max_seq_len=70)).eval()
    for model in (decoder, mpt):
        assert SequenceModel(model).longest == 70
        assert positional_attention(model, length=70, words=WORDS[:1]).length == 70
        with pytest.raises(ValueError, match="70 positions"):
            reflection_gap(model, [7] * 71)


def test_a_model_that_returns_no_weights_is_refused():
    class Silent(hf.BertModel):
        def forward(self, input_ids=None, **_):
            return hf.modeling_outputs.BaseModelOutput(last_hidden_state=torch.zeros(*input_ids.shape, 16))

    with pytest.raises(ValueError, match=r"no attention over all its tokens was seen"):
        positional_attention(Silent(tiny("bert").config), length=N, words=WORDS)


def test_a_table_shorter_than_its_configuration_raises():
    model = UNKNOWN["megatron-bert"]()
    model.embeddings.position_embeddings = nn.Embedding(6, 16)
    with pytest.raises(ValueError, match="6 positions"):
        positional_attention(model, length=N, words=WORDS)
