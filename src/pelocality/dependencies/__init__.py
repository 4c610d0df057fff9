"""What heads know of syntax: attention against dependency trees, and how far dependencies reach.

- ``dependency_accuracy``: how often the word a head attends to most is the syntactic head or dependent.
- ``compare_head_kinds``: which relations positional heads find better, and which contextual heads.
- ``dependency_distances``: how many words apart dependents and heads stand, per relation and language.
"""

from pelocality.dependencies.accuracy import dependency_accuracy
from pelocality.dependencies.distances import DependencyDistances, dependency_distances
from pelocality.dependencies.kinds import HeadKinds, compare_head_kinds
from pelocality.dependencies.result import DependencyAccuracy

__all__ = [
    "DependencyAccuracy",
    "DependencyDistances",
    "HeadKinds",
    "compare_head_kinds",
    "dependency_accuracy",
    "dependency_distances",
]
