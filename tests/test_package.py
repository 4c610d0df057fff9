"""Importing is cheap, names are lazy, and imports point down."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pelocality

SOURCE = Path(pelocality.__file__).parent

# what each part may import of ours; a new part is entered here
BELOW = {
    "checks": set(),
    "metrics": set(),
    "tables": set(),
    "trees": set(),
    "architectures": set(),
    "scores": set(),
    "streaming": {"metrics", "tables"},
    "accumulate": {"metrics"},
    "plots": {"checks", "dependencies", "intervals", "metrics"},
    "intervals": set(),
    "attachment": {"_restore", "architectures", "encodings", "scores"},
    "reflection": {"architectures", "extract"},
    "dependencies": {"architectures", "checks", "extract", "intervals", "trees"},
    "evaluation": {"_restore", "architectures", "checks", "extract", "intervals"},
    "encodings": {"checks", "metrics", "scores", "streaming", "tables"},
    "layers": {"checks", "encodings", "scores"},
    "training": {"architectures", "checks", "encodings", "extract", "metrics"},
    "extract": {"_restore", "architectures", "checks", "metrics", "scores"},
    "corpora": {"trees"},
    "probes": {"checks", "trees"},
}


def imports_of(part):
    """The parts of ours that a part imports at any depth, type checking included."""
    path = SOURCE / part
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("pelocality.")}
    return found - {part, "__version__"}


def parts():
    files = (path for path in SOURCE.iterdir() if not path.name.startswith("_"))
    return sorted(path.stem for path in files if path.suffix == ".py" or (path / "__init__.py").exists())


@pytest.mark.parametrize("part", parts())
def test_imports_point_down(part):
    assert imports_of(part) <= BELOW[part]


def test_importing_loads_no_heavy_library():
    code = (
        "import sys, pelocality; "
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy', 'pandas') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_metrics_need_neither_transformers_nor_datasets():
    code = (
        "import sys; from pelocality import locality; "
        "print([name for name in ('transformers', 'datasets', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_promised_name_exists_and_is_listed():
    for name in pelocality.__all__:
        assert getattr(pelocality, name) is not None
        assert name in dir(pelocality)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_metric"):
        _ = pelocality.no_such_metric
