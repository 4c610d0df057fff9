"""Print which share of role swaps was read as wrong, round by round, and what stricter rules cost.

    python -m experiments.beyond.role_swap_rounds

Reads four files in docs/results:

- `role_swap_rounds.csv`: each text of a round, its sentences with two arguments, swaps made of them, and rows read;
- `role_swap_reading.tsv`: the document and the verdict of each row that was read, where documents are known;
- `role_swap_errors.csv`: each wrong swap, with its class;
- `role_swap_builders.csv`: rounds 8 and 9, the comparison of two builders.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from experiments.runs import markdown, percent
from pelocality.statistics import Estimate, proportion, proportion_over_groups

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ANNOTATED = ("gold frames", "gold trees")


def shown(share: Estimate) -> str:
    """Return a share in percent with its interval."""
    share = percent(share)
    return f"{share.value:.1f} % [{share.low:.1f}, {share.high:.1f}]"


def share_of(wrong: int, read: int) -> str:
    """Return how many of the rows that were read are wrong, with Wilson's interval; empty if nothing was read."""
    return f"{wrong} of {read}: {shown(proportion(wrong, read))}" if read else ""


def with_shares(rounds: pd.DataFrame, errors: pd.DataFrame, reading: pd.DataFrame) -> pd.DataFrame:
    """Return the rounds with the share of wrong rows, with and without doubts, over documents where these are known."""
    verdicts = dict(iter(reading.groupby(["round", "source"])))
    found = []
    for key in zip(rounds["round"], rounds["source"], strict=True):
        wrong = errors[(errors["round"] == key[0]) & (errors["source"] == key[1])]
        read = int(rounds.loc[(rounds["round"] == key[0]) & (rounds["source"] == key[1]), "read"].item())
        if key in verdicts:
            rows = verdicts[key]
            shares = [
                proportion_over_groups(each, rows["document"]) for each in (rows["wrong"] != "0", rows["wrong"] == "1")
            ]
            found.append([*shares, str(rows["document"].nunique())])
        else:
            found.append([proportion(len(wrong), read), proportion(int((wrong["doubt"] == 0).sum()), read), ""])
    return rounds.assign(
        **dict(zip(("with_doubts", "beyond_doubt", "documents"), zip(*found, strict=True), strict=True))
    )


def of_readers(reading: pd.DataFrame) -> pd.DataFrame:
    """Return the share of wrong rows to each reader of the same rows, and to most of them where there are several."""
    readers = {str(name): found.reset_index(drop=True) for name, found in reading.groupby("reader")}
    documents = readers["1"]["document"]
    wrong = {name: (found["wrong"] != "0", found["wrong"] == "1") for name, found in readers.items()}
    if len(wrong) > 1:
        wrong["most of them"] = tuple(sum(kinds) > len(readers) / 2 for kinds in zip(*wrong.values(), strict=True))
    table = []
    for name, kinds in wrong.items():
        shares = [f"{each.sum()}: {shown(proportion_over_groups(each, documents))}" for each in kinds]
        table.append((name, len(documents), documents.nunique(), *shares))
    return pd.DataFrame(table, columns=["reader", "rows", "documents", "wrong, with doubts", "beyond doubt"])


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rounds as a table: what was read, how much of it was wrong, and the yield."""
    columns = {
        "roles from": rows["roles"],
        "round": rows["round"],
        "text": rows["text"],
        "read": rows["read"],
        "documents": rows["documents"],
        "wrong, with doubts": rows["with_doubts"].map(shown),
        "wrong beyond doubt": rows["beyond_doubt"].map(shown),
        "swaps per 100": (100 * rows["swaps"] / rows["sentences"]).map("{:.1f}".format),
        "with the rules before": rows["swaps_per_100_before"].map("{:.1f}".format).replace("nan", ""),
    }
    return pd.DataFrame(columns).sort_values(["roles from", "round"], kind="stable")


def price(rows: pd.DataFrame, builders: pd.DataFrame) -> pd.DataFrame:
    """Return what the rules of each round make of what those of round 1 made, multiplied from text to text.

    Two rounds after one another are compared on the same text. Round 8 is another builder, and was read on EWT dev.
    """
    found = []
    for roles in ANNOTATED:
        left = 1.0
        for row in rows[rows["roles"] == roles].itertuples():
            left *= 1.0 if row.round == 1 else 100 * row.swaps / row.sentences / row.swaps_per_100_before
            found.append((roles, row.round, left, row.with_doubts))
        last = builders[(builders["text"] == "EWT dev") & (builders["roles"] == roles)].iloc[0]
        left *= last["rows_first"] / last["rows_before"]
        wrong = int(last["wrong_first"] + last["doubt_first"])
        found.append((roles, 8, left, proportion(wrong, int(last["read_first"]))))
        found.append((roles, 9, left * last["rows"] / last["rows_first"], None))
    return pd.DataFrame(found, columns=["roles", "round", "left", "wrong"])


def price_table(of_rules: pd.DataFrame) -> pd.DataFrame:
    """Return the price as a table, rounds as rows."""
    columns: dict[str, Any] = {"rules of round": of_rules["round"].unique()}
    for roles, found in of_rules.groupby("roles", sort=False):
        columns[f"{roles}: swaps left"] = [f"{100 * left:.0f} %" for left in found["left"]]
        columns[f"{roles}: wrong"] = [shown(wrong) if wrong else "not read" for wrong in found["wrong"]]
    return pd.DataFrame(columns)


def figure(of_rules: pd.DataFrame) -> plt.Figure:
    """Plot the share of wrong swaps over the share of swaps that is left, one panel for each source of roles."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True, sharey=True)
    goals = {"gold frames": 3, "gold trees": 10}
    for ax, (roles, found) in zip(axes, of_rules.dropna().groupby("roles", sort=False), strict=True):
        shares = [percent(wrong) for wrong in found["wrong"]]
        value, low, high = (np.array([getattr(share, name) for share in shares]) for name in ("value", "low", "high"))
        left = 100 * found["left"].to_numpy()
        ax.errorbar(left, value, (value - low, high - value), marker="o", capsize=2, linewidth=1, elinewidth=0.8)
        for x, y, name in zip(left, value, found["round"], strict=True):
            ax.annotate(str(name), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=9)
        ax.axhline(goals[roles], color="0.5", linewidth=0.8, linestyle="--")
        ax.set(title=f"roles from {roles}", xlabel="swaps left of those of round 1, %", ylim=(-1, 26))
        ax.grid(alpha=0.25, linewidth=0.6)
    axes[0].set_ylabel("wrong swaps with doubts, %")
    axes[0].invert_xaxis()
    return fig


def comparison_of_builders(builders: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the rows and the wrong rows of the builder before, of the first pattern and of today's, text by text."""
    fresh = builders["read_first"].eq(0) & builders["roles"].eq("spaCy")  # texts that were drawn from in round 9 alone
    treebanks = builders["roles"].isin(["gold frames", "gold trees", "gold dependencies"])

    def with_sums(texts: pd.Series) -> list[tuple[str, Any]]:
        rows = [(f"{row.text}, {row.roles}", row) for row in builders[texts].itertuples()]
        for name, kind in (("treebanks with trees", treebanks), ("plain text", builders["roles"] == "spaCy")):
            sums = builders[texts & kind].sum(numeric_only=True).to_frame().T
            rows += [(f"**{name}**", row) for row in sums.itertuples()]
        return rows

    rows = with_sums(~fresh)
    yield pd.DataFrame(
        {
            "text": [name for name, _ in rows],
            "rows before": [row.rows_before for _, row in rows],
            "rows": [row.rows_first for _, row in rows],
            "of before": [f"{100 * row.rows_first / row.rows_before:.0f} %" for _, row in rows],
            "wrong before": [share_of(row.wrong_before + row.doubt_before, row.read_before) for _, row in rows],
            "wrong": [share_of(row.wrong_first + row.doubt_first, row.read_first) for _, row in rows],
            "wrong after mending": [share_of(row.wrong_mended, row.read_mended) for _, row in rows],
        }
    )
    rows = with_sums(builders["text"].notna())
    yield pd.DataFrame(
        {
            "text": [name for name, _ in rows],
            "rows before": [row.rows_before for _, row in rows],
            "rows, round 8": [row.rows_first for _, row in rows],
            "rows": [row.rows for _, row in rows],
            "of before": [f"{100 * row.rows / row.rows_before:.0f} %" for _, row in rows],
            "blind, wrong before": [
                share_of(row.blind_wrong_before + row.blind_doubt_before, row.blind_read_before) for _, row in rows
            ],
            "blind, wrong": [share_of(row.blind_wrong + row.blind_doubt, row.blind_read) for _, row in rows],
        }
    )


def main() -> None:
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "role_swap_rounds.csv", help="the file of the rounds")
    parser.add_argument("--output", type=Path, default=Path("outputs/role_swaps"), help="folder for the figure")
    arguments = parser.parse_args()
    folder = arguments.results.parent
    reading = pd.read_csv(folder / "role_swap_reading.tsv", sep="\t", quoting=csv.QUOTE_NONE, dtype={"wrong": str})
    errors, builders = (pd.read_csv(folder / f"role_swap_{name}.csv") for name in ("errors", "builders"))

    rows = with_shares(pd.read_csv(arguments.results), errors, reading)
    annotated = rows["roles"].isin(ANNOTATED)
    of_rules = price(rows, builders)
    print(f"{markdown(table(rows[annotated]))}\n\n{markdown(table(rows[~annotated]))}\n")
    print(f"{markdown(price_table(of_rules))}\n")
    print("\n\n".join(markdown(each) for each in comparison_of_builders(builders)))
    print(f"\n{markdown(of_readers(reading[reading['round'] == 10]))}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure(of_rules).savefig(arguments.output / "role_swaps.png", dpi=150)


if __name__ == "__main__":
    main()
