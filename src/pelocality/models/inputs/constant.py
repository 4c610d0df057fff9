"""Inputs of constant content for models that read something else than token ids: images, sound, spectra, series.

Each function returns an ``inputs`` for a `SequenceModel`: a function from the number of a sample and a number of
positions to the inputs of one call. The content of a position is drawn with the number of the sample as its seed, and
repeated, so that positions differ by nothing else.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pelocality._checks import count
from pelocality.models.sequence_model import Content
from pelocality.positions import Positions


def identical_patches(size: int, *, channels: int = 3, argument: str | None = "pixel_values") -> Content:
    """Return square images whose patches are all the same, for models such as ViT, DINOv2 and CLIP.

    A `SequenceModel` with these inputs measures distance on the grid of patches.

    Args:
        size: Pixels along a side of a patch.
        channels: Colours of a pixel.
        argument: The name of the argument of the model; None for the first one.

    Returns:
        A function from the number of a sample and a square number of patches to an image (1, channels, height, width).

    Raises:
        TypeError: A size that is not an integer.
        ValueError: A size below 1; when called, a number of patches that is no square.

    Examples:
        >>> identical_patches(4)(0, 9)["pixel_values"].shape
        torch.Size([1, 3, 12, 12])
    """
    count("size", size)
    count("channels", channels)

    def images(sample: int, length: int) -> Any:
        side = _side(length)
        return _named(argument, _drawn(sample, 1, channels, size, size).repeat(1, 1, side, side))

    images.positions = lambda length: Positions.grid(_side(length), _side(length))  # type: ignore[attr-defined]
    return images


def _side(length: int) -> int:
    """Return the number of patches along a side of a square image."""
    side = math.isqrt(length)
    if side * side != length:
        raise ValueError(f"length must be a square number of patches, such as {side**2}, got {length}")
    return side


def steady_sound(hop: int, window: int | None = None, *, argument: str | None = "input_values") -> Content:
    """Return sound with the period of a model's hop, for models of waves such as Wav2Vec2: each frame holds the same.

    Args:
        hop: Samples from one frame to the next, the product of the strides of the convolutions (320 in Wav2Vec2).
        window: Samples that a frame reads (400 in Wav2Vec2); None for as many as the hop.
        argument: The name of the argument of the model; None for the first one.

    Returns:
        A function from the number of a sample and a number of frames to a wave (1, samples).

    Raises:
        TypeError: A number that is not an integer.
        ValueError: A hop below 1, or a window below the hop.

    Examples:
        >>> steady_sound(320, 400)(0, 10)["input_values"].shape
        torch.Size([1, 3280])
    """
    window = count("window", hop if window is None else window, least=count("hop", hop))

    def waves(sample: int, length: int) -> Any:
        return _named(argument, _repeated(_drawn(sample, 1, hop), hop * (length - 1) + window))

    return waves


def steady_spectrum(bands: int, stride: int = 1, *, argument: str | None = "input_features") -> Content:
    """Return spectra whose columns are all the same, for models such as Whisper.

    Convolutions that pad their input still see another content at both ends.

    Args:
        bands: Numbers in a column (80 or 128 in Whisper).
        stride: Columns for each position of the model (2 in Whisper).
        argument: The name of the argument of the model; None for the first one.

    Returns:
        A function from the number of a sample and a number of positions to a spectrum (1, bands, columns).

    Raises:
        TypeError: A number that is not an integer.
        ValueError: A number below 1.

    Examples:
        >>> steady_spectrum(80, 2)(0, 10)["input_features"].shape
        torch.Size([1, 80, 20])
    """
    count("bands", bands)
    count("stride", stride)

    def spectra(sample: int, length: int) -> Any:
        return _named(argument, _drawn(sample, 1, bands, 1).repeat(1, 1, stride * length))

    return spectra


def periodic_series(
    stride: int, window: int | None = None, *, channels: int = 1, argument: str | None = "past_values"
) -> Content:
    """Return series with the period of a model's stride, for models such as PatchTST: each patch holds the same.

    Args:
        stride: Steps from one patch to the next.
        window: Steps in a patch; None for as many as the stride.
        channels: Numbers at a step.
        argument: The name of the argument of the model; None for the first one.

    Returns:
        A function from the number of a sample and a number of patches to a series (1, steps, channels).

    Raises:
        TypeError: A number that is not an integer.
        ValueError: A stride below 1, or a window below the stride.

    Examples:
        >>> periodic_series(4, 8)(0, 10)["past_values"].shape
        torch.Size([1, 44, 1])
    """
    window = count("window", stride if window is None else window, least=count("stride", stride))
    count("channels", channels)

    def series(sample: int, length: int) -> Any:
        drawn = _repeated(_drawn(sample, 1, channels, stride), stride * (length - 1) + window)
        return _named(argument, drawn.transpose(1, 2))

    return series


def _drawn(sample: int, *shape: int) -> Tensor:
    """Return normal numbers that depend on the number of the sample alone."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(sample), device="cpu")


def _repeated(unit: Tensor, length: int) -> Tensor:
    """Return a unit (..., period) repeated and cut to (..., length)."""
    return unit.repeat(*[1] * (unit.ndim - 1), -(-length // unit.shape[-1]))[..., :length]


def _named(argument: str | None, inputs: Tensor) -> Any:
    """Return the inputs of a call, by name or as the first one."""
    return inputs if argument is None else {argument: inputs}
