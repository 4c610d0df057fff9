"""Restoring a model, and what was put into it."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from pelocality.models import decompose
from pelocality.models._restore import called, override, override_forward, restore_module, restoring
from tests.families import same, state, tiny, tokens


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_model_is_as_it_was_after_an_error_inside(error):
    model = tiny("distilbert").train()
    next(model.children()).eval()  # a mixture of modes has to come back as well

    def fail(*_):
        raise error

    handle = model.transformer.layer[1].register_forward_hook(fail)
    before = state(model)
    with pytest.raises(error):
        decompose(model, tokens(1, 3), layers=[0])
    assert same(before, state(model))
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()
    assert not _get_current_function_mode_stack()
