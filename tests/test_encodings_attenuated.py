"""The attenuated encoding against its equation, and encodings from targets against the metrics."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pelocality.encodings import AttenuatedEncoding
from pelocality.metrics import direction_balance, locality, measure, relative_asymmetry, symmetry
from pelocality.metrics.without_matrix import measure_relative
from pelocality.models import attach
from tests.families import tiny, tokens


def delta(n, w, s, *, visible=None, causal=False):
    """The equation as a loop, normalised over the visible keys."""
    rows = []
    for i in range(n):
        e = []
        for j in range(n):
            seen = (visible is None or visible[j]) and not (causal and j > i)
            rate = w if j < i else s * w
            e.append(math.exp(-rate * (i - j) ** 2) if seen else 0.0)
        rows.append([x / sum(e) for x in e])
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 12),
    w=st.floats(1e-4, 3),
    s=st.floats(0.05, 20),
    padding=st.integers(0, 6),
    form=st.sampled_from(["weights", "logits"]),
)
def test_weights_are_the_papers_delta_with_any_padding(n, w, s, padding, form):
    encoding = AttenuatedEncoding(decay=w, symmetry=s, form=form).double()
    w, s = encoding.decay.item(), encoding.symmetry.item()
    torch.testing.assert_close(encoding.weights(n)[0], delta(n, w, s))
    mask = torch.arange(n + padding)[None] < n
    padded = encoding.weights(n + padding, mask=mask)[0, 0]
    torch.testing.assert_close(padded[:n, :n], delta(n, w, s))
    torch.testing.assert_close(padded[:n], delta(n + padding, w, s, visible=mask[0])[:n])


@pytest.mark.parametrize("form", ["weights", "logits"])
def test_a_causal_encoding_is_normalised_over_the_past(form):
    encoding = AttenuatedEncoding(decay=0.25, form=form, causal=True).double()
    expected = delta(9, 0.25, 1.0, causal=True)
    torch.testing.assert_close(encoding.weights(9)[0], expected)
    bias = encoding(9)[0]
    assert (bias.triu(1)[torch.ones(9, 9).triu(1) > 0] == -torch.inf).all()
    if form == "weights":
        torch.testing.assert_close(bias.tril(), expected)


def test_the_weights_form_is_delta_and_the_softmax_of_the_logits_form_is_delta():
    expected = delta(8, 0.5, 2.0)
    torch.testing.assert_close(AttenuatedEncoding(decay=0.5, symmetry=2).double()(8)[0], expected)
    torch.testing.assert_close(AttenuatedEncoding(decay=0.5, symmetry=2, scale=3).double()(8)[0], 3 * expected)
    logits = AttenuatedEncoding(decay=0.5, symmetry=2, form="logits").double()(8)[0]
    torch.testing.assert_close(logits.softmax(-1), expected)


def test_in_the_logits_form_scale_is_a_factor_of_decay():
    one = AttenuatedEncoding(decay=0.5, scale=0.25, form="logits")
    other = AttenuatedEncoding(decay=0.125, form="logits")
    torch.testing.assert_close(one(16), other(16))
    torch.testing.assert_close(one.weights(16), other.weights(16))


def test_the_interior_bias_is_that_of_a_query_far_from_both_ends():
    for options in ({}, {"form": "logits"}, {"causal": True}, {"scale": 4.0, "symmetry": 2.0}):
        encoding = AttenuatedEncoding(heads=2, decay=[0.05, 0.5], **options).double()
        torch.testing.assert_close(encoding.interior_bias(20), encoding(39)[:, 19])


@settings(max_examples=15, deadline=None)
@given(n=st.integers(3, 100), w=st.floats(1e-6, 100))
def test_s_of_one_is_exactly_symmetric_in_float32(n, w):
    for learnable in (False, True):
        weights = AttenuatedEncoding(decay=w, learnable=learnable).weights(n)
        assert symmetry(weights) == 1
        assert relative_asymmetry(weights) == 0


def test_the_table_in_the_docstring_is_correct():
    options = [{}, {"scale": 10.0}, {"form": "logits"}]
    read = [AttenuatedEncoding(**one).double()(512).softmax(-1) for one in options]
    assert [round(locality(A).item(), 4) for A in read] == [0.0074, 0.1146, 0.6695]
    assert round((read[0][0, 256].max() / read[0][0, 256].min()).item(), 2) == 1.49
    assert round((read[1][0, 256].max() / read[1][0, 256].min()).item()) == 54
    assert round(locality(torch.full((512, 512), 1 / 512)).item(), 4) == 0.0058


def test_gradient_descent_finds_a_locality():
    encoding = AttenuatedEncoding(decay=0.5, learnable=True).double()
    optimizer = torch.optim.Adam(encoding.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (measure_relative(encoding.relative(64)).locality - 0.3).square().sum().backward()
        optimizer.step()
    assert locality(encoding.weights(64)).item() == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize(
    ("learnable", "names"),
    [
        (True, {"log_decay", "log_symmetry"}),
        (False, set()),
        ("decay", {"log_decay"}),
        (("symmetry", "scale"), {"log_symmetry", "free_scale"}),
        (["decay"], {"log_decay"}),
    ],
)
def test_learned_arguments_are_chosen_by_name(learnable, names):
    assert set(dict(AttenuatedEncoding(learnable=learnable).named_parameters())) == names


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"decay": 0.0}, ValueError, "decay must be above 0"),
        ({"decay": math.nan}, ValueError, "decay"),
        ({"decay": [0.1, 0.2, 0.3]}, ValueError, "each of 2 heads"),
        ({"decay": "big"}, TypeError, "decay"),
        ({"symmetry": -1.0}, ValueError, "symmetry must be above 0"),
        ({"decay": 1e40}, ValueError, "decay must be above 0 and finite"),
        ({"decay": True}, TypeError, "decay must be a number"),
        ({"learnable": 1}, TypeError, "int"),
        ({"scale": math.inf}, ValueError, "scale must be finite"),
        ({"form": "bias"}, ValueError, "form must be"),
        ({"w": 0.5}, TypeError, "the paper's w is decay="),
        ({"s": 2.0}, TypeError, "the paper's s is symmetry="),
        ({"learnable": "slope"}, ValueError, "learnable must be"),
        ({"causal": True, "symmetry": 2.0}, ValueError, "the right side is hidden"),
        ({"causal": True, "learnable": ["symmetry"]}, ValueError, "the right side is hidden"),
    ],
)
def test_invalid_arguments_of_an_attenuated_encoding_raise_errors(arguments, error, words):
    with pytest.raises(error, match=words):
        AttenuatedEncoding(heads=2, **arguments)


# ---- targets


@settings(max_examples=40, deadline=None)
@given(n=st.integers(4, 300), near=st.floats(0.05, 0.95), lean=st.floats(-0.95, 0.95))
def test_targets_are_reached_or_an_error_names_the_reachable_range(n, near, lean):
    lower, refused = 0.0, False
    try:
        encoding = AttenuatedEncoding.from_targets(locality=near, direction_balance=lean, length=n)
    except ValueError as refusal:
        refused, lower = True, float(re.search(r"lie between ([\d.e-]+) and 1", str(refusal))[1])
    if refused:  # with a margin, the named bound can be reached
        assert near <= lower + 1e-6
        near = lower + 1e-3
        encoding = AttenuatedEncoding.from_targets(locality=near, direction_balance=lean, length=n)
    weights = encoding.weights(n).double()
    assert locality(weights).item() == pytest.approx(near, abs=1e-5)
    assert direction_balance(weights).item() == pytest.approx(lean, abs=1e-4)


@pytest.mark.parametrize("form", ["weights", "logits"])
def test_targets_are_those_of_the_weights_in_every_form(form):
    encoding = AttenuatedEncoding.from_targets(
        locality=[0.3, 0.6], direction_balance=[-0.2, 0.5], length=64, form=form, scale=2.5, learnable=True
    )
    assert encoding.heads == 2
    assert locality(encoding.weights(64)).tolist() == pytest.approx([0.3, 0.6], abs=1e-5)
    assert direction_balance(encoding.weights(64)).tolist() == pytest.approx([-0.2, 0.5], abs=1e-5)
    assert set(dict(encoding.named_parameters())) == {"log_decay", "log_symmetry"}


@pytest.mark.parametrize("form", ["weights", "logits"])
def test_targets_may_come_with_a_scale_per_head(form):
    encoding = AttenuatedEncoding.from_targets(locality=0.3, length=64, heads=2, form=form, scale=[0.5, 2.0])
    assert encoding.scale.tolist() == [0.5, 2.0]
    assert locality(encoding.weights(64)).tolist() == pytest.approx([0.3, 0.3], abs=1e-5)


def test_a_very_large_decay_gives_no_nan():
    for decay, lean, scale in [(3e38, 3e38, 1.0), (3e38, 1e-30, 1e30), (1e-30, 1e-30, 1.0), (1e38, 2.0, 0.0)]:
        for form in ("weights", "logits"):
            encoding = AttenuatedEncoding(decay=decay, symmetry=lean, scale=scale, form=form)
            assert torch.isfinite(encoding.weights(9)).all()
            assert not encoding(9).isnan().any()


def test_without_a_target_balance_the_encoding_is_exactly_symmetric():
    encoding = AttenuatedEncoding.from_targets(locality=0.2, length=100, heads=4)
    assert encoding.heads == 4
    assert (measure(encoding.weights(100)).symmetry == 1).all()
    assert locality(encoding.weights(100)).tolist() == pytest.approx([0.2] * 4, abs=1e-6)


def test_a_causal_encoding_has_locality_as_its_only_target():
    encoding = AttenuatedEncoding.from_targets(locality=0.4, length=50, causal=True)
    assert locality(encoding.weights(50)).item() == pytest.approx(0.4, abs=1e-5)
    assert direction_balance(encoding.weights(50)) == -1


UNREACHABLE = [
    ({"locality": 1.0}, r"between 0\.045898.* and 1, both excluded"),
    ({"locality": 0.01}, r"between 0\.045898"),
    ({"locality": 0.06, "direction_balance": 0.9}, r"between 0\.129973"),
    ({"locality": 0.4, "direction_balance": 1.0}, r"between -1 .*and 1"),
    ({"locality": 0.4, "direction_balance": 0.5, "causal": True}, "direction_balance"),
    ({"locality": 0.05, "causal": True}, r"between 0\.126586"),
    ({"locality": 0.4, "length": 1}, "length"),
    ({"locality": 0.4, "form": "logits", "scale": 0.0}, "scale"),
    ({"locality": [0.3, 0.4, 0.5], "heads": 2}, "locality"),
    ({"locality": 0.4, "heads": 0}, "heads"),
    ({"locality": []}, "locality"),
]


@pytest.mark.parametrize(("targets", "words"), UNREACHABLE)
def test_unreachable_targets_raise_an_error_with_the_reachable_range(targets, words):
    with pytest.raises(ValueError, match=words):
        AttenuatedEncoding.from_targets(**({"length": 64} | targets))


@pytest.mark.parametrize("learnable", [False, True, ["scale"]])
@pytest.mark.parametrize("form", ["weights", "logits"])
def test_arguments_that_are_assigned_are_those_of_a_new_encoding(form, learnable):
    encoding = AttenuatedEncoding(2, form=form, learnable=learnable)
    before = encoding(5)
    encoding.decay, encoding.symmetry, encoding.scale = 0.2, [0.5, 2.0], torch.tensor([1.0, 3.0])
    expected = AttenuatedEncoding(2, 0.2, [0.5, 2.0], form, learnable, [1.0, 3.0])
    assert not torch.equal(encoding(5), before)
    torch.testing.assert_close(encoding(5), expected(5))
    assert all(each.is_leaf for each in encoding.parameters())
    for name, wrong in (("decay", 0), ("symmetry", [1, 2, 3]), ("scale", torch.inf)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            setattr(encoding, name, wrong)
    with pytest.raises(ValueError, match="symmetry must be 1"):
        AttenuatedEncoding(causal=True).symmetry = 0.5


def test_arguments_that_are_assigned_while_attached_change_the_bias():
    model, ids = tiny("bert"), tokens(1, 7)
    attachment = attach(model, AttenuatedEncoding(decay=0.5, form="logits"))
    with torch.no_grad():
        before = model(ids)[0]
        for encoding in attachment.encodings:
            encoding.decay = 0.1
        after = model(ids)[0]
        attachment.remove()
        attach(model, AttenuatedEncoding(decay=0.1, form="logits"))
        torch.testing.assert_close(model(ids)[0], after)
    assert not torch.allclose(before, after)


def test_flags_may_be_those_of_numpy():
    encoding = AttenuatedEncoding(causal=np.bool_(True), learnable=np.True_)
    assert (encoding.causal, encoding.learnable) == (True, True)
    assert json.loads(json.dumps(encoding.configuration()))["causal"] is True
