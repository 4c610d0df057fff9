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
    checked_pairs,
    checked_scaling,
    published_frequencies,
)
from pelocality.encodings.base import cast, check_lengths
from pelocality.encodings.base_content import ContentEncoding

Frequencies = Tensor | Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]


class RotaryEncoding(ContentEncoding):
    r"""Queries and keys rotated by angles that grow with their position, so that logits depend on distance.

        q_i k_j = sum_f Re[conj(q_if) k_jf e^(-i w_f (i - j))],  w_f = base^(-2f/dim),  f = 0..dim/2 - 1

    This is RoPE (Su et al., 2021). A pair of dimensions, a *band*, is one complex number q_f with a wavelength of
    2 pi / w_f tokens. The frequencies w are free. `scaled` multiplies all angles, `without` stops bands, and `rebased`
    changes the base; each returns a new encoding. ``attach(model, encoding)`` puts the frequencies into a rotary model.

    Tokens of images and videos lie at coordinates x (t, h, w), of which there are several ``axes``. Then w_f is a wave
    vector, and a token turns by w_f . x. A band may read one coordinate (M-RoPE, 2-D RoPE) or several.

    Args:
        dim: The number of dimensions that are rotated, even. Further dimensions of queries and keys do not change
            (partial rotary).
        heads: H. An encoding with one head can serve a layer with several. In a model, heads that share keys share
            their rotation, and H is the number of heads of keys.
        base: The base of the frequencies; None: the ``"rope_theta"`` of the scaling, or else 10,000.
        scaling: How the frequencies were changed for long inputs, as ``rope_parameters`` of transformers: a dictionary
            with a ``"rope_type"`` of ``"linear"``, ``"yarn"`` or ``"llama3"`` and what that type needs.
        frequencies: w, radians per token, (dim / 2,) or (heads, dim / 2), with several axes (..., axes); None: those of
            base and scaling, of one axis.
        attention_scaling: Factor of the rotated queries and of the rotated keys; None: that of the scaling (YaRN), or
            else 1.
        interleaved: Whether the pairs are dimensions 2f and 2f + 1, as in the paper, and not f and f + dim / 2, as in
            transformers.
        axes: The number of coordinates of a token.
        pairs: The two dimensions of each band, (dim / 2, 2), of which the first turns towards the second; None: as
            ``interleaved`` says.
        learnable: Whether the frequencies are learned, one set for each head.
        causal: Whether the future is hidden, of one axis.
        length: The number of tokens at which the frequencies were read, which are per patch of such images (DINOv3).

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An odd number of dimensions, an unknown or incomplete scaling, frequencies that are not finite or of
            the wrong shape, or none for several axes, or pairs that share a dimension.

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
        axes: int = 1,
        pairs: Tensor | Sequence[Sequence[int]] | None = None,
        length: int | None = None,
    ) -> None:
        super().__init__(heads, causal)
        self.dim, self.scaling = count("dim", dim, least=2), checked_scaling(scaling)
        theta = (self.scaling or {}).get("rope_theta")
        self.base = per_head("base", (theta or 10000.0) if base is None else base, 1).item()
        if theta is not None and theta != self.base:
            raise ValueError(f"base must be the rope_theta of the scaling, {theta}, or left out, got {base}")
        self.axes, self.learnable = count("axes", axes), flag("learnable", learnable)
        if self.axes > 1 and (frequencies is None or self.causal):
            raise ValueError(f"{axes} axes need frequencies, the wave vector of each band, and causal=False")
        self.length = None if length is None else count("length", length)
        self.interleaved, self.pairs = checked_pairs(flag("interleaved", interleaved), pairs, self.dim)
        published, factor = published_frequencies(dim, self.base, self.scaling)
        self.attention_scaling = per_head("attention_scaling", attention_scaling or factor, 1).item()
        values = checked_frequencies(published if frequencies is None else frequencies, self.heads, dim // 2, axes)
        if self.learnable:
            self.free_frequencies = nn.Parameter(self._constant(values.expand(self.heads, *values.shape[1:])))
        else:
            self.register_buffer("fixed_frequencies", self._constant(values))
        self._angles: Any = None  # frequencies, what else angles depend on, cosines, sines

    @classmethod
    def from_model(cls, model: Any, *, layer_type: str | None = None, length: int | None = None) -> Self:
        """Return the rotation of a model, read from its queries and keys while it runs.

        The model runs on tokens that are equal, so that these differ by their rotation alone: wherever it is computed,
        and whatever buffers and configurations say. Nothing is returned that does not explain the angle of every token.

        Args:
            model: The model, with or without a head, or a `SequenceModel` of a model that reads no token ids, whose
                positions are the coordinates of its tokens. Of an encoder-decoder model the encoder is read, of a model
                of images and text the language model.
            layer_type: The type of the layers, if types differ in their rotation, such as "full_attention".
            length: The number of tokens, if frequencies depend on it (dynamic NTK, LongRoPE, DINOv3), and of a model
                that reads no token ids.

        Returns:
            An encoding with the model's frequencies, pairs of dimensions and attention scaling. The base is that of the
            configuration.

        Raises:
            TypeError: Something that is not a model.
            ValueError: A model without rotations, with several different rotations but no ``layer_type``, or with
                frequencies that depend on the length of the input but no ``length``; or one that turns queries and keys
                otherwise than by the places of its tokens, such as V-JEPA 2 and HunYuan-VL on images, which turn the
                two dimensions of a pair by different angles.

        Examples:
            >>> from pelocality.models import SequenceModel, identical_patches
            >>> from transformers import DINOv3ViTConfig, DINOv3ViTModel
            >>> size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
            >>> vit = DINOv3ViTModel(DINOv3ViTConfig(**size, patch_size=4, image_size=40))
            >>> patches = SequenceModel(vit, inputs=identical_patches(4))
            >>> RotaryEncoding.from_model(patches, length=100).wavelengths[0]  # in patches of the height and the width
            tensor([[ 5., inf],
                    [50., inf],
                    [inf,  5.],
                    [inf, 50.]])
        """
        from pelocality.models.rotations import rotation_of_model  # models import encodings

        rotation, base = rotation_of_model(model, layer_type, length)
        return cls.of_waves(*rotation[:2], base=base, attention_scaling=rotation.scaling, length=length)

    @classmethod
    def of_waves(cls, pairs: Tensor | None, waves: Tensor, **options: Any) -> Self:
        """Return the encoding of pairs of dimensions (dim / 2, 2) or None, and waves (1 or heads, dim / 2, axes)."""
        heads, bands, axes = waves.shape
        frequencies = waves if axes > 1 else waves[..., 0]
        return cls(2 * bands, heads, frequencies=frequencies, axes=axes, pairs=pairs, **options)

    @property
    def frequencies(self) -> Tensor:
        """The frequencies w in radians per token, (1, dim / 2), or (heads, dim / 2) if heads differ; (..., axes)."""
        stored: Tensor = self.free_frequencies if self.learnable else self.get_buffer("fixed_frequencies")
        return stored.to(self.working_dtype)

    @property
    def waves(self) -> Tensor:
        """The frequencies with their axis, also if there is one: (1 or heads, dim / 2, axes)."""
        return self.frequencies if self.axes > 1 else self.frequencies[..., None]

    @property
    def wavelengths(self) -> Tensor:
        """The wavelengths 2 pi / w in tokens, of the shape of `frequencies`; infinite for a band without position.

        With several axes, those along each axis alone, in its units: frames, patches or tokens.
        """
        return 2 * math.pi / self.frequencies.abs()

    def scaled(self, factor: PerHead, axis: int | None = None) -> Self:
        """Return the encoding with all angles multiplied. Below 1 attention is less local, above 1 more local.

        Args:
            factor: A number, or one per head; 0.5 is position interpolation to twice the length (Chen et al., 2023,
                arXiv 2306.15595).
            axis: The coordinate of which angles are multiplied; None: all.
        """
        factors = per_head("factor", factor, self.heads, positive=False).to(self.device, self.working_dtype)
        return self._with(torch.where(self._of_axis(axis), self.waves * factors[:, None, None], self.waves))

    def rebased(self, base: float, axis: int | None = None) -> Self:
        """Return the encoding with another base: w_f (base' / base)^(-2f/dim), base'^(-2f/dim) without a scaling.

        With several axes w_0 (w_f / w_0)^(log base' / log base), with the fastest frequency w_0 of all axes.

        Args:
            base: The new base, above 0. A larger base makes the slow bands slower, and does not change the fastest
                band.
            axis: The coordinate of which the base is changed; None: all.
        """
        new = per_head("base", base, 1).item()
        scaling = None if self.scaling is None else self.scaling | {"rope_theta": new}
        if self.axes == 1:
            f = torch.arange(self.dim // 2, device=self.device, dtype=self.working_dtype)
            waves = self.waves * (new / self.base) ** (-2 * f / self.dim)[:, None]
        else:
            slower = (self.waves / self.waves.abs().max()).abs() ** (math.log(new) / math.log(self.base) - 1)
            waves = self.waves.where(self.waves == 0, self.waves * slower)
        named = {} if axis is not None and self.axes > 1 else {"base": new, "scaling": scaling}
        return self._with(torch.where(self._of_axis(axis), waves, self.waves), **named)

    def without(
        self,
        *,
        slowest: float = 0.0,
        fastest: float = 0.0,
        bands: Sequence[int] | Tensor | None = None,
        axis: int | None = None,
    ) -> Self:
        """Return the encoding with bands that do not rotate: their frequency is 0.

        Args:
            slowest: Share of the bands, rounded to whole ones, those with the smallest frequencies: .25 is 0.75-RoPE,
                the p-RoPE of Barbero et al. (2025, arXiv 2410.06205).
            fastest: Share of the bands, rounded to whole ones, those with the largest frequencies.
            bands: Further bands by index, f = 0..dim/2 - 1.
            axis: The coordinate by which bands no longer rotate; shares are of the bands that it turns. All of these
                bands without shares and ``bands``. None: all coordinates.

        Raises:
            ValueError: A share outside 0 to 1, a share that is too small for a single band, or an unknown band or axis.
        """
        half, of_axis = self.dim // 2, self._of_axis(axis)
        chosen = [] if bands is None else torch.as_tensor(bands).flatten().tolist()
        speed = self.waves.detach().where(of_axis, 0).norm(dim=-1)
        stopped = torch.full_like(speed, axis is not None and bands is None and not slowest and not fastest).bool()
        stopped[:, [count("bands", each, least=0, most=half - 1) for each in chosen]] = True
        turning = half if axis is None else int((speed > 0).sum(-1).max())
        order = torch.argsort(speed, dim=-1, stable=True, descending=True)[:, :turning]
        for name, share in (("slowest", slowest), ("fastest", fastest)):
            size = round(number(name, share) * turning)
            if not 0 <= share <= 1 or (share > 0 and not size):
                raise ValueError(f"{name} must be a share from 0 to 1 of {turning} bands, at least one, got {share}")
            if size:
                stopped.scatter_(-1, order[:, -size:] if name == "slowest" else order[:, :size], True)
        return self._with(self.waves.masked_fill(stopped[..., None] & of_axis, 0))

    def _of_axis(self, axis: int | None) -> Tensor:
        """Return which coordinates are meant, booleans (axes,)."""
        every = torch.arange(self.axes, device=self.device)
        return every >= 0 if axis is None else every == count("axis", axis, least=0, most=self.axes - 1)

    def with_heads(self, heads: int) -> Self:
        """Return the encoding with frequencies for each of so many heads, all those of the first."""
        return self._with(self.waves[:1].expand(count("heads", heads), -1, -1), heads=heads)

    def _with(self, waves: Tensor, **changes: Any) -> Self:
        """Return a copy with other frequencies (..., axes), in the same precision and on the same device."""
        names = ("dim", "heads", "base", "scaling", "attention_scaling", "interleaved", "learnable", "causal", "axes")
        arguments = {name: getattr(self, name) for name in (*names, "pairs", "length")} | changes
        frequencies = waves.detach() if self.axes > 1 else waves.detach()[..., 0]
        return type(self)(**arguments, frequencies=frequencies).to(self.device, self.dtype)

    def kernel(self, query: Tensor, key: Tensor, length: int | Tensor, *, scale: float | None = None) -> Tensor:
        r"""Return the logits by distance of one query and one key, as if at every position.

            b[k] = s sum_f Re[conj(q_f) k_f e^(i w_f . k)],  k = x_j - x_i

        Args:
            query: q before the rotation, (..., heads, d), d >= dim.
            key: k before the rotation, of the same shape.
            length: Number of positions, n; with several axes displacements k, (m, axes), from the query to the key.
            scale: s; None: 1 / sqrt(d).

        Returns:
            b[k] for k = -(n-1)..n-1, (..., heads, 2n - 1), as ``measure_relative`` takes it; -inf in the future of a
            causal encoding; in float64, on the device of the query where it has float64. O(n) memory per head. For m
            displacements (..., heads, m).

        Raises:
            TypeError: A length that is not an integer.
            ValueError: Fewer dimensions than are rotated, or displacements on other axes.
        """
        self._check_size(query)
        q, k = (on_float64_device(each).double() for each in (query, key))
        if isinstance(length, Tensor) or self.axes > 1:
            distance = torch.as_tensor(length).to(q)
            if distance.ndim != 2 or distance.shape[1] != self.axes:
                raise ValueError(f"length must be displacements (m, {self.axes}), got shape {tuple(distance.shape)}")
        else:
            distance = torch.arange(1 - count("length", length), length, device=q.device, dtype=q.dtype)[:, None]
        waves = self.waves.to(q)
        if self.pairs is not None:
            order, _ = self._order(q)
            q, k = q[..., order], k[..., order]
        a, b = (torch.complex(*self._parts(each[..., : self.dim])) for each in (q, k))
        bands = a.conj() * b * self.attention_scaling**2  # (..., heads, dim / 2)
        logits = (q[..., self.dim :] * k[..., self.dim :]).sum(-1, keepdim=True)  # dimensions without rotation
        for f in range(self.dim // 2):  # all together take dim / 2 times the memory
            angle, band = waves[:, f] @ distance.mT, bands[..., f, None]
            logits = logits + (band.real * angle.cos() - band.imag * angle.sin())
        logits = logits * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        return torch.where(distance[:, 0] > 0, -torch.inf, logits) if self.causal else logits

    def attention_inputs(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        added: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.axes > 1:
            raise ValueError(
                f"tokens have {self.axes} coordinates, which are not given here; use rotate(x, *angles(x))"
            )
        queries, keys = check_lengths(query.shape[-2], key.shape[-2])
        visible = self.visible_keys(queries, keys, mask)
        if added is not None:
            added = cast(added, query.dtype, visible)
        rotated_query = self.rotate(query, *self.angles_from(keys - queries, queries, query.device))
        rotated_key = self.rotate(key, *self.angles_from(0, keys, query.device))
        return rotated_query, rotated_key, visible if added is None else added

    def angles(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines at positions (n,), each (1 or heads, n, dim / 2), times the attention scaling.

        With several axes, positions are (n, axes). Angles are float64 where the device has it, since those of float32
        are off by 0.001 at position 10,000.
        """
        exact = torch.float32 if position.device.type in WITHOUT_FLOAT64 else torch.float64
        places = position.to(exact).view(-1, 1, self.axes)
        angle = (places * self.waves.to(exact)[:, None]).sum(-1)  # a product of matrices is rounded in autocast
        cos, sin = (self.attention_scaling * each for each in (angle.cos(), angle.sin()))
        return cos.to(self.working_dtype), sin.to(self.working_dtype)

    def angles_from(self, first: int | Tensor, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `angles` of so many tokens from a position on, which are computed once for a growing length.

        Tokens of text have the same coordinate on each axis.
        """
        stored = None if self.learnable else self.get_buffer("fixed_frequencies")
        if stored is None or isinstance(first, Tensor) or not _may_be_kept(stored):
            return self.angles(self.text_places(torch.arange(length, device=device) + first))
        source = (stored._version, self.attention_scaling, device)
        kept, last = self._angles, first + length
        if kept is None or kept[0] is not stored or kept[1] != source or kept[2].shape[1] < last:
            room = self.text_places(torch.arange(2 ** (last - 1).bit_length(), device=device))
            with torch.inference_mode(False):  # these angles may be used in training later
                kept = self._angles = (stored, source, *self.angles(room))
        return kept[2][:, first:last], kept[3][:, first:last]

    def text_places(self, position: Tensor) -> Tensor:
        """Return the coordinates of tokens of text at positions (n,), as `angles` takes them."""
        return position if self.axes == 1 else position[:, None].expand(-1, self.axes)

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries or keys (batch, heads, n, d), rotated by `angles` and of their own dtype."""
        self._check_size(states)
        if (heads := cos.shape[-3]) > 1:  # adjacent heads share their keys
            cos, sin = (each.repeat_interleave(states.shape[-3] // heads, -3) for each in (cos, sin))
        if self.pairs is not None:
            order, back = self._order(states)
            states = states[..., order]
        x = states if self.dim == states.shape[-1] else states[..., : self.dim]
        real, imaginary = self._parts(x.to(torch.promote_types(states.dtype, cos.dtype)))
        parts = (
            torch.addcmul(real * cos, imaginary, sin, value=-1),
            torch.addcmul(imaginary * cos, real, sin),
        )
        rotated = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        rotated = rotated.to(states.dtype)
        rotated = rotated if x is states else torch.cat([rotated, states[..., self.dim :]], -1)
        return rotated if self.pairs is None else rotated[..., back]

    def _order(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order in which pairs of states (..., d) are halves of the first dimensions, and the way back."""
        order = [dimension for part in zip(*self.pairs or (), strict=True) for dimension in part]
        order += sorted({*range(states.shape[-1])} - {*order})
        back = sorted(range(len(order)), key=order.__getitem__)
        return torch.tensor(order, device=states.device), torch.tensor(back, device=states.device)

    def extra_repr(self) -> str:  # noqa: D102
        learned = ", learnable=True" if self.learnable else ""
        if self.frequencies.is_meta or hasattr(self.frequencies, "full_tensor"):  # sharded, or without numbers
            return f"dim={self.dim}, heads={self.heads}{learned}"
        w = self.waves.detach().norm(dim=-1)
        rotating = w[w > 0]
        ends = [] if not len(rotating) else [2 * math.pi / each.item() for each in (rotating.max(), rotating.min())]
        waves = f"wavelengths {ends[0]:.4g} to {ends[1]:.4g}" if ends else "no waves"
        stopped = int((w == 0).sum(-1).max())
        return f"dim={self.dim}, heads={self.heads}, {waves}, {stopped} of {self.dim // 2} bands stopped{learned}"

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the real and the imaginary part of each band of queries or keys (..., dim), each (..., dim / 2)."""
        return (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)

    def _check_size(self, query: Tensor) -> None:
        least = self.dim if self.pairs is None else 1 + max(map(max, self.pairs))
        if query.shape[-1] < least:
            raise ValueError(f"query must have at least the {least} dimensions of the encoding, got {query.shape[-1]}")


def _may_be_kept(frequencies: Tensor) -> bool:
    """Return whether what is computed from frequencies is an ordinary tensor that stays valid until they change."""
    if torch.compiler.is_compiling() or frequencies.is_meta or frequencies.is_inference():
        return False
    return _get_current_dispatch_mode() is None and not transformed(frequencies)
