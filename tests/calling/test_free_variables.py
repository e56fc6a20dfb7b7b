"""A captured function reads the closed-over values that a plain call would read.

The oracle is the plain call. Functions count their traces, so that values which stay the same are
known to cause no new one.
"""

import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import tapax
from tests.oracles.closeness import assert_close

X = np.linspace(0.5, 1.5, 3, dtype=np.float32)


def product(x, w):
    return jnp.sum(tapax.sow(x * w, "h") ** 2)


weight = jnp.ones(3)


def of_global(x):
    return product(x, weight)


class Owner:
    def __init__(self):
        self.parts = {"w": jnp.ones(3)}

    def loss(self, x):
        return product(x, self.parts["w"])


def variable():
    w = jnp.ones(3)

    def replace(new):
        nonlocal w
        w = new

    return lambda x: product(x, w), replace


def global_variable():
    def replace(new):
        globals()["weight"] = new

    replace(jnp.ones(3))
    return of_global, replace


def of_global_inside(x):
    return jax.vmap(lambda x, i: jnp.sum(tapax.sow(x * weight[i], "h") ** 2))(
        x, jnp.arange(3)
    ).sum()


def global_variable_of_an_inner_function():
    return of_global_inside, global_variable()[1]


class Model:
    def __call__(self, x):
        return self.loss(x)

    def loss(self, x):
        return product(x, weight)


def global_variable_of_a_method():
    return Model(), global_variable()[1]


def global_variable_of_a_model_in_a_closure():
    class Larger(Model):
        def __call__(self, x):
            return super().__call__(x)

    model = Larger()
    return lambda x: model(x), global_variable()[1]


class Scaled:
    @property
    def by(self):
        return weight

    @staticmethod
    def multiplied(x, w):
        return product(x, w * (weight > 0))

    def loss(self, x):
        return self.multiplied(x, self.by)


def global_variable_of_a_property():
    return Scaled().loss, global_variable()[1]


def listed():
    held = [jnp.ones(3)]
    return lambda x: product(x, held[0]), functools.partial(held.__setitem__, 0)


def attribute_of_self():
    owner = Owner()
    return owner.loss, functools.partial(owner.parts.__setitem__, "w")


def attribute_of_an_object():
    held = types.SimpleNamespace(w=jnp.ones(3))
    return lambda x: product(x, held.w), functools.partial(setattr, held, "w")


class Slotted:
    __slots__ = ("w",)


def attribute_in_a_slot():
    held = Slotted()
    held.w = jnp.ones(3)
    return lambda x: product(x, held.w), functools.partial(setattr, held, "w")


def argument_of_a_partial():
    held = {"w": jnp.ones(3)}
    loss = functools.partial(lambda held, x: product(x, held["w"]), held)
    return loss, functools.partial(held.__setitem__, "w")


def in_a_helper():
    helper, replace = variable()
    return lambda x: 2 * helper(x), replace


def number():
    w = 1.0

    def replace(new):
        nonlocal w
        w = float(new[0])

    return lambda x: product(x, w), replace


def numpy_array():
    w = np.ones(3, np.float32)

    def replace(new):
        nonlocal w
        w = np.asarray(new)

    return lambda x: product(x, w), replace


def choice():
    big = jnp.asarray(False)

    def replace(new):
        nonlocal big
        big = jnp.asarray(new[0] > 1)

    return lambda x: product(x, 5.0 if big else 1.0), replace


def function():
    power = jnp.ones_like

    def replace(new):
        nonlocal power
        power = lambda x: x * 0 + new

    return lambda x: product(x, power(x)), replace


def method():
    power = types.MethodType(lambda scale, x: scale * x, 1.0)

    def replace(new):
        nonlocal power
        power = types.MethodType(lambda scale, x: scale * x, float(new[0]))

    return lambda x: product(x, power(x)), replace


class One:
    scale = 1.0


class Other(One):
    scale = 2.0


def class_():
    kind = One

    def replace(new):
        nonlocal kind
        kind = Other

    return lambda x: product(x, kind.scale), replace


def numbers():
    scales = (1.0, 2.0)

    def replace(new):
        nonlocal scales
        scales = (3.0, 2.0)

    return lambda x: product(x, scales[0]), replace


def dictionary():
    scales = {"w": 1.0}

    def replace(new):
        nonlocal scales
        scales = {"w": 3.0}

    return lambda x: product(x, scales["w"]), replace


class Tanh(linen.Module):
    power: int

    @linen.compact
    def __call__(self, x):
        return jnp.tanh(x) ** self.power


def linen_model():
    net = Tanh(1)

    def replace(new):
        nonlocal net
        net = Tanh(2)

    return lambda x: product(net.apply({}, x), 1.0), replace


def equinox_model():
    net = eqx.nn.Linear(3, 1, use_bias=False, key=jax.random.key(0))

    def replace(new):
        nonlocal net
        net = eqx.tree_at(lambda n: n.weight, net, new[None])

    return lambda x: product(net(x), 1.0), replace


def linen_parameters():
    net = linen.Dense(1, use_bias=False)
    params = {"params": {"kernel": jnp.ones((3, 1))}}

    def replace(new):
        params["params"]["kernel"] = new[:, None]

    return lambda x: product(net.apply(params, x), 1.0), replace


HOLDERS = [
    variable,
    global_variable,
    global_variable_of_an_inner_function,
    global_variable_of_a_method,
    global_variable_of_a_model_in_a_closure,
    global_variable_of_a_property,
    listed,
    attribute_of_self,
    attribute_of_an_object,
    attribute_in_a_slot,
    argument_of_a_partial,
    in_a_helper,
    number,
    numpy_array,
    choice,
    function,
    method,
    class_,
    numbers,
    dictionary,
    linen_model,
    equinox_model,
    linen_parameters,
]
NEW = jnp.array([2.0, 3.0, 4.0])


@pytest.mark.parametrize("make", HOLDERS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad], ids=["loss", "grad"])
def test_a_replaced_value_is_read(make, wrap):
    loss, replace = make()
    fn = wrap(loss)
    captured = tapax.capture(fn)
    assert_close(captured(X)[0], fn(X))
    replace(NEW)
    out, taps = captured(X)
    assert_close(out, fn(X))
    (name,) = [name for name in taps.values if name == "h"]
    assert_close(jnp.sum(taps.values[name] ** 2) * (2 if make is in_a_helper else 1), loss(X))


@pytest.mark.parametrize("make", [variable, listed, number])
def test_every_transform_reads_a_replaced_value(make):
    loss, replace = make()
    doubled = tapax.edit(loss, values={"h": lambda h: 2 * h})
    gradient = tapax.grad(loss, at="h")
    cut = tapax.prefix(loss, "h")
    before = doubled(X), gradient(X)["h"], cut(X)
    replace(NEW)
    scale = np.asarray(NEW[0] if make is number else NEW)
    assert_close(before[2], X)
    assert_close(cut(X), X * scale)
    assert_close(gradient(X)["h"], 2 * X * scale)
    assert_close(doubled(X), np.sum((2 * X * scale) ** 2))


def test_the_search_reads_a_replaced_value():
    loss, replace = variable()
    search = tapax.find_nonfinite(loss)
    assert search(X) is None
    replace(jnp.array([1.0, jnp.inf, 1.0]))
    assert search(X) is not None


def test_values_that_stay_cause_no_new_trace():
    w, held, traces = jnp.ones(3), {"w": jnp.ones(3), "other": 1}, []
    count = 0

    def loss(x):
        nonlocal count
        count += 1
        traces.append(count)
        return product(x, w * held["w"])

    captured = tapax.capture(loss)
    for _ in range(3):
        captured(X)
        loss(X)  # changes the counter
        held["other"] += 1  # is not in the program
    assert len(traces) == 4  # one captured, three plain


def test_an_equal_object_in_a_variable_causes_no_new_trace():
    traces = []
    helper = scales = None

    def renew():
        nonlocal helper, scales
        helper = lambda x: x * scales["w"][0]
        scales = {"w": (2.0, 3)}

    def loss(x):
        traces.append(1)
        return product(x, helper(x))

    captured = tapax.capture(loss)
    for _ in range(3):
        renew()
        captured(X)
    assert len(traces) == 1


def test_a_jitted_function_keeps_its_values_as_in_a_plain_call():
    loss, replace = variable()
    outer, inner = jax.jit(loss), lambda x: 1.0 * jitted(x)
    jitted = jax.jit(loss)
    captures = [tapax.capture(outer), tapax.capture(inner)]
    plain = [float(outer(X)), float(inner(X))]
    assert_close([f(X)[0] for f in captures], plain)
    replace(NEW)
    assert_close([outer(X), inner(X)], plain)
    assert_close([f(X)[0] for f in captures], plain)


def test_a_value_that_changes_at_every_call_is_warned_about_once():
    loss, replace = variable()
    captured = tapax.capture(loss)
    captured(X)
    for i in range(4):
        replace(NEW + i)
        captured(X)
    replace(NEW + 5)
    with pytest.warns(UserWarning, match="changes from call to call") as caught:
        captured(X)
    assert str(caught[0].message) == (
        "variable.<locals>.<lambda> was traced and compiled 5 times more, because it reads the "
        "variable 'w', whose value changes from call to call. Pass the value as an argument, and "
        "it is compiled once."
    )
    replace(NEW + 6)
    assert_close(captured(X)[0], loss(X))


def test_a_replaced_array_is_let_go():
    loss, replace = variable()
    captured = tapax.capture(loss)
    old = jnp.full(3, 2.0)
    replace(old)
    captured(X)
    programs = captured._call._known.programs
    replace(NEW)
    captured(X)
    assert len(programs) == 1
