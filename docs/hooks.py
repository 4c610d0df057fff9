"""Build hooks of the pages: the repository, formulas as MathML, and intervals of tables in one piece."""

import html
import re
import tomllib
from pathlib import Path

from latex2mathml.converter import convert

_MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_PIECE = re.compile(r"\[[-+.\d]+, [-+.\d]+\]|\d %|\b[A-Z]{3}-\w\b")  # [-0.1, 0.2], 95 %, STS-B


def on_config(config, **_):
    """Link the repository that pyproject.toml names, once it is a real one."""
    project = Path(config.config_file_path).with_name("pyproject.toml").read_text(encoding="utf-8")
    address = tomllib.loads(project)["project"]["urls"]["Repository"]
    if "OWNER" not in address:
        config.repo_url, config.repo_name = address, "pelocality"
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_content(content, **_):
    """Replace the formulas of a rendered page, which browsers then show without a script; mark what not to break."""

    def mathml(match):
        display = "block" if match[2] == "[" else "inline"
        formula = convert(html.unescape(match[3]).strip(), display=display)
        return f'<div class="formula">{formula}</div>' if display == "block" else formula

    def unbroken(cell):
        return _PIECE.sub(r'<span class="piece">\g<0></span>', cell[0])

    return _CELL.sub(unbroken, _MATHS.sub(mathml, content))
