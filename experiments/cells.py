"""Shared by studies of positions: encodings by name, models healed into them, what they measure, frozen embeddings.

A cell is a model whose own positions are off and which was trained, on the same tokens as every other cell, to give the
hidden states of the untouched model with other positions (`relocate`). The positions of a cell are fixed, as a table
that is trained too could return to the original, but for "measured table, learned"; `relocated_positions.py` trains its
table too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, set_seed

from experiments.pretrain import train_tokenizer
from experiments.runs import lines_of, packaged_model
from pelocality import (
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    NoEncoding,
    crop,
    locality,
    positional_attention,
    relative_asymmetry,
    symmetry,
)
from pelocality.models import relocate

# how the model's measured table is scaled, as `DistanceTable.scaled` takes it
SCALINGS: dict[str, dict[str, float]] = {
    "measured table": {},
    "antisymmetric x 0": {"antisymmetric": 0.0},
    "antisymmetric x .5": {"antisymmetric": 0.5},
    "antisymmetric x -1": {"antisymmetric": -1.0},
    "antisymmetric x 1.5": {"antisymmetric": 1.5},
    "antisymmetric x 2": {"antisymmetric": 2.0},
    "all x .5": {"symmetric": 0.5, "antisymmetric": 0.5},
    "all x 1.5": {"symmetric": 1.5, "antisymmetric": 1.5},
    "decay + .1": {"decay": 0.1},
}
DECAYS = {"attenuated w = .01": 0.01, "attenuated w = .1": 0.1, "attenuated w = 1": 1.0}
FORMS = ("fixed form", "learnable form", "shared form")  # of Chen et al. (2023), with w = .5 and s = 1
CELLS = ("original", "original, healed", "none", "ALiBi", "mixed", *DECAYS, *SCALINGS, "measured table, learned")
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)  # C of scikit-learn


def load(
    text: list[str], output: Path, smoke: bool = False, device: str = "cpu", path: Path | None = None
) -> tuple[Any, Any]:
    """Return a model and its tokenizer, MiniLM if none is named; with `smoke` a tiny BERT.

    The tiny one is stored, as a tokenizer that is trained again may differ.
    """
    folder = output / "model" if smoke else path or packaged_model()
    if smoke and not folder.exists():
        tokenizer = train_tokenizer(text, 300)
        set_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
        config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.3, **sizes)
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return AutoModel.from_pretrained(folder).to(device).eval(), AutoTokenizer.from_pretrained(folder)


def encoding_of(
    cell: str, model: nn.Module, tokenizer: Any, length: int = 50, words: int = 32, learnable: bool = False
) -> Any:
    """Return the positions of a cell as `attach` takes them; tables are measured on identical words.

    Mixed: half of the heads look further into the past, half are their mirror images. Encodings are fixed, but for
    measured tables whose cell ends in ", learned", or with ``learnable``, and for the forms that are learned.
    """
    heads, scaling = model.config.num_attention_heads, SCALINGS.get(cell.removesuffix(", learned"))
    if scaling is not None:
        attention = positional_attention(model, tokenizer, length=length, words=words, progress=False)
        learnable = learnable or cell.endswith(", learned")
        return [table.scaled(**scaling) for table in DistanceTable.from_attention(attention, learnable=learnable)]
    if cell in DECAYS:
        return AttenuatedEncoding(heads, decay=DECAYS[cell], form="logits")
    if cell in FORMS:
        fixed = AttenuatedEncoding(heads)
        return fixed if cell == FORMS[0] else DistanceTable.from_encoding(fixed, length, shared=cell == FORMS[2])
    if cell == "mixed":
        half = heads // 2
        decay, ratio = [0.05] * half + [0.2] * (heads - half), [4.0] * half + [0.25] * (heads - half)
        return AttenuatedEncoding(heads, decay=decay, symmetry=ratio, form="logits")
    return ALiBi(heads) if cell == "ALiBi" else NoEncoding(heads)


def relocated(
    cell: str, model: nn.Module, tokenizer: Any, text: Sequence[str], *, bf16: bool = False, words: int = 32, **options
) -> Any:
    """Return the model of a cell and its loss over training, trained with the options of `relocate`.

    "original, healed" keeps its positions in the same training, which shows what that alone does; in other cells they
    are disabled. "original" is the untouched model, which is not trained.
    """
    if cell == "original":
        raise ValueError("original is the untouched model; use it as it is")
    encoding = encoding_of(cell, model, tokenizer, options["length"] + 2, words)
    kept: Any = "keep" if cell == "original, healed" else "disable"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        return relocate(model, encoding, tokenizer, text, position_embeddings=kept, progress=False, **options)


def position_metrics(model: nn.Module, tokenizer: Any, length: int = 50, words: int = 32) -> dict[str, float]:
    """Return locality, symmetry and relative asymmetry on identical words, means over layers and heads.

    The first and last positions, which models treat apart, are cut off and rows renormalised.
    """
    attention = crop(positional_attention(model, tokenizer, length=length, words=words, progress=False), 1, -1)
    metrics = {"locality": locality, "symmetry": symmetry, "relative_asymmetry": relative_asymmetry}
    return {name: float(metric(attention).mean()) for name, metric in metrics.items()}


@torch.no_grad()
def embeddings(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, layers: bool = False, bf16: bool = False
) -> np.ndarray:
    """Return the mean of the last hidden states over the tokens of each text.

    With `layers` the means and maxima of three layers, a third, two thirds and all of the way up, which show order
    better. Texts are cut to 64 tokens, or to the positions of the model.
    """
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    rows: list[Any] = [None] * len(texts)
    longest = min(64, model.config.max_position_embeddings)
    for start in range(0, len(texts), 64):
        chosen = by_length[start : start + 64]
        options = {"padding": True, "truncation": True, "max_length": longest, "return_token_type_ids": False}
        batch = tokenizer([texts[index] for index in chosen], return_tensors="pt", **options).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            states = model(**batch, output_hidden_states=True).hidden_states
        seen = batch["attention_mask"][..., None].bool()
        depth = len(states) - 1
        parts = []
        for layer in (depth // 3, 2 * depth // 3, depth) if layers else (depth,):
            state = states[layer].float()
            parts.append((state * seen).sum(1) / seen.sum(1))
            if layers:
                parts.append(state.masked_fill(~seen, -torch.inf).amax(1))
        for index, row in zip(chosen, torch.cat(parts, -1).cpu().numpy(), strict=True):
            rows[index] = row
    return np.stack(rows)


def logistic_regression(folds: int = 3, *, sparse: bool = False) -> GridSearchCV:
    """Return a logistic regression whose penalty is chosen by cross-validation that keeps groups together."""
    scale = [] if sparse else [StandardScaler()]
    steps = make_pipeline(*scale, LogisticRegression(max_iter=200))
    penalties = [100 * penalty for penalty in PENALTIES] if sparse else PENALTIES
    return GridSearchCV(steps, {"logisticregression__C": penalties}, cv=StratifiedGroupKFold(folds))


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a text of at least eight words."""
    return [line.strip() for line in lines_of(path) if len(line.split()) >= 8]
