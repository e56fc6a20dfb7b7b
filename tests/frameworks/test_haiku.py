"""Haiku modules as sites: unmodified models, under every transformation."""

import threading

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haiku._src.module import interceptor_stack

import tapax
from tapax import SiteError
from tests.oracles.closeness import assert_close

B, D = 3, 4
X = jax.random.normal(jax.random.key(7), (B, D))
KEY = jax.random.key(0)


class Block(hk.Module):
    def __init__(self, name=None):
        super().__init__(name)
        self.first = hk.Linear(D)

    def __call__(self, x):
        return jnp.tanh(self.first(x)) + x

    def encode(self, x):
        return self.first(x)


def in_a_scan(block, x):
    return hk.scan(lambda x, _: (block(x), None), x, None, length=1)[0]


def in_a_loop(block, x):
    if hk.running_init():
        return block(x)
    return hk.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, block(c[1])), (0, x))[1]


def in_a_branch(block, x):
    if hk.running_init():
        return block(x)
    return hk.cond(jnp.sum(x) < jnp.inf, block, lambda x: x, x)


HOW = {
    "plain": lambda block, x: block(x),
    "remat": lambda block, x: hk.remat(block)(x),
    "vmap": lambda block, x: hk.vmap(block, split_rng=False)(x),
    "scan": in_a_scan,
    "while_loop": in_a_loop,
    "cond": in_a_branch,
    "Sequential": lambda block, x: hk.Sequential([block], name="run")(x),
}


class Net(hk.Module):
    def __init__(self, how="plain", name=None):
        super().__init__(name)
        self.how = how

    def __call__(self, x):
        for _ in range(2):
            x = HOW[self.how](Block(), x)
        return hk.nets.MLP([D, 2], name="head")(x)


def by_hand(params, x, eps):
    """Run the network in plain JAX, with `eps` added to every value; return result and values."""
    seen = {}

    def tap(name, value):
        seen[name] = value + eps.get(name, 0.0)
        return seen[name]

    def linear(name, x):
        return x @ params[name]["w"] + params[name]["b"]

    for block in ("net/block", "net/block_1"):
        h = tap(f"{block}/linear", linear(f"{block}/~/linear", x))
        x = tap(block, jnp.tanh(h) + x)
    h = jax.nn.relu(tap("net/head/linear_0", linear("net/head/~/linear_0", x)))
    x = tap("net/head/linear_1", linear("net/head/~/linear_1", h))
    return tap("net", tap("net/head", x)), seen


def expected(params, x):
    """Compute values, and the gradients of the mean square, in plain JAX."""
    _, values = by_hand(params, x, {})
    zeros = jax.tree.map(jnp.zeros_like, values)
    return values, jax.grad(lambda eps: jnp.mean(by_hand(params, x, eps)[0] ** 2))(zeros)


def close(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        # Some transformations run a loop of one iteration.
        got = np.asarray(found[name])
        assert got.size == value.size, name
        got = got.reshape(value.shape)
        assert_close(got, value, err_msg=name)


def ready(how="plain"):
    net = hk.without_apply_rng(hk.transform(lambda x: Net(how)(x)))
    return net, net.init(KEY, X)


optimizer = optax.adam(1e-2)


def make_step(net):
    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(net.apply(p, x) ** 2))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.parametrize(
    "jit", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.many)], ids=["jit", "eager"]
)
@pytest.mark.parametrize("how", [how for how in HOW if how != "while_loop"])
def test_train_step_of_a_haiku_model(how, jit):
    net, params = ready(how)
    state = optimizer.init(params)
    step = jit(make_step(net))
    plain = step(params, state, X)
    out, taps = tapax.capture(step)(params, state, X)
    values, grads = expected(params, X)
    if how == "Sequential":
        for wanted in (values, grads):
            for suffix in ("", "_1"):
                wanted[f"net/run{suffix}"] = wanted[f"net/block{suffix}"]
    close(taps.values, values)
    close(taps.grads, grads)
    assert jax.tree.structure(out) == jax.tree.structure(plain)
    for a, b in zip(*map(jax.tree.leaves, (out, plain)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("how", ["plain", "while_loop"])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_apply_of_a_haiku_model(how, jit):
    net, params = ready(how)
    run = jit(net.apply)
    plain = run(params, X)
    out, taps = tapax.capture(run)(params, X)
    assert_close(out, plain)
    close(taps.values, expected(params, X)[0])


def test_init_is_captured_like_apply():
    net, params = ready()
    out, taps = tapax.capture(net.init)(KEY, X)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    close(taps.values, expected(params, X)[0])


def test_vmap_over_examples_puts_the_batch_axis_first():
    net, params = ready()
    _, taps = tapax.capture(jax.vmap(net.apply, in_axes=(None, 0)))(params, X)
    close(taps.values, expected(params, X)[0])


def test_layer_stack_stacks_its_values():
    class Stack(hk.Module):
        def __call__(self, x):
            return hk.Linear(2)(hk.layer_stack(3)(lambda x: Block()(x))(x))

    net = hk.without_apply_rng(hk.transform(lambda x: Stack()(x)))
    params = net.init(KEY, X)
    loss = jax.jit(jax.grad(lambda p, x: jnp.mean(net.apply(p, x) ** 2)))
    _, taps = tapax.capture(loss)(params, X)
    (name,) = [name for name in params if name.endswith("block/~/linear")]

    def run(eps):
        x, seen = X, []
        for w, b, e in zip(params[name]["w"], params[name]["b"], eps, strict=True):
            x = jnp.tanh(x @ w + b) + x + e
            seen.append(x)
        out = x @ params["stack/linear"]["w"] + params["stack/linear"]["b"]
        return jnp.mean(out**2), jnp.stack(seen)

    grads, values = jax.grad(run, has_aux=True)(jnp.zeros((3, B, D)))
    assert set(taps.values) == {"stack", "stack/linear", "stack/block", "stack/block/linear"}
    assert_close(taps.values["stack/block"], values)
    assert_close(taps.grads["stack/block"], grads)


@pytest.mark.parametrize("make", [hk.LSTM, hk.GRU, hk.VanillaRNN])
@pytest.mark.parametrize("unroll", [hk.dynamic_unroll, hk.static_unroll])
def test_recurrent_cores_are_captured_in_unrolled_loops(make, unroll):
    def run(xs):
        core = make(D)
        return unroll(core, xs, core.initial_state(None))[0]

    def by_hand(xs, eps):
        core, seen = make(D), []
        state = core.initial_state(None)
        for x, e in zip(xs, eps, strict=True):
            out, state = core(x, state)
            seen.append(out + e)
        return jnp.stack(seen)

    net = hk.without_apply_rng(hk.transform(run))
    params = net.init(KEY, X)
    loss = lambda out: jnp.sum(out**2)
    _, taps = tapax.capture(jax.grad(lambda p: loss(net.apply(p, X))))(params)
    oracle = hk.without_apply_rng(hk.transform(by_hand))
    zeros = jnp.zeros((B, D))
    values = oracle.apply(params, X, zeros)
    grads = jax.grad(lambda eps: loss(oracle.apply(params, X, eps)))(zeros)
    name = {hk.LSTM: "lstm", hk.GRU: "gru", hk.VanillaRNN: "vanilla_rnn"}[make]
    calls = [f"{name}:0", *(f"{name}:0@{i}" for i in range(1, B))]
    stacked = unroll is hk.dynamic_unroll
    for found, wanted in ((taps.values, values), (taps.grads, grads)):
        got = found[f"{name}:0"] if stacked else jnp.stack([found[call] for call in calls])
        assert_close(got, wanted)


def test_batch_norm_and_dropout_are_captured():
    def run(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(D)(x), is_training=True)
        return hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(D)(x))

    net = hk.transform_with_state(run)
    params, state = net.init(KEY, X)
    key = jax.random.key(1)
    out, after = net.apply(params, state, key, X)
    (found, found_state), taps = tapax.capture(jax.jit(net.apply))(params, state, key, X)
    assert_close(found, out)
    for a, b in zip(*map(jax.tree.leaves, (after, found_state)), strict=True):
        assert_close(a, b)
    h = X @ params["linear"]["w"] + params["linear"]["b"]
    assert_close(taps.values["linear"], h)
    normed = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    assert_close(taps.values["batch_norm"], normed, 1e-4)
    assert_close(taps.values["batch_norm/mean_ema"][0], h.mean(0), 1e-4)


def test_projections_of_attention_are_sites():
    attend = lambda x: hk.MultiHeadAttention(2, D, w_init=hk.initializers.VarianceScaling())(
        x, x, x
    )
    net = hk.without_apply_rng(hk.transform(attend))
    params = net.init(KEY, X)
    out, taps = tapax.capture(net.apply)(params, X)
    names = ["query", "key", "value", "linear"]
    assert set(taps.values) == {"multi_head_attention"} | {
        f"multi_head_attention/{name}" for name in names
    }
    weights = params["multi_head_attention/query"]
    query = X @ weights["w"] + weights["b"]
    assert_close(taps.values["multi_head_attention/query"], query)


def test_methods_of_a_module_are_sites():
    class Coder(hk.Module):
        def encode(self, x):
            return hk.Linear(2, name="inner")(x)

        def decode(self, z):
            return hk.Linear(D, name="outer")(z)

        def _private(self, x):
            return x

    def both():
        coder = Coder()
        run = lambda x: coder.decode(coder._private(coder.encode(x)))
        return run, (coder.encode, coder.decode)

    net = hk.multi_transform(both)
    params = net.init(KEY, X)
    encode, _ = net.apply
    _, taps = tapax.capture(encode)(params, None, X)
    z = X @ params["coder/~encode/inner"]["w"] + params["coder/~encode/inner"]["b"]
    close(taps.values, {"coder.encode": z, "coder/inner": z})
    _, taps = tapax.capture(lambda p, x: net.apply[1](p, None, net.apply[0](p, None, x)))(params, X)
    assert set(taps.values) == {"coder.encode", "coder/inner", "coder.decode", "coder/outer"}
    (site,) = [site for site in taps.sites if site.name == "coder.decode"]
    assert site.module is Coder and site.method == "decode"


def test_super_and_inherited_methods_are_sites_once():
    class Base(hk.Module):
        def __call__(self, x):
            return hk.Linear(D)(x)

    class Twice(Base):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Same(Base):
        pass

    net = hk.without_apply_rng(hk.transform(lambda x: Same()(Twice()(x))))
    params = net.init(KEY, X)
    _, taps = tapax.capture(net.apply)(params, X)
    first = X @ params["twice/linear"]["w"]
    second = 2 * first @ params["same/linear"]["w"]
    wanted = {"twice": 2 * first, "twice/linear": first, "same": second, "same/linear": second}
    close(taps.values, wanted)


def test_a_module_may_call_an_ancestor_and_a_sibling():
    class Inner(hk.Module):
        def __init__(self, outer):
            super().__init__()
            self.outer, self.linear = outer, hk.Linear(D)

        def __call__(self, x):
            return self.outer.helped(x)

    class Outer(hk.Module):
        def __init__(self, sibling):
            super().__init__()
            self.inner, self.last, self.sibling = Inner(self), hk.Linear(D, name="last"), sibling

        def __call__(self, x):
            return self.sibling(self.inner(x))

        def helped(self, x):
            return self.inner.linear(self.last(x))

    net = hk.without_apply_rng(hk.transform(lambda x: Outer(hk.Linear(D, name="other"))(x)))
    params = net.init(KEY, X)
    _, taps = tapax.capture(jax.jit(net.apply))(params, X)
    last = X @ params["outer/~/last"]["w"]
    inner = last @ params["outer/~/inner/~/linear"]["w"]
    out = inner @ params["other"]["w"]
    names = ["outer.helped", "outer/inner", "outer/inner/linear"]
    close(
        taps.values, {"outer/last": last, "other": out, "outer": out, **dict.fromkeys(names, inner)}
    )


def test_sow_follows_name_scopes_and_forced_names():
    class Sowing(hk.Module):
        def __call__(self, x):
            with hk.name_scope("part"):
                x = tapax.sow(hk.Linear(D)(x), "h")
            name = hk.experimental.force_name("tied")
            return hk.Linear(D, name=name)(x)

    net = hk.without_apply_rng(hk.transform(lambda x: hk.remat(Sowing())(x)))
    params = net.init(KEY, X)
    _, taps = tapax.capture(net.apply)(params, X)
    h = X @ params["sowing/part/linear"]["w"]
    tied = h @ params["tied"]["w"]
    close(taps.values, {"sowing/part/linear": h, "sowing/h": h, "tied": tied, "sowing": tied})


def test_a_module_called_twice_has_two_sites():
    def run(x):
        linear = hk.Linear(D)
        return linear(linear(x))

    net = hk.without_apply_rng(hk.transform(run))
    params = net.init(KEY, X)
    _, taps = tapax.capture(jax.grad(lambda p: jnp.sum(net.apply(p, X))))(params)
    w = params["linear"]["w"]
    close(taps.values, {"linear": X @ w, "linear@1": X @ w @ w})
    close(taps.grads, {"linear": jnp.ones((B, D)) @ w.T, "linear@1": jnp.ones((B, D))})


def test_convolutional_blocks_with_batch_norm_are_captured():
    def run(x):
        norm = {"create_scale": True, "create_offset": True, "decay_rate": 0.9}
        options = {"resnet_v2": False, "bottleneck": False, "use_projection": True}
        return hk.nets.ResNet.BlockGroup(4, 2, 1, norm, **options)(x, True, False)

    net = hk.transform_with_state(run)
    x = jax.random.normal(KEY, (2, 8, 8, 3))
    params, state = net.init(KEY, x)
    plain, _ = net.apply(params, state, None, x)
    (out, _), taps = tapax.capture(jax.jit(net.apply))(params, state, None, x)
    assert_close(out, plain, 1e-4)
    names = {"/".join(p for p in name.split("/") if p != "~") for name in params}
    assert names <= set(taps.values) and not any("~" in name for name in taps.values)
    first = "block_group/block_0/shortcut_conv"
    kernel = params["block_group/~/block_0/~/shortcut_conv"]["w"]
    assert_close(taps.values[first], x @ kernel[0, 0], 1e-4)


def test_resnet18_as_published_is_captured():
    net = hk.transform_with_state(lambda x: hk.nets.ResNet18(3)(x, is_training=True))
    x = jnp.zeros((1, 32, 32, 3))
    params, state = jax.eval_shape(net.init, KEY, x)
    names = tapax.sites(net.apply)(params, state, None, x).names
    layers = {"/".join(p for p in name.split("/") if p != "~") for name in params}
    assert layers <= set(names) and "res_net18" in names


def test_a_capture_leaves_cached_traces_alone():
    net, params = ready("remat")
    step = jax.jit(jax.grad(lambda p, x: jnp.mean(net.apply(p, x) ** 2)))
    before = step(params, X)
    _, taps = tapax.capture(step)(params, X)
    close(taps.grads, expected(params, X)[1])
    for a, b in zip(*map(jax.tree.leaves, (before, step(params, X))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_values_and_gradients_stay_in_bfloat16():
    net, params = ready()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    loss = lambda p, x: jnp.mean(net.apply(p, x) ** 2)
    _, taps = tapax.capture(jax.grad(loss))(params, X.astype(jnp.bfloat16))
    assert all(v.dtype == jnp.bfloat16 for v in [*taps.values.values(), *taps.grads.values()])
    assert len(taps.grads) == 8


def test_selections_of_haiku_modules():
    net, params = ready()
    run = net.apply
    assert not tapax.capture(run, modules=False)(params, X)[1].values
    assert list(tapax.capture(run, "**/block*")(params, X)[1].values) == [
        "net/block",
        "net/block_1",
    ]
    only = lambda module, method: isinstance(module, hk.nets.MLP)
    assert list(tapax.capture(run, modules=only)(params, X)[1].values) == ["net/head"]
    with pytest.raises(SiteError, match="net/tail"):
        tapax.capture(run, "net/tail")(params, X)


@pytest.fixture(autouse=True)
def haiku_as_before():
    before = {cls: dict(cls.__dict__) for cls in (hk.Module, hk.Linear, Block)}
    yield
    assert before == {cls: dict(cls.__dict__) for cls in before}
    assert not interceptor_stack


def test_an_exception_restores_haiku():
    class Failing(hk.Module):
        def __call__(self, x):
            hk.Linear(D)(x)
            if not hk.running_init():
                raise RuntimeError("halfway")
            return x

    net = hk.without_apply_rng(hk.transform(lambda x: Failing()(x)))
    failing = net.init(KEY, X)
    for run in (net.apply, jax.jit(net.apply), jax.checkpoint(net.apply)):
        with pytest.raises(RuntimeError, match="halfway"):
            tapax.capture(run)(failing, X)
    net, params = ready()
    _, taps = tapax.capture(net.apply)(params, X)
    close(taps.values, expected(params, X)[0])


def test_captures_of_haiku_models_nest():
    net, params = ready()

    def outer(params, x):
        out, taps = tapax.capture(net.apply)(params, x)
        return net.apply(params, x), taps.values

    (_, inner), taps = tapax.capture(outer)(params, X)
    values = expected(params, X)[0]
    close(inner, values)
    calls = {name: taps.values[name] for name in values}
    close(calls, values)


def test_an_interceptor_of_the_user_still_works():
    net, params = ready()

    def double(run, args, kwargs, context):
        out = run(*args, **kwargs)
        return out * 2 if type(context.module) is Net and context.method_name == "__call__" else out

    def run(params, x):
        with hk.intercept_methods(double):
            return net.apply(params, x)

    out, _ = tapax.capture(run)(params, X)
    assert_close(out, 2 * net.apply(params, X))


def test_threads_capture_haiku_models_at_once():
    net, params = ready("remat")
    seen, failed = [], []
    start = threading.Barrier(4)

    def work(i):
        try:
            start.wait()
            for _ in range(2):
                if i % 2:
                    seen.append(tapax.capture(lambda p, x: net.apply(p, x))(params, X)[1].values)
                else:
                    net.apply(params, X)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(seen) == 4
    for values in seen:
        close(values, expected(params, X)[0])
