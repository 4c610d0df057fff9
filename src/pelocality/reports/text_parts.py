"""The parts of a report on what heads and layers do: sinks, shares on text, classes, depth, and the order of words."""

from typing import Any

import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor

from pelocality.encodings import NoEncoding
from pelocality.metrics import direction_balance, sink_rate
from pelocality.models import AveragedAttention, attach, influence, rollout
from pelocality.reports._by_head import by_layer, head_frame, head_grid, head_points, how_many, largest, place_of
from pelocality.reports.contents import Chart, Part, table_of
from pelocality.reports.inputs import order_pairs, text_batches
from pelocality.reports.subject import Subject, supported

SHORT, FEW = 24, 8  # tokens and texts of the influence, whose cost grows with the square of the tokens


def sinks(subject: Subject) -> Part:
    """Return how much attention rests on first and special tokens."""
    try:
        layers, values = subject.classes.layers, subject.classes.scores["sink"]
        code = subject.code("classes") + '.scores["sink"]'
        on = "text" if supported(lambda: subject.texts) else "random tokens"
        on = f"the first token, special tokens and learned sinks, on {on}"
    except (TypeError, ValueError):
        layers, values = subject.repeated.layers, sink_rate(subject.repeated)
        code, on = f"sink_rate({subject.code('repeated')})", "the first token, on repeated content"
    layer, head = largest(values)
    many = values > 0.5
    means = values.double().mean(1)
    deepest = int(means.argmax())
    return Part(
        f"Each cell is a head: the share of its attention that goes to {on}.",
        f"{how_many(many).capitalize()} give more than half of their attention to sinks, most of all "
        f"layer {layers[layer]} head {head} ({float(values[layer, head]):.0%}); over the heads of a layer, the largest "
        f"mean is that of layer {layers[deepest]} ({float(means[deepest]):.0%}), the smallest that of "
        f"layer {layers[int(means.argmin())]} ({float(means.min()):.0%}).",
        code,
        table_of(head_frame(layers, sink=values)),
        (head_grid(layers, values, "share of sinks"),),
        {"sinks": means.tolist()},
    )


def share(subject: Subject) -> Part:
    """Return how much of the attention on text is position."""
    result, words = subject.on_text, subject.repeated
    values = result.share.double()
    layer, head = largest(values.nan_to_num(-1))
    metric = "past_locality" if result.source.causal else "locality"
    one, two = (each.per_sample[metric].mean(0).cpu().double() for each in (words, result))
    agree = spearmanr(one.flatten(), two.flatten(), nan_policy="omit").statistic if one.numel() > 2 else float("nan")
    columns: dict[str, Tensor] = {"position_share": values, f"{metric}_on_text": two, f"{metric}_on_words": one}
    title = metric.replace("_", " ")
    return Part(
        "The share is 1 for a head that attends by position alone on every text and about 0 for a head that attends by "
        f"content. The points compare the {title} of each head on text with that on one repeated word.",
        f"The mean share is {float(values.nanmean()):.2f}, and {how_many(values > 0.5)} are above 0.5; "
        f"{place_of(result, layer, head)} has the largest ({float(values[layer, head]):.2f}). The order of heads by "
        f"{title} on words and on text correlates at {agree:.2f}.",
        f"{subject.code('on_text')}.share",
        table_of(head_frame(result.layers, **columns)),
        (
            head_grid(result.layers, values, "position share"),
            head_points(result.layers, one, two, f"{title} by head", "on one repeated word", "on text"),
        ),
        by_layer(result, "text") | {"position share": values.nanmean(1).tolist()},
        result.notes,
    )


def classes(subject: Subject) -> Part:
    """Return what each head is."""
    result = subject.classes
    named = result.classes()
    counts = result.to_frame("layer").iloc[: len(result.layers)]
    kinds = [name for name in dict.fromkeys(each for row in named for each in row) if name != "other"] + ["other"]
    by_class = {name: [row.count(name) for row in named] for name in kinds}
    total = {name: sum(numbers) for name, numbers in by_class.items()}
    induction = [layer for layer, row in zip(result.layers, named, strict=True) if "induction" in row]
    first = f"the first induction head is in layer {induction[0]}" if induction else "none is an induction head"
    most = ", ".join(f"{number} {name}" for name, number in sorted(total.items(), key=lambda each: -each[1]) if number)
    positional, symbolic = (result.scores[name].double() for name in ("positional", "symbolic"))
    states = result.position_share.tolist()
    return Part(
        "Bars count the heads of each class: the largest of a head's scores, less its control, if at least 0.4. "
        "Points show whether attention stays at its place (positional) or follows the tokens (symbolic) when the other "
        "tokens are permuted.",
        f"Of {sum(total.values())} heads: {most}; {first}. In {how_many(positional > symbolic)} attention stays at its "
        "place rather than following the tokens.",
        f"{subject.code('classes')}.to_frame()",
        table_of(result.to_frame()),
        (
            Chart("bars", "classes by layer", "layer", "heads", list(result.layers), list(by_class.values()), kinds),
            head_points(result.layers, positional, symbolic, "tokens permuted", "positional", "symbolic"),
        ),
        {f"heads: {name}": numbers for name, numbers in by_class.items()}
        | {"position in states": states[1:] if len(states) == len(counts) + 1 else states},
        result.notes,
    )


def depth(subject: Subject) -> Part:
    """Return influence and rollout over the layers."""
    columns: dict[str, list[float]] = {}
    codes: list[str] = []
    caution = ""
    layers: tuple[int, ...] = ()
    try:
        name = "on_text" if supported(lambda: subject.on_text) else "repeated"
        attention = rollout(getattr(subject, name))
        layers = attention.layers
        codes.append(f"rollout({subject.code(name)})")
        columns |= {"rollout_own": _own_share(attention), "rollout_first": sink_rate(attention).mean(1).tolist()}
    except ValueError as error:
        caution = str(error)
    short = min(SHORT, subject.length)
    options: dict[str, Any]
    notable = ""
    try:
        if subject.lines is not None and subject.tokenizer is not None:
            texts = text_batches(subject.lines, subject.tokenizer, short, FEW)
            options = {"texts": texts, "tokenizer": subject.tokenizer}
            shown = f"text_batches(lines, tokenizer, {short}, {FEW}), tokenizer=tokenizer"
        else:
            options = {"length": subject.length if subject.model.content else short, "words": 2}
            shown = f"length={options['length']}, words=2"
        result = influence(subject.model, **options, directions=1, seed=subject.seed, progress=False)
        codes.append(f"influence(model, {shown}, directions=1, seed={subject.seed})")
        own = _own_share(result)
        balance = direction_balance(result).mean(1).tolist() if result.positions is None else []
        more = {"influence_own": own, "influence_first": sink_rate(result).mean(1).tolist()}
        more |= {"influence_direction_balance": balance} if balance else {}
        if layers and len(result.layers) != len(layers):
            columns = {}  # a row per layer: influence has all, rollout those with attention
        layers, columns = result.layers, columns | more
        notable = f"After the last layer {own[-1]:.0%} of the influence on a token is still its own"
        notable += f", from {own[0]:.0%} after the first"
        if balance and not result.source.causal:
            side = "later" if balance[-1] > 0 else "earlier"
            notable += f"; of the rest, {side} tokens have more (balance {balance[-1]:+.2f})"
    except ValueError as error:
        if not columns:
            raise
        caution = str(error)
    if "rollout_first" in columns:
        alone = f"by rollout, which knows attention alone, a token's own share is {columns['rollout_own'][-1]:.0%}"
        notable = f"{notable}; {alone}" if notable else alone[0].upper() + alone[1:]
    frame = pd.DataFrame({"layer": layers, **columns})
    shares = {name.replace("_", ": "): each for name, each in columns.items() if "balance" not in name}
    return Part(
        "Influence is how much the hidden state behind a layer depends on each token's embedding, by derivatives; "
        "rollout multiplies the attention of the layers, half of each a residual connection. Own is a token's share "
        "of itself, first that of the first token.",
        notable + ".",
        "; ".join(codes),
        table_of(frame),
        (Chart("lines", "share by depth", "layer", "share", list(layers), list(shares.values()), list(shares)),),
        {name.replace("_", " "): each for name, each in columns.items() if name.startswith("influence")},
        (caution,) if caution else (),
    )


def _own_share(result: AveragedAttention) -> list[float]:
    """Return the mean of the diagonal, layer by layer."""
    return list(map(float, result.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2))))


def order(subject: Subject) -> Part:
    """Return whether the model's likelihood sees the order of words, with and without positions."""
    from pelocality.evaluation import evaluate_minimal_pairs

    if subject.lines is None:
        raise ValueError("word order needs texts as strings, but texts= holds batches")
    pairs = order_pairs(subject.lines, subject.seed)
    rows = []

    def measure(model: str) -> None:
        for change, each in pairs.items():
            result = evaluate_minimal_pairs(subject.model.with_head, subject.tokenizer, each, progress=False)
            numbers = result.to_frame()[["score", "n", "accuracy", "low", "high"]].iloc[0].to_dict()
            rows.append({"model": model, "change": change, **numbers})

    measure("as it is")
    caution = ""
    try:
        with attach(subject.model.with_head, NoEncoding()):
            measure("without positions")
    except ValueError as error:
        caution = f"There is no control without positions: {error}"
    accuracy = [row["accuracy"] for row in rows]
    notable = f"The likelihood prefers the original to a swap of neighbours in {accuracy[0]:.0%} of {rows[0]['n']} "
    notable += f"sentences and to a shuffle in {accuracy[1]:.0%}"
    if len(rows) > 2:
        notable += f"; without positions in {accuracy[2]:.0%} and {accuracy[3]:.0%}"
    frame = pd.DataFrame(rows)
    kinds = list(dict.fromkeys(frame["model"]))
    accuracies = [frame.loc[frame["model"] == kind, "accuracy"].tolist() for kind in kinds]
    return Part(
        "How often the model finds the original sentence more likely than the changed one; 50 % is chance. The control "
        "is the same line inside `with attach(model, NoEncoding()):`, which turns positions off.",
        notable + ".",
        f"[evaluate_minimal_pairs(model, tokenizer, each) for each in order_pairs(lines, {subject.seed}).values()]",
        table_of(frame),
        (Chart("groups", "originals preferred", "", "share of sentences", list(pairs), accuracies, kinds),),
        notes=(caution,) if caution else (),
    )
