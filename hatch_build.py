"""The README as a package index shows it: links and pictures lead to the repository that pyproject.toml names."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    """Read by hatchling when it builds the library."""

    def update(self, metadata: dict) -> None:
        """Add the README, its relative links made absolute."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, metadata["urls"]["Repository"]),
        }


def absolute(text: str, repository: str) -> str:
    """Return Markdown whose links to files lead to a repository: pictures to the files, others to their pages."""
    picture = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/main/", picture)
