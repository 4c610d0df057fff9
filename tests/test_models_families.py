"""The record of each family, compared with the forward pass of the family's models."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.encodings import AttenuatedEncoding
from pelocality.models import attach, decompose, positional_attention
from pelocality.models.logits.terms import captured_inputs
from pelocality.models.sequence_model import SequenceModel
from tests.families import ANY, EVERY, base_of, family_of, small, tiny, tiny_any, tokens

N = 17
ABSOLUTE = [
    "bert", "roberta", "distilbert", "electra", "albert", "mpnet", "gpt2", "bert as decoder", "xlm-roberta",
    "camembert", "albert with inner layers", "gpt2 scaled by layer", "deberta with absolute positions",
]  # fmt: skip


def logits_from_facts(record, base, module, hidden):
    """The equation in KnownLogits' docstring, written out term by term."""
    query, key = record.project(module, hidden)
    n = hidden.shape[1]
    rotation = record.rotation(base, module, n)
    if rotation is not None:
        cos, sin = (torch.cat([each, each], dim=-1) for each in rotation)
        half = query.shape[-1] // 2

        def turn(x):
            return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

        query, key = turn(query), turn(key)
    logits = torch.zeros(*query.shape[:2], n, n, dtype=query.dtype)
    content_bias = record.content_bias(module)
    relative_keys = record.relative_keys(base, module, n)
    relative_queries = record.relative_queries(base, module, n)
    relative_bias = record.relative_bias(base, module, n)
    for i in range(n):
        for j in range(n):
            k = j - i + n - 1
            total = (query[:, :, i] * key[:, :, j]).sum(-1)
            if content_bias is not None:
                total = total + (content_bias * key[:, :, j]).sum(-1)
            if relative_keys is not None:
                total = total + (query[:, :, i] * relative_keys[:, k]).sum(-1)
            if relative_queries is not None:
                total = total + (relative_queries[:, k] * key[:, :, j]).sum(-1)
            total = total * record.scaling(module)
            if relative_bias is not None:
                total = total + relative_bias[:, k]
            logits[:, :, i, j] = total
    return logits


@pytest.mark.parametrize("name", EVERY)
def test_the_equation_with_the_facts_of_the_record_gives_the_attention_of_every_layer(name):
    model = tiny(name)
    model.config._attn_implementation = "eager"
    record = family_of(model)
    base = base_of(model)
    modules = record.attention_layers(base)
    with torch.no_grad(), captured_inputs(SequenceModel(model)) as inputs:
        attentions = base(tokens(2, N), output_attentions=True).attentions
        assert len(modules) == len(inputs) == len(attentions)
        for module, hidden, attention in zip(modules, inputs, attentions, strict=True):
            logits = logits_from_facts(record, base, module, hidden)
            visible = record.visible(base, module, N)
            expected = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            # some families pass through float32 inside: 2e-7 is its rounding, weights are of order 1
            assert (expected - attention).abs().max() < 2e-7
            assert (attention[:, :, ~visible] == 0).all()


@pytest.mark.parametrize("name", ABSOLUTE)
def test_the_absolute_input_equals_the_input_of_the_first_attention_module(name):
    model = tiny(name)
    record = family_of(model)
    base = base_of(model)
    absolute = record.absolute(base)
    ids = tokens(2, N)
    with torch.no_grad():
        with captured_inputs(SequenceModel(model)) as seen:
            base(ids)
        padding = absolute.table.padding_idx
        first = 0 if padding is None else padding + 1
        total = base.get_input_embeddings()(ids) + absolute.table.weight[first : first + N]
        if hasattr(getattr(base, "embeddings", None), "token_type_embeddings"):
            total = total + base.embeddings.token_type_embeddings.weight[0]
        if absolute.before_norm is not None:
            total = absolute.before_norm(total)
        expected = absolute.norm(total)
        if absolute.after_norm is not None:
            expected = absolute.after_norm(expected)
    torch.testing.assert_close(expected, seen[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "base_class"),
    [
        (lambda: hf.BertForMaskedLM(tiny("bert").config), "BertModel"),
        (lambda: hf.GPT2LMHeadModel(tiny("gpt2").config), "GPT2Model"),
        (lambda: hf.T5ForConditionalGeneration(tiny("t5").config), "T5Stack"),
        (lambda: hf.T5ForTokenClassification(tiny("t5").config), "T5Stack"),
        (lambda: hf.LlamaForCausalLM(tiny("llama").config), "LlamaModel"),
        (lambda: hf.DebertaV2ForMaskedLM(tiny("deberta-v2").config), "DebertaV2Model"),
        (lambda: nn.Sequential(tiny("bert")), "BertModel"),
        (lambda: torch.compile(tiny("bert")), "BertModel"),
    ],
)
def test_the_base_model_is_found_under_heads_and_in_wrappers(make, base_class):
    base = base_of(make())
    assert type(base).__name__ == base_class
    assert not getattr(base.config, "is_decoder", False)


def test_xlnet_with_bi_data_is_refused():
    model = tiny("xlnet")
    model.config.bi_data = True
    with pytest.raises(ValueError, match="bi_data"):
        SequenceModel(model)


class Logged(hf.BertModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_subclass_whose_forward_names_no_arguments_is_treated_as_the_class_it_extends():
    bert, ids = tiny("bert"), tokens(2, N)
    logged = Logged(bert.config).to(bert.dtype).eval()
    logged.load_state_dict(bert.state_dict())
    logits, attention = zip(
        *(
            (decompose(model, ids, token_type_ids=ids % 2).logits, positional_attention(model, length=N, words=[7]))
            for model in (bert, logged)
        ),
        strict=True,
    )
    torch.testing.assert_close(*logits)
    torch.testing.assert_close(*(each.attention for each in attention))


def test_several_models_side_by_side_are_refused():
    both = nn.ModuleDict({"student": tiny("bert"), "teacher": tiny("t5")})
    with pytest.raises(TypeError, match="with 2"):
        SequenceModel(both)
    assert SequenceModel(both["student"]).with_head is both["student"]
    model = hf.BertForMaskedLM(tiny("bert").config)
    assert (
        SequenceModel(nn.ModuleList([model.bert, model])).with_head is model
    )  # the same one twice, once without its head


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (nn.Linear(2, 2), r"SequenceModel\(module, vocabulary_size="),
        ("bert-base-uncased", "from_pretrained"),
        (SimpleNamespace(all_special_ids=[], model=None), "model first"),
    ],
)
def test_the_error_for_something_else_than_a_model_says_what_to_pass(given, advice):
    with pytest.raises(TypeError, match=advice):
        SequenceModel(given)


_SIZES = {"n_embd": 8, "n_layer": 1, "n_head": 2}


def test_the_longest_input_is_that_of_the_table_unless_it_is_disabled():
    model = tiny("roberta")
    assert SequenceModel(model).longest == SequenceModel(nn.DataParallel(model)).longest == 40
    with attach(model, AttenuatedEncoding()):
        assert SequenceModel(model).longest is None
        assert SequenceModel(nn.DataParallel(model)).positions_disabled
    with attach(model, AttenuatedEncoding(), position_embeddings="keep"):
        assert SequenceModel(model).longest == 40
        assert not SequenceModel(model).positions_disabled
    assert SequenceModel(tiny("t5")).longest is None


@pytest.mark.parametrize(
    "name", ["Data2VecText", "IBert", "XLMRobertaXL", "Xmod", "RobertaPreLayerNorm", "Luke", "Esm"]
)
def test_the_longest_input_runs_and_one_token_more_does_not_where_positions_are_counted_from_the_padding_id(name):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    more = {"Luke": {"entity_vocab_size": 9}, "Esm": {"mask_token_id": 3}, "Xmod": {"default_language": "en_XX"}}
    config = {"vocab_size": 97, "max_position_embeddings": 42, "pad_token_id": 1} | sizes | more.get(name, {})
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**config)).eval()
    assert SequenceModel(model).longest == 40
    model(tokens(1, 40))
    with pytest.raises((IndexError, RuntimeError), match="out of "):
        model(tokens(1, 41))


@pytest.mark.parametrize("name", sorted(EVERY | ANY))
def test_the_longest_input_runs_and_one_token_more_only_where_there_is_none(name):
    model = tiny(name) if name in EVERY else tiny_any(name)
    base, known = base_of(model), SequenceModel(model)
    longest, declared = known.longest, getattr(known.config, "max_position_embeddings", None)
    if longest is None:  # positions are computed for any distance, whatever the configuration says
        known.outputs({"input_ids": tokens(1, declared + 1 if isinstance(declared, int) and 0 < declared < 99 else 99)})
        return
    with torch.no_grad():
        base(tokens(1, longest))
        with pytest.raises((IndexError, RuntimeError)):
            base(tokens(1, longest + 1))


SINES = {  # positions in a buffer, in a table that grows, and slopes computed for one length
    "ctrl": (lambda: hf.CTRLModel(hf.CTRLConfig(vocab_size=97, n_positions=40, **_SIZES, dff=16)), 40),
    "xglm": (
        lambda: hf.XGLMModel(
            hf.XGLMConfig(
                vocab_size=97, max_position_embeddings=40, d_model=8, ffn_dim=8, num_layers=1, attention_heads=2
            )
        ),
        None,
    ),
    "mpt": (lambda: hf.MptModel(hf.MptConfig(vocab_size=97, d_model=8, n_heads=2, n_layers=1, max_seq_len=40)), 40),
    "nystromformer": (lambda: hf.NystromformerModel(small(hf.NystromformerConfig, max_position_embeddings=40)), 40),
}


@pytest.mark.parametrize("name", SINES)
def test_buffers_of_positions_are_limits_and_tables_that_grow_are_none(name):
    make, longest = SINES[name]
    model = make().eval()
    assert SequenceModel(model).longest == longest
    model(tokens(1, longest or 99))
    if longest is not None:
        with pytest.raises((IndexError, RuntimeError)):
            model(tokens(1, longest + 1))
