"""Which frequencies of its rotations each head of a model uses on text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from pelocality.models._inference import depend_on_length
from pelocality.models._weights import loaded
from pelocality.models.inputs.batches import TextBatches
from pelocality.models.layers import requested_layers
from pelocality.models.logits.content import by_layer
from pelocality.models.logits.terms import known_logits, rotated
from pelocality.models.rotations import read_rotations
from pelocality.models.sequence_model import SequenceModel

_MASSIVE = 5.0  # times the mean norm of a head's dimensions (Jin et al., 2025)


@dataclass(frozen=True, eq=False, repr=False)
class RotaryBands:
    """What each head does with each band: a pair of dimensions that rotates at one frequency, fastest first.

    Attributes:
        wavelength: Tokens in which a band turns once, (layer, band), 2 or more; infinite if a band does not rotate.
        query_norm: Mean norm of the two dimensions of queries, (layer, head, band).
        key_norm: The same for keys.
        use: Share of each band in the sum over bands of ``query_norm`` times ``key_norm``, (layer, head, band).
        variance: Share of each band in the variance of the logits over keys, (layer, head, band); below 0 if a band
            reduces the variance of the other bands.
        massive_queries: Whether one of the two dimensions of queries has a massive value, (layer, head, band).
        massive_keys: The same for keys.
        axis: The coordinate that turns each band, (layer, band): 0 on a line; in a model of images and text 0 for time
            and text, 1 for the row, 2 for the column of a patch, and the wavelength is along this axis, in frames,
            tokens or patches; -1 if a band does not rotate.
        layers: The model's layer numbers along the first axis.
        texts: The number of texts.
    """

    wavelength: Tensor
    query_norm: Tensor
    key_norm: Tensor
    use: Tensor
    variance: Tensor
    massive_queries: Tensor
    massive_keys: Tensor
    axis: Tensor
    layers: tuple[int, ...]
    texts: int

    def to_frame(self) -> pd.DataFrame:
        """Return the numbers as a table, with a row for each layer, head and band."""
        _, heads, bands = self.use.shape
        index = pd.MultiIndex.from_product([self.layers, range(heads), range(bands)], names=["layer", "head", "band"])
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        columns |= {name: columns[name][:, None].expand_as(self.use) for name in ("wavelength", "axis")}
        return pd.DataFrame({name: each.flatten().tolist() for name, each in columns.items()}, index).reset_index()

    def __repr__(self) -> str:
        layers, heads, bands = self.use.shape
        return f"RotaryBands({layers} layers x {heads} heads x {bands} bands, {self.texts} texts)"


def rotary_bands(
    model: nn.Module | SequenceModel,
    tokenizer: Any,
    texts: Iterable[Any],
    *,
    special_tokens: bool = False,
    without_first: int = 0,
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> RotaryBands:
    r"""Return which frequencies of its rotations each head uses on texts.

    Let $q_f$ and $k_f$ be the two dimensions of band $f$, which rotate by $\omega_f$ radians a token.

    - The wavelength is $2 \pi / |\omega_f|$ tokens, with the angle $\omega_f$ from one token to the next between
      $-\pi$ and $\pi$. At whole positions, a full turn more is the same rotation. If the wavelength depends on the
      length, it is that of the first text's length.
    - Norms are means of $\lVert q_f \rVert$ and $\lVert k_f \rVert$ over all tokens. The use of a band is
      $\overline{\lVert q_f \rVert} \, \overline{\lVert k_f \rVert}$ divided by the sum over bands (Barbero et al.,
      2025, compare norms in this way). It bounds what the band can add to the logits.
    - The share of the variance is what the band does add. A logit is a sum over bands,
      $\ell_{ij} = \sum_f \ell^f_{ij}$. The share is
      $\overline{\operatorname{cov}_j(\ell^f_{ij}, \ell_{ij})} / \overline{\operatorname{var}_j(\ell_{ij})}$,
      means over the queries of all texts, over all keys of the query's text. This definition is ours. The mask is
      ignored. A number that is the same for all keys of a query does not count, because the softmax does not depend on
      it.
    - A value is massive if the norm of its dimension over all tokens exceeds 5 times the mean over the dimensions of
      its head (Jin et al., 2025).

    In trained decoders, slow bands have most of the use and hardly depend on position. Fast bands make heads local.

    Args:
        model: A transformers model of a known family with rotations, with or without a head.
        tokenizer: Its tokenizer, for strings and special tokens; None for batches as `text_average` accepts them.
        texts: Strings or tokenised batches, read whole. Equal texts count once.
        special_tokens: Include special tokens like any other token.
        without_first: Leave out this many of the first included tokens of each text.
        layers: Layers to return, by index; by default all.
        batch_size: Texts per forward pass.
        progress: Show a progress bar on runs that take longer than a few seconds.

    Returns:
        `RotaryBands`. Dimensions that do not rotate are the last bands, with an infinite wavelength.

    Raises:
        TypeError: Something that is not a transformers model, or texts that are not a list of texts.
        ValueError: A model without rotations, or as `positional_logits`.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> llama = LlamaModel(LlamaConfig(vocab_size=9, **size))
        >>> bands = rotary_bands(llama, None, [{"input_ids": [[3, 1, 4, 1, 5]]}], special_tokens=True)
        >>> bands
        RotaryBands(2 layers x 2 heads x 2 bands, 1 texts)
        >>> bands.wavelength[0]
        tensor([  6.2832, 628.3185])
    """
    model = SequenceModel.of(model)
    family, base = known_logits(model), model.module
    modules: list[Any] = family.attention_layers(base)
    with model.inference():
        if family.rotation(base, modules[0], 1) is None:
            raise ValueError(f"{model} does not rotate queries and keys; use positional_logits")
        chosen = requested_layers(layers, range(len(modules)), len(modules), "with a rotation")
        device, angles, lengths = model.device, dict[int, Tensor](), list[int]()

        def take(layer: int, both: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
            """Return sums over tokens: norms (2, head, band), squares (2, head, 2, band), covariance (head, band)."""
            lengths.append(max(2, both.shape[-2]))
            with loaded(base, [modules[layer]]):
                rotation: Any = family.rotation(base, modules[layer], lengths[-1])
            cos, sin = (each.to(both) for each in rotation)
            angles.setdefault(layer, torch.atan2(sin[1], cos[1]).abs().to(device))  # from one token to the next
            query, key = rotated(both, cos[: both.shape[-2]], sin[: both.shape[-2]])
            tokens = kept.sum(-1)[:, None, None, None].clamp(min=1)
            key = (key - key.sum(-2, keepdim=True) / tokens).masked_fill(~kept[:, None, :, None], 0.0)
            scatter = (query.mT @ query) * (key.mT @ key) / tokens  # (batch, head, d_head, d_head)
            pairs = torch.stack(both.chunk(2, -1), -2)  # (2, batch, head, n, 2, band)
            covariance = torch.stack(scatter.sum((0, -1)).chunk(2, -1)).sum(0)
            sums = pairs.norm(dim=-2).sum((1, 3)), pairs.square().sum((1, 3)), covariance
            return tuple(each.to(device) for each in sums)

        batches = TextBatches(model, texts, tokenizer, special_tokens, without_first, batch_size, progress)
        tokens, texts_read = 0, 0
        sums: list[Any] = [0, 0, 0]
        for taken, included in by_layer(model, batches, chosen, take):
            sums = [total + torch.stack(each) for total, each in zip(sums, zip(*taken, strict=True), strict=True)]
            tokens, texts_read = tokens + int(included.sum()), texts_read + int(included.any(1).sum())
    norms, squares, covariance = sums  # (layer, 2, head, band), (layer, 2, head, 2, band), (layer, head, band)
    sizes = squares.sqrt()
    massive = (sizes > _MASSIVE * sizes.mean((-2, -1), keepdim=True)).any(-2)  # (layer, 2, head, band)
    use, variance = (each / each.sum(-1, keepdim=True) for each in (norms.prod(1), covariance))
    wavelength = 2 * torch.pi / torch.stack([angles[layer] for layer in chosen])
    query_norm, key_norm, massive_queries, massive_keys = (norms / tokens).unbind(1) + massive.unbind(1)
    of_heads = (query_norm, key_norm, use, variance, massive_queries, massive_keys)
    read = read_rotations(model, lengths[0] if depend_on_length(base) else None)
    found = {call.owner: each.axis for call, each in read if each is not None}
    axes = [found.get(modules[layer], torch.empty(0, dtype=torch.long)) for layer in chosen]
    axis = torch.stack([nn.functional.pad(each, (0, wavelength.shape[1] - len(each)), value=-1) for each in axes])
    return RotaryBands(wavelength, *of_heads, axis.to(device), chosen, texts_read)
