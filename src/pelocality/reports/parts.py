"""The parts of a report: each asks the library one question about a model, and says what is notable in the answer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pelocality.encodings import NoEncoding
from pelocality.metrics import direction_balance, distance_profile, locality, measure_relative, sink_rate
from pelocality.models import (
    AveragedAttention,
    HeadClasses,
    PositionalAttention,
    SequenceModel,
    TextAverage,
    attach,
    audit,
    head_classes,
    influence,
    positional_attention,
    positional_logits,
    rollout,
    rotary_bands,
    text_average,
)
from pelocality.reports.contents import Chart, Part, table_of
from pelocality.reports.inputs import text_batches

SHORT, FEW = 24, 8  # tokens and texts of the influence, whose cost grows with the square of the tokens
_SENTENCES = 24
_METRICS = ["locality", "adjusted_locality", "past_locality", "mean_distance", "direction_balance"]
_METRICS += ["relative_asymmetry", "sink_rate"]


@dataclass
class Subject:
    """A model with what its report reads, and the results that several parts share.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer, or None.
        lines: Texts as strings; None where batches were given.
        batches: Texts as batches; None without a tokenizer.
        length: Positions of words and texts.
        words: The number of words.
        seed: Seed of all draws.
    """

    model: SequenceModel
    tokenizer: Any
    lines: list[str] | None
    batches: list[Any] | None
    length: int
    words: int
    seed: int

    @cached_property
    def trial(self) -> PositionalAttention:
        """The attention to one word, which says whether the model is causal."""
        return self._repeated(words=1)

    @cached_property
    def prefix(self) -> bool:
        """Whether a token goes before the words: without it a causal model of relative positions has equal states."""
        source = self.trial.source
        if not (source.causal and source.equal_states):
            return False
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return (getattr(self.model.config, "bos_token_id", None) if bos is None else bos) is not None

    @cached_property
    def repeated(self) -> PositionalAttention:
        """The attention to repeated words."""
        return self._repeated(words=self.words, **({"prefix": True} if self.prefix else {}))

    def _repeated(self, **options: Any) -> PositionalAttention:
        return positional_attention(
            self.model, self.tokenizer, length=self.length, seed=self.seed, progress=False, **options
        )

    @cached_property
    def repeated_code(self) -> str:
        """The line that makes `repeated`."""
        more = ", prefix=True" if self.prefix else ""
        return (
            f"positional_attention(model, tokenizer, length={self.length}, words={self.words}, seed={self.seed}{more})"
        )

    @cached_property
    def on_text(self) -> TextAverage:
        """The attention on texts, in causal models without their first token."""
        return text_average(
            self.model, self.texts, tokenizer=self.tokenizer, without_first=self.first, length=10**6, progress=False
        )

    @property
    def first(self) -> int:
        """The number of first tokens that are left out of texts."""
        return int(self.trial.source.causal)

    @property
    def on_text_code(self) -> str:
        """The line that makes `on_text`."""
        return f"text_average(model, texts, tokenizer=tokenizer{', without_first=1' if self.first else ''})"

    @cached_property
    def texts(self) -> list[Any]:
        """Texts of one length."""
        if self.batches is not None:
            return self.batches
        if self.lines is None or self.tokenizer is None:
            raise ValueError("texts need a tokenizer, or texts= as batches of what the model reads")
        longest = self.model.longest or 10**9
        return text_batches(self.lines, self.tokenizer, min(self.length + self.first, longest - 4))

    @cached_property
    def classes(self) -> HeadClasses:
        """What each head is, of random tokens alone without a tokenizer."""
        texts = self.texts if _readable(lambda: self.texts) else None
        options: dict[str, Any] = {"length": self.length, "sequences": 8, "permutations": 2, "seed": self.seed}
        return head_classes(self.model, self.tokenizer, texts, progress=False, **options)

    @property
    def classes_code(self) -> str:
        """The line that makes `classes`."""
        options = f"length={self.length}, sequences=8, permutations=2, seed={self.seed}"
        given = "tokenizer, texts" if _readable(lambda: self.texts) else "tokenizer"
        return f"head_classes(model, {given}, {options})"


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
    key = frame["first_key"].astype(float)
    most = ""
    if key.notna().any():
        where = f"in layer {frame['layer'][key.idxmax()]} on random tokens"
        most = f"; the first key gets {key.max():.0%} of the attention {where}"
    return Part(
        "Each row is a layer: what the configuration declares beside what was measured in the running model.",
        f"Positions are {runs}{seen}, {'; '.join(agreed)}{most}.",
        "audit(model).to_frame()",
        table_of(shown),
        notes=result.cautions,
    )


def heads(subject: Subject) -> Part:
    """Return locality and symmetry by layer and head."""
    result = subject.repeated
    frame = result.to_frame("head")
    causal = result.source.causal
    names = ["past_locality", "mean_distance"] if causal else ["locality", "relative_asymmetry", "symmetry"]
    names = [name for name in names if name in result.per_sample]
    values = {name: result.per_sample[name].mean(0) for name in names}
    main = values[names[0]]
    layer, head = _largest(main)
    found = f"Most local: {_where(result, layer, head)}, {float(main[layer, head]):.2f}"
    if result.positions is None:
        found += f", mostly {_distance(_peak(result.attention[layer, head]))}"
    found += f"; the mean over heads is {float(main.mean()):.2f}"
    if not causal and "symmetry" in values:
        both = (values["symmetry"] > 0.8) & (values["relative_asymmetry"] > 0.8)
        if bool(both.any()):
            found += (
                f". {_some(both).capitalize()} have a published symmetry above 0.8 "
                "although their relative asymmetry is above 0.8 too"
            )
    else:
        near = main > 0.5
        found += f", and {_some(near)} are above 0.5"
    return Part(
        "Each cell is a head, whose attention to one repeated word depends on position alone. "
        + (
            "Past locality is 1 for attention to the previous token and smaller the further back a head attends; mean "
            "distance is in tokens."
            if causal
            else "Locality is 1 for attention to oneself and smaller the further a head attends; relative asymmetry is "
            "0 for balanced attention and 1 for attention to one side; the published symmetry is high for a sink too."
        ),
        found + ".",
        f"{subject.repeated_code}.to_frame()",
        table_of(frame),
        tuple(_head_grid(result.layers, each, name.replace("_", " ")) for name, each in values.items()),
        _by_layer(result, "words"),
        result.notes,
    )


def profiles(subject: Subject) -> Part:
    """Return the distance profiles of the layers."""
    result = subject.repeated
    if result.positions is not None:
        raise ValueError("a profile by signed distance needs tokens on a line; plots.on_grid shows those of a grid")
    n = result.length
    by_layer = distance_profile(result.attention, without_first=1).mean(1)
    distances = list(range(-(n - 2), 1 if result.source.causal else n - 1))
    names = [f"layer {layer}" for layer in result.layers]
    curves = by_layer[:, : len(distances)]
    near = curves[:, max(0, n - 10) : n + 7].sum(-1)
    place, head = _largest(locality(result))
    peaks = [_peak(each) for each in result.attention.mean(1)]
    own = [name for name, peak in zip(names, peaks, strict=True) if peak == 0]
    found = (
        f"{names[int(near.argmax())]} has the most weight within 8 tokens ({float(near.max()):.2f}), "
        f"{names[int(near.argmin())]} the least ({float(near.min()):.2f}); "
        f"{len(own) or 'none'} of {len(names)} layers attend most to the token itself"
    )
    frame = pd.DataFrame(curves.T.tolist(), columns=names)
    frame.insert(0, "distance", distances)
    matrix = result.attention[place, head]
    return Part(
        "The line of a layer is its mean attention to the token so many places to the left (below 0) or right, without "
        "the first token; far distances rest on few pairs. The matrix is that of the most local head.",
        found[0].upper() + found[1:] + ".",
        f"distance_profile({subject.repeated_code}, without_first=1).mean(1)",
        table_of(frame),
        (
            Chart("lines", "mean over heads", "distance (tokens)", "attention", distances, curves, names, ordered=True),
            Chart(
                "grid",
                f"{_where(result, place, head)}: its matrix",
                "key (position)",
                "query (position)",
                list(range(n)),
                matrix,
                list(range(n)),
            ),
        ),
    )


def kernels(subject: Subject) -> Part:
    """Return the logits of position alone, by distance."""
    readable = _readable(lambda: subject.texts)
    options: dict[str, Any] = {"texts": subject.texts, "without_first": subject.first} if readable else {}
    result = positional_logits(subject.model, subject.tokenizer, length=subject.length, progress=False, **options)
    code = f", texts, without_first={subject.first}" if result.method == "texts" else ""
    n = result.length
    logits = result.relative
    if logits is None:  # a table of positions: the mean along each diagonal
        assert result.table is not None
        logits = torch.stack([result.table.diagonal(k, -2, -1).mean(-1) for k in range(-(n - 1), n)], -1)
    columns = slice(0, n if result.causal else 2 * n - 1)
    distances = list(range(-(n - 1), n))[columns]
    logits = logits[..., columns].double()
    logits = logits - logits.mean(-1, keepdim=True)  # the softmax sees differences alone
    span = logits.amax(-1) - logits.amin(-1)
    layer, head = _largest(span)
    peak = distances[int(logits[layer, head].argmax())]
    names = [f"{one}.{two}" for one in result.layers for two in range(logits.shape[1])]
    frame = pd.DataFrame({"head": names, "span_(nats)": span.flatten().tolist()})
    frame["largest_at_distance"] = [distances[k] for k in logits.flatten(0, 1).argmax(-1).tolist()]
    weights = measure_relative(logits.flatten(0, 1)) if not result.causal else None
    if weights is not None:
        frame["locality_of_its_softmax"] = weights.locality.tolist()
    return Part(
        "Each row is a head (layer.head): how much more (yellow) or less (blue) position alone adds to the logit of a "
        "key at this distance than on average, in nats"
        + ("; a mean along the diagonals of the table." if result.table is not None else "."),
        f"Strongest: {_where(result, layer, head)}, whose logits span {float(span[layer, head]):.1f} nats with the "
        f"largest {_at(peak)}; "
        f"{_some(span < 0.5)} span less than 0.5 nats.",
        f"positional_logits(model, tokenizer{code}, length={subject.length})",
        table_of(frame),
        (
            Chart(
                "grid",
                {"exact": "exact", "texts": "of the mean content of the texts"}.get(result.method, result.method),
                "distance (tokens)",
                "layer.head",
                distances,
                logits.flatten(0, 1),
                names,
                centred=True,
            ),
        ),
    )


def bands(subject: Subject) -> Part:
    """Return which frequencies of its rotations the model uses."""
    result = rotary_bands(subject.model, subject.tokenizer, subject.texts, without_first=subject.first, progress=False)
    use, waves = result.use, result.wavelength
    slow = waves > subject.length
    share = (use * slow[:, None]).sum(-1)  # (layer, head)
    fast = 1 - share
    layer, head = _largest(fast)
    names = [str(each) for each in result.layers]
    by_layer = pd.DataFrame(use.mean(1).tolist(), columns=[f"{wave:.3g}" for wave in waves[0].tolist()])
    by_layer.insert(0, "layer", result.layers)
    return Part(
        "Each column is a pair of dimensions that turns once in so many tokens, fastest on the left; the colour is its "
        "share in the norms of queries times keys, mean over heads.",
        f"{float(share.mean()):.0%} of the use is of bands that turn less than once in the {subject.length} tokens and "
        f"so hardly depend on position; {_where(result, layer, head)} uses the fast ones most "
        f"({float(fast[layer, head]):.0%}).",
        f"rotary_bands(model, tokenizer, texts, without_first={subject.first}).use.mean(1)",
        table_of(by_layer),
        (
            Chart(
                "grid",
                "share of use",
                "wavelength (tokens)",
                "layer",
                [f"{wave:.3g}" for wave in waves[0].tolist()],
                use.mean(1),
                names,
            ),
        ),
        {"slow rotations": share.mean(1).tolist()},
    )


def depth(subject: Subject) -> Part:
    """Return influence and rollout over the layers."""
    columns: dict[str, list[float]] = {}
    codes: list[str] = []
    why = ""
    layers: tuple[int, ...] = ()
    try:
        attention = rollout(subject.on_text if _readable(lambda: subject.on_text) else subject.repeated)
        layers, codes = attention.layers, ["rollout(text_average(...))"]
        columns |= {"rollout_own": _own(attention), "rollout_first": sink_rate(attention).mean(1).tolist()}
    except ValueError as error:
        why = str(error)
    short = min(SHORT, subject.length)
    options: dict[str, Any] = {"directions": 1, "seed": subject.seed, "progress": False}
    found = ""
    try:
        if subject.lines is not None and subject.tokenizer is not None:
            texts = text_batches(subject.lines, subject.tokenizer, short, FEW)
            result = influence(subject.model, texts, tokenizer=subject.tokenizer, **options)
            codes.append(
                f"influence(model, text_batches(lines, tokenizer, {short}, {FEW}), tokenizer=tokenizer, directions=1)"
            )
        else:
            length = subject.length if subject.model.content else short
            result = influence(subject.model, length=length, words=2, **options)
            codes.append(f"influence(model, length={length}, words=2, directions=1)")
        own = _own(result)
        balance = direction_balance(result).mean(1).tolist() if result.positions is None else []
        more = {"influence_own": own, "influence_first": sink_rate(result).mean(1).tolist()}
        more |= {"influence_direction_balance": balance} if balance else {}
        if layers and len(result.layers) != len(layers):
            columns = {}  # a row per layer: influence has all, rollout those with attention
        layers, columns = result.layers, columns | more
        found = f"After the last layer {own[-1]:.0%} of the influence on a token is still its own"
        found += f", from {own[0]:.0%} after the first"
        if balance and not result.source.causal:
            side = "later" if balance[-1] > 0 else "earlier"
            found += f"; of the rest, {side} tokens have more (balance {balance[-1]:+.2f})"
    except ValueError as error:
        if not columns:
            raise
        why = str(error)
    if "rollout_first" in columns:
        alone = f"by rollout, which knows attention alone, a token's own share is {columns['rollout_own'][-1]:.0%}"
        found = f"{found}; {alone}" if found else alone[0].upper() + alone[1:]
    frame = pd.DataFrame(columns)
    frame.insert(0, "layer", layers)
    return Part(
        "Influence is how much the hidden state behind a layer depends on each token's embedding, by derivatives; "
        "rollout multiplies the attention of the layers, half of each a residual connection. Own is a token's share "
        "of itself, first that of the first token.",
        found + ".",
        "; ".join(codes),
        table_of(frame),
        (
            Chart(
                "lines",
                "share by depth",
                "layer",
                "share",
                list(layers),
                [each for name, each in columns.items() if "balance" not in name],
                [name.replace("_", ": ") for name in columns if "balance" not in name],
            ),
        ),
        {name.replace("_", " "): each for name, each in columns.items() if name.startswith("influence")},
        (why,) if why else (),
    )


def sinks(subject: Subject) -> Part:
    """Return how much attention rests on first and special tokens."""
    try:
        layers, values = subject.classes.layers, subject.classes.scores["sink"]
        code, on = (
            f'{subject.classes_code}.scores["sink"]',
            "the first token, special tokens and learned sinks, on text",
        )
    except (TypeError, ValueError):
        layers, values = subject.repeated.layers, sink_rate(subject.repeated)
        code, on = f"sink_rate({subject.repeated_code})", "the first token, on repeated content"
    layer, head = _largest(values)
    many = values > 0.5
    by_layer = values.double().mean(1)
    deepest = int(by_layer.argmax())
    return Part(
        f"Each cell is a head: the share of its attention that goes to {on}.",
        f"{_some(many).capitalize()} give more than half of their attention to sinks, most of all "
        f"layer {layers[layer]} head {head} ({float(values[layer, head]):.0%}); over the heads of a layer, the largest "
        f"mean is that of layer {layers[deepest]} ({float(by_layer[deepest]):.0%}), the smallest that of "
        f"layer {layers[int(by_layer.argmin())]} ({float(by_layer.min()):.0%}).",
        code,
        table_of(_head_frame(layers, sink=values)),
        (_head_grid(layers, values, "share of sinks"),),
        {"sinks": by_layer.tolist()},
    )


def share(subject: Subject) -> Part:
    """Return how much of the attention on text is position."""
    result, words = subject.on_text, subject.repeated
    values = result.share.double()
    layer, head = _largest(values.nan_to_num(-1))
    by_layer = values.nanmean(1)
    metric = "past_locality" if result.source.causal else "locality"
    one, two = (each.per_sample[metric].mean(0).cpu().double() for each in (words, result))
    agree = float(np.corrcoef(_ranks(one.flatten()), _ranks(two.flatten()))[0, 1]) if one.numel() > 2 else np.nan
    columns: dict[str, Tensor] = {"position_share": values, f"{metric}_on_text": two, f"{metric}_on_words": one}
    title = metric.replace("_", " ")
    return Part(
        "The share is 1 for a head that attends by position alone on every text and about 0 for a head that attends by "
        f"content. The points compare the {title} of each head on text with that on one repeated word.",
        f"The mean share is {float(values.nanmean()):.2f}, and {_some(values > 0.5)} are above 0.5; "
        f"{_where(result, layer, head)} has the largest ({float(values[layer, head]):.2f}). The order of heads by "
        f"{title} on words and on text correlates at {agree:.2f}.",
        f"{subject.on_text_code}.share",
        table_of(_head_frame(result.layers, **columns)),
        (
            _head_grid(result.layers, values, "position share"),
            Chart(
                "points",
                f"{title} by head",
                "on one repeated word",
                "on text",
                one,
                two,
                [f"layer {each}" for each in result.layers],
                ordered=True,
                labels=[[f"layer {each} head {h}" for h in range(one.shape[1])] for each in result.layers],
            ),
        ),
        _by_layer(result, "text") | {"position share": by_layer.tolist()},
        result.notes,
    )


def classes(subject: Subject) -> Part:
    """Return what each head is."""
    result = subject.classes
    named = result.classes()
    counts = result.to_frame("layer").iloc[: len(result.layers)]
    kinds = [name for name in dict.fromkeys(each for row in named for each in row) if name != "other"] + ["other"]
    total = {name: sum(row.count(name) for row in named) for name in kinds}
    first = next(
        (
            f"; the first induction head is in layer {layer}"
            for layer, row in zip(result.layers, named, strict=True)
            if "induction" in row
        ),
        "; none is an induction head",
    )
    most = ", ".join(f"{number} {name}" for name, number in sorted(total.items(), key=lambda each: -each[1]) if number)
    positional, symbolic = (result.scores[name].double() for name in ("positional", "symbolic"))
    states = result.position_share.tolist()
    return Part(
        "Bars count the heads of each class: the largest of a head's scores, less its control, if at least 0.4. "
        "Points show whether attention stays at its place (positional) or follows the tokens (symbolic) when the other "
        "tokens are permuted.",
        f"Of {sum(total.values())} heads: {most}{first}. In {_some(positional > symbolic)} attention stays at its "
        "place rather than following the tokens.",
        f"{subject.classes_code}.to_frame()",
        table_of(result.to_frame()),
        (
            Chart(
                "bars",
                "classes by layer",
                "layer",
                "heads",
                list(result.layers),
                [[row.count(name) for row in named] for name in kinds],
                kinds,
            ),
            Chart(
                "points",
                "tokens permuted",
                "positional",
                "symbolic",
                positional,
                symbolic,
                [f"layer {layer}" for layer in result.layers],
                ordered=True,
                labels=[
                    [f"layer {layer} head {h}: {name}" for h, name in enumerate(row)]
                    for layer, row in zip(result.layers, named, strict=True)
                ],
            ),
        ),
        {f"heads: {name}": [row.count(name) for row in named] for name in kinds}
        | {"position in states": states[1:] if len(states) == len(counts) + 1 else states},
        result.notes,
    )


def order(subject: Subject) -> Part:
    """Return whether the model's likelihood sees the order of words, with and without positions."""
    import datasets

    from pelocality.corpora import plain_sentence
    from pelocality.evaluation import evaluate_minimal_pairs
    from pelocality.probes import minimal_pairs, random_shuffling

    if subject.lines is None:
        raise ValueError("word order is judged on texts as strings, and texts= holds batches")
    firsts = (line.partition(". ")[0].strip(" .") + "." for line in subject.lines)
    sentences = [text for text in dict.fromkeys(firsts) if len(text.split()) > 3][:_SENTENCES]
    draw = random.Random(subject.seed)
    shuffled = minimal_pairs(
        random_shuffling(
            [plain_sentence(text, uid=str(number)) for number, text in enumerate(sentences)],
            seed=subject.seed,
            num_proc=1,
            progress=False,
        ),
        progress=False,
    )
    swapped = datasets.Dataset.from_dict(
        {"sentence_good": sentences, "sentence_bad": [_neighbours_swapped(text, draw) for text in sentences]}
    )
    rows = []

    def measure(model: str) -> None:
        for name, pairs in (("neighbours swapped", swapped), ("all words shuffled", shuffled)):
            result = evaluate_minimal_pairs(subject.model.with_head, subject.tokenizer, pairs, progress=False)
            frame = result.to_frame().iloc[0]
            rows.append({"model": model, "change": name, **frame[["score", "n", "accuracy", "low", "high"]].to_dict()})

    measure("as it is")
    why = ""
    try:
        with attach(subject.model.with_head, NoEncoding()):
            measure("without positions")
    except ValueError as error:
        why = f"There is no control without positions: {error}"
    accuracy = [row["accuracy"] for row in rows]
    found = f"The likelihood prefers the original to a swap of neighbours in {accuracy[0]:.0%} of sentences and to a "
    found += f"shuffle in {accuracy[1]:.0%}"
    if len(rows) > 2:
        found += f"; without positions in {accuracy[2]:.0%} and {accuracy[3]:.0%}"
    frame = pd.DataFrame(rows)
    changes = list(dict.fromkeys(frame["change"]))
    kinds = list(dict.fromkeys(frame["model"]))
    return Part(
        "How often the model finds the original sentence more likely than the changed one; 50 % is chance. The control "
        "is the same model with its positions off.",
        found + ".",
        "evaluate_minimal_pairs(model, tokenizer, pairs), and in `with attach(model, NoEncoding())`",
        table_of(frame),
        (
            Chart(
                "groups",
                "originals preferred",
                "",
                "share of sentences",
                changes,
                [frame.loc[frame["model"] == kind, "accuracy"].tolist() for kind in kinds],
                kinds,
            ),
        ),
        notes=(why,) if why else (),
    )


PARTS: dict[str, tuple[str, Callable[[Subject], Part]]] = {
    "positions": ("Which positions does the model run?", positions),
    "heads": ("How local and how symmetric is each head?", heads),
    "profiles": ("How does attention vary with distance?", profiles),
    "kernels": ("What do positions alone add to the logits?", kernels),
    "bands": ("Which frequencies of its rotations does the model use?", bands),
    "sinks": ("Where does attention rest?", sinks),
    "share": ("How much of the attention on text is position?", share),
    "classes": ("What is each head?", classes),
    "depth": ("What do all layers do together?", depth),
    "order": ("Does the model see the order of words?", order),
}


def _neighbours_swapped(text: str, draw: random.Random) -> str:
    """Return a sentence in which two words that stand side by side, and differ, have changed places."""
    words = text.split()
    places = [place for place in range(len(words) - 2) if words[place] != words[place + 1]] or [0]
    place = draw.choice(places)
    words[place : place + 2] = reversed(words[place : place + 2])
    return " ".join(words)


def _largest(values: Tensor) -> tuple[int, int]:
    """Return the place of the largest value of (layer, head)."""
    layer, head = divmod(int(values.nan_to_num(-torch.inf).argmax()), values.shape[1])
    return layer, head


def _some(chosen: Tensor) -> str:
    """Return how many heads are chosen, in words."""
    return f"{int(chosen.sum()) or 'none'} of {chosen.numel()} heads"


def _where(result: Any, layer: int, head: int) -> str:
    return f"layer {result.layers[layer]} head {head}"


def _peak(matrix: Tensor) -> int:
    """Return the distance, up to half the length away, with the largest mean attention of a matrix (n, n)."""
    half = max(1, matrix.shape[-1] // 2)
    means = [float(matrix.diagonal(k).mean()) for k in range(-half, half + 1)]
    return int(np.argmax(means)) - half


def _at(distance: int) -> str:
    if distance == 0:
        return "at the token itself"
    return f"{abs(distance)} token{'s' if abs(distance) > 1 else ''} {'ahead' if distance > 0 else 'back'}"


def _distance(distance: int) -> str:
    """Return where a head attends, such as "to the next token"."""
    near = {-1: "to the previous token", 0: "to the token itself", 1: "to the next token"}
    return near.get(distance, f"to the token {_at(distance)}")


def _own(result: AveragedAttention) -> list[float]:
    """Return the mean of the diagonal, layer by layer."""
    found: list[float] = result.attention.diagonal(dim1=-2, dim2=-1).mean((1, 2)).tolist()
    return found


def _ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def _readable(result: Callable[[], Any]) -> bool:
    try:
        result()
    except (TypeError, ValueError):
        return False
    return True


def _head_grid(layers: Sequence[int], values: Tensor, title: str) -> Chart:
    """Return the figure of a number per layer and head."""
    return Chart(
        "grid",
        title,
        "head",
        "layer",
        [str(head) for head in range(values.shape[1])],
        values.tolist(),
        [str(layer) for layer in layers],
    )


def _head_frame(layers: Sequence[int], **columns: Tensor) -> pd.DataFrame:
    """Return a table with a row per layer and head."""
    heads_number = next(iter(columns.values())).shape[1]
    index = pd.MultiIndex.from_product([layers, range(heads_number)], names=["layer", "head"])
    return pd.DataFrame({name: each.flatten().tolist() for name, each in columns.items()}, index).reset_index()


def _by_layer(result: AveragedAttention, on: str) -> dict[str, list[float]]:
    """Return metrics of the mean matrices by name, the mean over the heads of each layer."""
    names = _METRICS if result.positions is None else ["locality", "adjusted_locality"]
    frame = result.to_frame("layer", metrics=names)
    return {f"{on}: {name.replace('_', ' ')}": frame[f"{name}_of_mean"].tolist() for name in names}
