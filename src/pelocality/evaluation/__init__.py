"""What an edit does to a model's answers: probes against classifiers, minimal pairs against language models.

- ``evaluate``: accuracy before and after, the difference with its interval, and who changed their mind.
- ``paper_table``: several evaluations in the layout of the paper, for Markdown or LaTeX.
- ``evaluate_minimal_pairs``: how often the original is the likelier sentence.
- ``pseudo_log_likelihood``, ``log_likelihood``: how likely a sentence is to a masked and to a causal model.
"""

from pelocality.evaluation.likelihood import log_likelihood, pseudo_log_likelihood
from pelocality.evaluation.minimal import MinimalPairEvaluation, evaluate_minimal_pairs
from pelocality.evaluation.probe import evaluate
from pelocality.evaluation.result import Evaluation
from pelocality.evaluation.table import PaperTable, paper_table
from pelocality.intervals import Estimate

__all__ = [
    "Estimate",
    "Evaluation",
    "MinimalPairEvaluation",
    "PaperTable",
    "evaluate",
    "evaluate_minimal_pairs",
    "log_likelihood",
    "paper_table",
    "pseudo_log_likelihood",
]
