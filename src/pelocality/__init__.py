"""Measure and change the locality and the symmetry of positional encodings, in matrices and models.

These are the packages. Each name is loaded on first use, so ``import pelocality`` alone loads neither torch nor
transformers.

- ``metrics``: numbers from a matrix of positional weights, from encodings too long for a matrix, and over batches.
- ``encodings``: the attenuated encoding, its inverse problem and baselines; attention layers that take any of them.
- ``models``: what the positions of a Hugging Face model do, and encodings attached to it.
- ``corpora``: sentences and trees, and the readers that make them from files.
- ``probes``: sentences and pairs whose words were moved by a known rule, and needles in a haystack, as datasets.
- ``evaluation``: from a model and a probe to numbers with intervals; which heads follow which dependencies.
- ``statistics``: the intervals and tests under evaluation.
- ``plots``: figures of matrices, models, encodings and results.
- ``reports``: all measurements of a model on one page, and comparisons of models.

The stub beside this file, ``__init__.pyi``, lists the names for Python and for type checkers.
"""

import difflib
from typing import Any

import lazy_loader

__version__ = "0.3.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Load a name on first use; an unknown one is an error that suggests the nearest."""
    if name not in __all__:
        near = difflib.get_close_matches(name, __all__, 1)
        raise AttributeError(f"pelocality has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return _load(name)
