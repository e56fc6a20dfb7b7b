"""`batch_ensemble`: a whole model made an ensemble."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

from tapax._frameworks.interface import Module
from tapax._jax import PyTree
from tapax._marks.sow import leaf_name
from tapax._sites import Site, matches, segment, wrong_type
from tapax.nn._conv import BatchEnsembleConv
from tapax.nn._einsum import BatchEnsembleEinsum
from tapax.nn._embed import BatchEnsembleEmbed
from tapax.nn._factors import EnsembleLayer, FactorOptions
from tapax.nn._keys import make_keys
from tapax.nn._linear import BatchEnsembleLinear, BatchEnsembleLinearGeneral

M = TypeVar("M", bound=nnx.Module)

LAYERS: tuple[type[EnsembleLayer], ...] = (
    BatchEnsembleLinear,
    BatchEnsembleLinearGeneral,
    BatchEnsembleConv,
    BatchEnsembleEinsum,
    BatchEnsembleEmbed,
)
CONVERTED = {cls.base.kind: cls for cls in LAYERS}
# Those that hold another layer use its weights in ways of their own, so it must not change.
HOLDERS = tuple(getattr(nnx, n) for n in ("LoRA", "WeightNorm", "SpectralNorm") if hasattr(nnx, n))
REFUSED = (nnx.ConvTranspose, *HOLDERS)

Where = Callable[[str, Any], bool]


def batch_ensemble(
    model: M,
    num_members: int = 4,
    *,
    rngs: Any,
    use_base_weights: bool = True,
    init: str = "normal",
    r_mean: float = 1.0,
    r_std: float = 0.5,
    s_mean: float = 1.0,
    s_std: float = 0.5,
    where: str | Where | None = None,
) -> M:
    """A new model whose layers have members; the given one stays as it is.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from tapax import nn
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
    >>> ensemble = nn.batch_ensemble(model, 4, rngs=0)
    >>> ensemble(nn.tile(jnp.ones((5, 3)), 4)).shape
    (20, 2)

    The layers keep their weights, so that an ensemble of a trained model starts from what the model
    learned; with `use_base_weights=False` they are drawn anew. Each member has a bias of its own,
    which starts as that of the model, and factors `r` and `s`, drawn as `init`, the means and the
    deviations say.

    Every `nnx.Linear`, `LinearGeneral`, `Conv`, `Einsum` and `Embed` becomes the layer of that name
    with `BatchEnsemble` before it, wherever it is: in attributes, lists, dicts, attention, cells. A
    layer or a weight that is used in two places still is. Layers that `nnx.vmap` stacked for
    `nnx.scan`, along the first axis, stay stacked.

    All else stays as it is, and all members share it: norms, and parameters that a module of your
    own holds. A layer with a weight that cannot be converted is refused by name: `ConvTranspose`,
    `LoRA`, `WeightNorm`, `SpectralNorm` and classes made from those above.

    Rows are told by the first axis alone. A layer that is applied to something else, a grid of
    positions or values `[time, rows, width]`, must be left out, or be given rows by `tile`.

    `where` picks layers, by a glob on their path such as `"Net/blocks/**"` or by a function of path
    and layer; the others stay as they are. The paths are those that captures use.
    """
    options = FactorOptions(num_members, use_base_weights, init, r_mean, r_std, s_mean, s_std)
    if not isinstance(model, nnx.Module):
        raise wrong_type("`model` must be an nnx.Module, but is", model)
    if where is not None and not isinstance(where, str) and not callable(where):
        raise TypeError(
            "`where` must be a glob such as 'Net/blocks/**' or a function of a path and a layer, "
            f"but is {where!r} of type {type(where).__name__}."
        )
    new = nnx.clone(model)
    picked = _pick(new, where)
    key = make_keys(rngs, model)
    # The weights are those of the copy, new or not: what shares them still does.
    fields: Any = dataclasses.astuple(dataclasses.replace(options, use_base_weights=True))
    drawn: set[int] = set()
    replaced: dict[int, Any] = {}
    for path, layer in picked:
        cls = CONVERTED[type(layer)]
        weight = getattr(layer, cls.base.weight)
        try:
            if not use_base_weights and id(weight) not in drawn:
                weight[...] = cls.base.fresh(layer, key()).astype(weight.dtype)
                drawn.add(id(weight))
            replaced[id(layer)] = cls(layer, key, *fields)
        except ValueError as error:
            raise ValueError(f"{path} cannot be converted. {error}") from None
    return _replace(new, replaced, {})


def _pick(model: Module, where: str | Where | None) -> list[tuple[str, Any]]:
    """The layers to convert, each once, with the path it was found by."""
    found: dict[int, tuple[str, Any]] = {}
    known: list[str] = []
    for path, layer in _list_candidates(model, type(model).__name__, set()):
        known.append(path)
        if isinstance(where, str) and not matches(where, Site(path, "module")):
            continue
        if callable(where) and not where(path, layer):
            continue
        if type(layer) not in CONVERTED:
            raise TypeError(
                f"{path} is of type {type(layer).__module__.partition('.')[0]}."
                f"{type(layer).__qualname__}, which cannot be converted. Leave it out with "
                "`where`, and all members share it."
            )
        found.setdefault(id(layer), (path, layer))
    if not found:
        if where is None or not known:
            kind = type(model).__name__
            raise ValueError(f"`model`, of type {kind}, has no layer that can be converted.")
        more = f" and {len(known) - 5} more" if len(known) > 5 else ""
        listed = ", ".join(map(repr, known[:5])) + more
        raise ValueError(
            f"`where` is {where!r}, which picks none of the layers of `model`: {listed}."
        )
    return list(found.values())


def _list_candidates(node: PyTree, path: str, above: set[int]) -> Iterator[tuple[str, Any]]:
    """Layers with a weight, with every path that leads to them."""
    if id(node) in above:
        return
    if isinstance(node, (*CONVERTED, *REFUSED)):
        yield path, node
        return
    for key, child in _list_children(node):
        yield from _list_candidates(child, f"{path}/{key}", above | {id(node)})


def _list_children(node: PyTree) -> list[tuple[str, Any]]:
    """What is in a module or a container, by name."""
    if isinstance(node, nnx.Variable):
        return []
    if isinstance(node, nnx.Pytree):
        own = ((k, v) for k, v in vars(node).items() if not k.startswith("_pytree__"))
        return [(segment(key), value) for key, value in own]
    children = _flatten(node)[0]
    return [(segment(leaf_name(path)), child) for path, child in children if path]


def _flatten(container: Any) -> Any:
    """A list, a dict or another pytree, taken apart by one level."""
    return jax.tree_util.tree_flatten_with_path(container, is_leaf=lambda x: x is not container)


def _replace(node: PyTree, replaced: dict[int, Any], done: dict[int, Any]) -> Any:
    """A node with other layers in it: a module is changed in place, a container made anew."""
    if id(node) in replaced:
        return replaced[id(node)]
    if id(node) in done or isinstance(node, nnx.Variable):
        return done.get(id(node), node)
    done[id(node)] = node
    if isinstance(node, nnx.Pytree):
        for name, old in list(vars(node).items()):
            new = _replace(old, replaced, done)
            if new is not old:
                # A container of modules must be called data, as it was when it was assigned.
                setattr(node, name, new if isinstance(new, nnx.Pytree) else nnx.data(new))
        return node
    children, treedef = _flatten(node)
    olds = [child for path, child in children if path]
    news = [_replace(child, replaced, done) for child in olds]
    if any(new is not old for new, old in zip(news, olds, strict=True)):
        done[id(node)] = treedef.unflatten(news)
    return done[id(node)]
