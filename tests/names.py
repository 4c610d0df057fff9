"""Names of the functions that take attention, so that a new metric is tested by those that test all of them."""

import inspect

from pelocality import metrics

METRICS = sorted(
    name
    for name, function in vars(metrics).items()
    if inspect.isfunction(function) and "attention" in inspect.signature(function).parameters
)
