"""How local are models over depth: state space models, and decoders whose attention is rolled out?

    python experiments/depth.py --smoke                                   # tiny models on the story in examples/data
    python experiments/depth.py --text wikitext2_valid.txt --output runs  # at full size

Three studies. MiniLM's influence is measured with its cost, and with its error by the number of random directions.
Small models that read bytes (Llama with rotary positions, Mamba, RWKV; 3 layers of 64 dimensions) are trained on the
text, and their influence is measured before and after. The attention of SmolLM2 is rolled out over depth and compared
with its influence; its package is that of `real_models.py`, and `--models minilm` leaves it out.

Predictions, written before the first full run:

1. Before training Mamba and RWKV are more local than Llama, as their recurrences decay and uniform attention does not.
   Training makes all three more local.
2. The rollout of SmolLM2 from its last query has the shape of a U, with most of it on the first token in the last
   layer. The influence of the first token is smaller, since a sink takes attention and gives no content.
3. In MiniLM the locality of influence falls from layer to layer (seen before, on random tokens).
"""

import argparse
import resource
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from real_models import packaged, paragraphs
from runs import DATA, lines_of, markdown
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    logging,
)

from pelocality import influence, measure, past_locality, plots, rollout, text_average

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3}
KINDS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, intermediate_size=128)),
    "Mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES)),
    "RWKV": lambda: RwkvForCausalLM(RwkvConfig(**SIZES, attention_hidden_size=64, intermediate_size=128)),
}


def windows(text, length, number, seed):
    """Return a number of random windows of bytes (number, length)."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - length, (number,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + length] for start in starts])


def train(model, text, steps, length):
    """Train a model to predict the next byte; return the mean loss of the last tenth of the steps, in bits."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        ids = windows(text, length, 16, seed=step)
        loss = torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[:, :-1].mT, ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item() / 0.6931)
    return sum(losses[-max(1, steps // 10) :]) / max(1, steps // 10)


def small_models(arguments, text, held_out):
    """Return the table of the small models, and the influence in the last layer of each by name."""
    ids = windows(held_out, arguments.length, arguments.texts, seed=0)
    rows, found = [], {}
    for name, make in KINDS.items():
        torch.manual_seed(0)
        model = make()
        for state in ("untrained", "trained"):
            loss = train(model, text, arguments.steps, arguments.length) if state == "trained" else 8.0
            result = influence(model, [{"input_ids": ids}], special_tokens=True, progress=False)
            found[f"{name}, {state}"] = result.attention[-1]
            own = result.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2))
            for layer, row in result.to_frame("layer").iterrows():
                ends = f"{row['past_locality']:.3f} [{row['past_locality_low']:.3f}, {row['past_locality_high']:.3f}]"
                rows.append({"model": name, "state": state, "bits per byte": f"{loss:.2f}", "layer": layer})
                rows[-1] |= {"past locality of influence": ends, "influence on itself": f"{own[layer]:.3f}"}
    return pd.DataFrame(rows), found


def minilm(arguments, model, tokenizer, lines):
    """Print the influence of MiniLM by layer, its cost, and its error by the number of directions."""
    ids = paragraphs(lines, tokenizer, arguments.length, 8)
    begun, cpu = time.time(), time.process_time()
    result = influence(model, [{"input_ids": ids}], tokenizer=tokenizer, progress=False)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nMiniLM, {len(ids)} texts of {arguments.length} tokens, {result.source.directions} directions: ", end="")
    print(f"{time.process_time() - cpu:.0f} s of processor time, {time.time() - begun:.0f} s, {most:.0f} MiB at most\n")
    attention = text_average(model, [{"input_ids": ids}], tokenizer=tokenizer, progress=False).to_frame("layer")
    frame = result.to_frame("layer").set_index("layer")
    shown = frame[["locality", "locality_low", "locality_high", "relative_asymmetry", "position_share"]].round(3)
    shown["influence on itself"] = result.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2)).numpy().round(3)
    shown["locality of attention"] = attention["locality"].round(3).to_numpy()
    print(markdown(shown.reset_index()))

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
        for name in ("locality", "symmetry", "relative_asymmetry"):
            right = getattr(measure(exact), name)[:, 0]
            values = torch.stack([getattr(measure(each), name)[:, 0] for each in drawn])  # (draw, layer)
            bias = (values.mean(0) - right).abs().max()
            row[name.replace("_", " ")] = f"{bias:.4f}, {values.std(0).max():.4f}"
        apart = torch.stack([(each.attention - exact.attention).abs().sum(-1).mean((1, 2)) / 2 for each in drawn])
        row["total variation of rows"] = f"{apart.mean(0).max():.3f}"
        rows.append(row)
    print(f"\nbias and standard deviation over {arguments.draws} draws of the directions, the largest of all layers; ")
    print(f"one text of {arguments.exact} tokens, compared with all {width} directions\n")
    print(markdown(pd.DataFrame(rows)))


def smollm2(arguments, model, tokenizer, lines):
    """Print rollout beside influence by layer, and return what the last query draws, for the figure."""
    ids = paragraphs(lines, tokenizer, arguments.length, arguments.texts)
    attention = text_average(model, [{"input_ids": ids}], special_tokens=True, progress=False)
    over_depth = {f"rollout, r = {residual:g}": rollout(attention, residual) for residual in (0.5, 0.9)}
    found = influence(model, [{"input_ids": ids}], special_tokens=True, directions=1, progress=False)
    rows = []
    for layer in sorted({0, *range(4, len(found.layers), 5), len(found.layers) - 1}):
        row = {"layer": layer, "attention to the first": f"{attention.attention[layer, :, -1, 0].mean():.3f}"}
        for name, result in {**over_depth, "influence": found}.items():
            last = result.attention[layer, 0, -1]
            row |= {f"{name}: first": f"{last[0]:.3f}", f"{name}: itself": f"{last[-1]:.3f}"}
            row[f"{name}: between, by quarter"] = " ".join(f"{part.sum():.3f}" for part in last[1:-1].chunk(4))
        row["influence: past locality"] = f"{past_locality(found)[layer, 0]:.3f}"
        rows.append(row)
    print(f"\nSmolLM2, {len(ids)} texts of {arguments.length} tokens, what the last query draws from each position\n")
    print(markdown(pd.DataFrame(rows)))
    last = len(found.layers) - 1
    shown = {f"{name}, layer {last}": each.attention[last] for name, each in over_depth.items()}
    early, first = next(iter(over_depth.items()))
    return {f"{early}, layer 4": first.attention[4], **shown, f"influence, layer {last}": found.attention[last]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=DATA / "text.txt", help="one paragraph a line; may be .gz")
    parser.add_argument("--models", nargs="*", choices=("minilm", "smollm2"), default=["minilm", "smollm2"])
    parser.add_argument("--length", type=int, default=64, help="tokens or bytes of a text")
    parser.add_argument("--texts", type=int, default=24, help="texts of SmolLM2 and of the small models")
    parser.add_argument("--steps", type=int, default=600, help="training steps of the small models")
    parser.add_argument("--output", type=Path, default=Path("outputs/depth"), help="folder of the figure")
    parser.add_argument("--smoke", action="store_true", help="few steps and texts, MiniLM alone: to see it run")
    arguments = parser.parse_args()
    arguments.exact, arguments.draws = 16, 30
    if arguments.smoke:
        arguments.models = ["minilm"]
        arguments.length, arguments.texts, arguments.steps = 12, 2, 3
        arguments.exact, arguments.draws = 4, 2
    logging.set_verbosity_error()
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = [line.strip() for line in lines_of(arguments.text) if line.strip()]
    text = "\n".join(lines)
    cut = len(text) * 9 // 10
    if "minilm" in arguments.models:
        minilm(arguments, *packaged("minilm"), lines)
    figures = {name: plt.figure(figsize=(5.5, 4.4), layout="constrained") for name in ("state_space", "depth")}
    axes = [each.subplots() for each in figures.values()]
    if "smollm2" in arguments.models:
        shown = smollm2(arguments, *packaged("smollm2"), lines)
        plots.key_profiles(shown, ax=axes[1], title="SmolLM2, the last query")
        axes[1].set(yscale="log", ylim=(1e-4, 1.5), ylabel="share of the last query")
    table, by_name = small_models(arguments, text[:cut], text[cut:])
    print(f"\n{markdown(table)}")
    plots.profiles(by_name, ax=axes[0], reach=24, title="small models, last layer")
    axes[0].set(yscale="log", xlim=(-24.5, -0.5), ylim=(1e-5, 20), ylabel="mean influence")
    axes[0].set_xlabel("distance, key - query (bytes)")
    axes[0].legend(ncol=2, loc="upper left")
    for name, fig in figures.items():
        fig.savefig(arguments.output / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
