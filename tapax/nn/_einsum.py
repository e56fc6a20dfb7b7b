"""BatchEnsemble of `nnx.Einsum`: `r` scales the kernel's axes in the inputs, `s` the others."""

import inspect
from typing import Any, NamedTuple

import jax
from flax import nnx

from tapax.nn._factors import BaseLayer, EnsembleLayer, LayerShapes
from tapax.nn._member_rows import check_stack, check_width, modulate

# A capture replaces this method while it traces.
_einsum = inspect.unwrap(nnx.Einsum.__call__)


def _get_shapes(base: Any) -> LayerShapes:
    letters = _letters_of(base)
    sizes = dict(zip(letters.kernel, base.kernel_shape, strict=True))
    ins, outs = (tuple(sizes[c] for c in part) for part in (letters.ins, letters.outs))
    return LayerShapes(tuple(base.kernel_shape), ins, outs, base.bias_shape or outs)


class BatchEnsembleEinsum(EnsembleLayer, nnx.Einsum):
    """An einsum with a kernel, of several members.

    `r` has an axis for every letter that the kernel shares with the inputs, in their order, and `s`
    an axis for every letter that the kernel shares with the result, in its order: the kernel of a
    member is `kernel * r_k * s_k`, each along its letters. The first axis of the inputs contains
    the rows; it must be in the result and not in the kernel.

    Args:
        base_layer: The `nnx.Einsum` to convert. It stays as it is.
        rngs: An `nnx.Rngs`, from whose stream `params` the layer draws; an `nnx.RngStream`; or a
            seed or a key, which is combined with the weights of the base layer, so that layers made
            with one seed have different factors.
        num_members: The number of members.
        use_base_weights: Whether to use the kernel of the base layer, the variable itself. By
            default the layer draws a new kernel; `batch_ensemble` keeps the weights by default.
        init: The distribution of `r` and `s`: `"normal"` or `"random_sign"`.
        r_mean: The mean of `r`, for `"normal"`.
        r_std: The standard deviation of `r`, for `"normal"`.
        s_mean: The mean of `s`, for `"normal"`.
        s_std: The standard deviation of `s`, for `"normal"`.

    Raises:
        TypeError: If `base_layer` is not a plain `nnx.Einsum`, or `rngs` not a source of keys.
        ValueError: If an option is out of range, or if stacked weights are not stacked along the
            first axes.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from tapax import nn
        >>> base = nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
        >>> layer = nn.BatchEnsembleEinsum(base, rngs=1, num_members=4)
        >>> layer.r.shape, layer.s.shape, layer.bias.shape
        ((4, 2), (4, 8, 4), (4, 8, 4))
        >>> layer(jax.random.normal(jax.random.key(0), (4 * 5, 11, 2))).shape
        (20, 11, 8, 4)
    """

    base = BaseLayer(nnx.Einsum, _get_shapes)

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Compute the results of all members; the equation places the axis of the rows."""
        equation = self.einsum_str if einsum_str is None else einsum_str
        letters = _letters(equation, inputs.ndim)
        sizes = dict(zip(letters.kernel, self.kernel_shape, strict=False))
        if len(letters.kernel) != len(self.kernel_shape):
            raise ValueError(
                f"`einsum_str` of BatchEnsembleEinsum is {equation!r}, but the kernel has the "
                f"shape {list(self.kernel_shape)}."
            )
        if letters.axes != _letters_of(self).axes:
            raise ValueError(
                f"`einsum_str` of BatchEnsembleEinsum is {equation!r}, but the layer was made for "
                f"{self.einsum_str!r}, with other axes of the kernel, or another order of them, in "
                "the inputs or in the result."
            )
        check_stack(self, [sizes[c] for c in letters.ins])
        ins = [letters.inputs.index(c) for c in letters.ins]
        check_width(self, inputs, ins, [sizes[c] for c in letters.ins])
        where = [letters.result.index(c) - len(letters.result) for c in letters.outs]
        run = lambda layer, x: _einsum(layer, x, einsum_str, out_sharding)  # noqa: E731
        row = letters.result.index(letters.inputs[0])
        return modulate(self, inputs, run, ins, where, row)


class _Letters(NamedTuple):
    """The letters of an equation; the kernel has `ins` in the inputs, and `outs` in the result."""

    inputs: str
    kernel: str
    result: str

    @property
    def ins(self) -> list[str]:
        return [c for c in self.inputs if c in self.kernel]

    @property
    def outs(self) -> list[str]:
        return [c for c in self.result if c in self.kernel]

    @property
    def axes(self) -> tuple[list[int], list[int]]:
        """The axes of the kernel to which the axes of `r` and of `s` belong."""
        ins, outs = ([self.kernel.index(c) for c in part] for part in (self.ins, self.outs))
        return ins, outs


def _letters_of(layer: Any) -> _Letters:
    """Return the letters of the equation of a layer."""
    inputs = layer.einsum_str.partition(",")[0]
    # Only a call tells how many axes an ellipsis has; assume one.
    return _letters(layer.einsum_str, len(inputs.replace("...", "")) + ("..." in inputs))


def _letters(equation: str, ndim: int) -> _Letters:
    operands, _, result = equation.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    # Replace an ellipsis by letters that do not occur in equations.
    count = ndim - len(inputs.replace("...", ""))
    dots = "".join(chr(0x2460 + i) for i in range(count))
    if "..." in inputs:
        inputs, result = inputs.replace("...", dots), result.replace("...", dots)
    repeated = any(len(set(part)) < len(part) for part in (inputs, kernel, result))
    row = inputs[:1]
    if "." in kernel or repeated or not row or row in kernel or row not in result:
        raise ValueError(
            f"BatchEnsembleEinsum cannot take the equation {equation!r}: a letter must not occur "
            "twice in one part, the kernel must have no ellipsis, and the first axis of the "
            "inputs, which contains the rows, must be in the result and not in the kernel."
        )
    if len(inputs) != ndim:
        raise ValueError(
            f"`inputs` of BatchEnsembleEinsum has {ndim} axes, but the equation is {equation!r}."
        )
    return _Letters(inputs, kernel, result)
