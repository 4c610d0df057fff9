"""Direct access to a model's weights outside its forward pass, offloaded and quantised weights included."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pelocality.models._calls import argument_names


def token_embeddings(base: Any) -> Any:
    """Return the module that turns token ids into vectors, or None."""
    try:
        module = base.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # transformers raises these for a model without token embeddings
        return None
    return module if isinstance(module, nn.Module) and hasattr(module, "weight") else None


def embedding_weight(base: Any) -> Tensor:
    """Return the token embeddings, (vocabulary, d)."""
    weight = token_embeddings(base).weight
    # It is a method of torch's quantised modules.
    return weight() if callable(weight) else weight


def reads_tokens(module: Any) -> bool:
    """Return whether a module is a transformers model that turns token ids into vectors."""
    has_tokens = isinstance(module, PreTrainedModel) and token_embeddings(module) is not None
    return has_tokens and "input_ids" in argument_names(module)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks, which move a module's weights to the device where it runs and back."""
    hook = vars(module).get("_hf_hook")  # asking a module for an attribute that it does not have takes long
    return [each for each in getattr(hook, "hooks", [hook]) if hasattr(each, "execution_device")]


def execution_device(module: nn.Module) -> torch.device | None:
    """Return the device on which accelerate runs a module, None where neither it nor a part of it is offloaded."""
    hooks = (hook for part in module.modules() for hook in hooks_of(part))
    return next((torch.device(hook.execution_device) for hook in hooks if hook.execution_device is not None), None)


@contextmanager
def loaded(base: nn.Module, parts: Iterable[nn.Module]) -> Iterator[None]:
    """Load the offloaded weights of some modules of a model onto the device where it runs, and offload them on exit."""
    inside = {module for part in parts for module in part.modules()}
    with ExitStack() as stack:
        for module in base.modules():
            for hook in hooks_of(module):
                moved = module.modules() if hook.place_submodules else [module]
                if hook.offload and not inside.isdisjoint(moved):
                    stack.callback(_offload, hook, module)
                    hook.pre_forward(module)
                    hook.offload = False  # a call of the module must not offload them
        yield


def position_parts(base: nn.Module, absolute: Any) -> list[nn.Module]:
    """Return the modules other than attention whose weights are read directly: tables, and the norm behind them."""
    tables: list[nn.Module] = [module for module in base.modules() if isinstance(module, nn.Embedding)]
    return tables if absolute is None else [*tables, absolute.norm]


def _offload(hook: Any, module: nn.Module) -> None:
    """Offload a module's weights again."""
    hook.offload = True
    hook.post_forward(module, None)


def refuse_quantised(base: nn.Module, module: nn.Module) -> None:
    """Refuse an attention module whose queries and keys are not a linear map of its input.

    Raises:
        ValueError: Some of its weights are quantised, or sharded over processes.
    """
    for part in module.modules():
        weight = getattr(part, "weight", None)
        plain = isinstance(weight, Tensor) and weight.is_floating_point() and type(weight.data) is Tensor
        if weight is not None and not plain:
            raise ValueError(f"{type(base).__name__} holds quantised or sharded weights; use positional_attention")
