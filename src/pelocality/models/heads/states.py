"""The share of position in hidden states, and how many directions it takes."""

import torch
from torch import Tensor


class StateSums:
    """Sums of hidden states over texts, by layer and position."""

    def __init__(self) -> None:
        self.total = torch.zeros(0)  # (layer, n, d)
        self.squares = torch.zeros(0)  # (layer, n)
        self.counts = torch.zeros(0)  # (n,)

    def add(self, states: Tensor, included: Tensor) -> None:
        """Add hidden states (layer, batch, n, d) at the included tokens (batch, n)."""
        if not self.counts.numel():
            self.total = states.new_zeros(len(states), 0, states.shape[-1])
            self.squares, self.counts = states.new_zeros(len(states), 0), states.new_zeros(0)
        more = max(0, included.shape[1] - len(self.counts))
        self.total = torch.nn.functional.pad(self.total, (0, 0, 0, more))
        self.squares, self.counts = (torch.nn.functional.pad(each, (0, more)) for each in (self.squares, self.counts))
        n, states = included.shape[1], states * included[..., None]
        self.total[:, :n] += states.sum(1)
        self.squares[:, :n] += states.square().sum((1, -1))
        self.counts[:n] += included.sum(0)

    def share_and_rank(self) -> tuple[Tensor, Tensor]:
        r"""Return the share of position and the effective rank of its mean states, (layer,) each.

        With $\hat{p}_t$ the mean over texts of the states at position $t$, and $W$ their variance within positions,
        both summed over dimensions, the variance over $T$ positions is

        $$P = \frac{1}{T - 1} \sum_t \lVert \hat{p}_t - \bar{p} \rVert^2 - \frac{W}{T} \sum_t \frac{1}{N_t}$$

        where the last term is what the means of $N_t$ texts differ by anyway; the share is $P / (P + W)$. The effective
        rank is the exponential of the entropy of the singular values of $\hat{p}_t - \bar{p}$, divided by their sum.
        """
        if not self.counts.numel():
            return torch.zeros(0), torch.zeros(0)
        several = self.counts > 1
        counts, total, squares = self.counts[several], self.total[:, several], self.squares[:, several]
        if len(counts) < 2:
            return (torch.full((len(self.total),), torch.nan),) * 2
        mean = total / counts[:, None]
        within = (squares - counts * mean.square().sum(-1)).sum(-1) / (counts - 1).sum()
        centred = mean - mean.mean(1, keepdim=True)
        position = centred.square().sum((1, 2)) / (len(counts) - 1) - within * (1 / counts).mean()
        values = torch.linalg.svdvals(centred)
        values = values / values.sum(-1, keepdim=True)
        return position / (position + within), torch.special.entr(values).sum(-1).exp()
