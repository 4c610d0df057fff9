"""Models: what their positions do, and encodings attached to them.

Pass a transformers model that reads token ids directly. For any other module, a ``SequenceModel`` says what the module
reads.

These functions and classes measure a model:

- ``positional_attention``: the attention of one repeated word, averaged over words.
- ``text_average``: the mean attention over texts, and how much of each head's attention position explains.
- ``AttentionFunction``: any function from token ids to attention, as a model.
- ``positional_logits``: the position-only logits, exact or of the mean content of texts, at any length.
- ``rotary_bands``: which frequencies of its rotations each head uses on text.
- ``head_classes``: what each head does: previous token, induction, sink, positional or symbolic, with controls.
- ``decompose``: the logits of real text as content, position and the two cross terms.
- ``order_use``: how far tokens move if two neighbouring words change places, and which layer reads that.
- ``reflection_gap``: whether a model can distinguish a sequence from its reversal.
- ``audit``: which positions a model really runs, declared by its configuration against measured.
- ``LocalityCallback``: locality, symmetry and their complements of every layer while a model trains.

Changed: ``attach(model, encoding)`` adds the encoding's bias to the attention logits of every layer until it is
removed; ``load`` brings a saved one back; ``relocate`` trains a copy with it to do what the model did.

Each name is loaded on first use, so that measuring loads no Trainer. Their list is the stub beside this file.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
