"""Plots of attention matrices, metrics, distance profiles and dependencies; all take ``ax=`` and return ``(fig, ax)``.

Plots are readable in black and white: weights are greys, NaN is hatched, and up to 52 lines differ in dash and marker.
A legend of more than six rows is placed beside the axes; create your own figures with ``layout="constrained"`` to leave
room for it. Nothing is shown or saved. Needs matplotlib (the ``plot`` extra).
"""

from pelocality.plots.evaluations import (
    distances as distances,
    head_types as head_types,
    loss_by_position as loss_by_position,
    needles as needles,
    regions as regions,
)
from pelocality.plots.layers import (
    bands as bands,
    comparison as comparison,
    head_classes as head_classes,
    head_grid as head_grid,
    trajectory as trajectory,
)
from pelocality.plots.matrices import (
    heatmap as heatmap,
    key_profiles as key_profiles,
    on_grid as on_grid,
    profiles as profiles,
)
