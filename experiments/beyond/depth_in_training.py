"""Does locality through depth rise while a model trains, as the locality of each layer does, also without attention?

    python -m experiments.beyond.depth_in_training --smoke --output runs                 # the story in examples/data
    python -m experiments.beyond.depth_in_training --text wikitext2_valid.txt --output runs
    python -m experiments.beyond.depth_in_training --results docs/results/depth_in_training.csv

Small models that read bytes (3 layers of 64 dimensions) learn to predict the next byte: Llama with rotary positions and
without any, Mamba and RWKV; or masked bytes: BERT with learned positions and with an attenuated encoding in full
(w = .5, s = 1). While they train, two numbers of each layer are measured on held-out windows: past locality of
`influence` (how much of what reaches the layer from earlier bytes comes from near ones), and past locality of the mean
attention. A complete run is not repeated.

Predictions, written before these runs; one seed of Llama, Mamba and RWKV after 600 steps was known:

1. Past locality of influence rises in every kind and layer, in every seed; in BERT with the attenuated encoding by less
   than 0.1.
2. Where there is attention, its past locality rises too, and over the checkpoints of a run both numbers, as means over
   layers, have a rank correlation above 0.8 in every seed. Influence has not made half of its rise before attention
   has.
3. After training, influence is more local than attention in every layer: the residual stream brings each byte, and with
   it nearness, to the layers above.
4. Llama without positions ends less local than with rotary ones, by attention and by influence, in every seed; by
   influence it still rises by more than 0.1.
5. After training, the order of the causal kinds by past locality of influence in the last layer is RWKV, Mamba, Llama,
   Llama without positions, as in the one seed that was known.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from scipy.stats import spearmanr
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    logging,
)

from experiments.runs import DATA, claim, half_way, lines_of, markdown, of_seeds, settings_of, write_atomically
from pelocality import AttenuatedEncoding, NoEncoding, attach, influence, past_locality, text_average

MASK = 0  # a byte that no text has
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3}
ATTENTION = {"num_attention_heads": 4, "intermediate_size": 128}
LLAMA, NO_POSITIONS, MAMBA, RWKV = "Llama", "Llama, no positions", "Mamba", "RWKV"
BERT, ATTENUATED = "BERT", "BERT, attenuated"
KINDS = (LLAMA, NO_POSITIONS, MAMBA, RWKV, BERT, ATTENUATED)
STEPS = (0, 12, 25, 50, 100, 200, 400, 600)
MEASURED = {"influence": "past locality of influence", "attention": "past locality of attention"}


def make(kind: str) -> PreTrainedModel:
    """Return a model of a kind with random weights."""
    match kind:
        case "Mamba":
            return MambaForCausalLM(MambaConfig(**SIZES))
        case "RWKV":
            return RwkvForCausalLM(RwkvConfig(**SIZES, attention_hidden_size=64, intermediate_size=128))
        case "Llama" | "Llama, no positions":
            model = LlamaForCausalLM(LlamaConfig(**SIZES, **ATTENTION))
        case _:
            dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            model = BertForMaskedLM(BertConfig(**SIZES, **ATTENTION, **dropout, max_position_embeddings=64))
    if kind == NO_POSITIONS:
        attach(model, NoEncoding())
    elif kind == ATTENUATED:
        attach(model, AttenuatedEncoding(4, form="logits"))
    return model


def windows(text: str, length: int, number: int, seed: int) -> torch.Tensor:
    """Return a number of random windows of bytes (number, length)."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - length, (number,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + length] for start in starts])


def loss_of(model: PreTrainedModel, ids: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the loss of the next byte, or of 30 % of the bytes behind a mask, in nats."""
    if not isinstance(model, BertForMaskedLM):
        return torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[:, :-1].mT, ids[:, 1:])
    hidden = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3).to(ids.device)
    return torch.nn.functional.cross_entropy(model(ids.masked_fill(hidden, MASK)).logits[hidden], ids[hidden])


def run(arguments: argparse.Namespace, steps: tuple[int, ...], task: tuple[int, str]) -> pd.DataFrame:
    """Train a model; return one row for each layer and measured step."""
    seed, kind = task
    path = arguments.output / f"{kind.replace(', ', '_').replace(' ', '_')}-{seed}.csv"
    if path.exists():
        return pd.read_csv(path)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = "\n".join(line.strip() for line in lines_of(arguments.text) if line.strip())
    cut = len(text) * 9 // 10
    held_out = windows(text[cut:], arguments.length, arguments.texts, seed=0).to(arguments.device)
    torch.manual_seed(seed)
    model = make(kind).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps[-1])
    rows = []
    for step in range(steps[-1] + 1):
        if step in steps:
            rows += [{"model": kind, "seed": seed, "step": step} | row for row in measured(model, held_out)]
        if step < steps[-1]:
            model.train()
            ids = windows(text[:cut], arguments.length, 16, seed=1000 * seed + step).to(arguments.device)
            optimizer.zero_grad()
            loss_of(model, ids, seed=step).backward()
            optimizer.step()
            schedule.step()
    found = pd.DataFrame(rows)
    write_atomically(path, found.to_csv(index=False))
    print(f"{kind}, seed {seed}", flush=True)
    return found


def measured(model: PreTrainedModel, ids: torch.Tensor) -> list[dict[str, float]]:
    """Return a row for each layer: the loss, and past locality of influence and of attention, if there is any."""
    model.eval()
    with torch.no_grad():
        bits = float(loss_of(model, ids, seed=0)) / math.log(2)
    options = {"special_tokens": True, "progress": False}
    by_influence = influence(model, [{"input_ids": ids}], **options)
    own = by_influence.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2))
    rows = [
        {"layer": layer, "bits": bits, "influence": float(near), "influence_on_itself": float(own[layer])}
        for layer, near in enumerate(past_locality(by_influence)[:, 0])
    ]
    if not isinstance(model, (MambaForCausalLM, RwkvForCausalLM)):
        by_attention = past_locality(text_average(model, [{"input_ids": ids}], **options)).mean(1)
        rows = [row | {"attention": float(near)} for row, near in zip(rows, by_attention, strict=True)]
    return rows


# ---- tables and figure


def by_layer(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per kind and layer: both numbers before training, and after it with the value of each seed."""
    found = []
    first, last = rows["step"].min(), rows["step"].max()
    for (kind, layer), of in rows.groupby(["model", "layer"], sort=False):
        before, after = of[of["step"] == first], of[of["step"] == last]
        line = {"model": kind, "layer": layer, "bits per byte": f"{after['bits'].mean():.2f}"}
        for column, name in MEASURED.items():
            known = column in of and of[column].notna().all()
            line[f"{name}, untrained"] = f"{before[column].mean():.3f}" if known else ""
            line[f"{name}, trained"] = of_seeds(after[column]) if known else ""
        line["influence on itself, trained"] = f"{after['influence_on_itself'].mean():.3f}"
        found.append(line)
    return pd.DataFrame(found)


def together(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per kind: when half of each rise is made, and how both numbers rise together, seed by seed."""
    found = []
    for kind, of in rows.groupby("model", sort=False):
        seeds = [run for _, run in of.groupby("seed")]
        both = "attention" in of and of["attention"].notna().all()
        line = {"model": kind, "seeds": len(seeds)}
        for column in MEASURED:
            known = column == "influence" or both
            halves = [str(half_way(run, column)) for run in seeds] if known else []
            line[f"{column}: half of the rise at step"] = ", ".join(halves)
        means = [run.groupby("step")[list(MEASURED)].mean() for run in seeds] if both else []
        each = [
            f"{spearmanr(mean['influence'], mean['attention']).statistic:.2f}"
            if mean["attention"].nunique() > 1
            else "none"
            for mean in means
        ]
        line["rank correlation over steps"] = ", ".join(each)
        found.append(line)
    return pd.DataFrame(found)


def figure(rows: pd.DataFrame) -> plt.Figure:
    """Plot both numbers over the steps, as means over layers and seeds, with the range of the seeds."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for ax, (column, name) in zip(axes, MEASURED.items(), strict=True):
        styles = zip(("o-", "s--", "^-.", "D:", "v-", "P--"), [f"C{k}" for k in range(6)], strict=True)
        for (kind, of), (style, colour) in zip(rows.groupby("model", sort=False), styles, strict=False):
            if column not in of or of[column].isna().any():
                continue
            means = of.groupby(["step", "seed"])[column].mean().unstack()
            ax.plot(means.index, means.mean(axis=1), style, color=colour, markersize=4, label=kind)
            ax.fill_between(means.index, means.min(axis=1), means.max(axis=1), color=colour, alpha=0.15, lw=0)
        ax.set(xlabel="training step", title=name)
        ax.set_xscale("symlog", linthresh=12)
        steps = sorted(rows["step"].unique())
        ax.set_xticks(steps, ["" if step == 400 else str(step) for step in steps])  # 600 stands there
        ax.minorticks_off()
    axes[0].set_ylabel("mean over layers")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line; may be .gz")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--length", type=int, default=64, help="bytes of a window")
    parser.add_argument("--texts", type=int, default=24, help="held-out windows")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("outputs/depth_in_training"), help="runs, table and figure")
    parser.add_argument("--results", type=Path, help="print the tables of these numbers, draw the figure, run nothing")
    parser.add_argument("--smoke", action="store_true", help="one seed, few steps and windows: to see it run")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    steps = STEPS
    if arguments.smoke:
        vars(arguments).update({"seeds": arguments.seeds[:1], "length": 12, "texts": 2})
        steps = (0, 1)
    if arguments.results:
        rows = pd.read_csv(arguments.results)
    else:
        claim(arguments.output, settings_of(arguments))
        tasks = [(seed, kind) for seed in arguments.seeds for kind in KINDS]
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            each = map if arguments.workers == 1 else pool.map  # a process has to load torch first
            rows = pd.concat(each(partial(run, arguments, steps), tasks), ignore_index=True)
        rows["model"] = pd.Categorical(rows["model"], KINDS)
        rows = rows.sort_values(["model", "seed", "step", "layer"]).round(5)
        rows.to_csv(arguments.output / "depth_in_training.csv", index=False)
    print(f"{markdown(by_layer(rows))}\n\n{markdown(together(rows))}")
    figure(rows).savefig(arguments.output / "depth_in_training.png", dpi=150)


if __name__ == "__main__":
    main()
