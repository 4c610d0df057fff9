"""Restoring a model: an interrupt at any line of the library leaves it as it was."""

import sys

import pytest
import torch

import pelocality
from pelocality._restore import restoring
from pelocality.extract import decompose, decomposition, eager, positional_attention
from tests.families import same, state, tiny, tokens

RESTORING = (eager.__file__, decomposition.__file__, pelocality._restore.__file__)


def interrupted(call, files, at):
    """Raise KeyboardInterrupt at the line event number ``at`` in these files; return whether the call got that far."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def every_interrupt(call, check, files=RESTORING):
    """Interrupt a call at each of its lines in turn and check what it leaves; return how many lines there are."""
    at = 1
    while interrupted(call, files, at):
        check(at)
        at += 1
    return at - 1


def test_what_was_changed_is_restored_even_when_restoring_is_interrupted():
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
    "positional_attention": lambda model: positional_attention(model, length=3, words=[7]),
    "decompose": lambda model: decompose(model, tokens(1, 3), layers=[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_leaves_the_model_as_it_was(name):
    call, model = CALLS[name], tiny("distilbert").train()
    next(model.children()).eval()  # a mixture of modes has to come back as well
    call(model)  # what transformers sets up once, it sets up here
    before = state(model)
    mark = "_output_capturing_hooks_installed"

    def check(at):
        assert same(before, state(model)), at
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), at
        assert not any(mark in module.__dict__ for module in model.modules()), at
        assert torch.is_grad_enabled(), at

    assert every_interrupt(lambda: call(model), check) > 50
