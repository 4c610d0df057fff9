"""The text and the HTML that results show in a console and in a notebook."""

import html
from typing import Any

import pandas as pd

_LAYOUT: dict[str, Any] = {"index": False, "float_format": "{:.3f}".format}  # options of pandas


class DisplayMixin:
    """A result shown as a headline, a table and notes."""

    def _headline(self) -> str:
        """Return what was measured, in one line."""
        raise NotImplementedError

    def _table(self) -> pd.DataFrame | None:
        """Return the most important numbers, None for a headline alone."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for reading these numbers, one sentence each, shown below them; usually empty."""
        return ()

    def __repr__(self) -> str:
        table = self._table()
        body = [] if table is None else [table.to_string(**_LAYOUT)]
        return "\n".join([f"{type(self).__name__} of {self._headline()}", *body, *self.notes])

    def _repr_html_(self) -> str:
        # pandas escapes the cells; headline and notes hold a model's name, which may be a path
        headline, *notes = (f"<p>{html.escape(line)}</p>" for line in (self._headline(), *self.notes))
        table = self._table()
        body = [] if table is None else [table.to_html(border=0, **_LAYOUT)]
        return "\n".join([headline, *body, *notes])
