"""Means over batches and processes equal those over all sequences at once."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torchmetrics import MetricCollection
from transformers.modeling_outputs import BaseModelOutput

from pelocality import metrics
from pelocality.encodings import SinusoidalEncoding
from pelocality.metrics.accumulate import MeanAttention, MeanOver
from tests.test_metrics import random_attention
from tests.test_metrics_masks import padded


def test_uneven_batches_are_weighted_by_their_number_of_matrices():
    attention = random_attention(10, 3, 12, 12)
    mean = MeanOver(metrics.symmetry, shape=(3,))
    for batch in attention.split([1, 7, 2]):
        mean.update(batch)
    torch.testing.assert_close(mean.compute(), metrics.symmetry(attention).mean(0))


def test_a_tuple_of_layers_is_averaged_per_layer_and_head():
    layers = tuple(random_attention(5, 3, 12, 12, seed=seed) for seed in range(2))
    mean = MeanOver(metrics.locality, shape=(2, 3))
    mean.update(layers)
    torch.testing.assert_close(mean.compute(), metrics.locality(layers).mean(1))
    everything = MeanOver(metrics.locality)
    everything.update(layers)
    torch.testing.assert_close(everything.compute(), metrics.locality(layers).mean())


@pytest.mark.parametrize("lengths", [[12, 12, 12], [9, 4, 12]])
@pytest.mark.parametrize("wrapped", [tuple, list, lambda layers: BaseModelOutput(attentions=layers)])
def test_a_model_output_is_accumulated_as_its_layers(wrapped, lengths):
    layers = tuple(padded(lengths, 12)[0].roll(seed, 1) for seed in range(3))  # three layers of three sequences
    mask = padded(lengths, 12)[1]
    by_sequence = torch.stack(layers, 1)  # (batch, layer, head, n, n)
    for metric in (
        MeanOver(metrics.locality, shape=(3, 2)),
        MeanAttention(length=12, shape=(3, 2)),
        MeanAttention(length=12),
    ):
        metric.update(wrapped(layers), mask=mask)
        alone = copy.deepcopy(metric)
        alone.reset()
        for sequence, flags in zip(by_sequence, mask, strict=True):
            alone.update(sequence, mask=flags)
        torch.testing.assert_close(metric.compute(), alone.compute())


@pytest.mark.parametrize("form", [torch.Tensor.tolist, lambda mask: mask[:, None], lambda mask: mask[:, None, None]])
def test_a_mask_of_sequences_is_placed_before_the_axes_kept_apart(form):
    layers = tuple(padded([9, 4, 12], 12)[0].roll(seed, 1) for seed in range(3))  # as many layers as sequences
    mask = padded([9, 4, 12], 12)[1]
    for metric in (MeanOver(metrics.locality, shape=(3, 2)), MeanAttention(length=12, shape=(3, 2))):
        other = copy.deepcopy(metric)
        metric.update(layers, mask=mask)
        other.update(torch.stack(layers, 1), mask=form(mask))
        torch.testing.assert_close(other.compute(), metric.compute())


@pytest.mark.parametrize("shape", [(), (2,), (3, 2)])
@pytest.mark.parametrize("mask", [None, torch.ones(0, 8)])
def test_a_batch_without_sequences_adds_nothing(shape, mask):
    empty = tuple(torch.zeros(0, 2, 8, 8) for _ in range(3)) if len(shape) == 2 else torch.zeros(0, 2, 8, 8)
    for metric in (
        MeanAttention(length=8, shape=shape),
        MeanOver(metrics.locality, shape=shape),
        MeanOver(metrics.symmetry, shape=shape),
    ):
        metric.update(empty, mask=mask)
        assert metric.count.sum() == 0


def test_sequences_too_short_for_symmetry_do_not_count():
    mean = MeanOver(metrics.symmetry)
    mean.update(torch.eye(2))
    assert mean.compute().isnan()
    mean.update(random_attention(12, 12))
    torch.testing.assert_close(mean.compute(), metrics.symmetry(random_attention(12, 12)))


def test_symmetry_of_the_mean_matrix_differs_from_mean_symmetry():
    attention = random_attention(20, 2, 16, 16)
    mean = MeanAttention(length=32, shape=(2,))
    for batch in attention.split(6):
        mean.update(batch)
    torch.testing.assert_close(mean.compute(), attention.mean(0))
    assert (metrics.symmetry(mean.compute()) - metrics.symmetry(attention).mean(0)).abs().min() > 0.01


@pytest.mark.parametrize("n", [16, 64])
def test_the_mean_of_symmetric_matrices_is_symmetric_in_their_precision(n):
    tables = [SinusoidalEncoding(width=width).table(n) for width in (32, 64, 128)]
    attention = torch.stack([(table @ table.T / 8).softmax(-1) for table in tables])
    mean = MeanAttention(length=n)
    mean.update(attention)
    assert mean.compute().dtype == torch.float32
    assert metrics.symmetry(mean.compute()) == 1
    mean.update(attention.double())
    assert mean.compute().dtype == torch.float32
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        mean.reset()
        mean.update(torch.eye(n, dtype=dtype))
        assert mean.compute().dtype == expected


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("as_layers", [False, True])
def test_the_mean_matrix_of_padded_sequences_starts_at_their_first_token(left, as_layers):
    lengths = [9, 4, 12]
    attention, mask = padded(lengths, 12, left)
    mean = MeanAttention(length=12, shape=(1, 2) if as_layers else (2,))
    mean.update((attention,) if as_layers else attention, mask=mask)
    result = mean.compute().reshape(2, 12, 12)
    torch.testing.assert_close(result.sum(-1), torch.ones(2, 12, dtype=torch.float64))
    alone = [metrics.crop(a, 12 - m if left else 0, 12 if left else m) for a, m in zip(attention, lengths, strict=True)]
    torch.testing.assert_close(result[:, 0, 0], torch.stack([a[:, 0, 0] for a in alone]).mean(0))
    torch.testing.assert_close(result[:, 6, :9], torch.stack([alone[0][:, 6], alone[2][:, 6, :9]]).mean(0))


@pytest.mark.parametrize("first", [torch.ones(1, 1), torch.full((8, 8), 1 / 8)])
def test_a_collection_keeps_metrics_of_different_functions_apart(first):
    functions = {
        "symmetry": metrics.symmetry,
        "past_locality": metrics.past_locality,
        "relative_asymmetry": metrics.relative_asymmetry,
        "direction_balance": metrics.direction_balance,
        "negative": lambda attention, mask: -metrics.direction_balance(attention, mask=mask),
    }
    collection = MetricCollection({name: MeanOver(function) for name, function in functions.items()})
    for attention in (first, random_attention(9, 9)):
        collection.update(attention)
    for name, found in collection.compute().items():
        alone = MeanOver(functions[name])
        alone.update(first)
        alone.update(random_attention(9, 9))
        torch.testing.assert_close(found, alone.compute(), rtol=0, atol=0)
    same = MetricCollection({"one": MeanOver(metrics.locality), "other": MeanOver(metrics.locality)})
    same.update(first)
    assert len(same.compute_groups) == 1


def test_a_copied_accumulator_continues():
    mean = MeanOver(metrics.locality)
    mean.update(torch.eye(8))
    for other in (copy.deepcopy(mean), pickle.loads(pickle.dumps(mean))):
        other(torch.full((8, 8), 1 / 8))
        torch.testing.assert_close(other.compute().item(), 0.65634, rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"dist_sync_on_step": True}])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("create", [partial(MeanOver, metrics.locality), partial(MeanAttention, 8)])
def test_a_failed_call_leaves_the_mean_as_it_was(create, error, settings, monkeypatch):
    mean, expected = create(**settings), create()
    for each in (mean, expected):
        each.update(torch.eye(8).expand(10, 8, 8))
    assert mean.compute() is mean.compute()
    before = mean._update_count, mean._forward_cache
    with monkeypatch.context() as patch:
        if error is KeyboardInterrupt:  # after the batch was added
            patch.setattr(mean, "compute", lambda: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            mean(torch.full((1, 8, 8), 1 / 4 if error is ValueError else 1 / 8))
    assert (mean._update_count, mean._forward_cache) == before
    for each in (mean, expected):
        each(torch.full((1, 8, 8), 1 / 8))
        each.update(torch.full((1, 8, 8), 1 / 8))
    torch.testing.assert_close(mean.compute(), expected.compute(), rtol=0, atol=0)


def test_sums_stay_in_float64_and_can_be_reset():
    mean = MeanAttention(length=8)
    mean.update(torch.eye(8))
    mean.to(torch.device("cpu")).half()
    assert mean.total.dtype == torch.float64
    mean.reset()
    mean.update(random_attention(5, 5))
    assert mean.compute().shape == (5, 5)


def test_invalid_updates_raise_an_error():
    with pytest.raises(ValueError, match=r"attention of shape \(2, 3, n, n\) does not end with"):
        MeanOver(metrics.locality, shape=(4,)).update(random_attention(2, 3, 8, 8))
    with pytest.raises(RuntimeError, match=r"must match|doesn't match"):
        MeanAttention(length=4).update(random_attention(8, 8))
    with pytest.raises(ValueError, match="softmax"):
        MeanOver(metrics.locality).update(torch.rand(8, 8))
    for mean in (MeanOver(metrics.locality), MeanAttention(8)):
        with pytest.raises(ValueError, match=r"each layer must have a batch axis, .* use torch\.stack\(layers\)"):
            mean.update((random_attention(8, 8), random_attention(8, 8)))


@pytest.mark.parametrize("metric", [metrics.measure, metrics.monotonicity, partial(metrics.locality, rows=True)])
@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_a_metric_with_several_numbers_per_matrix_is_refused(metric, shape):
    mean = MeanOver(metric, shape=shape)
    for attention in (random_attention(1, 2, 2, 6, 6), tuple(random_attention(2, 1, 2, 6, 6))):
        with pytest.raises(ValueError, match="metric must return one number per matrix"):
            mean.update(attention)


def test_a_mean_is_printed_with_its_metric():
    assert repr(MeanOver(metrics.locality, shape=3)) == "MeanOver(locality, shape=(3,))"


def test_the_size_of_one_axis_is_a_shape():
    attention = random_attention(2, 3, 8, 8)
    one, several = MeanOver(metrics.locality, shape=3), MeanOver(metrics.locality, shape=(3,))
    for mean in (one, several):
        mean.update(attention)
    assert one.compute().tolist() == several.compute().tolist()
    with pytest.raises(TypeError, match=r"shape must be an integer, got 2\.5"):
        MeanOver(metrics.locality, shape=(2.5,))


def test_a_mask_that_differs_between_heads_is_refused_where_they_are_kept_apart():
    attention = random_attention(2, 2, 8, 8)
    mask = torch.tensor([[1] * 8, [1] * 4 + [0] * 4]).expand(2, 2, 8)
    with pytest.raises(ValueError, match=r"mask must be the same for all of shape=\(2,\).*\(batch, n\)"):
        MeanAttention(8, shape=(2,)).update(attention, mask=mask)
    together = MeanAttention(8)
    together.update(attention, mask=mask)
    assert together.count.tolist() == [4] * 4 + [2] * 4
    apart = MeanAttention(8, shape=(2,))
    apart.update(attention, mask=mask.transpose(0, 1))  # it differs between sequences
    assert apart.count.tolist() == [2] * 4 + [1] * 4
