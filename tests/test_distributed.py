"""Two processes divide the work, and each returns what one process alone returns."""

import dataclasses
import functools
import os
import pickle
import socket
import sys

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pandas.testing import assert_frame_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import BertForMaskedLM

from benchmarks.attaching import random_table
from pelocality import _distributed
from pelocality.encodings import ALiBi, AttenuatedEncoding
from pelocality.evaluation import evaluate, evaluate_minimal_pairs, evaluate_needles, log_likelihood, loss_by_position
from pelocality.evaluation.dependencies import dependency_accuracy
from pelocality.metrics import locality, symmetry
from pelocality.metrics.accumulate import MeanAttention, MeanOver
from pelocality.models import AttentionFunction, attach, decompose, influence, positional_attention, text_average
from tests import test_models_callback as callbacks
from tests.families import tiny, tiny_any, tokens
from tests.test_evaluation import classifier, shuffled
from tests.test_evaluation_dependencies import random_sentences, sentence
from tests.test_evaluation_likelihood import causal_model, pairs_of
from tests.test_metrics import random_attention
from tests.test_models_words import wordpiece
from tests.test_probes_needles import word_level


def results():
    """What a process computes: 7 pairs and 5 sentences, one of them too long, and one sentence for two processes."""
    model, tokenizer = classifier(), wordpiece()
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    long = sentence(["a"] * 60, [0] + [1] * 59)
    return {
        "evaluate": evaluate(model, tokenizer, shuffled(7), max_length=8),
        "dependencies": dependency_accuracy(tiny("bert"), tokenizer, [*random_sentences(4), long]),
        "one sentence": dependency_accuracy(tiny("bert"), tokenizer, random_sentences(1)),
        "gathered": _distributed.gathered([x * x for x in _distributed.part_of_process(range(5))], 5),
    }


def scored():
    """How a decoder scores texts: 3 pairs, of which one is a tie, 7 questions and 5 texts of three lengths."""
    tokenizer = word_level("<s>")
    model = causal_model(tokenizer)
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    words = [word for word in sorted(tokenizer.get_vocab()) if word.isalpha()][:6]
    texts = [" ".join(words[start:end]) for start, end in [(0, 3), (1, 4), (2, 6), (3, 5), (0, 6)]]
    pairs = pairs_of([texts[0], texts[1], texts[3]], [texts[2], texts[4], texts[3]])
    columns = {"context": texts + texts[:2], "question": words + words[:1], "label": [0, 1, 0, 1, 0, 1, 0]}
    items = datasets.Dataset.from_dict(columns | {"answers": [words[4:]] * 7, "provenance": [{}] * 7})
    score = functools.partial(log_likelihood, beginning=False)
    return (
        evaluate_minimal_pairs(model, tokenizer, pairs, score=score).examples["difference"],
        evaluate_minimal_pairs(lambda texts: list(map(len, texts)), None, pairs).examples["difference"],
        evaluate_minimal_pairs(lambda texts: [len(texts[0])], None, pairs_of(["a"], ["a"])).examples["good"],
        evaluate_needles(model, tokenizer, items).examples[["score", "margin", "prediction"]],
        loss_by_position(model, texts, tokenizer).losses.numpy(),
    )


def measured():
    """What models are measured to be: 5 words in batches of 2, 1 word, 5 batches of uneven texts, and 1 batch."""
    model = tiny("gpt2")
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    short = [{"input_ids": tokens(1, 2)}]  # has no metrics of its own
    batches = [{"input_ids": tokens(size, length, length)} for size, length in [(4, 5), (1, 9), (3, 4)]]
    text = [*short, batches[0], {"input_ids": []}, *batches[1:], *short]
    options, reads = {"special_tokens": True, "progress": False}, {"tokenizer": wordpiece()}
    return {
        "words": positional_attention(model, length=8, words=5, batch_size=2, prefix=3),
        "one word": positional_attention(tiny_any("jamba"), length=8, words=[7]),
        "text": text_average(model, iter(text), **options),
        "one batch": text_average(tiny_any("jamba"), batches[:1], layers=[-1], **options),
        "strings": text_average(model, iter(["a cat", "a dog a", "river"]), batch_size=2, **reads, **options),
    }


def stepped(name, positions):
    """The gradients of the encodings of a model without a record, and their numbers after a step of 4 texts."""
    model, (rank, size) = tiny_any(name).train(), _distributed.rank_and_size()
    encodings = attach(model, random_table(2), position_embeddings=positions).encodings
    wrapped = model
    if size > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=positions == "disable")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(tokens(4, 7)[rank::size], use_cache=False)[0].square().mean().backward()
    optimiser.step()
    return [(encoding.values.grad, encoding.values.detach()) for encoding in encodings]


def trained(rank, folder):
    """The table and the reports of a callback in a training of two processes."""
    reports = callbacks.FakeReporter.logged
    callbacks.integration_utils.INTEGRATION_TO_CALLBACK["wandb"] = callbacks.FakeReporter
    trainer = callbacks.make_trainer(folder, max_steps=3)
    trainer.args.report_to = ["wandb"]
    callback = callbacks.add_callback(trainer)
    trainer.train()
    assert trainer.args.world_size == 2
    return callback.table, [entry["step"] for entry in reports]


def read():
    """How many of 8 words and of 3 batches of 2 texts the model of a process read."""
    found = []

    def function(ids):
        found.append(len(ids))
        return [torch.eye(ids.shape[1]).expand(len(ids), 1, -1, -1)]

    positional_attention(AttentionFunction(function, 99), length=4, words=8)
    words = sum(found) - 2  # one word twice at first
    found.clear()
    text_average(
        AttentionFunction(function, 99), [{"input_ids": tokens(2, 5, seed)} for seed in range(3)], special_tokens=True
    )
    return words, sum(found) - 2  # the same of texts


def failures(rank):
    """What goes wrong in one process is an error in both, and the next call works."""

    def function(ids):
        if rank == 1:
            raise RuntimeError("here")
        return [torch.eye(ids.shape[1]).expand(len(ids), 1, -1, -1)]

    if rank == 1:
        error, words = ValueError, "RuntimeError: here"
    else:
        error, words = RuntimeError, "another process failed: ValueError: .*RuntimeError: here"
    with pytest.raises(error, match=words):
        positional_attention(AttentionFunction(function, 9), length=4, words=3)
    gap = {"input_ids": torch.tensor([[2, 6, 3, 7, 3]])}
    if rank == 1:
        error, words = ValueError, "^a text has special tokens"
    else:
        error, words = RuntimeError, "another process failed: ValueError: a text has"
    with pytest.raises(error, match=words):
        text_average(tiny("bert"), [{"input_ids": tokens(2, 5)}, gap], tokenizer=wordpiece())
    with pytest.raises(ValueError, match="all processes must be given the same words or batches"):
        text_average(tiny("bert"), [{"input_ids": tokens(2, 5, seed=rank)}], special_tokens=True)
    with pytest.raises(ValueError, match="all processes must be given the same words or batches"):
        positional_attention(tiny("bert"), length=5, words=4, seed=rank)
    with pytest.raises(ValueError, match="all processes must be given the same items"):
        _distributed.gathered([1] * (3 * rank), 2)
    sharded = tiny("bert")
    layer, mesh = sharded.encoder.layer[0].output.dense, init_device_mesh("cpu", (2,))
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="BertModel is sharded over processes"):
        positional_attention(sharded, length=5, words=4)


def means(rank):
    """Means over 10 sequences in batches of 2: two batches in the first process, four in the second."""
    attention = random_attention(10, 3, 12, 12)
    part = attention[3:] if rank else attention[:3]
    found = [MeanOver(locality, shape=(3,)), MeanOver(symmetry, shape=(3,)), MeanAttention(length=12, shape=(3,))]
    for mean in found:
        for batch in part.split(2):
            mean.update(batch)
    return [mean.compute() for mean in found]


def shard(model):
    """A model that two processes share layer by layer, with its head and its embeddings at the root."""
    if dist.is_initialized():
        layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
        for module in (*layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return model


def encoded():
    """A model of masked words, with an encoding that is learned."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForMaskedLM(tiny("bert").config).eval()
    attach(model, AttenuatedEncoding(2, [0.2, 0.7], learnable=True))
    return model


def measured_in_shards():
    """What is measured of a model that two processes share: each function whose work they would divide, and others."""
    model, batches = shard(encoded()), [{"input_ids": tokens(2, 6, seed)} for seed in range(3)]
    options = {"special_tokens": True, "progress": False}
    found = {
        "words": positional_attention(model, length=8, words=5, batch_size=2),
        "text": text_average(model, batches, **options),
        "influence": influence(model, batches[:1], **options),
    }
    sentences = dependency_accuracy(model, wordpiece(), random_sentences(4))
    answers = evaluate(shard(classifier()), wordpiece(), shuffled(7), max_length=8)
    if dist.is_initialized():
        assert all(isinstance(each, DTensor) for each in model.parameters())  # nothing stays gathered
        assert "forward" not in vars(model)
        with pytest.raises(ValueError, match="attach it before"):
            attach(shard(tiny("bert")), random_table(2))
        with pytest.raises(ValueError, match="sharded weights"):
            decompose(shard(tiny("bert")), tokens(1, 5))
    bert = shard(tiny("bert"))
    with attach(bert, ALiBi(2)), torch.no_grad():
        output = bert(tokens(1, 5))[0]
    return found, (output, torch.tensor(sentences.attended), torch.tensor(answers.examples["probability"]))


def sharded():
    """The whole state dict of a model with encodings, sharded where there are two processes."""
    model = tiny("bert")
    attach(model, AttenuatedEncoding(2, [0.2, 0.7], learnable=True))
    shard(model)
    if dist.is_initialized():
        assert "AttenuatedEncoding(heads=2, causal=False)" in repr(model)
    state = model.state_dict()
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}


STEPPED = [("qwen3", "disable"), ("gpt_neox", "keep"), ("mixtral", "keep"), ("jamba", "keep")]


def process(rank, folder, port):
    """One of two processes, forked like those of torch's data loader."""
    torch.set_num_threads(1)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in where.items()}
    dist.init_process_group("gloo")
    failures(rank)
    assert read() == (4, 2 if rank else 4)
    found = results() | measured() | {"trained": trained(rank, folder)}
    found["stepped"] = [stepped(*each) for each in STEPPED]
    found["sharded"] = sharded()
    found["measured in shards"] = measured_in_shards()
    found["means"] = means(rank)
    found["scored"] = scored()
    found["sum"] = _distributed.summed(torch.tensor([1.0, rank]))
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(found, file)
    dist.destroy_process_group()


def same_result(here, one):
    """Whether all that a result holds is the same: tensors to rounding, the rest exactly."""
    assert vars(here).keys() == vars(one).keys()
    for name, expected in vars(one).items():
        values = getattr(here, name)
        if name == "per_sample" or isinstance(expected, torch.Tensor):
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            assert values == expected


def test_two_processes_return_what_one_does(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    method = "fork" if sys.platform == "linux" else "spawn"  # elsewhere a forked process may not compute
    mp.start_processes(process, args=(str(tmp_path), port), nprocs=2, start_method=method)
    expected, expected_of_models, expected_scores = results(), measured(), scored()
    expected_in_shards = measured_in_shards()
    attention = random_attention(10, 3, 12, 12)
    expected_means = [locality(attention).mean(0), symmetry(attention).mean(0), attention.mean(0)]
    untrained = positional_attention(callbacks.make_trainer(tmp_path).model, length=12, words=3)
    for rank in (0, 1):
        found = pickle.loads((tmp_path / str(rank)).read_bytes())
        one, here = expected["evaluate"], found["evaluate"]
        assert_frame_equal(here.examples, one.examples, rtol=1e-12)
        assert (here.difference, here.truncated, here.model) == (one.difference, one.truncated, one.model)
        assert one.truncated > 1
        for here, one in zip(found["scored"], expected_scores, strict=True):
            np.testing.assert_allclose(here, one, rtol=1e-9)
        for name in ("dependencies", "one sentence"):
            one, here = expected[name], found[name]
            assert_frame_equal(here.words, one.words)
            assert (here.attended == one.attended).all()
            assert (here.layers, here.dropped, here.sentences) == (one.layers, one.dropped, one.sentences)
        for (name, positions), here in zip(STEPPED, found["stepped"], strict=True):
            alone = stepped(name, positions)
            torch.testing.assert_close(here, alone, rtol=1e-9, atol=1e-12)
            assert all(gradient.abs().max() > 1e-6 for gradient, _ in alone)
        assert found["gathered"] == [0, 1, 4, 9, 16]
        assert found["sum"].tolist() == [2, 1]
        torch.testing.assert_close(found["means"], expected_means)
        torch.testing.assert_close(found["sharded"], dict(sharded()), rtol=0, atol=0)
        for name, one in expected_in_shards[0].items():
            here = found["measured in shards"][0][name]
            assert "AttenuatedEncoding" in here.source.encoding  # its numbers are not gathered to be printed
            source = dataclasses.replace(here.source, encoding=one.source.encoding)
            same_result(dataclasses.replace(here, source=source), one)
        torch.testing.assert_close(found["measured in shards"][1], expected_in_shards[1], rtol=1e-5, atol=1e-6)
        for name, one in expected_of_models.items():
            same_result(found[name], one)
        table, reported = found["trained"]
        assert table["step"].unique().tolist() == [0, 2, 3]
        assert table["locality"][:2].tolist() == pytest.approx(locality(untrained).mean(-1).tolist(), abs=1e-6)
        assert reported == ([] if rank else [0, 2, 3])


def test_one_process_keeps_what_it_has():
    assert _distributed.rank_and_size() == (0, 1)
    assert list(_distributed.part_of_process([1, 2, 3])) == [1, 2, 3]
    assert _distributed.gathered(np.arange(3)) == [0, 1, 2]
    tensor = torch.ones(2)
    assert _distributed.summed(tensor) is tensor
    with pytest.raises(ValueError, match="same items"):
        _distributed.gathered([1, 2], 3)
