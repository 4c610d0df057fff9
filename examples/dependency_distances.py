"""How far are words from their syntactic heads, language by language?

    python examples/dependency_distances.py                     # the small treebanks in examples/data
    python examples/dependency_distances.py *_pud-ud-test.conllu --relations nsubj obj amod --no-punctuation

Prints mean, median and spread of the distance per language and relation; saves the full table and a figure.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from pelocality import dependency_distances, plots, read_conllu

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
small = sorted(Path(__file__).with_name("data").glob("*.conllu"))
parser.add_argument("treebanks", type=Path, nargs="*", default=small, help="CoNLL-U, named by language: de_pud.conllu")
parser.add_argument("--relations", nargs="*", default=["nsubj", "obj", "compound", "aux:pass"])
parser.add_argument("--no-punctuation", action="store_true", help="do not count punctuation as words")
parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for table and figure")
arguments = parser.parse_args()
plt.switch_backend("agg")

languages = {path: path.name.split("_")[0] for path in arguments.treebanks}
corpora = {language: read_conllu(path, language) for path, language in languages.items()}
found = dependency_distances(corpora, punctuation=not arguments.no_punctuation)
frame = found.to_frame()
print("| language | relation | n | mean | median | sd | quartiles | adjacent | head later |")
print("|---|---|---:|---:|---:|---:|---|---:|---:|")
for relation in ["all", *arguments.relations]:
    for row in frame[frame["relation"] == relation].itertuples(index=False):
        print(
            f"| {row.language} | {relation} | {row.n} | {row.mean:.2f} | {row.median:g} | {row.sd:.2f} "
            f"| {row.lower_quartile:g} to {row.upper_quartile:g} | {row.adjacent:.2f} | {row.head_later:.2f} |"
        )

arguments.output.mkdir(parents=True, exist_ok=True)
frame.to_csv(arguments.output / "dependency_distances.csv", index=False)
present = [relation for relation in ["all", *arguments.relations] if relation in set(frame["relation"])]
rows = -(-len(present) // 3)
fig, axes = plt.subplots(rows, 3, figsize=(11, 3 * rows), layout="constrained", squeeze=False)
for ax, relation in zip(axes.flat, present, strict=False):
    plots.distances(found, ax=ax, relation=relation, title=relation)
for ax in axes.flat[len(present) :]:
    ax.axis("off")
figure = arguments.output / "dependency_distances.png"
fig.savefig(figure, dpi=130)
print(f"\nfigure: {figure}")
