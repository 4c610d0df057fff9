"""Code of the repository that tests run: scripts as their command lines would, and the blocks of pages."""

import importlib
import re
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[1]
EXPERIMENTS = {path.stem: path.relative_to(ROOT) for path in (ROOT / "experiments").rglob("*.py")}


def experiment(name):
    """Return the module of an experiment."""
    return importlib.import_module(".".join(EXPERIMENTS[name].with_suffix("").parts))


def run(script, *arguments, monkeypatch):
    """Run "examples/measure_model.py", or an experiment by its name, as its command line would."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    if script in EXPERIMENTS:
        experiment(script).main()
    else:
        runpy.run_path(str(ROOT / script), run_name="__main__")


def start_experiments_in_this_process(monkeypatch):
    """Let experiments that start others run them here, where torch and transformers are loaded, one at a time."""
    running = {}  # a lock for each module, as one may start another

    def run_here(command, *, stdout, stderr=None, env=None):
        _, _, module, *arguments = command
        error_output = stdout if stderr else sys.stderr
        with (
            running.setdefault(module, Lock()),
            monkeypatch.context() as patch,
            redirect_stdout(stdout),
            redirect_stderr(error_output),
        ):
            try:
                run(module.rpartition(".")[2], *arguments, monkeypatch=patch)
            except (Exception, SystemExit):
                traceback.print_exc()
                return subprocess.CompletedProcess(command, 1)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_here)


def python_blocks(page):
    """Return the Python code of a page, such as "docs/models.md", block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
