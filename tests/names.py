"""Names of all functions that take attention, for the tests that every metric has to pass."""

import inspect

from pelocality import metrics

METRICS = sorted(
    name
    for name, function in vars(metrics).items()
    if inspect.isfunction(function) and "attention" in inspect.signature(function).parameters
)
