"""Which heads attend along which dependencies, and how long dependencies are."""

from pelocality.evaluation.dependencies.accuracy import dependency_accuracy as dependency_accuracy
from pelocality.evaluation.dependencies.corpus_distances import (
    DependencyDistances as DependencyDistances,
    dependency_distances as dependency_distances,
)
from pelocality.evaluation.dependencies.head_types import (
    HeadTypes as HeadTypes,
    compare_head_types as compare_head_types,
)
from pelocality.evaluation.dependencies.result import DependencyAccuracy as DependencyAccuracy
