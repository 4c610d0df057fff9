"""Code of the repository that tests run: scripts as their command lines would, and the blocks of pages."""

import re
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


def python_blocks(page):
    """Return the Python code of a page, such as "docs/models.md", block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
