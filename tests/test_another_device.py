"""The tests of `another_device.py`, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

PRETENDED = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.skipif(not (PRETENDED or torch.cuda.is_available()), reason="no GPU, and this PyTorch cannot pretend one")
def test_everything_computes_on_another_device_what_it_computes_on_a_cpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "another_device.py"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
