"""Build hooks of the pages: the repository, formulas as MathML, intervals of tables in one piece, and costs."""

import html
import json
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


def on_page_markdown(markdown, page, config, **_):
    """Put a table in the place of the comment on the page of costs, from the figures of the last GPU."""
    if page.file.src_uri != "cost.md":
        return markdown
    figures = Path(config.docs_dir, "results", "gpu.json")
    run = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {"rows": []}
    return markdown.replace("<!-- costs -->", cost_table(run))


def cost_table(run):
    """Return Markdown: what large work takes on the GPU of a run of `benchmarks/gpu.py`, from its slopes."""

    def row(work, **size):
        every = [each for each in run["rows"] if each["work"] == work and size.items() <= each["size"].items()]
        return next((each for each in every if not each["failed"]), None)

    def weights(each):
        size = each["size"]
        return size["layers"] * size["heads"] * size["n"] ** 2 * size["texts"]

    def extra(work, forward, n):
        """Return how many weights a row has, and the milliseconds beyond those of the forward pass."""
        each, alone = row(work, n=n), row(forward, n=n)
        return weights(each), each["milliseconds"] - alone["milliseconds"]

    def decoder():
        (fewer, short), (more, long) = (extra("text_average", "forward of a decoder", n) for n in (512, 1024))
        forward = row("forward of a decoder", n=1024)
        tokens = forward["size"]["texts"] * forward["size"]["n"]
        of_model = forward["milliseconds"] / tokens * 70e9 / forward["size"]["parameters"]
        return 64 * (512 * of_model + 80 * 64 * 512**2 * (long - short) / (more - fewer))

    def sentences():
        each = row("text_average", n=32)
        return 1e9 * each["milliseconds"] / each["size"]["texts"]

    def million():
        short, long = (row("metrics of text without a matrix", n=n) for n in (8192, 131_072))
        slope = (long["milliseconds"] - short["milliseconds"]) / (weights(long) - weights(short))
        return 32 * 1e12 * slope

    works = {
        "`text_average` of a decoder of 70 billion weights, 64 texts of 512 tokens": decoder,
        "`text_average` of a model as large as BERT-base, 10<sup>9</sup> sentences of 32 tokens": sentences,
        "the metrics of one layer of 32 heads on a text of 10<sup>6</sup> tokens": million,
    }
    lines = ["| work | on one GPU |", "|---|---:|"]
    for work, milliseconds in works.items():
        try:
            shown = duration(milliseconds() / 1000)
        except TypeError:  # a row is missing
            shown = "not measured yet"
        lines.append(f"| {work} | {shown} |")
    return "\n".join(lines) + (f"\n\nMeasured on {run['machine']}." if run["rows"] else "")


def duration(seconds):
    """Return a time in the largest unit of which there is one, to two digits."""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit = next((name for name, size in units.items() if seconds >= size), "seconds")
    return f"{float(f'{seconds / units[unit]:.2g}'):g} {unit}"


def on_page_content(content, **_):
    """Replace the formulas of a rendered page, which browsers then show without a script; mark what not to break."""

    def mathml(match):
        display = "block" if match[2] == "[" else "inline"
        formula = convert(html.unescape(match[3]).strip(), display=display)
        return f'<div class="formula">{formula}</div>' if display == "block" else formula

    def unbroken(cell):
        return _PIECE.sub(r'<span class="piece">\g<0></span>', cell[0])

    return _CELL.sub(unbroken, _MATHS.sub(mathml, content))
