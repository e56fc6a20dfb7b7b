"""The plot of a difference between two captures draws the errors."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import tapax
from tapax import plot

pytestmark = pytest.mark.once


def layers(x, change):
    def body(x, i):
        return tapax.sow(jnp.sin(x) + jnp.where(i == 2, change, 0.0), "net/layers"), None

    x, _ = jax.lax.scan(body, tapax.sow(2 * x, "net/embed"), jnp.arange(4))
    return jnp.sum(tapax.sow(x, "net/head") ** 2)


def compared(**tolerance):
    step = tapax.capture(jax.jit(jax.grad(layers)))
    a, b = (step(jnp.linspace(0.1, 0.9, 3), change)[1] for change in (0.0, 0.25))
    return tapax.diff(a, b, **tolerance)


def drawn(figure, title):
    """Return the labels of the rows, and the errors within and beyond the tolerance."""
    FigureCanvasAgg(figure).draw()
    [axis] = [a for a in figure.axes if a.get_title("left") == title]
    within, beyond = (
        next(l for l in axis.lines if l.get_label().endswith(end)).get_xdata()
        for end in ("within the tolerance", "beyond the tolerance")
    )
    return axis, within, beyond


def test_errors_by_depth_are_the_numbers():
    difference = compared()
    figure = difference.plot()
    axis, within, beyond = drawn(figure, "Values")
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["embed", *(f"layers[{i}]" for i in range(4)), "head"]
    assert figure.axes[0].get_ylabel() == "net/…" and axis.get_xscale() == "log"
    errors = difference.values["net/layers"].ulps_by_iteration
    np.testing.assert_allclose(beyond[3:5], errors[2:])
    assert np.isnan(beyond[:3]).all() and np.isnan(within).all()  # zero has a separate mark
    assert [t.get_text() for legend in figure.legends for t in legend.get_texts()] == ["zero"]
    _, _, beyond = drawn(figure, "Gradients")
    assert beyond[-1] == difference.grads["net/head"].ulps
    assert "4 units in the last place" in figure.get_supxlabel()


def test_the_tolerance_is_a_line_in_its_units():
    for tolerance, expected in (({"ulps": 16.0}, [16.0]), ({"rtol": 1e-3}, [])):
        axis, _, _ = drawn(compared(**tolerance).plot(), "Values")
        lines = [l.get_xdata()[0] for l in axis.lines if l.get_linestyle() == "--"]
        assert lines == expected


def test_arrays_that_cannot_be_compared_are_at_the_edge():
    difference = tapax.diff({"a": np.ones(2), "b": np.ones(3)}, {"a": np.ones(3), "b": np.ones(3)})
    figure = plot.difference(difference)
    drawn(figure, "Values")
    assert [a.get_title("left") for a in figure.axes] == ["Values"]
    names = {t.get_text() for legend in figure.legends for t in legend.get_texts()}
    assert names == {"Inf", "zero"}


def test_a_loop_without_iterations_has_a_row():
    found = {"h": np.zeros((0, 2), np.float32)}
    fn = lambda x: jax.lax.scan(lambda c, i: (tapax.sow(c + i, "h"), None), x, jnp.arange(0.0))[0]
    taps = tapax.capture(fn, grads=None)(jnp.ones(2))[1]
    figure = plot.difference(tapax.diff(taps, found))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["h"]


def test_a_plot_of_something_else_raises():
    with pytest.raises(TypeError, match=r"takes the result of tapax\.diff, but was given 3"):
        plot.difference(3)


def test_without_matplotlib_the_error_names_the_extra():
    code = """
import sys
sys.modules["matplotlib"] = None
import numpy as np, tapax
try:
    tapax.diff({"a": np.ones(1)}, {"a": np.ones(1)}).plot()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout == "Plots need matplotlib, which is not installed: pip install 'tapax[plot]'.\n"
    )
