"""Reports as HTML: one file with the library that draws its figures, which loads nothing."""

import functools
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from pelocality.reports.atlas import Atlas
from pelocality.reports.contents import Chart, Part, Report, plain
from pelocality.reports.figures import figure

# the browser itself refuses every request of the page
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="charts">{charts}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


@functools.cache
def plotly_script() -> str:
    """Return the JavaScript of plotly.

    Raises:
        ImportError: Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("pages need plotly: pip install pelocality[report], or write numbers to a .json") from error
    return str(get_plotlyjs())


def report_page(report: Report) -> str:
    """Return the page of a report."""
    shown = [part for part in report.parts if not part.reason]
    short = "".join(f'<li><a href="#{part.key}">{_text(part.title)}</a> {_text(part.found)}</li>' for part in shown)
    facts = "".join(f"<li>{_text(name)} <b>{_text(value)}</b></li>" for name, value in report.facts.items())
    source = report.source
    settings = {**source["settings"], "texts": source["texts"], **source["versions"], "seconds": source["seconds"]}
    body = [
        f"<h1>{_text(report.name)}</h1>",
        '<p class="soft">What its positions do: locality, symmetry and more, by layer and head.</p>',
        f'<ul class="facts">{facts}</ul>',
        f'<h2>In short</h2><ul class="short">{short}</ul>',
    ]
    charts: list[Chart] = []
    body += [_section(part, charts) for part in report.parts]
    body.append(
        '<section id="source"><h2>How was this made?</h2>'
        "<p>Words are drawn from the vocabulary with the seed below. Layers and heads are counted from 0.</p>"
        f"<pre>{_text(source['command'])}</pre><p>In Python, before the line of each part:</p>"
        f"<pre>{_text(chr(10).join(source['python']))}</pre>"
        f"{_table(['what', 'value'], settings.items())}</section>"
    )
    return page(f"{report.name}: positions", body, charts)


def atlas_page(atlas: Atlas) -> str:
    """Return the page of models side by side."""
    charts: list[Chart] = []
    frame = atlas.to_frame().set_index("model").T.reset_index(names="").astype(object)
    table = _table(frame.columns, plain(frame.to_numpy().tolist()))
    notes = "".join(f'<p class="note">{_text(note[0].upper() + note[1:])}.</p>' for note in atlas.notes)
    found = "".join(
        f"<h3>{_text(row['name'])}</h3><ul class=short>{''.join(f'<li>{_text(one)}</li>' for one in each)}</ul>"
        for row, each in ((row, row["found"].values()) for row in atlas.rows)
    )
    commands = "\n".join(f"{row['source']['command']}  # {row['name']}" for row in atlas.rows)
    body = [
        "<h1>Models side by side</h1>",
        '<p class="how">Numbers are means over the layers and heads of a model, counts of heads are sums. "words" is '
        'attention to one repeated word, "text" that on texts.</p>',
        notes,
        table.replace('class="wide"', 'class="wide tall"'),
        '<section><h2>By depth</h2><p class="how">Each line is a model, from its first layer (0) to its last (1).</p>',
        figures_of(atlas.charts(), charts) + "</section>",
        f"<section><h2>What is notable in each</h2>{found}</section>",
        f"<section><h2>How was this made?</h2><pre>{_text(commands)}</pre></section>",
    ]
    return page("Models side by side", body, charts)


def page(title: str, body: Iterable[str], charts: Sequence[Chart]) -> str:
    """Return a page of some HTML, in which ``<div class="figure" data-chart="0">`` holds the first chart."""
    folder = files("pelocality.reports")
    specs = json.dumps([figure(chart) for chart in charts], allow_nan=False, ensure_ascii=False)
    return _PAGE.format(
        policy=_POLICY,
        title=_text(title),
        css=(folder / "page.css").read_text(encoding="utf-8"),
        body="\n".join(body),
        charts=specs.replace("</", "<\\/"),
        plotly=plotly_script(),
        script=(folder / "page.js").read_text(encoding="utf-8"),
    )


def _section(part: Part, charts: list[Chart]) -> str:
    """Return the section of a part; its charts are added to those of the page."""
    if part.reason:
        why = f"<p>Not for this model: {_sentence(part.reason)}.</p>"
        return f'<section id="{part.key}"><h2>{_text(part.title)}</h2>{why}</section>'
    figures = figures_of(part.charts, charts)
    notes = "".join(f'<p class="note">{_sentence(note[0].upper() + note[1:])}.</p>' for note in part.notes)
    table = _table(part.table["columns"], part.table["rows"])
    return (
        f'<section id="{part.key}"><h2>{_text(part.title)}</h2><p class="found">{_text(part.found)}</p>'
        f'<p class="how">How to read it: {_sentence(part.how)}</p>{figures}{notes}'
        f"<details{'' if part.charts else ' open'}><summary>Numbers and code</summary>"
        f"<pre>{_text(part.code)}</pre>{table}</details></section>"
    )


def figures_of(shown: Iterable[Chart], charts: list[Chart]) -> str:
    """Return the places of some charts, which are added to those of the page."""
    places = []
    for chart in shown:
        places.append(
            f'<div class="figure" data-chart="{len(charts)}" role="img" aria-label="{_text(chart.title)}"></div>'
        )
        charts.append(chart)
    return f'<div class="figures">{"".join(places)}</div>' if places else ""


def _table(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=number' if number else ''}>{_text(value)}</td>"


def _sentence(text: str) -> str:
    """Return a sentence as HTML, with `code` between backticks."""
    return re.sub("`(.+?)`", r"<code>\1</code>", _text(text))


def _text(value: Any) -> str:
    """Return a value as it stands in HTML."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return _text(", ".join(f"{name} {each}" for name, each in value.items()))
    return html.escape(f"{value:,}" if isinstance(value, int) and abs(value) > 99_999 else str(value))
