"""Rows from a generator to a memory-mapped dataset whose files are gone when the interpreter ends."""

from __future__ import annotations

import functools
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pelocality-")


def scratch_folder() -> Path:
    """Make a folder of its own for the files of one dataset.

    The cache of ``datasets`` finds results again by a hash of the generator and its arguments, which knows
    nothing of a file that has changed; and it is never emptied. Here nothing is found again, nothing is left.

    Returns:
        The folder, removed when the interpreter ends.
    """
    folder = Path(_scratch().name, uuid.uuid4().hex)
    folder.mkdir()
    return folder


def generate(
    generator: Callable[..., Iterator[dict[str, Any]]],
    features: datasets.Features,
    gen_kwargs: Mapping[str, Any],
    folder: Path,
    num_proc: int | None = None,
    progress: bool = False,
) -> datasets.Dataset:
    """Let ``datasets`` run a generator, and bring back its errors as they were and also an empty dataset.

    Args:
        generator: Yields rows.
        features: Columns of the rows.
        gen_kwargs: Its arguments; lists among them are split over the processes.
        folder: Where the files go, from ``scratch_folder()``.
        num_proc: How many processes run it.
        progress: Whether to show the progress bars of ``datasets``.

    Returns:
        The dataset, in the order of the lists.

    Raises:
        Exception: What the generator raised, in whatever process.
    """
    bars_were_off = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if progress else datasets.disable_progress_bars)()
    try:
        return datasets.Dataset.from_generator(
            functools.partial(_watched, generator, folder),
            features=features,
            cache_dir=str(folder),
            gen_kwargs=dict(gen_kwargs),
            num_proc=num_proc,
            split=datasets.Split.TEST,
            fingerprint=folder.name,  # given, so that nothing is hashed
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        for path in folder.glob("*.error"):
            raise pickle.loads(path.read_bytes()) from None
        if isinstance(error, ValueError) and not any(folder.glob("*.some")):
            # a split without rows is an error to datasets
            columns: dict[str, list[Any]] = {name: [] for name in features}
            return datasets.Dataset.from_dict(columns, features=features, split=datasets.Split.TEST)
        raise
    finally:
        (datasets.disable_progress_bars if bars_were_off else datasets.enable_progress_bars)()


def _watched(
    generator: Callable[..., Iterator[dict[str, Any]]], folder: Path, /, **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Leave word, for the process that started it all, of rows and of errors, whose cause a pool loses."""
    mark = uuid.uuid4().hex
    some = False
    try:
        for row in generator(**arguments):
            if not some:
                (folder / f"{mark}.some").touch()
                some = True
            yield row
    except Exception as error:
        (folder / f"{mark}.error").write_bytes(pickle.dumps(error))
        raise
