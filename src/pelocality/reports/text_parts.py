"""The parts of a report on what heads and layers do: sinks, shares on text, classes, depth, and the order of words."""

from collections import Counter
from typing import Any

import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor

from pelocality.metrics import direction_balance, sink_rate
from pelocality.models import AveragedAttention, rollout
from pelocality.models.heads.classes import CLASSES
from pelocality.models.measuring.text_averages import SINK
from pelocality.reports._by_head import by_layer, head_frame, head_grid, head_points, largest, place_of
from pelocality.reports.contents import MODEL, SHARE, Chart, Part, in_words, levels_of, table_of
from pelocality.reports.inputs import order_pairs
from pelocality.reports.subject import Subject, supported

_OWN = "own share of a token after the last layer, by "


def sinks(subject: Subject) -> Part:
    """Return how much attention rests on first and special tokens."""
    name, number = "share of sinks, mean over heads", "heads that are sinks"
    has_classes = supported(lambda: subject.classes)

    def share_of(each: Any, key: str = "sink") -> Tensor:
        values: Tensor = each.classes.scores[key] if has_classes else sink_rate(each.repeated)
        return values.double()

    def numbers(each: Any, key: str = "sink") -> dict[str, Any]:
        values = share_of(each, key)
        return {name: values.mean(), number: (values >= SINK).sum()}

    where, code = "first token", f"sink_rate({subject.code('repeated')})"
    if has_classes:
        where, code = "first token, special tokens and learned sinks", subject.code("classes") + '.scores["sink"]'
    values = share_of(subject)
    beside = subject.beside(numbers, **(numbers(subject, "sink_control") if has_classes else {}))
    layers = (subject.classes if has_classes else subject.repeated).layers
    layer, head = largest(values)
    means = values.mean(1)
    most, least = int(means.argmax()), int(means.argmin())
    return Part(
        f"Each cell is a head: the share of its attention that goes to the {where}; from {SINK} on it is a sink.",
        f"{in_words(beside[number], '.0f', f' of {values.numel()} heads are sinks')}, most of all layer "
        f"{layers[layer]} head {head} ({float(values[layer, head]):.0%}); of layers, {layers[most]} has the largest "
        f"mean ({float(means[most]):.0%}) and {layers[least]} the smallest ({float(means[least]):.0%}).",
        code,
        table_of(head_frame(layers, sink=values)),
        (head_grid(layers, values, "share of sinks", beside[name]),),
        {"sinks": means.tolist()},
        plain=f"{in_words(beside[name], '.0%', f' of its attention rests on the {where}')}.",
        beside=beside,
    )


def share(subject: Subject) -> Part:
    """Return how much of the attention on text is position."""
    result, words = subject.on_text, subject.repeated
    values = result.share.double()
    layer, head = largest(values.nan_to_num(-1))
    metric = "past_locality" if all("past_locality" in each.per_sample for each in (words, result)) else "locality"
    one, two = (each.per_sample[metric].mean(0).cpu().double() for each in (words, result))
    title, above = metric.replace("_", " "), "heads whose position share is above 0.5"

    def numbers(each: Any) -> dict[str, Any]:
        shares = {SHARE: each.on_text.share.nanmean(), above: (each.on_text.share > 0.5).sum()}
        return shares | {f"{title} on text, mean over heads": each.on_text.per_sample[metric].nanmean()}

    beside = subject.beside(numbers)
    mean, many, local = beside.values()
    agree = spearmanr(one.flatten(), two.flatten(), nan_policy="omit").statistic if one.numel() > 2 else float("nan")
    columns: dict[str, Tensor] = {"position_share": values, f"{metric}_on_text": two, f"{metric}_on_words": one}
    return Part(
        "The share is 1 for a head that attends by position alone on every text and about 0 for a head that attends by "
        f"content. The points compare the {title} of each head on text with that on one repeated word.",
        f"The mean share is {in_words(mean)}; {in_words(many, '.0f', f' of {values.numel()} heads are above 0.5')}; "
        f"{place_of(result, layer, head)} has the largest ({float(values[layer, head]):.2f}). The order of heads by "
        f"{title} on words and on text correlates at {agree:.2f}.",
        f"{subject.code('on_text')}.share",
        table_of(head_frame(result.layers, **columns)),
        (
            head_grid(result.layers, values, "position share", mean),
            head_points(result.layers, one, two, f"{title} by head", "on one repeated word", "on text", **local),
        ),
        by_layer(result, "text") | {"position share": values.nanmean(1).tolist()},
        result.notes,
        plain=f"Place alone, whatever the tokens say, decides {in_words(mean, '.0%', ' of where a token looks')}.",
        beside=beside,
    )


def classes(subject: Subject) -> Part:
    """Return what each head is."""
    result = subject.classes
    named = result.classes()
    total = Counter(kind for row in named for kind in row)
    by_class = {kind: [row.count(kind) for row in named] for kind in CLASSES if total[kind] or kind == "other"}
    induction = [layer for layer, row in zip(result.layers, named, strict=True) if "induction" in row]
    first = f"the first induction head is in layer {induction[0]}" if induction else "none is an induction head"
    most = ", ".join(f"{number} {kind}" for kind, number in total.most_common() if number)
    positional, symbolic = (result.scores[name].double() for name in ("positional", "symbolic"))
    states, layers = result.position_share.tolist(), list(map(str, result.layers))
    stays = "heads whose attention stays at its place"

    def numbers(each: Any) -> dict[str, Any]:
        scores, every = each.classes.scores, [kind for row in each.classes.classes() for kind in row]
        of_classes = {f"heads: {kind}": every.count(kind) for kind in by_class}
        return of_classes | {stays: (scores["positional"] > scores["symbolic"]).sum()}

    beside = subject.beside(numbers)
    return Part(
        "Cells count the heads of each class: the largest of a head's scores, less its control, if at least 0.4; sinks "
        "that are also of another class count there. Points show whether attention stays at its place (positional) or "
        "follows the tokens (symbolic) when the other tokens are permuted.",
        f"Of {sum(total.values())} heads: {most}; {first}. In {in_words(beside[stays], '.0f', ' heads')}, attention "
        "stays at its place rather than following the tokens.",
        f"{subject.code('classes')}.to_frame()",
        table_of(result.to_frame()),
        (
            Chart("grid", "heads of each class", "layer", "", layers, [*by_class.values()], [*by_class]),
            head_points(result.layers, positional, symbolic, "tokens permuted", "positional", "symbolic"),
        ),
        {f"heads: {name}": numbers for name, numbers in by_class.items()}
        | {"position in states": states[1:] if len(states) == len(named) + 1 else states},
        result.notes,
        beside=beside,
    )


def depth(subject: Subject) -> Part:
    """Return influence and rollout over the layers."""
    ways: Any = {"influence": lambda each: each.influence, "rollout": lambda each: rollout(each.averaged)}
    columns: dict[str, list[float]] = {}
    beside: dict[str, dict[str, float]] = {}
    codes: list[str] = []
    cautions: list[str] = []
    layers: tuple[int, ...] = ()
    for way, measure in ways.items():
        try:
            by_model = subject.by_model(measure)
        except ValueError as error:
            cautions.append(str(error))
            continue
        result = by_model[MODEL]
        if columns and len(result.layers) != len(layers):
            continue  # a row per layer: influence has all, rollout those with attention
        layers, own = result.layers, {model: _own_share(each) for model, each in by_model.items()}
        columns |= {f"{way}_own": own[MODEL], f"{way}_first": sink_rate(result).mean(1).tolist()}
        columns |= {f"{way}_own_{model}": each for model, each in levels_of(own).items() if way == "influence"}
        beside[_OWN + way] = {model: each[-1] for model, each in own.items()}
        of_text = "on_text" if supported(lambda: subject.on_text) else "repeated"
        codes.insert(0, subject.code(way) if way == "influence" else f"rollout({subject.code(of_text)})")
        if way == "influence" and result.positions is None:
            balance = {model: direction_balance(each).mean(1).tolist() for model, each in by_model.items()}
            columns["influence_direction_balance"] = balance[MODEL]
            beside["balance of later and earlier tokens after the last layer"] = {m: b[-1] for m, b in balance.items()}
    if not columns:
        raise ValueError(cautions[0])
    unit = " of what a token depends on is the token itself"
    sentences = [
        f"by {name[len(_OWN) :]}, {in_words(own, '.0%', unit)}" for name, own in beside.items() if _OWN in name
    ]
    shares = {name.replace("_", ": "): each for name, each in columns.items() if "balance" not in name}
    of_influence = {name: each for name, each in columns.items() if name.startswith("influence") and " " not in name}
    return Part(
        "Influence is how much the hidden state behind a layer depends on each token's embedding, by derivatives; "
        "rollout multiplies the attention of the layers, half of each a residual connection. Own is a token's share "
        "of itself, first that of the first token.",
        f"After the last layer, {'; '.join(sentences)}.",
        "; ".join(codes),
        table_of(pd.DataFrame({"layer": layers, **columns})),
        (Chart("lines", "share by depth", "layer", "share", list(layers), list(shares.values()), list(shares)),),
        {name.replace("_", " "): each for name, each in of_influence.items()},
        cautions,
        plain=f"After the last layer, {sentences[0]}.",
        beside=beside,
    )


def _own_share(result: AveragedAttention) -> list[float]:
    """Return the mean of the diagonal, layer by layer."""
    return list(map(float, result.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2))))


def order(subject: Subject) -> Part:
    """Return whether the model's likelihood sees the order of words, and that of its twins."""
    from pelocality.evaluation import evaluate_minimal_pairs

    if subject.lines is None:
        raise ValueError("word order needs texts as strings, but texts= holds batches")
    pairs = order_pairs(subject.lines, subject.seed)

    def measure(each: Any) -> dict[str, Any]:
        results = {}
        with each.within():
            for change, some in pairs.items():
                result = evaluate_minimal_pairs(each.model.with_head, subject.tokenizer, some, progress=False)
                results[change] = result.to_frame()[["score", "n", "accuracy", "low", "high"]].iloc[0].to_dict()
        return results

    by_model = subject.by_model(measure, {change: {"accuracy": 0.5} for change in pairs})
    rows = [{"model": model, "change": change, **each[change]} for model, each in by_model.items() for change in pairs]
    beside = {change: {model: each[change]["accuracy"] for model, each in by_model.items()} for change in pairs}
    (swap, shuffle), unit = beside.values(), f" of {rows[0]['n']} sentences"
    grid = [list(each.values()) for each in beside.values()]
    return Part(
        "How often the model finds the original sentence more likely than the changed one; 50 % is chance. Without "
        "positions is the same line inside `with attach(model, NoEncoding()):`.",
        f"The likelihood prefers the original to a swap of neighbours in {in_words(swap, '.0%', unit)}, and to a "
        f"shuffle in {in_words(shuffle, '.0%')}.",
        f"[evaluate_minimal_pairs(model, tokenizer, each) for each in order_pairs(lines, {subject.seed}).values()]",
        table_of(pd.DataFrame(rows)),
        (Chart("grid", "originals preferred, share of sentences", "", "", list(by_model), grid, list(pairs)),),
        plain="Of a sentence and the same with two neighbouring words exchanged, it finds the original more likely "
        f"{in_words(swap, '.0%', ' of the time')}.",
        beside=beside,
    )
