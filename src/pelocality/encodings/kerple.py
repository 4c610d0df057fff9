"""KERPLE: learned kernels of distance."""

from typing import Literal

import torch
from torch import Tensor, nn

from pelocality._checks import check_choice
from pelocality.encodings._checks import PerHead, per_head, positive
from pelocality.encodings.base_relative import RelativeEncoding


class KERPLE(RelativeEncoding):
    """A learned bias that decreases with distance, logarithmically or as a power.

        log:    bias_ij = -r_1 ln(1 + r_2 |i - j|),  r_1, r_2 > 0
        power:  bias_ij = -r_1 |i - j|^r_2,          r_1 > 0, 0 < r_2 < 2

    The encoding is that of Chi, Fan, Ramadge and Rudnicky (NeurIPS 2022). Their models have ``causal=True``. The bounds
    make the kernel conditionally positive definite. The bounds hold because ln r_1, ln r_2 and, for power,
    ln(r_2 / (2 - r_2)) are learned; the authors clamp instead.

    Args:
        heads: H.
        kernel: ``"log"`` or ``"power"``.
        strength: Initial r_1, a number or one per head.
        curvature: Initial r_2, a number or one per head. The authors draw both at random.
        causal: Whether the future gets -inf.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An unknown kernel, or a number outside its bounds.

    Note:
        The power kernel with r_2 = 1 is ALiBi with learned slopes.

    Examples:
        >>> KERPLE(heads=1, kernel="power", strength=0.5).relative(3).detach()
        tensor([[-1.0000, -0.5000, -0.0000, -0.5000, -1.0000]])
    """

    _per_head = ("strength", "curvature")

    def __init__(
        self,
        heads: int,
        kernel: Literal["log", "power"] = "log",
        strength: PerHead = 1.0,
        curvature: PerHead = 1.0,
        causal: bool = False,
    ) -> None:
        super().__init__(heads, causal)
        check_choice("kernel", kernel, ("log", "power"))
        self.kernel = kernel
        r_1, r_2 = per_head("strength", strength, heads), per_head("curvature", curvature, heads)
        if kernel == "power" and bool((r_2 >= 2).any()):
            raise ValueError(f"curvature of the power kernel must be below 2, got {curvature!r}")
        bounded = r_2.log() if kernel == "log" else (r_2 / 2).logit()
        self.log_strength = nn.Parameter(self._constant(r_1.log().expand(heads)))
        self.free_curvature = nn.Parameter(self._constant(bounded.expand(heads)))

    @property
    def strength(self) -> Tensor:
        """r_1 of every head, (heads,)."""
        return positive(self.log_strength.to(self.working_dtype))

    @property
    def curvature(self) -> Tensor:
        """r_2 of every head, (heads,)."""
        free = self.free_curvature.to(self.working_dtype)
        if self.kernel == "log":
            return positive(free)
        bounds = torch.finfo(torch.float32)
        return (2 * free.sigmoid()).clamp(bounds.tiny, 2 - bounds.eps)  # rounding may give the excluded bounds

    def at(self, distance: Tensor) -> Tensor:  # noqa: D102
        away = distance.abs()
        r_1, r_2 = (r.view(-1, *(1,) * distance.ndim) for r in (self.strength, self.curvature))
        # clamped to finite numbers: the gradient of infinity would be NaN
        most = torch.finfo(self.working_dtype).max
        if self.kernel == "log":
            growth = torch.log1p((r_2 * away).clamp(max=most))
        else:  # 0 ** r_2 is 0, but its gradient for r_2 is NaN
            growth = torch.where(away == 0, 0, torch.where(away == 0, 1, away) ** r_2)
        return (-r_1 * growth).clamp(min=-most)
