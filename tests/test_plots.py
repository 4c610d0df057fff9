"""Plots show the numbers given to them, on the axes given to them."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from transformers.modeling_outputs import BaseModelOutput

from pelocality import Positions, plots
from pelocality.encodings import ALiBi
from pelocality.evaluation import LossByPosition, NeedleEvaluation
from pelocality.metrics import distance_profile, locality, measure, measure_relative, past_locality, symmetry
from pelocality.models import HeadClasses, RotaryBands, positional_attention, text_average
from tests.families import tiny
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
TURNS = torch.tensor([6.28, 62.8, 6283.0, torch.inf]).expand(2, 4)
BANDS = RotaryBands(TURNS, *torch.rand(4, 2, 3, 4), *torch.rand(2, 2, 3, 4) > 0.9, torch.zeros(2, 4), (1, 3), 8)
SCALES = ("linear", "log")
CELLS = [(kind, length, depth) for kind in ("needle", "no needle") for length in (64, 256) for depth in (0, 0.5, 1)]
NEEDLES = NeedleEvaluation(
    pd.DataFrame(
        [(*cell, copy < cell[2] * 4) for cell in CELLS for copy in range(4)],
        columns=["kind", "length", "depth", "correct"],
    ),
    "",
    0,
)
LOSSES = LossByPosition(torch.arange(1.0, 94.0).expand(3, 93) + torch.arange(3.0)[:, None], "", 0)


def classes_of_heads():
    """Return two layers of four heads, with one head of each class."""
    names = ("previous", "self", "next", "offset_weight", "duplicate", "induction", "sink")
    scores = {name: torch.full((2, 4), 0.1) for name in names}
    scores |= {"duplicate_control": torch.zeros(2, 4), "induction_control": torch.zeros(2, 4)}
    for place, name in enumerate(names):
        scores[name].view(-1)[place] = 0.9
    scores["offset"] = torch.full((2, 4), -3.0)
    return HeadClasses(scores, {}, torch.zeros(0), torch.zeros(0), (0, 5), source=None)


LONG = "A title so long that it has to be wrapped, because the figure is not wide enough for all of it"
DRAW = {
    "heatmap": lambda **kw: plots.heatmap(random_attention(16, 16), **kw),
    "heatmap in log scale": lambda **kw: plots.heatmap(torch.eye(16), scale="log", **kw),
    "head_grid": lambda **kw: plots.head_grid(torch.rand(6, 12), label="locality", **kw),
    "profiles": lambda **kw: plots.profiles({"a": random_attention(2, 40, 40), "b": random_attention(16, 16)}, **kw),
    "key_profiles": lambda **kw: plots.key_profiles(
        {"a": random_attention(2, 9, 9), "b": random_attention(7, 7)}, **kw
    ),
    "comparison": lambda **kw: plots.comparison({"a": torch.rand(6, 12), "b": torch.rand(6)}, label="symmetry", **kw),
    "needles": lambda **kw: plots.needles(NEEDLES, **kw),
    "loss_by_position": lambda **kw: plots.loss_by_position({"a": LOSSES, "b": LOSSES}, **kw),
    "bands": lambda **kw: plots.bands(BANDS, **kw),
    "head_classes": lambda **kw: plots.head_classes(classes_of_heads(), **kw),
    "trajectory": lambda **kw: plots.trajectory(TABLE, "locality", **kw),
}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)
def test_every_plot_uses_the_given_axes_or_new_ones_and_labels_them(draw):
    fig, (left, right) = plt.subplots(1, 2)
    assert draw(ax=right, title="named") == (fig, right)
    assert not left.has_data()
    assert right.has_data()
    assert all((right.get_xlabel(), right.get_ylabel(), right.get_title() == "named"))
    fig, ax = draw()
    assert ax.get_figure() is fig
    fig.canvas.draw()


def shades(ax):
    """Return the darkness of each cell of a heat map, from 0 to 1."""
    return np.ma.getdata(ax.images[0].norm(ax.images[0].get_array()))


@pytest.mark.parametrize("scale", SCALES)
def test_zero_is_white_and_the_largest_weight_black(scale):
    _, ax = plots.heatmap(torch.eye(8), scale=scale)
    np.testing.assert_allclose(shades(ax), np.eye(8), atol=1e-6)
    _, ax = plots.heatmap(torch.full((8, 8), 1 / 8), scale=scale)
    np.testing.assert_allclose(shades(ax), 1, atol=1e-6)
    _, ax = plots.heatmap(torch.zeros(8, 8), scale=scale)
    np.testing.assert_allclose(shades(ax), 0, atol=1e-6)


def test_the_smallest_weight_of_a_causal_matrix_is_darker_than_hidden_keys():
    _, ax = plots.heatmap(torch.tensor([[1.0, 0.0], [0.999, 0.001]]), scale="log")
    assert shades(ax)[0, 1] == pytest.approx(0, abs=1e-6)
    assert shades(ax)[1, 1] > 0.1


@pytest.mark.parametrize("scale", SCALES)
def test_nan_is_hatched_and_does_not_affect_the_colour_scale(scale):
    attention = random_attention(8, 8)
    top = attention[:4].max().item()
    attention[4:] = torch.nan
    fig, ax = plots.heatmap(attention, scale=scale)
    assert ax.images[0].norm.vmax == pytest.approx(top)
    assert ax.images[0].get_array().mask[4:].all()
    assert ax.patch.get_hatch()
    fig, ax = plots.heatmap(torch.full((4, 4), torch.nan), scale=scale)
    fig.canvas.draw()
    fig, ax = plots.head_grid(torch.tensor([[0.25, torch.nan], [0.75, torch.inf]]))
    fig.canvas.draw()
    assert (ax.images[0].norm.vmin, ax.images[0].norm.vmax) == (0.25, 0.75)
    assert [text.get_text() for text in ax.texts] == [".25", "", ".75", "∞"]
    assert shades(ax)[1, 1] == 1
    fig, ax = plots.head_grid(torch.full((2, 2), torch.nan))
    fig.canvas.draw()


def test_a_grid_shows_every_number_and_large_ones_without_decimals():
    _, ax = plots.head_grid([[0.0, 0.1, 0.999, 1.0, 9.96], [99.6, 1500.0, 4096.0, -0.004, -1500.0]])
    shown = ["0", ".10", "1.00", "1", "10", "100", "1500", "4096", ".00", "-1500"]
    assert [text.get_text() for text in ax.texts] == shown


@pytest.mark.parametrize("layers", [(1, 3, 11), torch.tensor([1, 3, 11]), list(torch.tensor([1, 3, 11]))])
@pytest.mark.parametrize("draw", [plots.head_grid, lambda a, **kw: plots.comparison({"a": a, "b": a}, **kw)])
def test_layers_have_the_models_own_numbers(draw, layers):
    fig, ax = draw(torch.rand(3, 4), layers=layers)
    fig.canvas.draw()
    axis = ax.yaxis if draw is plots.head_grid else ax.xaxis
    assert [label.get_text() for label in axis.get_ticklabels()] == ["1", "3", "11"]
    with pytest.raises(ValueError, match=r"layers must number the 3 layers of values"):
        draw(torch.rand(3, 4), layers=layers[:2])


def test_profiles_of_long_encodings_need_no_matrix():
    causal = ALiBi(4, causal=True)
    causal.weights = None  # not called
    lines = {"ALiBi": measure_relative(ALiBi(4).relative(4096)), "one": ALiBi(4).weights(64), "causal": causal}
    _, ax = plots.profiles(lines, length=20_000, reach=8)
    long, short, past = ax.lines[:3]
    assert past.get_ydata()[8] > past.get_ydata()[7] > past.get_ydata()[9] == 0
    np.testing.assert_allclose(long.get_xdata(), short.get_xdata())
    expected = measure_relative(ALiBi(4).relative(4096)).distance_profile.mean(0)[4095 - 8 : 4096 + 8]
    np.testing.assert_allclose(long.get_ydata(), expected, rtol=1e-5)


def test_profiles_on_a_grid_are_by_ring():
    grid = Positions.grid(4, 5)
    attention = random_attention(2, 20, 20)
    _, ax = plots.profiles(attention, positions=grid, reach=3)
    (line,) = ax.lines
    near = grid.profile_distances <= 3
    np.testing.assert_allclose(line.get_xdata(), grid.profile_distances[near])
    np.testing.assert_allclose(line.get_ydata(), distance_profile(attention, positions=grid).mean(0)[near])
    assert ax.get_xlabel() == "distance (to 3 of 5)"
    seconds = Positions(np.arange(20) / 2)
    _, ax = plots.profiles(attention, positions=seconds, reach=3)
    assert ax.lines[0].get_xdata().tolist() == [k / 2 for k in range(-6, 7)]
    placed = SimpleNamespace(attention=attention, positions=grid)
    with pytest.raises(ValueError, match="distance has no sign at the positions of grid"):
        plots.profiles({"grid": placed, "line": attention})


def test_attention_to_a_plane_is_drawn_by_place_and_by_displacement():
    grid = Positions.grid(3, 4, before=1)
    attention = random_attention(2, 13, 13)
    mean = attention.mean(0)[1:, 1:]
    _, ax = plots.on_grid(attention, positions=grid, query=5)
    np.testing.assert_allclose(ax.images[0].get_array(), mean[5].reshape(3, 4))
    assert ax.images[0].get_extent() == [-0.5, 3.5, 2.5, -0.5]
    assert (ax.lines[0].get_xdata(), ax.lines[0].get_ydata()) == ([1.0], [1.0])
    _, ax = plots.on_grid(attention, positions=grid)
    image = ax.images[0].get_array()
    assert image.shape == (5, 7)
    pairs = [mean[i, j] for i in range(12) for j in range(12) if (j // 4 - i // 4, j % 4 - i % 4) == (1, -2)]
    np.testing.assert_allclose(image[3, 1], np.mean(pairs))
    refused = ((attention, None), (attention, Positions.grid(2, 2, 3)), (attention[:, 1:, 1:], grid))
    for matrices, positions in refused:
        with pytest.raises(ValueError, match=r"^(positions|attention) must (be|have)"):
            plots.on_grid(matrices, positions=positions)
    columns = Positions([(0, 0), (0, 1), (0, 5)])
    _, ax = plots.on_grid(random_attention(3, 3), positions=columns, query=0)
    assert ax.images[0].get_array().shape == (1, 6)
    with pytest.raises(ValueError, match="positions must be whole steps apart along each axis"):
        plots.on_grid(random_attention(3, 3), positions=[(0, 0), (0, 1), (0, 2.5)], query=0)


def test_needles_are_drawn_by_length_and_depth():
    _, ax = plots.needles(NEEDLES, kind="no needle")
    np.testing.assert_allclose(ax.images[0].get_array(), [[0, 0.5, 1], [0, 0.5, 1]])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "0.5", "1"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["64", "256"]
    assert [text.get_text() for text in ax.texts] == ["0", ".50", "1", "0", ".50", "1"]
    assert ax.images[0].get_clim() == (0, 1)


def test_losses_are_drawn_with_the_intervals_of_their_table():
    _, ax = plots.loss_by_position(LOSSES, per_doubling=1)
    frame = LOSSES.to_frame(1)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), frame["loss"])
    band = ax.collections[0].get_paths()[0].vertices
    assert {*np.round(frame["low"], 6), *np.round(frame["high"], 6)} <= set(np.round(band[:, 1], 6))


def test_profiles_average_heads_and_are_centred():
    attention = random_attention(3, 40, 40)
    _, ax = plots.profiles({"model": attention}, reach=5)
    line = next(line for line in ax.lines if line.get_label() == "model")
    np.testing.assert_array_equal(line.get_xdata(), np.arange(-5, 6))
    np.testing.assert_allclose(line.get_ydata(), distance_profile(attention).mean(0)[34:45], atol=1e-6)


@pytest.mark.parametrize("query", [-1, 3])
def test_key_profiles_are_the_row_of_a_query_averaged_over_heads(query):
    attention = random_attention(3, 8, 8)
    _, ax = plots.key_profiles(attention, query=query)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), attention[:, query].mean(0), atol=1e-6)
    assert ax.get_ylabel() == f"mean attention of {'the last query' if query == -1 else 'query 3'}"


def test_what_holds_attention_is_drawn_as_its_attention_is():
    model = tiny("bert").eval()
    model.set_attn_implementation("eager")
    output = model(torch.tensor([[5, 6, 7, 8]]), output_attentions=True)
    drawn = [plots.profiles(given)[1].lines[0].get_ydata() for given in (output, output.attentions)]
    np.testing.assert_array_equal(*drawn)
    attention = random_attention(4, 4)
    for given in (attention, SimpleNamespace(attention=attention), BaseModelOutput(attentions=attention), [*attention]):
        np.testing.assert_allclose(plots.heatmap(given)[1].images[0].get_array(), attention.numpy(), atol=1e-7)


@pytest.mark.parametrize("column", ["position_share", "locality_low", "locality_of_mean"])
def test_every_column_of_a_results_frame_can_be_drawn(column):
    batch = {"input_ids": torch.randint(5, 20, (3, 6), generator=torch.Generator().manual_seed(0))}
    result = text_average(tiny("bert"), [batch], special_tokens=True, layers=[2, 0], progress=False)
    frame = result.to_frame()
    fig, ax = plots.head_grid(result, metric=column)
    assert fig.axes[-1].get_ylabel() == column.replace("_", " ")
    np.testing.assert_allclose(ax.images[0].get_array().ravel(), frame[column], rtol=1e-6)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["2", "0"]


MANY = {
    "profiles": lambda names, **kw: plots.profiles({name: random_attention(9, 9) for name in names}, **kw),
    "key_profiles": lambda names, **kw: plots.key_profiles({name: random_attention(9, 9) for name in names}, **kw),
    "comparison": lambda names, **kw: plots.comparison({name: torch.rand(48, 2) for name in names}, label="x", **kw),
    "trajectory": lambda names, **kw: plots.trajectory(
        pd.DataFrame([{"step": k, "layer": i, "locality": i} for i, _ in enumerate(names) for k in range(3)]), **kw
    ),
    "distances": lambda names, **kw: plots.distances(
        SimpleNamespace(
            histogram=lambda relation: pd.DataFrame({name: [0.75, 0.25] for name in names}, index=[1, 2]),
            sentences=dict.fromkeys(names, 1),
        ),
        **kw,
    ),
}


@pytest.mark.parametrize("draw", MANY.values(), ids=MANY)
def test_many_lines_differ_in_dash_or_marker_with_the_legend_beside_the_axes(draw):
    fig, ax = draw([f"name {i}" for i in range(48)])
    fig.canvas.draw()
    lines = [line for line in ax.lines if line.get_label()[0] != "_"]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(lines) == 48
    legend = ax.get_legend().get_window_extent()
    assert legend.x0 >= ax.get_window_extent().x1
    assert_within(fig, ax)
    assert ax.get_window_extent().width > 250


@pytest.mark.parametrize("draw", [MANY["profiles"], MANY["comparison"]])
def test_every_name_is_in_the_legend_as_it_is(draw):
    names = ["_private", "__x", "a$b$c", "$", 7]
    fig, ax = draw(names)
    fig.canvas.draw()
    texts = [text._preprocess_math(text.get_text()) for text in ax.get_legend().get_texts()]
    assert [text.strip() for text, _ in texts] == [str(name) for name in names]
    assert not any(mathematical for _, mathematical in texts)


@pytest.mark.parametrize("draw", [MANY["profiles"], MANY["comparison"]])
def test_long_names_are_wrapped_and_leave_room_for_the_axes(draw):
    fig, ax = draw([f"an organisation/with-a-very-long-model-name-of-2026 after training, seed {i}" for i in range(3)])
    fig.canvas.draw()
    assert_within(fig, ax)
    assert ax.get_window_extent().width > 250


@pytest.mark.parametrize(
    "draw",
    [
        *(lambda n=n: plots.heatmap(random_attention(n, n), scale="log") for n in (1, 2, 512)),
        lambda: plots.head_grid(torch.rand(1, 32), label="locality"),
        lambda: plots.head_grid(torch.rand(48, 1), label="locality"),
        lambda: plots.head_grid(torch.rand(1, 12), label="relative asymmetry of mean"),
        lambda: plots.head_grid(torch.rand(2, 12), title=LONG),
        lambda: plots.heatmap(random_attention(8, 8), title=LONG),
        lambda: plots.comparison({"a": torch.rand(1, 2), "b": torch.rand(1)}, label="locality"),
    ],
)
def test_nothing_is_cut_off(draw):
    fig, ax = draw()
    fig.canvas.draw()
    assert_within(fig, ax)


def assert_within(fig, ax):
    """Every label, number and name is inside the figure, also of a colour bar, within one pixel."""
    for box in (each.get_tightbbox() for each in {ax, *fig.axes}):
        assert (box.x0 > -1, box.y0 > -1) == (True, True)
        assert (box.x1 < fig.bbox.width + 1, box.y1 < fig.bbox.height + 1) == (True, True)


@pytest.mark.parametrize("title", ["a model", LONG])
def test_the_title_of_head_types_is_above_its_legend(title):
    row = {"relation": "det", "direction": "dependent to head", "distance": 1.5, "q": 0.01, "baseline": 0.5}
    row |= {f"{name}{end}": 0.5 for name in ("positional", "contextual") for end in ("", "_low", "_high")}
    fig, ax = plots.head_types(SimpleNamespace(table=pd.DataFrame([row])), title=title)
    fig.canvas.draw()
    assert ax.title.get_window_extent().y0 >= ax.get_legend().get_window_extent().y1
    assert_within(fig, ax)


def test_a_title_is_no_wider_than_its_axes_and_keeps_its_lines():
    fig, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    _, ax = plots.heatmap(random_attention(8, 8), ax=axes[1], title=f"first line\n{LONG}")
    fig.canvas.draw()
    assert ax.get_title().startswith("first line\n")
    assert ax.title.get_window_extent().width < fig.bbox.width / 3


@pytest.mark.parametrize("draw", [plots.head_grid, lambda grid, ax: plots.comparison({"a": grid}, label="x", ax=ax)])
def test_the_labels_of_many_layers_and_heads_do_not_overlap(draw):
    fig, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    _, ax = draw(torch.rand(48, 32), ax=axes[0])
    fig.canvas.draw()
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert len(boxes) > 5
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_the_numbers_of_a_grid_fit_in_its_cells():
    fig, ax = plots.head_grid(torch.rand(12, 12))
    fig.canvas.draw()
    cell = ax.get_window_extent().width / 12
    assert len(ax.texts) == 144
    assert all(text.get_window_extent().width < cell for text in ax.texts)


def test_a_trajectory_is_the_mean_over_seeds():
    _, ax = plots.trajectory(TABLE)
    assert ax.get_ylabel() == "locality"
    causal = TABLE.rename(columns={"locality": "past_locality"})
    assert plots.trajectory(causal)[1].get_ylabel() == "past locality"
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1.1, 1.2, 1.3])
    ends = ax.collections[1].get_paths()[0].vertices
    expected = stats.ttest_1samp(TABLE[(TABLE["layer"] == 1) & (TABLE["step"] == 10)]["locality"], 0)
    np.testing.assert_allclose(sorted(set(ends[ends[:, 0] == 10, 1])), expected.confidence_interval(0.95))


# what a beginner does, by the argument that the error names
REFUSED = {
    "attention": [
        lambda: plots.heatmap(torch.rand(2, 4, 4)),
        lambda: plots.heatmap(torch.eye(4) + 1j),
        lambda: plots.heatmap(torch.tensor([[1.0, -1.0], [0.0, 1.0]])),
        lambda: plots.heatmap(torch.tensor([[0.0, torch.inf], [0.0, 1.0]])),
        lambda: plots.heatmap(np.ma.masked_array(np.eye(3), mask=np.eye(3))),
        lambda: plots.comparison({"a": torch.rand(2, 3, 4)}),
    ],
    "values": [
        lambda: plots.head_grid(torch.rand(4)),
        lambda: plots.head_grid({"a": torch.rand(2, 3)}),
        lambda: plots.head_grid(SimpleNamespace(share=torch.rand(2, 3))),
        lambda: plots.comparison({}),
        lambda: plots.comparison([torch.rand(2, 3)]),
    ],
    "metric": [
        lambda: plots.head_grid(random_attention(2, 3, 9, 9), metric="localty"),
        lambda: plots.head_grid(measure(torch.eye(4)), metric="entropy"),
        lambda: plots.head_grid(torch.rand(2, 3), metric="entropy"),
        lambda: plots.comparison({"both": torch.eye(4).expand(2, 3, 4, 4), "causal": random_attention(2, 3, 9, 9)}),
    ],
    "layers": [
        lambda: plots.head_grid(torch.rand(2, 3), layers=2),
        lambda: plots.comparison({"a": [1, 2]}, layers=[0, 2], relative_depth=True),
    ],
    "table": [
        lambda: plots.trajectory([1]),
        lambda: plots.trajectory(TABLE.replace({"layer": {1: None}})),
        lambda: plots.trajectory(TABLE[:0]),
        lambda: plots.trajectory(TABLE.drop(columns="seed")),
        lambda: plots.trajectory(pd.concat([TABLE, TABLE])),
    ],
    "scale": [lambda: plots.heatmap(torch.eye(4), scale="sqrt")],
    "kind": [lambda: plots.needles(NEEDLES, kind="all")],
    "layer": [lambda: plots.bands(BANDS, layer=0)],
}


@pytest.mark.parametrize(("name", "draw"), [(name, draw) for name, draws in REFUSED.items() for draw in draws])
def test_values_that_cannot_be_drawn_are_refused(name, draw):
    with pytest.raises((ValueError, TypeError), match=name):
        draw()


def test_results_are_drawn_by_the_metric_that_says_most_of_them_and_with_their_layers():
    causal = positional_attention(tiny("gpt2"), length=8, words=4, layers=[2, 0])
    fig, ax = plots.head_grid(causal)
    assert fig.axes[-1].get_ylabel() == "past locality"
    drawn = ax.images[0].get_array()
    np.testing.assert_allclose(drawn, causal.per_sample["past_locality"].mean(0))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["2", "0"]
    _, ax = plots.comparison({"one": causal, "other": causal}, metric="entropy")
    assert ax.get_ylabel() == "entropy of mean"
    both = positional_attention(tiny("bert"), length=8, words=4)
    assert plots.head_grid(both)[0].axes[-1].get_ylabel() == "locality"


def test_results_of_models_that_differ_in_depth_are_drawn_at_their_own_layers():
    deep = positional_attention(tiny("bert"), length=8, words=4)
    some = positional_attention(tiny("roberta"), length=8, words=4, layers=[2, 0])
    for results in ({"deep": deep, "some": some}, {"some": some, "deep": deep}):
        fig, ax = plots.comparison(results)
        fig.canvas.draw()
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"]
        for line in ax.lines:
            result = results[line.get_label()]
            assert line.get_xdata().round().tolist() == list(result.layers)
            np.testing.assert_allclose(line.get_ydata(), result.per_sample["locality"].mean((0, -1)))


def test_all_results_are_drawn_by_one_metric():
    one, other = (positional_attention(tiny(name), length=8, words=4) for name in ("bert", "gpt2"))
    for results in ({"bert": one, "gpt2": other}, {"gpt2": other, "bert": one}):
        with pytest.raises(ValueError, match=r"metric must be one that all values have, .*; choose one for all"):
            plots.comparison(results)
        for metric in ("adjusted_locality", "adjusted_locality_of_mean"):  # a number per sample of causal models alone
            _, ax = plots.comparison(results, metric=metric)
            assert ax.get_ylabel() == "adjusted locality of mean"
            for line in ax.lines:
                wanted = results[line.get_label()].to_frame("layer", metrics=["adjusted_locality"])
                np.testing.assert_allclose(line.get_ydata(), wanted["adjusted_locality_of_mean"], rtol=1e-6)


def test_what_has_attention_is_measured_for_a_grid_or_a_comparison():
    attention = random_attention(2, 3, 9, 9)
    causal = attention.tril() / attention.tril().sum(-1, keepdim=True)
    encoding = ALiBi(4)
    for given, metric, expected in (
        (attention, None, locality(attention)),
        (attention.numpy(), "symmetry", symmetry(attention)),
        (causal, None, past_locality(causal)),
        (BaseModelOutput(attentions=tuple(attention[:, None])), None, locality(attention)),
        (measure(attention), "symmetry", symmetry(attention)),
        (encoding, None, locality(encoding.weights(50))[None]),
        (measure_relative(encoding.relative(50)), None, locality(encoding.weights(50))[None]),
    ):
        fig, ax = plots.head_grid(given, metric=metric, length=50)
        np.testing.assert_allclose(ax.images[0].get_array(), expected, rtol=1e-5)
        assert fig.axes[-1].get_ylabel() == metric or ("past locality" if given is causal else "locality")
        _, ax = plots.comparison({"it": given}, metric=metric, length=50)
        np.testing.assert_allclose(ax.lines[0].get_ydata(), expected.mean(-1), rtol=1e-5)


def test_models_that_differ_in_depth_are_compared_from_their_first_layer_to_their_last():
    _, ax = plots.comparison({"deep": torch.rand(5, 2), "flat": torch.rand(3, 2)})
    assert ax.get_xlabel() == "depth (0: first layer, 1: last layer)"
    assert [line.get_xdata().tolist() for line in ax.lines] == [[0, 0.25, 0.5, 0.75, 1], [0, 0.5, 1]]
    _, ax = plots.comparison({"deep": torch.rand(5, 2), "flat": torch.rand(3, 2)}, relative_depth=False)
    assert ax.get_xlabel() == "layer"


def test_profiles_of_encodings_say_how_far_they_go_and_may_be_logarithmic():
    _, ax = plots.profiles({"ALiBi": ALiBi(2), "matrix": ALiBi(2).weights(30)}, length=30, reach=20, scale="log")
    np.testing.assert_allclose(*(line.get_ydata() for line in ax.lines[:2]))
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == "distance, key - query (tokens, to 20 of 29)"


def test_bands_draws_the_mean_over_heads_or_one_layer():
    _, ax = plots.bands(BANDS, "use")
    np.testing.assert_allclose(ax.images[0].get_array(), BANDS.use.mean(1), rtol=1e-6)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["1", "3"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["6.3", "63", "6283", "∞"]
    _, ax = plots.bands(BANDS, "massive_keys", layer=3)
    np.testing.assert_allclose(ax.images[0].get_array(), BANDS.massive_keys[1])
    assert ax.get_ylabel() == "head"


def test_head_classes_draws_the_class_of_each_head_with_its_sign_and_counts_them():
    _, ax = plots.head_classes(classes_of_heads())
    assert [text.get_text() for text in ax.texts] == ["-1", "0", "+1", "-3", "D", "I", "s", ""]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[0] == "previous (-1): 1"
    assert labels[-1] == "other: 1"
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "5"]
    assert len({tuple(colour) for colour in ax.images[0].get_array().reshape(-1, 3)}) == 8
    _, ax = plots.head_classes(classes_of_heads(), threshold=0.95)
    assert {text.get_text() for text in ax.texts} == {""}
