"""Code of the repository that tests run: scripts as their command lines would, and the blocks of pages."""

import re
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[1]


def run(script, *arguments, monkeypatch):
    """Run e.g. "examples/measure_model.py", modules of its folder importable, and return its names."""
    path = ROOT / script
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    return runpy.run_path(str(path), run_name="__main__")


def start_scripts_in_this_process(monkeypatch):
    """Let scripts that start scripts run them here, where torch and transformers are loaded already, one at a time."""
    running = {}  # a lock for each script, as one may start another

    def run_here(command, *, stdout, stderr=None, env=None):
        _, script, *arguments = command
        error_output = stdout if stderr else sys.stderr
        with (
            running.setdefault(script, Lock()),
            monkeypatch.context() as patch,
            redirect_stdout(stdout),
            redirect_stderr(error_output),
        ):
            try:
                run(script, *arguments, monkeypatch=patch)
            except (Exception, SystemExit):
                traceback.print_exc()
                return subprocess.CompletedProcess(command, 1)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_here)


def python_blocks(page):
    """Return the Python code of a page, such as "docs/models.md", block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
