"""Padding and cropping: only the counting tokens enter the values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pelocality import metrics
from pelocality.encodings import ALiBi, PositionalSelfAttention
from pelocality.metrics import _inputs, crop, distance_profile, entropy, locality, measure
from tests.names import METRICS
from tests.test_metrics import numbers, random_attention

NAMES = [name for name in METRICS if name not in ("measure", "crop")]
WITH_ROWS = [
    "locality", "symmetry", "relative_asymmetry", "direction_balance",
    "past_locality", "mean_distance", "window", "entropy", "sink_rate", "step_balance",
]  # fmt: skip
OFFSETS = ["distance_profile", "profile_asymmetry", "step_profile"]


def padded(lengths, n, left=False):
    """Return attention as a masked model does (no weight on padding, rows of padding arbitrary), and the mask."""
    attention = random_attention(len(lengths), 2, n, n)
    mask = torch.zeros(len(lengths), n, dtype=torch.long)
    for row, length in enumerate(lengths):
        real = slice(n - length, n) if left else slice(0, length)
        mask[row, real] = 1
        attention[row] *= mask[row]
        attention[row] /= attention[row].sum(-1, keepdim=True)
    return attention, mask


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OFFSETS])
def test_a_padded_batch_has_the_values_of_each_sequence_alone(name, left):
    lengths, n = [9, 4, 12, 9], 12
    attention, mask = padded(lengths, n, left)
    metric = getattr(metrics, name)
    together = metric(attention, mask=mask)
    for row, length in enumerate(lengths):
        real = slice(n - length, n) if left else slice(0, length)
        torch.testing.assert_close(together[row], metric(attention[row, :, real, real]), equal_nan=True)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_row_values_are_at_their_tokens_and_padding_is_nan(name):
    attention, mask = padded([5, 8], 8, left=True)
    metric = getattr(metrics, name)
    together = metric(attention, mask=mask, rows=True)
    assert together.shape == (2, 2, 8)
    assert together[0, :, :3].isnan().all()
    torch.testing.assert_close(together[0, :, 3:], metric(attention[0, :, 3:, 3:], rows=True), equal_nan=True)


def test_profiles_of_a_padded_batch_stay_centred():
    attention, mask = padded([5, 8], 8)
    profile = distance_profile(attention, mask=mask)
    assert profile.shape == (2, 2, 15)
    torch.testing.assert_close(profile[0, :, 3:12], distance_profile(attention[0, :, :5, :5]))
    assert profile[0, :, [0, 1, 2, 12, 13, 14]].isnan().all()


def test_weight_on_padding_is_left_out_and_the_row_renormalised():
    attention = random_attention(1, 10, 10)
    mask = torch.ones(1, 10)
    mask[:, 6:] = 0
    torch.testing.assert_close(locality(attention, mask=mask), locality(crop(attention, 0, 6)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["symmetry", "half_life", "measure"])
def test_a_mask_keeps_the_tolerance_of_half_precision(name, dtype):
    metric, attention = getattr(metrics, name), (2e-3 * random_attention(4, 32, 32)).softmax(-1).to(dtype)
    for given, mask in [(attention, torch.ones(4, 32)), ((attention, attention), torch.ones(4, 32)[:1])]:
        together = zip(numbers(metric(given, mask=mask)), numbers(metric(given)), strict=True)
        for masked, whole in together:
            torch.testing.assert_close(masked, whole, rtol=1e-3, atol=1e-3)
    for cut, whole in zip(
        numbers(metric(attention, without_first=1)), numbers(metric(attention[:, 1:, 1:] * (32 / 31))), strict=True
    ):
        torch.testing.assert_close(cut, whole, rtol=1e-2, atol=1e-2)


def test_padding_rows_may_be_nan():
    attention, mask = padded([5, 8], 8)
    attention[0, :, 5:] = torch.nan
    assert measure(attention, mask=mask).symmetry.isfinite().all()


def test_one_mask_applies_to_every_layer():
    attention, mask = padded([5, 8], 8)
    layers = (attention, attention)
    assert locality(layers, mask=mask).shape == (2, 2, 2)
    torch.testing.assert_close(locality(torch.stack(layers), mask=mask[None]), locality(layers, mask=mask))


@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_a_mask_gives_the_same_values(name):
    attention, mask = padded([5, 8, 1], 8)
    expected = getattr(metrics, name)(attention, mask=mask)
    hidden = mask == 0
    forms = [
        mask.bool(), mask.float(), mask.to(torch.uint8), mask.numpy(), mask.tolist(), mask.bool().tolist(),
        *(torch.zeros(3, 8, dtype=dtype).masked_fill(hidden, low) for dtype, low in [
            (torch.float32, -torch.inf), (torch.float32, torch.finfo(torch.float32).min), (torch.float64, -1e4),
            (torch.float64, -1e3),
            (torch.float16, torch.finfo(torch.float16).min), (torch.bfloat16, torch.finfo(torch.bfloat16).min),
        ]),
        torch.zeros(3, 1, 1, 8).masked_fill(hidden[:, None, None], -torch.inf),  # as transformers hand it to attention
    ]  # fmt: skip
    for form in forms:
        torch.testing.assert_close(
            getattr(metrics, name)(attention, mask=form), expected, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("least", [-1e3, -5e3])
def test_a_float_mask_that_hides_keys_in_attention_leaves_them_out_of_a_metric(least):
    layer = PositionalSelfAttention(8, 2, ALiBi(2)).eval()
    mask = torch.zeros(1, 6).masked_fill(torch.arange(6) >= 4, least)
    _, attention = layer(torch.randn(1, 6, 8), key_padding_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(locality(attention, mask=mask), locality(attention[..., :4, :4]))


@pytest.mark.parametrize("tokens", [[4, 6], [4, 5]])
def test_a_mask_that_marks_padding_is_refused_with_the_way_out(tokens):
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    padding = torch.arange(6) >= torch.tensor(tokens)[:, None]
    _, weights = attention(*[torch.randn(2, 6, 8)] * 3, key_padding_mask=padding, average_attn_weights=False)
    with pytest.raises(ValueError, match="at padding"):
        locality(weights, mask=padding)
    assert locality(weights, mask=~padding).shape == (2, 2)


def test_a_mask_of_stacked_layers_needs_a_layer_axis():
    layers = torch.stack([padded([5, 8, 6], 8)[0] for _ in range(3)])  # three layers of three sequences
    mask = padded([5, 8, 6], 8)[1]
    with pytest.raises(ValueError, match="give all axes before the heads or none"):
        locality(layers, mask=mask)
    torch.testing.assert_close(locality(layers, mask=mask[None]), locality(tuple(layers), mask=mask))
    torch.testing.assert_close(locality(layers, mask=mask[None, :, None]), locality(tuple(layers), mask=mask))
    torch.testing.assert_close(locality(layers, mask=torch.ones(8)), locality(layers))


def test_gradients_pass_through_a_mask():
    attention, mask = padded([7, 10], 10)
    attention.requires_grad_()
    measure(attention, mask=mask).symmetry.sum().backward()
    assert attention.grad[0, :, :7, :7].abs().sum() > 0
    assert attention.grad[0, :, 7:].abs().sum() == 0


MASKS = [
    torch.ones(3, 8), torch.ones(2, 7), torch.ones(2, 2, 1, 8), torch.ones(8, 8).tril(), torch.ones(2, 1, 8, 8).tril(),
    torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2), torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.long),
    torch.tensor([[0.0] * 8, [1.0] * 8]), torch.full((2, 8), 0.5), torch.full((2, 8), torch.nan),
    torch.tensor([[1] * 6 + [2, 2]] * 2), torch.tensor([[1] * 7 + [-1]] * 2),
    *(torch.tensor([[0.0] * 7 + [odd]] * 2) for odd in (-1.0, -900.0, torch.inf)),
    torch.tensor([[1.0] * 7 + [-torch.inf]] * 2),
]  # fmt: skip


def test_masks_that_would_be_misread_are_refused():
    for mask in MASKS:
        with pytest.raises(ValueError, match="mask"):
            locality(random_attention(2, 2, 8, 8), mask=mask)


def test_crops_that_keep_no_weight_are_refused():
    for call, error in (
        (lambda: crop(random_attention(4, 4), 3, 2), ValueError),
        (lambda: crop(torch.eye(4)[[0, 0, 2, 3]], 1), ValueError),
        (lambda: crop(random_attention(4, 4), 1.5), TypeError),
    ):
        with pytest.raises(error):
            call()
    assert crop(random_attention(4, 4), np.int64(-3), np.int64(-1)).shape == (2, 2)


@pytest.mark.parametrize("name", [name for name in METRICS if name != "crop"])
def test_every_metric_leaves_out_the_first_tokens(name):
    metric, attention = getattr(metrics, name), random_attention(2, 3, 9, 9).tril()
    attention = attention / attention.sum(-1, keepdim=True)
    expected = metric(crop(attention, 2))
    found = metric(attention, without_first=2)
    for one, other in zip(*map(numbers, (found, expected)), strict=True):
        if one.shape != other.shape:  # positions that are left out are NaN
            one, other = one[one.isfinite()], other[other.isfinite()]
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_many_matrices_are_measured_in_parts(name, hidden, monkeypatch):
    attention, mask = padded([9, 4, 12, 9], 12) if hidden else (random_attention(4, 2, 12, 12), None)
    visible = {"visible": torch.ones(12, 12, dtype=torch.bool)} if name in ("adjusted_locality", "entropy") else {}
    arguments = {"stop": 3} if name == "crop" else {"mask": mask, **visible}
    together = numbers(getattr(metrics, name)(attention, **arguments))
    monkeypatch.setattr(_inputs, "_PART", 3 * 12**2)
    in_parts = numbers(getattr(metrics, name)(attention, **arguments))
    torch.testing.assert_close(in_parts, together, equal_nan=True)


def test_the_first_tokens_of_padded_sequences_are_the_first_that_count():
    attention, mask = padded([5, 8], 8, left=True)
    found = locality(attention, mask=mask, without_first=1)
    torch.testing.assert_close(found[0], locality(crop(attention[0], 4)))
    torch.testing.assert_close(found[1], locality(crop(attention[1], 1)))


@pytest.mark.parametrize(("given", "error"), [(8, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)])
def test_first_tokens_that_cannot_be_left_out_are_refused(given, error):
    with pytest.raises(error, match="without_first"):
        locality(random_attention(2, 8, 8), without_first=given)


@pytest.mark.parametrize("flags", [torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), [[1, 1, 1, 0], [1, 1, 1, 1]]])
def test_masks_do_not_depend_on_the_default_device(flags):
    attention = random_attention(2, 3, 4, 4)
    attention[0, :, :, 3] = 0
    attention /= attention.sum(-1, keepdim=True)
    seen = np.ones((4, 4), bool)
    calls = (
        lambda: locality(attention, mask=flags),
        lambda: entropy(attention, visible=seen),
        lambda: entropy(SimpleNamespace(attention=attention, visible=torch.from_numpy(seen))),
    )
    expected = [call() for call in calls]
    with torch.device("meta"):  # as torch.set_default_device("cuda") for matrices on the CPU
        assert all(torch.equal(call(), value) for call, value in zip(calls, expected, strict=True))
