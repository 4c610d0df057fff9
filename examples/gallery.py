"""Draw the figures of the gallery again, from the code on its page.

python examples/gallery.py --output docs/figures
"""

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=PAGE.parent / "figures", help="folder of the figures")
    output = parser.parse_args().output
    known: dict[str, Any] = {}
    for section in PAGE.read_text().split("\n## "):
        code, figure = re.search(r"```python\n(.*?)```", section, re.DOTALL), re.search(r"figures/(\S+)\)", section)
        if code:
            exec(code[1], known)
        if figure:
            known["fig"].savefig(output / figure[1], dpi=110)
    plt.close("all")


if __name__ == "__main__":
    main()
