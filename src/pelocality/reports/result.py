"""A report of one model, as a page and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pelocality.reports.contents import Part, plain
from pelocality.reports.page import page, section, table, text


@dataclass(frozen=True)
class Report:
    """All parts of a report on a model, and their source.

    Attributes:
        name: The name of the model.
        parts: The parts, in the order of the page. A part that the model does not support has a ``reason``.
        facts: What the model is: class, type, layers, heads, parameters.
        source: Versions, settings and the commands that make the same report.
    """

    name: str
    parts: Sequence[Part]
    facts: Mapping[str, Any]
    source: Mapping[str, Any]

    def __getitem__(self, key: str) -> Part:
        """Return the part of this key.

        Raises:
            KeyError: There is none.
        """
        for part in self.parts:
            if part.key == key:
                return part
        raise KeyError(f"a report has the parts {', '.join(part.key for part in self.parts)}, got {key!r}")

    def to_json(self) -> str:
        """Return the report as JSON: every number of the page."""
        return json.dumps(plain(asdict(self)), allow_nan=False, ensure_ascii=False)

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        source = self.source
        settings = {**source["settings"], "texts": source["texts"], **source["versions"], "seconds": source["seconds"]}
        facts = "".join(f"<li>{text(name)} <b>{text(value)}</b></li>" for name, value in self.facts.items())
        short = "".join(
            f'<li><a href="#{part.key}">{text(part.title)}</a> {text(part.found)}</li>'
            for part in self.parts
            if not part.reason
        )
        body = [
            f"<h1>{text(self.name)}</h1>",
            '<p class="soft">What its positions do: locality, symmetry and more, by layer and head.</p>',
            f'<ul class="facts">{facts}</ul>',
            f'<h2>In short</h2><ul class="short">{short}</ul>',
            *map(section, self.parts),
            '<section id="source"><h2>How was this made?</h2>'
            "<p>Words are drawn from the vocabulary with the seed below. Layers and heads are counted from 0.</p>"
            f"<pre>{text(source['command'])}</pre><p>In Python, before the line of each part:</p>"
            f"<pre>{text(chr(10).join(source['python']))}</pre>"
            f"{table(['what', 'value'], settings.items())}</section>",
        ]
        return page(f"{self.name}: positions", body)

    def save(self, path: str | Path) -> None:
        """Write the page, or with a name that ends in ``.json`` the numbers.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        Path(path).write_text(self.to_json() if str(path).endswith(".json") else self.to_html(), encoding="utf-8")

    def __repr__(self) -> str:
        missing = [part.key for part in self.parts if part.reason]
        without = f", without {', '.join(missing)}" if missing else ""
        return f"Report({self.name}: {len(self.parts) - len(missing)} parts{without})"
