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
        return {part.key: part for part in self.parts}[key]

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
        shown = (part for part in self.parts if not part.reason)
        short = "".join(f'<li><a href="#{p.key}">{text(p.title)}</a> {text(p.found)}</li>' for p in shown)
        return page(
            f"{self.name}: positions",
            "report.html",
            name=text(self.name),
            facts=facts,
            short=short,
            sections="\n".join(map(section, self.parts)),
            command=text(source["command"]),
            python=text("\n".join(source["python"])),
            settings=table(["what", "value"], settings.items()),
        )

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
