"""The formats of models, in the order in which they are asked whether a source is theirs.

Everybody who has to know what a model is asks here. A new format is one file like
engine/models/format_gguf.py and one entry in FORMATS, before the last, which takes the rest.
"""

from engine.models.format import ModelFormat
from engine.models.format_gguf import Gguf
from engine.models.format_server import Server
from engine.models.format_transformers import Transformers

FORMATS: tuple[ModelFormat, ...] = (Server(), Gguf(), Transformers())


def format_of(source: str) -> ModelFormat:
    """The format of a source, by its name alone."""
    return next(each for each in FORMATS if each.recognises(source))
