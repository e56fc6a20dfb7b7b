"""`apply` with the results of `Module.apply` of Flax Linen: see `compat.linen`."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict, freeze, unfreeze
from flax.core.scope import in_filter, union_filters

from tapax._api.capture import capture
from tapax._api.perturbations import AdditionTransform
from tapax._calling.transform import TransformedFunction
from tapax._frameworks.linen.adapter import ADAPTER, attributes
from tapax._frameworks.linen.marks import LinenRecordOptions, LinenSownValue, recording
from tapax._marks.fingerprints import fingerprint
from tapax._sites import IfAny, Site, SiteError
from tapax._walk.plan import Plan


def apply(
    module: nn.Module,
    variables: Any,
    *args: Any,
    capture_intermediates: bool | Callable[[nn.Module, str], bool] = False,
    mutable: Any = False,
    method: Any = None,
    rngs: Any = None,
    **kwargs: Any,
) -> Any:
    """Apply a Linen module, as `module.apply` does, without its restrictions.

    `apply(function, module)`, as in Flax, returns a function of the variables and the arguments
    that calls `function` on the bound module.

    Args:
        module: A Linen module, or a function of a bound module.
        variables: The variables of the module, a dict of collections; or the module, if `module` is
            a function.
        *args: The arguments of the call.
        capture_intermediates: Whether the collection 'intermediates' contains the results of the
            `__call__` methods; or a filter `(module, method_name) -> bool` of methods.
        mutable: The collections that the call may change, as in Flax.
        method: The method to call: a name or a function; by default `__call__`.
        rngs: The random keys, as in Flax.
        **kwargs: The keyword arguments of the call.

    Returns:
        The result of the call; or, if a collection is mutable or intermediates are captured, a pair
        of the result and a dict of the changed collections.

    Raises:
        ValueError: If a collection of perturbations lacks one that the module needs.
        SiteError: If a perturbation does not fit the values to which it is added.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tapax.compat import linen as nn
        >>> class Layer(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x, _):
        ...         return nn.tanh(nn.Dense(3, name="dense")(x)), None
        >>> class Net(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        ...         return nn.scan(Layer, length=4, **lift)(name="layers")(x, None)[0]
        >>> x = jax.random.normal(jax.random.key(1), (2, 3))
        >>> variables = Net().init(jax.random.key(0), x)
        >>> out, state = nn.apply(Net(), variables, x, capture_intermediates=True)
        >>> jax.tree.map(jnp.shape, state["intermediates"]["layers"]["dense"])
        {'__call__': ((4, 2, 3),)}
    """
    if isinstance(variables, nn.Module) and not isinstance(module, nn.Module):
        options = {"mutable": mutable, "capture_intermediates": capture_intermediates}
        options |= dict(zip(options, args, strict=False))
        return functools.partial(apply, variables, method=module, **options)
    outputs = _is_call if capture_intermediates is True else capture_intermediates or None
    if outputs is not None:
        mutable = union_filters(mutable, "intermediates")
    arguments = _ApplyArguments(variables, rngs, args, kwargs)
    if not isinstance(module, nn.Module):
        return nn.Module.apply(module, variables, *args, **kwargs)  # it raises
    captured = _find_capture(_ApplyOptions(module, method, mutable, outputs))
    out, taps = captured(arguments)
    if mutable is False:
        return out
    out, state = out
    frozen = isinstance(state, FrozenDict)
    state = unfreeze(state)
    for sown, path, calls in _list_sown(taps.sites, ADAPTER.name(module)):
        if not in_filter(mutable, sown.collection):
            continue  # `variables` contains these perturbations, and the call does not change them
        inner = state.setdefault(sown.collection, {})
        for part in path:
            inner = inner.setdefault(part, {})
        values = [_join(taps, sites) for sites in calls]
        given = _find_given(variables, sown, path)
        if calls[0][0].kind == "perturb":
            zeros = [jax.tree.map(jnp.zeros_like, value) for value in values]
            made = zeros[0] if len(zeros) == 1 else tuple(zeros)
            inner[sown.name] = made if given is None else given
        elif sown.calls is not None:
            inner[sown.name] = (sown.calls() if given is None else given) + sown.calls(values)
        else:
            (inner[sown.name],) = values
    return out, freeze(state) if frozen else state


class _ApplyArguments(NamedTuple):
    variables: Any
    rngs: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _is_call(module: nn.Module, method: str) -> bool:
    del module
    return method == "__call__"


class _ApplyOptions(NamedTuple):
    module: nn.Module
    method: Any
    mutable: Any
    outputs: Any


_captures: dict[Any, tuple[_ApplyOptions, Any]] = {}


def _find_capture(options: _ApplyOptions) -> Any:
    """Find the captured call of a module; equal calls share one, so that it compiles once."""
    key = fingerprint(options, attributes)
    known, captured = _captures.get(key, (None, None))
    # The options of the cached capture may have changed since.
    if captured is None or fingerprint(known, attributes) != key:
        captured = _make_capture(key, options)
        _captures.pop(key, None)
        _captures[key] = options, captured
        if len(_captures) > 64:
            _captures.pop(next(iter(_captures)), None)
    return captured


def _make_capture(key: Hashable, options: _ApplyOptions) -> Any:
    module, method, collections, outputs = options

    def is_mutable(collection: str) -> bool:
        return in_filter(collections, collection)

    def run(given: _ApplyArguments) -> Any:
        what = LinenRecordOptions(is_mutable, outputs, frozenset(given.variables), key)

        def recorded(bound: Any, *args: Any, **kwargs: Any) -> Any:
            with recording(what, bound.scope.root):
                return _get_method(bound, method)(*args, **kwargs)

        how = {"rngs": given.rngs, "mutable": collections, "method": recorded}
        return module.apply(given.variables, *given.args, **how, **given.kwargs)

    def perturbed(given: _ApplyArguments) -> Any:
        def choose(sites: Any) -> Mapping[str, Any]:
            found = _list_perturbations(given.variables, sites, ADAPTER.name(module), is_mutable)
            return {name: jnp.asarray(x, sites[name].dtype) for name, x in found}

        adding = AdditionTransform(Plan.make("**", None, modules=False, replacing=True), choose)
        return TransformedFunction(run, adding)((), (given,), {})

    def call(given: _ApplyArguments) -> Any:
        others = set(given.variables) - {"params", "batch_stats", "intermediates"}
        return perturbed(given) if others else run(given)

    return capture(call, IfAny(_is_sown), None, modules=False)


def _is_sown(site: Site) -> bool:
    return isinstance(site.collection, LinenSownValue)


def _get_method(bound: Any, method: Any) -> Any:
    if method is None:
        return bound
    if isinstance(method, str):
        return getattr(bound, method)
    return functools.partial(getattr(method, "__func__", method), bound)


def _list_sown(
    sites: Any, root: str
) -> Iterator[tuple[LinenSownValue, tuple[str, ...], list[list[Site]]]]:
    """List the sown values: the mark, the path of the module, and the leaves of each call."""
    found: dict[Any, dict[int, list[Site]]] = {}
    for site in sites:
        if not isinstance(site.collection, LinenSownValue):
            continue
        first, *path = site.path.partition(":")[0].split("/")[:-1]
        key = tuple(map(unquote, path)), site.collection.collection, site.collection.name
        if first == root and len(path) == site.collection.depth:
            found.setdefault(key, {}).setdefault(site.call, []).append(site)
    for (path, _, _), calls in found.items():
        leaves = list(calls.values())
        yield leaves[0][0].collection, path, leaves


def _join(taps: Any, sites: list[Site]) -> Any:
    """Join the arrays of one call, or of a reducer's result, to the sown value."""
    return sites[0].collection.structure.join(taps.values[site.name] for site in sites)


def _find_given(variables: Any, sown: LinenSownValue, path: tuple[str, ...]) -> Any:
    """Find the value in `variables` for a sown value; None if there is none."""
    tree = variables.get(sown.collection, {})
    for part in (*path, sown.name):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _list_perturbations(
    variables: Any, sites: Any, root: str, is_mutable: Callable[[str], bool]
) -> Iterator[tuple[str, Any]]:
    """List the perturbations in `variables`, by the names of their sites."""
    for sown, path, calls in _list_sown(sites, root):
        if calls[0][0].kind != "perturb" or sown.collection not in variables:
            continue
        given = _find_given(variables, sown, path)
        if given is None:
            if is_mutable(sown.collection):
                continue
            raise ValueError(
                f"Perturbation collection {sown.collection} present, but missing perturbation "
                f"variable {'/'.join((*path, sown.name))}. Make the perturbations with "
                f"apply(..., mutable={sown.collection!r}), or leave the collection out."
            )
        several = given if len(calls) > 1 else (given,)
        if not isinstance(several, tuple) or len(several) != len(calls):
            raise SiteError(
                f"perturb({sown.name!r}) is called {len(calls)} times in the module at "
                f"{'/'.join((root, *path))!r}, so it needs a tuple of {len(calls)} perturbations: "
                "a single one would have the sum of their gradients. Make the perturbations with "
                f"apply(..., mutable={sown.collection!r})."
            )
        for leaves, perturbation in zip(calls, several, strict=True):
            arrays = jax.tree.leaves(perturbation)
            if len(arrays) != len(leaves):
                raise SiteError(
                    f"The perturbation of the site {leaves[0].name!r} has {len(arrays)} arrays, "
                    f"but its value has {len(leaves)}. Make the perturbations with "
                    f"apply(..., mutable={sown.collection!r})."
                )
            yield from zip((leaf.name for leaf in leaves), arrays, strict=True)
