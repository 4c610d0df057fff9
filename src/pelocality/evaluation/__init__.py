"""Evaluation of models on probes and treebanks, with confidence intervals.

- ``evaluate``: a classifier's accuracy before and after a change of word order, and the difference.
- ``paper_table``: several evaluations in the layout of the paper, as Markdown or LaTeX.
- ``evaluate_minimal_pairs``: how often the original has the higher score.
- ``pseudo_log_likelihood``, ``log_likelihood``: the score of a sentence from a masked and from a causal model.
- ``evaluate_needles``: how often the answer in a long input is found; ``bag_of_words`` is its control.
- ``slot_effect``: how much the place of a part in a text changes its score.
- ``loss_by_position``: the loss of a decoder at each position of long texts.
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
from pelocality.evaluation.needles import (
    NeedleEvaluation as NeedleEvaluation,
    bag_of_words as bag_of_words,
    evaluate_needles as evaluate_needles,
)
from pelocality.evaluation.positions import LossByPosition as LossByPosition, loss_by_position as loss_by_position
from pelocality.evaluation.result import Evaluation as Evaluation
from pelocality.evaluation.slots import (
    SlotEffect as SlotEffect,
    similarity_to_parts as similarity_to_parts,
    slot_effect as slot_effect,
)
from pelocality.evaluation.tables import PaperTable as PaperTable, paper_table as paper_table
