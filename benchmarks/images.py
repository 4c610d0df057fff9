"""Every model type of transformers that reads images or video, tiny, with random weights: what works on its patches?

    python -m benchmarks.images                      # all types; a second call goes on where the first one stopped
    python -m benchmarks.images --types vit dinov3_vit

- measured: `positional_attention` on equal patches, over the grid of the patches;
- attached: an attenuated encoding beside the model's own positions;
- rotation: the axes of its rotations and the wavelengths along them, read by `RotaryEncoding.from_model`; "none"; or
  why what turns its queries and keys is no rotation.

Writes a CSV with a row per type, and prints the counts.
"""

import argparse
import inspect
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

from benchmarks.families import outcome, shortened, swept, tiny_config
from pelocality import AttenuatedEncoding, RotaryEncoding, attach, positional_attention
from pelocality.models import SequenceModel

_SIDE, _PATCH, _LARGEST = 32, 8, 2e7
_COUNTS = ("measured", "attached")


class NoImagesError(ValueError):
    """A model that reads no images."""


def with_sizes(config: Any, names: dict[str, int]) -> None:
    """Set the sizes of images and patches in a configuration and in its parts."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            with_sizes(value, names)
        elif name in names:
            pair = isinstance(value, list | tuple)
            setattr(config, name, type(value)([names[name]] * len(value)) if pair else names[name])


def tiny_model(model_type: str) -> Any:
    """Build a tiny model with random weights that reads images.

    Raises:
        NoImagesError: It reads none.
        Exception: Whatever transformers raises.
    """
    config = tiny_config(CONFIG_MAPPING[model_type], {})
    with_sizes(config, {"image_size": _SIDE, "patch_size": _PATCH, "img_size": _SIDE})
    with torch.device("meta"):
        skeleton = AutoModel.from_config(config)
    parameters = inspect.signature(skeleton.forward).parameters
    if "input_ids" in parameters or not {"pixel_values", "pixel_values_videos", "hidden_states"} & set(parameters):
        raise NoImagesError("it reads no images, or text too")
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > _LARGEST:
        raise ValueError(f"no small configuration: {size:.0f} parameters")
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def patches(model: Any) -> int:
    """Return the number of patches of a square image of a model, by its configuration."""
    config = model.config
    size, patch = (getattr(config, name, default) for name, default in (("image_size", _SIDE), ("patch_size", _PATCH)))
    size, patch = (each[0] if isinstance(each, list | tuple) else each for each in (size, patch))
    return (size // patch) ** 2


def subject_of(model: Any) -> tuple[Any, int]:
    """Return what is measured, a model or a tower with its inputs, and its number of patches."""
    names = list(inspect.signature(model.forward).parameters)
    grid = next((name for name in names if name.endswith("grid_thw")), None)
    if grid is None:
        return model, patches(model)
    config, side = model.config, _SIDE // _PATCH
    frames = getattr(config, "temporal_patch_size", 1)
    size = getattr(config, "in_channels", getattr(config, "in_chans", 3)) * frames * config.patch_size**2
    merge = getattr(config, "spatial_merge_size", 1)
    blocks = product(range(0, side, merge), range(0, side, merge), range(merge), range(merge))
    places = torch.tensor([(row + below, column + right) for row, column, below, right in blocks])

    def content(sample: int, length: int) -> dict[str, Tensor]:
        patch = torch.randn(1, size, generator=torch.Generator().manual_seed(sample))
        return {names[0]: patch.repeat(length, 1), grid: torch.tensor([[1, side, side]])}

    return SequenceModel(model, inputs=content, positions=places), side**2


def rotation(model: Any, length: int) -> str:
    """Return the axes of a model's rotations with the range of wavelengths along each."""
    try:
        encoding = RotaryEncoding.from_model(model, length=length)
    except ValueError as error:
        if "no layers rotate" in str(error):
            return "none"
        raise
    waves = encoding.waves[0].abs()
    parts = []
    for axis in range(waves.shape[-1]):
        turning = 2 * torch.pi / waves[:, axis][waves[:, axis] > 0]
        if len(turning):
            parts.append(f"axis {axis}: {turning.min():.3g} to {turning.max():.3g} patches")
    return "; ".join(parts)


def attached(model: Any, length: int) -> None:
    """Attach an encoding beside the model's own positions, which `attach` proves on the content of its images."""
    content: Any = SequenceModel.of(model).content
    options: dict[str, Any] = {"position_embeddings": "keep", "example_inputs": content(0, length)}
    attach(model, AttenuatedEncoding(decay=0.3), **options).remove()


def row_of(model_type: str) -> dict[str, Any]:
    """Return what can be done with a model type, and what is refused."""
    row: dict[str, Any] = {"type": model_type, "built": "yes"}
    try:
        model = tiny_model(model_type)
    except Exception as error:  # of any kind: the table says which
        built = "no images" if isinstance(error, NoImagesError) else "no"
        return row | {"built": built, "reason": shortened(f"{error}".strip().split("\n")[-1])}
    (subject, n), reasons = subject_of(model), list[str]()
    tasks = {
        "measured": lambda each: positional_attention(each, length=n, words=2, progress=False),
        "attached": lambda each: attached(each, n),
    }
    for name, task in tasks.items():
        row[name], result = outcome(task, subject)
        if row[name] == "no":
            reasons.append(f"not {name}: {result}")
    row["rotation"] = outcome(lambda each: rotation(each, n), subject)[1]
    return row | {"reason": "; ".join(reasons)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--types", nargs="+", help="model types; by default all")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder of images.csv")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if arguments.types:
        table = pd.DataFrame(map(row_of, arguments.types))
    else:
        table = swept(arguments.output / "images.csv", lambda model_type: [row_of(model_type)])
    built = table[table["built"] == "yes"]
    print(built.drop(columns="built").to_string(index=False, max_colwidth=90))
    counts = ", ".join(f"{int((built[name] == 'yes').sum())} {name}" for name in _COUNTS)
    turning = int(built["rotation"].str.startswith("axis").sum())
    print(
        f"{len(built)} models built on images ({int((table['built'] == 'no').sum())} have no small configuration here):"
    )
    print(f"{counts}, {turning} rotations read")


if __name__ == "__main__":
    main()
