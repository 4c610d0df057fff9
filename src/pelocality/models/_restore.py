"""Restoring a user's model after a with-statement, also after an error or an interrupt in it."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def restoring(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` on leaving.

    A generator restores even where an interrupt falls between the block and its end, because Python closes a generator
    that is dropped.
    """
    try:
        yield
    finally:
        undo()


@contextmanager
def restoring_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block is left by an error or an interrupt."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and set it back on leaving; None where there was none."""
    before = getattr(target, name, None)
    with restoring(lambda: setattr(target, name, before)):
        setattr(target, name, value)
        yield


@contextmanager
def placed(target: Any, name: str, value: Any) -> Iterator[None]:
    """Put an attribute into an object itself, whatever its class has by that name, and take it out on leaving."""
    own = vars(target)
    before = {name: own[name]} if name in own else {}

    def undo() -> None:
        own.pop(name, None)
        own.update(before)

    with restoring(undo):
        own[name] = value
        yield


def override(target: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function in place of a method of an object, called with the object and what was in that place.

    That is a function which the user has put into the object, or None for the method of its class.
    """
    previous = target.__dict__.get(name)
    if getattr(previous, "func", None) is not function:
        target.__dict__[name] = functools.partial(function, target, previous)


def called(target: Any, name: str, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the method that a function of `override` replaces."""
    return previous or functools.partial(getattr(type(target), name), target)


def override_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Put a function in place of a forward pass, inside the hooks of accelerate, which may be removed before it."""
    override(module, "_old_forward" if "_old_forward" in module.__dict__ else "forward", function)


def restore_module(module: nn.Module, package: str) -> None:
    """Remove every hook of a module whose function is defined in a package, and undo every `override` by one.

    Unlike the handles that registering returns, this works on copies of the module.
    """

    def belongs(hook: Any) -> bool:
        function = getattr(hook, "hook", hook)  # torch wraps the hooks of loading
        return str(getattr(getattr(function, "func", function), "__module__", "")).startswith(package)

    for hooks, flags in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._state_dict_hooks, {}),
        (module._load_state_dict_pre_hooks, {}),
    ):
        for key in [key for key, hook in hooks.items() if belongs(hook)]:
            flags.pop(key, None)
            del hooks[key]
    for name, method in list(module.__dict__.items()):
        if isinstance(method, functools.partial) and inspect.isfunction(method.func) and belongs(method):
            previous = method.args[1]
            if previous is None and name == "_old_forward":  # accelerate's later hooks need a method there
                previous = called(module, "forward", None)
            if previous is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = previous


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    *,
    last: bool = False,
) -> Iterator[None]:
    """Register hooks on each of these modules, for calls in this thread, and remove them on leaving.

    Args:
        modules: A module that is listed twice gets its hooks once.
        before: Called with the module, its arguments and its keyword arguments, after hooks that are there already.
        after: Called with these and the module's output, before hooks that are there already.
        last: Call it after them instead.
    """
    handles: list[RemovableHandle] = []
    thread = threading.get_ident()

    def here(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *call: hook(*call) if threading.get_ident() == thread else None

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with restoring(remove):
        for module in dict.fromkeys(modules):
            if before is not None:
                handles.append(module.register_forward_pre_hook(here(before), with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(here(after), with_kwargs=True, prepend=not last))
        yield
