"""`self.sow` and `self.perturb` of NNX under capture, and errors for bad input."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tapax
from tests.models.nnx_models import Net, X, affine, arrays, check, classes, close, loss, values


class Marks(nnx.Module):
    def __init__(self):
        self.lin = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = self.lin(x)
        self.sow(nnx.Intermediate, "h", h)
        self.sow(
            nnx.Intermediate, "total", h, init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + jnp.sum(b)
        )
        self.sow("probe", "odd:name", {"a": h, "b": 2 * h})
        return jnp.tanh(self.perturb("p", h))


deprecated = pytest.warns(DeprecationWarning, match="deprecated")
SITES = {"h", "total", "odd%3Aname:a", "odd%3Aname:b", "p", "lin"}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = classes()
    yield
    after = classes()
    for cls, attributes in before.items():
        assert after[cls] == attributes, cls


@pytest.fixture
def legacy():
    """Make a model that stored attributes in an eager run."""
    model = Marks()
    with deprecated:
        model(X)
    return model


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_marks_are_sites(wrap):
    model = Marks()
    before = nnx.graphdef(model)
    _, taps = tapax.capture(wrap(nnx.grad(loss)))(model, X)
    h = affine(X, model.lin)
    assert set(taps.values) == {"Marks", *(f"Marks/{s}" for s in SITES)}
    close(taps.values["Marks/h"], h)
    close(taps.values["Marks/total"], jnp.sum(h))
    close(taps.values["Marks/odd%3Aname:b"], 2 * h)
    close(taps.grads["Marks/p"], jax.grad(lambda h: jnp.sum(jnp.tanh(h) ** 2))(h))
    sites = taps.sites
    assert sites["Marks/h"].collection is sites["Marks/total"].collection is nnx.Intermediate
    assert sites["Marks/p"].collection is nnx.Perturbation
    assert sites["Marks/odd%3Aname:a"].collection is nnx.variable_type_from_name("probe")
    assert (sites["Marks/h"].kind, sites["Marks/p"].kind) == ("sow", "perturb")
    assert sites["Marks/h"].source.startswith(__file__)
    assert nnx.graphdef(model) == before


def test_a_sum_over_a_scan_is_the_total():
    model, x, total = Marks(), X, 0.0
    for _ in range(3):
        h = affine(x, model.lin)
        x, total = jnp.tanh(h), total + jnp.sum(h)
    runs = [
        lambda m, x: lax.scan(lambda c, _: (m(c), None), x, length=3)[0],
        lambda m, x: nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1])), (m, x))[1],
        lambda m, x: m(m(m(x))),
    ]
    for run in runs:
        out, taps = tapax.capture(run)(model, X)
        close(out, x)
        close(taps.values["Marks/total"], total)
        last = taps.values.get("Marks/h@2")
        close(taps.values["Marks/h"][-1] if last is None else last, h)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_attributes_neither_grow_nor_retrace(wrap, legacy):
    traces = []

    @wrap
    def step(m, x):
        traces.append(1)
        return m(x)

    for model in (Marks(), legacy):
        traces.clear()
        before = nnx.graphdef(model), arrays(model)
        captured = tapax.capture(step)
        for _ in range(3):
            _, taps = captured(model, X)
        assert len(traces) == 1
        assert nnx.graphdef(model) == before[0]
        for a, b in zip(arrays(model), before[1], strict=True):
            assert np.array_equal(a, b)
        close(taps.values["Marks/h"], affine(X, model.lin))
    with deprecated:
        legacy(X)
    assert len(legacy.h) == 2  # as usual outside a capture


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_program_reads_the_attributes_that_it_stored(wrap):
    """A loss of sown attributes has the same value under capture."""

    class Experts(Marks):
        def __call__(self, x):
            out = super().__call__(x)
            self.sow(nnx.Intermediate, "balance", jnp.mean(out))
            return out

    @wrap
    def step(m, x):
        def total(m):
            out = m(x)
            aux = nnx.pop(m, nnx.Intermediate)
            return jnp.sum(out**2) + aux["balance"][0], aux["h"][0]

        return nnx.value_and_grad(total, has_aux=True)(m)

    model = Experts()
    with deprecated:
        (expected, h), gradients = step(Experts(), X)
    ((value, aux), found), taps = tapax.capture(step)(model, X)
    close(value, expected)
    close(aux, h)
    for a, b in zip(arrays(found), arrays(gradients), strict=True):
        close(a, b)
    assert set(vars(model)) == set(vars(Marks()))
    close(taps.values["Experts/balance"], expected - jnp.sum(jnp.tanh(h) ** 2))


def test_a_loop_that_cannot_carry_attributes():
    """Flax rejects the plain program; in a capture, its marks are only sites."""
    run = lambda m, x: nnx.while_loop(
        lambda c: c[2] < 3, lambda c: (c[0], c[0](c[1]), c[2] + 1), (m, x, 0)
    )[1]
    with pytest.raises(ValueError, match="while_loop"), deprecated:
        run(Marks(), X)
    model, x = Marks(), X
    for _ in range(3):
        h = affine(x, model.lin)
        x = jnp.tanh(h)
    out, taps = tapax.capture(run)(model, X)
    close(out, x)
    close(taps.values["Marks/h"], h)


def test_a_perturbation_that_the_model_has_is_added(legacy):
    legacy.p.set_value(jnp.full((4, 3), 0.5))
    out, taps = tapax.capture(legacy)(X)
    close(out, jnp.tanh(affine(X, legacy.lin) + 0.5))
    close(taps.values["Marks/p"], affine(X, legacy.lin) + 0.5)


def test_an_attribute_of_another_type_is_an_error_still():
    model = Marks()
    model.h = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match="Expected 'h' to be of type 'Intermediate'"):
        tapax.capture(model)(X)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_captures_of_flax_work_inside_a_capture(wrap):
    model = Marks()
    run = wrap(lambda m, x: nnx.capture(lambda m, x: m(x), nnx.Intermediate)(m, x))
    (out, state), taps = tapax.capture(run)(model, X)
    h = affine(X, model.lin)
    close(state["h"][0], h)
    close(state["total"][...], jnp.sum(h))
    close(taps.values["Marks/h"], h)
    close(taps.values["Marks/total"], jnp.sum(h))
    assert not hasattr(model, "__captures__")


def test_values_and_gradients_stay_in_bfloat16():
    model = nnx.Linear(3, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2)))
    _, taps = tapax.capture(step)(model, X.astype(jnp.bfloat16))
    assert taps.values["Linear"].dtype == taps.grads["Linear"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (False, set()),
        (True, set(values(Net(), X))),
        ("**/lin", {"blocks/0/lin", "blocks/1/lin"}),
        (["Net", "Net/head"], {"", "head"}),
        (
            lambda module, method: isinstance(module, nnx.Linear),
            {"blocks/0/lin", "blocks/1/lin", "head"},
        ),
        (lambda site: site.module is Net, {""}),
        (lambda site: site.shape == (4, 2), {"head", ""}),
    ],
    ids=["no", "yes", "glob", "list", "filter", "class", "shape"],
)
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_modules_argument_narrows_nnx_sites(modules, expected, wrap):
    model = Net()
    run = wrap(lambda m, x: tapax.sow(m(x), "out"))
    _, taps = tapax.capture(run, modules=modules)(model, X)
    close(taps.values.pop("out"), values(model, X)[""])
    check(taps.values, {k: v for k, v in values(model, X).items() if k in expected})


def test_private_methods_by_filter_alone():
    class Private(Net):
        def _hidden(self, x):
            return self.encode(x)

        def __call__(self, x):
            return self.head(self._hidden(x))

    _, taps = tapax.capture(Private())(X)
    assert "Private._hidden" not in taps.values and "Private.encode" in taps.values
    _, taps = tapax.capture(Private(), modules=lambda module, method: method == "_hidden")(X)
    assert set(taps.values) == {"Private._hidden"}


def test_selections_of_nnx_modules():
    model = Net()
    step = nnx.jit(nnx.grad(loss))
    _, taps = tapax.capture(step, values="**/lin", grads=lambda site: site.module is nnx.Linear)(
        model, X
    )
    assert set(taps.values) == {"Net/blocks/0/lin", "Net/blocks/1/lin"}
    assert set(taps.grads) == {*taps.values, "Net/head"}
    with pytest.raises(tapax.SiteError, match="'Net/blocks/1/lin'"):
        tapax.capture(step, values="Net/block/1/lin")(model, X)


class Fails(Net):
    def __call__(self, x):
        self.head.bias[...] += 1
        self.sow(nnx.Intermediate, "x", x)
        self.encode(x)
        raise KeyError("halfway")


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, jax.jit], ids=["eager", "nnx", "jax"])
def test_an_exception_leaves_the_model_unchanged(wrap):
    model = Fails()
    before = nnx.graphdef(model), arrays(model)
    for run in (tapax.capture, tapax.sites):
        with pytest.raises(KeyError, match="halfway"):
            run(wrap(lambda m, x: m(x)))(model, X)
        assert nnx.graphdef(model) == before[0]
        for a, b in zip(arrays(model), before[1], strict=True):
            assert np.array_equal(a, b)
    _, taps = tapax.capture(Net())(X)
    check(taps.values, values(Net(), X))


def test_captures_of_nnx_models_nest():
    model = Net()
    inner = tapax.capture(lambda m, x: m(x), values="**/lin", grads=None)

    def outer(m, x):
        out, taps = inner(m, x)
        return out, taps.values

    (out, seen), taps = tapax.capture(outer)(model, X)
    assert set(seen) == {"Net/blocks/0/lin", "Net/blocks/1/lin"}
    check(taps.values, values(model, X))
    close(seen["Net/blocks/1/lin"], taps.values["Net/blocks/1/lin"])


def test_threads_with_one_model():
    """One thread captures while the other runs the plain model, or captures too."""
    model, found, errors = Net(), {}, []
    barrier = threading.Barrier(4)

    def work(i):
        try:
            barrier.wait()
            for k in range(4):
                x = X + i
                if i % 2:
                    found[i, k] = model(x), None
                else:
                    out, taps = tapax.capture(lambda m, x: m(x))(model, x)
                    found[i, k] = out, taps.values
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (i, _), (out, seen) in found.items():
        expected = values(model, X + i)
        close(out, expected[""], 1e-4)
        if seen is not None:
            check(seen, expected, tol=1e-4)


def test_modules_are_copied_and_pickled_under_a_capture():
    model = Net()

    def run(m, x):
        copied = copy.deepcopy(m)
        kind = pickle.loads(pickle.dumps(type(m)))
        assert kind is Net and type(copied) is Net
        return copied(x), nnx.clone(m)(x)

    (a, b), taps = tapax.capture(run)(model, X)
    close(a, b)
    check({k: v for k, v in taps.values.items() if "@" not in k}, values(model, X))
    assert pickle.loads(pickle.dumps(Net.__call__)) is Net.__call__


def test_a_class_made_inside():
    def run(x):
        class Local(nnx.Module):
            def __init__(self):
                self.net = Net()

            def __call__(self, x):
                return self.net(x)

        return Local()(x)

    _, taps = tapax.capture(run)(X)
    close(taps.values["Local/net/head"], values(Net(), X)["head"])


def test_mutation_from_another_level_is_an_error_still():
    model = Net()

    def run(x):
        def inner(x):
            model.head.bias[...] += jnp.sum(x)
            return x

        return jax.jit(inner)(x)

    with pytest.raises(Exception, match="different trace level"):
        tapax.capture(run)(X)
    close(model.head.bias[...], Net().head.bias[...])
