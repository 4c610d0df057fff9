"""Where does a model look over depth: influence beside attention, and beside attention that is rolled out?

    python -m experiments.beyond.depth --smoke                                   # MiniLM on the story in examples/data
    python -m experiments.beyond.depth --text wikitext2_valid.txt --output runs  # at full size
    python -m experiments.beyond.depth --results docs/results/depth_*.csv

Two studies. MiniLM's influence is measured with its cost, and with its error by the number of random directions. The
attention of SmolLM2 is rolled out over depth and compared with its influence; its package is that of `real_models.py`,
and `--models minilm` leaves it out. Small models while they train: `depth_in_training.py`.

Predictions, written before the first full run:

1. The rollout of SmolLM2 from its last query has the shape of a U, with most of it on the first token in the last
   layer. The influence of the first token is smaller, since a sink takes attention and gives no content.
2. In MiniLM the locality of influence falls from layer to layer (seen before, on random tokens).
"""

import argparse
import resource
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import logging

from experiments.beyond.real_models import paragraphs, untrained_copy
from experiments.runs import DATA, lines_of, markdown, packaged
from pelocality import influence, measure, past_locality, plots, rollout, text_average
from pelocality.statistics import Estimate, mean_over_runs

METRICS = ("locality", "symmetry", "relative_asymmetry")
RESIDUALS = (0.5, 0.9)


def minilm(arguments, model, tokenizer, lines):
    """Return the influence of MiniLM by layer, and its error by the number of directions; print its cost."""
    ids = paragraphs(lines, tokenizer, arguments.length, min(8, arguments.texts))
    begun, cpu = time.time(), time.process_time()
    result = influence(model, [{"input_ids": ids}], tokenizer=tokenizer, progress=False)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"MiniLM, {len(ids)} texts of {arguments.length} tokens, {result.source.directions} directions: ", end="")
    print(f"{time.process_time() - cpu:.0f} s of processor time, {time.time() - begun:.0f} s, {most:.0f} MiB at most")
    attention = text_average(model, [{"input_ids": ids}], tokenizer=tokenizer, progress=False).to_frame("layer")
    frame = result.to_frame("layer")[
        ["layer", "locality", "locality_low", "locality_high", "relative_asymmetry", "position_share"]
    ]
    frame["itself"] = result.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2)).numpy()
    frame["attention_locality"] = attention["locality"].to_numpy()

    one = [{"input_ids": ids[:1, : arguments.exact]}]
    width = model.config.hidden_size
    exact = influence(model, one, special_tokens=True, directions=width, progress=False)
    rows = []
    for directions in (1, 2, 4, 8):
        drawn = [
            influence(model, one, special_tokens=True, directions=directions, seed=seed, progress=False)
            for seed in range(arguments.draws)
        ]
        row = {"directions": directions}
        for name in METRICS:
            right = getattr(measure(exact), name)[:, 0]
            values = torch.stack([getattr(measure(each), name)[:, 0] for each in drawn])  # (draw, layer)
            row |= {
                f"{name}_bias": float((values.mean(0) - right).abs().max()),
                f"{name}_sd": float(values.std(0).max()),
            }
        apart = torch.stack([(each.attention - exact.attention).abs().sum(-1).mean((1, 2)) / 2 for each in drawn])
        rows.append(row | {"variation": float(apart.mean(0).max())})
    return pd.concat([frame, pd.DataFrame(rows)])


def smollm2(arguments, model, tokenizer, lines):
    """Return rollout beside influence by layer, and what the last query draws, for the figure."""
    ids = paragraphs(lines, tokenizer, arguments.length, arguments.texts)
    attention = text_average(model, [{"input_ids": ids}], special_tokens=True, progress=False)
    over_depth = {f"rollout, r = {residual:g}": rollout(attention, residual) for residual in RESIDUALS}
    found = influence(model, [{"input_ids": ids}], special_tokens=True, directions=1, progress=False)
    rows = []
    for layer in sorted({0, *range(4, len(found.layers), 5), len(found.layers) - 1}):
        row = {"layer": layer, "attention": float(attention.attention[layer, :, -1, 0].mean())}
        for name, result in {**over_depth, "influence": found}.items():
            last = result.attention[layer, 0, -1]
            parts = [last[0], *(part.sum() for part in last[1:-1].chunk(4)), last[-1]]
            row |= {f"{name} {place}": float(part) for place, part in enumerate(parts)}
        rows.append(row | {"past_locality": float(past_locality(found)[layer, 0])})
    last = len(found.layers) - 1
    shown = {f"{name}, layer {last}": each.attention[last] for name, each in over_depth.items()}
    early, first = next(iter(over_depth.items()))
    shown = {f"{early}, layer 4": first.attention[4], **shown, f"influence, layer {last}": found.attention[last]}
    return pd.DataFrame(rows), shown


def controls(arguments, model, tokenizer, lines):
    """Return what the last query of the last layer draws in each text, and by two controls: shuffled, and untrained."""
    ids = paragraphs(lines, tokenizer, arguments.length, arguments.texts)
    drawn = torch.Generator().manual_seed(0)
    shuffled = torch.stack([text[torch.randperm(len(text), generator=drawn)] for text in ids])
    untrained = untrained_copy(model)
    cases = {"as it is": (model, ids), "shuffled tokens": (model, shuffled), "random weights": (untrained, ids)}
    rows = []
    for name, (each, texts) in cases.items():
        for number, text in enumerate(texts):
            states = each.get_input_embeddings()(text[None]).detach().requires_grad_()
            last = each(inputs_embeds=states, use_cache=False).last_hidden_state[0, -1]
            (gradient,) = torch.autograd.grad(last @ torch.randn(last.shape, generator=drawn), states)
            squares = gradient[0].square().sum(-1)
            parts = [squares[0], *(part.sum() for part in squares[1:-1].chunk(4)), squares[-1]]
            shares = {f"part {place}": float(part / squares.sum()) for place, part in enumerate(parts)}
            rows.append({"case": name, "text": number} | shares)
    return pd.DataFrame(rows)


# ---- tables and figure


def of_minilm(frame):
    """Return the influence by layer, and its bias and standard deviation by the number of directions."""
    by_layer, by_directions = frame[frame["layer"].notna()], frame[frame["directions"].notna()]
    layers, errors = [], []
    for _, row in by_layer.iterrows():
        near = Estimate(row["locality"], row["locality_low"], row["locality_high"])
        line = {"layer": int(row["layer"]), "locality of influence": format(near, ".3f")}
        for name in ("relative_asymmetry", "position_share", "itself", "attention_locality"):
            shown = {"itself": "influence on itself", "attention_locality": "locality of attention"}.get(name, name)
            line[shown.replace("_", " ")] = f"{row[name]:.3f}"
        layers.append(line)
    for _, row in by_directions.iterrows():
        line = {"directions": int(row["directions"])}
        line |= {name.replace("_", " "): f"{row[f'{name}_bias']:.4f}, {row[f'{name}_sd']:.4f}" for name in METRICS}
        errors.append(line | {"total variation of rows": f"{row['variation']:.3f}"})
    return pd.DataFrame(layers), pd.DataFrame(errors)


def of_smollm2(frame):
    """Return what the last query draws by layer: from the first token, from four quarters between, from itself."""
    rows = []
    for _, row in frame.iterrows():
        line = {"layer": int(row["layer"]), "attention to the first": f"{row['attention']:.3f}"}
        for name in [f"rollout, r = {residual:g}" for residual in RESIDUALS] + ["influence"]:
            first, *quarters, itself = (f"{row[f'{name} {place}']:.3f}" for place in range(6))
            line[f"{name}: first; quarters; itself"] = f"{first}; {' '.join(quarters)}; {itself}"
        rows.append(line | {"past locality of influence": f"{row['past_locality']:.3f}"})
    return pd.DataFrame(rows)


def of_controls(frame):
    """Return the mean over texts of what the last query draws, with Student's interval."""
    names = ("first token", *(f"quarter {number}" for number in range(1, 5)), "itself")
    rows = []
    for case, texts in frame.groupby("case", sort=False):
        means = (format(mean_over_runs(texts[f"part {place}"]), ".3f") for place in range(6))
        rows.append({"influence on the last token": case} | dict(zip(names, means, strict=True)))
    return pd.DataFrame(rows)


def report(frame):
    """Print the tables of a model."""
    tables = of_minilm(frame) if "directions" in frame else ((of_smollm2 if "layer" in frame else of_controls)(frame),)
    print("".join(f"\n{markdown(table)}\n" for table in tables))


def figure(shown):
    """Plot what the last query of SmolLM2 draws from each position."""
    fig, ax = plt.subplots(figsize=(5.5, 4.4), layout="constrained")
    plots.key_profiles(shown, ax=ax, title="SmolLM2, the last query")
    ax.set(yscale="log", ylim=(1e-4, 1.5), ylabel="share of the last query")
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line; may be .gz")
    parser.add_argument("--models", nargs="*", choices=("minilm", "smollm2"), default=["minilm", "smollm2"])
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=24, help="texts of SmolLM2; MiniLM reads at most 8")
    parser.add_argument("--output", type=Path, default=Path("outputs/depth"), help="folder of tables and figure")
    parser.add_argument("--results", type=Path, nargs="+", help="print the tables of these numbers, measure nothing")
    parser.add_argument("--smoke", action="store_true", help="few short texts, MiniLM alone: to see it run")
    arguments = parser.parse_args()
    if arguments.results:
        for path in arguments.results:
            report(pd.read_csv(path))
        return
    arguments.exact, arguments.draws = 16, 30
    if arguments.smoke:
        sizes = {"length": 12, "texts": 2, "exact": 4, "draws": 2}
        vars(arguments).update({"models": ["minilm"]} | sizes)
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = [line.strip() for line in lines_of(arguments.text) if line.strip()]
    for name in arguments.models:
        measured = (minilm if name == "minilm" else smollm2)(arguments, *packaged(name), lines)
        if name == "smollm2":
            measured, shown = measured
            beside = controls(arguments, *packaged(name), lines).round(5)
            beside.to_csv(arguments.output / "depth_smollm2_controls.csv", index=False)
            report(beside)
            figure(shown).savefig(arguments.output / "depth.png", dpi=150)
        measured = measured.round(5)
        measured.to_csv(arguments.output / f"depth_{name}.csv", index=False)
        report(measured)


if __name__ == "__main__":
    main()
