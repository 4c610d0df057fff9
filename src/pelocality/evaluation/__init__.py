"""From a model and a probe to numbers with intervals.

- ``evaluate``: a classifier's accuracy before and after a change of word order, and the difference.
- ``paper_table``: several evaluations in the layout of the paper, for Markdown or LaTeX.
- ``evaluate_minimal_pairs``: how often the original is the likelier sentence.
- ``pseudo_log_likelihood``, ``log_likelihood``: how likely a sentence is to a masked and to a causal model.
- ``dependency_accuracy``, ``compare_head_types``: which heads follow which dependencies.
- ``dependency_distances``: how many words apart dependents and heads stand, per relation and language.
"""

from pelocality.evaluation.classifiers import evaluate as evaluate
from pelocality.evaluation.dependencies import (
    DependencyAccuracy as DependencyAccuracy,
    DependencyDistances as DependencyDistances,
    HeadTypes as HeadTypes,
    compare_head_types as compare_head_types,
    dependency_accuracy as dependency_accuracy,
    dependency_distances as dependency_distances,
)
from pelocality.evaluation.likelihood import (
    log_likelihood as log_likelihood,
    pseudo_log_likelihood as pseudo_log_likelihood,
)
from pelocality.evaluation.minimal_pairs import (
    MinimalPairEvaluation as MinimalPairEvaluation,
    evaluate_minimal_pairs as evaluate_minimal_pairs,
)
from pelocality.evaluation.result import Evaluation as Evaluation
from pelocality.evaluation.tables import PaperTable as PaperTable, paper_table as paper_table
