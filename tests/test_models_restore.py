"""Restoring a model: an interrupt at any line of the library leaves it as it was."""

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from pelocality.models import _inference, _restore, decompose, layers, observer, positional_attention, sequence_model
from pelocality.models._restore import called, override, override_forward, restore_module, restoring
from pelocality.models.logits import decomposition
from tests.families import same, state, tiny, tokens

MODULES = (observer, layers, sequence_model, decomposition, _inference, _restore)
RESTORING = tuple(module.__file__ for module in MODULES)


def lines_of(call, files, interrupt_at=None):
    """Return the lines of these files that a call runs, in order; raise KeyboardInterrupt at one of them."""
    lines = []

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 == interrupt_at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        assert interrupt_at is not None
    finally:
        sys.settrace(before)
    return lines


def every_interrupt(call, check, files=RESTORING, prepare=lambda: None, step=1):
    """Interrupt a call at each line, at its first and its last execution, and check the state after that.

    Of a long call, every ``step``-th of these executions is interrupted.
    """
    prepare()
    lines = lines_of(call, files)
    first = {line: index for index, line in reversed(list(enumerate(lines)))}
    last = {line: index for index, line in enumerate(lines)}
    for index in sorted({*first.values(), *last.values()})[::step]:
        prepare()
        assert len(lines_of(call, files, index)) == index + 1
        check(lines[index])
    return len(first)


def test_changes_are_undone_even_when_undoing_is_interrupted():
    values = {"a": 1, "b": 2}

    def call():
        recorded = dict(values)

        def undo():
            for key, value in recorded.items():
                values[key] = value

        with restoring(undo):
            values.update(a=3, b=4)

    def check(at):
        assert values == {"a": 1, "b": 2}, at

    assert every_interrupt(call, check, (__file__, *RESTORING)) > 10


def doubled(module, previous, states):
    return 2 * called(module, "forward", previous)(states)


def hook(*_):
    pass


def other_hook(*_):
    pass


other_hook.__module__ = "another_library"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


@pytest.mark.parametrize("copied", [False, True])
def test_what_a_package_has_put_into_a_module_is_removed_and_nothing_else(copied):
    module, states = nn.Linear(2, 2), torch.randn(3, 2)
    before = module(states)
    for each in (hook, other_hook):
        module.register_forward_pre_hook(each, with_kwargs=True)
        module.register_forward_hook(functools.partial(each, 1))
        module.register_state_dict_post_hook(each)
        module.register_load_state_dict_pre_hook(each)
    override(module, "extra_repr", hook)
    override_forward(module, doubled)
    assert torch.equal(module(states), 2 * before)
    module = copy.deepcopy(module) if copied else module
    restore_module(module, __name__)
    assert torch.equal(module(states), before)
    assert [len(getattr(module, name)) for name in HOOKS] == [1] * 4
    assert not {"forward", "extra_repr"} & vars(module).keys()
    assert not module._forward_hooks_with_kwargs
    assert len(module._forward_pre_hooks_with_kwargs) == 1


def test_the_method_of_a_user_that_was_overridden_comes_back():
    module, states = nn.Linear(2, 2), torch.randn(3, 2)
    module.forward = own = lambda states: states + 1
    override_forward(module, doubled)
    assert torch.equal(module(states), 2 * (states + 1))
    restore_module(module, __name__)
    assert module.forward is own


def test_an_error_inside_is_passed_on():
    done = []
    with pytest.raises(ZeroDivisionError), restoring(lambda: done.append(1)):
        raise ZeroDivisionError
    assert done


CALLS = {
    "positional_attention": ("distilbert", lambda model: positional_attention(model, length=3, words=[7])),
    "decompose": ("distilbert", lambda model: decompose(model, tokens(1, 3), layers=[0])),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_restores_the_model(name):
    family, call = CALLS[name]
    model = tiny(family).train()
    next(model.children()).eval()  # a mixture of modes has to come back as well
    call(model)  # what transformers sets up once, it sets up here
    before = state(model)
    mark = "_output_capturing_hooks_installed"

    def check(at):
        assert same(before, state(model)), at
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), at
        assert not any(mark in module.__dict__ for module in model.modules()), at
        assert torch.is_grad_enabled(), at
        assert not _get_current_function_mode_stack(), at

    assert every_interrupt(lambda: call(model), check, step=11) > 50
