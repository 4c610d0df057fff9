"""The commands ``pelocality report`` and ``pelocality compare``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pelocality import __version__
from pelocality._checks import check_file

_MODEL = "a hub name, a local folder or a .gguf file"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:  # before the models run
        check_file("--output", options.output, ".html", *([".json"] if options.command == "report" else []))
        if options.command == "report" and options.json:
            check_file("--json", options.json, ".json")
    except (OSError, ValueError) as error:
        parser.error(str(error))

    from transformers.utils import logging

    from pelocality.reports import compare_models, report

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        texts = options.text.read_text(encoding="utf-8").splitlines() if options.text else None
        names = ("length", "words", "seed", "twins", "device", "dtype", "revision")
        asked = {name: getattr(options, name) for name in names}
        settings: dict[str, Any] = {"texts": texts} | {name: each for name, each in asked.items() if each is not None}
        if options.command == "report":
            result = report(options.model, path=options.output, **settings)
            print("\n".join(filter(None, [result.headline, *result.summary])), end="\n\n")
            for part in result.parts:
                print(f"{part.title}\n  {part.found or 'Not for this model: ' + part.reason}")
            if options.json:
                result.save(options.json)
        else:
            atlas = compare_models(options.models, **settings)
            if options.json:
                options.json.mkdir(parents=True, exist_ok=True)
                atlas.save(options.json)
            atlas.save(options.output)
            print(atlas.to_frame().T.to_string(header=False))
            print("\n".join(atlas.notes))
    except (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"pelocality: {error}", file=sys.stderr)
        return 1
    print(f"\n{options.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pelocality", description="What the positions of a model do, on one page.")
    parser.add_argument("--version", action="version", version=f"pelocality {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--text", type=Path, metavar="FILE", help="paragraphs, one a line (default: a short story)")
    shared.add_argument("--length", type=int, help="tokens of texts and of repeated words (default: 64)")
    shared.add_argument("--words", type=int, default=32, help="how many words to repeat (default: %(default)s)")
    shared.add_argument("--seed", type=int, default=0, help="of words, directions and shuffles (default: 0)")
    shared.add_argument("--no-twins", dest="twins", action="store_false", help="numbers of the model and chance alone")
    shared.add_argument("--device", help="where the model runs, such as cuda (default: cpu)")
    shared.add_argument("--dtype", help="its precision (default: float32)")
    shared.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")
    page = "one model: one HTML page that opens offline, with numbers and code; a small model takes a minute"
    one = commands.add_parser("report", parents=[shared], help=page, description=page)
    one.add_argument("model", metavar="MODEL", help=_MODEL)
    one.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="page (default: %(default)s)")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as well; the name ends in .json")
    atlas = "several models side by side: one table, one page, and with --json a file per model to give again"
    several = commands.add_parser("compare", parents=[shared], help=atlas, description=atlas)
    several.add_argument("models", metavar="MODEL", nargs="+", help=f"{_MODEL}, or the .json of a model made before")
    several.add_argument("-o", "--output", type=Path, default=Path("atlas.html"), help="page (default: %(default)s)")
    several.add_argument("--json", type=Path, metavar="FOLDER", help="write a row of numbers per model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
