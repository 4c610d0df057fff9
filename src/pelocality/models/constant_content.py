"""Inputs of constant content for models that read something else than token ids: images, sound, spectra, series.

Each function returns an ``inputs`` for a `SequenceModel`: a function from the number of a sample and a number of
positions to the inputs of one call. The content of a position is drawn with the number of the sample as its seed, and
repeated, so that positions differ by nothing else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pelocality._checks import count
from pelocality.models._calls import argument_names
from pelocality.models._weights import reads_tokens
from pelocality.positions import Positions

Content = Callable[[int, int], Any]
"""From the number of a sample and a number of positions to the inputs of a model, with the same content everywhere."""


@dataclass(frozen=True)
class Patches:
    """Images whose patches are all the same, a `Content`, and the grid of the patches of any images.

    Attributes:
        size: The pixels of a patch, (height, width).
        rows: The rows of patches; None: as many as fit the columns, or as there are columns.
        columns: The columns of patches, likewise.
        channels: Colours of a pixel.
        argument: The name of the argument of the model; None for the first one.
        number: The patches of an image as the configuration of a model says; None without one.
    """

    size: tuple[int, int]
    rows: int | None = None
    columns: int | None = None
    channels: int = 3
    argument: str | None = "pixel_values"
    number: int | None = None

    def __call__(self, sample: int, length: int) -> Any:
        """Return an image of as many patches."""
        return _named(self.argument, _drawn(sample, 1, self.channels, *self.size).repeat(1, 1, *self.grid(length)))

    def grid(self, length: int) -> tuple[int, int]:
        """Return the grid of as many patches.

        Raises:
            ValueError: There is none.
        """
        rows = self.rows or (math.isqrt(length) if self.columns is None else max(1, length // self.columns))
        columns = self.columns or (rows if self.rows is None else max(1, length // rows))
        if rows * columns != length:
            shape = f"rows={self.rows} and columns={self.columns}"
            raise ValueError(f"length must be a square number of patches, or fit {shape}, got {length}")
        return rows, columns

    def grid_of(self, images: Any) -> tuple[int, int]:
        """Return the grid of a batch of images by their pixels; an image may be larger than its patches.

        Raises:
            ValueError: These are no images, or smaller than a patch.
        """
        if isinstance(images, Mapping):
            images = images.get(self.argument, next(iter(images.values()), None))
        shape: Any = getattr(images[0] if isinstance(images, tuple | list) else images, "shape", ())
        rows, columns = (shape[2] // self.size[0], shape[3] // self.size[1]) if len(shape) == 4 else (0, 0)
        if not rows * columns:
            rule = f"(batch, channels, height, width) in patches of {self.size} pixels, got shape {tuple(shape)}"
            raise ValueError(f"texts must be batches of images {rule}; give positions= or inputs= for anything else")
        return rows, columns

    def corners(self, grid: tuple[int, int]) -> dict[int, tuple[slice, slice]]:
        """Return pixels of the first patch, of the last one in its row, and of the last of all, by its number.

        They are in the middle of the patch, where a small convolution before the patches reads no other one.
        """
        (rows, columns), (h, w) = grid, self.size
        places = (0, 0), (0, columns - 1), (rows - 1, columns - 1)
        return {y * columns + x: (_middle(y * h, h), _middle(x * w, w)) for y, x in places}

    def positions(self, length: int, grid: tuple[int, int] | None = None) -> Positions:
        """Return where the patches of a grid lie; without a grid, on that of as many patches."""
        return Positions.grid(*(grid or self.grid(length)))


def patches_of(module: Any) -> Patches | None:
    """Return how a module reads images, by its configuration; None if it is no transformers model of images alone."""
    config = module.config if isinstance(module, PreTrainedModel) and "pixel_values" in argument_names(module) else None
    size = getattr(config, "patch_size", None) or ()
    if np.size(size) not in (1, 2) or any(map(reads_tokens, module.modules())):
        return None
    height, width = size = np.broadcast_to(size, 2).tolist()
    rows, columns = (np.broadcast_to(getattr(config, "image_size", None) or size, 2) // size).tolist()
    channels, whole = getattr(config, "num_channels", 3), getattr(config, "image_size", None)
    return Patches((height, width), None if rows == columns else rows, None, channels, number=whole and rows * columns)


def identical_patches(
    size: int | Sequence[int],
    *,
    rows: int | None = None,
    columns: int | None = None,
    channels: int = 3,
    argument: str | None = "pixel_values",
) -> Content:
    """Return images whose patches are all the same, for models such as ViT, DINOv2 and CLIP.

    A `SequenceModel` with these inputs measures distance on the grid of patches. Real images, as for ``text_average``,
    have the grid of their own pixels. A transformers model of images has such inputs by itself.

    Args:
        size: Pixels along a side of a patch, or (height, width).
        rows: Rows of patches; None: as many as fit the columns, or a square image.
        columns: Columns of patches; None: as many as fit the rows, or a square image.
        channels: Colours of a pixel.
        argument: The name of the argument of the model; None for the first one.

    Returns:
        A function from the number of a sample and a number of patches to an image (1, channels, height, width).

    Raises:
        TypeError: A number that is not an integer.
        ValueError: A number below 1; when called, a number of patches that does not fit the rows and columns, or is no
            square without these.

    Examples:
        >>> identical_patches(4)(0, 9)["pixel_values"].shape
        torch.Size([1, 3, 12, 12])
        >>> identical_patches(4, rows=7)(0, 196)["pixel_values"].shape
        torch.Size([1, 3, 28, 112])
    """
    height, width = (count("size", each) for each in np.broadcast_to(size, 2).tolist())
    rows, columns = (n if n is None else count(name, n) for name, n in (("rows", rows), ("columns", columns)))
    return Patches((height, width), rows, columns, count("channels", channels), argument)


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
    return lambda sample, n: _named(argument, _cycle(hop * (n - 1) + window, sample, 1, hop))


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
    bands, stride = count("bands", bands), count("stride", stride)
    return lambda sample, n: _named(argument, _drawn(sample, 1, bands, 1).repeat(1, 1, stride * n))


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
    return lambda sample, n: _named(argument, _cycle(stride * (n - 1) + window, sample, 1, channels, stride).mT)


def _middle(start: int, size: int) -> slice:
    """Return the middle half of a range."""
    return slice(start + size // 4, start + size - size // 4)


def _cycle(length: int, sample: int, *shape: int) -> Tensor:
    """Return what is `_drawn` of a shape (..., period), repeated and cut to (..., length)."""
    return _drawn(sample, *shape).repeat(*[1] * (len(shape) - 1), -(-length // shape[-1]))[..., :length]


def _drawn(sample: int, *shape: int) -> Tensor:
    """Return normal numbers that depend on the number of the sample alone."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(sample), device="cpu")


def _named(argument: str | None, inputs: Tensor) -> Any:
    """Return the inputs of a call, by name or as the first one."""
    return inputs if argument is None else {argument: inputs}
