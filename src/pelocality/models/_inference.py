"""Running a model without changing it: in evaluation mode, without gradients, its rotations as they were.

Rotations may have frequencies that depend on the longest input of a call (LongRoPE) or of all calls before (dynamic
NTK). Models of images and text note how far the positions of a text end from its number of tokens.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pelocality.encodings._frequencies import by_length, rope_types

_LOCK = threading.RLock()  # modes of modules and switches of torch are those of all threads
_CACHED, _ORIGINAL, _FREQUENCIES = "seq_len_cached", "original_inv_freq", "inv_freq"
_NOTED = re.compile(f"{_CACHED}|rope_deltas")


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and on leaving put back both and its rotations.

    Rotations that depend on the longest input so far begin anew, so that the results do not depend on earlier calls.
    Other threads wait until it is left.

    Args:
        model: Any module.
    """
    with _LOCK, _evaluating(model), torch.no_grad():  # cached tensors of inference_mode could not be trained
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back on leaving."""
    modules = list(model.modules())
    training = [(module, module.training) for module in modules]
    changing = [
        each for each in modules if _NOTED.search(" ".join(vars(each))) or any(map(by_length, rope_types(each)))
    ]
    restore_rotations = _rotations_restorer(changing)
    try:
        if any(flag for _, flag in training):
            model.eval()
        forget_longest_input(changing)
        yield
    finally:
        for module, flag in training:
            if module.training != flag:  # setting an attribute of a module takes long
                module.training = flag
        restore_rotations()


def depend_on_length(model: nn.Module) -> bool:
    """Return whether the rotations of a model depend on the longest text of a batch: dynamic NTK and LongRoPE."""
    return any(by_length(rope_type) for module in model.modules() for rope_type in rope_types(module))


def _rotations_restorer(changing: Sequence[nn.Module]) -> Callable[[], None]:
    """Return the function that gives modules the rotations that they have now, also if these are changed in place."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in changing]
    copies = [(each, each.clone()) for module in changing for each in module.buffers(recurse=False) if not each.is_meta]

    def restore() -> None:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            module._buffers.update(buffers)
        for buffer, values in copies:
            if not torch.equal(buffer, values):
                buffer.copy_(values)

    return restore


def forget_longest_input(modules: Iterable[nn.Module]) -> None:
    """Give modules with dynamic rotations those of their original length, as if they had read no longer input."""
    for module in modules:
        if any("dynamic" in rope_type for rope_type in rope_types(module)):
            for name in [name for name in module._buffers if name.endswith(_ORIGINAL)]:
                layer_type = name.removesuffix(_ORIGINAL)  # where types of layers differ in their rotations
                module._buffers[f"{layer_type}{_FREQUENCIES}"] = module._buffers[name]
                setattr(module, f"{layer_type}max_{_CACHED}", module.original_max_seq_len)
