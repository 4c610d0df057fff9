"""Everything that takes tensors or a model computes on another device what it computes on a CPU.

On CUDA where there is a GPU, otherwise on a pretended device. As that changes the process for good, these tests have
one of their own: `test_another_device.py` starts it.
"""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pelocality import metrics
from pelocality.encodings import (
    AttenuatedEncoding,
    DistanceTable,
    PositionalSelfAttention,
    RotaryEncoding,
    SinusoidalEncoding,
    attention_function,
    biased_attention,
)
from pelocality.evaluation import evaluate, evaluate_needles, loss_by_position, pseudo_log_likelihood
from pelocality.evaluation.dependencies import dependency_accuracy
from pelocality.metrics.accumulate import MeanAttention, MeanOver
from pelocality.metrics.without_matrix import measure_relative
from pelocality.models import (
    AttentionFunction,
    attach,
    attached,
    audit,
    decompose,
    influence,
    load,
    positional_attention,
    positional_logits,
    reflection_gap,
    relocate,
    rotary_bands,
    text_average,
)
from pelocality.models.logits import terms
from pelocality.probes import needle_items
from tests.families import ANY, FAMILIES, tiny, tiny_any, tokens
from tests.names import METRICS
from tests.test_encodings import FIXED, LEARNED
from tests.test_evaluation import classifier, shuffled
from tests.test_evaluation_dependencies import random_sentences
from tests.test_evaluation_likelihood import SENTENCES, masked_model, masking
from tests.test_evaluation_needles import TOKENIZER, llama
from tests.test_metrics import random_attention
from tests.test_models_function import Own
from tests.test_models_relocation import OPTIONS, TEXTS, bert, make_tokenizer, own_table
from tests.test_models_words import model_for, wordpiece

N = 11
if torch.cuda.is_available():
    DEVICE = "cuda"
else:
    from tests.pretended_device import NAME as DEVICE


@pytest.fixture(autouse=True)
def _subclasses_are_plain(monkeypatch):
    """The weights of the pretended device are of a subclass, as those of quantised models are."""
    if DEVICE != "cuda":
        monkeypatch.setattr(terms, "refuse_quantised", lambda *_: None)


def moved(value):
    """Return a copy of a tensor or a model on the other device."""
    return copy.deepcopy(value).to(DEVICE)


def assert_same(there, here, rtol=1e-5, atol=1e-6):
    """Compare results of the other device and of the CPU, in whatever they are held."""
    if isinstance(here, Tensor):
        torch.testing.assert_close(there.cpu(), here, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(here, (tuple, list)):
        for one, other in zip(there, here, strict=True):
            assert_same(one, other, rtol, atol)
    elif isinstance(here, float):
        assert there == pytest.approx(here, rel=rtol, abs=atol)
    else:
        for name, value in vars(here).items():
            if isinstance(value, Tensor):
                assert_same(getattr(there, name), value, rtol, atol)


def test_the_other_device_refuses_tensors_of_the_cpu():
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name):
    function, attention = getattr(metrics, name), random_attention(2, 3, N, N)
    found = function(moved(attention))
    assert_same(found, function(attention))
    assert {each.device.type for each in ([found] if isinstance(found, Tensor) else vars(found).values())} == {DEVICE}
    mask = torch.ones(2, N)
    mask[0, 8:] = 0
    if name not in ("crop", "window"):
        assert_same(function(moved(attention), mask=mask), function(attention, mask=mask))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_metrics_of_many_positions(dtype):
    attention = random_attention(3, 200, 200, dtype=dtype)
    assert_same(metrics.measure(moved(attention)), metrics.measure(attention), rtol=0, atol=1e-5)


class Reads(TorchDispatchMode):
    """Collects the operations that read numbers of the other device, and so wait for it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        devices = [each.device.type if isinstance(each, Tensor) else "cpu" for each in (*arguments[:1], result)]
        if devices == [DEVICE, "cpu"] and not isinstance(result, tuple | list):
            self.names.append(function.name())
        return result


@pytest.mark.parametrize("metric", [metrics.locality, metrics.symmetry, metrics.measure, metrics.relative_asymmetry])
def test_metrics_read_sums_and_corners_alone(metric):
    attention = moved(random_attention(2, 3, N, N))
    with Reads() as reads:
        metric(attention)
    assert reads.names == ["aten::_to_copy"] * 2


def test_gradients_of_metrics():
    gradients = []
    for device in (DEVICE, "cpu"):
        attention = random_attention(2, N, N).to(device).requires_grad_()
        sum(each.sum() for each in vars(metrics.measure(attention)).values()).backward()
        gradients.append(attention.grad)
    assert_same(*gradients)


@pytest.mark.parametrize("make", [lambda: MeanOver(metrics.locality, shape=(3,)), lambda: MeanAttention(N, shape=(3,))])
def test_accumulators(make):
    found = []
    for device in (DEVICE, "cpu"):
        mean = make().to(device)
        for seed in range(2):
            mean.update(random_attention(2, 3, N, N, seed=seed).to(device))
        found.append(mean.compute())
    assert_same(*found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", FIXED + LEARNED)
def test_encodings(make, causal):
    encoding = make(causal)
    there = moved(encoding)
    assert_same(there.weights(N), encoding.weights(N))
    for length in (N,) if causal else (N, 600):  # above 512 x 512 scores a CPU takes another way
        found = []
        for each, device in ((there, DEVICE), (encoding, "cpu")):
            torch.manual_seed(0)
            states = torch.randn(3, 2, 3, length, 8).to(device).requires_grad_()
            each.zero_grad()
            output = biased_attention(*states, each)
            output.square().sum().backward()
            found.append([output.detach(), states.grad, *(parameter.grad for parameter in each.parameters())])
        for one, other in zip(*found, strict=True):
            assert_same(one, other, atol=1e-4 * float(other.abs().max()))
    if not causal:
        layer, x = PositionalSelfAttention(24, 3, encoding=encoding).eval(), torch.randn(2, N, 24)
        assert_same(moved(layer)(moved(x))[0], layer(x)[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "dim"), [(640, 64), (700, 32), (600, 20)])
def test_attention_in_half_precision(queries, dim, causal, padded, monkeypatch):
    """On a GPU of NVIDIA by kernels of our own, unless the dimensions are no power of two."""
    monkeypatch.setattr(attention_function, "_MANY", 1)
    encoding, keys = DistanceTable(2, 50, signed=True, causal=causal), 700
    torch.nn.init.normal_(encoding.values)
    states = [torch.randn(2, 2, n, dim).bfloat16() for n in (queries, keys, keys, queries)]
    mask = (torch.arange(keys) < torch.tensor([[600], [keys]]))[:, None, None] if padded else None
    found = []
    for each, device, dtype in ((moved(encoding), DEVICE, torch.bfloat16), (encoding, "cpu", torch.float32)):
        *inputs, gradient = (state.to(device, dtype).requires_grad_() for state in states)
        output = biased_attention(*inputs, each, mask=None if mask is None else mask.to(device))
        found.append([output, *torch.autograd.grad(output, [*inputs, each.values], gradient.detach())])
    for there, here in zip(*found, strict=True):
        assert_same(there.detach().float(), here.detach(), rtol=0, atol=0.02 * float(here.detach().abs().max()))


def test_encodings_without_a_matrix():
    bias = torch.randn(2, 2 * N - 1)
    assert_same(measure_relative(moved(bias)), measure_relative(bias))
    table = torch.randn(N, 8)
    assert_same(metrics.measure_absolute(moved(table)), metrics.measure_absolute(table))
    assert_same(metrics.position_weights(moved(table)), metrics.position_weights(table))
    encoding = SinusoidalEncoding(heads=2)
    assert_same(DistanceTable.from_encoding(moved(encoding), N).weights(N), encoding.weights(N))
    weights = encoding.weights(N)[None]
    (there,), (here,) = DistanceTable.from_attention(moved(weights)), DistanceTable.from_attention(weights)
    assert there.device.type == DEVICE
    assert_same(there.values, here.values)


MEASURED = {
    "identical words": lambda model, ids: positional_attention(model, length=N, words=3, progress=False),
    "text": lambda model, ids: text_average(model, [{"input_ids": ids}], special_tokens=True),
    "logits": lambda model, ids: positional_logits(model, length=N),
    "parts": decompose,
    "reflection": reflection_gap,
}
if DEVICE == "cuda":  # torch.func crashes on tensors of the pretended device
    MEASURED["influence"] = lambda model, ids: influence(model, [{"input_ids": ids}], special_tokens=True, directions=1)
MODELS = dict.fromkeys(FAMILIES, tiny) | dict.fromkeys(ANY, tiny_any)
AS_DEFAULT, WITHOUT_FLOAT64 = ("llama", "xlnet", "bloom"), ("t5", "gpt_oss")  # measured in a test of their own
ROTATIONS = {name: MODELS[name] for name in ("llama", "gemma2", "gpt_neox")}
if DEVICE != "cuda":  # one model for each way to compute positions and attention
    MODELS = {name: MODELS[name] for name in ("bert", "deberta-v2", "xlnet", "t5", "bloom", "llama", "gpt_oss")}


@pytest.mark.parametrize(
    "name", [name for name in MODELS if DEVICE == "cuda" or name not in AS_DEFAULT + WITHOUT_FLOAT64]
)
def test_models(name):
    model, ids = MODELS[name](name), tokens(3, N)  # on the CPU, as a tokenizer gives them
    there = moved(model)
    for measure in MEASURED.values():
        try:
            expected = measure(model, ids)
        except ValueError as error:  # this family is refused, on every device
            with pytest.raises(type(error)):
                measure(there, ids)
        else:
            assert_same(measure(there, ids), expected)
    assert str(audit(there)) == str(audit(model))


@pytest.mark.parametrize("name", AS_DEFAULT)
def test_models_where_the_other_device_is_the_default(name):
    model, ids = tiny(name), tokens(3, N)
    there = moved(model)
    expected = [*(measure(model, ids) for measure in MEASURED.values()), str(audit(model))]
    with torch.device(DEVICE):
        found = [*(measure(there, ids) for measure in MEASURED.values()), str(audit(there))]
    assert_same(found[:-1], expected[:-1])
    assert found[-1] == expected[-1]


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name):
    model, ids = ROTATIONS[name](name), tokens(3, N)
    texts, options = [{"input_ids": ids}], {"special_tokens": True, "progress": False}
    for one in (model, moved(model)):
        found = rotary_bands(one, None, texts, **options), positional_logits(one, texts=texts, length=N, **options)
        ends = [each.cpu() for each in found[1].interval("past_locality")]
        if one is model:
            expected = found, ends
    assert_same(found, expected[0])
    assert_same(ends, expected[1])


def test_a_module_of_the_users():
    module = Own()
    found = [positional_attention(AttentionFunction(each, 50), length=N, words=[3]) for each in (moved(module), module)]
    assert_same(*found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "encoding",
    [AttenuatedEncoding(1, 0.3, 0.5, form="logits", learnable=True), RotaryEncoding(4, learnable=True)],
    ids=["bias", "rotation"],
)
def test_attached(name, encoding):
    model, ids = MODELS[name](name), tokens(3, N)
    there = moved(model)
    found = []
    for each, given in ((there, moved(ids)), (model, ids)):
        try:
            attach(each, encoding)
        except ValueError as error:
            found.append(str(error))
            continue
        output = each(given).last_hidden_state
        output.square().sum().backward()
        parameters = [parameter for copied in attached(each).encodings for parameter in copied.parameters()]
        found.append([output.detach(), *(parameter.grad for parameter in parameters)])
    if isinstance(found[1], str):
        assert found[0] == found[1]
    else:
        assert_same(*found)


@pytest.fixture
def _without_float64(monkeypatch):
    """The pretended device has no float64, as Apple's GPUs; CUDA has."""
    if DEVICE != "cuda":
        monkeypatch.setattr("tests.pretended_device.refused", {torch.float64})
        monkeypatch.setattr("pelocality._checks.WITHOUT_FLOAT64", {DEVICE})


@pytest.mark.usefixtures("_without_float64")
@pytest.mark.parametrize("name", WITHOUT_FLOAT64)
def test_models_without_float64(name):
    model, ids = MODELS[name](name).float(), tokens(3, N)
    there = moved(model)
    for kind, measure in MEASURED.items():
        if kind not in ("logits", "parts") or name in FAMILIES:
            assert_same(measure(there, ids), measure(model, ids), rtol=1e-4, atol=1e-5)
    attach(there, AttenuatedEncoding(1, 0.3, form="logits")).remove()
    assert str(audit(there, there)) == str(audit(model, model))


@pytest.mark.usefixtures("_without_float64")
@pytest.mark.parametrize("name", METRICS)
def test_metrics_without_float64(name):
    function, attention, mask = (
        getattr(metrics, name),
        random_attention(2, 3, N, N, dtype=torch.float32),
        torch.ones(2, N),
    )
    mask[0, 8:] = 0
    for options in ({}, {"mask": moved(mask)}) if name not in ("crop", "window") else ({},):
        found = function(moved(attention), **options)
        assert_same(found, function(attention, **{name: each.cpu() for name, each in options.items()}))
        results = [found] if isinstance(found, Tensor) else vars(found).values()
        assert {each.device.type for each in results} == {DEVICE}


@pytest.mark.usefixtures("_without_float64")
def test_what_needs_float64_is_computed_where_there_is_some():
    attention = random_attention(2, 3, N, N, dtype=torch.float32)
    for make in (lambda: MeanOver(metrics.locality, shape=(3,)), lambda: MeanAttention(N, shape=(3,))):
        found = []
        for each in (moved(attention), attention):
            mean = make()
            mean.update(each)
            found.append(mean.compute())
        assert_same(*found)
    table, bias = torch.randn(N, 8), torch.randn(2, 2 * N - 1)
    assert_same(measure_relative(moved(bias)), measure_relative(bias))
    assert_same(metrics.measure_absolute(moved(table)), metrics.measure_absolute(table))
    for make in FIXED + LEARNED:
        encoding = make(False).float()
        assert_same(moved(encoding).weights(N), encoding.weights(N))
    sinusoidal = SinusoidalEncoding(heads=2)
    assert_same(moved(sinusoidal).table(N), sinusoidal.table(N))
    there, here = (DistanceTable.from_attention(each)[0] for each in (moved(attention), attention))
    assert there.device.type == DEVICE
    assert_same(there.values, here.values)
    assert_same(there.scaled(antisymmetric=0.5, decay=0.1).values, here.scaled(antisymmetric=0.5, decay=0.1).values)


def test_saved_and_loaded(tmp_path):
    model, ids = moved(tiny("bert")), moved(tokens(2, N))
    attach(model, AttenuatedEncoding(2, 0.3))
    model.save_pretrained(tmp_path)
    again = load(tmp_path).double().to(DEVICE).eval()
    assert_same(again(ids).last_hidden_state, model(ids).last_hidden_state.cpu())


@pytest.mark.usefixtures("_without_float64")
def test_evaluation():
    model, tokenizer, probe, masked = classifier().float(), wordpiece(), shuffled(), masked_model().float()
    found = [evaluate(each, tokenizer, probe).examples["prediction"].tolist() for each in (moved(model), model)]
    assert found[0] == found[1]
    scored = [pseudo_log_likelihood(each, masking(), SENTENCES) for each in (moved(masked), masked)]
    assert_same(*scored)
    decoder, items = llama().float(), needle_items(TOKENIZER, lengths=[64], contexts=1)
    decoders = moved(decoder), decoder
    assert_same(*(evaluate_needles(each, TOKENIZER, items).examples["score"].tolist() for each in decoders))
    assert_same(*(loss_by_position(each, [{"input_ids": tokens(2, N)}]).losses for each in decoders))
    model, sentences = model_for(tokenizer).eval(), random_sentences(8)
    attended = [dependency_accuracy(each, tokenizer, sentences).attended for each in (moved(model), model)]
    assert (attended[0] == attended[1]).all()


def test_relocation(monkeypatch):
    if DEVICE != "cuda":
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    model, tokenizer = bert(), make_tokenizer(True)
    found = relocate(moved(model), own_table(model), tokenizer, TEXTS, **OPTIONS)
    assert next(found.model.parameters()).device.type == DEVICE
    assert found.curve["token_loss"].iloc[-1] < found.curve["token_loss"].iloc[0]
