"""`Walk`: the interpreter with a handler for every kind of equation that may contain taps."""

from tapax._walk.handlers import HANDLERS
from tapax._walk.interpreter import Interpreter


class Walk(Interpreter):
    """One walk over one program, under one plan."""

    handlers = HANDLERS
