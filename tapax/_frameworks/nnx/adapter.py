"""Flax NNX: modules are objects with attributes, and a call changes their state in place.

While a capture traces, the adapter replaces the methods of all classes to observe calls. It splits
arguments that contain modules, optimizers, random streams or variables into arrays, and merges them
inside, by NNX's `update_context`, as `nnx.jit` does. After the call the objects are as they would
be without a capture.

The adapter also splits objects that the function closes over: in its closure, its Python module,
the closure of a helper, or the attributes of the object whose method it is. `self.sow` and
`self.perturb` are marks: see `_frameworks.nnx.marks`.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import flax
import jax
from flax import nnx
from flax.nnx.nn import attention

from tapax import _jax
from tapax._frameworks.attention import marks_softmax
from tapax._frameworks.interface import FunctionCall, Module, key_path
from tapax._frameworks.nnx import marks
from tapax._frameworks.nnx.attribute_order import AttributeOrder, OuterOrder
from tapax._frameworks.nnx.holders import TRANSFORMED, is_object
from tapax._frameworks.nnx.objects import ObjectBindings, Objects, fill
from tapax._frameworks.nnx.taken_state import TakenState, flatten_objects
from tapax._frameworks.patches import PatchedAdapter, Replacements, methods
from tapax._frameworks.recurrent_cells import (
    RecurrentCell,
    check_inputs,
    find_input_shape,
    pair_paths,
    refuse_loop,
)
from tapax._jax import Args, Function, Kwargs, PyTree
from tapax._marks.context import active_policy

_BASES = [cls for cls in nnx.Module.__mro__ if cls is not object]
_CONTAINERS = [getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name)]
_TAG = "tapax"


class NNX(PatchedAdapter):
    package = "flax"
    base = nnx.Module
    recurrent_type = nnx.Module
    container_types = (nnx.Pytree,)
    attention_types = (nnx.MultiHeadAttention,)
    attention_function = "flax.nnx.dot_product_attention"

    def name(self, module: Module) -> str:
        return marks.name_of(module)

    def state(self, module: Module) -> Any:
        return nnx.state(module, marks.is_own)

    def named_arrays(self, value: PyTree) -> Iterator[tuple[str, Any]]:
        # The last key is that of the value in its variable.
        for keys, x in jax.tree_util.tree_leaves_with_path(self.state(value)):
            yield key_path(keys[:-1]), x

    def is_opaque(self, value: PyTree) -> bool:
        return is_object(value)

    def recurrent_cell(self, module: Module, inputs: Sequence[Any], state: PyTree) -> RecurrentCell:
        """Describe a module of NNX; a cell starts from its initial carry."""
        check_inputs(module, inputs)
        if isinstance(module, nnx.RNN):
            refuse_loop(module, "model.cell")
        graph, params = nnx.split(module)

        def step(params: PyTree, state: PyTree, *inputs: PyTree, **keywords: PyTree) -> Any:
            # Make variables of this trace, because it may not update those from outside.
            return nnx.merge(graph, jax.tree.map(lambda x: x, params))(state, *inputs, **keywords)

        if state is not None or not isinstance(module, nnx.RNNCellBase):
            return RecurrentCell(step, params, state)
        carry = module.initialize_carry(find_input_shape(inputs), nnx.Rngs(0))
        return RecurrentCell(step, params, carry, pair_paths(carry, "c", "h"))

    def _replacements(self) -> Replacements:
        for cls, name, wrap in methods(self, nnx.Module, skip=[*_BASES, *_CONTAINERS]):
            yield cls, name, functools.partial(marks.outputs, self, cls, name, wrap)
        for cls in TRANSFORMED:
            yield cls, "__call__", _of_foreign_objects
        yield attention, "dot_product_attention_weights", marks_softmax
        yield nnx.Module, "sow", functools.partial(marks.sow, self)
        yield nnx.Module, "perturb", functools.partial(marks.perturb, self)

    def context(self) -> Hashable:
        return tuple(vars(flax.config)["_values"].items())

    def has_repeatable_calls(self, fn: Function) -> bool:
        return isinstance(fn, (nnx.Module, *TRANSFORMED))

    def trace_program(self, trace: Callable[[], Any]) -> Any:
        return marks.traced(trace)

    @contextlib.contextmanager
    def open_call(self, call: FunctionCall) -> Iterator[FunctionCall]:
        changing: set[str] = call.memory.setdefault(__name__, set())
        objects = Objects(changing, call.fn)
        fn = objects.lift(call.fn)
        args, kwargs = objects.take_arguments((call.args, call.kwargs))
        if not objects.taken:
            yield call
            return
        # A transformation traces the function at every call, so numbers need not become arrays.
        inline = not _jax.trace_state_clean()
        missed = False

        def pure(objects_inside: Any, args: Args, kwargs: Kwargs, values: Any) -> Any:
            nonlocal missed
            state, order = objects_inside
            with nnx.merge_context(_TAG, inner=True) as context:
                named = state.merge(context)
            inner = tuple(named[path] for path in objects.paths)
            order.restore(inner)
            before, variables = marks.Attributes(inner), _Variables(named)
            with ObjectBindings(inner, objects.values if inline else values) as bindings:
                args, kwargs = fill((args, kwargs), inner, bindings)
                out = (fn(bindings) if fn else call.fn)(*args, **kwargs)
            changing.update(bindings.changed)
            missed = bindings.missed
            if missed:
                _forget_inner()
                return ()
            before.restore(inner)
            returned = Objects()
            out, assigned = returned.take((out, bindings.assigned))
            if not returned.taken and variables.are_all():
                _forget_inner()
                return out, assigned, variables.changed()
            with nnx.split_context(_TAG) as context:
                return out, assigned, *context.split((inner, tuple(returned.taken)))

        def close(result: PyTree) -> Any:
            out, assigned, *rest = result
            returned = ()
            if len(rest) == 1:
                outer = [x for x in references if issubclass(type(x), nnx.Variable)]
                for number, value in rest[0].items():
                    outer[number].set_raw_value(value)
            else:
                outer_order = OuterOrder(objects.taken)
                with nnx.merge_context(_TAG, inner=False) as context:
                    _, returned = context.merge(*rest)
                outer_order.restore()
            out, assigned = fill((out, assigned), returned)
            objects.assign(assigned)
            return call.close(out)

        with nnx.update_context(_TAG):
            with nnx.split_context(_TAG) as context:
                # The paths identify the origins of the arrays inside the program.
                named = dict(zip(objects.paths, objects.taken, strict=True))
                state, references = TakenState.of(named, context), context.ref_index
            order = AttributeOrder.of(objects.taken)
            taken = (state, order), args, kwargs, None if inline else objects.values
            user_result = lambda result: call.user_result(result[0])  # noqa: E731
            found_more = lambda: missed or call.found_more()  # noqa: E731
            yield FunctionCall(pure, taken, {}, close, call.memory, user_result, found_more)


def _forget_inner() -> None:
    """Make NNX forget the objects of a finished trace that does not split them."""
    with nnx.split_context(_TAG) as context:
        context.split(())


def _variables(objects: PyTree) -> list[Any]:
    return [x for x in flatten_objects(objects).leaves if isinstance(x, nnx.Variable)]


class _Variables:
    """The variables of some objects before a function runs.

    Most functions only set values of variables, and leave the objects unchanged otherwise. Then the
    program returns only these values. So a function can also use objects of an outer
    transformation, which NNX does not let it update.
    """

    def __init__(self, objects: Any):
        self._objects = objects
        self._graph = nnx.graphdef(objects, graph=True)
        self._all = _variables(objects)
        self._before = [jax.tree.flatten(x.get_raw_value()) for x in self._all]

    def are_all(self) -> bool:
        """Return whether the objects have no other state, and still have the same graph."""
        state = flatten_objects(self._objects).leaves
        # A new variable may replace an old one without a difference in the graph.
        same = len(state) == len(self._all) and all(map(operator.is_, state, self._all))
        return same and nnx.graphdef(self._objects, graph=True) == self._graph

    def changed(self) -> dict[int, Any]:
        """Return the values of the variables that have changed, by number."""
        found = {}
        for number, (variable, before) in enumerate(zip(self._all, self._before, strict=True)):
            leaves, treedef = jax.tree.flatten(variable.get_raw_value())
            same = treedef == before[1] and all(map(operator.is_, leaves, before[0]))
            if not same:
                found[number] = variable.get_raw_value()
        return found


def _of_foreign_objects(original: Function) -> Any:
    """Wrap the call of a function from `nnx.jit`, to allow objects of an outer transformation.

    `nnx.jit` updates all objects among its arguments, whether they changed or not. For objects that
    it may not update, it raises and leaves them broken. So the wrapper skips `nnx.jit`, and calls
    the function inside.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active_policy() is None or not _is_foreign((args, kwargs)):
            return original(self, *args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    return call


def _is_foreign(arguments: PyTree) -> bool:
    """Return whether some arguments contain variables that may not be updated here."""
    objects = [x for x in jax.tree.leaves(arguments, is_leaf=is_object) if is_object(x)]
    return any(not x._can_update for x in _variables(objects))


ADAPTER = NNX()
