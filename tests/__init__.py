"""The tests. Before numpy and torch start their threads, each worker of pytest-xdist gets one: they share the cores."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # also of what a test starts as a process of its own
