"""What may change places: two arguments of roles, and what is known of their clause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleArgument:
    """The argument of a role: its words, and whether it is a subject (None where nobody knows)."""

    role: str
    start: int
    end: int
    subject: bool | None = None
    object: bool | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two arguments that may change places, and what is known of their clause.

    ``verb`` and ``finite`` are words, None where unknown or absent; ``checked`` says that the clause was
    found in a tree, so that an absent finite verb means a clause without one.
    """

    arguments: tuple[RoleArgument, RoleArgument]
    verb: int | None
    finite: int | None
    extent: tuple[int, int]
    voice: str
    lemma: str = ""
    shared: bool = False
    checked: bool = False
