"""`capture` with the signature and the results of `flax.nnx.capture`: see `compat.nnx`."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tapax._api.capture import capture as _capture
from tapax._frameworks.module_tree import index
from tapax._frameworks.nnx import marks
from tapax._frameworks.nnx.adapter import ADAPTER
from tapax._jax import Args, Function, Kwargs
from tapax._sites import IfAny, Site, SiteError, segment


def capture(
    fn: Function, *var_types: Any, init: Any = None, method_outputs: Any = None
) -> Callable[..., Any]:
    """Make a function that returns the result of `fn`, and a `State` of sown values for each type.

    Args:
        fn: A function, a module or a method of a module. With a variable type instead, `capture`
            is a decorator.
        *var_types: The variable types of the sown values to return.
        init: A `State` with the perturbations that `perturb` adds; None to add nothing.
        method_outputs: A variable type, under which to sow the results of every method; None to sow
            none of them.

    Returns:
        A function of the arguments of `fn` that returns `(out, *states)`, with a `State` for each
        of `var_types`; or `out` alone without `var_types`.

    Raises:
        SiteError: When the returned function is called, if a perturbation in `init` does not fit
            the program, or if a value and a module have the same name.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from tapax.compat import nnx
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.a = nnx.Linear(2, 3, rngs=rngs)
        ...
        ...     def __call__(self, x):
        ...         h = self.perturb("grad_of_h", self.a(x))
        ...         self.sow(nnx.Intermediate, "h", h)
        ...         return jnp.sum(h**2)
        >>> model, x = Net(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 2))
        >>> _, zeros = nnx.capture(model, nnx.Perturbation)(x)
        >>> @nnx.jit
        ... def step(model, zeros, x):
        ...     loss = lambda model, zeros, x: nnx.capture(model, nnx.Intermediate, init=zeros)(x)
        ...     return nnx.grad(loss, argnums=1, has_aux=True)(model, zeros, x)
        >>> grads, values = step(model, zeros, x)
        >>> bool(jnp.allclose(grads["grad_of_h"][...], 2 * values["h"][0]))
        True
    """
    if isinstance(fn, type) and issubclass(fn, nnx.Variable):
        types = (fn, *var_types)
        return lambda fn: capture(fn, *types, init=init, method_outputs=method_outputs)
    kinds = frozenset({*var_types, *(type(variable) for _, variable in _flatten(init))})
    what = marks.NNXRecordOptions(kinds, method_outputs, perturbed=init is not None)

    def run(init: Any, args: Args, kwargs: Kwargs) -> Any:
        roots = _find_roots(fn, args, kwargs)
        marked = [*_rename(roots), *_give(roots, init)]
        with marks.recording(what):
            out = fn(*args, **kwargs)
        for module in marked:
            marks.drop(module)
        return out

    def wanted(site: Site) -> bool:
        return isinstance(site.collection, marks.NNXSownValue) and site.collection.kind in kinds

    captured = _capture(run, IfAny(wanted), None, modules=False)

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out, taps = captured(init, args, kwargs)
        roots = _find_roots(fn, args, kwargs)
        sown = list(_list_sown(taps, _ModulePaths(roots)))
        if init is not None:
            _check(init, sown)
        states = [_make_state(kind, sown, init) for kind in var_types]
        return (out, *states) if states else out

    return wrapper


def _find_roots(fn: Function, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Find the modules of a call: the first has no name, the others the names of arguments."""
    found: list[tuple[str, Any]] = []
    if isinstance(fn, nnx.Module):
        found.append(("", fn))
    elif inspect.ismethod(fn) and isinstance(fn.__self__, nnx.Module):
        found.append(("", fn.__self__))
    try:
        names = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        names = {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}
    is_module = lambda x: isinstance(x, nnx.Module)  # noqa: E731
    for keys, value in jax.tree_util.tree_leaves_with_path(dict(names), is_leaf=is_module):
        if is_module(value) and not any(value is known for _, known in found):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            found.append((name if found else "", value))
    return dict(found)


def _name_roots(roots: dict[str, Any]) -> dict[str, str]:
    """Name the roots like their sites: by class, or by argument if the name is taken."""
    names: dict[str, str] = {}
    for name, root in roots.items():
        cls = type(root).__name__
        names[cls if cls not in names else name] = name
    return names


def _rename(roots: dict[str, Any]) -> Iterator[Any]:
    for shown, name in _name_roots(roots).items():
        if shown != type(roots[name]).__name__:
            marks.rename(roots[name], shown)
            yield roots[name]


class _ModulePaths:
    """The paths of modules in NNX, by the paths of their sites."""

    def __init__(self, roots: dict[str, Any]):
        self._names = _name_roots(roots)
        self._paths: dict[str, dict[str, tuple[Any, ...]]] = {}
        for name, root in roots.items():
            paths = {id(m): path for path, m in nnx.iter_modules(root, graph=True)}
            known = index(ADAPTER, root).items()
            self._paths[name] = {path: paths[i] for i, path in known if i in paths}

    def find(self, site: Site, name: str) -> tuple[Any, ...]:
        """Find the path in NNX of the value `name` of a module, from its site."""
        shown, _, rest = site.path.partition(":")[0].partition("/")
        inner = rest[: -len(segment(name))].rstrip("/")
        if not self._names:
            self._names[shown] = ""  # the function closes over the module
        root = self._names.get(shown, shown)
        parts = tuple(int(p) if p.isdigit() else p for p in inner.split("/") if p)
        path = self._paths.get(root, {}).get(inner, parts)
        return (*((root,) if root else ()), *path, name)


def _list_sown(
    taps: Any, paths: _ModulePaths
) -> Iterator[tuple[tuple[Any, ...], marks.NNXSownValue, list[Any], Any]]:
    """List the sown values: the path, the mark, the value of each call, and its sites."""
    calls: dict[Any, dict[int, list[Any]]] = {}
    sown: dict[Any, marks.NNXSownValue] = {}
    for site in taps.sites:
        mark = site.collection
        key = site.path.partition(":")[0], mark.kind, mark.name
        calls.setdefault(key, {}).setdefault(site.call, []).append(site)
        sown[key] = mark
    for key, found in calls.items():
        values, sites = [], []
        for leaves in found.values():
            structure = leaves[0].collection.structure
            values.append(structure.join(taps.values[leaf.name] for leaf in leaves))
            sites.append(leaves)
        path = paths.find(next(iter(found.values()))[0], key[2])
        yield path, sown[key], values, sites


def _make_state(kind: Any, sown: Any, init: Any) -> Any:
    flat: dict[tuple[Any, ...], Any] = {}
    given = {path: variable.get_value() for path, variable in _flatten(init)}
    for path, mark, values, sites in sown:
        if mark.kind is not kind:
            continue
        if sites[0][0].kind == "perturb":
            zeros = jax.tree.map(jnp.zeros_like, values)
            value = given.get(path, zeros[0] if len(zeros) == 1 else tuple(zeros))
        elif mark.calls is not None:
            value = given.get(path, mark.calls()) + mark.calls(values)
        else:
            (value,) = values
        flat[path] = kind(value)
    return nnx.State(_nest(flat))


def _nest(flat: dict[tuple[Any, ...], Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        inner = tree
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SiteError(
                    f"{'/'.join(map(str, path))!r} does not fit into a State, because another "
                    f"value is sown under {part!r}, which is also the name of a module. Sow that "
                    "value under another name."
                )
        inner[path[-1]] = value
    return tree


def _flatten(init: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """List the variables in `init` with their paths; nothing if it is None."""
    for key, value in () if init is None else init.items():
        if isinstance(value, nnx.Variable):
            yield (*path, key), value
        else:
            yield from _flatten(value, (*path, key))


def _give(roots: dict[str, Any], init: Any) -> Iterator[Any]:
    """Attach the perturbations to their modules; yield these modules."""
    modules: dict[tuple[Any, ...], Any] = {}
    for name, root in roots.items():
        start = (name,) if name else ()
        for path, module in nnx.iter_modules(root, graph=True):
            modules.setdefault((*start, *path), module)
    for path, variable in _flatten(init):
        if path[:-1] not in modules:
            known = ", ".join(map(_show, sorted(modules, key=str)))
            raise SiteError(
                f"`init` has a perturbation at {_show(path)}, but the model has no module at "
                f"{_show(path[:-1])}. Its modules are {known}."
            )
        marks.carry(modules[path[:-1]], path[-1], type(variable)(variable.get_value()))
        yield modules[path[:-1]]


def _check(init: Any, sown: Any) -> None:
    """Raise if a perturbation was not added, or added to several values."""
    found = {path: (mark, sites) for path, mark, _, sites in sown}
    for path, variable in _flatten(init):
        if path not in found:
            near = ", ".join(_show(p) for p, (mark, _) in found.items() if mark.index is not None)
            raise SiteError(
                f"`init` has a perturbation at {_show(path)}, but the program did not reach a "
                f"`perturb` of that name. It reached {near or 'none'}."
            )
        sites = found[path][1]
        if sites[0][0].kind != "perturb":
            continue
        given = variable.get_value()
        given = [given] if len(sites) == 1 else given
        for number, (leaves, arrays) in enumerate(zip(sites, given, strict=False)):
            shapes = [site.shape for site in leaves]
            if leaves[0].collection.index == number and shapes == [
                jnp.shape(a) for a in jax.tree.leaves(arrays)
            ]:
                continue
            raise SiteError(
                f"The perturbation at {_show(path)} was added to more than one value: `perturb` "
                "runs in a loop or a vmap that does not divide the module, or in a function that "
                "is traced once and called several times. Its gradient would be a sum. Take the "
                "gradients from tapax.capture instead, which returns one for each value."
            )


def _show(path: tuple[Any, ...]) -> str:
    return repr("/".join(map(str, path)))
