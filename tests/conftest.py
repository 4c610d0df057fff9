"""Settings for all tests. ``WEIGHTS_OFFSET=24 pytest`` runs them with weights 24 bytes past a 64-byte boundary."""

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

if not Path("/dev/nvidia0").exists():  # what is compiled for a GPU is tested without one; read when torch is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import transformers as hf
from hypothesis import settings

from tests.families import OFFSET, misaligned

# importing these changes the process for good: `test_another_device.py` gives them one of their own
collect_ignore = ["another_device.py", "pretended_device.py"]

with suppress(ImportError):  # torch's compiler imports setuptools, which must come before Python's own distutils
    importlib.import_module("setuptools")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

settings.register_profile("unhurried", deadline=None)  # how long an example takes depends on the machine
settings.load_profile("unhurried")

# What a test starts as a process of its own imports this tree too, whatever copy is installed (pytest: `pythonpath`).
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))


def pytest_collection_finish():
    """Exempt all that is imported by now from garbage collection: every `Trainer` collects several times."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _loaded_weights_lie_elsewhere():
    """Loaded weights lie 8 bytes further than those of a tiny model, as they may on any machine."""
    from_pretrained = hf.PreTrainedModel.from_pretrained.__func__

    def moved(cls, *arguments, **options):
        model = from_pretrained(cls, *arguments, **options)
        return misaligned(model, OFFSET + 8) if isinstance(model, torch.nn.Module) else model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.PreTrainedModel, "from_pretrained", classmethod(moved))
        yield
