"""User-written reducers: the order of combination, their states and results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tests.reduce.test_reduce_programs import R, X, captured, close

pytestmark = pytest.mark.once


def affine(**options):
    """Compose maps y -> a y + b, given as [a, b], where the order matters."""
    return R.Reducer(
        init=lambda: {"a": 1.0, "b": 0.0},
        update=lambda s, x: {"a": x[0] * s["a"], "b": x[0] * s["b"] + x[1]},
        combine=lambda p, q: {"a": q["a"] * p["a"], "b": q["a"] * p["b"] + q["b"]},
        name="affine",
        **options,
    )


MAPS = np.array(
    [[1.5, -1.0], [0.5, 2.0], [-2.0, 0.25], [1.25, 1.0], [0.75, -3.0], [3.0, 0.5], [-1, 4]]
)


def composed(maps):
    a, b = 1.0, 0.0
    for x in np.asarray(maps, np.float64).reshape(-1, 2):
        a, b = x[0] * a, x[0] * b + x[1]
    return a, b


def follow(maps, reverse=False):
    return lax.scan(lambda c, m: (c, tapax.sow(m, "h")), 0.0, maps, reverse=reverse)[1]


def check_affine(taps, maps, name="h", each=None):
    for i, leaf in enumerate("ab"):
        expected = composed(maps)[i] if each is None else [composed(m)[i] for m in maps]
        close(taps.values[f"{name}{leaf}"], expected)


OVER = ["scan", "reversed scan", "while", "vmap", "vmap of vmap"]


@pytest.mark.parametrize(
    ("over", "count"), [*((o, n) for o in OVER for n in (1, 2, 7)), ("mesh", 8)]
)
def test_states_are_combined_in_order(over, count, wide):
    """States combine in the order of iterations, then of examples and devices along their axes."""
    maps = MAPS[:count]
    if over == "vmap of vmap":
        maps = np.concatenate([maps, maps[::-1] + 0.5]).reshape(2, count, 2)
    if over == "mesh":
        maps = np.concatenate([MAPS, MAPS[:1] + 0.5])
    each = lambda m: tapax.sow(m, "h")

    def loop(maps):
        body = lambda i: (each(maps[i]), i + 1)[1]
        return lax.while_loop(lambda i: i < len(maps), body, 0)

    fn = {
        "scan": follow,
        "reversed scan": functools.partial(follow, reverse=True),
        "while": loop,
        "vmap": jax.vmap(each),
        "vmap of vmap": jax.vmap(jax.vmap(each)),
        "mesh": jax.shard_map(
            lambda m: each(m[0])[None], mesh=wide, in_specs=P(("a", "b")), out_specs=P(("a", "b"))
        ),
    }[over]
    reducer = affine()
    reducer = reducer if over in ("while", "mesh") or "vmap" in over else reducer.total
    _, taps = captured(fn, jnp.asarray(maps), values={"h": reducer})
    check_affine(taps, maps, "h:")


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_combined_in_the_order_of_iterations(reverse):
    """States combine in the order of iterations, though the backward pass reverses it."""

    def loss(xs):
        body = lambda c, xm: (c + jnp.sum(tapax.sow(xm[0], "h") * xm[1]), None)
        return lax.scan(body, 0.0, (xs, jnp.asarray(MAPS)), reverse=reverse)[0]

    step = jax.grad(loss)
    _, taps = captured(step, jnp.zeros((7, 2)), grads={"h": [affine().total, R.last.total]})
    close(taps.grads["h:affine.total.a"], composed(MAPS)[0])
    close(taps.grads["h:affine.total.b"], composed(MAPS)[1])
    close(taps.grads["h:last.total"], MAPS[-1])


@pytest.mark.parametrize("reverse", [False, True])
def test_the_last_iteration_is_that_of_the_highest_number(reverse):
    fn = functools.partial(follow, reverse=reverse)
    _, taps = captured(fn, jnp.asarray(MAPS), values={"h": R.last.total})
    close(taps.values["h"], MAPS[-1])


def test_order_in_nested_loops():
    maps = np.concatenate([MAPS, MAPS[:5] - 0.5]).reshape(2, 3, 2, 2)

    def f(maps):
        inner = lambda m: jax.vmap(lambda m: tapax.sow(m, "h"))(m)
        middle = lambda ms: lax.scan(lambda c, m: (c, inner(m)), 0, ms)[1]
        return lax.scan(lambda c, ms: (c, middle(ms)), 0, maps)[1]

    _, taps = captured(f, jnp.asarray(maps), values={"h": [affine().total, affine()]})
    check_affine(taps, maps, "h:affine.total.")
    for i, leaf in enumerate("ab"):
        expected = [[composed(m)[i] for m in ms] for ms in maps]
        close(taps.values[f"h:affine.{leaf}"], expected)


def test_order_where_some_iterations_do_not_count():
    p = np.array([0, 1, 1, 0, 1, 0, 1], bool)

    def f(maps):
        body = lambda c, x: (
            lax.cond(x[0], lambda m: tapax.sow(m, "h")[0], lambda m: m[0], x[1]),
            None,
        )
        return lax.scan(body, 0.0, (jnp.asarray(p), maps))[0]

    _, taps = captured(f, jnp.asarray(MAPS, jnp.float32), values={"h": affine().total})
    check_affine(taps, MAPS[p], "h:")
    mapped = jax.vmap(lambda p, m: lax.cond(p, lambda m: tapax.sow(m, "h"), lambda m: m, m))
    _, taps = captured(mapped, jnp.asarray(p), jnp.asarray(MAPS), values={"h": affine()})
    check_affine(taps, MAPS[p], "h:")


def test_init_may_return_python_numbers():
    """A state of Python numbers takes the types of an updated state."""
    add = lambda state, x: state + x.sum(dtype=x.dtype)
    total = lambda init: R.Reducer(init, add, lambda a, b: a + b)
    for init in (lambda: 0, lambda: 0.0, lambda x: jnp.zeros((), x.dtype), lambda x: 0):
        for dtype in ("float32", "bfloat16", "int32"):
            x = jnp.asarray([1, 2, 3], dtype)
            if dtype == "int32" and isinstance(init.__code__.co_consts[-1], float):
                continue
            _, taps = captured(lambda x: tapax.sow(x, "h"), x, values={"h": total(init)})
            assert taps.values["h"] == 6
            assert taps.values["h"].dtype == dtype
            assert taps.sites["h"].reducer.name == "reduced"


def test_state_types_follow_the_setting_of_64_bits():
    total = R.Reducer(lambda: 0, lambda s, x: s + x.sum(), lambda a, b: a + b)
    x = np.arange(4, dtype=np.int32)
    for wide in (True, False, True):
        with jax.enable_x64(wide):
            fn = jax.jit(lambda xs: lax.scan(lambda c, x: (c, tapax.sow(x, "h")), 0, xs)[1])
            _, taps = captured(fn, jnp.asarray(x.reshape(2, 2)), values={"h": total.total})
            assert taps.values["h"] == 6
            assert taps.values["h"].dtype == (np.int64 if wide else np.int32)


def test_names_of_structured_results():
    two = R.Reducer(
        lambda: (0.0, 0.0),
        lambda s, x: (s[0] + x.sum(), s[1] + (x**2).sum()),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda s: {"mean": s[0] / 3, "all": [s[0], s[1]]},
        name="two",
    )
    f = lambda x: tapax.sow({"u": x, "v": 2 * x}, "h")["u"]
    _, taps = captured(f, jnp.asarray(X), values={"h:u": two, "h:v": [two, R.sum]})
    assert set(taps.values) == {
        *("h:u:mean", "h:u:all.0", "h:u:all.1"),
        *("h:v:two.mean", "h:v:two.all.0", "h:v:two.all.1", "h:v:sum"),
    }
    close(taps.values["h:v:two.all.1"], (4 * X**2).sum())
    assert taps.sites["h:u:all.0"].reducer == two
