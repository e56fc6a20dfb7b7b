"""The network of examples/structure_factor: its numbers against a perceptron in NumPy, its layers
against that perceptron's backward pass written by hand, its sensitivities against differences."""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tapax
from examples.structure_factor import __main__ as command
from examples.structure_factor import explain, train
from examples.structure_factor.model import Maxima, NNModel
from examples.structure_factor.plasma import CARBON
from tests.oracles.closeness import assert_close

pytestmark = pytest.mark.once

MAXIMA = [100.0, 10.0, 4.0, 8.0]
LAYERS = [f"NNModel/layers/{i}" for i in range(5)]


def new(species=1, **options):
    maxima = [*MAXIMA[:2], *[4.0] * species, MAXIMA[-1]]
    return NNModel(species, maxima, rngs=nnx.Rngs(0), **options)


def rows(count=6, species=1, seed=0):
    high = np.array([*MAXIMA[:2], *[4.0] * species, MAXIMA[-1]])
    return (np.random.default_rng(seed).uniform(0.1, 1, (count, len(high))) * high).astype("f")


def by_hand(model, x, out_gradient=None):
    """Compute the result of each layer, and its gradient, in 64 bits."""
    weights = [
        (np.asarray(l.kernel[...], float), np.asarray(l.bias[...], float)) for l in model.layers
    ]
    values, a = [], np.asarray(x, float) / np.asarray(model.maxima[...], float)
    for kernel, bias in weights:
        values.append(a @ kernel + bias)
        a = values[-1] / (1 + np.exp(-values[-1]))
    g = np.zeros_like(values[-1]) if out_gradient is None else out_gradient(values[-1])
    if out_gradient is None:
        g[..., 0] = 1
    grads = [g]
    for (kernel, _), z in zip(weights[:0:-1], values[-2::-1], strict=True):
        s = 1 / (1 + np.exp(-z))
        g = (g @ kernel.T) * (s + z * s * (1 - s))
        grads.insert(0, g)
    return values, grads, g @ weights[0][0].T / np.asarray(model.maxima[...], float)


def gradient_close(found, expected):
    assert_close(found, expected, 2e-4, scale=np.abs(expected).max())


def assert_intact(model, x, before):
    assert (model(x) == before).all()
    nnx.split(model)


@pytest.mark.parametrize("name", ["model", "train", "explain"])
def test_docstrings_of_the_network_run(name):
    module = importlib.import_module(f"examples.structure_factor.{name}")
    assert doctest.testmod(module).failed == 0


def test_number_of_network_parameters():
    model = new()
    count = lambda *kinds: sum(x.size for x in jax.tree.leaves(nnx.state(model, *kinds)))
    assert count(nnx.Param) == 33473 and count(Maxima) == 4
    assert [l.out_features for l in model.layers] == [64, 128, 128, 64, 1]


@pytest.mark.parametrize("species", [1, 2, 3])
def test_network_output_agrees_with_numpy(species):
    model, x = new(species), rows(species=species)
    assert_close(model(x), by_hand(model, x)[0][-1])
    S = model.matrix(x)
    assert S.shape == (6, species, species) and (S.swapaxes(1, 2) == S).all()
    a, b = np.triu_indices(species)
    assert (S[:, a, b] == model(x)).all()
    assert model(x[0]).shape == (species * (species + 1) // 2,)


def test_a_loaded_model_equals_the_saved_one(tmp_path):
    model, x = new(2, widths=(8, 16)), rows(species=2)
    model.save(tmp_path / "model")
    twin = NNModel.load(tmp_path / "model")
    assert (twin.species, twin.widths) == (2, (8, 16)) and (twin(x) == model(x)).all()
    for a, b in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(twin)), strict=True
    ):
        assert a.dtype == b.dtype and (a == b).all()
    assert type(twin.maxima) is Maxima
    with pytest.raises(FileExistsError, match="which exists; a model is saved to a new folder"):
        model.save(tmp_path / "model")
    for path in (tmp_path / "nothing", tmp_path, "nowhere"):
        with pytest.raises(
            FileNotFoundError, match=r"which is not a folder that NNModel\.save wrote"
        ):
            NNModel.load(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: new()(rows()[:, :3]),
            "x has the shape (6, 3); its last axis must be 4: T, rho, 1 charges, and k.",
        ),
        (
            lambda: new()(3.0),
            "x has the shape (); its last axis must be 4: T, rho, 1 charges, and k.",
        ),
        (lambda: NNModel(0, MAXIMA, rngs=nnx.Rngs(0)), "species is 0, and must be at least 1."),
        (
            lambda: NNModel(2, MAXIMA, rngs=nnx.Rngs(0)),
            "maxima is [100.0, 10.0, 4.0, 8.0], and must be 5 numbers greater than zero: "
            "of T, rho, 2 charges, and k.",
        ),
        (
            lambda: NNModel(1, [1, 1, 0, 1], rngs=nnx.Rngs(0)),
            "maxima is [1.0, 1.0, 0.0, 1.0], and must be 4 numbers greater than zero: "
            "of T, rho, 1 charges, and k.",
        ),
    ],
)
def test_bad_input_of_the_network(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


def test_bad_input_leaves_the_model_whole():
    model, x = new(), rows()
    before = model(x)
    with pytest.raises(ValueError, match="its last axis must be 4"):
        model(x[:, :3])
    assert_intact(model, x, before)


@pytest.mark.parametrize("look", [explain.under_jax_grad, explain.under_nnx_grad])
@pytest.mark.parametrize("species", [1, 2])
def test_layer_values_and_gradients_agree_with_numpy(look, species):
    model, x = new(species), rows(species=species)
    before = model(x)
    for _ in range(2):  # first traced, then from the cache
        dS, taps = look(model, jnp.asarray(x))
        values, grads, by_x = by_hand(model, x)
        for of_one, expected in zip(dS.T, by_x.T, strict=True):  # in a separate unit
            gradient_close(of_one, expected)
        assert list(taps.values) == list(taps.grads) and set(taps.values) == {"NNModel", *LAYERS}
        for i, name in enumerate(LAYERS):
            assert_close(taps.values[name], values[i])
            # A value that is equal for all rows, such as the last layer's ones, has no mapped axis.
            found = np.broadcast_to(taps.grads[name], grads[i].shape)
            gradient_close(found, grads[i])
        assert_close(taps.values["NNModel"], before)
        assert_intact(model, x, before)


def test_layers_of_a_loss_that_closes_over_the_model():
    model, x = new(), rows()
    before = model(x)
    loss = lambda x: model(x).sum()
    found = tapax.grad(loss)(jnp.asarray(x))
    for name, g in zip(LAYERS, by_hand(model, x)[1], strict=True):
        gradient_close(found[name], g)
    between = tapax.jacobian(model, of="NNModel", wrt=LAYERS[2])(jnp.asarray(x[0]))
    gradient_close(between[0], by_hand(model, x[0])[1][2])
    assert_intact(model, x, before)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: jax.grad(lambda x: model(x).sum()),
        lambda model: jax.vmap(jax.grad(lambda x: model(x)[0])),
        lambda model: jax.jit(jax.grad(lambda x: model(x).sum())),
        lambda model: jax.vmap(lambda x: model(x)),
    ],
)
def test_a_model_that_is_closed_over(wrap):
    """Flax raises for writes to a closed-over model, and leaves it broken."""
    model, x = new(), jnp.asarray(rows())
    before = model(x)
    _, taps = tapax.capture(wrap(model))(x)
    assert_close(taps.values[LAYERS[0]], by_hand(model, x)[0][0])
    assert_intact(model, x, before)


def test_captured_layers_of_a_training_step_are_those_by_hand():
    model, x = new(), rows(32)
    y = np.linspace(0.2, 1.2, 32, dtype="f")[:, None]
    data = train.Data(x, y, 8)
    optimizer = train.new_optimizer(model, 100)
    twin, twin_optimizer = nnx.clone((model, optimizer))
    values, grads, _ = by_hand(model, x, lambda S: 2 * (S - y) / len(S))
    loss, taps = explain.in_training(model, optimizer, data)
    assert loss == pytest.approx(np.mean((values[-1] - y) ** 2), rel=1e-4)
    for i, name in enumerate(LAYERS):
        assert_close(taps.values[name], values[i])
        gradient_close(taps.grads[name], grads[i])
    train.train_step(twin, twin_optimizer, x, y)
    for a, b in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(twin)), strict=True
    ):
        assert_close(a, b)
    np.testing.assert_array_equal(model.maxima[...], MAXIMA)


@pytest.mark.many
def test_sensitivities_agree_with_finite_differences():
    model, x = new(2), rows(species=2).astype(float)
    with jax.enable_x64(True):
        wide = nnx.clone(model)
        nnx.update(wide, jax.tree.map(lambda a: a.astype(jnp.float64), nnx.state(wide)))
        ours = explain.network_sensitivity(wide, x)
        steps = 1e-5 * x.max(0) * np.eye(x.shape[1])
        differences = np.stack([(wide(x + e) - wide(x - e)) / (2 * e.max()) for e in steps], -1)
    assert ours.shape == (6, 3, 5) and ours.dtype == jnp.float64
    np.testing.assert_allclose(ours, differences, rtol=1e-6, atol=1e-8)
    narrow = explain.network_sensitivity(model, x.astype("f"))
    for of_one, expected in zip(narrow.T, ours.T, strict=True):
        gradient_close(of_one, expected)


@pytest.mark.many
def test_sensitivities_of_the_solver():
    state, k = np.array([10.0, 3.5, 4.0]), np.array([0.0, 1.0, 4.0])
    ours = explain.solver_sensitivity(CARBON, state, k)[:, 0]

    def S(state, k):
        return CARBON.structure_factors(state[0], state[1], state[2:], k, **train.GRID)[:, 0, 0]

    steps = 1e-4 * state * np.eye(3)
    by_state = np.stack([(S(state + e, k) - S(state - e, k)) / (2 * e.max()) for e in steps], -1)
    np.testing.assert_allclose(ours[:, :3], by_state, atol=1e-6)
    by_k = (S(state, k + 1e-4) - S(state, np.abs(k - 1e-4))) / 2e-4
    np.testing.assert_allclose(ours[:, 3], by_k, atol=1e-6)


@pytest.mark.many
def test_training_data_cover_their_range():
    data = train.make_data(CARBON, 40, 8, quiet=True)
    limits = train.Range()
    for i, (low, high) in enumerate((limits.T, limits.rho, limits.Z, limits.k)):
        assert low <= data.x[:, i].min() and data.x[:, i].max() <= high
    learned, held_out = train.split(data, 0.1)
    assert len(learned.x) == 36 * 8 and len(held_out.x) == 4 * 8
    assert not set(map(tuple, learned.x[:, :3])) & set(map(tuple, held_out.x[:, :3]))
    T, rho, Z = (data.x[:32:8, i].astype(float) for i in range(3))
    k = data.x[:32, 3].reshape(4, 8)
    fine = CARBON.structure_factors(T, rho, Z[:, None], k)
    np.testing.assert_allclose(data.y[:32].reshape(4, 8), fine[..., 0, 0], atol=2e-5)
    again = train.make_data(CARBON, 40, 8, quiet=True)
    assert (again.x == data.x).all() and (again.y == data.y).all()


def test_states_that_do_not_converge_are_an_error(monkeypatch):
    monkeypatch.setattr(train, "GRID", {**train.GRID, "iterations": 1})
    with pytest.raises(RuntimeError, match="did not converge for 20 of 20 states, among them T = "):
        train.make_data(CARBON, 20, 8, quiet=True)


@pytest.mark.many
def test_training_learns_the_solver_and_its_derivatives():
    data, held_out = train.split(train.make_data(CARBON, 512, 32, quiet=True))
    model, _ = train.train(data, 1500, quiet=True)
    root, worst = train.errors(model, held_out)
    assert root < 0.03 and worst < 0.25 and root < 0.2 * held_out.y.std()
    state, k = [10.0, 3.5, 3.0], np.linspace(0.5, 6, 12)
    x = explain.rows_of(state, k)
    network = np.asarray(explain.network_sensitivity(model, x.astype("f"))[:, 0] * x)
    solver = explain.solver_sensitivity(CARBON, state, k)[:, 0] * x
    assert np.corrcoef(network.ravel(), solver.ravel())[0, 1] > 0.95


@pytest.mark.many
@pytest.mark.parametrize("to", ["out", None])
def test_command_writes_network_and_plots(to, tmp_path, monkeypatch, capsys):
    """The command writes to the given folder, or to a new one next to those of earlier runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "structure_factor").mkdir()
    command.main(["--quick", "--species", "CH", *(["--to", to] if to else [])])
    folder = tmp_path / (to or "structure_factor-2")
    said = capsys.readouterr().out
    assert "it has not seen, S is off by" in said and "NNModel/layers/4" in said
    model = NNModel.load(folder / "model")
    assert np.isfinite(model(rows(species=2))).all()
    assert {p.name for p in folder.glob("*.png")} == {"layers.png", "structure_factor.png"}


def test_command_refuses_a_folder_that_exists(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--quick", "--to", str(tmp_path)])
    assert f"--to is {tmp_path}, which exists; name a new folder." in capsys.readouterr().err
