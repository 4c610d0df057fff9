"""Restoring a model: an interrupt at any line of the library leaves it as it was."""

import sys

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import pelocality
from pelocality.models import decompose, layers, observer, positional_attention, sequence_model
from pelocality.models._restore import restoring
from pelocality.models.logits import decomposition
from tests.families import UNKNOWN, same, state, tiny, tokens

MODULES = (observer, layers, sequence_model, decomposition, pelocality.models._restore)
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


def every_interrupt(call, check, files=RESTORING, prepare=lambda: None):
    """Interrupt a call at each line, at its first and its last execution, and check the state after that."""
    prepare()
    lines = lines_of(call, files)
    first = {line: index for index, line in reversed(list(enumerate(lines)))}
    last = {line: index for index, line in enumerate(lines)}
    for index in sorted({*first.values(), *last.values()}):
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


def test_an_error_inside_is_passed_on():
    done = []
    with pytest.raises(ZeroDivisionError), restoring(lambda: done.append(1)):
        raise ZeroDivisionError
    assert done


CALLS = {
    "positional_attention": ("distilbert", lambda model: positional_attention(model, length=3, words=[7])),
    "decompose": ("distilbert", lambda model: decompose(model, tokens(1, 3), layers=[0])),
    "a family without a record": ("rembert", lambda model: positional_attention(model, length=3, words=[7])),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_restores_the_model(name):
    family, call = CALLS[name]
    model = UNKNOWN[family]().train() if family in UNKNOWN else tiny(family).train()
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

    assert every_interrupt(lambda: call(model), check) > 50
