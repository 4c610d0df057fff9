"""How local and how symmetric are a model's positional encodings, and what does that do to it?

The map, each name loaded on first use (``import pelocality`` alone loads neither torch nor transformers):

Numbers:

- ``metrics``: numbers from a positional weight matrix; nothing but tensors.
- ``streaming``: the same numbers without an n x n matrix, for long contexts.
- ``accumulate``: the metrics as torchmetrics classes, summed over batches and processes.
- ``tables``: from a table of position embeddings to a matrix.
- ``encodings``: the attenuated encoding and its baselines, one small protocol, and PyTorch's attention function with
  any of them.
- ``layers``: self-attention of your own that takes any of them.
- ``architectures``: where each model family keeps attention and positions.
- ``extract``: from a Hugging Face model to its positional matrices, logits and their parts.
- ``attachment``: encodings in Hugging Face models: in, out again, saved and loaded.
- ``reflection``: whether a model can tell a sequence from its mirror image.
- ``training``: measuring while a model trains.
- ``plots``: pictures of all of it.

Language:

- ``trees``: sentences, spans, trees and frames; the one data model of the probes.
- ``corpora``: from files to sentences and pairs.
- ``probes``: from sentences to edited datasets.
- ``evaluation``: from a model and a probe to numbers with intervals.
- ``dependencies``: which heads follow which dependencies, and how far they reach.
- ``intervals``: the statistics under both.

The list of names itself is the stub beside this file, ``__init__.pyi``: one list for Python and for type checkers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
