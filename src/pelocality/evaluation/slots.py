"""How much the place of a part in a text changes its score, whatever the part says: a document's parts, or options."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pelocality._checks import check_confidence
from pelocality._display import DisplayMixin
from pelocality.evaluation._callables import array_of, check_callable, name_of
from pelocality.statistics import mean_over_runs

Score = Callable[[list[list[str]]], Any]


@dataclass(frozen=True, eq=False, repr=False)
class SlotEffect(DisplayMixin):
    """How much higher a part scores in a slot than on average over the slots.

    Attributes:
        effects: (group, slot), float64, in the unit of the scores. Each row sums to 0.
        scorer: Name of what gave the scores.
    """

    effects: NDArray[np.float64]
    scorer: str

    def minus(self, other: "SlotEffect") -> "SlotEffect":
        """Return the paired differences to the effects of another model, or of the same without positions.

        Raises:
            ValueError: The other has other numbers of groups and slots.
        """
        if self.effects.shape != other.effects.shape:
            shapes = f"{self.effects.shape} here and {other.effects.shape} there"
            raise ValueError(f"other must be the effect in the same groups, got (groups, slots) of {shapes}")
        return SlotEffect(self.effects - other.effects, f"{self.scorer} minus {other.scorer}")

    def to_frame(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return a row for each slot: the mean effect over groups, with Student's t interval over groups."""
        check_confidence(confidence)
        means = [mean_over_runs(column, confidence).columns("effect", ends="") for column in self.effects.T]
        return pd.DataFrame(means).rename_axis("slot").reset_index()

    def _headline(self) -> str:
        groups, slots = self.effects.shape
        return f"{self.scorer}: {groups} groups in {slots} slots"

    def _table(self) -> pd.DataFrame:
        return self.to_frame()


def slot_effect(score: Score, groups: Iterable[Sequence[str]]) -> SlotEffect:
    r"""Return how much the place of a part changes its score, with every part once in every place.

    A group of $k$ parts is scored in its $k$ rotations, a Latin square. With $S_{rs}$ the score of the part in slot
    $s$ of rotation $r$, the effect of a slot in a group is
    $$e_s = \operatorname{mean}_r S_{rs} - \operatorname{mean}_{rt} S_{rt}.$$
    What a part says cancels, because each part stands once in each slot. The definition is introduced here; its design
    is that of counterbalanced experiments.

    Args:
        score: A function of the $k$ rotations of a group, lists of $k$ parts, that returns one number for each
            rotation and slot, (k, k): for example the similarity of the document with each of its parts
            (`similarity_to_parts`), or the probability of each option as the answer.
        groups: Groups of equally many parts, two or more. Parts of a group should have the same length, and nothing to
            do with each other. A rotation keeps neighbours, so pass many groups.

    Returns:
        A `SlotEffect`. Slot 0 is the first. A model without positions has effects of 0.

    Raises:
        TypeError: A score that is not a function of texts, or scores that are not numbers.
        ValueError: No groups, groups of different or too few parts, or scores of another shape or not finite.

    Examples:
        >>> first = lambda rows: [[float(slot == 0) for slot in range(3)] for _ in rows]  # the first, whatever it says
        >>> slot_effect(first, [["a", "b", "c"], ["d", "e", "f"]]).to_frame()["effect"].round(3).tolist()
        [0.667, -0.333, -0.333]
    """
    check_callable(score, "similarity_to_parts(embed), or write a function")
    groups = [] if isinstance(groups, str) else list(groups)
    sizes = {0 if isinstance(each, str) else len(each) for each in groups}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError("groups must be lists of equally many parts, two or more")
    size, effects = min(sizes), []
    for group in groups:
        rotations = [[*group[start:], *group[:start]] for start in range(size)]
        scores = array_of(score(rotations)).astype(float)
        if scores.shape != (size, size) or not np.isfinite(scores).all():
            raise ValueError(f"score must return {size} x {size} finite numbers, got those of shape {scores.shape}")
        effects.append(scores.mean(0) - scores.mean())
    return SlotEffect(np.stack(effects), name_of(score))


def similarity_to_parts(embed: Callable[[list[str]], Any], separator: str = " ") -> Score:
    """Return a score for `slot_effect`: the cosine between the embedding of a document and that of each part alone.

    Args:
        embed: A function from texts to their embeddings (text, dimension), such as ``encode`` of a sentence embedder.
        separator: What stands between the parts of a document.
    """

    def similarity(rows: list[list[str]]) -> NDArray[Any]:
        parts = list(dict.fromkeys(part for row in rows for part in row))
        documents, alone = (array_of(embed(texts)).astype(float) for texts in (list(map(separator.join, rows)), parts))
        lengths = np.linalg.norm(documents, axis=1)[:, None] * np.linalg.norm(alone, axis=1)
        cosines = documents @ alone.T / lengths
        return np.stack([cosines[place, [parts.index(part) for part in row]] for place, row in enumerate(rows)])

    return similarity
