"""What may change places: two fillers of roles, and what is known of their clause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Filler:
    """The filler of a role: its words, and whether it is a subject (None where nobody knows)."""

    role: str
    start: int
    end: int
    subject: bool | None = None
    object: bool | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two fillers that may change places, and what is known of their clause.

    ``verb`` and ``finite`` are words, None where unknown or absent; ``checked`` says that the clause was
    found in a tree, so that an absent finite verb means a clause without one.
    """

    fillers: tuple[Filler, Filler]
    verb: int | None
    finite: int | None
    extent: tuple[int, int]
    voice: str
    lemma: str = ""
    shared: bool = False
    checked: bool = False
