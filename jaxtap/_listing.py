"""`modules`: the path and the class of every module of a model.

>>> import jaxtap as jt
>>> from flax import nnx
>>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
>>> for path, cls in jt.modules(model):
...     print(path, cls.__name__)
Sequential Sequential
Sequential/layers/0 Linear
"""

from __future__ import annotations

from typing import Any

from jaxtap import adapters


class ModuleTable(tuple[tuple[str, type], ...]):
    """Paths and classes, in the order of the model; prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        from jaxtap._show import modules_table

        return modules_table(self)


def modules(model: Any, *args: Any, **kwargs: Any) -> ModuleTable:
    """The path and the class of every module of `model`: pairs, of which `dict` makes a dict.

    The paths are those of the sites that `capture` finds. Modules of NNX, Equinox and brainstate
    are objects with attributes, and are listed as they are. The modules in one of Linen come to be
    when it is called, and those of a transformed Haiku function as well: give the arguments that
    you would give to `init`, without the random key. Nothing is computed.
    """
    for adapter in adapters.present():
        listed = adapter.listing(model, args, kwargs)
        if listed is not None:
            return ModuleTable(listed)
    raise TypeError(
        f"`modules` takes a model of Flax, Equinox, Haiku or brainstate, but was given {model!r} "
        f"of type {type(model).__name__}. What a plain function has are sites: "
        "jt.sites(fn)(*args) lists them."
    )
