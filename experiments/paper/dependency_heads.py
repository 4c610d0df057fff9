"""Do positional heads find short relations, and contextual heads long ones, in encoders and in a decoder?

    python -m experiments.paper.dependency_heads                         # MiniLM on the small treebank in examples/data
    python -m experiments.paper.dependency_heads ewt_dev.jsonl en_pud-slim.conllu --model minilm mpnet smollm2
    python -m experiments.paper.dependency_heads --results docs/results/dependency_heads.csv

Reads sentences with dependencies (CoNLL-U, or PropBank frames with dependencies). For each relation the best head
among the positional half of all heads, the best among the contextual half, and the best fixed offset ("the word
before") are chosen in one half of the documents and scored in the other; intervals and tests are over documents. The
packages of the models are named in `real_models.py`. A model and treebank that is in the output folder is not run
again.

A decoder sees no later word: an arc is scored from the later of its words to the earlier alone, so that dependents
before their heads (`det`) count from head to dependent and those after their heads (`obj`) from dependent to head.
Encoders are scored on the same arcs too ("MiniLM, backwards"). SmolLM2 reads its first special token before each
sentence, so that attention that rests on the first token is left out, as that on [CLS] and [SEP] is.

Predictions, for MPNet and SmolLM2 beside MiniLM and for English PUD beside EWT dev, written before these runs. Known
were MiniLM on EWT dev (28 of 35 relations won by positional heads from dependent to head, none by contextual ones,
rank correlation -.64), and from a run that took the time, on 93 sentences of EWT dev, the best heads of the most
frequent relations in MPNet and SmolLM2, without their kinds.

1. Positional heads win more than half of the relations in both encoders, on both treebanks and in both directions; of
   the relations with a mean distance below 2 words, at least four in five.
2. The lead shrinks with distance: the rank correlation is below -.3 in all eight of these, and its interval excludes
   0.
3. Contextual heads win at most one relation of MiniLM on PUD, and one to five of MPNet and of SmolLM2 on each
   treebank; obj from dependent to head is not among those of MPNet.
4. In SmolLM2 positional heads win most relations too, but with half as many relations the fall with distance is shown
   in at most two of its four tables.
5. The best fixed offset is why: below 1.5 words the best positional head is within 5 points of it in most relations.
   The best contextual head is above the offset in fewer relations than below it.
6. Leads agree over treebanks (rank correlation over relations above .8 in each model and direction) better than over
   models.
7. With a quarter of the heads of each kind instead of half, positional heads win about as many relations (within
   five).
"""

import argparse
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import brentq
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer, logging

from experiments.runs import DATA, PACKAGES, claim, markdown, packaged, settings_of, write_atomically
from pelocality import text_average
from pelocality.corpora import read_conllu, read_frames
from pelocality.evaluation.dependencies import compare_head_types, dependency_accuracy
from pelocality.evaluation.dependencies.accuracy import half_of
from pelocality.evaluation.dependencies.result import DIRECTIONS, SCORED, by_sentence, frequent_items
from pelocality.statistics import Estimate, mean_over_groups, sign_flip

NAMES = {"minilm": "MiniLM", "mpnet": "MPNet", "smollm2": "SmolLM2", "ewt_dev": "EWT", "en_pud-slim": "PUD"}
OF_THE_PAPER = ("aux:pass", "compound", "obj")
KINDS = ("positional", "contextual")
TABLE = ["treebank", "model", "arcs", "direction"]  # what one table of relations is of
LONG = 4  # words: the mean distance from which a relation is called long
Z = stats.norm.ppf([0.975, 0.8])  # of an interval, and of a test that sees eight of ten


def load(name):
    """Return a model by its package, its hub name or its folder, and a tokenizer that reads words one by one."""
    if name not in PACKAGES:
        return AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    model, tokenizer = packaged(name)
    if name == "smollm2":
        first, backend = tokenizer.bos_token, tokenizer.backend_tokenizer
        backend.pre_tokenizer.add_prefix_space = True
        backend.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
        )
    return model.eval(), tokenizer


def batches(tokenizer, sentences, size=16):
    """Yield the sentences, tokenised as in `dependency_accuracy`, for `text_average`; the shortest first."""
    words = sorted((list(sentence.words) for sentence in sentences), key=len)
    for start in range(0, len(words), size):
        options = {"padding": True, "return_special_tokens_mask": True, "return_tensors": "pt"}
        yield tokenizer(words[start : start + size], is_split_into_words=True, **options)


def by_document(words):
    """Return the words of `DependencyAccuracy` with documents for sentences, each in one half."""
    documents = words["uid"].map(lambda uid: re.sub(r"(-\d{4}|\d{3})$", "", uid))  # EWT: x-0001; PUD: x001
    return words.assign(sentence=pd.factorize(documents)[0], half=[half_of((document,), 0) for document in documents])


def compared(change, documents, name):
    """Return the mean of differences with its interval and p-value, both over documents, as columns of a name."""
    p = sign_flip(by_sentence(change, documents)[:, None], two_sided=True)[0]
    return mean_over_groups(change, documents).columns(name) | {f"{name}_p": p}


def rows_of(accuracy, text, minimum, heads):
    """Return a row per relation and direction: best heads of both kinds and best offset, and how they compare."""
    kinds = compare_head_types(accuracy, text, heads=heads, minimum=minimum).table
    found = []
    for relation, direction, items in frequent_items(accuracy, minimum, first=()):
        row = kinds[(kinds["relation"] == relation) & (kinds["direction"] == direction)].iloc[0].drop(["p", "q"])
        scored, offset = items.half == SCORED, items.best_offset()
        document, by_offset = items.sentence[scored], items.offset_hits(offset)[scored]
        by_head = items.hits[scored].reshape(-1, *accuracy.attended.shape[1:])
        places = {kind: (accuracy.layers.index(row[f"{kind}_layer"]), row[f"{kind}_head"]) for kind in KINDS}
        hits = {kind: by_head[:, *place].astype(int) for kind, place in places.items()}
        lead = hits["positional"] - hits["contextual"]
        values, counts = np.unique(by_sentence(lead, document), return_counts=True)
        columns = dict(row) | {"offset": offset} | compared(lead, document, "difference")
        columns |= {f"{kind}_share": float(text.share[place]) for kind, place in places.items()}
        for kind in KINDS:
            columns |= compared(hits[kind] - by_offset, document, f"{kind}_gain")
        columns["sums"] = " ".join(f"{value}:{count}" for value, count in zip(values, counts, strict=True))
        found.append(columns)
    return pd.DataFrame(found)


def measured(name, treebank, minimum):
    """Return the rows of a model on a treebank: all arcs and backwards, with half and a quarter of the heads a kind."""
    read = read_conllu if treebank.suffix == ".conllu" else read_frames
    sentences = [sentence for sentence in read(treebank, "en") if sentence.dependencies]
    model, tokenizer = load(name)
    accuracy = dependency_accuracy(model, tokenizer, sentences)
    text = text_average(model, batches(tokenizer, sentences))
    accuracy = replace(accuracy, words=by_document(accuracy.words))
    print(f"{NAMES.get(name, name)}, {treebank.name}: {str(accuracy).splitlines()[0].partition(': ')[2]}", flush=True)
    tables = []
    for backwards, part in product((False, True), (2, 4)):
        if backwards or not accuracy.causal:
            of = replace(accuracy, causal=backwards)
            rows = rows_of(of, text, minimum, text.share.numel() // part)
            arcs = {"arcs": "backwards" if backwards else "all", "heads": f"1/{part}"}
            names = {"treebank": NAMES.get(treebank.stem, treebank.stem), "model": NAMES.get(name, name)}
            tables.append(pd.DataFrame([names | arcs] * len(rows)).join(rows))
    return pd.concat(tables)


def distribution(sizes, chance):
    """Return the probabilities of each sum, from the least on, of numbers that are positive with a chance."""
    found = np.ones(1)
    for size, repeats in zip(*np.unique(sizes, return_counts=True), strict=True):
        steps = np.zeros(2 * size * repeats + 1)
        steps[:: 2 * size] = stats.binom.pmf(np.arange(repeats + 1), repeats, chance)
        found = np.convolve(found, steps)
    return found


def detectable(sums, n, level, power=0.8):
    """Return the smallest difference that the test would show, if as many documents differ by as much as they do.

    The test is `sign_flip` with two sides: its critical sum is exact, and so is the power, with one chance for each
    document that differs to differ in favour of the better head.

    Args:
        sums: How often documents have which sum of differences, such as "-1:3 0:20 2:1".
        n: Words.
        level: The largest p-value that is shown.
        power: Probability that the difference is shown.

    Returns:
        The difference, in (0, 1]; NaN if no difference would be shown.
    """
    values, counts = np.array([each.split(":") for each in sums.split()], int).T
    sizes = np.repeat(abs(values), counts)[np.repeat(values, counts) != 0]
    tail = distribution(sizes, 0.5)[::-1].cumsum()[::-1]
    if not (2 * tail <= level).any():
        return np.nan
    critical = (2 * tail <= level).argmax()
    share = brentq(lambda share: distribution(sizes, (1 + share) / 2)[critical:].sum() - power, 0, 1)
    return float(share * sizes.sum() / n)


def rank_correlation(table, column):
    """Return Spearman's correlation of a column with the distance, its interval as by Bonett and Wright (2000)."""
    rho, free = stats.spearmanr(table["distance"], table[column]).statistic, len(table) - 3
    if free < 1:
        return Estimate(rho, np.nan, np.nan)
    half = Z[0] * np.sqrt((1 + rho**2 / 2) / free)
    return Estimate(rho, *np.tanh(np.arctanh(rho) + np.array([-half, half])))


def seen_correlation(n):
    """Return the smallest correlation of n pairs whose interval excludes 0 with a probability of 80 %."""
    least = Z.sum() / np.sqrt(max(n - 3, 1))
    return brentq(lambda rho: np.arctanh(rho) - least * np.sqrt(1 + rho**2 / 2), 0, 1 - 1e-9)


def prepared(rows):
    """Return the rows with q-values over all of them, of each share of heads, and what would have been seen."""
    parts = []
    for _, part in rows.groupby("heads"):
        part = part.assign(q=stats.false_discovery_control(part["difference_p"]))
        for kind in KINDS:
            part[f"{kind}_gain_q"] = stats.false_discovery_control(part[f"{kind}_gain_p"])
        level = 0.05 * ((part["q"] < 0.05).sum() + 1) / len(part)  # the largest p of one more difference that is shown
        neither = part[part["q"] >= 0.05]
        part["seen"] = neither.apply(lambda row, level=level: detectable(row["sums"], row["n"], level), axis=1)
        part["relative"] = part["difference"] / (part["positional"] + part["contextual"]).clip(1e-9)
        parts.append(part)
    rows = pd.concat(parts, ignore_index=True)
    rows["place"] = rows.groupby(TABLE[:3], sort=False).ngroup()
    return rows.sort_values(["place", "direction", "distance"], ignore_index=True)


def shown(table, name="difference", q="q"):
    """Return how many relations have a difference above 0 that is shown, and below 0."""
    return [int(((table[q] < 0.05) & (sign * table[name] > 0)).sum()) for sign in (1, -1)]


def groups(rows):
    """Yield each table of relations with the columns that name it."""
    for (treebank, model, arcs, direction), table in rows.groupby(TABLE, sort=False):
        backwards = arcs == "backwards" and "all" in set(rows.loc[rows["model"] == model, "arcs"])
        yield {"treebank": treebank, "model": model + ", backwards" * backwards, "direction": direction}, table


def summary(rows, heads):
    """Return how many relations each kind wins, by their distance, and how the lead goes with the distance."""
    found = []
    for names, table in groups(rows[rows["heads"] == heads]):
        row = {}
        for low, high, words in ((0, 2, "wins below 2 words"), (2, LONG, "2 to 4"), (LONG, np.inf, "4 and more")):
            part = table[table["distance"].between(low, high, inclusive="left")]
            row[words] = "{}:{} of {}".format(*shown(part), len(part))
        row |= {"neither": int((table["q"] >= 0.05).sum())}
        found.append(names | row | {"lead and distance": format(rank_correlation(table, "difference"), "+.2f")})
    return pd.DataFrame(found)


def could_be_seen(rows):
    """Return what would have been seen where neither kind wins, and which leads of contextual heads are excluded."""
    found = []
    for names, table in groups(rows[rows["heads"] == "1/2"]):
        seen = table[table["q"] >= 0.05]["seen"].fillna(np.inf)
        median = f"{seen.median():.2f} ({seen.min():.2f} to {seen.max():.2f})" if len(seen) else ""
        tables = (table, table[table["distance"] >= LONG])
        excluded = [f"{(part['difference_low'] > -0.1).sum()} of {len(part)}" for part in tables]
        found.append(
            names
            | {"neither": len(seen), "difference seen": median.replace("inf", "none")}
            | {"contextual lead of .10 excluded": excluded[0], "4 words and more": excluded[1]}
            | {"correlation seen": f"{seen_correlation(len(table)):.2f}"}
        )
    return pd.DataFrame(found)


def checks(rows):
    """Return how heads compare with the offset, and the lead in relation to what is found."""
    found = []
    for names, table in groups(rows[rows["heads"] == "1/2"]):
        row = {
            f"{kind} over offset": "{}, {}".format(*shown(table, f"{kind}_gain", f"{kind}_gain_q")) for kind in KINDS
        }
        near = table[table["distance"] < 1.5]
        within = f"{(near['positional_gain'].abs() < 0.05).sum()} of {len(near)}"
        relative = format(rank_correlation(table, "relative"), "+.2f")
        found.append(names | row | {"near, within .05": within, "relative lead and distance": relative})
    return pd.DataFrame(found)


def leads(rows):
    """Return the tables of half of the heads, with relations as index, by treebank, model and direction."""
    return {tuple(names.values()): table.set_index("relation") for names, table in groups(rows[rows["heads"] == "1/2"])}


def agreement(rows):
    """Return the rank correlations of leads over the relations that two treebanks or two models have in common."""
    found = {}
    groups = rows[rows["heads"] == "1/2"].groupby(TABLE, sort=False)
    tables = [(key, table.set_index("relation")) for key, table in groups]
    for (one, first), (other, second) in combinations(tables, 2):
        both = first.index.intersection(second.index)
        if one[2:] == other[2:] and (one[0] == other[0]) != (one[1] == other[1]) and len(both) > 3:
            names = [a if a == b else f"{a} and {b}" for a, b in zip(one, other, strict=True)]
            rho = stats.spearmanr(first.loc[both, "difference"], second.loc[both, "difference"]).statistic
            found.setdefault(tuple(names[:3]), {})[names[3]] = f"{rho:+.2f} (of {len(both)})"
    treebanks_first = sorted(found.items(), key=lambda item: (item[0][2], " and " in item[0][1]))
    return pd.DataFrame([dict(zip(TABLE, key, strict=False)) | cells for key, cells in treebanks_first])


def by_relation(rows, direction, arcs):
    """Return one row per relation, the shortest first, and a column per treebank and model: what is found, or not."""
    rows = rows[(rows["heads"] == "1/2") & (rows["direction"] == direction) & (rows["arcs"] == arcs)]
    mark = np.where(rows["q"] < 0.05, "\\*", rows["seen"].map(" ({:.2f})".format).replace(" (nan)", " (none)"))
    found = (rows[name].map("{:.2f}".format) for name in (*KINDS, "baseline"))
    rows = rows.assign(found=[", ".join(each) for each in zip(*found, strict=True)] + pd.Series(mark, rows.index))
    rows = rows.assign(column=rows["model"] + ", " + rows["treebank"])
    wide = rows.pivot(index="relation", columns="column", values="found")[rows["column"].unique()]
    distance = rows.groupby("relation")["distance"].mean().sort_values()
    wide.insert(0, "distance", distance.map("{:.1f}".format))
    return wide.loc[distance.index].fillna("").reset_index()


def of_the_paper(rows):
    """Return the lead of the best positional head with its interval for the relations that the paper names."""
    wide = {}
    for (treebank, model, direction), table in leads(rows).items():
        for relation in table.index.intersection(OF_THE_PAPER) if "backwards" not in model else ():
            row = table.loc[relation]
            lead = Estimate(row["difference"], row["difference_low"], row["difference_high"])
            mark = "\\*" if row["q"] < 0.05 else ""
            wide.setdefault((relation, direction), {})[f"{model}, {treebank}"] = f"{lead:+.2f}{mark}"
    table = pd.DataFrame.from_dict(wide, orient="index").sort_index().fillna("")
    return table.rename_axis(["relation", "direction"]).reset_index()


def figure(rows):
    """Draw the lead of positional heads against the distance of relations, a row per model, a column per treebank."""
    tables = {names: table for names, table in leads(rows).items() if "backwards" not in names[1]}
    treebanks, models = (list(dict.fromkeys(names[place] for names in tables)) for place in (0, 1))
    shape, size = (len(models), len(treebanks)), (1 + 3.8 * len(treebanks), 1.2 + 2.5 * len(models))
    fig, axes = plt.subplots(*shape, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    colours = dict(zip(OF_THE_PAPER, ("tab:orange", "tab:blue", "tab:red"), strict=True))
    marks = dict(zip(DIRECTIONS, "os", strict=True))
    for (treebank, model, direction), table in tables.items():
        ax = axes[models.index(model), treebanks.index(treebank)]
        for relation, part in table.groupby(table.index.where(table.index.isin(OF_THE_PAPER), "another")):
            ends = [part["difference"] - part["difference_low"], part["difference_high"] - part["difference"]]
            colour = colours.get(relation, "black" if direction == DIRECTIONS[0] else "0.6")
            face = colour if direction == DIRECTIONS[0] else "white"
            named = relation in OF_THE_PAPER
            style = {"color": colour, "markerfacecolor": face, "markersize": 6.5 if named else 4, "zorder": 2 + named}
            ax.errorbar(part["distance"], part["difference"], ends, fmt=marks[direction], elinewidth=0.7, **style)
        backwards = table["arcs"].iloc[0] == "backwards"
        ax.set_title(f"{model}, {treebank}" + " (arcs to earlier words)" * backwards, fontsize=10)
    for ax in axes.flat:
        ax.axhline(0, color="0.6", linewidth=0.8, zorder=1)
        ax.set_xscale("log")
        ax.minorticks_off()
        ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    fig.supxlabel("mean distance of the relation (words)", fontsize=10)
    fig.supylabel("accuracy: best positional minus best contextual head", fontsize=10)
    kinds = [(name, marks[name], "black", "black" if name == DIRECTIONS[0] else "white") for name in DIRECTIONS]
    kinds += [(name, "o", colour, colour) for name, colour in colours.items()]
    lines = [
        plt.Line2D([], [], linestyle="", label=name, marker=mark, color=colour, markerfacecolor=face)
        for name, mark, colour, face in kinds
    ]
    fig.legend(
        handles=lines, loc="outside upper center", ncols=len(lines), columnspacing=1, handletextpad=0.2, frameon=False
    )
    return fig


def show(rows, output):
    """Print the tables of all models and treebanks, and draw them."""
    rows = prepared(rows)
    half, quarter = (summary(rows, heads) for heads in ("1/2", "1/4"))
    backwards = half["model"].str.endswith("backwards")
    tables = {"who wins": half[~backwards], "the paper's relations": of_the_paper(rows)}
    tables |= {"what could have been seen": could_be_seen(rows), "a quarter of the heads of each kind": quarter}
    tables |= {"on the arcs that a decoder sees": half[backwards], "checks": checks(rows)}
    tables |= {"agreement": agreement(rows)}
    for arcs, direction in product(rows["arcs"].unique(), DIRECTIONS):
        tables[f"{direction}, {arcs} arcs"] = by_relation(rows, direction, arcs)
    for title, table in tables.items():
        if len(table):
            print(f"\n{title}\n\n{markdown(table)}")
    figure(rows).savefig(output / "dependency_heads.png", dpi=130)


def main() -> None:
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    treebank = DATA / "en_sentences.conllu"
    parser.add_argument("treebanks", type=Path, nargs="*", default=[treebank], help=".conllu, or .jsonl of frames")
    parser.add_argument("--model", nargs="+", default=["minilm"], help=f"{', '.join(PACKAGES)}, hub name or folder")
    parser.add_argument("--minimum", type=int, default=20, help="occurrences of a relation needed in each half")
    parser.add_argument("--output", type=Path, default=Path("outputs/dependency_heads"), help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="relations with 3 occurrences will do: to see it run")
    parser.add_argument("--results", type=Path, help="print the tables of these relations again, and run nothing")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.results:
        return show(pd.read_csv(arguments.results), arguments.output)
    if arguments.smoke:
        arguments.minimum = 3
    logging.set_verbosity_error()
    claim(arguments.output, settings_of(arguments))
    tables = []
    for treebank, name in product(arguments.treebanks, arguments.model):
        file = arguments.output / f"{Path(name).name}-{treebank.stem}.csv"
        if not file.exists():
            rows = measured(name, treebank, arguments.minimum)
            write_atomically(file, rows.to_csv(index=False, float_format="%.4g"))
        tables.append(pd.read_csv(file))
    rows = pd.concat(tables)
    rows.to_csv(arguments.output / "dependency_heads.csv", index=False)
    show(rows, arguments.output)


if __name__ == "__main__":
    main()
