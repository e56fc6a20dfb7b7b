"""Linear probes: the information that a linear map can read from a value."""

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
    """A fitted linear probe, which computes `features(*inputs) @ weights + bias`.

    `tapax.attribute.linear_probe` returns it. `probe(inputs)` returns the numbers, or the logits of
    the classes; `inputs` is the argument of the probed function, or a tuple of its arguments. A
    probe is a pytree.

    Attributes:
        weights: An array `[features]` for numbers, `[features, classes]` for classes.
        bias: A scalar for numbers, an array `[classes]` for classes.
        features: The function that computes the value of the site.
        kind: `ridge` for numbers, `logistic` for classes.
        axes: The number of leading axes of the value whose entries are examples.

    Example:
        >>> import jax.numpy as jnp, tapax
        >>> f = lambda x: tapax.sow(jnp.stack([x, x**2], -1), "h").sum()
        >>> x = jnp.linspace(-1.0, 1.0, 9)
        >>> probe = tapax.attribute.linear_probe(f, "h", x, x > 0.3)
        >>> probe.kind, probe.weights.shape, probe(x).shape
        ('logistic', (2, 2), (9, 2))
    """

    weights: jax.Array
    bias: jax.Array
    features: Callable[..., Any]
    kind: str
    axes: int

    def __call__(self, inputs: PyTree) -> jax.Array:
        """Read the numbers, or the logits of the classes, from the inputs."""
        x = _flatten_features(self.features(*arguments(inputs)), self.axes)
        return x @ self.weights + self.bias

    def predict(self, inputs: PyTree) -> jax.Array:
        """Predict the numbers, or the most likely classes.

        Args:
            inputs: The argument of the probed function, or a tuple of its arguments.

        Returns:
            An array with an entry for each example.

        Raises:
            SiteError: If the probed function cannot be cut at the site with these inputs.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> f = lambda x: tapax.sow(jnp.stack([x, x**2], -1), "h").sum()
            >>> x = jnp.linspace(-1.0, 1.0, 9)
            >>> probe = tapax.attribute.linear_probe(f, "h", x, abs(x) > 0.6, ridge=1e-3)
            >>> probe.predict(jnp.array([-0.9, 0.1, 0.8])).tolist()
            [1, 0, 1]
        """
        out = self(inputs)
        return jnp.argmax(out, -1) if self.kind == "logistic" else out

    def score(self, inputs: PyTree, labels: Any) -> jax.Array:
        """Score the predictions: the accuracy for classes, R**2 for numbers.

        Args:
            inputs: The argument of the probed function, or a tuple of its arguments.
            labels: The true numbers or classes, one for each prediction.

        Returns:
            The share of correct classes, or the coefficient of determination.

        Raises:
            ValueError: If the labels and the predictions differ in shape.

        Example:
            >>> import jax.numpy as jnp, tapax
            >>> f = lambda x: tapax.sow(jnp.stack([x, x**2], -1), "h").sum()
            >>> x = jnp.linspace(-1.0, 1.0, 9)
            >>> probe = tapax.attribute.linear_probe(f, "h", x, abs(x) > 0.6, ridge=1e-3)
            >>> float(probe.score(x, abs(x) > 0.6))
            1.0
        """
        labels, read = jnp.asarray(labels), self.predict(inputs)
        if read.shape != labels.shape:
            raise ValueError(
                f"`labels` has the shape {list(labels.shape)}, but the predictions have the shape "
                f"{list(read.shape)}. Pass a label for each prediction."
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
    """Fit a linear map from the value of a site to labels. It computes nothing after the site.

    It fits numbers by least squares, and classes by Newton's method on the cross entropy. Both are
    sums over the examples.

    Alain and Bengio, Understanding intermediate layers using linear classifier probes, 2016
    (arXiv:1610.01644).

    Args:
        fn: A function or a model of any framework.
        site: Selects one site, as in `tapax.prefix`.
        inputs: The argument of `fn`, or a tuple of its arguments.
        labels: An array of numbers, or of integers for classes. The axes of the labels are the
            leading axes of the value, with an example in each entry; all other axes of the value
            are features.
        kind: `"ridge"` for numbers or `"logistic"` for classes. By default the dtype of the labels
            decides.
        ridge: The penalty on the weights: `ridge * |w|**2` for numbers, half of it for classes. The
            bias has no penalty.
        num_classes: The number of classes. It is needed only if the labels are traced.
        steps: The number of steps of Newton's method. Its matrix has a row for each weight: keep
            the width times the number of classes below a few thousand.

    Returns:
        A `Probe`.

    Raises:
        ValueError: If `kind` does not fit the labels, `ridge` is not positive, the labels do not
            fit the value, or a class is out of range.
        SiteError: If `fn` cannot be cut at `site`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tapax
        >>> f = lambda x: tapax.sow(jnp.stack([x, x**2], -1), "h").sum()
        >>> x = jnp.linspace(-1.0, 1.0, 9)
        >>> probe = tapax.attribute.linear_probe(f, "h", x, 2 * x**2 + 1, ridge=1e-3)
        >>> print(np.asarray(probe.weights).round(1), np.asarray(probe.bias).round(1))
        [0. 2.] 1.0
    """
    labels = jnp.asarray(labels)
    whole = not jnp.issubdtype(labels.dtype, jnp.inexact)
    kind = kind or ("logistic" if whole else "ridge")
    if kind not in ("ridge", "logistic") or (kind == "logistic" and not whole):
        raise ValueError(
            "`kind` must be 'ridge', or 'logistic' for integer labels, but is "
            f"{kind!r} for labels of type {labels.dtype}."
        )
    if not ridge > 0:
        raise ValueError(f"`ridge` must be positive, so that the fit is unique, but is {ridge}.")
    features = prefix(fn, site)
    value = features(*arguments(inputs))
    axes = labels.ndim
    if axes < 1 or value.shape[:axes] != labels.shape:
        raise ValueError(
            "The axes of `labels` must be the leading axes of the value, but the labels have "
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
            raise ValueError("`num_classes` must be given, because the labels are traced.")
        return given
    low, high = int(np.min(labels)), int(np.max(labels))
    if low < 0 or (given is not None and high >= given):
        raise ValueError(
            f"Classes must range from 0 to num_classes - 1, but the labels range from {low} to "
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
    # Adding one number to all biases does not change the loss. The gradient has no component in
    # that direction, so a curvature in that direction makes the step unique and does not change it.
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
        # Features differ in scale, and the curvature vanishes if every prediction is certain: the
        # scaling and the diagonal term keep the solution well conditioned.
        scale = jnp.sqrt(jnp.diag(bend))
        bend = bend / jnp.outer(scale, scale) + 1e-5 * jnp.eye(slope.size, dtype=w.dtype)
        move = (jnp.linalg.solve(bend, slope.reshape(-1) / scale) / scale).reshape(slope.shape)
        # Far from the optimum a full step may overshoot, so take the best of some shorter steps.
        tried = w - 0.5 ** jnp.arange(8, dtype=w.dtype)[:, None, None] * move
        tried = jnp.concatenate([w[None], tried])
        return tried[jnp.nanargmin(jax.vmap(loss)(tried))], None

    w = jnp.zeros((width, count), x.dtype)
    w = jax.lax.scan(step, w, length=steps)[0]
    return w[:-1], w[-1] - centre @ w[:-1]
