"""Rotary positions (RoPE) as an encoding: frequencies that can be scaled, taken out and learned."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pelocality._checks import WITHOUT_FLOAT64, count, flag, number, on_float64_device
from pelocality._transforms import transformed
from pelocality.encodings._checks import PerHead, per_head
from pelocality.encodings._frequencies import (
    checked_frequencies,
    checked_scaling,
    published_frequencies,
    rotations_of,
)
from pelocality.encodings.base import cast, check_lengths
from pelocality.encodings.base_content import ContentEncoding

Frequencies = Tensor | Sequence[float] | Sequence[Sequence[float]]


class RotaryEncoding(ContentEncoding):
    r"""Queries and keys rotated by angles that grow with their position, so that logits depend on distance.

        q_i k_j = sum_f Re[conj(q_if) k_jf e^(-i w_f (i - j))],  w_f = base^(-2f/dim),  f = 0..dim/2 - 1

    This is RoPE (Su et al., 2021). A pair of dimensions, a *band*, is one complex number q_f with a wavelength of
    2 pi / w_f tokens. The frequencies w are free. `scaled` multiplies all angles, `without` stops bands, and `rebased`
    changes the base; each returns a new encoding. ``attach(model, encoding)`` puts the frequencies into a rotary model.

    Args:
        dim: The number of dimensions that are rotated, even. Further dimensions of queries and keys do not change
            (partial rotary).
        heads: H. An encoding with one head can serve a layer with several. In a model, heads that share keys share
            their rotation, and H is the number of heads of keys.
        base: The base of the frequencies; None: the ``"rope_theta"`` of the scaling, or else 10,000.
        scaling: How the frequencies were changed for long inputs, as ``rope_parameters`` of transformers: a dictionary
            with a ``"rope_type"`` of ``"linear"``, ``"yarn"`` or ``"llama3"`` and what that type needs.
        frequencies: w, radians per token, (dim / 2,) or (heads, dim / 2); None: those of base and scaling.
        attention_scaling: Factor of the rotated queries and of the rotated keys; None: that of the scaling (YaRN), or
            else 1.
        interleaved: Whether the pairs are dimensions 2f and 2f + 1, as in the paper, and not f and f + dim / 2, as in
            transformers.
        learnable: Whether the frequencies are learned, one set for each head.
        causal: Whether the future is hidden.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An odd number of dimensions, an unknown or incomplete scaling, or frequencies that are not finite or
            of the wrong shape.

    Note:
        There is no positional attention without queries and keys. `kernel` returns the logits by distance of a query
        and a key, which ``measure_relative`` measures. A frequency of 0 is a band without position. Keep learned
        frequencies in float32, because half precision is not exact enough for them.

    Examples:
        >>> rope = RotaryEncoding(dim=4, base=100.0)
        >>> rope.frequencies
        tensor([[1.0000, 0.1000]])
        >>> rope.scaled(0.5).without(slowest=0.5).frequencies
        tensor([[0.5000, 0.0000]])
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        base: float | None = None,
        scaling: Mapping[str, Any] | None = None,
        frequencies: Frequencies | None = None,
        attention_scaling: float | None = None,
        interleaved: bool = False,
        learnable: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__(heads, causal)
        self.dim, self.scaling = count("dim", dim, least=2), checked_scaling(scaling)
        theta = (self.scaling or {}).get("rope_theta")
        self.base = per_head("base", (theta or 10000.0) if base is None else base, 1).item()
        if theta is not None and theta != self.base:
            raise ValueError(f"base must be the rope_theta of the scaling, {theta}, or left out, got {base}")
        self.interleaved, self.learnable = flag("interleaved", interleaved), flag("learnable", learnable)
        published, factor = published_frequencies(dim, self.base, self.scaling)
        self.attention_scaling = per_head("attention_scaling", attention_scaling or factor, 1).item()
        values = checked_frequencies(published if frequencies is None else frequencies, self.heads, dim // 2)
        if self.learnable:
            self.free_frequencies = nn.Parameter(self._constant(values.expand(self.heads, -1)))
        else:
            self.register_buffer("fixed_frequencies", self._constant(values))
        self._angles: Any = None  # frequencies, what else angles depend on, cosines, sines

    @classmethod
    def from_model(cls, model: nn.Module, *, layer_type: str | None = None) -> Self:
        """Return the rotation of a rotary transformers model.

        Args:
            model: The model, with or without a head.
            layer_type: The type of the layers, if types differ in their rotation, such as "full_attention".

        Returns:
            An encoding with the model's frequencies and its attention scaling. The model's pairs of dimensions are not
            read. If a model pairs adjacent dimensions (GLM, Cohere), `kernel` needs another ``interleaved``.

        Raises:
            ValueError: A model without rotations, with several different rotations but no ``layer_type``, or with
                frequencies that depend on the length of the input (dynamic NTK, LongRoPE).
        """
        every = rotations_of(model)
        found = every if layer_type is None else [each for each in every if each.layer_type == layer_type]
        distinct = {(tuple(each.frequencies.tolist()), each.scaling) for each in found}
        if len(distinct) != 1:
            places = ", ".join(f"{each.place} ({each.layer_type or 'all layers'})" for each in every)
            raise ValueError(
                f"{type(model).__name__} has several rotations, or none of layer_type={layer_type!r}: {places}; name a "
                "layer_type, or pass the part of the model that is meant"
            )
        each = found[0]
        return cls(
            2 * len(each.frequencies), base=each.base, frequencies=each.frequencies, attention_scaling=each.scaling
        )

    @property
    def frequencies(self) -> Tensor:
        """The frequencies w in radians per token, (1, dim / 2), or (heads, dim / 2) if heads differ."""
        stored: Tensor = self.free_frequencies if self.learnable else self.get_buffer("fixed_frequencies")
        return stored.to(self.working_dtype)

    @property
    def wavelengths(self) -> Tensor:
        """The wavelengths 2 pi / w in tokens, of the shape of `frequencies`; infinite for a band without position."""
        return 2 * math.pi / self.frequencies.abs()

    def scaled(self, factor: PerHead) -> Self:
        """Return the encoding with all angles multiplied. Below 1 attention is less local, above 1 more local.

        Args:
            factor: A number, or one per head; 0.5 is position interpolation to twice the length (Chen et al., 2023,
                arXiv 2306.15595).
        """
        factors = per_head("factor", factor, self.heads, positive=False).to(self.device, self.working_dtype)
        return self._with(self.frequencies * factors[:, None])

    def rebased(self, base: float) -> Self:
        """Return the encoding with another base: w_f (base' / base)^(-2f/dim), base'^(-2f/dim) without a scaling.

        Args:
            base: The new base, above 0. A larger base makes the slow bands slower, and does not change the fastest
                band.
        """
        new = per_head("base", base, 1).item()
        f = torch.arange(self.dim // 2, device=self.device, dtype=self.working_dtype)
        scaling = None if self.scaling is None else self.scaling | {"rope_theta": new}
        return self._with(self.frequencies * (new / self.base) ** (-2 * f / self.dim), base=new, scaling=scaling)

    def without(
        self, *, slowest: float = 0.0, fastest: float = 0.0, bands: Sequence[int] | Tensor | None = None
    ) -> Self:
        """Return the encoding with bands that do not rotate: their frequency is 0.

        Args:
            slowest: Share of the bands, rounded to whole ones, those with the smallest frequencies: .25 is 0.75-RoPE,
                the p-RoPE of Barbero et al. (2025, arXiv 2410.06205).
            fastest: Share of the bands, rounded to whole ones, those with the largest frequencies.
            bands: Further bands by index, f = 0..dim/2 - 1.

        Raises:
            ValueError: A share outside 0 to 1, a share that is too small for a single band, or an unknown band.
        """
        half = self.dim // 2
        chosen = [] if bands is None else torch.as_tensor(bands).flatten().tolist()
        stopped = torch.zeros_like(self.frequencies, dtype=torch.bool)
        stopped[:, [count("bands", each, least=0, most=half - 1) for each in chosen]] = True
        order = torch.argsort(self.frequencies.detach().abs(), dim=-1, stable=True, descending=True)
        for name, share in (("slowest", slowest), ("fastest", fastest)):
            size = round(number(name, share) * half)
            if not 0 <= share <= 1 or (share > 0 and not size):
                raise ValueError(f"{name} must be a share from 0 to 1 of {half} bands, at least one, got {share}")
            if size:
                stopped.scatter_(-1, order[:, -size:] if name == "slowest" else order[:, :size], True)
        return self._with(self.frequencies.masked_fill(stopped, 0))

    def with_heads(self, heads: int) -> Self:
        """Return the encoding with frequencies for each of so many heads, all those of the first."""
        return self._with(self.frequencies[:1].expand(count("heads", heads), -1), heads=heads)

    def _with(self, frequencies: Tensor, **changes: Any) -> Self:
        """Return a copy with other frequencies, in the same precision and on the same device."""
        names = ("dim", "heads", "base", "scaling", "attention_scaling", "interleaved", "learnable", "causal")
        arguments = {name: getattr(self, name) for name in names} | changes
        return type(self)(**arguments, frequencies=frequencies.detach()).to(self.device, self.dtype)

    def kernel(self, query: Tensor, key: Tensor, length: int, *, scale: float | None = None) -> Tensor:
        r"""Return the logits by distance of one query and one key, as if at every position.

            b[k] = s sum_f Re[conj(q_f) k_f e^(i w_f k)],  k = j - i

        Args:
            query: q before the rotation, (..., heads, d), d >= dim.
            key: k before the rotation, of the same shape.
            length: Number of positions, n.
            scale: s; None: 1 / sqrt(d).

        Returns:
            b[k] for k = -(n-1)..n-1, (..., heads, 2n - 1), as ``measure_relative`` takes it; -inf in the future of a
            causal encoding; in float64, on the device of the query where it has float64. O(n) memory per head.

        Raises:
            TypeError: A length that is not an integer.
            ValueError: Fewer dimensions than are rotated.
        """
        self._check_size(query)
        q, k = (on_float64_device(each).double() for each in (query, key))
        distance = torch.arange(1 - count("length", length), length, device=q.device, dtype=q.dtype)
        frequencies = self.frequencies.to(q)
        a, b = (torch.complex(*self._parts(each[..., : self.dim])) for each in (q, k))
        bands = a.conj() * b * self.attention_scaling**2  # (..., heads, dim / 2)
        logits = (q[..., self.dim :] * k[..., self.dim :]).sum(-1, keepdim=True)  # dimensions without rotation
        for f in range(self.dim // 2):  # all together take dim / 2 times the memory
            angle, band = frequencies[:, f, None] * distance, bands[..., f, None]
            logits = logits + (band.real * angle.cos() - band.imag * angle.sin())
        logits = logits * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        return torch.where(distance > 0, -torch.inf, logits) if self.causal else logits

    def attention_inputs(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        added: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        queries, keys = check_lengths(query.shape[-2], key.shape[-2])
        visible = self.visible_keys(queries, keys, mask)
        if added is not None:
            added = cast(added, query.dtype, visible)
        rotated_query = self.rotate(query, *self.angles_from(keys - queries, queries, query.device))
        rotated_key = self.rotate(key, *self.angles_from(0, keys, query.device))
        return rotated_query, rotated_key, visible if added is None else added

    def angles(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines at positions (n,), each (1 or heads, n, dim / 2), times the attention scaling.

        Angles are float64 where the device has it, since those of float32 are off by 0.001 at position 10,000.
        """
        exact = torch.float32 if position.device.type in WITHOUT_FLOAT64 else torch.float64
        angle = position.to(exact)[:, None] * self.frequencies.to(exact)[:, None]
        cos, sin = (self.attention_scaling * each for each in (angle.cos(), angle.sin()))
        return cos.to(self.working_dtype), sin.to(self.working_dtype)

    def angles_from(self, first: int | Tensor, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `angles` of so many tokens from a position on, which are computed once for a growing length."""
        stored = None if self.learnable else self.get_buffer("fixed_frequencies")
        if stored is None or isinstance(first, Tensor) or not _may_be_kept(stored):
            return self.angles(torch.arange(length, device=device) + first)
        source = (stored._version, self.attention_scaling, device)
        kept, last = self._angles, first + length
        if kept is None or kept[0] is not stored or kept[1] != source or kept[2].shape[1] < last:
            room = torch.arange(2 ** (last - 1).bit_length(), device=device)
            with torch.inference_mode(False):  # these angles may be used in training later
                kept = self._angles = (stored, source, *self.angles(room))
        return kept[2][:, first:last], kept[3][:, first:last]

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries or keys (batch, heads, n, d), rotated by `angles` and of their own dtype."""
        self._check_size(states)
        if (heads := cos.shape[-3]) > 1:  # adjacent heads share their keys
            cos, sin = (each.repeat_interleave(states.shape[-3] // heads, -3) for each in (cos, sin))
        x = states if self.dim == states.shape[-1] else states[..., : self.dim]
        real, imaginary = self._parts(x.to(torch.promote_types(states.dtype, cos.dtype)))
        parts = (
            torch.addcmul(real * cos, imaginary, sin, value=-1),
            torch.addcmul(imaginary * cos, real, sin),
        )
        rotated = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        rotated = rotated.to(states.dtype)
        return rotated if x is states else torch.cat([rotated, states[..., self.dim :]], -1)

    def extra_repr(self) -> str:  # noqa: D102
        learned = ", learnable=True" if self.learnable else ""
        if self.frequencies.is_meta or hasattr(self.frequencies, "full_tensor"):  # sharded, or without numbers
            return f"dim={self.dim}, heads={self.heads}{learned}"
        w = self.frequencies.detach().abs()
        rotating = w[w > 0]
        ends = [] if not len(rotating) else [2 * math.pi / each.item() for each in (rotating.max(), rotating.min())]
        waves = f"wavelengths {ends[0]:.4g} to {ends[1]:.4g}" if ends else "no waves"
        stopped = int((w == 0).sum(-1).max())
        return f"dim={self.dim}, heads={self.heads}, {waves}, {stopped} of {self.dim // 2} bands stopped{learned}"

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the real and the imaginary part of each band of queries or keys (..., dim), each (..., dim / 2)."""
        return (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)

    def _check_size(self, query: Tensor) -> None:
        if query.shape[-1] < self.dim:
            raise ValueError(
                f"query must have at least the {self.dim} dimensions of the encoding, got {query.shape[-1]}"
            )


def _may_be_kept(frequencies: Tensor) -> bool:
    """Return whether what is computed from frequencies is an ordinary tensor that stays valid until they change."""
    if torch.compiler.is_compiling() or frequencies.is_meta or frequencies.is_inference():
        return False
    return _get_current_dispatch_mode() is None and not transformed(frequencies)
