"""positional_logits against each family's attention on content-free or constant input."""

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.encodings import NoEncoding
from pelocality.metrics import locality
from pelocality.models import attach, decompose, positional_logits
from tests.families import EVERY, UNKNOWN, base_of, eagerly, family_of, offloaded, quantised, tiny

N = 14
EXACT = [
    "bert", "roberta", "distilbert", "electra", "albert", "mpnet", "xlnet", "t5", "gpt2", "bloom", "bert as decoder",
    "xlm-roberta", "camembert", "albert with inner layers", "gpt2 scaled by layer", "deberta with absolute positions",
    "xlnet one way", "mt5", "t5 decoder",
]  # fmt: skip
AVERAGE = ["modernbert", "deberta", "deberta-v2", "llama", "deberta-v2 c2p only", "mistral", "qwen2"]
TOLERANCE = 5e-7  # several families pass through float32 inside


def attention_without_content(model, layer):
    """The model's attention in one layer when the input of that layer has no content.

    The first layer gets an input of zero word embeddings. A deeper one gets zeros for hidden states.
    """
    record = family_of(model)
    base = base_of(model)
    width = base.get_input_embeddings().embedding_dim
    calls = iter(range(10**6))
    modules = dict.fromkeys(record.attention_layers(base))

    def silence(module, args, kwargs):
        if next(calls) == layer and layer > 0:
            args = tuple(torch.zeros_like(a) if i == 0 else a for i, a in enumerate(args))
            for name in ("hidden_states", "h"):
                if name in kwargs:
                    kwargs[name] = torch.zeros_like(kwargs[name])
        return args, kwargs

    handles = [module.register_forward_pre_hook(silence, with_kwargs=True) for module in modules]
    with eagerly(model):
        maps = base(inputs_embeds=torch.zeros(1, N, width).double(), output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    return maps[layer][0]


def test_every_model_of_the_contract_is_either_exact_or_an_average():
    assert set(EXACT) | set(AVERAGE) | {"deberta-v2 with shared projections"} == set(EVERY)


@pytest.mark.parametrize("name", EXACT)
def test_exact_logits_give_the_models_attention_without_content(name):
    model = tiny(name)
    delta = positional_logits(model, length=N)
    assert delta.method == "exact"
    assert delta.words == ()
    for index, layer in enumerate(delta.layers):
        own = attention_without_content(model, layer)
        assert (delta.attention[index] - own).abs().max() < TOLERANCE
        assert own.std() > 1000 * TOLERANCE  # there is something to get right


@pytest.mark.parametrize("name", AVERAGE)
def test_constant_content_logits_give_the_models_attention_for_that_word(name):
    model = tiny(name)
    delta = positional_logits(model, length=N, words=[7])
    base = base_of(model)
    with eagerly(model):
        own = base(torch.full((1, N), 7), output_attentions=True).attentions
    assert delta.method == "words"
    assert delta.word_ids == (7,)
    assert delta.layers == (0, 1, 2)
    for weights, attention in zip(delta.attention, own, strict=True):
        assert (weights - attention[0]).abs().max() < TOLERANCE
        assert attention.std() > 1000 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "deberta-v2"])
def test_the_average_is_the_mean_of_the_words_logits(name):
    model = tiny(name)
    together = positional_logits(model, length=N, words=[7, 9, 30])
    apart = [positional_logits(model, length=N, words=[word]).logits for word in (7, 9, 30)]
    torch.testing.assert_close(together.logits, torch.stack(apart).mean(0))


@pytest.mark.parametrize("name", EVERY)
def test_relative_is_given_where_logits_depend_on_distance_alone(name):
    model = tiny(name)
    if name == "deberta-v2 with shared projections":
        with pytest.raises(ValueError, match="repeated word"):
            positional_logits(model, length=N)
        return
    delta = positional_logits(model, length=N)
    absolute = family_of(model).max_length(base_of(model)) is not None
    assert (delta.relative is None) == absolute
    if not absolute:
        for i in range(N):
            for j in range(N):
                torch.testing.assert_close(delta.logits[..., i, j], delta.relative[..., j - i + N - 1])


def test_mpnet_is_relative_below_its_first_layer():
    delta = positional_logits(tiny("mpnet"), length=N, layers=[1, -1])
    assert delta.layers == (1, 2)
    assert delta.relative.shape == (2, 2, 2 * N - 1)


def test_metrics_accept_the_result():
    delta = positional_logits(tiny("t5"), length=N)
    assert torch.equal(locality(delta), locality(delta.attention))


def without_positions():
    config = tiny("deberta").config
    config.relative_attention = False
    return hf.DebertaModel(config)


@pytest.mark.parametrize(
    ("make", "arguments", "error", "reason"),
    [
        (lambda: tiny("bert"), {"layers": [0, 1]}, ValueError, "layers must name"),
        (lambda: tiny("t5"), {"layers": [3]}, ValueError, "layers"),
        (lambda: tiny("roberta"), {"length": 41}, ValueError, "at most 40"),
        (lambda: tiny("bert").to("meta"), {}, ValueError, "meta device"),
        (lambda: quantised(tiny("llama")), {}, ValueError, "quantised"),
        (lambda: quantised(tiny("deberta-v2")), {}, ValueError, "quantised"),
        (lambda: UNKNOWN["megatron-bert"](), {}, ValueError, "not known; .* albert, apertus, arcee"),
        (without_positions, {}, ValueError, "no known positional terms"),
    ],
)
def test_what_has_no_positional_logits_is_refused_with_the_reason(make, arguments, error, reason):
    with pytest.raises(error, match=reason):
        positional_logits(make(), **{"length": N, "words": [7]} | arguments)


def test_half_precision_models_give_float32_logits():
    model = tiny("llama").to(torch.bfloat16)
    delta = positional_logits(model, length=N, words=[7])
    assert delta.logits.dtype == torch.float32
    exact = positional_logits(tiny("llama"), length=N, words=[7])
    assert (delta.logits - exact.logits).abs().max() < 0.05 * exact.logits.abs().max()


def test_a_model_with_an_attached_encoding_is_refused():
    model = tiny("bert")
    with attach(model, NoEncoding()):
        for ask in (lambda: positional_logits(model, length=8), lambda: decompose(model, [5, 6, 7])):
            with pytest.raises(ValueError, match="attached encoding"):
                ask()
    assert positional_logits(model, length=8).logits.shape[-1] == 8


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "deberta"])
def test_offloaded_and_wrapped_models_give_what_the_plain_one_gives(name):
    expected = positional_logits(tiny(name), length=N, words=[7, 9])
    model = offloaded(tiny(name))
    for wrapped in (model, nn.DataParallel(tiny(name))):
        found = positional_logits(wrapped, length=N, words=[7, 9])
        torch.testing.assert_close(found.logits, expected.logits)
    moved = [parameter for parameter in model.parameters() if parameter.is_meta]
    assert len(moved) == len(list(model.parameters()))  # they went back to where they were


def test_a_bias_needs_no_queries_and_is_read_from_a_quantised_model_too():
    model = tiny("t5").float()
    expected = positional_logits(model, length=N).logits
    torch.testing.assert_close(positional_logits(quantised(model), length=N).logits, expected)


def test_the_family_is_that_of_the_language_model_in_a_model_of_images_and_text():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    text = hf.LlamaConfig(**size, vocab_size=99, pad_token_id=0)
    vision = hf.CLIPVisionConfig(**size, image_size=4, patch_size=2)
    llava = hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=vision)).eval()
    llama = llava.model.language_model
    options = {"length": 9, "words": [7, 8], "progress": False}
    for outer in (llava, llava.model):
        found, expected = positional_logits(outer, **options), positional_logits(llama, **options)
        assert torch.equal(found.logits, expected.logits)
        ids = torch.tensor([[7, 9, 8, 11]])
        assert torch.equal(decompose(outer, ids).logits, decompose(llama, ids).logits)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2", "deberta-v2 c2p only"])
def test_logits_of_deberta_are_the_two_terms_of_distance_alone(name):
    model = tiny(name)
    delta = positional_logits(model, length=N, words=[7])
    parts = decompose(model, [7] * N)
    terms = parts.content_to_position + parts.position_to_content
    torch.testing.assert_close(delta.logits, terms)
    assert parts.content.abs().max() > 0.1


class Bridge(nn.Module):
    """A module of another library around an attention module."""

    def __init__(self, inner):
        super().__init__()
        self.original_component = inner

    def forward(self, *args, **kwargs):
        return self.original_component(*args, **kwargs)


class Own(nn.Module):
    """An attention module of another library, which takes a mask."""

    def forward(self, hidden_states, attention_mask=None):
        return hidden_states, None


@pytest.mark.parametrize("make", [nn.Identity, Own])
@pytest.mark.parametrize("some", [slice(None), slice(1)], ids=["all", "one"])
def test_a_model_whose_attention_modules_were_replaced_is_refused(make, some):
    model = tiny("gpt2")
    for block in model.h[some]:
        block.attn = make()
    for call in (lambda: positional_logits(model, length=N), lambda: decompose(model, [1, 2, 3])):
        with pytest.raises(ValueError, match="replaced"):
            call()


def test_an_attention_module_inside_another_module_is_found():
    model = tiny("gpt2")
    expected = positional_logits(model, length=N).logits
    for block in model.h:
        block.attn = Bridge(block.attn)
    assert torch.equal(positional_logits(model, length=N).logits, expected)


def test_an_attention_module_that_another_one_holds_and_does_not_call_is_refused():
    model = tiny("gpt2")
    for block in model.h:
        block.attn = Bridge(block.attn)
        block.attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match="replaced"):
        positional_logits(model, length=N)
