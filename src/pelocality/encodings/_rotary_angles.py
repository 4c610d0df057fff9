"""The angles of rotary embeddings and of their scalings for long inputs, by the published formulas."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SCALINGS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True)
class RotaryAngles:
    """The angles of rotary embeddings (Su et al., 2021).

    Attributes:
        dims: The number of rotated dimensions.
        base: The base of the geometric series of frequencies.
        scaling: One of ``SCALINGS``.
        options: The options of the scaling.
        trained: The length from which the scaling starts or to which it refers.
    """

    dims: int
    base: float = 10_000.0
    scaling: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    trained: int = 0

    def frequencies(self, length: int = 0) -> Tensor:
        """Return radians per position (dims / 2,), of a sequence of this length."""
        base, dims, options = self.base, self.dims, self.options
        if self.scaling == "dynamic":  # NTK-aware, by the length of the sequence (emozilla, 2023)
            over = max(length, self.trained) / self.trained
            base *= (options["factor"] * over - (options["factor"] - 1)) ** (dims / (dims - 2))
        plain: Tensor = base ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)
        if self.scaling == "linear":  # Chen et al., 2023
            return plain / float(options["factor"])
        if self.scaling == "longrope":  # Ding et al., 2024
            name = "long_factor" if length > self.trained else "short_factor"
            return plain / torch.tensor(options[name], dtype=torch.float64, device="cpu")
        if self.scaling == "proportional":  # Gemma 4: frequencies of the whole head, zero for the slowest
            plain[int(options.get("partial_rotary_factor", 1.0) * dims // 2) :] = 0
            return plain / float(options.get("factor", 1.0))
        if self.scaling == "yarn":  # Peng et al., 2023: between pairs of dimensions with these numbers of rotations
            rotations = (options.get("beta_fast") or 32, options.get("beta_slow") or 1)
            slowest = (self.trained / (2 * math.pi * number) for number in rotations)
            kept, divided = (dims * math.log(each) / (2 * math.log(base)) for each in slowest)
            if options.get("truncate", True):
                kept, divided = math.floor(kept), math.ceil(divided)
            place, kept, divided = torch.arange(dims // 2, device="cpu"), max(kept, 0), min(divided, dims - 1)
        elif self.scaling == "llama3":  # Grattafiori et al., 2024: between numbers of rotations
            place = self.trained * plain / (2 * math.pi)
            kept, divided = options["high_freq_factor"], options["low_freq_factor"]
        else:
            return plain
        share = ((place - kept) / (divided - kept or 0.001)).clamp(0, 1)
        return plain * (1 - share) + plain / self._factor * share

    @property
    def _factor(self) -> float:
        """How many times longer sequences are than in training."""
        factor = self.options.get("factor")
        return float(self.options["max_position_embeddings"] / self.trained if factor is None else factor)

    @property
    def attention_factor(self) -> float:
        """The factor on cosines and sines."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if (factor := self.options.get("attention_factor")) is not None:
            return float(factor)
        if self._factor <= 1:
            return 1.0
        if self.scaling == "longrope":
            return math.sqrt(1 + math.log(self._factor) / math.log(self.trained))
        scales: Any = self.options.get("mscale"), self.options.get("mscale_all_dim")
        above, below = (0.1 * scale * math.log(self._factor) + 1 for scale in (scales if all(scales) else (1, 0)))
        return float(above / below)
