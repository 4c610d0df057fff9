"""Pages of reports: HTML in one file that has no script and loads nothing."""

import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from pelocality.reports.contents import Chart, Part
from pelocality.reports.figures import svg


def page(title: str, template: str, **parts: str) -> str:
    """Return a page whose body is a template of this folder, filled with some HTML."""
    names = ("page.html", "page.css", template)
    frame, css, body = ((files("pelocality.reports") / name).read_text(encoding="utf-8") for name in names)
    return frame.format(title=text(title), css=css, body=body.format(**parts))


def section(part: Part) -> str:
    """Return the section of a part."""
    columns = dict.fromkeys(name for numbers in part.beside.values() for name in numbers)
    rows = ([name, *map(numbers.get, columns)] for name, numbers in part.beside.items())
    return (
        f'<section id="{part.key}"><h2>{text(part.title)}</h2>'
        f'<p class="found">{text(part.found)}</p><p class="how">How to read it: {sentence(part.how)}</p>'
        f"{table(['', *columns], rows) if columns else ''}{figures(part.charts)}{notes(part.notes)}"
        f"<details{'' if part.charts else ' open'}><summary>Numbers and code</summary>"
        f"<pre>{text(part.code)}</pre>{table(part.table['columns'], part.table['rows'])}</details></section>"
    )


def figures(charts: Iterable[Chart]) -> str:
    """Return charts side by side."""
    drawn = (f'<div class="figure" role="img" aria-label="{text(chart.title)}">{svg(chart)}</div>' for chart in charts)
    return f'<div class="figures">{"".join(drawn)}</div>'


def notes(cautions: Iterable[str]) -> str:
    """Return cautions as sentences."""
    return "".join(f'<p class="note">{sentence(note[0].upper() + note[1:])}.</p>' for note in cautions)


def table(columns: Iterable[Any], rows: Iterable[Iterable[Any]], style: str = "wide") -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="{style}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=number' if number else ''}>{text(value)}</td>"


def sentence(words: str) -> str:
    """Return a sentence as HTML, with `code` between backticks."""
    return re.sub("`(.+?)`", r"<code>\1</code>", text(words))


def text(value: Any) -> str:
    """Return a value as it stands in HTML."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return text(", ".join(f"{name} {each}" for name, each in value.items()))
    return html.escape(f"{value:,}" if isinstance(value, int) and abs(value) > 99_999 else str(value))
