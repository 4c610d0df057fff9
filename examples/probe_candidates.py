"""How many rows does each probe find in a treebank, and what does it skip?

    python examples/probe_candidates.py                         # the small treebanks in examples/data
    python examples/probe_candidates.py *_pud-ud-test.conllu

Constituents are full subtrees of the dependency trees; role swaps exchange subject and object of a verb.
"""

import argparse
import logging
from collections import Counter
from pathlib import Path

from pelocality import constituency_shuffling, probe_info, read_conllu, semantic_role_swap, window_shuffling

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
small = sorted(Path(__file__).with_name("data").glob("*.conllu"))
parser.add_argument("treebanks", type=Path, nargs="*", default=small, help="CoNLL-U, named by language: de_pud.conllu")
treebanks = parser.parse_args().treebanks
logging.disable(logging.INFO)

print("| language | sentences | Shuffle-3 to 6 | windows | swaps | most swaps skipped for |")
print("|---|---:|---:|---:|---:|---|")
for path in treebanks:
    language = path.name.split("_")[0]
    corpus = read_conllu(path, language)
    shuffled = constituency_shuffling(corpus, size=range(3, 7))
    windows = window_shuffling(corpus, size=range(3, 7))
    swapped = probe_info(semantic_role_swap(corpus, source="dependencies", label_policy="contradiction"))
    reasons = "; ".join(
        f"{reason} ({count})" for reason, count in Counter(swapped.skipped or swapped.dropped).most_common(3)
    )
    print(f"| {language} | {swapped.items} | {len(shuffled)} | {len(windows)} | {swapped.rows} | {reasons} |")
