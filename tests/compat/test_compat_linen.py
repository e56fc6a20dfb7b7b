"""`tapax.compat.linen.apply` matches Linen's `apply`, and is right where Linen is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import FrozenDict, freeze
from jax import lax

import tapax
from tapax.compat.linen import apply
from tests.oracles.closeness import assert_close

X = jax.random.normal(jax.random.key(7), (2, 4))
KEY = jax.random.key(0)


def same(found, expected, tol=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)

    def leaf(a, b):
        if isinstance(b, str):
            assert a == b
        else:
            assert_close(a, b, tol)

    jax.tree.map(leaf, found, expected)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Dense(4)(x))
        self.sow("intermediates", "h", h)
        return nn.Dense(4)(h)


class Methods(nn.Module):
    def setup(self):
        self.encoder, self.decoder = MLP(), nn.Dense(3)

    def encode(self, x):
        z = self.encoder(self._double(x))
        self.sow("losses", "size", jnp.sum(z**2), reduce_fn=jnp.add, init_fn=lambda: 0.0)
        return z

    def _double(self, x):
        return 2 * x

    def __call__(self, x):
        z = self.encode(self.encode(x))
        return {"out": self.decoder(z), "rest": (z, None, "text")}


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        mlp = MLP(name="mlp")
        return mlp(x) + mlp(2 * x)


MODELS = [MLP(), Methods(), Twice()]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mutable": []},
        {"mutable": "intermediates"},
        {"mutable": ["losses"]},
        {"mutable": ["losses", "intermediates"]},
        {"mutable": True},
        {"capture_intermediates": True},
        {"capture_intermediates": True, "mutable": ["losses"]},
        {"capture_intermediates": lambda m, name: isinstance(m, nn.Dense)},
        {"capture_intermediates": lambda m, name: name in ("encode", "_double")},
        {"capture_intermediates": lambda m, name: False},
    ],
)
def test_apply_returns_what_linen_returns(model, options):
    variables = model.init(KEY, X)
    variables = {"params": variables["params"]}
    same(apply(model, variables, X, **options), model.apply(variables, X, **options))


@pytest.mark.parametrize(
    "method", ["encode", Methods.encode, lambda m, x: m.decoder(m.encode(x)), Methods().encode]
)
def test_apply_takes_any_form_of_method(method):
    variables = {"params": Methods().init(KEY, X)["params"]}
    options = {"method": method, "capture_intermediates": True, "mutable": ["losses"]}
    same(apply(Methods(), variables, X, **options), Methods().apply(variables, X, **options))


class Stateful(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_apply_updates_state_and_takes_random_keys_as_linen_does(frozen):
    variables = Stateful().init(KEY, X, train=False)
    variables = freeze(variables) if frozen else variables
    options = {"mutable": ["batch_stats"], "rngs": {"dropout": KEY}, "train": True}
    options["capture_intermediates"] = True
    found = apply(Stateful(), variables, X, **options)
    expected = Stateful().apply(variables, X, **options)
    same(found, expected)
    assert isinstance(found[1], FrozenDict) == isinstance(expected[1], FrozenDict)


def test_the_program_continues_with_values_fed_back():
    variables = {"params": Twice().init(KEY, X)["params"]}
    _, state = Twice().apply(variables, X, mutable="intermediates")
    again = {**variables, **state}
    found = apply(Twice(), again, X, mutable="intermediates")
    same(found, Twice().apply(again, X, mutable="intermediates"))
    assert len(found[1]["intermediates"]["mlp"]["h"]) == 4
    model, variables = Methods(), {"params": Methods().init(KEY, X)["params"]}
    _, state = model.apply(variables, X, mutable="losses")
    again = {**variables, **state}
    same(apply(model, again, X, mutable="losses"), model.apply(again, X, mutable="losses"))


def test_under_jit_grad_and_vmap():
    variables = {"params": MLP().init(KEY, X)["params"]}
    run = lambda apply: lambda v, x: apply(MLP(), v, x, capture_intermediates=True)
    ours, flax = run(apply), run(nn.Module.apply)
    same(jax.jit(ours)(variables, X), flax(variables, X))
    xs = jnp.stack([X, 2 * X])
    same(jax.vmap(ours, (None, 0))(variables, xs), jax.vmap(flax, (None, 0))(variables, xs))
    loss = lambda run: lambda v: sum(map(jnp.sum, jax.tree.leaves(run(v, X))))
    same(jax.grad(loss(ours))(variables), jax.grad(loss(flax))(variables), tol=1e-4)


def test_the_same_call_is_traced_once():
    traced = []

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            traced.append(1)
            return nn.Dense(3)(x)

    variables = Net().init(KEY, X)
    traced.clear()
    for i in range(3):
        apply(Net(), variables, i * X, capture_intermediates=True)
    assert len(traced) == 1


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x, **options):
        for factor in (1, 2):
            self.sow("intermediates", "h", factor * x, **options)
        return 3 * x


def test_sow_needs_a_mutable_collection():
    assert apply(Sows(), {}, 1) == 3
    assert apply(Sows(), {}, 1, mutable=["intermediates"])[1] == {"intermediates": {"h": (1, 2)}}
    total = {"init_fn": lambda: 0, "reduce_fn": lambda a, b: a + b}
    _, state = apply(Sows(), {}, 1, mutable=["intermediates"], **total)
    assert state == {"intermediates": {"h": 3}}


def test_capture_intermediates_with_a_filter():
    class Inner(nn.Module):
        def test(self, x):
            return x + 1

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner().test(x) + 1

    _, state = apply(Outer(), {}, 1, capture_intermediates=True)
    assert state == {"intermediates": {"__call__": (3,)}}
    inner = lambda module, method: isinstance(module, Inner)
    _, state = apply(Outer(), {}, 1, capture_intermediates=inner)
    assert state == {"intermediates": {"Inner_0": {"test": (2,)}}}


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = self.perturb("before", nn.Dense(10)(x))
        return self.perturb("after", 4 * x)


class Setup(nn.Module):
    def setup(self):
        self.a = nn.Dense(10)

    def __call__(self, x):
        x = self.perturb("before", self.a(x))
        return self.perturb("after", 4 * x)


@pytest.mark.parametrize("model", [Compact(), Setup()], ids=["compact", "setup"])
def test_perturb_gives_gradients_of_intermediates(model):
    variables = model.init(KEY, X)
    params = {"params": variables["params"]}
    _, made = apply(model, params, X, mutable="perturbations")
    same(made["perturbations"], variables["perturbations"])
    loss = lambda apply: lambda p: jnp.mean((apply(model, {**params, **p}, X) - 1) ** 2)
    found, expected = jax.grad(loss(apply))(made), jax.grad(loss(nn.Module.apply))(made)
    same(found, expected)
    grads = found["perturbations"]
    assert_close(4 * grads["after"], grads["before"])


def test_perturb_without_perturbations_does_nothing():
    variables = Compact().init(KEY, X)
    params = {"params": variables["params"]}
    plain = Compact().apply(params, X)
    same(apply(Compact(), params, X), plain)
    same(apply(Compact(), variables, X), plain)
    with pytest.raises(ValueError, match="Perturbation collection perturbations present, but miss"):
        apply(Compact(), {**params, "perturbations": {}}, X)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = self.perturb("p", nn.tanh(nn.Dense(4)(x)))
        self.sow("intermediates", "h", 2 * x)
        self.sow("losses", "sum", x.sum(), reduce_fn=jnp.add, init_fn=lambda: 0.0)
        return x, None


class Loop(nn.Module):
    kind: str
    declared: bool = False

    @nn.compact
    def __call__(self, x):
        every = ("intermediates", "perturbations") if self.declared else ()
        axes = dict.fromkeys(("params", *every), 0)
        lift = {"variable_axes": axes, "split_rngs": {"params": True}}
        if self.kind == "scan":
            return nn.scan(Layer, length=3, **lift)(name="layers")(x, None)[0]
        if self.kind == "remat":
            return nn.scan(nn.remat(Layer), length=3, **lift)(name="layers")(x, None)[0]
        if self.kind == "vmap":
            vmapped = nn.vmap(Layer, in_axes=None, out_axes=0, axis_size=3, **lift)
            return vmapped(name="layers")(x)[0]
        layer = Layer(name="layers")
        if self.kind == "twice" or self.is_initializing():
            return layer(layer(x)[0])[0]
        return lax.scan(lambda x, _: layer(x), x, None, length=3)[0]


def by_hand(kind, params, eps):
    """Run everything in a loop, with perturbations added."""
    p = params["params"]["layers"]["Dense_0"]
    each = kind in ("scan", "remat", "vmap")
    x, seen = X, []
    for i, e in enumerate(eps):
        own = jax.tree.map(lambda a, i=i: a[i], p) if each else p
        x = nn.tanh(nn.Dense(4).apply({"params": own}, X if kind == "vmap" else x)) + e
        seen.append(x)
    seen = jnp.stack(seen)
    return (seen if kind == "vmap" else x), seen


@pytest.mark.parametrize("kind", ["scan", "remat", "vmap"])
def test_undeclared_collections_work_like_declared_ones(kind):
    params = {"params": Loop(kind).init(KEY, X)["params"]}
    options = {"capture_intermediates": True, "mutable": "perturbations"}
    found = apply(Loop(kind), params, X, **options)
    expected = Loop(kind, declared=True).apply(params, X, **options)
    same(found, expected)
    assert found[1]["intermediates"]["layers"]["h"][0].shape == (3, 2, 4)


@pytest.mark.parametrize("kind", ["scan", "remat", "vmap", "raw", "twice"])
@pytest.mark.parametrize("nonzero", [False, True])
def test_every_call_and_iteration_has_a_separate_perturbation(kind, nonzero):
    model = Loop(kind)
    params = {"params": model.init(KEY, X)["params"]}
    count = 2 if kind == "twice" else 3
    eps = jax.random.normal(KEY, (count, *X.shape)) if nonzero else jnp.zeros((count, *X.shape))
    _, made = apply(model, params, X, mutable=["perturbations"])
    given = tuple(eps) if kind == "twice" else eps
    same(made["perturbations"]["layers"]["p"], jax.tree.map(jnp.zeros_like, given))

    def ours(given):
        variables = {**params, "perturbations": {"layers": {"p": given}}}
        out, state = apply(model, variables, X, mutable=["intermediates", "losses"])
        return jnp.mean(out**2), state

    def theirs(eps):
        out, seen = by_hand(kind, params, eps)
        return jnp.mean(out**2), seen

    (loss, state), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(given)
    (expected, seen), expected_grads = jax.value_and_grad(theirs, has_aux=True)(eps)
    assert_close(loss, expected)
    assert_close(jnp.stack(grads), expected_grads, 1e-4)
    h = state["intermediates"]["layers"]["h"]
    assert_close(jnp.stack(h) if kind == "twice" else h[0], 2 * seen)
    total = state["losses"]["layers"]["sum"]
    assert_close(jnp.sum(total), seen.sum(), 1e-4)


def test_branches_and_while_loops():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            one, two = nn.Dense(4, name="one"), nn.Dense(4, name="two")
            if self.is_initializing():
                return one(x) + two(x)
            x = lax.cond(x.sum() > 1e9, lambda x: one(x), lambda x: two(x), x)
            return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, one(c[1])), (0, x))[1]

    variables = Net().init(KEY, X)
    out, state = apply(Net(), variables, X, capture_intermediates=True)
    dense = lambda name, x: nn.Dense(4).apply({"params": variables["params"][name]}, x)
    x = dense("two", X)
    found = state["intermediates"]
    assert_close(found["two"]["__call__"][0], x)
    for _ in range(3):
        x = dense("one", x)
    assert not np.any(found["one"]["__call__"][0])
    assert_close(found["one"]["__call__"][1], x)
    assert_close(out, x)


def test_bfloat16_stays_bfloat16():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.perturb("h", nn.Dense(4, dtype=jnp.bfloat16)(x))

    params = Net().init(KEY, X)["params"]
    wide = {"params": params, "perturbations": {"h": jnp.zeros((2, 4), jnp.float32)}}
    assert apply(Net(), wide, X).dtype == jnp.bfloat16
    _, made = apply(Net(), {"params": params}, X, mutable="perturbations")
    assert made["perturbations"]["h"].dtype == jnp.bfloat16


def test_an_apply_inside_another_is_separate():
    class Student(nn.Module):
        teacher: dict

        @nn.compact
        def __call__(self, x):
            inner = MLP(parent=None)
            out, state = inner.apply(self.teacher, x, mutable="intermediates")
            assert "h" in state["intermediates"]
            return nn.Dense(4)(x) - out

    model = Student({"params": MLP().init(KEY, X)["params"]})
    variables = model.init(KEY, X)
    options = {"capture_intermediates": True}
    same(apply(model, variables, X, **options), model.apply(variables, X, **options))


def test_apply_works_inside_a_capture():
    variables = {"params": MLP().init(KEY, X)["params"]}
    run = lambda v, x: apply(MLP(), v, x, capture_intermediates=True)
    (out, state), taps = tapax.capture(run)(variables, X)
    same((out, state), MLP().apply(variables, X, capture_intermediates=True))
    np.testing.assert_array_equal(taps.values["MLP/Dense_0"].shape, (2, 4))


def test_one_perturbation_for_several_calls():
    params = {"params": Loop("twice").init(KEY, X)["params"]}
    given = {**params, "perturbations": {"layers": {"p": jnp.zeros_like(X)}}}
    with pytest.raises(tapax.SiteError) as error:
        apply(Loop("twice"), given, X)
    assert str(error.value) == (
        "perturb('p') is called 2 times in the module at 'Loop/layers', so it needs a tuple of 2 "
        "perturbations: a single one would have the sum of their gradients. Make the perturbations "
        "with apply(..., mutable='perturbations')."
    )


def test_a_perturbation_of_another_shape():
    variables = Compact().init(KEY, X[:1])
    with pytest.raises(
        tapax.SiteError, match=r"shape \[1, 10\], but its values have shape \[2, 10\]"
    ):
        apply(Compact(), variables, X)


def test_a_perturbation_in_a_while_loop():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = lambda c: (c[0] + 1, self.perturb("h", jnp.sin(c[1])))
            return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    with pytest.raises(tapax.SiteError, match="is in a while loop, whose number of iterations is"):
        apply(Net(), {"perturbations": {"h": X}}, X)


def test_a_perturbation_in_a_scan_that_runs_backwards():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = lambda c, x: (self.perturb("h", jnp.sin(c + x)), None)
            return lax.scan(body, x[0], x, reverse=True)[0]

    def by_hand(p):
        body = lambda c, x: (jnp.sin(c + x[0]) + x[1], None)
        return lax.scan(body, X[0], (X, p), reverse=True)[0]

    loss = lambda f: jax.grad(lambda p: jnp.sum(f(p) ** 2))(0.1 * X)
    ours = lambda p: apply(Net(), {"perturbations": {"h": p}}, X)
    assert_close(loss(ours), loss(by_hand))


def test_a_class_in_the_place_of_a_module():
    with pytest.raises(Exception, match="Can only call init, init_with_output or apply"):
        apply(MLP, {}, X)


def test_perturbations_that_are_not_mutable_are_not_returned():
    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(self.perturb("p", nn.Dense(3)(x)))

    variables = Perturbed().init(jax.random.key(0), X)
    given = {"mutable": ["intermediates"], "capture_intermediates": True}
    expected = Perturbed().apply(variables, X, **given)
    got = apply(Perturbed(), variables, X, **given)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_close(got, expected)
