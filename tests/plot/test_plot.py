"""Plots draw the numbers that NumPy computes, without overlaps, and leave nothing behind."""

import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

import tapax
from tapax import plot
from tapax import reduce as R
from tapax.monitoring._log import Log
from tapax.monitoring._records import AlertEvent, Histogram

pytestmark = pytest.mark.once

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def layers(x):
    body = lambda x, w: (tapax.sow(jnp.tanh(tapax.sow(x * w, "net/blocks/up")), "net/blocks"), None)
    x, _ = jax.lax.scan(body, tapax.sow(x * 0.1, "net/embed"), jnp.array([0.5, 2.0, 3.0]))
    return jnp.sum(tapax.sow(x * 3, "net/head") ** 2)


ROWS = [
    "embed",
    *(f"blocks/up[{i}]" for i in range(3)),
    *(f"blocks[{i}]" for i in range(3)),
    "head",
]


def by_hand():
    """Compute the sites of `layers` and their gradients, row by row."""

    def run(x, add):
        x = 0.1 * x + add[0]
        ups, outs = [], []
        for i, w in enumerate((0.5, 2.0, 3.0)):
            ups.append(x * w + add[1 + i])
            x = jnp.tanh(ups[-1]) + add[4 + i]
            outs.append(x)
        x = 3 * x + add[7]
        return jnp.sum(x**2), [0.1 * X + add[0], *ups, *outs, x]

    grads, values = jax.grad(run, 1, has_aux=True)(X, [jnp.zeros(X.shape)] * 8)
    return [np.asarray(v, np.float64) for v in values], [np.asarray(g, np.float64) for g in grads]


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def save(figure):
    """Draw the figure, which may warn, and return it."""
    FigureCanvasAgg(figure).draw()
    return figure


def line(axes, label):
    found = [l for l in axes.lines if l.get_label() == label]
    assert len(found) == 1, (label, [l.get_label() for l in axes.lines])
    return found[0]


def labels(axes):
    return [t.get_text() for t in axes.get_yticklabels()]


def texts(figure):
    return [t.get_text() for legend in figure.legends for t in legend.get_texts()]


def panels(figure):
    return {a.get_title("left"): a for a in figure.axes if a.get_title("left")}


@pytest.mark.parametrize("whole", [True, False])
def test_scales_by_depth_are_the_numbers(whole):
    options = {} if whole else {"values": {"**": R.rms}, "grads": {"**": [R.rms, R.norm]}}
    _, taps = tapax.capture(jax.grad(layers), **options)(X)
    figure = save(plot.taps(taps))
    axes = panels(figure)
    assert labels(figure.axes[0]) == ROWS and figure.axes[0].get_ylabel() == "net/…"
    wanted = {"Values: rms": ("value rms", rms, 0), "Gradients: rms": ("grad rms", rms, 1)}
    if not whole:
        wanted["Gradients: norm"] = ("grad norm", np.linalg.norm, 1)
    assert list(axes) == list(wanted)
    for title, (label, of, which) in wanted.items():
        drawn = line(axes[title], label)
        np.testing.assert_allclose(drawn.get_xdata(), [of(x) for x in by_hand()[which]], rtol=1e-5)
        assert drawn.get_ydata().tolist() == list(range(8)) and axes[title].get_xscale() == "log"
    assert figure.axes[0].yaxis_inverted()


def test_lines_join_the_same_part_of_the_layers():
    _, taps = tapax.capture(jax.grad(layers))(X)
    axes = plot.taps(taps).axes[0]
    joined = [l.get_ydata().tolist() for l in axes.lines if len(l.get_ydata()) == 3]
    assert joined == [[1, 2, 3], [4, 5, 6]]


def test_statistics_of_units_are_made_one():
    options = {"values": {"**": R.rms(axis=-1)}, "grads": {"**": R.norm(axis=0)}}
    _, taps = tapax.capture(jax.grad(layers), **options)(X)
    axes = plot.taps(taps).axes
    for axis, label, of, numbers in zip(
        axes, ("value rms", "grad norm"), (rms, np.linalg.norm), by_hand(), strict=True
    ):
        drawn = line(axis, label).get_xdata()
        np.testing.assert_allclose(drawn, [of(x) for x in numbers], rtol=1e-5)


def testlabelled_statistics_and_linear_axes():
    _, taps = tapax.capture(layers, values={"**": [R.minmax, R.zeros]})(X)
    axes = panels(save(plot.taps(taps)))
    assert list(axes) == ["Values: min", "Values: max", "Values: zeros"]
    drawn = line(axes["Values: min"], "value min").get_xdata()
    np.testing.assert_allclose(drawn, [x.min() for x in by_hand()[0]], rtol=1e-5)
    assert axes["Values: min"].get_xscale() == "linear"
    figure = plot.taps(taps, stats="zeros")
    assert list(panels(figure)) == ["Values: zeros"]


def test_many_statistics_are_named_if_not_shown():
    _, taps = tapax.capture(layers, values={"**": R.topk(8)})(X)
    figure = save(plot.taps(taps))
    assert len(figure.axes) == 6
    assert figure.get_supxlabel() == "Not shown: top6, top7. Choose with stats=[...]."


@pytest.mark.parametrize("edges", [None, np.linspace(-1, 1, 9)])
def test_ridgelines_show_the_counts_by_depth(edges):
    histogram = R.histogram(log2=(-6, 0)) if edges is None else R.histogram(edges)
    _, taps = tapax.capture(layers, values={"**": [R.rms, histogram]})(X)
    figure = save(plot.taps(taps))
    axes = panels(figure)["Values: histogram"]
    assert len(axes.lines) == len(ROWS)
    log = edges is None
    inner = 2.0 ** np.arange(-6, 1) if log else edges
    beyond = False
    for i, (row, x) in enumerate(zip(ROWS, by_hand()[0], strict=True)):
        drawn = line(axes, f"net/{row}")
        counts = np.histogram(np.abs(x) if log else x, inner)[0]
        if log:
            counts[-1] -= np.sum(np.abs(x) == inner[-1])
            beyond |= bool(counts.sum() < x.size)
        heights = (drawn.get_ydata()[1:-1] - (i + 0.3)) / -1.5
        np.testing.assert_allclose(heights, counts / max(counts.max(), 1), atol=1e-6)
        middle = np.sqrt(inner[1:] * inner[:-1]) if log else (inner[1:] + inner[:-1]) / 2
        np.testing.assert_allclose(drawn.get_xdata()[1:-1], middle)
    assert axes.get_xscale() == ("log" if log else "linear")
    assert texts(figure) == (["share beyond the bins"] if beyond else [])
    # The first ridge is within the axes.
    tops = [l.get_ydata().min() for l in axes.lines]
    assert min(tops) > axes.get_ylim()[1]


def test_nan_inf_and_zero_are_marked():
    def f(x):
        for i, by in enumerate((1.0, np.nan, np.inf, 0.0, 2.0)):
            tapax.sow(jnp.ones(3) * by, f"h{i}")
        return x

    _, taps = tapax.capture(f)(X)
    figure = save(plot.taps(taps))
    axes = figure.axes[0]
    assert texts(figure) == ["NaN", "Inf", "zero"]
    for name, row, edge in (("NaN", 1, 1.0), ("Inf", 2, 1.0), ("zero", 3, 0.0)):
        mark = line(axes, name)
        assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([edge], [row])
    seen = line(axes, "value rms").get_xdata()
    np.testing.assert_allclose(seen, [1.0, np.nan, np.nan, np.nan, 2.0])


def test_sites_that_did_not_run_are_left_out():
    def f(x):
        def body(c, i):
            even = lambda c: tapax.sow(c * 2, "even")
            return jax.lax.cond(i % 2 == 0, even, lambda c: tapax.sow(c, "odd"), c), None

        x = jax.lax.scan(body, x, jnp.arange(4))[0]
        jax.lax.cond(x.sum() > 1e9, lambda x: tapax.sow(x, "never"), lambda x: x, x)
        return jax.lax.while_loop(lambda c: c.max() < 50, lambda c: tapax.sow(c * 2, "loop"), x)

    _, taps = tapax.capture(f, steps=8)(X)
    axes = plot.taps(taps).axes[0]
    assert labels(axes) == [
        "even[0]",
        "even[2]",
        "odd[1]",
        "odd[3]",
        "loop[0]",
        "loop[1]",
        "loop[2]",
    ]
    x = np.asarray(X)
    wanted = [rms(x * by) for by in (2, 4, 2, 4, 8, 16, 32)]
    np.testing.assert_allclose(line(axes, "value rms").get_xdata(), wanted, rtol=1e-5)


def test_examples_that_did_not_run_do_not_count():
    f = jax.vmap(lambda x: jax.lax.cond(x[0] > 0, lambda x: tapax.sow(x, "yes"), lambda x: x, x))
    _, taps = tapax.capture(f)(X)
    x = np.asarray(X)
    drawn = line(plot.taps(taps).axes[0], "value rms").get_xdata()
    np.testing.assert_allclose(drawn, [rms(x[x[:, 0] > 0])], rtol=1e-5)


def test_devices_count_together(mesh):
    def body(x):
        return jax.lax.scan(lambda c, _: (tapax.sow(c * 2, "h"), None), x, length=3)[0]

    spec = jax.sharding.PartitionSpec("a", "b")
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jnp.arange(16.0).reshape(4, 4)
    _, taps = tapax.capture(f)(x)
    axes = plot.taps(taps).axes[0]
    assert labels(axes) == ["h[0]", "h[1]", "h[2]"]
    wanted = [rms(np.asarray(x) * by) for by in (2, 4, 8)]
    np.testing.assert_allclose(line(axes, "value rms").get_xdata(), wanted, rtol=1e-5)


def test_picked_iterations_are_not_taken_for_others():
    _, taps = tapax.capture(layers, values=tapax.at("net/blocks", step=slice(1, 3)))(X)
    axes = plot.taps(taps).axes[0]
    assert labels(axes) == ["blocks"]
    np.testing.assert_allclose(
        line(axes, "value rms").get_xdata(), [rms(np.stack(by_hand()[0][5:7]))], rtol=1e-5
    )


@pytest.mark.parametrize("grads", [{}, {"grads": {"**": R.rms}}, {"grads": {"**": R.rms(axis=-1)}}])
@pytest.mark.parametrize("value", [R.rms, R.rms.total, R.histogram([0.0, 1.0, 2.0, 3.0]), R.last])
def test_gradients_are_read_whatever_the_values_were_reduced_to(value, grads):
    """Loops, axes and bins all have length three, so that tapax could confuse them."""

    def f(x):
        return jnp.sum(jax.lax.scan(lambda x, w: (tapax.sow(x * w, "h"), None), x, W)[0] ** 2)

    W, x = jnp.array([2.0, 3.0, 5.0]), jnp.arange(9.0).reshape(3, 3) + 1
    _, taps = tapax.capture(jax.grad(f), values={"**": value}, **grads)(x)
    axes = panels(plot.taps(taps))["Gradients: rms"]
    wanted = [rms(2 * 30 * by * np.asarray(x)) for by in (15, 5, 1)]
    drawn = line(axes, "grad rms").get_xdata()
    if value.over_loops:  # the site does not describe the loops of the gradient
        wanted = [np.sqrt(np.mean(np.square(wanted)))]
    np.testing.assert_allclose(drawn, wanted, rtol=1e-5)


def test_taps_from_an_outer_scan_count_together():
    outer = lambda x: jax.lax.scan(
        lambda c, by: (c, tapax.capture(layers)(c * by)[1]), x, jnp.ones(3)
    )
    taps = outer(X)[1]
    axes = plot.taps(taps).axes[0]
    assert labels(axes) == ROWS
    wanted = [rms(x) for x in by_hand()[0]]
    np.testing.assert_allclose(line(axes, "value rms").get_xdata(), wanted, rtol=1e-5)


@pytest.mark.parametrize("edges", [(-np.inf, np.inf), (-np.inf, 0, np.inf), (0.0, 1.0, np.inf)])
def test_bins_without_an_end_are_bars(edges):
    _, taps = tapax.capture(layers, values={"**": R.histogram(edges)})(X)
    figure = save(plot.taps(taps))
    assert len(figure.axes[0].lines) == len(ROWS) and texts(figure) == ["share beyond the bins"]


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "int32", "float32"])
def test_values_of_every_type_are_drawn(dtype):
    x = jnp.array([1, 2, 1000]).astype(dtype) * (1j if dtype == "complex64" else 1)
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(x)
    drawn = line(plot.taps(taps).axes[0], "value rms").get_xdata()
    np.testing.assert_allclose(drawn, [rms(np.abs(np.asarray(x).astype(np.complex128)))])


def test_large_numbers_do_not_overflow():
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(jnp.full(3, 3e38))
    values = {"h": np.full(3, 1e300)}
    drawn = line(plot.taps(tapax.Taps(values, {}, {}, taps.sites)).axes[0], "value rms").get_xdata()
    np.testing.assert_allclose(drawn, [1e300])


def boxes(axes, texts):
    renderer = axes.get_figure(root=True).canvas.get_renderer()
    return [t.get_window_extent(renderer) for t in texts if t.get_text()]


def overlap(axes):
    """Return the labels of the axes that overlap."""
    for axis in (axes.xaxis, axes.yaxis):
        ticks = axis.get_ticklabels(which="both")
        low, high = sorted(axis.get_view_interval())
        seen = [t for t in ticks if low <= t.get_position()[axis is axes.yaxis] <= high]
        drawn = boxes(axes, seen)
        if any(a.overlaps(b) for a, b in itertools.combinations(drawn, 2)):
            return True
    return False


PARTS = ("norm", "attention/self/query/projection", "mlp", "out")


@pytest.mark.parametrize("count", [1, 3, 40, 150])
def test_labels_do_not_overlap(count):
    names = [f"VeryLongModelName/layers/{i // 4}/{PARTS[i % 4]}" for i in range(count)]
    taps = tapax.Taps(
        {n: np.ones(2) * (i + 1) for i, n in enumerate(names)}, {}, {}, tapax.SiteTable()
    )
    figure = save(plot.taps(taps))
    axes = figure.axes[0]
    assert not overlap(axes)
    assert len(line(axes, "value rms").get_xdata()) == count
    assert len(labels(axes)) == count if count <= 40 else 40 < len(labels(axes)) < count
    assert max(map(len, labels(axes))) <= 30
    width, height = figure.get_size_inches()
    assert width <= 10 and height < 15


def filled(count=4, steps=range(0, 60, 20), histogram=False):
    log = Log()
    for step in steps:
        record = {}
        for i in range(count):
            record[f"Net/{i}/mlp/value_rms"] = (i + 1.0) * (step + 1)
            record[f"Net/{i}/mlp/grad_rms"] = 10.0 ** -(i + 1) * (step + 1)
            if histogram:
                counts = np.array([step, 5.0, i, 1.0])
                record[f"Net/{i}/mlp/value_histogram"] = Histogram(counts, np.arange(5.0))
        log(step, record)
    return log


def test_history_lines_are_the_numbers():
    figure = save(plot.history(filled()))
    axes = panels(figure)
    assert list(axes) == ["Values: rms", "Gradients: rms"]
    for i in range(4):
        drawn = line(axes["Values: rms"], f"Net/{i}/mlp")
        assert drawn.get_xdata().tolist() == [0, 20, 40]
        np.testing.assert_allclose(drawn.get_ydata(), (i + 1.0) * np.array([1, 21, 41]))
        drawn = line(axes["Gradients: rms"], f"Net/{i}/mlp")
        np.testing.assert_allclose(drawn.get_ydata(), 10.0 ** -(i + 1) * np.array([1, 21, 41]))
    key = figure.axes[-1]
    assert labels(key) == [f"{i}/mlp" for i in range(4)] and key.get_ylabel() == "Net/…"
    assert not any(map(overlap, figure.axes))


def test_history_of_many_layers_is_a_heat_map():
    log = filled(30)
    log(60, {"Net/3/mlp/value_rms": np.nan, "Net/4/mlp/value_rms": 0.0})
    figure = save(plot.history(log))
    axes = panels(figure)["Values: rms"]
    mesh, zero, bad = axes.collections
    wanted = np.array([[(i + 1.0) * (s + 1) for s in (0, 20, 40)] for i in range(30)])
    grid = mesh.get_array()
    np.testing.assert_allclose(grid[:, :3], wanted)
    assert grid[:, 3].mask.all()  # not recorded, or neither
    assert np.argwhere(~bad.get_array().mask).tolist() == [[3, 3]]
    assert np.argwhere(~zero.get_array().mask).tolist() == [[4, 3]]
    assert texts(figure) == ["NaN or Inf", "all zero"]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-10, 10, 30, 50, 70]
    assert axes.yaxis_inverted() and not any(map(overlap, figure.axes))


def test_history_of_many_records_shows_the_largest_and_each_nan():
    log = filled(12, range(1200))
    dict(log)[567]["Net/5/mlp/value_rms"] = np.inf
    mesh, bad = panels(save(plot.history(log)))["Values: rms"].collections
    assert mesh.get_array().shape == (12, 400)
    assert mesh.get_array()[2].max() == 3 * 1200
    assert np.argwhere(~bad.get_array().mask)[:, 0].tolist() == [5]


def test_history_draws_histograms_as_ridgelines():
    log = filled(6, range(0, 300, 10), histogram=True)
    figure = save(plot.history(log))
    ridged = [a for a in figure.axes if a.get_title("left").endswith("/mlp")]
    assert [a.get_title("left") for a in ridged] == ["0/mlp", "2/mlp", "3/mlp", "5/mlp"]
    title = [s.get_suptitle() for s in figure.subfigs][-1]
    assert title == "Values: histogram of Net/…  (4 of 6 layers)"
    for axes, i in zip(ridged, (0, 2, 3, 5), strict=True):
        assert len(axes.lines) == 16
        first, last = axes.lines[0], axes.lines[-1]
        assert (first.get_label(), last.get_label()) == ("0", "290")
        heights = (first.get_ydata()[1:-1] - 0.3) / -1.6
        np.testing.assert_allclose(heights, np.array([0, 5, i, 1]) / 5)
        heights = (last.get_ydata()[1:-1] - 15.3) / -1.6
        np.testing.assert_allclose(heights, np.array([290, 5, i, 1]) / 290)
        assert not overlap(axes)
    figure = save(plot.history(log, at="Net/4/mlp", stats="histogram"))
    assert len(figure.axes) == 1 and len(figure.axes[0].lines) == 16


def test_an_empty_histogram_is_drawn_as_such():
    log = Log()
    log(0, {"h/grad_histogram": Histogram(np.zeros(3), np.array([0.0, 1.0, 2.0, np.inf]))})
    figure = save(plot.history(log))
    assert texts(figure) == ["nothing in the bins"]


def test_history_marks_alerts_and_nan():
    log = filled()
    log(60, {"Net/1/mlp/value_rms": np.nan, "Net/0/mlp/value_rms": 5.0})
    for site in ("Net/1/mlp", "Net/2/mlp"):
        log.alert(AlertEvent(60, site, "value_nonfinite", 3.0, "..."))
    log.alert(AlertEvent(20, "Net/0/mlp", "grad_rms", 3.0, "..."))
    figure = save(plot.history(log))
    for axes in panels(figure).values():
        assert [line(axes, f"alert {i}").get_xdata()[0] for i in (1, 2)] == [20, 60]
        assert [t.get_text() for t in axes.texts] == ["1", "2"]
    assert figure.get_supxlabel().splitlines() == [
        "1  step 20: Net/0/mlp (grad_rms)",
        "2  step 60: Net/1/mlp, Net/2/mlp (value_nonfinite)",
    ]
    mark = line(panels(figure)["Values: rms"], "NaN")
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([60], [1.0])
    assert texts(figure) == ["NaN"]


def test_history_of_a_run_that_was_continued():
    log = Log()
    for step, number in ((0, 1.0), (10, 2.0), (20, 3.0)):
        log(step, {"h/value_rms": number, "loss": number})
    with pytest.warns(UserWarning, match="step 10 came after step 20"):
        log(10, {"h/value_rms": 4.0, "loss": 4.0})
    log(30, {"h/value_rms": 5.0, "loss": 5.0})
    figure = save(plot.history(log))
    axes = panels(figure)
    assert list(axes) == ["Values: rms", "loss"]
    assert line(axes["Values: rms"], "h").get_xydata().tolist() == [[0, 1], [10, 4], [30, 5]]


def test_history_reads_a_path_and_selects(tmp_path):
    from tapax.monitoring.sink import jsonl

    sink = jsonl(tmp_path / "log.jsonl")
    for step, record in filled():
        sink(step, record)
    for path in (tmp_path / "log.jsonl", str(tmp_path / "log.jsonl")):
        axes = panels(plot.history(path, at="Net/[12]/*".replace("[12]", "?")))["Values: rms"]
        assert len(axes.lines) == 4
    axes = panels(plot.history(path, at=["Net/1/*", "Net/2/mlp"]))["Values: rms"]
    assert [l.get_label() for l in axes.lines] == ["Net/1/mlp", "Net/2/mlp"]


def test_no_statistics_are_refused():
    _, taps = tapax.capture(lambda x: tapax.sow(x, "h"))(1.0)
    log = tapax.Log()
    log(0, {"h/value_rms": 1.0})
    for draw, what in (
        (tapax.plot.taps, taps),
        (tapax.plot.roles, taps),
        (tapax.plot.history, log),
    ):
        with pytest.raises(ValueError, match=r"`stats` is empty\. Leave it out"):
            draw(what, stats=[])


def test_names_with_line_breaks_are_drawn():
    log = tapax.Log()
    log(0, {"loss\nof\ntest": 1.0})
    (panel,) = tapax.plot.history(log).axes
    assert panel.lines[0].get_ydata().tolist() == [1.0]


def test_iterations_in_a_log_are_selected_by_their_site_or_alone():
    log = Log()
    log(0, {f"net/mlp@1[{i}]/value_rms": 1.0 + i for i in range(3)} | {"net/x/value_rms": 1.0})
    for at, count in (("**/mlp", 3), ("net/mlp@1", 3), ("net/mlp@1[2]", 1), ("**", 4)):
        assert len(panels(plot.history(log, at=at))["Values: rms"].lines) == count


def _nothing(x):
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plot.taps(tapax.capture(_nothing, None, None)(X)[1]), ValueError,
         "There is nothing to plot: the capture returned no values and no gradients. "
         "tapax.sites(fn)(*args) lists the sites of a function."),
        (lambda: plot.taps(tapax.capture(layers)(X)[1], at="**/haed"), tapax.SiteError,
         "`at` is '**/haed', which matches nothing in the capture. "
         "The nearest names are 'net/head'."),
        (lambda: plot.taps(tapax.capture(layers)(X)[1], at=""), tapax.SiteError,
         "`at` is an empty string, which matches no site."),
        (lambda: plot.taps(tapax.capture(lambda x: tapax.sow(x > 0, "h"))(X)[1]), ValueError,
         "There is nothing to plot: the selected sites did not run, or are not arrays of "
         "numbers. Their dtypes are bool."),
        (lambda: plot.taps(tapax.capture(layers)(X)[1], stats="norm"), ValueError,
         "`stats` contains 'norm', which was not captured. The statistics are 'rms'."),
        (lambda: plot.taps({"h": X}), TypeError,
         "tapax.plot.taps takes the taps of a capture, but was given"),
        (lambda: jax.jit(lambda x: plot.taps(tapax.capture(layers)(x)[1]))(X), TypeError,
         "A plot needs numbers, but 'net/embed' is traced"),
        (lambda: plot.history(Log()), ValueError,
         "There is nothing to plot: the log is empty. A monitor fills a log: "
         "tapax.monitor(step, every=100, to=log)."),
        (lambda: plot.history(filled(), at="Net/0/mpl"), tapax.SiteError,
         "`at` is 'Net/0/mpl', which matches nothing in the log. "
         "The nearest names are 'Net/0/mlp', 'Net/3/mlp', 'Net/2/mlp'."),
        (lambda: plot.history([1, 2]), TypeError,
         "tapax.plot.history takes a tapax.Log, or the path of one, but was given [1, 2] of type "
         "list."),
    ],
)  # fmt: skip
def test_bad_input_of_plot_functions(call, error, message):
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(message)


def test_a_log_without_numbers():
    log = Log()
    log(0, {"h/value_rms": np.zeros(0)})
    with pytest.raises(ValueError, match="the log contains no numbers"):
        plot.history(log)


@pytest.mark.parametrize(
    "call", [lambda: plot.taps(tapax.capture(layers)(X)[1]), lambda: plot.history(filled())]
)
def test_plots_without_matplotlib_say_so(call, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
        if name.startswith("tapax.plot._"):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError) as found:
        call()
    message = "Plots need matplotlib, which is not installed: pip install 'tapax[plot]'."
    assert str(found.value) == message


def test_matplotlib_is_imported_when_it_is_needed():
    code = "import sys, tapax.plot; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_left_behind():
    before = dict(matplotlib.rcParams), plt.get_fignums()
    _, taps = tapax.capture(layers)(X)
    for figure in (plot.taps(taps), plot.history(filled(histogram=True))):
        assert isinstance(figure, matplotlib.figure.Figure)
        assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    assert (dict(matplotlib.rcParams), plt.get_fignums()) == before


def test_looks_do_not_depend_on_the_style_in_use():
    _, taps = tapax.capture(layers, values={"**": [R.rms, R.histogram(log2=(-6, 0))]})(X)
    pictures = []
    for style in ("default", "dark_background"):
        with plt.style.context(style):
            pictures += [f._repr_png_() for f in (plot.taps(taps), plot.history(filled(12)))]
    assert pictures[:2] == pictures[2:]
