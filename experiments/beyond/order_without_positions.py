r"""How much of a decoder's sense of order comes from its positions, and how much from its mask and from neighbours?

    python -m experiments.beyond.order_without_positions --smoke
    python -m experiments.beyond.order_without_positions ewt_train.jsonl ewt_dev.jsonl --pairs snli_dev_subset.jsonl \
        --text books.txt.gz --runs runs/decoders_in_training
    python -m experiments.beyond.order_without_positions --results docs/results/order_without_positions.csv

Minimal pairs, by log-likelihood and without any training: all role swaps that today's rules make (gold frames and the
rule over constituents, the verb inflected anew where its subject changed), and constituents of three words shuffled.
SmolLM2-135M as it is, with its angles scaled, with bands stopped, and without positions, so that the causal mask alone
is left (`attach(model, NoEncoding())`). The small decoders of `decoders_in_training.py`: GPT-2, the same with its
positions off, and one trained without any. Beside them bigrams of the books: what neighbours give away. Each decoder's
scores are kept in the output folder, and a run that was cut off goes on with the others.

Predictions, written before this run. Known were the 223 swaps of `rotary_dial.py` (89.7 % as it is, 86.1 % without
rotation) and a pilot on 320 (92.8 and 89.7 %):

1. SmolLM2 prefers 88 to 93 % of originals to swaps as it is, and 2 to 5 points fewer without positions; with this many
   pairs the interval of the difference excludes 0.
2. Bigrams prefer 65 to 70 %. So of the points above chance bigrams explain the most or as much as the mask, and
   positions at most a tenth.
3. Shuffles: at most 1.5 points between with and without positions, though the loss rises by more than 1.5 nats a word.
4. The slowest half of the bands off changes swaps and shuffles by less than a point; angles x .5 and x 2 change swaps
   by less than three points.
5. Positions matter more in longer sentences: the difference without them is at least twice as large in sentences of
   more than 20 words as in those of at most 10.
6. The small decoders prefer 60 to 72 % of originals to swaps, GPT-2 within three points of the decoder that was trained
   without positions. GPT-2 with its positions off falls below that one by more than three points: its weights expect
   positions.
"""

import argparse
import math
import random
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from transformers import AutoTokenizer, GPT2LMHeadModel

from experiments.beyond.decoder_minimal_pairs import bigrams, smollm2
from experiments.runs import DATA, claim, fingerprint, last_complete_checkpoint, markdown, percent, write_atomically
from pelocality import NoEncoding, RotaryEncoding, attach, load, read_frames, read_snli
from pelocality.evaluation import log_likelihood
from pelocality.probes import constituency_shuffling, minimal_pairs, semantic_role_swap
from pelocality.statistics import Estimate, mean_over_groups, proportion_over_groups

LARGE, ALONE = "SmolLM2", "SmolLM2, no positions"
SMALL = ("GPT-2", "GPT-2, no positions", "NoPE")
PROBES = {"roles": "role swaps", "shuffles": "shuffles"}
LENGTHS = {"at most 10": (0, 10), "11 to 20": (11, 20), "more than 20": (21, 1000)}


def build(arguments):
    """Return a row per pair: probe, corpus, whether the verb changed, cluster and words of its sentence, and both."""
    rows = {}

    def add(pairs, **columns):
        persons = pairs["reversible"] if "reversible" in pairs.column_names else [""] * len(pairs)
        for good, bad, reversible in zip(pairs["sentence_good"], pairs["sentence_bad"], persons, strict=True):
            # swaps found by frames are found by the rule too
            rows.setdefault((good, bad), columns | {"reversible": reversible})

    captions = {side.text: side for pair in read_snli(arguments.pairs) for side in (pair.premise, pair.hypothesis)}
    corpora = {path.stem: list(read_frames(path)) for path in arguments.sentences}
    for verb, agreement in (("as it was", "skip"), ("inflected anew", "reinflect")):
        options = {"spans": "all", "agreement": agreement, "progress": False}
        for corpus, source in product(corpora, ("frames", "constituents")):
            found = semantic_role_swap(corpora[corpus], source=source, **options)
            add(minimal_pairs(found), probe="roles", corpus=corpus, verb=verb)
        found = semantic_role_swap(list(captions.values()), source="constituents", **options)
        add(minimal_pairs(found), probe="roles", corpus=arguments.pairs.stem, verb=verb)
    corpus, sentences = list(corpora.items())[-1]
    sentences = [sentence for sentence in sentences if len(sentence.words) <= 25]
    random.Random(0).shuffle(sentences)
    shuffled = minimal_pairs(constituency_shuffling(sentences, 3, progress=False))
    add(shuffled.select(range(min(len(shuffled), arguments.shuffles))), probe="shuffles", corpus=corpus, verb="")
    table = pd.DataFrame([columns | {"good": good, "bad": bad} for (good, bad), columns in rows.items()])
    return table.assign(group=pd.factorize(table["good"])[0], words=table["good"].str.split().str.len())


def changes(model):
    """Return the blocks in which a rotary decoder runs, by name."""
    own = RotaryEncoding.from_model(model)
    encodings = {
        "no positions": NoEncoding(),
        "angles x 0.5": own.scaled(0.5),
        "angles x 2": own.scaled(2.0),
        "fastest quarter off": own.without(fastest=0.25),
        "slowest half off": own.without(slowest=0.5),
    }
    return {f"{LARGE}, {name}": (lambda each=each: attach(model, each)) for name, each in encodings.items()}


def read_small(runs, name, seed):
    """Return a small decoder of a run, its tokenizer, and the block to run it in."""
    folder = last_complete_checkpoint(runs / f"decoder-{name.split(',')[0]}-{seed}")
    model = load(folder) if name == "NoPE" else GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="[CLS]")
    return model.eval(), tokenizer, attach(model, NoEncoding()) if "no positions" in name else nullcontext()


def scores_of(model, tokenizer, texts):
    """Return the log-likelihood of each text by name; those that are too long for the model are left out."""
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    kept = [text for text in texts if len(tokenizer(text, add_special_tokens=False)["input_ids"]) < longest]
    return dict(zip(kept, log_likelihood(model, tokenizer, kept, batch_size=32, progress=False).tolist(), strict=True))


def score(pairs, arguments):
    """Return log-likelihoods of both sentences of each pair, two columns a decoder; complete files are read."""
    texts, found = sorted({*pairs["good"], *pairs["bad"]}, key=len), {}

    def keep(name, function, *inputs):
        file = arguments.output / f"{name}.csv"
        if not file.exists():
            known = function(*inputs)
            table = pd.DataFrame({side: pairs[side].map(known) for side in ("good", "bad")})
            write_atomically(file, table.to_csv(index=False))
            print(name, flush=True)
        found[name] = pd.read_csv(file)

    keep("bigrams", lambda: dict(zip(texts, bigrams(arguments.text)(texts), strict=True)))
    model, tokenizer = smollm2(arguments.smoke)
    blocks = {LARGE: nullcontext} | ({} if arguments.smoke else changes(model))
    for name, block in blocks.items():
        with block():
            keep(name, scores_of, model, tokenizer, texts)
    for name, seed in product(SMALL, arguments.seeds) if arguments.runs else ():
        model, tokenizer, block = read_small(arguments.runs, name, seed)
        with block:
            keep(f"{name}, seed {seed}", scores_of, model, tokenizer, texts)
    return pd.concat(found, axis=1)


def preferred(rows, decoder):
    """Return the share of originals that a decoder prefers, in percent, with its interval over sentences."""
    return percent(proportion_over_groups(rows[decoder] > 0, rows["group"]))


def difference(rows, decoder, other):
    """Return the points by which a decoder prefers more originals than another, paired, interval over sentences."""
    values = (rows[decoder] > 0).astype(int) - (rows[other] > 0).astype(int)
    return percent(mean_over_groups(values, rows["group"]))


def readable(table, probe, decoder):
    """Return the pairs of a probe that a decoder can read."""
    return table[(table["probe"] == probe) & table[decoder].notna()]


def by_decoder(table, losses):
    """Return a row per decoder: preferred originals of both probes, against the same decoder as it is, and loss."""
    lines = []
    for decoder in ("bigrams", *[name for name in losses.index if name.startswith(LARGE)]):
        line = {"decoder": decoder}
        for probe, name in PROBES.items():
            rows = readable(table, probe, decoder)
            line |= {name: len(rows), f"{name}: original, %": f"{preferred(rows, decoder):.1f}"}
            changed = decoder not in ("bigrams", LARGE)
            line[f"{name}: points"] = f"{difference(rows, decoder, LARGE):+.1f}" if changed else ""
        lines.append(line | {"nats a word": f"{losses[decoder]:.2f}"})
    return pd.DataFrame(lines)


def by_seed(table, losses):
    """Return a row per small decoder, with a value for each seed, beside bigrams on the same pairs."""
    seeds = sorted({name.split("seed ")[1] for name in losses.index if "seed" in name})
    lines = []
    for name in ("bigrams", *SMALL) if seeds else ():
        line = {"decoder": name}
        columns = [name] if name == "bigrams" else [f"{name}, seed {seed}" for seed in seeds]
        for probe, of_probe in PROBES.items():
            rows = readable(table, probe, f"GPT-2, seed {seeds[0]}")
            shares = ", ".join(f"{100 * (rows[column] > 0).mean():.1f}" for column in columns)
            line |= {of_probe: len(rows), f"{of_probe}: original, %": shares}
        lines.append(line | {"nats a word": ", ".join(f"{losses[column]:.2f}" for column in columns)})
    return pd.DataFrame(lines)


def explained(table):
    """Return the points above chance that bigrams, the mask and positions explain, each beyond the one before."""
    lines = []
    for probe in ("roles", "shuffles"):
        rows = readable(table, probe, LARGE)
        own = preferred(rows, "bigrams")
        lines.append(
            {
                "probe": probe,
                "pairs": len(rows),
                "bigrams over chance": f"{Estimate(own.value - 50, own.low - 50, own.high - 50):+.1f}",
                "mask over bigrams": f"{difference(rows, ALONE, 'bigrams'):+.1f}",
                "positions over mask": f"{difference(rows, LARGE, ALONE):+.1f}",
            }
        )
    return pd.DataFrame(lines)


def parts_of(table):
    """Return role swaps, all of them and by length, corpus, what the verb did and who are persons, by name."""
    rows = readable(table, "roles", LARGE)
    parts = {"all": rows}
    parts |= {f"{name} words": rows[rows["words"].between(*ends)] for name, ends in LENGTHS.items()}
    parts |= {
        value if column == "corpus" else f"{column.replace('reversible', 'persons:')} {value}": part
        for column in ("corpus", "verb", "reversible")
        for value, part in rows.groupby(column, sort=False)
    }
    return {name: part for name, part in parts.items() if len(part)}


def by_part(table):
    """Return how many originals bigrams, the mask and the decoder prefer in each part, and what positions add."""
    lines = []
    for name, part in parts_of(table).items():
        shares = {decoder: f"{preferred(part, decoder):.1f}" for decoder in ("bigrams", ALONE, LARGE)}
        points = f"{difference(part, LARGE, ALONE):+.1f}"
        lines.append({"role swaps": name, "pairs": len(part)} | shares | {"positions, points": points})
    return pd.DataFrame(lines)


def figure(table):
    """Plot the share of preferred originals of each part: bigrams, the mask alone, and the decoder as it is."""
    parts = parts_of(table)
    fig, ax = plt.subplots(figsize=(7.4, 4.4), layout="constrained")
    marks = {"bigrams": ("s", "0.6"), ALONE: ("^", "tab:orange"), LARGE: ("o", "black")}
    for shift, (decoder, (marker, color)) in zip((0.2, 0, -0.2), marks.items(), strict=True):
        found = [preferred(part, decoder) for part in parts.values()]
        values = [each.value for each in found]
        ends = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
        places = [shift - number for number in range(len(parts))]
        ax.errorbar(values, places, xerr=ends, fmt=marker, color=color, capsize=2, label=decoder)
    ax.set_yticks([-number for number in range(len(parts))], [f"{name} ({len(part)})" for name, part in parts.items()])
    ax.axvline(50, color="0.6", linestyle=":", linewidth=1)
    ax.set(xlabel="original preferred to its role swap, % (chance: 50)", xlim=(36, 100))
    fig.legend(loc="outside upper center", ncols=3, frameon=False)
    return fig


def show(table, losses):
    """Print all tables."""
    found = [by_decoder(table, losses), by_seed(table, losses)]
    found += [explained(table), by_part(table)] if ALONE in table else []
    print("\n\n".join(markdown(each) for each in found if len(each)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = DATA / "frames.jsonl"
    parser.add_argument("sentences", type=Path, nargs="*", default=[default], help="JSON lines with frames and trees")
    parser.add_argument("--pairs", type=Path, default=DATA / "nli_pairs.jsonl", help="SNLI JSON lines with parses")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="running text for the bigrams; may be .gz")
    parser.add_argument("--runs", type=Path, help="output folder of decoders_in_training.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the small decoders")
    parser.add_argument("--shuffles", type=int, default=400, help="most shuffled sentences, of the last file")
    parser.add_argument("--output", type=Path, default=Path("outputs/order_without_positions"), help="folder of scores")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, to see it run")
    parser.add_argument("--results", type=Path, help="print the tables of these scores again, and run nothing")
    arguments = parser.parse_args()
    if arguments.results:
        table, losses = (pd.read_csv(path) for path in (arguments.results, loss_file(arguments.results)))
        return show(table, losses.set_index("decoder")["nats a word"])
    files = [*arguments.sentences, arguments.pairs, arguments.text]
    settings = {"files": [fingerprint(file.read_bytes()) for file in files], "shuffles": arguments.shuffles}
    arguments.output.mkdir(parents=True, exist_ok=True)
    claim(arguments.output, settings | {"smoke": arguments.smoke})
    pairs = build(arguments)
    scores = score(pairs, arguments)
    of_sentence = pairs[["group", "words"]].drop_duplicates("group")
    losses = {
        name: -(scores[name, "good"].loc[of_sentence.index] / of_sentence["words"]).mean()
        for name in scores.columns.levels[0]
    }
    differences = {name: (scores[name, "good"] - scores[name, "bad"]).round(3) for name in losses}
    table = pairs.drop(columns=["good", "bad"]).assign(**differences)
    losses = pd.Series(losses).rename("nats a word").rename_axis("decoder").round(4)
    file = arguments.output / "order_without_positions.csv"
    table.to_csv(file, index=False)
    losses.to_csv(loss_file(file))
    if ALONE in table:
        plt.switch_backend("agg")
        figure(table).savefig(arguments.output / "order_without_positions.png", dpi=150)
    show(table, losses)


def loss_file(file):
    """Return the file of losses beside one of differences."""
    return file.with_name(f"{file.stem}_loss.csv")


if __name__ == "__main__":
    main()
