"""Importing is cheap, names are lazy, and imports point down."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import pelocality
from tests.scripts import ROOT

SOURCE = Path(pelocality.__file__).parent

UPWARD = {"encodings": {"models"}}  # RotaryEncoding.from_model runs the model that it is given

# what each package imports of the others, exactly; a new package or arrow is entered here
ARROWS = {
    "_batches": set(),
    "_checks": set(),
    "_configuration": set(),
    "_display": set(),
    "_distributed": set(),
    "_toeplitz": set(),
    "_transforms": set(),
    "positions": {"_checks", "_configuration"},
    "metrics": {"_checks", "_toeplitz", "_transforms", "positions"},
    "encodings": {"_checks", "_configuration", "_toeplitz", "_transforms", "metrics", "positions"},
    "corpora": {"_checks"},
    "probes": {"_checks", "corpora"},
    "statistics": {"_checks"},
    "models": {
        *("_batches", "_checks", "_display", "_distributed", "_toeplitz", "_transforms"),
        *("encodings", "metrics", "positions", "statistics"),
    },
    "evaluation": {"_batches", "_checks", "_display", "_distributed", "corpora", "models", "statistics"},
    "plots": {"_checks", "evaluation", "metrics", "positions", "statistics"},
    "reports": {"_checks", "corpora", "encodings", "evaluation", "metrics", "models", "plots", "probes"},
}


def imports_of(package):
    """The packages that a package imports at any depth, type checking and lazy imports included."""
    path = SOURCE / package
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
    return found - {package, "__version__"}


def packages():
    paths = (path for path in SOURCE.iterdir() if not path.name.startswith("__"))
    return sorted(path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists())


@pytest.mark.parametrize("package", packages())
def test_packages_import_what_they_are_meant_to(package):
    assert imports_of(package) - UPWARD.get(package, set()) == ARROWS[package]


def test_arrows_between_packages_point_down():
    order = list(ARROWS)
    assert all(order.index(below) < order.index(package) for package, targets in ARROWS.items() for below in targets)


def modules_imported(file):
    """The modules of the library that a file imports: in reports everywhere, elsewhere when it is imported."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if file.parent.name == "reports" else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pelocality."):
            for alias in node.names:
                path = SOURCE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = path.is_dir() or path.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def test_files_import_each_other_in_one_direction():
    files = {".".join(file.relative_to(SOURCE.parent).with_suffix("").parts): file for file in SOURCE.rglob("*.py")}
    graph = {name.removesuffix(".__init__"): set(modules_imported(file)) for name, file in files.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError
    assert order.index("pelocality.metrics.published") < order.index("pelocality.models.measuring.result")


def test_an_import_loads_no_library_that_it_does_not_need():
    code = "import sys"
    for statement, unneeded in (
        ("import pelocality", ("torch", "transformers", "datasets", "numpy", "pandas")),
        ("from pelocality.__main__ import _parser; _parser()", ("torch", "transformers", "pandas", "matplotlib")),
        ("from pelocality import locality", ("transformers", "datasets", "pandas", "matplotlib")),
        ("from pelocality import positional_attention", ("transformers.trainer", "datasets", "peft")),
    ):
        code += f"; {statement}; print([name for name in {unneeded} if name in sys.modules])"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.split() == ["[]"] * 4


@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("__init__.py*")), ids=lambda file: f"{file.parent.name}{file.suffix}"
)
def test_no_module_is_hidden_by_a_function_of_its_name(file):
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom) and node.module]
    below = [node for node in imports if node.module.split(".")[-1] != file.parent.name]  # the others import modules
    exported = {alias.name for node in below for alias in node.names}
    assert not exported & {path.stem for path in file.parent.glob("*.py")}


@pytest.mark.parametrize("package", [pelocality, pelocality.models])
def test_every_promised_name_exists_and_is_listed(package):
    assert package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_metric"):
        _ = pelocality.no_such_metric


def test_every_name_on_the_architecture_page_exists():
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py): ([\w.]+)`", page)
    assert len(named) > 20
    for file, name in named:
        parts = name.split(".")
        body = ast.parse((SOURCE / file).read_text()).body
        for part in parts:
            found = [node for node in body if getattr(node, "name", None) == part]
            assert found, f"{file} has no {name}"
            body = getattr(found[0], "body", [])


def test_the_lowest_versions_are_the_floors_of_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in project["optional-dependencies"] for each in project["optional-dependencies"][name]]
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    floors = dict(each.split(";")[0].split(">=") for each in project["dependencies"] + extras if ">=" in each)
    floors = {re.sub(r"\[.*", "", name).strip(): Version(floor) for name, floor in floors.items()}
    both = floors.keys() & lowest.keys()
    assert both >= {"transformers", "numpy", "scipy", "datasets", "pandas", "peft", "torchmetrics"}
    others = {name: lowest[name] for name in both if Version(lowest[name]).release[:2] != floors[name].release[:2]}
    assert not others


def test_a_mistyped_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match="pelocality has no 'localty'; did you mean 'locality'"):
        _ = pelocality.localty
    with pytest.raises(AttributeError, match=r"pelocality has no 'xyzzy'$"):
        _ = pelocality.xyzzy


def test_the_version_is_the_same_in_code_citation_and_changelog():
    for file, pattern in (("CITATION.cff", r"^version: (.+)$"), ("CHANGELOG.md", r"^## \[(.+?)\]")):
        found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert found[1] == pelocality.__version__
