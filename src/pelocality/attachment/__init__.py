"""Encodings in Hugging Face models: in, out again, saved and loaded.

``attach(model, encoding)`` adds the encoding's bias in every layer, one mechanism for all families: an attention module
is handed its mask with the bias added, by a hook on that module alone. `bias` holds that, `silence` what takes a
model's own positions away, `handle` the doors, `saving` the way to disk and back.
"""

from pelocality.attachment.handle import Attachment, attach, attached
from pelocality.attachment.saving import load

__all__ = ["Attachment", "attach", "attached", "load"]
