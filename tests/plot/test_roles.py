"""Plots by role draw each kind of module in its position and colour."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

import tapax
from tapax import plot
from tapax import reduce as R
from tapax._sites.roles import place_rows

pytestmark = pytest.mark.once

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)
WEIGHTS = (0.5, 2.0, 3.0)


def unrolled(x):
    x = tapax.sow(x * 0.1, "net/embed")
    for i, w in enumerate(WEIGHTS):
        up = tapax.sow(x * w, f"net/blocks/{i}/mlp/up")
        x = tapax.sow(x + tapax.sow(jnp.tanh(up), f"net/blocks/{i}/mlp"), f"net/blocks/{i}")
    return jnp.sum(tapax.sow(x * 3, "net/head") ** 2)


def scanned(x):
    def block(x, w):
        up = tapax.sow(x * w, "net/blocks/mlp/up")
        return tapax.sow(x + tapax.sow(jnp.tanh(up), "net/blocks/mlp"), "net/blocks"), None

    x, _ = jax.lax.scan(block, tapax.sow(x * 0.1, "net/embed"), jnp.array(WEIGHTS))
    return jnp.sum(tapax.sow(x * 3, "net/head") ** 2)


def by_hand(scale=1.0):
    """Compute the rms of values and gradients for each role from layer to layer."""

    def run(add):
        x = 0.1 * scale * np.asarray(X) + add[0]
        found = {"embed": [x], "mlp/up": [], "mlp": [], "blocks": []}
        for i, w in enumerate(WEIGHTS):
            found["mlp/up"].append(x * w + add[1 + 3 * i])
            found["mlp"].append(jnp.tanh(found["mlp/up"][-1]) + add[2 + 3 * i])
            x = x + found["mlp"][-1] + add[3 + 3 * i]
            found["blocks"].append(x)
        found["head"] = [3 * x + add[10]]
        return jnp.sum(found["head"][0] ** 2), found

    flat, values = jax.grad(run, has_aux=True)([jnp.zeros(X.shape)] * 11)
    grads = {"embed": flat[:1], "mlp/up": flat[1:10:3], "mlp": flat[2:10:3]}
    grads |= {"blocks": flat[3:10:3], "head": flat[10:]}
    rms = lambda x: np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))
    return [{role: [rms(x) for x in xs] for role, xs in each.items()} for each in (values, grads)]


def line(axes, label):
    found = [l for l in axes.lines if l.get_label() == label]
    assert len(found) == 1, (label, [l.get_label() for l in axes.lines])
    return found[0]


def save(figure):
    """Draw the figure, which raises if drawing warns."""
    FigureCanvasAgg(figure).draw()
    return figure


def labels(figure):
    return [t.get_text() for legend in figure.legends for t in legend.get_texts()]


def ticks(axes):
    return [t.get_text() for t in axes.get_xticklabels()]


@pytest.mark.parametrize("model", [unrolled, scanned])
@pytest.mark.parametrize("whole", [True, False])
def test_lines_of_roles_are_the_numbers_by_depth(model, whole):
    """Layers of a scan are points along depth, like those of a list of modules."""
    options = {} if whole else {"values": {"**": R.rms}, "grads": {"**": R.rms}}
    _, taps = tapax.capture(jax.grad(model), **options)(X)
    figure = save(plot.roles(taps))
    assert [a.get_title("left") for a in figure.axes] == ["Values: rms", "Gradients: rms"]
    for axes, numbers in zip(figure.axes, by_hand(), strict=True):
        for role in ("mlp/up", "mlp", "blocks"):
            drawn = line(axes, role)
            assert drawn.get_xdata().tolist() == [1.0, 2.0, 3.0]
            np.testing.assert_allclose(drawn.get_ydata(), numbers[role], rtol=1e-5)
        apart = line(axes, "outside of the layers")
        assert apart.get_xdata().tolist() == [0.0, 4.0]
        np.testing.assert_allclose(
            apart.get_ydata(), [*numbers["embed"], *numbers["head"]], rtol=1e-5
        )
        assert axes.get_yscale() == "log" and axes.get_xlabel() == "net/blocks"
        assert ticks(axes) == ["embed", "0", "1", "2", "head"]


def test_a_role_keeps_its_colour_in_all_panels_and_captures():
    options = {"values": {"**": [R.rms, R.norm]}, "grads": {"**": [R.rms, R.norm]}}
    capture = tapax.capture(jax.grad(unrolled), **options)
    captures = {"before": capture(X)[1], "after": capture(2 * X)[1]}
    figure = save(plot.roles(captures))
    assert len(figure.axes) == 4
    colours = {}
    for axes, role, name in itertools.product(figure.axes, ("mlp", "mlp/up", "blocks"), captures):
        colours.setdefault(role, set()).add(to_hex(line(axes, f"{role}, {name}").get_color()))
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 3
    alone = plot.roles(captures["after"], at="**/up", stats="rms")
    assert {to_hex(line(axes, "mlp/up").get_color()) for axes in alone.axes} == colours["mlp/up"]
    rows = plot.taps(captures["after"], stats="rms").axes[0]
    dots = [to_hex(c.get_facecolor()[0]) for c in rows.collections]
    assert {*colours["mlp"], *colours["mlp/up"]} <= set(dots)


def test_captures_differ_in_the_style_of_their_lines():
    capture = tapax.capture(jax.grad(unrolled))
    figure = save(plot.roles({"before": capture(X)[1], "after": capture(2 * X)[1]}))
    for axes, first, last in zip(figure.axes, by_hand(), by_hand(2.0), strict=True):
        for role in ("mlp", "mlp/up"):
            before, after = line(axes, f"{role}, before"), line(axes, f"{role}, after")
            assert (before.get_linestyle(), after.get_linestyle()) == ("--", "-")
            assert before.get_markerfacecolor() != after.get_markerfacecolor()
            np.testing.assert_allclose(before.get_ydata(), first[role], rtol=1e-5)
            np.testing.assert_allclose(after.get_ydata(), last[role], rtol=1e-5)
    assert labels(figure) == ["before", "after", "mlp/up", "mlp", "blocks"]


def test_layers_of_forty_eight_blocks_and_six_roles_are_readable():
    parts = ("norm1", "attn", "norm2", "mlp/up", "mlp/down", "mlp")
    names = [f"GPT/blocks/{i}{p}" for i in range(48) for p in (*(f"/{p}" for p in parts), "")]
    names = ["GPT/embed", *names, "GPT/norm", "GPT/head"]
    rng = np.random.default_rng(0)
    arrays = lambda: {name: np.exp(rng.normal(size=3)) for name in names}
    taps = tapax.Taps(arrays(), arrays(), {}, tapax.SiteTable([tapax.Site(n) for n in names]))
    figure = save(plot.roles(taps))
    for axes in figure.axes:
        roles = [l for l in axes.lines if len(l.get_xdata()) == 48]
        assert [l.get_label() for l in roles] == [*parts, "blocks"]
        assert len({l.get_color() for l in roles}) == len({l.get_marker() for l in roles}) == 7
        boxes = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text()]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    panels = [axes.get_window_extent() for axes in figure.axes]
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(panel) for panel in panels)
    assert figure.get_size_inches()[0] <= 10


def test_layers_of_a_model_of_flax_have_roles():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.mlp = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs))

        def __call__(self, x):
            return x + self.mlp(self.norm(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    _, taps = tapax.capture(Net(nnx.Rngs(0)))(X)
    axes = save(plot.roles(taps)).axes[0]
    assert [l.get_label() for l in axes.lines if len(l.get_xdata()) == 3] == [
        "norm", "mlp/layers/0", "mlp/layers/1", "mlp", "blocks",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (["N/Block_0/Dense_1", "N/Block_1/Dense_1"], [("Dense_1", (0,)), ("Dense_1", (1,))]),
        (["n/linear", "n/linear_1"], [("linear", (0,)), ("linear", (1,))]),
        (["h", "h@1", "h@2"], [("h", (0,)), ("h", (1,)), ("h", (2,))]),
        (["N/b/f", "N/b", "N/b/f@1", "N/b@1"],
         [("f", (0,)), ("b", (0,)), ("f", (1,)), ("b", (1,))]),
        (["N/b/0:0", "N/b/1:0"], [("b:0", (0,)), ("b:0", (1,))]),
        (["N/b/0/f", "N/b/0/f@1", "N/b/1/f"], [("f", (0,)), ("f@1", (0,)), ("f", (1,))]),
        (["N/rope", "N/b/0", "N/rope@1", "N/b/1"],
         [("rope", (0,)), ("b", (0,)), ("rope", (1,)), ("b", (1,))]),
        (["N/embed", "N/b/0", "N/b/1", "N/embed@1"],
         [("N/embed", ()), ("b", (0,)), ("b", (1,)), ("N/embed@1", ())]),
        (["N/s/0/b/0/f", "N/s/0/b/1/f", "N/s/1/b/0/f"],
         [("b/f", (0, 0)), ("b/f", (0, 1)), ("b/f", (1, 0))]),
        (["N/attns/0/q", "N/mlps/0", "N/attns/1/q", "N/mlps/1"],
         [("attns/q", (0,)), ("mlps", (0,)), ("attns/q", (1,)), ("mlps", (1,))]),
        (["a/up", "a/down", "a"], [("a/up", ()), ("a/down", ()), ("a", ())]),
        (["N/l/0/f[0]", "N/l/1/f[0]", "N/l/0/f[1]", "N/l/1/f[1]"],
         [("0/f", (0,)), ("1/f", (0,)), ("0/f", (1,)), ("1/f", (1,))]),
        (["N/\nb/0/f", "N/\nb/1/f", "h[1,]"], [("f", (0,)), ("f", (1,)), ("h[1,]", ())]),
    ],
)  # fmt: skip
def test_roles_and_depths_of_names(rows, wanted):
    found = place_rows(rows)
    assert [(found[row].role, found[row].depth) for row in rows] == wanted


def make(names, value=lambda i: 1.0 + i):
    values = {name: np.full(2, value(i)) for i, name in enumerate(names)}
    return tapax.Taps(values, {}, {}, tapax.SiteTable([tapax.Site(n) for n in names]))


def test_stacks_are_one_behind_the_other_and_their_lines_apart():
    names = [f"T/{part}/layers/{i}/attn" for part in ("enc", "dec") for i in range(3)]
    axes = save(plot.roles(make([*names, "T/head"]))).axes[0]
    drawn = line(axes, "attn")
    assert drawn.get_xdata().tolist() == [0, 1, 2, 3, 3, 4, 5]
    np.testing.assert_allclose(drawn.get_ydata(), [1, 2, 3, np.nan, 4, 5, 6])
    assert ticks(axes) == ["0", "1\nT/enc/layers", "2", "0", "1\nT/dec/layers", "2", "head"]


def test_many_alike_parts_of_a_layer_are_one_role_with_their_middle():
    names = [f"M/b/{i}/moe/experts/{e}" for i in range(2) for e in range(5)]
    axes = save(plot.roles(make(names))).axes[0]
    assert line(axes, "moe/experts").get_xydata().tolist() == [[0, 3], [1, 8]]
    points = line(axes, "_points")
    assert points.get_xdata().tolist() == [0.0] * 5 + [1.0] * 5
    assert points.get_ydata().tolist() == list(range(1, 11))


def test_outer_modules_come_first_and_a_note_names_the_others():
    inner = ("q", "k", "v", "o", "drop", "scale", "mask", "bias")
    parts = ("norm1", "attn", *(f"attn/{p}" for p in inner), "norm2", "mlp")
    figure = save(plot.roles(make([f"N/b/{i}/{p}" for i in range(2) for p in parts])))
    assert labels(figure) == ["norm1", "attn", "norm2", "mlp"]
    note = "Not shown: attn/q, attn/k, attn/v, attn/o, attn/drop, attn/scale and 2 more."
    assert figure.get_supxlabel() == f"{note} Choose with at=[...]."
    picked = plot.roles(make([f"N/b/{i}/{p}" for i in range(2) for p in parts]), at="**/attn/?")
    assert labels(picked) == ["attn/q", "attn/k", "attn/v", "attn/o"]


def test_roles_with_equal_numbers_share_a_key():
    names = [f"N/b/{i}/{part}" for i in range(3) for part in ("mlp/down", "mlp")]
    figure = save(plot.roles(make(names, lambda i: 1.0 + i // 2)))
    assert labels(figure) == ["mlp = mlp/down"]
    assert line(figure.axes[0], "mlp/down").get_ydata().tolist() == [1.0, 2.0, 3.0]


def test_numbers_that_are_not_finite_are_marked_at_their_depth():
    values = {f"N/b/{i}/f": np.full(2, v) for i, v in enumerate((1.0, np.nan, np.inf, 0.0, 2.0))}
    table = tapax.SiteTable([tapax.Site(n) for n in values])
    figure = save(plot.roles(tapax.Taps(values, {}, {}, table)))
    axes = figure.axes[0]
    np.testing.assert_allclose(line(axes, "f").get_ydata(), [1, np.nan, np.nan, np.nan, 2])
    for name, x, edge in (("NaN", 1, 1.0), ("Inf", 2, 1.0), ("zero", 3, 0.0)):
        mark = line(axes, name)
        assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([x], [edge])
    assert labels(figure) == ["NaN", "Inf", "zero", "f"]


def test_statistics_have_a_row_of_panels_each():
    options = {"values": {"**": [R.rms, R.zeros]}, "grads": {"**": R.rms}}
    _, taps = tapax.capture(jax.grad(unrolled), **options)(X)
    figure = save(plot.roles(taps))
    titles = [a.get_title("left") for a in figure.axes if a.get_visible()]
    assert titles == ["Values: rms", "Gradients: rms", "Values: zeros"]
    zeros = next(a for a in figure.axes if a.get_title("left") == "Values: zeros")
    assert line(zeros, "mlp").get_ydata().tolist() == [0.0] * 3


def test_histograms_are_left_to_the_other_plot():
    _, taps = tapax.capture(unrolled, values={"**": [R.rms, R.histogram([0.0, 1.0])]})(X)
    figure = save(plot.roles(taps))
    assert [a.get_title("left") for a in figure.axes] == ["Values: rms"]
    assert figure.get_supxlabel() == "Not shown: histogram, which tapax.plot.taps draws."


def test_many_lists_of_modules_without_parts_have_room():
    names = [f"Net/{name}_{i}" for i in range(2) for name in "ABCDEFGHIJ"]
    figure = save(plot.roles(make(names)))
    assert labels(figure) == list("ABCDEFG")
    assert figure.get_supxlabel() == "Not shown: H, I, J. Choose with at=[...]."


def test_sites_without_layers_are_joined_in_their_order():
    figure = save(plot.roles(make(["net/up", "net/mid", "net/head"])))
    drawn = line(figure.axes[0], "outside of the layers")
    assert drawn.get_xydata().tolist() == [[0, 1], [1, 2], [2, 3]]
    assert drawn.get_linestyle() == "-" and ticks(figure.axes[0]) == ["up", "mid", "head"]


COUNTED = lambda: tapax.capture(unrolled, values={"**": R.histogram([0.0, 1.0])})(X)[1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda taps: plot.roles(taps.values), TypeError,
         "tapax.plot.roles takes taps by name, but for 'net/embed' was given"),
        (lambda taps: plot.roles([taps]), TypeError,
         "tapax.plot.roles takes the taps of a capture, or of several by name, but was"),
        (lambda taps: plot.roles({}), ValueError,
         "tapax.plot.roles compares up to 4 captures, but was given 0."),
        (lambda taps: plot.roles({str(i): taps for i in range(5)}), ValueError,
         "tapax.plot.roles compares up to 4 captures, but was given 5."),
        (lambda taps: plot.roles(taps, at="**/mpl"), tapax.SiteError,
         "`at` is '**/mpl', which matches nothing in the capture."),
        (lambda taps: plot.roles(taps, stats="norm"), ValueError,
         "`stats` contains 'norm', which was not captured. The statistics are 'rms'."),
        (lambda taps: plot.roles(COUNTED()), ValueError,
         "There is nothing to plot by role, because the captures contain only histograms."),
    ],
)  # fmt: skip
def test_bad_input_of_roles(call, error, message):
    _, taps = tapax.capture(unrolled)(X)
    with pytest.raises(error) as found:
        call(taps)
    assert str(found.value).startswith(message)
