"""The study of downstream accuracy: its tasks, cells and slopes."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import linregress, t as student_t

from tests.data import EXAMPLES
from tests.scripts import ROOT, experiment

pytest.importorskip("sklearn")
CELLS, TASKS = experiment("cells"), experiment("sentence_tasks")


def test_an_original_and_its_perturbation_are_never_in_training_and_test_at_once():
    for task in TASKS.order_sensitive(EXAMPLES / "frames.jsonl", seed=0):
        sampled = task.sample(20, seed=0)
        assert len(sampled.labels) <= 20
        pairs = pd.DataFrame({"group": sampled.groups, "label": sampled.labels}).groupby("group")["label"]
        assert pairs.apply(sorted).map(tuple).unique().tolist() == [("original", "perturbed")]
        if task.name != "roles":  # equal words: whoever sees no order is right once in each pair
            assert TASKS.scores(sampled, TASKS.tfidf(sampled, 1), 3, 0) == {task.name: 0.5}


def test_sentences_are_read_in_both_encodings_and_by_the_published_split(tmp_path):
    for names in TASKS.SENTEVAL.values():
        for name in (*names[0], *names[1]):
            (tmp_path / name).write_text("0 a plain film .\n1 good\n", encoding="utf-8")
    (tmp_path / "rt-polarity.all").write_bytes("0 naïve\x85 and long .\n1 crème\n".encode("latin-1"))
    (tmp_path / "custrev.all").write_bytes("1 crème brûlée .\n".encode())
    tasks = {task.name: task for task in TASKS.senteval(tmp_path)}
    assert tasks["MR"].texts[0] == ["naïve\x85 and long .", "crème"]  # the mark ends no line
    assert tasks["CR"].texts[0] == ["crème brûlée ."]
    assert tasks["MPQA"].test is None
    assert tasks["TREC"].test.tolist() == [False, False, True, True]
    assert tasks["SST-2"].test.sum() == 2
    assert tasks["SST-2"].sample(2, seed=0).test.tolist() == [False, False, True]


def test_glue_is_read_with_its_quotes_and_missing_looking_words(tmp_path):
    rows = {"CoLA": 'x\t1\t\tHe said "none.\nx\t0\t*\tnull', "RTE": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tno"}
    rows["STS-B"] = "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t2.5"
    for name, text in rows.items():
        (tmp_path / name).mkdir()
        for part in ("train", "dev"):
            (tmp_path / name / f"{part}.tsv").write_text(text + "\n")
    cola, rte, sts = TASKS.glue(tmp_path)
    assert cola.texts[0] == ['He said "none.', "null"] * 2
    assert (cola.test.tolist(), rte.labels.tolist()) == ([False, False, True, True], ["no", "no"])
    assert (sts.texts, sts.labels.tolist()) == ((["A."] * 2, ["B."] * 2), [2.5, 2.5])


def test_no_premise_that_nli_is_tested_on_is_trained_on():
    task = TASKS.inference(
        [EXAMPLES / "nli_train.jsonl", EXAMPLES / "nli_train.jsonl"], EXAMPLES / "nli_pairs.jsonl", 0
    )
    premises = np.array(task.texts[0])
    assert not set(premises[task.test]) & set(premises[~task.test])
    for rows, texts in task.perturbed.values():
        assert task.test[rows].all()
        for row, text in zip(rows, texts, strict=True):
            assert sorted(text.lower()) == sorted(premises[row].lower())
            assert text != premises[row]


def test_half_of_the_mixed_heads_mirror_the_other_half():
    model = torch.nn.Module()
    model.config = type("Config", (), {"num_attention_heads": 4})
    bias = CELLS.encoding_of("mixed", model, None).interior_bias(9)
    torch.testing.assert_close(bias[:2], bias[2:].flip(-1))
    assert (bias[0] - bias[0].flip(-1)).abs().max() > 1


def test_a_slope_that_was_put_in_is_found_with_an_interval_over_cells_and_tasks():
    slope = experiment("downstream_tables").slope
    draw = np.random.default_rng(0)
    cells, tasks = draw.uniform(0, 0.3, 12), [2.6, 2.8, 3.0, 3.2, 3.4]
    rows = [
        {"cell": f"c{c}", "task": f"t{t}", "seed": s, "locality": x, "score": 60 + 9 * t + 10 * b * x + draw.normal()}
        for c, x in enumerate(cells)
        for t, b in enumerate(tasks)
        for s in (0, 1)
    ]
    for found in slope(pd.DataFrame(rows), "locality"):
        assert 2 < found.low < 3 < found.high < 4


def test_a_slope_for_these_tasks_is_that_of_the_mean_scores_of_cells():
    """An independent fit: scipy's regression of cell means, and with the loss held numpy's least squares."""
    tables = experiment("downstream_tables")
    table = pd.read_csv(ROOT / "docs" / "results" / "downstream_accuracy.csv")
    rows = table[(table["kind"] == "order") & table["cell"].isin(tables.RELOCATED[1:])]
    means = rows.groupby("cell")[["score", "locality", "token_loss"]].mean()
    alone = linregress(10 * means["locality"], means["score"])
    found, _ = tables.slope(rows, "locality")
    assert found.value == pytest.approx(alone.slope)
    assert (found.high - found.low) / 2 == pytest.approx(student_t.ppf(0.975, 11) * alone.stderr)
    held, general = tables.slope(rows, "locality", "token_loss")
    design = np.column_stack([np.ones(13), 10 * means["locality"], means["token_loss"]])
    assert held.value == general.value == pytest.approx(np.linalg.lstsq(design, means["score"])[0][1])
    assert [f"{each:.2f}" for each in (held.value, held.low, held.high)] == ["4.03", "2.63", "5.43"]


def test_tasks_in_general_know_less_than_these_tasks_and_one_task_says_nothing_of_others():
    slope = experiment("downstream_tables").slope
    cells = [{"cell": c, "seed": 0, "locality": 0.1 * c, "score": 3.0 * c + (-1) ** c} for c in range(6)]
    rows = pd.DataFrame(
        [cell | {"task": task, "score": k * cell["score"]} for cell in cells for k, task in ((1, "MR"), (2, "CR"))]
    )
    these, general = slope(rows, "locality")
    assert these.value == general.value
    assert general.low < these.low < these.high < general.high
    these, general = slope(rows[rows["task"] == "MR"], "locality")
    assert np.isfinite(these.high)
    assert np.isnan(general.high)
    too_few, _ = slope(rows[rows["cell"] < 2], "locality")
    assert np.isnan([too_few.value, too_few.low, too_few.high]).all()


def test_seeds_that_not_all_cells_have_do_not_enter_a_slope():
    slope = experiment("downstream_tables").slope
    cells = [
        {"cell": c, "seed": s, "task": "MR", "locality": 0.1 * c, "score": 3.0 * c + 50 * s}
        for c in range(5)
        for s in (0, 1)
    ]
    assert slope(pd.DataFrame(cells[:-1]), "locality")[0].value == pytest.approx(3)


def test_models_from_nothing_alone_are_summarised_and_compared_on_the_same_sentences():
    tables = experiment("downstream_tables")
    scores = {"from nothing: none": (0.5, 0.6), "from nothing: mixed": (0.75, 0.85)}
    rows = [
        {"cell": cell, "seed": seed, "held_out_loss": 5.0, "scores": {"MR": score}} | dict.fromkeys(tables.METRICS, 0.5)
        for cell, found in scores.items()
        for seed, score in enumerate(found)
    ]
    table = tables.long_table(rows)
    assert tables.summary(table)[["held out loss", "sentence tasks"]].values.tolist() == [
        ["5.000", "55.0"],
        ["5.000", "80.0"],
    ]
    assert "token loss" not in tables.summary(table)
    assert tables.differences(table).values.tolist() == [["from nothing: mixed", "+25.0 [+25.0, +25.0]"]]


def test_cells_with_other_seeds_are_compared_where_both_have_one():
    tables = experiment("downstream_tables")
    found = {("original", 0): 0.5, ("original", 1): 0.7, ("none", 1): 0.4}
    rows = [
        {"cell": c, "seed": s, "scores": {"MR": x}} | dict.fromkeys(tables.METRICS, 0.5) for (c, s), x in found.items()
    ]
    table = tables.long_table(rows)
    assert tables.summary(table)["seeds"].tolist() == [2, 1]
    assert tables.differences(table)["sentence tasks"].tolist() == ["-30.0"]
    tables.figure(table)
