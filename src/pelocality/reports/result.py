"""A report of one model, as a page and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pelocality._checks import check_file
from pelocality.reports.contents import CHANCE, DISTANCE, MODEL, SHARE, Part, plain
from pelocality.reports.page import page, section, sentence, table, text


@dataclass(frozen=True)
class Report:
    """All parts of a report on a model, and their source.

    Attributes:
        name: The name of the model.
        parts: The parts, in the order of the page. A part that the model does not support has a ``reason``.
        facts: What the model is: class, type, layers, heads, parameters.
        source: Versions, settings and the commands that make the same report.
        missing: The reason why there is no twin of a name.
    """

    name: str
    parts: Sequence[Part]
    facts: Mapping[str, Any]
    source: Mapping[str, Any]
    missing: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Part:
        """Return the part of this key.

        Raises:
            KeyError: There is none.
        """
        return {part.key: part for part in self.parts}[key]

    @property
    def headline(self) -> str:
        """How far a token looks and what decides it, in a few words; empty without attention."""
        beside = {name: numbers for part in self.parts for name, numbers in part.beside.items()}
        if DISTANCE not in beside:
            return ""
        nearer = 1 - beside[DISTANCE][MODEL] / beside[DISTANCE][CHANCE]
        place = f", and place alone decides {max(beside[SHARE][MODEL], 0):.0%} of where" if SHARE in beside else ""
        far = f"{abs(nearer):.0%} {'nearer' if nearer > 0 else 'farther'} than" if abs(nearer) > 0.005 else "as far as"
        return f"A token looks {far} chance{place}"

    @property
    def summary(self) -> list[str]:
        """Three sentences for readers of another field, or fewer."""
        plain = {part.key: part.plain for part in self.parts if part.plain}
        return [plain[key] for key in ("heads", "share", "order", "sinks", "depth") if key in plain][:3]

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
        shown = [part for part in self.parts if not part.reason]
        short = "".join(f'<li><a href="#{p.key}">{text(p.title)}</a> {text(p.found)}</li>' for p in shown)
        reasons = {part.title: part.reason for part in self.parts if part.reason}
        reasons |= {f"Numbers {name}": reason for name, reason in self.missing.items()}
        missing = "".join(f"<li>{text(what)} {sentence(reason)}.</li>" for what, reason in reasons.items())
        missing = f'<section id="missing"><h2>What is missing, and why</h2><ul class="short">{missing}</ul></section>'
        return page(
            f"{self.name}: positions",
            "report.html",
            name=text(self.name),
            headline=text(self.headline),
            summary="".join(f"<p>{text(each)}</p>" for each in self.summary),
            seed=text(source["settings"]["seed"]),
            facts=facts,
            short=short,
            sections="\n".join(map(section, shown)) + (missing if reasons else ""),
            command=text(source["command"]),
            python=text("\n".join(source["python"])),
            settings=table(["what", "value"], settings.items()),
        )

    def save(self, path: str | Path) -> None:
        """Write the page, or with a name that ends in ``.json`` the numbers.

        Raises:
            ImportError: Matplotlib is not installed.
            ValueError: A name that ends neither in ``.html`` nor in ``.json``.
            FileNotFoundError: The folder does not exist.
        """
        check_file("path", path, ".html", ".json")
        Path(path).write_text(
            self.to_json() if Path(path).suffix.lower() == ".json" else self.to_html(), encoding="utf-8"
        )

    def __repr__(self) -> str:
        missing = [part.key for part in self.parts if part.reason]
        without = f", without {', '.join(missing)}" if missing else ""
        return f"Report({self.name}: {len(self.parts) - len(missing)} parts{without})"
