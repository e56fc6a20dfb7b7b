"""Names and values of modules under the transformations of Linen and JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import tapax
from tests.models.linen_models import KEY, MLP, Branches, Loop, X, loss_of
from tests.oracles import linen_oracle as oracle
from tests.oracles.closeness import assert_close


class Blocks(nn.Module):
    """A model of equal blocks, one of them called twice, with a transformation around each."""

    lift: str

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x)
            return x + MLP(name="mlp")(x)

    class Decorated(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x)
            return x + MLP(name="mlp")(x)

    @nn.compact
    def __call__(self, x):
        kinds = {
            "plain": lambda: self.Block,
            "jit": lambda: nn.jit(self.Block),
            "remat": lambda: nn.remat(self.Block),
            "jit of remat": lambda: nn.jit(nn.remat(self.Block)),
            "decorated": lambda: self.Decorated,
            "function": lambda: self.Block,
        }
        blocks = [kinds[self.lift]()(name=f"b{i}") for i in range(3)]
        call = nn.jit(lambda mdl, x: mdl(x)) if self.lift == "function" else lambda m, x: m(x)
        for i in (0, 1, 2, 0):
            x = call(blocks[i], x)
        return x


LIFTS = ["jit", "remat", "jit of remat", "decorated", "function"]


@pytest.mark.parametrize("lift", LIFTS)
def test_a_transformed_block_has_the_sites_of_a_plain_one(lift):
    variables = Blocks("plain").init(KEY, X)
    capture = lambda lift: tapax.capture(jax.grad(loss_of(Blocks(lift))))(variables, X)
    (out, taps), (plain, expected) = capture(lift), capture("plain")
    same = lambda a, b: assert_close(a, b)
    assert taps.values.keys() == expected.values.keys()
    assert taps.grads.keys() == expected.grads.keys()
    jax.tree.map(same, (out, taps.values, taps.grads), (plain, expected.values, expected.grads))
    assert taps.sites["Blocks/b1"].module.__name__ in ("Block", "Decorated")


def test_a_root_that_is_transformed_has_the_name_of_its_class():
    model = nn.jit(nn.remat(MLP))()
    names = tapax.sites(model.apply)(model.init(KEY, X), X).names
    assert names == ["MLP/Dense_0", "MLP/Dense_1", "MLP"]


def test_remat_scan_stacks_its_layers():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat_scan(MLP, lengths=(2, 3))(name="layers")(x)

    model = Deep()
    variables = model.init(KEY, X)
    _, taps = tapax.capture(jax.grad(loss_of(model)))(variables, X)
    layer = lambda i, j: jax.tree.map(lambda p: p[i, j], variables["params"]["layers"])

    def chain(eps):
        x, seen = X, []
        for i in range(2):
            for j in range(3):
                x = MLP().apply({"params": layer(i, j)}, x) + eps[i, j]
                seen.append(x)
        return jnp.mean(x**2), jnp.stack(seen).reshape(2, 3, *x.shape)

    grads, seen = jax.grad(chain, has_aux=True)(jnp.zeros((2, 3, *X.shape)))
    assert_close(taps.values["Deep/layers"], seen)
    assert_close(taps.grads["Deep/layers"], grads, 1e-4)


def test_vmap_of_a_module_puts_the_mapped_axis_first():
    class Ensemble(nn.Module):
        @nn.compact
        def __call__(self, x):
            lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            many = nn.vmap(MLP, in_axes=None, out_axes=1, axis_size=3, **lift)
            return many(name="members")(x)

    model = Ensemble()
    variables = model.init(KEY, X)
    _, taps = tapax.capture(jax.grad(loss_of(model)))(variables, X)

    def member(i, eps):
        params = jax.tree.map(lambda p: p[i], variables["params"]["members"])
        return MLP().apply({"params": params}, X) + eps

    stacked = lambda eps: jnp.stack([member(i, eps[i]) for i in range(3)])
    zeros = jnp.zeros((3, 2, 4))
    assert_close(taps.values["Ensemble/members"], stacked(zeros))
    expected = jax.grad(lambda eps: jnp.mean(stacked(eps) ** 2))(zeros)
    assert_close(taps.grads["Ensemble/members"], expected)


def test_cond_and_switch_have_masks():
    model = Branches()
    variables = model.init(KEY, X)
    out, taps = tapax.capture(model.apply)(variables, X)
    assert_close(out, model.apply(variables, X))
    p = variables["params"]
    two = nn.Dense(4).apply({"params": p["two"]}, X)
    one = MLP().apply({"params": p["one"]}, two)
    assert_close(taps.values["Branches/two"], two)
    assert bool(taps.valid["Branches/two"]) and not bool(taps.valid["Branches/one"])
    assert_close(taps.values["Branches/one@1"], one)


def test_while_loop_keeps_first_steps():
    model = Loop()
    variables = model.init(KEY, X)
    out, taps = tapax.capture(model.apply, steps=4)(variables, X)
    x, seen = X, []
    for _ in range(3):
        seen.append(MLP().apply({"params": variables["params"]["inner"]}, x))
        x = x + seen[-1]
    assert_close(out, x)
    assert_close(taps.values["Loop/inner"][:3], jnp.stack(seen))
    np.testing.assert_array_equal(taps.valid["Loop/inner"], [True, True, True, False])


def test_a_scan_whose_body_has_invariant_modules():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            offset = nn.Dense(4, name="constant")(jnp.ones((1, 4), x.dtype))
            return nn.tanh(nn.Dense(4, name="own")(x)) + offset, None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            lift = {"variable_broadcast": "params", "split_rngs": {"params": False}}
            return nn.scan(Layer, length=3, **lift)(name="layers")(x, None)[0]

    model = Net()
    variables = model.init(KEY, X)
    _, taps = tapax.capture(jax.grad(loss_of(model)))(variables, X)
    assert set(taps.values) == {f"Net/layers{n}" for n in ("/constant", "/own", ":0")} | {"Net"}
    assert taps.values["Net/layers/constant"].shape == (3, 1, 4)
    expected = oracle.grads(lambda: loss_of(model)(variables, X), "Net")
    oracle.agree(taps.grads, taps.sites, expected)


def test_a_jitted_function_that_several_modules_share_is_named_by_each():
    shared = nn.jit(lambda mdl, x: nn.Dense(4, name="dense")(x))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.tanh(shared(self, x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                x = Block(name=f"b{i}")(x)
            return x

    model = Net()
    variables = model.init(KEY, X)
    _, taps = tapax.capture(jax.grad(loss_of(model)))(variables, X)
    expected = oracle.values(lambda: model.apply(variables, X), "Net")
    oracle.agree(taps.values, taps.sites, expected)
    oracle.agree(taps.grads, taps.sites, oracle.grads(lambda: loss_of(model)(variables, X), "Net"))


def test_jitted_modules_that_take_modules_or_are_called_elsewhere():
    class User(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="own")(self.inner(x))

    Jitted = nn.jit(User)

    class Net(nn.Module):
        def setup(self):
            self.a, self.b = nn.Dense(4), nn.Dense(4)
            self.left, self.right = Jitted(self.a), Jitted(self.b)
            self.outer = User(self.left)

        def __call__(self, x):
            return self.outer(self.right(self.left(x)))

    model = Net()
    variables = model.init(KEY, X)
    out, taps = tapax.capture(model.apply)(variables, X)
    names = [*(f"Net/{n}" for n in ("a", "left/own", "left", "b", "right/own", "right"))]
    names += ["Net/a@1", "Net/left/own@1", "Net/left@1", "Net/outer/own", "Net/outer", "Net"]
    assert taps.sites.names == names
    oracle.agree(taps.values, taps.sites, oracle.values(lambda: model.apply(variables, X), "Net"))


def test_transformations_of_jax_in_a_module_are_captured():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            mlp = MLP(name="mlp")
            if self.is_initializing():
                return mlp(x)
            x = jax.jit(lambda x: mlp(x))(x)
            x = jax.checkpoint(lambda x: mlp(x))(x)
            return jax.vmap(lambda x: mlp(x))(x)

    model = Net()
    variables = model.init(KEY, X)
    _, taps = tapax.capture(jax.grad(loss_of(model)))(variables, X)
    mlp = lambda x: MLP().apply({"params": variables["params"]["mlp"]}, x)

    def chain(eps):
        x, seen = X, []
        for e in eps:
            x = mlp(x) + e
            seen.append(x)
        return jnp.mean(x**2), seen

    grads, seen = jax.grad(chain, has_aux=True)(jnp.zeros((3, *X.shape)))
    for i, name in enumerate(("Net/mlp", "Net/mlp@1", "Net/mlp@2")):
        assert_close(taps.values[name], seen[i])
        assert_close(taps.grads[name], grads[i], 1e-4)


def test_derivatives_that_a_module_takes_are_captured():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            loss = lambda mdl, x: jnp.sum(mdl(x) ** 2)
            value, _ = nn.value_and_grad(loss, MLP(name="a"), x)
            out, back = nn.vjp(lambda mdl, x: mdl(x), MLP(name="b"), x)
            return value + back(jnp.ones_like(out))[1]

    model = Net()
    variables = model.init(KEY, X)
    out, taps = tapax.capture(model.apply)(variables, X)
    assert_close(out, model.apply(variables, X))
    assert_close(taps.grads["Net/a"], 2 * taps.values["Net/a"])
    np.testing.assert_array_equal(taps.grads["Net/b"], jnp.ones_like(X))


def test_a_custom_derivative_rule_that_a_module_defines():
    def forward(mdl, x):
        return nn.vjp(plain, mdl, x)

    def plain(mdl, x):
        return nn.Dense(4, name="dense")(x)

    def backward(vjp, ct):
        params, x = vjp(ct)
        return jax.tree.map(jnp.sign, params), x

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.custom_vjp(plain, forward, backward)(self, x)

    model = Net()
    variables = model.init(KEY, X)
    step = jax.grad(loss_of(model))
    out, taps = tapax.capture(step)(variables, X)
    assert_close(out, step(variables, X))
    assert_close(taps.grads["Net/dense"], taps.grads["Net"])


def test_wrappers_and_other_methods_of_flax_are_captured():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.WeightNorm(nn.Dense(4))(x)
            embed = nn.Embed(5, 4, name="embed")
            return embed.attend(x) + embed(jnp.array([1, 2])).sum()

    model = Net()
    names = tapax.sites(model.apply)(model.init(KEY, X), X).names
    assert names == ["Net/Dense_0", "Net/WeightNorm_0", "Net/embed.attend", "Net/embed", "Net"]
