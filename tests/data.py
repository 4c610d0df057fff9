"""Where the real data lies, and the mark of tests that need it."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("PELOCALITY_DATA", Path(__file__).parents[2] / "shared" / "data"))
NEEDS_DATA = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}; set PELOCALITY_DATA")
