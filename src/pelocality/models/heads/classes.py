"""What each head is: scores for the classes of heads that the field uses, each with a control."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from pelocality._checks import check_choice, count, number
from pelocality.models.heads.sums import FEWEST_TOKENS, HeadSums, in_batches, random_tokens
from pelocality.models.heads.weights import weight_scores
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.layers import AttentionLayers
from pelocality.models.measuring.provenance import Provenance, provenance
from pelocality.models.measuring.result import interval_of
from pelocality.models.measuring.samples import hides_future
from pelocality.models.measuring.text_averages import SINK
from pelocality.models.sequence_model import SequenceModel

CLASSES = ("previous", "self", "next", "offset", "duplicate", "induction", "sink", "other")


@dataclass(frozen=True, eq=False, repr=False)
class HeadClasses:
    """Scores of each head, as `head_classes` defines them.

    Attributes:
        scores: By name, (layer, head) each.
        per_sample: Scores that are means over texts or random sequences, for each sample, (sample, layer, head).
        position_share: Share of position in the hidden states, (depth + 1,): those that each layer reads, and the
            output. NaN if the model returns none.
        effective_rank: Effective rank of their means at each position, (depth + 1,).
        layers: The model's layer numbers along the first axis of scores.
        source: The model, the number of texts, the seed and versions.
        notes: What is NaN, and why.
    """

    scores: Mapping[str, Tensor]
    per_sample: Mapping[str, Tensor]
    position_share: Tensor
    effective_rank: Tensor
    layers: tuple[int, ...]
    source: Provenance
    notes: tuple[str, ...] = ()

    def classes(self, threshold: float = SINK) -> list[list[str]]:
        """Return the class of each head, by layer.

        A head has the class with the largest score. Scores are its mean attention to the previous, the same or the next
        token, to another distance (offset), or to duplicate and induction targets minus the control. If the largest
        score is below the threshold, a head whose attention to sinks reaches the threshold is a sink, because heads
        that find nothing attend to sinks. All other heads are "other".

        Args:
            threshold: The smallest score of a class; a convention.

        Raises:
            TypeError: A threshold that is not a number.
        """
        threshold = number("threshold", threshold)
        far = self.scores["offset"].abs() > 1
        near, offset = [self.scores[name] for name in CLASSES[:3]], self.scores["offset_weight"].where(far, torch.nan)
        copies = [self.scores[name] - self.scores[f"{name}_control"] for name in CLASSES[4:6]]
        candidates = torch.stack([*near, offset, *copies]).nan_to_num(-1.0)
        best = torch.where(candidates.amax(0) >= threshold, candidates.argmax(0), len(CLASSES) - 1)
        rests = (best == len(CLASSES) - 1) & (self.scores["sink"] >= threshold)
        return [[CLASSES[each] for each in row] for row in best.masked_fill(rests, len(CLASSES) - 2).tolist()]

    def interval(self, score: str, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the t interval of a score over texts or random sequences, (layer, head) each.

        Raises:
            ValueError: A score that is not in ``per_sample``, or a confidence outside (0, 1).
        """
        check_choice("score", score, self.per_sample)
        return interval_of(self.per_sample[score], confidence)

    def to_frame(self, by: Literal["head", "layer"] = "head") -> pd.DataFrame:
        """Return the numbers as a table.

        Args:
            by: "head" for a row per layer and head, with their scores and class. "layer" for a row per layer, with the
                number of heads of each class, and the position share and effective rank of the states that the layer
                reads. The last row is then the output of the last layer.

        Raises:
            ValueError: Another ``by``.
        """
        check_choice("by", by, ("head", "layer"))
        classes = self.classes()
        if by == "head":
            index = pd.MultiIndex.from_product([self.layers, range(len(classes[0]))], names=["layer", "head"])
            frame = pd.DataFrame({name: each.flatten().tolist() for name, each in self.scores.items()}, index)
            return frame.assign(**{"class": [each for row in classes for each in row]}).reset_index()
        depth = max(len(self.position_share), max(self.layers) + 1)
        frame = pd.DataFrame(0, pd.Index(range(depth), name="layer"), CLASSES)
        for layer, row in zip(self.layers, classes, strict=True):
            frame.loc[layer] = [row.count(name) for name in CLASSES]
        for name in ("position_share", "effective_rank"):
            frame[name] = pd.Series(getattr(self, name).tolist(), dtype=float)
        return frame.reset_index()

    def __repr__(self) -> str:
        layers, heads = self.scores["sink"].shape
        return f"HeadClasses({self.source.model}: {layers} layers x {heads} heads, {self.source.texts} texts)"


def head_classes(
    model: nn.Module | SequenceModel,
    tokenizer: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    length: int = 64,
    sequences: int = 16,
    permutations: int = 4,
    special_tokens: bool = False,
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> HeadClasses:
    r"""Return what each head does: scores for the usual classes of heads, each with a control.

    These scores measure attention $A_{ij}$ on texts. Queries and keys are tokens of the text, without the first token
    as key:

    - ``previous``, ``self``, ``next``: the mean of $A_{i,i-1}$, $A_{ii}$, $A_{i,i+1}$ (Clark et al., 2019; Voita et
      al., 2019). ``offset`` is the distance $k = j - i$ of the largest mean, up to half of ``length`` away, and
      ``offset_weight`` that mean.
      In texts with images, $k$ is the distance on every axis of their positions.
    - ``sink``: the attention to the first token, to special tokens and to learned sinks (Xiao et al., 2023; Clark et
      al., 2019, for [SEP]). ``sink_control`` is what uniform attention gives them.
    - ``positional`` and ``symbolic``: does attention stay at its place, or follow the tokens, when the tokens around a
      query are permuted? (In a causal model, only the tokens before the query are permuted.) Let $a_j$ be the attention
      of that query before, $a'_j$ after, and $\pi(j)$ the new place of token $j$. The scores are the correlations over
      keys of $a'_j$ and of $a'_{\pi(j)}$ with $a_j$, in sums over texts. A score is 1 if all attention does so, about 0
      if none does, and NaN for uniform attention. The query is the last token of a causal model, otherwise the middle
      token. The first and special tokens keep their places and do not count. Texts with images are not permuted.

      Urrutia et al. (2025) define both behaviours by the invariance of logits when the vectors that reach a head are
      permuted. As in their definition, only uniform attention has both behaviours in full. Two things differ here.
      Tokens are permuted before the first layer, so any model can be measured, and a head reads what the layers below
      make of the new order. And attention is compared, not logits.

    These scores measure random tokens $r_1 \ldots r_h\, r_1 \ldots r_h$. Queries are the tokens of the second half
    without its first token, which may repeat a sink:

    - ``duplicate``: the mean attention to the same token, $A_{i,i-h}$ (Elhage et al., 2021; Wang et al., 2022).
    - ``induction``: the mean attention to the token after it, $A_{i,i-h+1}$ (Olsson et al., 2022).
    - ``duplicate_control``, ``induction_control``: the attention at the same distances if the second half has other
      tokens. This is what a head gives to a distance alone.

    These scores measure the weights of known families, with $M = W_q W_k^\top$ of a head, without biases and rotations
    (Saponati et al., 2025, use the product of all heads of a layer together):

    - ``symmetry``: $(\lVert M_s \rVert^2 - \lVert M_n \rVert^2) / \lVert M \rVert^2$ with the symmetric and the
      antisymmetric part: 1 for a symmetric matrix, -1 for an antisymmetric matrix, near 0 for a random matrix.
    - ``direction``: -1 if rows of $M$ (queries) have the outlying norms, 1 if columns (keys) have them.

    Two numbers measure the hidden states on the texts, without first tokens (Song and Zhong, 2023). ``position_share``
    is the share of their variance that the mean state of each position explains, without what chance explains.
    ``effective_rank`` is the exponential of the entropy of the singular values of these means (Roy and Vetterli, 2007).
    With few texts, noise raises this rank.

    A surprise: on text, most heads of a trained decoder attend to the first token. Such a head can be an induction head
    on repeated tokens. So `HeadClasses.classes` tests for a sink last.

    Args:
        model: A transformers model that reads token ids, with or without a head, or a `SequenceModel` of one.
        tokenizer: Its tokenizer, for strings and special tokens, which it also puts around random tokens.
        texts: Strings or tokenised batches, as for `text_average`; None: the random tokens without repetition.
        length: How many tokens of each text are measured, and the number of random tokens without special tokens.
        sequences: The number of random sequences.
        permutations: How often each text is permuted.
        special_tokens: Include special tokens of texts like any other token.
        layers: Layers to return, by index; by default all that have attention.
        batch_size: Texts and random sequences per forward pass.
        seed: Draws random tokens and permutations.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        `HeadClasses`, on the CPU. Memory hardly depends on the number of texts: each adds a few numbers per head.

    Raises:
        TypeError: As `text_average`.
        ValueError: A model that reads no token ids, a vocabulary of fewer than ``length`` different tokens, texts that
            all have fewer than four tokens, or as `text_average`.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> result = head_classes(LlamaModel(LlamaConfig(vocab_size=99, **size)), length=16)
        >>> result
        HeadClasses(LlamaModel: 2 layers x 2 heads, 16 texts)
        >>> result.scores["induction"].shape, result.scores["next"].isnan().all()
        (torch.Size([2, 2]), tensor(True))
    """
    model = SequenceModel.of(model)
    count("length", length, least=8)
    count("seed", seed, least=0)
    for name, value in (("sequences", sequences), ("permutations", permutations), ("batch_size", batch_size)):
        count(name, value)
    plain, repeated = random_tokens(model, tokenizer, length, sequences, seed)
    texts = in_batches(plain, batch_size) if texts is None else texts
    batches = TextBatches(model, texts, tokenizer, special_tokens, 0, batch_size, progress)
    with model.inference():
        attending = AttentionLayers(model, {"input_ids": plain["input_ids"][:1]}, layers=layers)
        heads = HeadSums(model, attending, attending.requested, length)
        for name, rows in (("_control", plain), ("", repeated)):
            for inputs in in_batches(rows, batch_size):
                heads.add_random(inputs, name)
        for inputs, included in batches:
            assert included is not None  # the model reads token ids
            heads.add_texts(inputs, included, permutations, seed)
        if not heads.texts:
            raise ValueError(f"texts hold none of at least {FEWEST_TOKENS} tokens (a generator can be read only once)")
        weights, why = weight_scores(model)
    if weights.shape[1:] != (len(attending.layers), attending.heads):
        why = why or "the layers that attend are others than those of its family"
        weights = torch.full((2, len(attending.layers), attending.heads), torch.nan)
    notes = [f"symmetry and direction are NaN where weights are not known: {why}"] if why else []
    if not heads.permuted:
        notes.append("positional and symbolic are NaN: texts with images are not permuted")
    if not heads.states.sums:
        notes.append(f"position share and effective rank are NaN: {model} returns no hidden states")
    per_sample = {name: torch.cat(each) for name, each in heads.per_sample.items()}
    scores = {name: each.mean(0) for name, each in per_sample.items()} | heads.offsets() | heads.correlations()
    scores["symmetry"], scores["direction"] = weights[:, [attending.layers.index(layer) for layer in heads.layers]]
    more = {"special_tokens": special_tokens, "texts": heads.texts, "repeated": batches.repeated, "seed": seed}
    source = provenance(model, attending, causal=hides_future(heads.visible), **more)
    return HeadClasses(scores, per_sample, *heads.states.share_and_rank(), heads.layers, source, tuple(notes))
