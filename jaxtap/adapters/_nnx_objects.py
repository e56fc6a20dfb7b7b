"""The objects of NNX that a call holds: modules, optimizers, random streams, variables.

They are taken out of the arguments, and out of the function: out of what it closes over, the
globals that it uses, the functions that it calls by either, a partial's arguments, the object whose
method it is. `Objects` leaves slots, or a recipe of the function, to be filled with others.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtap._anchors import PathKey, leaf_path
from jaxtap._arguments import in_order, map_in_order, order_of
from jaxtap._scopes import join

TRANSFORMED = tuple({type(nnx.jit(lambda: None, graph=graph)) for graph in (True, False)})


def is_object(value: Any) -> bool:
    """Whether a value is an object of NNX that has state, or holds some that have."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Slot:
    """Where an object was taken from."""

    number: int


class Holder:
    """An argument that is no structure, and holds objects; its recipe makes it with others.

    What else it holds may change from call to call: no two are equal.
    """

    def __init__(self, value: Any, recipe: Recipe):
        self.value = value
        self.recipe = recipe


class Function(Holder):
    """An argument that is a function, and closes over objects. Equal functions are the same."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Function and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def fill(tree: Any, objects: Any, filling: Any = None) -> Any:
    """The structure with objects in the place of its slots; `filling` makes what holds some."""
    is_slot = lambda x: type(x) is Slot  # noqa: E731

    def filled(value: Any) -> Any:
        if is_slot(value):
            return objects[value.number]
        return value.recipe(filling) if isinstance(value, Holder) else value

    return map_in_order(filled, tree, is_leaf=is_slot)


class Filling:
    """Objects with which functions are made; what these assign is handed on when they are done."""

    def __init__(self, objects: Any):
        self.objects = objects
        self.made: dict[int, Any] = {}
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any], set[str]]] = {}
        self._twins: list[tuple[Any, Any, dict[str, Any]]] = []

    def namespace(self, fn: types.FunctionType) -> dict[str, Any]:
        """A copy of the globals of a function, one for all functions of a file."""
        new = fn.__globals__, dict(fn.__globals__), set()
        _, copied, assigned = self._globals.setdefault(id(fn.__globals__), new)
        assigned |= _assigned(fn.__code__)
        return copied

    def twin(self, owner: Any, used: dict[str, Recipe]) -> Any:
        """A copy of an object that is not one of NNX's, with some attributes filled."""
        if id(owner) not in self.made:
            twin = self.made[id(owner)] = object.__new__(type(owner))
            _assign(twin, _attributes(owner))
            _assign(twin, {name: recipe(self) for name, recipe in used.items()})
            self._twins.append((owner, twin, _attributes(twin)))
        return self.made[id(owner)]

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *_: object) -> None:
        for original, copied, assigned in self._globals.values():
            original.update((name, copied[name]) for name in assigned if name in copied)
        for owner, twin, before in self._twins:
            now = _attributes(twin)
            changed = {k: v for k, v in now.items() if k not in before or before[k] is not v}
            _assign(owner, changed)


Recipe = Callable[[Filling], Any]


class Objects:
    """Objects taken out of structures and functions; each is there once."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.paths: list[PathKey] = []
        self._numbers: dict[int, int] = {}
        self._functions: dict[int, Recipe] = {}
        self._inside: set[int] = set()

    def _slot(self, keys: Any, value: Any) -> Any:
        if not is_object(value):
            return value
        number = self._numbers.setdefault(id(value), len(self.taken))
        if number == len(self.taken):
            self.taken.append(value)
            self.paths.append(PathKey(join(str(number), leaf_path(keys))))
        return Slot(number)

    def take(self, tree: Any) -> Any:
        """The structure with a slot in the place of each."""
        taken = jax.tree_util.tree_map_with_path(self._slot, tree, is_leaf=is_object)
        return in_order(taken, order_of(tree))

    def take_arguments(self, tree: Any) -> Any:
        """As `take`; and those that functions and other arguments hold are taken too."""
        return map_in_order(self._held, self.take(tree))

    def _held(self, value: Any) -> Any:
        recipe = None if _is_plain(value) else self.lift(value)
        if recipe is None:
            return value
        is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
        return (Function if is_function else Holder)(value, recipe)

    def lift(self, value: Any) -> Recipe | None:
        """How to make a value from other objects; None if it holds none."""
        if is_object(value):
            number = self._slot((), value).number
            return lambda filling: filling.objects[number]
        if inspect.ismethod(value):
            return self._lift_method(value)
        if isinstance(value, functools.partial):
            return self._lift_partial(value)
        if inspect.isfunction(value):
            return self._lift_function(value)
        if type(value) in (list, tuple, dict):
            return self._lift_container(value)
        lifted = self._lift_attributes(value) if _has_attributes(value) else None
        return lifted or self._lift_structure(value)

    def _lift_structure(self, value: Any) -> Recipe | None:
        """A structure that JAX knows: a named tuple, say."""
        parts, treedef = jax.tree.flatten(value, is_leaf=is_object)
        if jax.tree_util.treedef_is_leaf(treedef):
            return None
        made = self._lift_container(parts)
        return (lambda filling: treedef.unflatten(made(filling))) if made else None

    def _lift_container(self, value: Any) -> Recipe | None:
        kind = type(value)
        keys = list(value) if kind is dict else range(len(value))
        if id(value) in self._inside:  # it is in itself
            return None
        self._inside.add(id(value))
        lifted = self._lift_all({key: value[key] for key in keys})
        self._inside.discard(id(value))
        if not lifted:
            return None

        def make(filling: Filling) -> Any:
            parts = [lifted[k](filling) if k in lifted else value[k] for k in keys]
            return dict(zip(keys, parts, strict=True)) if kind is dict else kind(parts)

        return make

    def _lift_all(self, values: dict[Any, Any]) -> dict[Any, Recipe]:
        found = ((key, self.lift(value)) for key, value in values.items())
        return {key: recipe for key, recipe in found if recipe is not None}

    def _lift_attributes(self, value: Any) -> Recipe | None:
        if id(value) in self._inside:  # it holds another that holds it
            return lambda filling: filling.made[id(value)]
        held = {k: v for k, v in _attributes(value).items() if _holds_object(v)}
        self._inside.add(id(value))
        used = self._lift_all(held)
        self._inside.discard(id(value))
        return (lambda filling: filling.twin(value, used)) if used else None

    def _lift_method(self, value: Any) -> Recipe | None:
        owner = self.lift(value.__self__)
        if owner is None:
            return None
        if is_object(value.__self__):  # its class may be patched by now
            return lambda filling: getattr(owner(filling), value.__name__)
        return lambda filling: types.MethodType(value.__func__, owner(filling))

    def _lift_partial(self, value: functools.partial[Any]) -> Recipe | None:
        fn, args = self.lift(value.func), self._lift_container(value.args)
        kwargs = self._lift_container(value.keywords)
        if fn is None and args is None and kwargs is None:
            return None

        def make(filling: Filling) -> Any:
            made = fn(filling) if fn else value.func
            positional = args(filling) if args else value.args
            return functools.partial(
                made, *positional, **(kwargs(filling) if kwargs else value.keywords)
            )

        return make

    def _lift_function(self, fn: types.FunctionType) -> Recipe | None:
        if id(fn) in self._functions:
            return self._functions[id(fn)]
        # A function may refer to itself.
        self._functions[id(fn)] = lambda filling: filling.made[id(fn)]
        names = (name for name in _names(fn.__code__) if name in fn.__globals__)
        used = {name: fn.__globals__[name] for name in names}
        mine = {k: v for k, v in used.items() if not _is_anothers(v, fn)}
        lifted = self._lift_all(mine)
        cells = self._lift_all(dict(enumerate(map(_contents, fn.__closure__ or ()))))
        defaults = self._lift_container(fn.__defaults__ or ())
        named = self._lift_container(fn.__kwdefaults__ or {})
        if not (lifted or cells or defaults or named):
            del self._functions[id(fn)]
            return None

        def make(filling: Filling) -> Any:
            if id(fn) in filling.made:
                return filling.made[id(fn)]
            closure = fn.__closure__ or ()
            # A cell that holds nothing of interest is shared: the function may assign to it.
            fresh = tuple(types.CellType() if i in cells else c for i, c in enumerate(closure))
            space = filling.namespace(fn) if lifted else fn.__globals__
            made = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, fresh)
            filling.made[id(fn)] = made
            space.update((name, recipe(filling)) for name, recipe in lifted.items())
            for i, recipe in cells.items():
                fresh[i].cell_contents = recipe(filling)
            made.__defaults__ = defaults(filling) if defaults else fn.__defaults__
            made.__kwdefaults__ = named(filling) if named else fn.__kwdefaults__
            return functools.update_wrapper(made, fn)

        self._functions[id(fn)] = make
        return make


_DEPTH = 4
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, np.ndarray, Slot})


def _holds_object(value: Any) -> bool:
    """Whether there is an object in a value, in what it holds, and so on for a few levels."""
    level, seen = [value], {id(value): value}
    for _ in range(_DEPTH):
        if any(map(is_object, level)):
            return True
        # There may be very many that are plain, and the other tests are slow.
        parts = (x for held in level for x in _parts(held) if type(x) not in _PLAIN)
        new = {id(x): x for x in parts if id(x) not in seen}
        seen |= new
        level = list(new.values())
    return any(map(is_object, level))


def _parts(value: Any) -> list[Any]:
    """What a value holds."""
    if _is_plain(value):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if inspect.ismethod(value):
        return [value.__self__]
    if inspect.isfunction(value):
        return [_contents(cell) for cell in value.__closure__ or ()]
    return list(_attributes(value).values()) if _has_attributes(value) else []


def _is_plain(value: Any) -> bool:
    """Whether a value can hold no object."""
    return type(value) in _PLAIN or isinstance(value, (jax.Array, np.ndarray, np.generic))


def _has_attributes(value: Any) -> bool:
    """Whether a value is one that a copy with other attributes can stand for."""
    # The transformations of NNX know themselves by their identity.
    kept = (type, types.ModuleType, *TRANSFORMED)
    if isinstance(value, kept) or inspect.isroutine(value) or not _attributes(value):
        return False
    try:
        object.__new__(type(value))
    except TypeError:  # it is more than its attributes, as a dict is
        return False
    return True


def _attributes(value: Any) -> dict[str, Any]:
    slots = (name for cls in type(value).__mro__ for name in _slots(cls))
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if n[:2] != "__")


def _assign(value: Any, attributes: dict[str, Any]) -> None:
    """Sets attributes, of frozen objects too."""
    for name, attribute in attributes.items():
        object.__setattr__(value, name, attribute)


def _is_anothers(value: Any, fn: types.FunctionType) -> bool:
    """Whether a global is a function of another file, which is not looked into."""
    return inspect.isfunction(value) and value.__globals__ is not fn.__globals__


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for inner in _codes(code) for name in inner.co_names)


@functools.lru_cache(maxsize=4096)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The globals that a function assigns."""
    return frozenset(
        step.argval
        for inner in _codes(code)
        for step in dis.get_instructions(inner)
        if step.opname == "STORE_GLOBAL"
    )
