"""Module paths in spite of copies, shared traces, and modules that are not part of any model.

The oracle runs the blocks by hand. The blocks have different weights, so that the value of a site
identifies its block.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

X = jnp.ones((2, 4))


class Block(nnx.Module):
    def __init__(self, number, rngs):
        self.fc1 = nnx.Linear(4, 4, rngs=rngs)
        self.fc2 = nnx.Linear(4, 4, rngs=rngs)
        self.fc2.bias[...] += number

    def __call__(self, x):
        return self.fc2(jnp.tanh(self.fc1(x)))


def model(call, count=3):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(i, rngs) for i in range(count)])

        __call__ = call

    return Net(nnx.Rngs(0))


def by_hand(net, x=X):
    """Return the values of all blocks and layers, and the gradients of a sum of squares."""

    def run(zeros):
        h, values = x, {}
        for i, block in enumerate(net.blocks):
            a = values[f"Net/blocks/{i}/fc1"] = (
                h @ block.fc1.kernel[...] + block.fc1.bias[...] + zeros[f"Net/blocks/{i}/fc1"]
            )
            h = values[f"Net/blocks/{i}/fc2"] = (
                jnp.tanh(a) @ block.fc2.kernel[...]
                + block.fc2.bias[...]
                + zeros[f"Net/blocks/{i}/fc2"]
            )
            values[f"Net/blocks/{i}"] = h
        return jnp.sum(h**2), values

    names = [f"Net/blocks/{i}/fc{j}" for i in range(len(net.blocks)) for j in (1, 2)]
    zeros = {name: jnp.zeros((2, 4)) for name in names}
    grads, values = jax.grad(run, has_aux=True)(zeros)
    return values, grads


def check(taps, net, *, grads=True):
    values, expected = by_hand(net)
    assert {n for n in taps.values if n != "Net"} == set(values)
    for name, value in values.items():
        assert_close(taps.values[name], value)
    for name, grad in expected.items() if grads else ():
        assert_close(taps.grads[name], grad, 1e-4)


def apply(block, x):
    return block(x)


def fresh(block, x):
    return nnx.remat(lambda b, x: b(x))(block, x)


THROUGH = {
    "jax.checkpoint": jax.checkpoint(apply),
    "jax.jit": jax.jit(apply),
    "nnx.jit": nnx.jit(apply),
    "nnx.remat": nnx.remat(apply),
    "nnx.remat, new each time": fresh,
    "jax.vmap": jax.vmap(apply, in_axes=(None, 0)),
    "jit of remat": jax.jit(jax.checkpoint(apply)),
    "cond": lambda block, x: jax.lax.cond(True, apply, lambda b, x: x, block, x),
    "reshaped": lambda block, x: jax.checkpoint(apply)(
        jax.tree.map(lambda a: a.reshape(-1).reshape(a.shape), block), x
    ),
}


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
@pytest.mark.parametrize("through", THROUGH)
def test_equal_blocks_passed_through_one_function_keep_their_names(through, wrap):
    """The blocks differ only in their arrays, and most cases trace the function once."""

    def call(self, x):
        for block in self.blocks:
            x = THROUGH[through](block, x)
        return x

    net = model(call)
    step = wrap(lambda net, x: nnx.grad(lambda net: jnp.sum(net(x) ** 2))(net))
    _, taps = tapax.capture(step)(net, X)
    check(taps, net, grads=through != "cond")


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, jax.jit])
def test_blocks_of_a_model_that_is_not_called_keep_its_name(wrap):
    def loss(net, x):
        for block in net.blocks:
            x = THROUGH["jax.checkpoint"](block, x)
        return jnp.sum(x**2)

    net = model(None)
    _, taps = tapax.capture(wrap(loss))(net, X)
    check(taps, net, grads=False)
    _, taps = tapax.capture(wrap(lambda net, x: net.blocks[1].fc1(x)))(net, X)
    assert list(taps.values) == ["Net/blocks/1/fc1"]


def test_the_trace_of_one_model_does_not_name_the_blocks_of_another():
    def call(self, x):
        for block in self.blocks:
            x = THROUGH["jax.checkpoint"](block, x)
        return x

    for count in (2, 4):
        net = model(call, count)
        _, taps = tapax.capture(lambda net, x: net(x))(net, X)
        check(taps, net, grads=False)


def test_blocks_of_a_closed_over_model_have_paths():
    def call(self, x):
        for block in self.blocks:
            x = THROUGH["jax.checkpoint"](block, x)
        return x

    net = model(call)
    for fn in (lambda x: net(x), jax.jit(lambda x: net(x))):
        _, taps = tapax.capture(fn)(X)
        check(taps, net, grads=False)


def test_blocks_have_paths_in_a_loop_over_time_around_a_loop_over_blocks():
    def call(self, x):
        def body(x, _):
            for block in self.blocks:
                x = THROUGH["jax.checkpoint"](block, x)
            return x, None

        return jax.lax.scan(body, x, None, length=1)[0]

    net = model(call)
    _, taps = tapax.capture(lambda net, x: nnx.grad(lambda n: jnp.sum(n(x) ** 2))(net))(net, X)
    values, grads = by_hand(net)
    for name in values:
        assert_close(taps.values[name][0], values[name])
    for name in grads:
        assert_close(taps.grads[name][0], grads[name], 1e-4)


def test_two_stacks_of_one_class_are_told_apart():
    class Two(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda r: Block(0, r))
            self.encoder, self.decoder = make(rngs.split(3)), make(rngs.split(3))

        def __call__(self, x):
            scan = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return scan(self.decoder, scan(self.encoder, x))

    two = Two(nnx.Rngs(0))
    out, taps = tapax.capture(lambda two, x: two(x))(two, X)
    assert {"Two/encoder", "Two/decoder", "Two/decoder/fc1"} <= set(taps.values)
    np.testing.assert_array_equal(taps.values["Two/decoder"][-1], out)
    assert not np.array_equal(taps.values["Two/encoder"][-1], out)


def test_a_module_outside_of_all_models_has_the_name_of_its_class():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return nnx.Linear(4, 4, rngs=nnx.Rngs(1))(self.head(x))

    net, probe = Net(nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(2))
    for wrap in (lambda f: f, nnx.jit):
        _, taps = tapax.capture(wrap(lambda net, probe, x: probe(net(x))))(net, probe, X)
        assert set(taps.values) == {"Net", "Net/head", "Net/Linear", "Linear"}


def test_a_module_of_an_ancestor_keeps_its_path():
    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x, shared):
            return shared(self.inner(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.shared, self.decoder = nnx.Linear(4, 4, rngs=rngs), Decoder(rngs)

        def __call__(self, x):
            return self.decoder(self.shared(x), self.shared)

    class Jitted(Net):
        __call__ = nnx.jit(Net.__call__)

    for cls in (Net, Jitted):
        net = cls(nnx.Rngs(0))
        out, taps = tapax.capture(lambda net, x: net(x))(net, X)
        name = cls.__name__
        names = ["", "/decoder", "/decoder/inner", "/shared", "/shared@1"]
        assert sorted(taps.values) == [name + n for n in names]
        np.testing.assert_array_equal(taps.values[f"{name}/shared@1"], out)


def test_a_key_with_special_characters_is_escaped():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.data({"a/b": nnx.Linear(4, 4, rngs=rngs)})

        def __call__(self, x):
            return self.parts["a/b"](x)

    _, taps = tapax.capture(lambda net, x: net(x))(Net(nnx.Rngs(0)), X)
    assert sorted(taps.values) == ["Net", "Net/parts/a%2Fb"]


def test_modules_lists_paths_and_classes():
    net = model(lambda self, x: x)
    listed = tapax.modules(net)
    assert [path for path, _ in listed][:3] == ["Net", "Net/blocks/0", "Net/blocks/0/fc1"]
    assert dict(listed)["Net/blocks/2/fc2"] is nnx.Linear
    assert "Net/blocks/1" in repr(listed) and "flax.Linear" in repr(listed)
    with pytest.raises(TypeError, match="takes a model of Flax"):
        tapax.modules(lambda x: x)


def test_a_class_defined_in_the_captured_function_is_a_site():
    def fn(x):
        class Net(nnx.Module):
            def __init__(self):
                self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

            def __call__(self, x):
                return 2 * self.linear(x)

        return Net()(x)

    out, taps = tapax.capture(fn)(X)
    assert_close(out, 2 * taps.values["Net/linear"])
    assert set(taps.values) == {"Net", "Net/linear"}


def test_modules_merged_from_a_state_have_paths():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(lambda r: Block(0, r))(rngs.split(3))
            self.others = nnx.vmap(lambda r: Block(0, r))(rngs.split(3))

        def __call__(self, x):
            scan = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return scan(self.others, scan(self.layers, x))

    graph, state = nnx.split(Deep(nnx.Rngs(0)))
    out, taps = tapax.capture(lambda state, x: nnx.merge(graph, state)(x))(state, X)
    assert {"Deep/layers", "Deep/others/fc1"} <= set(taps.values)
    np.testing.assert_array_equal(taps.values["Deep/others"][-1], out)
