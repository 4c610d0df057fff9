"""The parts of a report on positions: which ones run, and what they do to attention and logits."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pelocality.metrics import distance_profile, mean_distance, measure_relative
from pelocality.models import audit, positional_logits, rotary_bands
from pelocality.reports._by_head import away, by_layer, head_grid, how_many, largest, peak_distance, place_of, towards
from pelocality.reports.contents import CHANCE, DISTANCE, MODEL, Chart, Part, in_words, levels_of, table_of
from pelocality.reports.subject import Subject, supported


def positions(subject: Subject) -> Part:
    """Return which positions the model runs, as declared and as measured."""
    result: Any = audit(subject.model)
    frame = result.to_frame()
    empty = {"sinks": frame["sinks"].isna(), "mismatches": frame["mismatches"] == ""}
    shown = frame.drop(columns=[name for name, rows in empty.items() if rows.all()])
    runs = "; ".join(dict.fromkeys(frame["positions_measured"]))
    windows = [each for each in dict.fromkeys(frame["window_measured"]) if each not in ("", "none")]
    seen = f" with a window of {', '.join(windows)}" if windows else ""
    agreed = result.mismatches or ("as the configuration declares",)
    return Part(
        "Each row is a layer: what the configuration declares beside what was measured in the running model.",
        f"Positions are {runs}{seen}, {'; '.join(agreed)}.",
        "audit(model).to_frame()",
        table_of(shown),
        notes=result.cautions,
    )


def heads(subject: Subject) -> Part:
    """Return locality and symmetry by layer and head."""
    result = subject.repeated
    causal = result.source.causal
    names = ["past_locality", "mean_distance"] if causal else ["locality", "relative_asymmetry", "symmetry"]
    names = [name for name in names if name in result.per_sample]
    main = f"{names[0].replace('_', ' ')} of the most local head"

    def numbers(each: Any) -> dict[str, Any]:
        by_head = {name: each.repeated.per_sample[name].mean(0) for name in names}
        means = {f"{name.replace('_', ' ')}, mean over heads": values.nanmean() for name, values in by_head.items()}
        return means | {main: by_head[names[0]].max(), DISTANCE: mean_distance(each.averaged).nanmean()}

    beside = subject.beside(numbers)
    means = list(beside.values())
    values = {name: result.per_sample[name].mean(0) for name in names}
    layer, head = largest(values[names[0]])
    notable = f"Most local: {place_of(result, layer, head)}, {in_words(beside[main])}"
    if result.positions is None:
        notable += f", mostly {towards(peak_distance(result.attention[layer, head]))}"
    notable += f"; the mean over heads is {in_words(means[0])}"
    notable += f", and {how_many(values[names[0]] > 0.5)} are above 0.5"
    return Part(
        "Each cell is a head, whose attention to one repeated word depends on position alone. "
        + (
            "Past locality is 1 for attention to the previous token and smaller the further back a head attends; mean "
            "distance is in tokens."
            if causal
            else "Locality is 1 for attention to oneself and smaller the further a head attends; relative asymmetry is "
            "0 for balanced attention and 1 for attention to one side; the published symmetry is high for a sink too."
        ),
        notable + ".",
        f"{subject.code('repeated')}.to_frame()",
        table_of(result.to_frame("head")),
        [head_grid(result.layers, values[name], name.replace("_", " "), means[k]) for k, name in enumerate(names)],
        by_layer(result, "words"),
        result.notes,
        plain=f"On average, a token looks {in_words(beside[DISTANCE], '.1f', ' tokens away')}.",
        beside=beside,
    )


def profiles(subject: Subject) -> Part:
    """Return the distance profiles of the layers."""
    result = subject.repeated
    if result.positions is not None:
        raise ValueError("a profile by signed distance needs tokens on a line; plots.on_grid draws attention on a grid")
    n = result.length
    distances = list(range(-(n - 2), 1 if result.source.causal else n - 1))
    names = [f"layer {layer}" for layer in result.layers]

    def curves_of(each: Any) -> Tensor:
        profile = distance_profile(each.repeated.attention, without_first=1)[..., 1:-1]  # n - 1 has no pair
        return profile.mean(1)[:, : len(distances)]

    of_layers = subject.by_model(curves_of)
    curves: Tensor = of_layers[MODEL]
    by_model = {model: each.mean(0).tolist() for model, each in of_layers.items()}
    near = curves[:, max(0, n - 10) : n + 7].sum(-1)
    beside = {model: sum(profile[max(0, n - 10) : n + 7]) for model, profile in by_model.items()}
    place, head = largest(result.per_sample["past_locality" if result.source.causal else "locality"].mean(0))
    peaks = [peak_distance(each) for each in result.attention.mean(1)]
    own = [name for name, peak in zip(names, peaks, strict=True) if peak == 0]
    notable = (
        f"{names[int(near.argmax())]} has the most weight within 8 tokens ({float(near.max()):.2f}), "
        f"{names[int(near.argmin())]} the least ({float(near.min()):.2f}), the mean is {in_words(beside)}; "
        f"{len(own) or 'none'} of {len(names)} layers attend most to the token itself"
    )
    frame = pd.DataFrame(curves.T.tolist(), columns=names)
    frame.insert(0, "distance", distances)
    x, levels = "distance (tokens)", levels_of(by_model)
    matrix, title = result.attention[place, head], f"{place_of(result, place, head)}: its matrix"
    return Part(
        "The line of a layer is its mean attention to the token so many places to the left (below 0) or right, without "
        "the first token; far distances rest on few pairs. The matrix is that of the most local head.",
        notable[0].upper() + notable[1:] + ".",
        f"distance_profile({subject.code('repeated')}, without_first=1).mean(1)",
        table_of(frame),
        (
            Chart("lines", "mean over heads", x, "attention", distances, curves, names, True, levels=levels),
            Chart("grid", title, "key (position)", "query (position)", list(range(n)), matrix, list(range(n))),
        ),
        beside={"attention within 8 tokens, mean over layers": beside},
    )


def kernels(subject: Subject) -> Part:
    """Return the logits of position alone, by distance."""
    result, logits = _logits(subject)
    code = f", texts, without_first={subject.first}" if result.method == "texts" else ""
    distances = [k - (result.length - 1) for k in range(logits.shape[-1])]
    span = logits.amax(-1) - logits.amin(-1)
    name = "span of a head in nats, mean over heads"
    beside = subject.beside(lambda each: {name: np.ptp(_logits(each)[1].numpy(), -1).mean()}, **{name: 0.0})
    layer, head = largest(span)
    peak = distances[int(logits[layer, head].argmax())]
    names = [f"{one}.{two}" for one in result.layers for two in range(logits.shape[1])]
    largest_at = [distances[k] for k in logits.flatten(0, 1).argmax(-1).tolist()]
    frame = pd.DataFrame({"head": names, "span_(nats)": span.flatten().tolist(), "largest_at_distance": largest_at})
    if not result.causal:
        frame["locality_of_its_softmax"] = measure_relative(logits.flatten(0, 1)).locality.tolist()
    title = "logits, of the mean content of the texts" if result.method == "texts" else f"logits, {result.method}"
    rows = logits.flatten(0, 1)
    chart = Chart("grid", title, "distance (tokens)", "layer.head", distances, rows, names, centred=True)
    return Part(
        "Each row is a head (layer.head): how much more (red) or less (blue) position alone adds to the logit of a "
        "key at this distance than on average, in nats"
        + ("; a mean along the diagonals of the table." if result.table is not None else "."),
        f"Strongest: {place_of(result, layer, head)}, whose logits span {float(span[layer, head]):.1f} nats with the "
        f"largest {away(peak)}; "
        f"{how_many(span < 0.5)} span less than 0.5 nats, and the mean over heads is {in_words(beside[name], '.1f')}.",
        f"positional_logits(model, tokenizer{code}, length={subject.length})",
        table_of(frame),
        (chart,),
        beside=beside,
    )


def _logits(subject: Subject) -> tuple[Any, torch.Tensor]:
    """Return the positional logits of a model, and these by distance (layer, head, distance), centred."""
    readable = supported(lambda: subject.texts)
    options: dict[str, Any] = {"texts": subject.texts, "without_first": subject.first} if readable else {}
    result = subject.run(positional_logits, subject.tokenizer, length=subject.length, **options)
    n, logits = result.length, result.relative
    if logits is None:  # a table of positions: the mean along each diagonal
        assert result.table is not None
        logits = torch.stack([result.table.diagonal(k, -2, -1).mean(-1) for k in range(-(n - 1), n)], -1)
    logits = logits[..., : n if result.causal else 2 * n - 1].double().cpu()
    return result, logits - logits.mean(-1, keepdim=True)  # the softmax sees differences alone


def bands(subject: Subject) -> Part:
    """Return which frequencies of its rotations the model uses."""
    result, share = _slow_bands(subject)
    use, waves = result.use, result.wavelength
    name = "use of slow bands, mean over heads"
    chance, level = {name: float((waves > subject.length).double().mean())}, {CHANCE: 1 / use.shape[-1]}
    beside = subject.beside(lambda each: {name: _slow_bands(each)[1].mean()}, **chance)
    fast = 1 - share
    layer, head = largest(fast)
    names = [str(each) for each in result.layers]
    labels = [f"{wave:,.0f}" if wave > 100 else f"{wave:.3g}" for wave in waves[0].tolist()]
    shares = pd.DataFrame(use.mean(1).tolist(), columns=labels)
    shares.insert(0, "layer", result.layers)
    return Part(
        "Each column is a pair of dimensions that turns once in so many tokens, fastest on the left; the colour is its "
        "share in the norms of queries times keys, mean over heads.",
        f"{in_words(beside[name], '.0%', ' of the use')} is of bands that turn less than once in the {subject.length} "
        f"tokens and so hardly depend on position; {place_of(result, layer, head)} uses the fast ones most "
        f"({float(fast[layer, head]):.0%}).",
        f"rotary_bands(model, tokenizer, texts, without_first={subject.first}).use.mean(1)",
        table_of(shares),
        (Chart("grid", "share of use", "wavelength (tokens)", "layer", labels, use.mean(1), names, levels=level),),
        {"slow rotations": share.mean(1).tolist()},
        beside=beside,
    )


def _slow_bands(subject: Subject) -> tuple[Any, torch.Tensor]:
    """Return the use of bands, and the share of those that turn less than once in the length, (layer, head)."""
    result = subject.run(rotary_bands, subject.tokenizer, subject.texts, without_first=subject.first)
    return result, (result.use * (result.wavelength > subject.length)[:, None]).sum(-1)
