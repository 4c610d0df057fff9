"""Attention from tables of position embeddings, random and real."""

import math

import numpy as np
import pytest
import torch

from pelocality.metrics import adjusted_locality
from pelocality.metrics.position_tables import position_weights
from pelocality.metrics.without_matrix import measure_absolute
from tests.data import DATA, NEEDS_DATA


def random_table(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_heads_are_softmaxes_of_projections_scaled_by_head_size():
    table, query, key = random_table(7, 5), random_table(3, 5, 4, seed=1), random_table(3, 5, 4, seed=2)
    weights = position_weights(table, query, key)
    for head in range(3):
        logits = [[float((table[i] @ query[head]) @ (table[j] @ key[head])) / 2 for j in range(7)] for i in range(7)]
        torch.testing.assert_close(weights[head], torch.tensor(logits, dtype=torch.float64).softmax(-1))


def test_cosines_ignore_the_norm_of_an_embedding():
    table = random_table(7, 5)
    stretched = table * torch.arange(1.0, 8.0, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        position_weights(table, similarity="cosine"), position_weights(stretched, similarity="cosine")
    )
    cosine = torch.nn.functional.cosine_similarity(table[:, None], table, dim=-1)
    torch.testing.assert_close(
        position_weights(table, similarity="cosine", temperature=0.1), (cosine / 0.1).softmax(-1)
    )


def test_arrays_and_half_precision_are_accepted():
    table = random_table(7, 5)
    torch.testing.assert_close(position_weights(table.numpy()), position_weights(table))
    assert position_weights(table.half()).dtype == torch.float32


@pytest.mark.parametrize("padding", [0, 1, 3, None])
def test_rows_that_no_token_reads_are_left_out_of_a_module_and_refused_in_a_tensor(padding):
    """RoBERTa counts positions from the row after its padding id, OPT and BART from the third row."""
    module = torch.nn.Embedding(12, 4, padding_idx=padding).double()
    skipped = 0 if padding is None else padding + 1
    if padding is None:
        module.offset = skipped = 2
    rows = module.weight.detach()[skipped:]
    for function in (position_weights, measure_absolute):
        found, expected = function(module), function(rows)
        torch.testing.assert_close(*(getattr(each, "locality", each) for each in (found, expected)))
        if padding:
            with pytest.raises(ValueError, match=rf"table has zeros in row {padding}, .*, or table\[{skipped}:\]"):
                function(module.weight)
    assert position_weights(torch.nn.Embedding(12, 4)).shape == (12, 12)


def test_autocast_does_not_lower_the_precision():
    table, *projections = random_table(7, 5), random_table(3, 5, 4, seed=1), random_table(3, 5, 4, seed=2)
    for given in ([table.float()], [each.float() for each in (table, *projections)]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weights, measured = position_weights(*given), measure_absolute(*given)
        assert torch.equal(weights, position_weights(*given))
        assert torch.equal(measured.locality, measure_absolute(*given).locality)


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"table": torch.ones(3)}, ValueError, "table"),
        ({"table": torch.ones(3, 0)}, ValueError, "table"),
        ({"table": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "table"),
        ({"table": torch.nn.Linear(3, 4)}, TypeError, "table"),
        ({"table": torch.ones(3, 4), "query": torch.nn.Linear(4, 2), "key": 1.0}, TypeError, "query"),
        ({"table": torch.full((3, 4), math.nan)}, ValueError, "table"),
        ({"table": torch.ones(3, 4), "query": torch.ones(4, 2)}, ValueError, "query and key"),
        ({"table": torch.ones(3, 4), "query": torch.ones(2, 4), "key": torch.ones(2, 4)}, RuntimeError, "shapes"),
        ({"table": torch.ones(3, 4), "similarity": "euclidean"}, ValueError, "similarity"),
        ({"table": torch.ones(3, 4), "temperature": 0.0}, ValueError, "temperature"),
        ({"table": torch.ones(3, 4), "temperature": "2"}, TypeError, "temperature"),
    ],
)
def test_invalid_tables_and_projections_raise_an_error(arguments, error, names):
    with pytest.raises(error, match=names):
        position_weights(**arguments)


@NEEDS_DATA
def test_gpt2_positions_are_more_local_than_uniform_attention():
    table = np.load(DATA / "pe_matrices" / "gpt2_wpe_first64.npy")
    plain, sharp = position_weights(table), position_weights(table, similarity="cosine", temperature=0.1)
    assert 0 < adjusted_locality(plain) < 0.02  # sqrt(768) flattens a table that no head has projected
    assert adjusted_locality(sharp) > 0.1
