"""Attention over depth: the product of all layers up to each, with residual connections."""

from dataclasses import dataclass, replace

import torch

from pelocality._checks import number
from pelocality.models.measuring.result import AveragedAttention


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(AveragedAttention):
    """The rollout of attention, with one head; see `AveragedAttention` for what it holds. It has no ``per_sample``."""

    def _samples(self) -> str:
        return f"product of mean attention with residual weight {self.source.residual:g}"


def rollout(result: AveragedAttention, residual: float = 0.5) -> Rollout:
    r"""Return the product of the attention of all layers up to each layer, with residual connections.

    $$R^l = \left((1 - r) \bar A^l + r I\right) R^{l-1}, \qquad R^{-1} = I$$

    with $\bar A^l$ the mean over the heads of layer $l$ and $r$ the weight of the residual connection, 0.5 as Abnar and
    Zuidema (ACL 2020) have it. Row $i$ says from which tokens the hidden state at $i$ is mixed, as far as attention
    tells: values, heads of different weight and feed-forward layers do not count; `influence` is the measure for all of
    these.

    In causal models every path ends at the first token (Wu et al., 2025), and residual connections hold on to the last
    ones: over few layers, or with a large residual weight, a row has the shape of a U (Herasimchyk et al., 2026). Over
    many layers with sinks all of it is on the first token: in SmolLM2, 30 layers, with the default weight.

    Args:
        result: A result of ``positional_attention`` or ``text_average`` with the attention of all layers, or of the
            first ones.
        residual: The weight of the residual connections, from 0 (attention alone) to 1 (no attention).

    Returns:
        A `Rollout`, whose ``attention`` (layer, 1, n, n) has rows that sum to 1. It is the rollout of the mean over
        texts, not the mean of their rollouts, and so has no intervals.

    Raises:
        TypeError: A residual that is not a number.
        ValueError: A result without the attention of some layer below the last one, one of influence or of a rollout,
            which are over depth already, or a residual outside [0, 1].

    Examples:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from pelocality import positional_attention
        >>> gpt2 = GPT2Model(GPT2Config(vocab_size=99, n_embd=16, n_layer=3, n_head=2, n_positions=16))
        >>> depth = rollout(positional_attention(gpt2, length=16, words=4))
        >>> depth.attention.shape
        torch.Size([3, 1, 16, 16])
        >>> last = depth.attention[-1, 0, -1]  # what the last query draws from each position
        >>> bool(last[0] > last[7] < last[-1])
        True
    """
    share = number("residual", residual)
    if not 0 <= share <= 1:
        raise ValueError(f"residual must be between 0 and 1, such as 0.5, got {residual}")
    if result.source.directions or result.source.residual is not None:
        raise ValueError("result is over depth already: an influence or a rollout; give the attention of all layers")
    if result.other_layers or list(result.layers) != list(range(len(result.layers))):
        raise ValueError(f"result must hold all layers from 0 on, got {list(result.layers)}; or use influence")
    mean = result.attention.mean(1)  # (layer, n, n)
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    visible = mean > 0 if result.visible is None else result.visible.to(mean.device)
    product, seen = [identity], [identity]
    for layer, sees in zip(mean, visible, strict=True):
        product.append(((1 - share) * layer + share * identity) @ product[-1])
        seen.append((((sees + identity) @ seen[-1]) > 0).to(mean))
    every, source = torch.stack(seen[1:]) > 0, replace(result.source, residual=share)
    keys, attention = None if bool(every.all()) else every, torch.stack(product[1:])[:, None]
    return Rollout(attention, {}, result.layers, source, keys, positions=result.positions)
