"""An atlas: a row of numbers for each model, as JSON that others can add to, as a table and as one page."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pelocality._checks import check_file, check_several
from pelocality.reports.contents import Chart, plain
from pelocality.reports.page import figures, notes, page, table, text
from pelocality.reports.result import Report
from pelocality.reports.run import report

SCHEMA = "pelocality-atlas/1"
FIELDS: dict[str, type] = {"schema": str, "name": str, "facts": dict, "positions": str, "numbers": dict}
FIELDS |= {"layers": list, "found": dict, "missing": dict, "source": dict}
"""The fields of a row, and what each of them is."""


@dataclass(frozen=True, repr=False)
class Atlas:
    """Models side by side.

    Attributes:
        rows: A row for each model, as `atlas_row` makes it.
    """

    rows: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, paths: Iterable[str | Path]) -> "Atlas":
        """Return the rows of JSON files.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: A file that is not a row of this schema.
        """
        return cls([_checked_row(json.loads(Path(path).read_text(encoding="utf-8")), path) for path in paths])

    @property
    def notes(self) -> tuple[str, ...]:
        """Why numbers of these rows cannot be compared, one sentence each; usually empty."""
        notes = []
        for what in ("length", "words", "texts"):
            settings = {json.dumps(row["source"]["settings"].get(what, row["source"].get(what))) for row in self.rows}
            if len(settings) > 1:
                notes.append(f"models were measured with different {what} ({', '.join(sorted(settings))})")
        if len({row["facts"].get("causal") for row in self.rows}) > 1:
            notes.append("some models are causal: locality is then of the past alone, compare adjusted locality")
        return tuple(notes)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row per model: what it is, and the mean over layers of each number."""
        facts = ("type", "layers", "heads", "parameters", "causal")
        classes = {name: 0 for row in self.rows for name in row["numbers"] if name.startswith("heads:")}
        return pd.DataFrame(
            [
                {"model": row["name"], "positions": row["positions"]}
                | {name: row["facts"].get(name) for name in facts}
                | (classes if "heads: other" in row["numbers"] else {})  # a class without heads has no field
                | row["numbers"]
                for row in self.rows
            ]
        )

    def to_html(self) -> str:
        """Return the atlas as one HTML page that loads nothing.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        frame = self.to_frame().set_index("model").T.reset_index(names="").astype(object)
        by_layer = pd.DataFrame([{"model": row["name"]} | layer for row in self.rows for layer in row["layers"]])
        found = ""
        for row in self.rows:
            sentences = "".join(f"<li>{text(sentence)}</li>" for sentence in row["found"].values())
            found += f"<h3>{text(row['name'])}</h3><ul class=short>{sentences}</ul>"
        return page(
            "Models side by side",
            "atlas.html",
            notes=notes(self.notes),
            means=table(frame.columns, plain(frame.to_numpy().tolist()), "wide tall"),
            figures=figures(self.charts()),
            by_layer=table(by_layer.columns, plain(by_layer.astype(object).to_numpy().tolist())),
            found=found,
            commands=text("\n".join(f"{row['source']['command']}  # {row['name']}" for row in self.rows)),
        )

    def save(self, path: str | Path) -> None:
        """Write the page, or to a folder the rows as JSON, one file per model.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        if not Path(path).is_dir():
            Path(path).write_text(self.to_html(), encoding="utf-8")
            return
        for row in self.rows:
            name = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in row["name"])
            text = json.dumps(row, indent=1, ensure_ascii=False, allow_nan=False)
            (Path(path) / f"{name}.json").write_text(text + "\n", encoding="utf-8")

    def charts(self) -> list[Chart]:
        """Return a figure for each number that two models or more have by layer; depth is from 0 to 1."""
        names = dict.fromkeys(name for row in self.rows for layer in row["layers"] for name in layer)
        charts = []
        for name in names:
            having = [row for row in self.rows if any(layer.get(name) is not None for layer in row["layers"])]
            if len(having) < 2 or name == "layer" or name.startswith("heads:"):
                continue
            depths = [[place / max(len(row["layers"]) - 1, 1) for place in range(len(row["layers"]))] for row in having]
            values = [[layer.get(name) for layer in row["layers"]] for row in having]
            models = [row["name"] for row in having]
            charts.append(Chart("lines", name, "depth (share of layers)", "", depths, values, models))
        return charts

    def __repr__(self) -> str:
        return f"Atlas({', '.join(row['name'] for row in self.rows)})"


def atlas_row(report: Report) -> dict[str, Any]:
    """Return the row of a model in an atlas: plain values of the schema "pelocality-atlas/1".

    The documentation has the meaning of each field.

    Args:
        report: A report of the model.

    Examples:
        >>> from pelocality.reports import report
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2))
        >>> row = atlas_row(report(model, length=12, words=2, progress=False))
        >>> row["schema"], row["positions"], len(row["layers"])
        ('pelocality-atlas/1', 'learned', 2)
    """
    columns = {name: values for part in report.parts for name, values in part.by_layer.items()}
    layers: list[dict[str, Any]] = []
    means = {}
    for name, values in columns.items():
        layers += ({"layer": layer} for layer in range(len(layers), len(values)))
        for layer, value in zip(layers, values, strict=False):
            layer[name] = value
        if numbers := [value for value in values if value is not None]:
            means[name] = sum(numbers) if name.startswith("heads:") else sum(numbers) / len(numbers)
    audited = [part.table for part in report.parts if part.key == "positions" and not part.reason]
    measured = [row[table["columns"].index("positions measured")] for table in audited for row in table["rows"]]
    return plain(
        {
            "schema": SCHEMA,
            "name": report.name,
            "facts": report.facts,
            "positions": "; ".join(dict.fromkeys(measured)),
            "numbers": means,
            "layers": layers,
            "found": {part.key: part.found for part in report.parts if not part.reason},
            "missing": {part.key: part.reason for part in report.parts if part.reason},
            "source": report.source,
        }
    )


def compare_models(
    models: Iterable[Any], path: str | Path | None = None, *, progress: bool = True, **options: Any
) -> Atlas:
    """Compare models, with a row of numbers for each.

    Args:
        models: A list. Each entry is a model, a name or a folder, as for `report`; a pair of a model and its tokenizer;
            or the ``.json`` file of a row that was made before.
        path: Where to write: a folder for a JSON file per model, otherwise the page.
        progress: Show a progress bar for each model.
        options: Arguments of `report`, the same for all models.

    Returns:
        An `Atlas`.

    Raises:
        TypeError: As `report`.
        ValueError: A file that is not a row, or as `report`.
        OSError: As `report`.

    Examples:
        >>> from transformers import BertConfig, BertModel, GPT2Config, GPT2Model
        >>> size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        >>> bert = BertModel(BertConfig(vocab_size=99, **size))
        >>> gpt2 = GPT2Model(GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2))
        >>> atlas = compare_models([bert, gpt2], length=12, words=2, progress=False)
        >>> atlas.to_frame()[["model", "positions", "causal"]].values.tolist()
        [['BertModel', 'learned', False], ['GPT2Model', 'learned', True]]
    """
    rows: list[dict[str, Any]] = []
    check_several("models", models)
    if path is not None and not Path(path).is_dir():
        check_file("path", path, ".html")
    for entry in models:
        if isinstance(entry, str | Path) and Path(entry).suffix.lower() == ".json":
            rows += Atlas.read([entry]).rows
        else:
            pair = entry if isinstance(entry, tuple) else (entry,)
            rows.append(atlas_row(report(*pair, progress=progress, **options)))
    atlas = Atlas(rows)
    if path is not None:
        atlas.save(path)
    return atlas


def _checked_row(row: Any, path: str | Path) -> dict[str, Any]:
    """Return a row, after refusing one of another schema."""
    fields: dict[str, Any] = row if isinstance(row, dict) else {}
    wrong = [name for name, types in FIELDS.items() if not isinstance(fields.get(name), types)]
    if wrong or row["schema"] != SCHEMA:
        advice = f"no report; compare --json writes one; wrong: {', '.join(wrong) or 'schema'}"
        raise ValueError(f"{path} must hold a row of {SCHEMA!r}, and {advice}")
    return fields
