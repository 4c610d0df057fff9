"""Print role swaps drawn at random, to be read one by one before a probe is trusted.

python examples/read_role_swaps.py                                  # the frames in examples/data
python examples/read_role_swaps.py constituents snli_1.0_dev.jsonl --seed 23
python examples/read_role_swaps.py dependencies de_pud-ud-test.conllu --seed 23
"""

import argparse
from pathlib import Path

from pelocality import probe_info, read_conllu, read_frames, read_snli, semantic_role_swap

READERS = {"frames": read_frames, "constituents": read_snli, "dependencies": read_conllu}
SMALL = {"frames": "frames.jsonl", "constituents": "nli_pairs.jsonl", "dependencies": "en_sentences.conllu"}

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("source", choices=READERS, nargs="?", default="frames", help="annotation that gives the roles")
parser.add_argument("path", type=Path, nargs="?", help="a corpus with that annotation; default: one in examples/data")
parser.add_argument("--side", default="hypothesis")
parser.add_argument("--agreement", default="reinflect")
parser.add_argument("--number", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

source, side = arguments.source, arguments.side
probe = semantic_role_swap(
    READERS[source](arguments.path or Path(__file__).with_name("data") / SMALL[source]),
    source=source,
    label_policy="contradiction",
    side=side,
    # a corpus of pairs repeats each premise with other hypotheses: one swap of a sentence is enough there
    spans="one" if source == "constituents" else "all",
    agreement=arguments.agreement,
)
drawn = dict.fromkeys((row[f"original_{side}"], row[side]) for row in probe.shuffle(seed=arguments.seed))
for number, (original, swapped) in enumerate(list(drawn)[: arguments.number], 1):
    print(f"{number}\n  {original}\n  {swapped}")
print(f"\n{len(probe)} swaps in all; skipped:")
for reason, count in probe_info(probe).skipped.items():
    print(f"{count:6} {reason}")
