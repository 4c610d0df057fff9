"""Reports: one page of all that the library says of a model, and models side by side.

- ``report``: every part that a model supports, as plain numbers and as one HTML page that opens offline.
- ``compare_models``: a row of numbers for each model, as a table, as JSON for an atlas, and as one page.
- ``load_model``, ``text_batches``, ``order_pairs``: the model, the texts and the changed sentences of a report.

Pages need matplotlib (the ``report`` extra). The commands ``pelocality report`` and ``pelocality compare`` make the
same pages.
"""

from pelocality.reports.atlas import Atlas as Atlas, atlas_row as atlas_row, compare_models as compare_models
from pelocality.reports.contents import Chart as Chart, Part as Part
from pelocality.reports.inputs import load_model as load_model, order_pairs as order_pairs, text_batches as text_batches
from pelocality.reports.result import Report as Report
from pelocality.reports.run import report as report
