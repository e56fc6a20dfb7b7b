"""Calls of a captured function: tracing, compilation, static arguments and leaks."""

import enum
import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tests.oracles.closeness import assert_close
from tests.oracles.memory import new_objects_alone

X = jnp.array([1.0, 2.0])


class Counted:
    """A function that counts its traces."""

    def __init__(self, fn):
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.traces = 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.fn(*args, **kwargs)


def sown(x, scale=2.0):
    return tapax.sow(x * scale, "h") + 1


def compilations(call):
    """Count the programs that JAX compiles during a call."""
    count = 0

    def listen(event, *args, **kwargs):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count


FORMS = {
    "plain": lambda f: tapax.capture(f),
    "capture of jit": lambda f: tapax.capture(jax.jit(f)),
    "jit of capture": lambda f: jax.jit(tapax.capture(f)),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_traced_and_compiled_once_per_shape(form):
    fn = Counted(sown)
    captured = FORMS[form](fn)
    assert compilations(lambda: captured(X)) > 0
    traces = fn.traces

    def again():
        for i in range(3):
            assert_close(captured(X + i)[1].values["h"], 2 * (X + i))

    captured(X + 1)
    assert compilations(lambda: [captured(X) for _ in range(3)]) == 0
    again()
    assert fn.traces == traces
    captured(jnp.ones(3))
    assert fn.traces > traces


def test_a_function_that_was_jitted_and_called_before_shows_its_sites():
    step = jax.jit(sown)
    for _ in range(2):
        step(X)
    _, taps = tapax.capture(step)(X)
    assert_close(taps.values["h"], 2 * X)
    _, taps = tapax.capture(lambda x: step(x))(X)
    assert_close(taps.values["h"], 2 * X)
    assert step(X).shape == (2,)


def test_a_capture_written_in_a_loop_compiles_once():
    step = jax.jit(sown)
    tapax.capture(step, values="h")(X)

    def loop():
        for i in range(3):
            assert_close(tapax.capture(step, values="h")(X + i)[1].values["h"], 2 * (X + i))

    jax.block_until_ready([X + i for i in range(3)])
    [2 * (X + i) for i in range(3)]
    assert compilations(loop) == 0


def test_equal_captures_share_what_was_traced():
    fn = Counted(sown)
    step = jax.jit(fn)
    tapax.capture(lambda x: step(x))(X)
    traces = fn.traces
    tapax.capture(lambda x: step(x), values="h")(X)
    assert fn.traces == traces


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(jax.jit(lambda x: jnp.sum(f(x)))),
        lambda f: jax.vmap(jax.jit(f)),
        lambda f: jax.value_and_grad(jax.jit(lambda x: jnp.sum(f(x)))),
        lambda f: functools.partial(jax.jit(f), scale=3.0),
        lambda f: functools.wraps(jax.jit(f))(lambda x: 7 * f(x)),
    ],
)
def test_a_wrapper_of_a_jitted_function_is_not_mistaken_for_it(transform):
    step = transform(sown)
    out, taps = tapax.capture(step)(X)
    assert_close(out, step(X))
    assert "h" in taps.values


def test_a_number_that_changes_causes_no_compilation():
    fn = Counted(lambda x, step: tapax.sow(x * step, "h"))
    captured = tapax.capture(fn)
    captured(X, 0)
    traces = fn.traces
    assert compilations(lambda: [captured(X, i) for i in range(1, 5)]) == 0
    assert_close(captured(X, 7)[1].values["h"], 7 * X)
    assert fn.traces == traces


def test_a_number_that_is_needed_is_static_and_others_are_not():
    def fn(x, layers, step, *, flag):
        for _ in range(layers):
            x = tapax.sow(x * step, "h") if flag else x
        if layers > 2:
            x = x + 1
        return x

    counted = Counted(fn)
    captured = tapax.capture(counted)
    _, taps = captured(X, 2, 3.0, flag=True)
    assert set(taps.values) == {"h", "h@1"}
    traces = counted.traces
    for step in range(4):
        out, _ = captured(X, 2, float(step), flag=True)
        assert_close(out, X * step**2)
    assert counted.traces == traces
    out, taps = captured(X, 3, 3.0, flag=True)
    assert set(taps.values) == {"h", "h@1", "h@2"}
    assert_close(out, 27 * X + 1)
    with pytest.warns(UserWarning, match="The function has no sites"):
        assert captured(X, 3, 3.0, flag=False)[1].values == {}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: tapax.sow(jnp.zeros((n,)), "h"),
        lambda x, n: tapax.sow(x, f"h{n}"),
        lambda x, n: tapax.sow(x[:n], "h"),
        lambda x, n: tapax.sow({1: x, 2: 2 * x}[n], "h"),
        lambda x, n: tapax.sow(jnp.reshape(x, (n, -1)), "h"),
        lambda x, n: tapax.sow([x, x][n - 1], "h"),
        lambda x, n: tapax.sow(jnp.arange(n), "h"),
    ],
)
def test_every_need_of_a_value_is_seen(fn):
    out, _ = tapax.capture(fn)(X, 2)
    assert_close(out, fn(X, 2))
    out, _ = tapax.capture(fn)(X, 1)
    assert_close(out, fn(X, 1))


def test_an_error_that_the_function_raises_is_unchanged():
    def fn(x, n):
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        tapax.capture(fn)(X, 2)


class Mode(enum.Enum):
    SIN = "sin"
    COS = "cos"


@pytest.mark.parametrize("mode", list(Mode))
def test_flags_strings_functions_and_other_objects_are_static(mode):
    def fn(x, config):
        y = config["fn"](x) if config["on"] else x
        assert isinstance(config["name"], str)
        y = jnp.sin(y) if config["mode"] is Mode.SIN else jnp.cos(y)
        return {"y": tapax.sow(y, config["name"]), "text": config["name"], "none": None}

    config = {"on": True, "name": "h", "fn": jnp.tanh, "mode": mode}
    out, taps = tapax.capture(fn)(X, config)
    assert_close(out["y"], fn(X, config)["y"])
    assert out["text"] == "h"
    assert out["none"] is None
    out, taps = tapax.capture(fn)(X, {**config, "on": False, "name": "g"})
    assert set(taps.values) == {"g"}


def test_true_and_one_are_not_the_same_argument():
    captured = tapax.capture(lambda x, k: tapax.sow(x, "bool" if k is True else "number"))
    assert set(captured(X, True)[1].values) == {"bool"}
    assert set(captured(X, 1)[1].values) == {"number"}
    assert set(captured(X, True)[1].values) == {"bool"}


def test_an_argument_that_can_be_neither_traced_nor_kept_is_refused():
    with pytest.raises(TypeError, match="neither an array nor a number, nor be static"):
        tapax.capture(lambda x, s: tapax.sow(x, "h"))(X, {1, 2})


def test_static_arguments_of_jitted_functions_stay_static():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="mode")
    def fn(x, n, *, mode="a"):
        for _ in range(n):
            x = tapax.sow(x, f"h{mode}")
        return x

    _, taps = tapax.capture(fn)(X, 2, mode="b")
    assert set(taps.values) == {"hb", "hb@1"}
    _, taps = tapax.capture(fn)(X, 1)
    assert set(taps.values) == {"ha"}
    named = jax.jit(lambda x, n: [tapax.sow(x, f"h{i}") for i in range(n)], static_argnames="n")
    for taps in (tapax.capture(named)(X, n=2)[1], tapax.capture(named)(X, 2)[1]):
        assert set(taps.values) == {"h0", "h1"}
    _, taps = tapax.capture(lambda x: fn(x, 2))(X)
    assert set(taps.values) == {"ha", "ha@1"}


@pytest.mark.parametrize("around", [lambda f: f, lambda f: lambda x, y: f(x, y)])
def test_donated_arguments_are_given_away(around):
    fn = jax.jit(lambda x, y: tapax.sow(x + y, "h") * 2, donate_argnums=0)
    x, y = jnp.ones((8, 8)), jnp.ones((8, 8))
    out, taps = tapax.capture(around(fn))(x, y)
    assert x.is_deleted()
    assert not y.is_deleted()
    assert_close(out, 4 * jnp.ones((8, 8)))
    assert_close(taps.values["h"], 2 * jnp.ones((8, 8)))


def test_an_argument_used_after_it_was_donated_is_kept():
    fn = jax.jit(lambda x: tapax.sow(x + 1, "h"), donate_argnums=0)
    x = jnp.ones((8, 8))
    out, _ = tapax.capture(lambda x: jnp.sum(x) + jnp.sum(fn(x)))(x)
    assert_close(out, 64 * 3)


def test_keywords_defaults_and_numpy():
    captured = tapax.capture(sown)
    assert_close(captured(np.ones(2), scale=3.0)[1].values["h"], [3.0, 3.0])
    assert_close(captured(x=np.ones(2))[1].values["h"], [2.0, 2.0])
    assert_close(captured(2)[0], 5)


def test_methods_and_callable_objects():
    class Model:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return tapax.sow(x * self.w, "h")

        def method(self, x):
            return self(x) + 1

    model = Model(3.0)
    assert_close(tapax.capture(model)(X)[0], 3 * X)
    assert_close(tapax.capture(model.method)(X)[1].values["h"], 3 * X)


def test_settings_of_jax_are_part_of_the_key():
    captured = tapax.capture(lambda x: tapax.sow(x * 1.5, "h"))
    x = np.ones(2)
    low = captured(x)[1].values["h"].dtype
    with jax.enable_x64(not jax.config.jax_enable_x64):
        other = captured(x)[1].values["h"].dtype
    assert {low, other} == {jnp.dtype("float32"), jnp.dtype("float64")}


def test_nested_captures_each_see_the_sites():
    def inner(x):
        with tapax.scope("inner"):
            return jax.jit(sown)(x)

    def outer(x):
        with tapax.scope("outer"):
            y, taps = tapax.capture(inner)(tapax.sow(x, "x"))
        assert set(taps.values) == {"inner/h"}
        return y + jnp.sum(taps.values["inner/h"])

    out, taps = tapax.capture(outer)(X)
    assert set(taps.values) == {"outer/x", "outer/inner/h"}
    assert_close(out, 2 * X + 1 + 6)
    step = jax.grad(lambda x: jnp.sum(outer(x)))
    out, taps = tapax.capture(step)(X)
    assert_close(out, step(X))
    assert_close(taps.grads["outer/inner/h"], [3.0, 3.0])


def test_capture_composes_with_transformations():
    captured = tapax.capture(lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2))
    assert_close(jax.grad(lambda x: captured(x)[0])(X), 2 * jnp.sin(X) * jnp.cos(X))
    assert_close(jax.grad(lambda x: jnp.sum(captured(x)[1].values["h"]))(X), jnp.cos(X))
    _, (out, taps) = jax.lax.scan(lambda c, x: (c, captured(x)), 0, jnp.stack([X, 2 * X]))
    assert_close(taps.values["h"], jnp.sin(jnp.stack([X, 2 * X])))
    assert isinstance(taps, tapax.Taps)


def test_a_captured_function_compiles_ahead_of_time():
    captured = tapax.capture(jax.jit(sown))
    compiled = jax.jit(tapax.capture(sown)).lower(X).compile()
    assert_close(compiled(X)[1].values["h"], 2 * X)
    assert captured.lower(X).compile()(X)[1].sites.names == ["h"]


def test_threads_capture_at_the_same_time():
    def work(i):
        def fn(x):
            with tapax.scope(f"thread{i}"):
                for k in range(5):
                    x = tapax.sow(jnp.sin(x) + i, f"h{k}")
            return jnp.sum(x)

        rules = tapax.ops("sin") if i % 2 else None
        out, taps = tapax.capture(jax.grad(fn), values=["**", rules])(X + i)
        names = {n for n in taps.values if "sin" not in n}
        assert names == {f"thread{i}/h{k}" for k in range(5)}
        assert any("sin" in n for n in taps.values) == bool(i % 2)
        assert_close(taps.values[f"thread{i}/h0"], jnp.sin(X + i) + i)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_one_captured_function_in_many_threads():
    captured = tapax.capture(sown)
    barrier = threading.Barrier(6)

    def work(i):
        barrier.wait()
        return captured(X + i)[1].values["h"]

    with ThreadPoolExecutor(6) as pool:
        for i, h in enumerate(pool.map(work, range(6))):
            assert_close(h, 2 * (X + i))


def test_a_thread_that_does_not_capture_sees_no_marks():
    seen = []

    def fn(x):
        thread = threading.Thread(target=lambda: seen.append(str(jax.make_jaxpr(sown)(1.0))))
        thread.start()
        thread.join()
        return tapax.sow(x, "h")

    tapax.capture(fn)(X)
    assert "tap" not in seen[0]


def test_an_exception_leaves_nothing_behind():
    fail = True

    def fn(x):
        with tapax.scope("s"):
            y = jax.jit(sown)(x)
            if fail:
                raise RuntimeError("on purpose")
        return y

    captured = tapax.capture(fn, values=["**", tapax.ops("mul")])
    before = str(jax.make_jaxpr(sown)(X))
    with pytest.raises(RuntimeError, match="on purpose"):
        captured(X)
    assert str(jax.make_jaxpr(sown)(X)) == before
    fail = False
    assert_close(fn(X), 2 * X + 1)
    out, taps = captured(X)
    assert_close(out, 2 * X + 1)
    assert set(taps.values) == {"s/h", "s/mul"}


def test_listing_sites_computes_nothing():
    ran = []

    def fn(x):
        jax.debug.callback(lambda: ran.append(1))
        return jax.lax.scan(lambda c, _: (tapax.sow(c, "h"), None), x, None, length=5)[0]

    for form in (fn, jax.jit(fn)):
        table = tapax.sites(form)(X)
        assert table.names == ["h"]
        assert table["h"].shape == (5, 2)
        assert table["h"].nbytes == 5 * 2 * X.dtype.itemsize
        assert table["h"].loops == ("scan[5]",)
        assert "test_calls.py" in table["h"].source
    jax.effects_barrier()
    assert ran == []


def test_weakly_typed_values_keep_their_type_in_the_program():
    fn = lambda x: tapax.sow(2.0, "two") * x
    out, _ = tapax.capture(fn)(X.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


ANGLES = jnp.array([0.3, -0.7, 1.2])


def test_a_gradient_inside_a_nested_capture_reaches_the_outer_one():
    def inner(x):
        step = lambda x: jax.grad(lambda x: jnp.sum(tapax.sow(jnp.sin(x), "h") ** 2))(x)
        body = lambda c, _: (jax.jit(step)(c), None)
        out, taps = tapax.capture(lambda x: lax.scan(body, x, None, length=2)[0])(x)
        return out, taps.grads["h"]

    (_, own), taps = tapax.capture(inner)(ANGLES)
    assert_close(taps.grads["h"], own)
    assert own.shape == (2, 3)


def test_operations_in_a_nested_capture_are_marked_once():
    f = lambda x: tapax.capture(lambda x: jnp.sin(x) + 1)(x)[0]
    _, taps = tapax.capture(f, values=tapax.ops("sin"))(ANGLES)
    assert set(taps.values) == {"sin"}


def test_no_tracer_leaks():
    inner = jax.jit(lambda c: lax.cond(c[0] > 0, lambda c: tapax.sow(c, "h"), lambda c: c, c))

    def f(x):
        x = lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]
        return lax.while_loop(lambda c: c[0] < 5, lambda c: tapax.sow(c + 1, "w"), x)

    with jax.check_tracer_leaks():
        _, taps = tapax.capture(f)(ANGLES)
    assert set(taps.values) == {"h", "w"}


def test_partial_function_has_the_name_of_the_function():
    def scaled(x, factor):
        return tapax.sow(factor * x, "h")

    captured = tapax.capture(functools.partial(scaled, factor=np.arange(100.0)))
    assert repr(captured).endswith(".scaled)")


def test_object_that_is_called_has_the_name_of_its_class():
    class Model:
        def __call__(self, x):
            return tapax.sow(2 * x, "h")

        def __repr__(self):
            return "a file can have no name as long as what a model shows of itself"

    assert repr(tapax.capture(Model())) == "capture(Model)"


@pytest.mark.parametrize(
    "transform",
    [
        tapax.capture,
        lambda f: tapax.edit(f, values={"h": jnp.zeros_like}),
        lambda f: tapax.grad(f, "h"),
        lambda f: tapax.prefix(f, "h"),
        tapax.find_nonfinite,
    ],
    ids=["capture", "edit", "grad", "prefix", "find_nonfinite"],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_compiled_call_keeps_no_argument_alive(transform, wrap):
    changed = transform(wrap(lambda x: jnp.sum(tapax.sow(2 * x, "h") ** 2)))
    with new_objects_alone():
        x = jnp.arange(3.0) + 1
        kept = weakref.ref(x)
        jax.block_until_ready(changed(x))
        del x
        gc.collect()
        assert kept() is None
