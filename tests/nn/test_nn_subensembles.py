"""Subensembles compute one trunk once, then several members and their predictions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from tapax import nn
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

KEY = jax.random.key(3)
X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
W = {"up": jnp.sin(jnp.arange(15.0)).reshape(3, 5), "mid": jnp.cos(jnp.arange(25.0)).reshape(5, 5)}
W["out"] = jnp.cos(jnp.arange(10.0)).reshape(5, 2)


def net(w, x):
    trunk = tapax.sow(jnp.sin(x @ w["up"]), "trunk")
    h = tapax.sow(jnp.tanh(trunk @ w["mid"]), "branch")
    return h @ w["out"]


def count(fn, *args):
    """Count the operations of a program, by their number of axes."""
    found = {}

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            name, rank = eqn.primitive.name, eqn.outvars[0].aval.ndim if eqn.outvars else 0
            found[name, rank] = found.get((name, rank), 0) + 1
            for value in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def nth(key, n):
    return jax.random.fold_in(key, n)


def test_members_start_from_the_plain_trunk():
    """Noise on all sites and weights affects only the part after the trunk."""
    noisy = nn.noise(nn.weight_noise(net, 0.2), at="**", std=0.3)
    members = nn.subensemble(noisy, at="trunk")
    got = members.sample(KEY, 3, W, X)
    trunk = jnp.sin(X @ W["up"])
    for key, out in zip(jax.random.split(KEY, 3), got, strict=True):
        draws = [0.2 * jax.random.normal(nth(key, n), W[p].shape) for n, p in enumerate(sorted(W))]
        w = {path: W[path] + draw for path, draw in zip(sorted(W), draws, strict=True)}
        h = jnp.tanh(trunk @ w["mid"])
        assert_close(out, (h + 0.3 * jax.random.normal(nth(key, 4), h.shape)) @ w["out"])
        assert_close(members(key, W, X), out)


@pytest.mark.parametrize("jitted", [False, True])
def test_the_trunk_is_computed_once_for_all_members(jitted):
    fn = jax.jit(net) if jitted else net
    members = nn.subensemble(nn.weight_noise(fn, 0.2), at="trunk")
    found = count(lambda key, w, x: members.sample(key, 8, w, x), KEY, W, X)
    assert found["sin", 2] == 1 and ("sin", 3) not in found
    assert found["tanh", 3] == 1 and ("tanh", 2) not in found
    assert found["dot_general", 2] == 1 and found["dot_general", 3] == 2


def test_operations_without_perturbations_run_once():
    """Even without a subensemble, members are one map over the keys."""
    noisy = nn.noise(net, at="branch", std=0.3)
    found = count(lambda key, w, x: noisy.sample(key, 8, w, x), KEY, W, X)
    assert found["sin", 2] == found["tanh", 2] == 1
    assert found["dot_general", 2] == 2 and found["dot_general", 3] == 1


def test_a_trunk_may_end_in_an_iteration_of_a_scan():
    ws = jnp.array([0.5, 2.0, 3.0, 1.5])

    def fn(x):
        return jax.lax.scan(lambda x, w: (tapax.sow(jnp.tanh(x * w), "h"), None), x, ws)[0]

    dropped = nn.subensemble(nn.noise(fn, at="h", std=0.3), at=tapax.at("h", step=1))
    got, want = dropped(KEY, X), jnp.tanh(jnp.tanh(X * 0.5) * 2.0)
    keys = jax.random.split(nth(KEY, 0), 4)
    for key, w in zip(keys[2:], ws[2:], strict=True):
        want = jnp.tanh(want * w)
        want = want + 0.3 * jax.random.normal(key, want.shape)
    assert_close(got, want)


def test_heads_are_run_on_one_trunk():
    heads = [lambda h, i=i: h @ W["out"] * i for i in range(3)]
    members = nn.subensemble(net, at="trunk", heads=heads)
    assert members.num_members == 3
    trunk = jnp.sin(X @ W["up"]) @ W["out"]
    assert_close(members(W, X), jnp.stack([trunk * i for i in range(3)]))
    found = count(members, W, X)
    assert found["sin", 2] == 1 and ("tanh", 2) not in found and found["dot_general", 2] == 4
    p = nn.predict(members, W, X, kind="regression")
    assert_close(p.mean, trunk)
    assert_close(p.epistemic, trunk**2 * 2 / 3)


def test_heads_may_be_modules():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(3, 5, rngs=rngs)
            self.out = nnx.Linear(5, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.up(x)))

    model = Net(nnx.Rngs(0))
    heads = [nnx.Linear(5, 2, rngs=nnx.Rngs(i)) for i in range(2)]
    members = nn.subensemble(model, at="Net/up", heads=heads)
    assert_close(members(X), jnp.stack([head(model.up(X)) for head in heads]))
    heads[0].kernel[...] = jnp.zeros((5, 2))  # as after a step of training
    assert_close(members(X)[0], jnp.zeros((4, 2)))
    noisy = nn.subensemble(nn.weight_noise(model, 0.2), at="Net/up")
    w = [model.out.bias[...], model.out.kernel[...]]  # the first two of four weights, by path
    b, k = (x + 0.2 * jax.random.normal(nth(KEY, n), x.shape) for n, x in enumerate(w))
    assert_close(noisy(KEY, X), jnp.tanh(model.up(X)) @ k + b)


def entropy(p):
    return -np.sum(p * np.log(p), -1)


@pytest.mark.parametrize("compiled", [False, True])
def test_predictions_of_drawn_members(compiled):
    noisy = nn.weight_noise(net, 0.5)
    run = lambda w, x, key: nn.predict(noisy, w, x, num_members=4, key=key)
    got = (jax.jit(run) if compiled else run)(W, X, KEY)
    logits = np.asarray(noisy.sample(KEY, 4, W, X), np.float64)
    assert_close(got.members, logits)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert_close(got.mean, p.mean(0))
    assert_close(got.epistemic, entropy(p.mean(0)) - entropy(p).mean(0))
    numbers = nn.predict(noisy, W, X, num_members=4, key=KEY, kind="regression")
    assert_close(numbers.epistemic, logits.var(0))


def test_predictions_of_means_and_variances():
    fn = lambda w, x: (net(w, x)[:, 0], jnp.exp(net(w, x)[:, 1]))
    p = nn.predict(nn.weight_noise(fn, 0.1), W, X, num_members=4, key=KEY, kind="regression")
    means, variances = (np.asarray(x, np.float64) for x in p.members)
    assert means.shape == (4, 4)
    assert_close(p.epistemic, means.var(0))
    assert_close(p.aleatoric, variances.mean(0))


def test_functions_of_a_key_are_drawn_as_they_are():
    """`predict` draws functions of a key, such as a model whose dropout layers take the key."""

    def own(key, x):
        return net(W, x) * jax.random.bernoulli(key, 0.5, (4, 1))

    got = nn.predict(own, X, num_members=3, key=KEY, kind="regression")
    want = jnp.stack([own(key, X) for key in jax.random.split(KEY, 3)])
    assert_close(got.members, want)


def test_one_member_may_be_the_plain_model():
    noisy = nn.weight_noise(net, 0.5)
    got = nn.predict(noisy, W, X, num_members=1, key=KEY, plain_first=True)
    assert_close(got.members, net(W, X)[None])


dropped = nn.dropout(net, at="branch", rate=0.1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.predict(dropped, W, X, num_members=3), TypeError,
         "`key` must be given, to draw the members: key=jax.random.key(0)."),
        (lambda: nn.predict(dropped, W, X, key=KEY), ValueError,
         "`num_members`, the number of members to draw, must be given."),
        (lambda: nn.predict(net, W, X, num_members=3), TypeError,
         "A model with BatchEnsemble layers takes one batch, but was given 2 arguments."),
        (lambda: nn.predict(net, W, X, num_members=3, key=KEY, plain_first=True), TypeError,
         "`plain_first` needs a function that tapax.nn.dropout, noise or weight_noise made"),
        (lambda: nn.subensemble(net, at="trunk"), TypeError,
         "`subensemble` needs a random `fn`, such as tapax.nn.dropout(fn, ...), or `heads`"),
        (lambda: nn.subensemble(dropped, at="trunk", heads=[jnp.sin]), TypeError,
         "`subensemble` takes a random function or `heads`, but was given both."),
        (lambda: nn.subensemble(net, at="trunk", heads=[]), ValueError,
         "`heads` must have one head or more, but is empty."),
        (lambda: nn.subensemble(net, at="trunk", heads=[3]), TypeError,
         "`heads` must be functions of the value at the site, but has 3"),
        (lambda: nn.subensemble(net, at="trunk", heads=[jnp.sin, jnp.sum])(W, X), ValueError,
         "All heads must return the same shapes, but head 0 returned (4, 5) and head 1 ()."),
        (lambda: nn.predict(nn.subensemble(net, at="trunk", heads=[jnp.sin]), W, X, key=KEY),
         ValueError, "The number of heads of the subensemble, 1, is fixed."),
        (lambda: nn.subensemble(dropped, at="trink").sample(KEY, 2, W, X), tapax.SiteError,
         "site='trink' picks nothing: tracing the function reached no site with that name"),
        (lambda: nn.subensemble(dropped, at="*").sample(KEY, 2, W, X), tapax.SiteError,
         "A cut needs one site, but '*' picks 2"),
    ],
)  # fmt: skip
def test_bad_input_of_subensembles(call, error, message):
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(message)
