"""Two processes divide the work, and each returns what one process alone returns."""

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pandas.testing import assert_frame_equal

from pelocality import _distributed
from pelocality.evaluation import evaluate
from pelocality.evaluation.dependencies import dependency_accuracy
from tests.families import tiny
from tests.test_evaluation import classifier, shuffled
from tests.test_evaluation_dependencies import random_sentences, sentence
from tests.test_models_words import wordpiece


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
        "gathered": _distributed.gathered([x * x for x in _distributed.my_part(range(5))], 5),
    }


def process(rank, folder):
    """One of two processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = results()
    found["sum"] = _distributed.summed(torch.tensor([1.0, rank]))
    found["sum of one"] = _distributed.summed(torch.ones(2) if rank else None)
    found["sum of none"] = _distributed.summed(None)
    with pytest.raises(ValueError, match="all processes must be given the same items"):
        _distributed.gathered([1] * (3 * rank))
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(found, file)
    dist.destroy_process_group()


def test_two_processes_return_what_one_does(tmp_path):
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
    expected = results()
    for rank in (0, 1):
        found = pickle.loads((tmp_path / str(rank)).read_bytes())
        one, here = expected["evaluate"], found["evaluate"]
        assert_frame_equal(here.examples, one.examples, rtol=1e-12)
        assert (here.difference, here.truncated, here.model) == (one.difference, one.truncated, one.model)
        assert one.truncated > 1
        for name in ("dependencies", "one sentence"):
            one, here = expected[name], found[name]
            assert_frame_equal(here.words, one.words)
            assert (here.attended == one.attended).all()
            assert (here.layers, here.left_out, here.sentences) == (one.layers, one.left_out, one.sentences)
        assert found["gathered"] == [0, 1, 4, 9, 16]
        assert found["sum"].tolist() == [2, 1]
        assert found["sum of one"].tolist() == [1, 1]
        assert found["sum of none"] is None


def test_one_process_keeps_what_it_has():
    assert _distributed.rank_and_size() == (0, 1)
    assert list(_distributed.my_part([1, 2, 3])) == [1, 2, 3]
    assert _distributed.gathered(np.arange(3)) == [0, 1, 2]
    tensor = torch.ones(2)
    assert _distributed.summed(tensor) is tensor
    with pytest.raises(ValueError, match="same items"):
        _distributed.gathered([1, 2], 3)
