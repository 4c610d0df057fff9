"""The small corpus that comes with the library."""

from pathlib import Path

from pelocality._checks import check_choice


def example_data(name: str) -> Path:
    """Return a file of the small corpus that was written for this library, to try readers and probes.

    The corpus is far too small to measure a model.

    Args:
        name: The name of the file, such as ``"nli_pairs.jsonl"``; the folder ``examples/data`` of the repository has a
            README that describes each of them.

    Returns:
        Where the file lies: in the installed package, or in the clone that an editable installation uses.

    Raises:
        ValueError: There is no file of this name.

    Examples:
        >>> from pelocality import read_snli
        >>> next(iter(read_snli(example_data("nli_pairs.jsonl")))).premise.text
        'A girl is pushing her little brother on a swing.'
    """
    package = Path(__file__).parents[1]
    folder = package / "example_data"
    if not folder.exists():
        folder = package.parents[1] / "examples" / "data"
    check_choice("name", name, sorted(path.name for path in folder.iterdir() if path.suffix != ".md"))
    return folder / name
