"""`batch_ensemble`: convert a whole model to an ensemble."""

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
# These layers contain another layer and use its weights directly, so it must not change.
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
    """Convert a copy of a model to an ensemble whose layers have members.

    Every `nnx.Linear`, `LinearGeneral`, `Conv`, `Einsum` and `Embed` becomes the layer of that name
    with the prefix `BatchEnsemble`, in attributes, lists, dicts, attention and cells. Each member
    has a bias, which starts as that of the model, and factors `r` and `s`. A layer or a weight that
    the model uses in two places remains shared. Layers that `nnx.vmap` stacks for `nnx.scan`, along
    the first axis, remain stacked.

    All members share everything else: norms, and parameters that your modules define themselves.

    A converted layer takes the rows of the members from the first axis of its input. If the first
    axis of an input is something else, as in a grid of positions or in values
    `[time, rows, width]`, leave that layer out with `where`, or give it rows with `tile`.

    Args:
        model: An `nnx.Module`. It stays as it is.
        num_members: The number of members.
        rngs: An `nnx.Rngs`, an `nnx.RngStream`, a seed or a key, as in `BatchEnsembleLinear`.
        use_base_weights: Whether the layers keep their weights, so that an ensemble of a trained
            model starts from the trained weights. Otherwise they draw new ones.
        init: The distribution of `r` and `s`: `"normal"` or `"random_sign"`.
        r_mean: The mean of `r`, for `"normal"`.
        r_std: The standard deviation of `r`, for `"normal"`.
        s_mean: The mean of `s`, for `"normal"`.
        s_std: The standard deviation of `s`, for `"normal"`.
        where: Selects the layers to convert: a glob on their path in a capture, such as
            `"Net/blocks/**"`, or a function `(path, layer) -> bool`; None for all layers.

    Returns:
        A model of the same class.

    Raises:
        TypeError: If `model` is not an `nnx.Module`, or contains a selected layer with a weight
            that cannot be converted: `ConvTranspose`, `LoRA`, `WeightNorm`, `SpectralNorm`, or a
            subclass of a layer above.
        ValueError: If `where` selects no layer, or an option is out of range.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> rngs = nnx.Rngs(0)
        >>> linear = nnx.Linear(3, 8, rngs=rngs)
        >>> model = nnx.Sequential(linear, nnx.relu, nnx.Linear(8, 2, rngs=rngs))
        >>> ensemble = nn.batch_ensemble(model, 4, rngs=0)
        >>> ensemble(nn.tile(jax.random.normal(jax.random.key(0), (5, 3)), 4)).shape
        (20, 2)
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
    # Keep the variables of the copy, even with new weights, so that shared weights remain shared.
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
    """List the layers to convert, each once, with the path that leads to it."""
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
                "`where`; then all members share it."
            )
        found.setdefault(id(layer), (path, layer))
    if not found:
        if where is None or not known:
            kind = type(model).__name__
            raise ValueError(
                f"`model`, of type {kind}, has no layer that can be converted: it must contain an "
                "nnx.Linear, LinearGeneral, Conv, Einsum or Embed."
            )
        more = f" and {len(known) - 5} more" if len(known) > 5 else ""
        listed = ", ".join(map(repr, known[:5])) + more
        raise ValueError(
            f"`where` is {where!r}, which picks none of the layers of `model`: {listed}."
        )
    return list(found.values())


def _list_candidates(node: PyTree, path: str, above: set[int]) -> Iterator[tuple[str, Any]]:
    """List the layers with a weight, with every path that leads to them."""
    if id(node) in above:
        return
    if isinstance(node, (*CONVERTED, *REFUSED)):
        yield path, node
        return
    for key, child in _list_children(node):
        yield from _list_candidates(child, f"{path}/{key}", above | {id(node)})


def _list_children(node: PyTree) -> list[tuple[str, Any]]:
    """List the children of a module or a container, by name."""
    if isinstance(node, nnx.Variable):
        return []
    if isinstance(node, nnx.Pytree):
        attributes = ((k, v) for k, v in vars(node).items() if not k.startswith("_pytree__"))
        return [(segment(key), value) for key, value in attributes]
    children = _flatten(node)[0]
    return [(segment(leaf_name(path)), child) for path, child in children if path]


def _flatten(container: Any) -> Any:
    """Flatten a list, a dict or another pytree by one level."""
    return jax.tree_util.tree_flatten_with_path(container, is_leaf=lambda x: x is not container)


def _replace(node: PyTree, replaced: dict[int, Any], done: dict[int, Any]) -> Any:
    """Replace layers in a node: change a module in place, and make a new container."""
    if id(node) in replaced:
        return replaced[id(node)]
    if id(node) in done or isinstance(node, nnx.Variable):
        return done.get(id(node), node)
    done[id(node)] = node
    if isinstance(node, nnx.Pytree):
        for name, old in list(vars(node).items()):
            new = _replace(old, replaced, done)
            if new is not old:
                # NNX requires a container of modules to be marked as data.
                setattr(node, name, new if isinstance(new, nnx.Pytree) else nnx.data(new))
        return node
    children, treedef = _flatten(node)
    olds = [child for path, child in children if path]
    news = [_replace(child, replaced, done) for child in olds]
    if any(new is not old for new, old in zip(news, olds, strict=True)):
        done[id(node)] = treedef.unflatten(news)
    return done[id(node)]
