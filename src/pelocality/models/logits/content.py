"""The mean queries and keys of texts or words, and their logits at any distance without an n x n matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pelocality._toeplitz import diagonals
from pelocality.models._weights import loaded
from pelocality.models.logits.terms import captured_inputs, queries_and_keys
from pelocality.models.sequence_model import SequenceModel

Taken = TypeVar("Taken")


@dataclass(frozen=True, eq=False)
class Content:
    """Queries and keys before any rotation, averaged over the tokens of each text or word.

    Attributes:
        queries: (sample, layer, head, d_head).
        keys: (sample, layer, head, d_head), those that each head reads.
        tokens: The number of tokens of each sample, (sample,).
    """

    queries: Tensor
    keys: Tensor
    tokens: Tensor

    def mean(self) -> Content:
        """Return the mean over all tokens as one sample."""
        weights = self.tokens.to(self.queries) / self.tokens.sum()
        query, key = (torch.einsum("s,slhd->lhd", weights, each)[None] for each in (self.queries, self.keys))
        return Content(query, key, self.tokens.sum()[None])

    def without(self, sample: int) -> Content:
        """Return all samples but one."""
        rest = torch.arange(len(self.tokens), device=self.tokens.device) != sample
        return Content(self.queries[rest], self.keys[rest], self.tokens[rest])


def mean_content(
    model: SequenceModel,
    batches: Iterable[tuple[Any, Tensor | None]],
    layers: Sequence[int],
    *,
    constant: bool = False,
) -> Content:
    """Run a model on batches, and return the mean queries and keys of each text in these layers.

    Args:
        model: A model of a known family.
        batches: Inputs, and the tokens to average over, (batch, n); texts without any are left out.
        layers: Indices of layers.
        constant: Check that every token has the same queries and keys.

    Raises:
        ValueError: Queries and keys that differ between tokens but should not, quantised weights, or no text.
    """
    device = model.device

    def means(layer: int, both: Tensor, kept: Tensor) -> Tensor:
        spread = float((both - both[..., :1, :]).abs().max() / both.abs().max()) if constant else 0
        if spread > (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
            raise ValueError(f"a repeated word has other queries and keys at other positions of {model}; pass texts")
        return (both.sum(-2) / kept.sum(-1)[:, None, None].clamp(min=1)).to(device)

    by_batch = [(torch.stack(of_layers, 2), each) for of_layers, each in by_layer(model, batches, layers, means)]
    tokens = torch.cat([included.sum(1).to(device) for _, included in by_batch])
    queries, keys = torch.cat([both for both, _ in by_batch], 1)[:, tokens > 0]  # (sample, layer, head, d_head) each
    return Content(queries, keys, tokens[tokens > 0])


def by_layer(
    model: SequenceModel,
    batches: Iterable[tuple[Any, Tensor | None]],
    layers: Sequence[int],
    take: Callable[[int, Tensor, Tensor], Taken],
) -> Iterator[tuple[list[Taken], Tensor]]:
    """Run a model on batches, and yield for each what a function takes of these layers, and the tokens included.

    Args:
        model: A model of a known family.
        batches: Inputs, and the tokens that count, (batch, n).
        layers: Indices of layers.
        take: Called with the layer, its queries and keys before rotation (2, batch, head, n, d_head), zero at tokens
            that do not count, and the tokens that count.

    Raises:
        ValueError: Quantised weights, no token, or a model that reads no token ids.
    """
    modules: list[Any] = model.family.attention_layers(model.module)

    def take_requested(layer: int, hidden: Tensor) -> Taken | None:
        if layer not in layers:
            return None
        with loaded(model.module, [modules[layer]]):
            both = torch.stack(queries_and_keys(model, modules[layer], hidden))
        kept = real.to(both.device)
        return take(layer, both.masked_fill(~kept[:, None, :, None], 0.0), kept)  # padding may hold NaN

    tokens = 0
    for inputs, included in batches:
        if included is None:
            raise ValueError(f"texts hold token ids, but {model} reads other inputs; pass the bare model")
        real, tokens = included, tokens + int(included.sum())
        with captured_inputs(model, take_requested) as taken:
            model.run(inputs)
        yield [taken[layer] for layer in layers], included
    if not tokens:
        raise ValueError("texts hold no token to average over (a generator can be read only once)")


@dataclass(frozen=True, eq=False)
class ByDistance:
    r"""The logits of one layer as a function of distance, for a query and a key of any content.

    $$b_k = s \left(q^\top \rho_k \kappa + q^\top R_k + S_k^\top \kappa\right) + c_k$$

    with the terms of ``KnownLogits``: the query $q$ stands at $i$, the key $\kappa$ at $j = i + k$, and $\rho_k$
    rotates by the angles of position $k$. Content against content is left out where it is not rotated, as it is the
    same number at every distance.

    Attributes:
        scaling: $s$.
        cos: Cosines of positions 0..n-1, (n, d_head / 2), None without rotations.
        sin: Their sines.
        keys: $R$, (head, 2n - 1, d_head), or None.
        queries: $S$, (head, 2n - 1, d_head), or None.
        bias: $c$, (head, 2n - 1), or None.
    """

    scaling: float
    cos: Tensor | None
    sin: Tensor | None
    keys: Tensor | None
    queries: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, model: SequenceModel, module: Any, length: int, other: ByDistance | None = None) -> ByDistance:
        """Read them from a layer; a rotation that equals the one of another layer is held once."""
        family, base = model.family, model.module
        device, dtype = model.device, torch.promote_types(model.dtype, torch.float32)

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, dtype)

        with loaded(base, [module]):
            cos, sin = map(moved, family.rotation(base, module, length) or (None, None))
            if cos is not None and other is not None and other.cos is not None and torch.equal(cos, other.cos):
                cos, sin = other.cos, other.sin
            terms = (family.relative_keys, family.relative_queries, family.relative_bias)
            return cls(family.scaling(module), cos, sin, *(moved(term(base, module, length)) for term in terms))

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mean over samples of the logits, (sample, head, d_head) each -> (head, 2n - 1)."""
        logits = query.new_zeros(())
        if self.cos is not None and self.sin is not None:
            (q, q_other), (k, k_other) = query.chunk(2, -1), key.chunk(2, -1)
            # The one at position 0 is not rotated, but scaled like all others (YaRN, LongRoPE).
            even = self.cos[0] * (q * k + q_other * k_other).mean(0) @ self.cos.T  # (head, n)
            odd = self.cos[0] * (q_other * k - q * k_other).mean(0) @ self.sin.T
            logits = diagonals(even - odd, even + odd)
        if self.keys is not None:
            logits = logits + torch.einsum("hd,hkd->hk", query.mean(0), self.keys)
        if self.queries is not None:
            logits = logits + torch.einsum("hd,hkd->hk", key.mean(0), self.queries)
        logits = self.scaling * logits
        return logits if self.bias is None else logits + self.bias
