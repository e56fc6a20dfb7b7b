"""Gaussian processes of gpjax: networks in means and kernels, objectives, gpjax's fits."""

from collections.abc import Callable

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tapax
from tests.oracles import by_hand
from tests.oracles.closeness import assert_close

X = np.linspace(-1, 2, 6)[:, None]
Y = np.sin(3 * X)
NEW = np.array([[-0.5], [0.4], [2.5]])
NOISE, LENGTH, VARIANCE = 0.4, 0.8, 1.3
MODEL = "ConjugateModel"
MEAN, KERNEL = f"{MODEL}/prior/mean_function", f"{MODEL}/prior/kernel"


@pytest.fixture(autouse=True)
def wide():
    """Enable 64 bits, since gpjax warns about data in single precision."""
    with jax.enable_x64(True):
        yield


class NetworkMean(gpx.mean_functions.AbstractMeanFunction):
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear
    mark: Callable = eqx.field(static=True)

    def __call__(self, x):
        hidden = jnp.tanh(jax.vmap(self.hidden)(x))
        return self.mark(jax.vmap(self.out)(hidden), "mean")


class DeepKernel(gpx.kernels.AbstractKernel):
    """A kernel of features, as in gpjax's documentation of deep kernel learning."""

    base: gpx.kernels.AbstractKernel
    network: eqx.nn.Linear

    def __init__(self, base, network):
        self.base, self.network = base, network
        super().__init__()

    def __call__(self, x, y):
        return self.base(jnp.tanh(self.network(x)), jnp.tanh(self.network(y)))


def make(mark=by_hand.unmarked, base=None):
    keys = jax.random.split(jax.random.key(0), 3)
    linear = lambda i, o, key: eqx.nn.Linear(i, o, key=key)
    mean = NetworkMean(linear(1, 3, keys[0]), linear(3, 1, keys[1]), mark)
    base = base or gpx.kernels.RBF(lengthscale=LENGTH, variance=VARIANCE)
    prior = gpx.gps.Prior(mean_function=mean, kernel=DeepKernel(base, linear(1, 2, keys[2])))
    return prior * gpx.likelihoods.Gaussian(obs_stddev=NOISE)


def data():
    return gpx.Dataset(X=jnp.asarray(X), y=jnp.asarray(Y))


def loss(model, data):
    return -gpx.objectives.conjugate_mll(model, data)


def fit(model, **options):
    """Train for three steps with gpjax."""
    options = {"optim": optax.adam(0.05), "num_iters": 3, "verbose": False} | options
    return gpx.fit(model=model, objective=loss, train_data=data(), **options)


def recorder(seen):
    """Make a mark that appends every value of a plain run to `seen`, in order, by a callback."""

    def mark(x, name):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), x, ordered=True)
        return x

    return mark


def numbers(model):
    return jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))


class Formula:
    """The evidence of a model and its gradients, in NumPy."""

    def __init__(self, model):
        value = lambda parameter: np.asarray(gpx.parameters.val(parameter))
        mean, kernel = numbers(model.prior.mean_function), numbers(model.prior.kernel)
        self.hidden = X @ mean.hidden.weight.T + mean.hidden.bias
        self.mean_at = lambda x: (
            np.tanh(x @ mean.hidden.weight.T + mean.hidden.bias) @ mean.out.weight.T + mean.out.bias
        )
        self.features = X @ kernel.network.weight.T + kernel.network.bias
        self.features_at = lambda x: np.tanh(x @ kernel.network.weight.T + kernel.network.bias)
        self.length, self.variance = value(kernel.base.lengthscale), value(kernel.base.variance)
        self.mean, self.gram = self.mean_at(X), self.covariance(X, X)
        noise = value(model.likelihood.obs_stddev) ** 2 + float(model.prior.jitter)
        sigma = self.gram + noise * np.eye(len(X))
        self.inverse = np.linalg.inv(sigma)
        self.weights = self.inverse @ (Y - self.mean)
        fitness = ((Y - self.mean) * self.weights).sum()
        self.loss = 0.5 * (fitness + np.linalg.slogdet(2 * np.pi * sigma)[1])

    def apart(self, x, y):
        return (self.features_at(x)[:, None] - self.features_at(y)) / self.length

    def covariance(self, x, y):
        return self.variance * np.exp(-0.5 * (self.apart(x, y) ** 2).sum(-1))

    def by_gram(self):
        return 0.5 * (self.inverse - self.weights @ self.weights.T)

    def by_features(self):
        """Return the gradient by one of the two arguments of the kernel."""
        pull = (self.by_gram() * self.gram)[..., None] * -self.apart(X, X) / self.length
        return pull.sum(1) * (1 - np.tanh(self.features) ** 2)

    def by_hidden(self, out):
        return -self.weights * out * (1 - np.tanh(self.hidden) ** 2)


def test_sites_of_a_process_are_its_modules_and_marks():
    paths = tapax.sites(loss)(make(tapax.sow), data()).names
    parts = ["/hidden", "/out", "/mean", ""]
    assert [path for path in paths if path.startswith(MEAN)] == [MEAN + part for part in parts]
    for part in ("", ".gram:operator.matrix", "/base", "/base/lengthscale.unwrap", "/network@1"):
        assert KERNEL + part in paths
    assert f"{MODEL}/likelihood/obs_stddev.unwrap" in paths


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit])
def test_objective_has_the_values_and_gradients_of_the_formula(wrap):
    model = make(tapax.sow)
    step = wrap(eqx.filter_value_and_grad(loss))
    (value, grads), taps = tapax.capture(step)(model, data())
    plain = wrap(eqx.filter_value_and_grad(loss))(make(), data())
    formula = Formula(model)
    assert_close(value, formula.loss, 1e-8)
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), 1e-8)
    values = {
        f"{MEAN}/hidden": formula.hidden,
        f"{MEAN}/mean": formula.mean,
        f"{KERNEL}/network": formula.features,
        f"{KERNEL}/network@1": formula.features,
        f"{KERNEL}/base": formula.gram,
        f"{KERNEL}.gram:operator.matrix": formula.gram,
    }
    gradients = {
        f"{MEAN}/hidden": formula.by_hidden(np.asarray(model.prior.mean_function.out.weight)),
        f"{MEAN}/mean": -formula.weights,
        f"{KERNEL}/network": formula.by_features(),
        f"{KERNEL}/network@1": formula.by_features(),
        f"{KERNEL}/base": formula.by_gram(),
        f"{KERNEL}.gram:operator.matrix": formula.by_gram(),
        f"{MODEL}/likelihood.noise_vector": np.diagonal(formula.by_gram()),
    }
    for name, expected in values.items():
        assert_close(taps.values[name], expected, 1e-8, err_msg=name)
    for name, expected in gradients.items():
        assert_close(taps.grads[name], expected, 1e-7, err_msg=name)


def test_gradients_by_unwrapped_parameters_agree_with_differences():
    grads = tapax.grad(loss, at=[f"{KERNEL}/base/*.unwrap", f"{MEAN}/mean"])(
        make(tapax.sow), data()
    )
    shifted = lambda shift: make(lambda x, name: x + shift)
    expected = by_hand.differences(jax.jit(lambda s: loss(shifted(s), data())), np.zeros((6, 1)))
    assert_close(grads[f"{MEAN}/mean"], expected, 1e-6)

    @jax.jit
    def by_parameters(p):
        return loss(make(base=gpx.kernels.RBF(lengthscale=p[0], variance=p[1])), data())

    expected = by_hand.differences(by_parameters, np.array([LENGTH, VARIANCE]))
    lengths = [grads[f"{KERNEL}/base/lengthscale.unwrap{call}"] for call in ("", "@1")]
    assert_close(sum(lengths), expected[0], 1e-6)
    assert_close(grads[f"{KERNEL}/base/variance.unwrap"], expected[1], 1e-6)


def test_kernels_of_a_sum_have_their_own_sites():
    kernels = [gpx.kernels.RBF(lengthscale=LENGTH), gpx.kernels.Matern32(variance=VARIANCE)]
    model = make(base=kernels[0] + kernels[1])
    _, taps = tapax.capture(eqx.filter_value_and_grad(loss))(model, data())
    features = jnp.tanh(taps.values[f"{KERNEL}/network"])
    for i, kernel in enumerate(kernels):
        expected = [[kernel(x, y) for y in features] for x in features]
        assert_close(taps.values[f"{KERNEL}/base/kernels/{i}"], np.array(expected), 1e-8)
        assert_close(taps.grads[f"{KERNEL}/base/kernels/{i}"], taps.grads[KERNEL], 1e-8)


@pytest.mark.parametrize("verbose", [False, True])
def test_fit_by_gpjax_itself_is_seen_step_by_step(verbose):
    (model, history), taps = tapax.capture(lambda m: fit(m, verbose=verbose))(make(tapax.sow))
    plain, expected = fit(make())
    assert_close(history, expected, 1e-8)
    assert_close(jax.tree.leaves(model), jax.tree.leaves(plain), 1e-7)
    for i in range(3):
        formula = Formula(fit(make(), num_iters=i)[0] if i else make())
        assert_close(history[i], formula.loss, 1e-7)
        assert_close(taps.values[f"{MEAN}/mean"][i], formula.mean, 1e-7)
        assert_close(taps.grads[f"{MEAN}/mean"][i], -formula.weights, 1e-6)
        assert_close(taps.grads[f"{KERNEL}/network@1"][i], formula.by_features(), 1e-6)


@pytest.mark.filterwarnings("ignore:optax.tree_utils.tree_l2_norm is deprecated")
def test_line_searches_of_a_fit_keep_the_last_value():
    run = lambda model: gpx.fit_lbfgs(model=model, objective=loss, train_data=data(), max_iters=2)
    (model, value), taps = tapax.capture(run, values="**/mean", grads="**/mean")(make(tapax.sow))
    seen = []
    plain, expected = run(make(recorder(seen)))
    assert_close(value, expected, 1e-6)
    assert_close(jax.tree.leaves(model), jax.tree.leaves(plain), 1e-5)
    jax.effects_barrier()
    assert sum(taps.valid.values()) == len(seen)
    last = Formula(model)
    assert_close(taps.values[f"{MEAN}/mean@2"], seen[-1], 1e-6)
    assert_close(seen[-1], last.mean, 1e-6)
    assert_close(taps.grads[f"{MEAN}/mean@2"], -last.weights, 1e-5)


def test_edited_mean_changes_what_a_fit_learns():
    half = {"mean": lambda x: 0.5 * x}
    edited, history = tapax.edit(fit, values={f"{MEAN}/mean": half["mean"]})(make(tapax.sow))
    expected, losses = fit(make(by_hand.changed(half)))
    assert_close(history, losses, 1e-8)
    assert_close(jax.tree.leaves(edited), jax.tree.leaves(expected), 1e-7)
    assert not np.allclose(history, fit(make())[1])


def test_edited_kernel_changes_the_prediction_as_the_formula_does():
    def predict(model):
        return (model | data())(jnp.asarray(NEW)).mean

    formula = Formula(make())
    across = formula.covariance(NEW, X)
    mean = formula.mean_at(NEW)
    assert_close(predict(make()), (mean + across @ formula.weights)[:, 0], 1e-8)
    site = "ExactPosterior/prior/kernel.cross_covariance"
    out, taps = tapax.capture(predict)(make())
    assert_close(out, predict(make()), 1e-8)
    assert_close(taps.values[site], across.T, 1e-8)
    alone = tapax.edit(predict, values={site: jnp.zeros_like})
    assert_close(alone(make()), mean[:, 0], 1e-8)


def sparse(mark):
    """Make a sparse variational process for two classes, with three inducing points."""
    prior = gpx.gps.Prior(mean_function=make(mark).prior.mean_function, kernel=gpx.kernels.RBF())
    return gpx.variational_families.VariationalGaussian(
        model=prior * gpx.likelihoods.Bernoulli(), inducing_inputs=jnp.asarray(NEW)
    )


def bound(family, batch):
    return -gpx.objectives.elbo(family, batch)


def labels():
    return gpx.Dataset(X=jnp.asarray(X), y=jnp.asarray(Y > 0, float))


def test_minibatches_of_a_sparse_process_are_seen_as_they_are_drawn():
    def train(family):
        options = {"num_iters": 3, "batch_size": 2, "verbose": False}
        return gpx.fit(
            model=family, objective=bound, train_data=labels(), optim=optax.sgd(0.05), **options
        )[1]

    history, taps = tapax.capture(train, "**/mean", None)(sparse(tapax.sow))
    seen = []
    assert_close(history, train(sparse(recorder(seen))), 1e-7)
    jax.effects_barrier()
    calls = list(taps.values.values())
    assert [x.shape for x in calls] == [(3, 3, 1), (3, 2, 1), (3, 3, 1)]
    expected = [np.stack(seen[i::3]) for i in range(3)]
    for value, other in zip(calls, expected, strict=True):
        assert_close(value, other, 1e-7)


def test_gradients_of_a_sparse_process_agree_with_differences():
    grads = tapax.grad(bound, at="**/mean")(sparse(tapax.sow), labels())
    at_points = [x for x in grads.values() if len(x) == 6]
    fn = lambda shift: bound(sparse(lambda x, name: x + shift if len(x) == 6 else x), labels())
    expected = by_hand.differences(jax.jit(fn), np.zeros((6, 1)))
    assert_close(sum(at_points), expected, 1e-6)
    assert np.abs(expected).max() > 1e-3


def nearby(x, y):
    """Compute the exponential kernel, whose distance has no derivative at equal points."""
    return jnp.exp(-jnp.sqrt(jnp.sum((x - y) ** 2)))


class UserKernel(gpx.kernels.AbstractKernel):
    function: Callable = eqx.field(static=True)

    def __init__(self, function):
        self.function = function
        super().__init__()

    def __call__(self, x, y):
        return self.function(x, y)


def test_search_finds_the_distance_without_a_derivative():
    model = make(base=UserKernel(nearby))
    assert tapax.find_nonfinite(loss)(model, data()) is None
    found = tapax.find_nonfinite(lambda model: fit(model)[1])(model)
    assert (found.path, found.operation, found.phase) == (f"{KERNEL}/base", "div", "backward")
    assert (found.kind, found.iterations, found.mapped) == ("inf", (0,), (0, 0))


def test_search_finds_the_matrix_that_is_not_positive():
    assert tapax.find_nonfinite(loss)(make(), data()) is None
    model = make(base=UserKernel(lambda x, y: -3 * nearby(x, y)))
    found = tapax.find_nonfinite(loss)(model, data())
    assert (found.path, found.operation, found.kind) == (MODEL, "cholesky", "nan")
