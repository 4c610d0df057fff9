"""Evaluation of models on probes and treebanks, with confidence intervals.

- ``evaluate``: a classifier's accuracy before and after a change of word order, and the difference.
- ``paper_table``: several evaluations in the layout of the paper, as Markdown or LaTeX.
- ``evaluate_minimal_pairs``: how often the original has the higher score.
- ``pseudo_log_likelihood``, ``log_likelihood``: the score of a sentence from a masked and from a causal model.
- ``dependencies``: which heads attend along which dependencies, and how long dependencies are.
"""

from pelocality.evaluation.classifiers import evaluate as evaluate
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
