"""The objects of NNX in a call: modules, optimizers, random streams, variables.

`Objects` takes them out of the arguments and out of the function: its closure, the globals that it
uses, the functions that it calls through either, the arguments of a partial, the object whose
method it is. It leaves slots in the arguments, and a recipe that makes the function from other
objects.

An object of another class that contains objects of NNX, such as a trainer, has state too: its
arrays, and the numbers, flags and strings that code assigns. Every call reads this state before it
runs, and writes it afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from tapax._frameworks.anchors import PathKey, leaf_path
from tapax._frameworks.nnx import holders
from tapax._frameworks.patches import current
from tapax._frameworks.roots import name_arguments
from tapax._frameworks.users_code import closure_values
from tapax._jax import Function, PyTree
from tapax._jax.pytrees import flatten_in_order, map_in_order, order_of, unflatten_in_order
from tapax._sites import join, segment


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ObjectSlot:
    """A placeholder for an object that was taken out of a structure."""

    number: int


class Holder:
    """An argument that is not a structure but contains objects; `recipe` makes it from others.

    No two holders are equal, because their other contents may change from call to call.
    """

    def __init__(self, value: PyTree, recipe: Recipe):
        self.value = value
        self.recipe = recipe


class FunctionHolder(Holder):
    """A function that closes over objects, as an argument; equal functions have equal holders."""

    def __eq__(self, other: object) -> bool:
        return type(other) is FunctionHolder and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def fill(tree: PyTree, objects: Any, bindings: Any = None) -> Any:
    """Replace slots in a structure by objects, and holders by what they make from `bindings`."""
    is_slot = lambda x: type(x) is ObjectSlot  # noqa: E731

    def filled(value: PyTree) -> Any:
        if is_slot(value):
            return objects[value.number]
        return value.recipe(bindings) if isinstance(value, Holder) else value

    return map_in_order(filled, tree, is_leaf=is_slot)


class ObjectBindings:
    """The objects that recipes fill in; on exit, they pass on what the made functions assigned."""

    def __init__(self, objects: Any, values: Any = ()):
        self.objects = objects
        self.values = map_in_order(lambda x: x, values)  # functions may change containers in place
        self.made: dict[int, Any] = {}
        self.assigned: dict[tuple[int, str, bool], Any] = {}
        self.changed: set[str] = set()
        self.missed = False  # true if an attribute changed that was not known to be state
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any], set[str]]] = {}
        self._twins: list[_TwinObject] = []

    def namespace(self, fn: types.FunctionType) -> dict[str, Any]:
        """Return a copy of the globals of a function, shared by all functions of a file."""
        new = fn.__globals__, dict(fn.__globals__), set()
        _, copied, assigned = self._globals.setdefault(id(fn.__globals__), new)
        assigned |= holders.assigned_globals(fn.__code__)
        return copied

    def twin(self, number: int, owner: Any, used: dict[str, Recipe], state: dict[str, int]) -> Any:
        """Copy an object that is not of NNX, and set its attributes `used` and `state`."""
        if id(owner) not in self.made:
            made = self.made[id(owner)] = object.__new__(type(owner))
            holders.set_attributes(made, holders.attributes(owner))
            holders.set_attributes(made, {name: self.values[i] for name, i in state.items()})
            holders.set_attributes(made, {name: recipe(self) for name, recipe in used.items()})
            before = {name: holders.identity(self.values[i]) for name, i in state.items()}
            self._twins.append(_TwinObject(number, owner, made, holders.attributes(made), before))
        return self.made[id(owner)]

    def __enter__(self) -> ObjectBindings:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for original, copied, assigned in self._globals.values():
            original.update((name, copied[name]) for name in assigned if name in copied)
        for twin in self._twins:
            for name, value in holders.attributes(twin.made).items():
                same = name in twin.before and twin.before[name] is value
                if same and (name not in twin.state or twin.state[name] == holders.identity(value)):
                    continue
                self.changed.add(name)
                if name in twin.before and name not in twin.state:
                    self.missed |= holders.is_state(twin.before[name], True)
                if holders.is_result(value):
                    self.assigned[twin.number, name, same] = value
                    continue
                if error is None and holders.is_number(value) and any(map(_is_traced, self.values)):
                    # After this error the next attempt keeps numbers static, also this number.
                    raise TypeError(
                        f"`{name}` of {type(twin.owner).__name__} is assigned inside "
                        "a transformation, so no traced value can leave the transformation by "
                        "it. Return the value instead."
                    )
                old = holders.attributes(twin.owner).get(name) if same else None
                holders.set_attributes(twin.owner, {name: holders.refilled(old, value)})


@dataclasses.dataclass(frozen=True)
class _TwinObject:
    number: int
    owner: Any
    made: Any
    before: dict[str, Any]
    state: dict[str, Any]


def _is_traced(value: PyTree) -> bool:
    return isinstance(value, Tracer) and holders.is_number(value)


Recipe = Callable[[ObjectBindings], Any]


class Objects:
    """Objects taken out of structures and functions, each once.

    `changing` has the names of attributes that calls are known to assign; `fn` is the function
    whose arguments these are.
    """

    def __init__(self, changing: Iterable[str] = (), fn: Function = lambda: None) -> None:
        self._name = name_arguments(fn)
        self._trail: list[str] = []
        self.taken: list[Any] = []
        self.paths: list[PathKey] = []
        self.values: list[Any] = []
        self.owners: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._functions: dict[int, Recipe] = {}
        self._inside: set[int] = set()
        self._changing = frozenset(changing)

    def _slot(self, keys: Any, value: PyTree) -> Any:
        if not holders.is_object(value):
            return value
        number = self._numbers.setdefault(id(value), len(self.taken))
        if number == len(self.taken):
            self.taken.append(value)
            named = [*self._trail, *(self._name(keys) if keys else ())]
            rest = map(leaf_path, ([key] for key in keys[2:]))
            self.paths.append(
                PathKey(join(str(number), leaf_path(keys)), "/".join([*named, *rest]))
            )
        return ObjectSlot(number)

    def take(self, tree: PyTree) -> Any:
        """Take the objects out of a structure; return it with a slot in place of each object."""
        is_leaf = holders.is_object
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        slots = [self._slot(keys, leaf) for keys, leaf in leaves]
        return unflatten_in_order(treedef, slots, order_of(tree, is_leaf))

    def take_arguments(self, tree: PyTree) -> Any:
        """Take objects out of arguments like `take`, also out of functions and other holders."""
        leaves, treedef, order = flatten_in_order(tree, holders.is_object)
        if any(map(holders.is_object, leaves)):
            return map_in_order(self._held, self.take(tree))
        held = [self._held(leaf) for leaf in leaves]
        changed = any(new is not old for new, old in zip(held, leaves, strict=True))
        return unflatten_in_order(treedef, held, order) if changed else tree

    def _held(self, value: PyTree) -> Any:
        recipe = None if holders.is_plain(value) else self.lift(value)
        if recipe is None:
            return value
        is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
        return (FunctionHolder if is_function else Holder)(value, recipe)

    def lift(self, value: PyTree) -> Recipe | None:
        """Make a recipe that makes a value from other objects; None if it contains no objects."""
        if holders.is_object(value):
            number = self._slot((), value).number
            return lambda bindings: bindings.objects[number]
        if inspect.ismethod(value):
            return self._lift_method(value)
        if isinstance(value, functools.partial):
            return self._lift_partial(value)
        if inspect.isfunction(value):
            return self._lift_function(value)
        if type(value) in (list, tuple, dict):
            return self._lift_container(value)
        lifted = self._lift_attributes(value) if holders.has_attributes(value) else None
        return lifted or self._lift_structure(value)

    def _lift_structure(self, value: PyTree) -> Recipe | None:
        """Make a recipe for another structure that JAX knows, such as a named tuple."""
        parts, treedef = jax.tree.flatten(value, is_leaf=holders.is_object)
        if jax.tree_util.treedef_is_leaf(treedef):
            return None
        made = self._lift_container(parts)
        return (lambda bindings: treedef.unflatten(made(bindings))) if made else None

    def _lift_container(self, value: PyTree) -> Recipe | None:
        kind = type(value)
        keys = list(value) if kind is dict else range(len(value))
        if id(value) in self._inside:  # the container contains itself
            return None
        self._inside.add(id(value))
        lifted = self._lift_all({key: value[key] for key in keys})
        self._inside.discard(id(value))
        if not lifted:
            return None

        def make(bindings: ObjectBindings) -> Any:
            parts = [lifted[k](bindings) if k in lifted else value[k] for k in keys]
            return dict(zip(keys, parts, strict=True)) if kind is dict else kind(parts)

        return make

    def _lift_all(self, values: dict[Any, Any], names: Sequence[str] = ()) -> dict[Any, Recipe]:
        """Make recipes for the values that contain objects; `names` or keys name the values."""
        found = {}
        for name, (key, value) in zip(names or values, values.items(), strict=True):
            self._trail.append(segment(name))
            found[key] = self.lift(value)
            self._trail.pop()
        return {key: recipe for key, recipe in found.items() if recipe is not None}

    def _lift_attributes(self, value: PyTree) -> Recipe | None:
        if id(value) in self._inside:  # two objects contain each other
            return lambda bindings: bindings.made[id(value)]
        held = {k: v for k, v in holders.attributes(value).items() if holders.holds_object(v)}
        self._inside.add(id(value))
        used = self._lift_all(held)
        self._inside.discard(id(value))
        if not used:
            return None
        state, changing = {}, holders.assigned_by_methods(type(value)) | self._changing
        for name, attribute in holders.attributes(value).items():
            if name not in used and holders.is_state(attribute, name in changing):
                state[name] = len(self.values)
                self.values.append(attribute)
        number = len(self.owners)
        self.owners.append(value)
        return lambda bindings: bindings.twin(number, value, used, state)

    def assign(self, assigned: dict[tuple[int, str, bool], Any]) -> None:
        """Assign values that a call computed to the attributes of objects that are not of NNX."""
        for (number, name, in_place), value in assigned.items():
            owner = self.owners[number]
            before = getattr(owner, name, None)
            if in_place:
                value = holders.refilled(before, value)
            elif holders.is_number(value) and not isinstance(before, jax.Array):
                value = value.item()
            holders.set_attributes(owner, {name: value})

    def _lift_method(self, value: PyTree) -> Recipe | None:
        owner, method = self.lift(value.__self__), value.__func__
        if owner is not None and holders.is_object(value.__self__):
            # Look up the method at the call: its class may be patched by then.
            return lambda bindings: current(types.MethodType(method, owner(bindings)))
        fn = self._lift_function(method) if inspect.isfunction(method) else None
        if owner is None and fn is None:
            return None

        def make(bindings: ObjectBindings) -> Any:
            made = fn(bindings) if fn else method
            return types.MethodType(made, owner(bindings) if owner else value.__self__)

        return make

    def _lift_partial(self, value: functools.partial[Any]) -> Recipe | None:
        fn, args = self.lift(value.func), self._lift_container(value.args)
        kwargs = self._lift_container(value.keywords)
        if fn is None and args is None and kwargs is None:
            return None

        def make(bindings: ObjectBindings) -> Any:
            made = fn(bindings) if fn else value.func
            positional = args(bindings) if args else value.args
            keywords = kwargs(bindings) if kwargs else value.keywords
            return current(functools.partial(made, *positional, **keywords))

        return make

    def _lift_function(self, fn: types.FunctionType) -> Recipe | None:
        if id(fn) in self._functions:
            return self._functions[id(fn)]
        # A function may refer to itself.
        self._functions[id(fn)] = lambda bindings: bindings.made[id(fn)]
        names = (name for name in holders.names_in(fn.__code__) if name in fn.__globals__)
        used = {name: fn.__globals__[name] for name in names}
        mine = {k: v for k, v in used.items() if not holders.is_anothers(v, fn)}
        lifted = self._lift_all(mine)
        cells = self._lift_all(dict(enumerate(closure_values(fn))), fn.__code__.co_freevars)
        defaults = self._lift_container(fn.__defaults__ or ())
        named = self._lift_container(fn.__kwdefaults__ or {})
        if not (lifted or cells or defaults or named):
            del self._functions[id(fn)]
            return None

        def make(bindings: ObjectBindings) -> Any:
            if id(fn) in bindings.made:
                return bindings.made[id(fn)]
            closure = fn.__closure__ or ()
            # Share a cell without objects, because the function may assign to it.
            fresh = tuple(types.CellType() if i in cells else c for i, c in enumerate(closure))
            space = bindings.namespace(fn) if lifted else fn.__globals__
            made = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, fresh)
            bindings.made[id(fn)] = made
            space.update((name, recipe(bindings)) for name, recipe in lifted.items())
            for i, recipe in cells.items():
                fresh[i].cell_contents = recipe(bindings)
            made.__defaults__ = defaults(bindings) if defaults else fn.__defaults__
            made.__kwdefaults__ = named(bindings) if named else fn.__kwdefaults__
            return functools.update_wrapper(made, fn)

        self._functions[id(fn)] = make
        return make
