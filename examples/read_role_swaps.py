"""Draw role swaps at random and print them, to be read one by one before they are trusted.

python examples/read_role_swaps.py                                  # the frames in examples/data
python examples/read_role_swaps.py constituents snli_1.0_dev.jsonl --seed 23
python examples/read_role_swaps.py dependencies de_pud-ud-test.conllu --seed 23
"""

import argparse
from pathlib import Path

from pelocality.corpora import read_conllu, read_frames, read_snli
from pelocality.probes import probe_info, semantic_role_swap

READERS = {"frames": read_frames, "constituents": read_snli, "dependencies": read_conllu}
OURS = {"frames": "frames.jsonl", "constituents": "nli_pairs.jsonl", "dependencies": "en_sentences.conllu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", choices=READERS, nargs="?", default="frames", help="what tells the roles")
    parser.add_argument("path", type=Path, nargs="?", help="a corpus with it; the one in examples/data if left out")
    parser.add_argument("--side", default="hypothesis")
    parser.add_argument("--agreement", default="reinflect")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    probe = semantic_role_swap(
        READERS[arguments.source](arguments.path or Path(__file__).with_name("data") / OURS[arguments.source]),
        source=arguments.source,
        label_policy="contradiction",
        side=arguments.side,
        # in a corpus of pairs each premise comes back with other hypotheses: one swap of a sentence is enough there
        spans="one" if arguments.source == "constituents" else "all",
        agreement=arguments.agreement,
    )
    drawn = dict.fromkeys(
        (row[f"original_{arguments.side}"], row[arguments.side]) for row in probe.shuffle(seed=arguments.seed)
    )
    for number, (original, swapped) in enumerate(list(drawn)[: arguments.number], 1):
        print(f"{number}\n  {original}\n  {swapped}")
    print(f"\n{len(probe)} swaps in all; skipped:")
    for reason, count in probe_info(probe).skipped.items():
        print(f"{count:6} {reason}")


if __name__ == "__main__":
    main()
