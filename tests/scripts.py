"""Run a script of the repository as its command line would."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(script, *arguments, monkeypatch):
    """Run e.g. "examples/measure_model.py", modules of its folder importable, and return its names."""
    path = ROOT / script
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    return runpy.run_path(str(path), run_name="__main__")
