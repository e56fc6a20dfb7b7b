"""Linear probes: what can be read from a value by a linear map."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tapax._api.cut import prefix
from tapax._jax import PyTree, Value
from tapax.attribute._compilation import arguments


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "bias"],
    meta_fields=["features", "kind", "axes"],
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """A fitted probe: `features(*inputs) @ weights + bias`, of numbers or of classes."""

    weights: jax.Array
    bias: jax.Array
    features: Callable[..., Any]
    kind: str
    axes: int

    def __call__(self, inputs: PyTree) -> jax.Array:
        """The numbers, or the logits of the classes, that are read from the inputs."""
        x = _flatten_features(self.features(*arguments(inputs)), self.axes)
        return x @ self.weights + self.bias

    def predict(self, inputs: PyTree) -> jax.Array:
        """The numbers, or the classes."""
        out = self(inputs)
        return jnp.argmax(out, -1) if self.kind == "logistic" else out

    def score(self, inputs: PyTree, labels: Any) -> jax.Array:
        """How right it is: the part of the classes, or the coefficient of determination."""
        labels, read = jnp.asarray(labels), self.predict(inputs)
        if read.shape != labels.shape:
            raise ValueError(
                f"There are labels of shape {list(labels.shape)} for predictions of shape "
                f"{list(read.shape)}."
            )
        if self.kind == "logistic":
            return jnp.mean(read == labels)
        return 1 - jnp.sum((labels - read) ** 2) / jnp.sum((labels - labels.mean()) ** 2)


def linear_probe(
    fn: Callable[..., Any],
    site: Any,
    inputs: PyTree,
    labels: Any,
    *,
    kind: str | None = None,
    ridge: float = 1.0,
    num_classes: int | None = None,
    steps: int = 12,
) -> Probe:
    """A `Probe` fitted to read the labels from the value of a site. Nothing after it is computed.

    `inputs` is the argument of `fn`, or a tuple of its arguments. Labels are numbers, or integers
    for classes; their axes are the leading ones of the value, each entry an example, and all other
    axes are features. Numbers are fitted by least squares with the penalty `ridge * |w|**2`,
    classes by `steps` of Newton's method on the cross entropy with half that penalty, both summed
    over the examples; the bias is free. Newton's matrix has a row for each weight: keep width times
    classes to a few thousand.

    Alain and Bengio, Understanding intermediate layers using linear classifier probes, 2016
    (arXiv:1610.01644).

    >>> import tapax
    >>> f = lambda x: tapax.sow(jnp.stack([x, x**2], -1), "h").sum()
    >>> x = jnp.linspace(-1.0, 1.0, 9)
    >>> probe = linear_probe(f, "h", x, 2 * x**2 + 1, ridge=1e-3)
    >>> probe.weights.round(1).tolist(), probe.bias.round(1).tolist()
    ([0.0, 2.0], 1.0)
    """
    labels = jnp.asarray(labels)
    whole = not jnp.issubdtype(labels.dtype, jnp.inexact)
    kind = kind or ("logistic" if whole else "ridge")
    if kind not in ("ridge", "logistic") or (kind == "logistic" and not whole):
        raise ValueError(
            "`kind` is 'ridge', or 'logistic' for labels that are integers, but is "
            f"{kind!r} for labels of type {labels.dtype}."
        )
    if not ridge > 0:
        raise ValueError(f"`ridge` must be above zero, for the fit to be unique, but is {ridge}.")
    features = prefix(fn, site)
    value = features(*arguments(inputs))
    axes = labels.ndim
    if axes < 1 or value.shape[:axes] != labels.shape:
        raise ValueError(
            "The axes of the labels must be the leading ones of the value, but the labels have "
            f"the shape {list(labels.shape)}, and {site!r} has {list(value.shape)}."
        )
    x = _flatten_features(value, axes).reshape(labels.size, -1)
    if kind == "ridge":
        weights, bias = _least_squares(x, labels.reshape(-1).astype(x.dtype), ridge)
    else:
        count = _count_classes(labels, num_classes)
        weights, bias = _newton(x, labels.reshape(-1), ridge, count, steps)
    return Probe(weights, bias, features, kind, axes)


def _flatten_features(value: PyTree, axes: int) -> Any:
    flat = value.reshape(*value.shape[:axes], -1)
    return flat.astype(jnp.promote_types(value.dtype, jnp.float32))


def _count_classes(labels: Any, given: int | None) -> int:
    if isinstance(labels, Tracer):
        if given is None:
            raise ValueError("Give `num_classes` where the labels are traced.")
        return given
    low, high = int(np.min(labels)), int(np.max(labels))
    if low < 0 or (given is not None and high >= given):
        raise ValueError(
            f"Classes are counted from 0 to num_classes - 1, but the labels are from {low} to "
            f"{high}" + ("." if given is None else f" and num_classes is {given}.")
        )
    return given or high + 1


def _least_squares(x: Value, y: Value, ridge: float) -> tuple[Any, Any]:
    centre, level = x.mean(0), y.mean(0)
    x, y = x - centre, y - level
    weights = jnp.linalg.solve(x.T @ x + ridge * jnp.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    return weights, level - centre @ weights


def _newton(x: Value, y: Value, ridge: float, count: int, steps: int) -> tuple[Any, Any]:
    centre = x.mean(0)
    x = jnp.concatenate([x - centre, jnp.ones_like(x[:, :1])], 1)
    width = x.shape[1]
    chosen = jax.nn.one_hot(y.astype(int), count, dtype=x.dtype)
    is_bias = jnp.arange(width) == width - 1
    penalty = jnp.where(is_bias, 0, ridge)[:, None].astype(x.dtype)
    # To add one number to all biases changes nothing. The slope has no part along that direction,
    # so a bend along it makes the step unique, and does not change it.
    shift = jnp.outer(jnp.repeat(is_bias, count), jnp.repeat(is_bias, count)).astype(x.dtype)

    def loss(w: Value) -> Any:
        fit = jnp.sum(jax.nn.logsumexp(x @ w, -1) - jnp.sum(chosen * (x @ w), -1))
        return fit + 0.5 * jnp.sum(penalty * w**2)

    def step(w: Value, _: Any) -> Any:
        p = jax.nn.softmax(x @ w)
        slope = x.T @ (p - chosen) + penalty * w
        curves = (
            jnp.einsum("nk,kl->nkl", p, jnp.eye(count, dtype=p.dtype))
            - p[:, :, None] * p[:, None, :]
        )
        bend = jnp.einsum("ni,nkl,nj->ikjl", x, curves, x).reshape(slope.size, slope.size)
        bend += shift + jnp.diag(jnp.broadcast_to(penalty, slope.shape).reshape(-1))
        # Features differ in scale, and where all is certain nothing bends: neither may spoil it.
        scale = jnp.sqrt(jnp.diag(bend))
        bend = bend / jnp.outer(scale, scale) + 1e-5 * jnp.eye(slope.size, dtype=w.dtype)
        move = (jnp.linalg.solve(bend, slope.reshape(-1) / scale) / scale).reshape(slope.shape)
        # Far from the optimum a whole step may overshoot: the best of some shorter ones is taken.
        tried = w - 0.5 ** jnp.arange(8, dtype=w.dtype)[:, None, None] * move
        tried = jnp.concatenate([w[None], tried])
        return tried[jnp.nanargmin(jax.vmap(loss)(tried))], None

    w = jnp.zeros((width, count), x.dtype)
    w = jax.lax.scan(step, w, length=steps)[0]
    return w[:-1], w[-1] - centre @ w[:-1]
