"""Rollout of attention over depth, against the product written out."""

import dataclasses

import pytest
import torch

from pelocality import influence, measure, plots, positional_attention, rollout, sink_rate, text_average
from pelocality.models import Rollout
from tests.families import tiny, tiny_any, tokens

N = 7


def of_text(model, **options):
    return text_average(model, [{"input_ids": tokens(3, N)}], special_tokens=True, **options)


@pytest.mark.parametrize("residual", [0, 0.3, 0.5])
def test_rollout_is_the_product_of_layers_with_residual_connections(residual):
    result = of_text(tiny("bert"))
    found = rollout(result, residual)
    for layer in range(3):
        expected = torch.eye(N, dtype=torch.float64)
        for below in range(layer + 1):
            heads = result.attention[below]
            mean = sum(heads[head] for head in range(len(heads))) / len(heads)
            expected = ((1 - residual) * mean + residual * torch.eye(N)) @ expected
        torch.testing.assert_close(found.attention[layer, 0], expected)
    torch.testing.assert_close(found.attention.sum(-1), torch.ones(3, 1, N, dtype=torch.float64))


def test_residual_connections_alone_keep_every_token():
    found = rollout(of_text(tiny("bert")), residual=1)
    assert torch.equal(found.attention, torch.eye(N).double().expand(3, 1, N, N))


def test_without_residual_connections_uniform_causal_attention_falls_to_the_first_token():
    uniform = torch.ones(N, N, dtype=torch.float64).tril()
    result = of_text(tiny("gpt2"))
    causal = dataclasses.replace(
        result, attention=(uniform / uniform.sum(-1, keepdim=True)).expand(40, 2, N, N), layers=tuple(range(40))
    )
    causal = dataclasses.replace(causal, visible=uniform.bool().expand(40, N, N))
    assert sink_rate(rollout(causal, residual=0))[-1, 0] > 0.999
    last = rollout(causal, residual=0.9).attention[5, 0, -1]
    assert last.argmin() not in (0, N - 1)  # the shape of a U
    assert sink_rate(rollout(causal, residual=0.5))[-1, 0] > 0.99  # it ends there all the same


def test_a_window_is_seen_as_far_as_its_layers_reach():
    found = rollout(positional_attention(tiny("mistral"), length=12, words=2))  # windows of 5
    assert found.visible_keys == (5, 9, 12)
    assert found.source.causal


def test_a_rollout_has_metrics_tables_plots_and_a_file(tmp_path):
    for model in (tiny("bert"), tiny("gpt2")):
        found = rollout(of_text(model))
        assert measure(found).locality.shape == (3, 1)
        assert found.to_frame().shape[0] == 3
        name = "past_locality" if found.source.causal else "locality"
        assert f"{name}_of_mean" in found.to_frame()
        assert "product of mean attention with residual weight 0.5" in repr(found)
        plots.comparison({"rollout": found})
        found.save(tmp_path / "rollout.safetensors")
        again = Rollout.load(tmp_path / "rollout.safetensors")
        assert torch.equal(again.attention, found.attention)
        assert again.source == found.source
        with pytest.raises(ValueError, match="read metric_of_mean"):
            found.interval("locality")
        with pytest.raises(ValueError, match="read metric_of_mean"):
            found.mean_of_metric  # noqa: B018


def test_what_does_not_hold_the_attention_of_all_layers_is_refused():
    bert = tiny("bert")
    whole = rollout(of_text(bert))
    assert rollout(of_text(bert, layers=[0, 1])).layers == (0, 1)
    for result, residual, reason in [
        (of_text(bert, layers=[1, 2]), 0.5, r"\[1, 2\]"),
        (of_text(bert, layers=[1, 0]), 0.5, r"\[1, 0\]"),
        (of_text(tiny_any("jamba")), 0.5, r"\[1, 3\].*influence"),
        (influence(bert, length=N, words=1), 0.5, "over depth already"),
        (whole, 0.5, "over depth already"),
        (of_text(bert), 2, "residual"),
    ]:
        with pytest.raises(ValueError, match=reason):
            rollout(result, residual=residual)
