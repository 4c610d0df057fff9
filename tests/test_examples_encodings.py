"""The examples around encodings run on small input."""

import pytest

from tests.test_examples import run

LINES = [
    f"the {a} {b} stood by the {c} mill ." for a in ("red", "old", "wet") for b in ("stone", "gate") for c in "abcde"
]


@pytest.mark.parametrize("encoding", ["attenuated", "none"])
@pytest.mark.parametrize("mode", ["add", "concat", "sequence"])
def test_the_small_encoder_trains_on_a_text_of_ones_own(encoding, mode, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES))
    options = ["--steps", 3, "--words", 20, "--encoding", encoding, "--mode", mode]
    run("small_encoder", text, *options, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "held out" in printed
    assert ("symmetry" in printed) is (encoding == "attenuated")


def test_the_small_encoder_asks_for_a_text(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="name a text file of your own"):
        run("small_encoder", tmp_path / "none.txt", monkeypatch=monkeypatch)


def test_the_sweep_reads_the_symmetries_that_the_docs_page_gives(tmp_path, monkeypatch, capsys):
    run("attenuated_sweep", "--output", tmp_path, monkeypatch=monkeypatch)
    assert "[0.614, 0.687, 0.744, 1.0, 0.807, 0.83, 0.836]" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attenuated_decay.png", "attenuated_symmetry.png"]
