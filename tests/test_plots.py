"""Pictures hold the numbers they were given, on the axes they were given."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from pelocality import plots
from pelocality.metrics import distance_profile
from tests.test_metrics import random_attention

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

TABLE = pd.DataFrame(
    [
        {"step": step, "layer": layer, "seed": seed, "locality": 0.01 * step + layer + 0.1 * seed}
        for step in (0, 10, 20)
        for layer in range(2)
        for seed in range(3)
    ]
)
DRAW = {
    "heatmap": lambda **kw: plots.heatmap(random_attention(16, 16), **kw),
    "heatmap in log scale": lambda **kw: plots.heatmap(torch.eye(16), scale="log", **kw),
    "head_grid": lambda **kw: plots.head_grid(torch.rand(6, 12), label="locality", **kw),
    "profiles": lambda **kw: plots.profiles({"a": random_attention(2, 40, 40), "b": random_attention(16, 16)}, **kw),
    "comparison": lambda **kw: plots.comparison({"a": torch.rand(6, 12), "b": torch.rand(6)}, label="symmetry", **kw),
    "trajectory": lambda **kw: plots.trajectory(TABLE, "locality", **kw),
}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)
def test_every_picture_draws_where_it_is_told_and_labels_its_axes(draw):
    fig, (left, right) = plt.subplots(1, 2)
    returned, ax = draw(ax=right, title="named")
    assert (returned, ax) == (fig, right)
    assert not left.has_data()
    assert ax.has_data()
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.get_title() == "named"
    fig.canvas.draw()


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)
def test_every_picture_makes_its_own_figure_when_not_told(draw):
    fig, ax = draw()
    assert ax.get_figure() is fig
    fig.canvas.draw()


def test_a_heatmap_shows_the_weights():
    attention = random_attention(16, 16)
    _, ax = plots.heatmap(attention)
    np.testing.assert_allclose(ax.images[0].get_array(), attention.numpy(), atol=1e-7)


def test_a_grid_shows_every_number():
    values = torch.arange(6.0).reshape(2, 3) / 10
    _, ax = plots.head_grid(values)
    assert [text.get_text() for text in ax.texts] == [".00", ".10", ".20", ".30", ".40", ".50"]


def test_profiles_average_heads_and_are_centred():
    attention = random_attention(3, 40, 40)
    _, ax = plots.profiles({"model": attention}, reach=5)
    line = next(line for line in ax.lines if line.get_label() == "model")
    np.testing.assert_array_equal(line.get_xdata(), np.arange(-5, 6))
    np.testing.assert_allclose(line.get_ydata(), distance_profile(attention).mean(0)[34:45], atol=1e-6)


def test_lines_differ_in_more_than_colour():
    _, ax = plots.comparison({name: torch.rand(4) for name in "abcd"})
    assert len({(line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 4


def test_a_trajectory_is_the_mean_over_seeds():
    _, ax = plots.trajectory(TABLE)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1.1, 1.2, 1.3])
    ends = ax.collections[1].get_paths()[0].vertices
    expected = stats.ttest_1samp(TABLE[(TABLE["layer"] == 1) & (TABLE["step"] == 10)]["locality"], 0)
    np.testing.assert_allclose(sorted(set(ends[ends[:, 0] == 10, 1])), expected.confidence_interval(0.95))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: plots.heatmap(torch.rand(2, 4, 4)), "one matrix"),
        (lambda: plots.heatmap(torch.eye(4), scale="sqrt"), "scale"),
        (lambda: plots.head_grid(torch.rand(4)), "layer, head"),
        (lambda: plots.comparison({"a": torch.rand(2, 3, 4)}), "layer"),
        (lambda: plots.comparison({}), "empty"),
        (lambda: plots.trajectory(TABLE, "entropy"), "entropy"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()
