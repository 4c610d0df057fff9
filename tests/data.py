"""Where corpora for tests lie: our own small one, always there, and the real ones, which most machines lack."""

import os
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "data"
DATA = Path(os.environ.get("PELOCALITY_DATA", Path(__file__).parents[2] / "shared" / "data"))
NEEDS_DATA = pytest.mark.skipif(not DATA.is_dir(), reason=f"numbers of real data, none at {DATA}; set PELOCALITY_DATA")

_REAL = {
    "nli_pairs.jsonl": ["snli_parsed/snli_dev_subset.jsonl"],
    "frames.jsonl": ["ewt_srl_trees/ewt_dev.jsonl"],
    ".conllu": [f"ud_pud/{language}_pud-slim.conllu" for language in ("en", "de", "tr", "zh", "fi")],
}


def corpora(kind):
    """Paths of corpora of a kind for `parametrize`: our own, and the real ones where they are there.

    The kind is "nli_pairs.jsonl", "frames.jsonl" or ".conllu".
    """
    paths = [*sorted(EXAMPLES.glob(f"*{kind}")), *(DATA / path for path in _REAL[kind])]
    return [pytest.param(path, id=f"{path.parent.name}/{path.name}") for path in paths if path.exists()]
