"""`find_nonfinite` on faults planted by hand: operation, line, iteration, index, device, ranges."""

import importlib
import inspect

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tapax.nonfinite._finding import Range
from tapax.nonfinite._passes import describe_value
from tapax.nonfinite._search import find_nonfinite


def line(fn, offset=1):
    """Return the line of a function's body."""
    return f"{__file__}:{inspect.getsourcelines(fn)[1] + offset}"


def bad_log(x):
    return jnp.log(x)


def bad_root(x):
    return jnp.sqrt(x)


def test_fault_in_straight_code():
    x = jnp.array([[1.0, 2.0], [4.0, -3.0]], jnp.float32)
    found = find_nonfinite(lambda x: bad_log(x) * 2)(x)
    assert (found.operation, found.kind, found.phase) == ("log", "nan", "forward")
    assert found.source == line(bad_log)
    assert (found.index, found.count, found.shape) == ((1, 1), 1, (2, 2))
    assert found.dtype == jnp.float32
    assert found.operands == (Range((2, 2), jnp.dtype("float32"), -3.0, 4.0, 0),)
    assert (found.path, found.iterations, found.loops) == ("", (), ())
    assert (found.mapped, found.device) == ((), {})
    assert find_nonfinite(lambda x: bad_log(x) * 2)(jnp.abs(x)) is None


def test_report_names_every_place():
    def step(xs):
        def body(c, x):
            return c, jax.vmap(bad_log)(x)

        return lax.scan(body, 0.0, xs)[1]

    found = find_nonfinite(step)(jnp.ones((4, 3, 2), jnp.float32).at[2, 1, 0].set(-1.5))
    first, operand, result = str(found).splitlines()
    assert first.startswith("The first non-finite value is a NaN made by `log`, at ")
    assert first.endswith(
        ", in the forward pass, iteration 2 of scan[4], example 1 of a vmap over 3."
    )
    assert operand == "  operand 0  float32[3,2]  from -1.5 to 1"
    assert result == "  result     float32[3,2]  1 of 6 is NaN, first at [1, 0]"


def test_report_of_an_unexplained_result_is_two_sentences():
    found = describe_value("result", "0", jnp.array([1.0, jnp.nan]))
    assert str(found).splitlines()[0] == (
        "The first non-finite value is a NaN in the result 0. No operation explains it: the value "
        "is finite if the program is compiled differently."
    )


def test_masked_and_swallowed_values_are_not_findings_unless_asked_for():
    x = jnp.array([1.0, -1.0])
    masking = lambda x: jnp.where(x > 0, bad_log(x), 0.0)
    swallowing = lambda x: 1 / jnp.exp(1000 * jnp.abs(x))
    for fn, op in ((masking, "log"), (swallowing, "exp")):
        assert find_nonfinite(fn)(x) is None
        assert find_nonfinite(fn, masked=True)(x).operation == op
        assert find_nonfinite(fn, masked=True)(jnp.array([0.01, 0.01])) is None
    inside = lambda x: lax.scan(lambda c, x: (c + masking(x), None), 0.0, x)[0]
    assert find_nonfinite(inside)(x) is None
    assert find_nonfinite(inside, masked=True)(x).iterations == (1,)


def test_mask_that_hides_a_fault_in_another_place_hides_nothing_else():
    def fn(x):
        first = jnp.where(x > 0, jnp.sqrt(x), 0.0)
        return first + jnp.log(1 - x)

    found = find_nonfinite(fn)(jnp.array([-1.0, 2.0]))
    assert found.source == line(fn, 2) and found.index == (1,)


def test_slope_of_a_masked_value_is_found_in_the_backward_pass():
    loss = lambda x: jnp.sum(jnp.where(x > 0, bad_root(x), 0.0))
    assert find_nonfinite(loss)(jnp.array([4.0, 0.0])) is None
    found = find_nonfinite(jax.jit(jax.grad(loss)))(jnp.array([4.0, 0.0]))
    assert (found.phase, found.source, found.kind) == ("backward", line(bad_root), "inf")
    assert found.index == (1,)


def test_forward_value_of_a_gradient_is_of_the_forward_pass():
    loss = lambda x: jnp.sum(bad_root(x))
    found = find_nonfinite(jax.value_and_grad(loss))(jnp.array([-4.0]))
    assert (found.phase, found.operation) == ("forward", "sqrt")


def test_intended_constants_are_not_findings():
    soft = lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))
    assert find_nonfinite(soft)(jnp.array([1.0, -1.0])) is None
    # If everything is masked, inf - inf is a NaN.
    found = find_nonfinite(soft)(jnp.array([-1.0, -1.0]))
    assert (found.operation, found.kind) == ("sub", "nan")
    # A NaN or infinity that combines with a constant is still the fault.
    both = lambda x: jax.nn.softmax(jnp.where(jnp.arange(2) > 0, bad_log(x), -jnp.inf))
    assert find_nonfinite(both)(jnp.array([-1.0, 1.0])) is None
    assert find_nonfinite(both)(jnp.array([1.0, -1.0])).operation == "log"
    returned = find_nonfinite(lambda x: jnp.where(x > 0, x, -jnp.inf))(jnp.array([1.0, -1.0]))
    assert (returned.operation, returned.kind) == ("constant", "inf")
    assert "is an infinity that is a constant, at " in str(returned)


def test_fault_in_an_argument_is_named():
    importlib.import_module("brainstate")  # brainstate unpacks every call

    def step(params, batch):
        return params["w"] * batch

    found = find_nonfinite(step)({"w": jnp.ones(2), "z": jnp.inf}, jnp.array([1.0, jnp.nan]))
    assert (found.operation, found.path, found.kind) == ("argument", "batch", "nan")
    assert found.index == (1,) and "in the argument batch" in str(found)
    # Bad values that the program makes come before bad arguments.
    found = find_nonfinite(lambda best, x: (best, bad_log(x)))(jnp.inf, -1.0)
    assert found.operation == "log"
    assert find_nonfinite(step)({"w": jnp.ones(2), "z": jnp.nan}, jnp.ones(2)) is None


def test_a_closed_over_array_is_a_constant():
    bad = jnp.array([1.0, jnp.nan])
    found = find_nonfinite(lambda x: x + bad)(1.0)
    assert (found.operation, found.kind, found.index) == ("constant", "nan", (1,))


def in_while(x):
    step = lambda c: (c[0] + 1, c[1] + bad_log(3.5 - c[0]))
    return lax.while_loop(lambda c: c[0] < 6, step, (0, x))[1]


def in_nested_loops(x):
    inner = lambda i: lambda j, c: c + jnp.where((i == 1) & (j == 2), bad_log(-c), 0.0)
    return lax.scan(lambda c, i: (lax.fori_loop(0, 4, inner(i), c), None), x, jnp.arange(3))[0]


def in_mapped_while(x):
    step = lambda c: (c[0] + 1, c[1] + bad_log(2.5 - c[0]))
    one = lambda n: lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]
    return jax.vmap(one)(jnp.array([2, 5, 4]))


def in_branch_of_scan(x):
    body = lambda c, i: (lax.cond(i == 3, lambda c: bad_log(-c), lambda c: c + 1, c), c)
    return lax.scan(body, x, jnp.arange(5))


def in_map(x):
    return lax.map(lambda i: bad_log(x + 2.5 - i), jnp.arange(5.0))


def in_associative_scan(x):
    return lax.associative_scan(jnp.add, bad_log(jnp.array([x, -x, x])))


@pytest.mark.parametrize(
    ("fn", "iterations", "loops", "mapped"),
    [
        (in_while, (4,), ("while",), ()),
        (in_nested_loops, (1, 2), ("scan[3]", "scan[4]"), ()),
        (in_mapped_while, (3,), ("while",), (1,)),
        (in_branch_of_scan, (3,), ("scan[5]",), ()),
        (in_map, (4,), ("scan[5]",), ()),
        (in_associative_scan, (), (), ()),
    ],
)
def test_fault_in_control_flow(fn, iterations, loops, mapped):
    for call in (fn, jax.jit(fn), jax.checkpoint(fn)):
        found = find_nonfinite(call)(1.0)
        assert (found.operation, found.source) == ("log", line(bad_log))
        assert (found.iterations, found.loops) == (iterations, loops)
    assert found.mapped == mapped


def test_iterations_of_a_backward_pass_are_those_of_the_forward_pass():
    def loss(w):
        body = jax.checkpoint(lambda c, w: (c + bad_root(c * w), None))
        return lax.scan(body, 1.0, w)[0]

    found = find_nonfinite(jax.grad(loss))(jnp.array([1.0, 0.0, 2.0, 1.0]))
    assert (found.phase, found.iterations, found.loops) == ("backward", (1,), ("scan[4]",))
    assert found.source == line(bad_root)


def test_one_traced_function_called_in_many_places():
    @jax.jit
    def inner(x):
        return bad_log(x)

    def fn(x):
        a = inner(x)
        b = inner(x - 2)
        return a + b

    found = find_nonfinite(fn)(1.0)
    assert found.operands[0].min == -1.0


def test_function_of_a_library_is_on_the_line_that_calls_it():
    def fn(x):
        y = jax.nn.softplus(x)
        return jnp.linalg.norm(y) + jax.nn.logsumexp(x / 0)

    found = find_nonfinite(jax.grad(lambda x: jnp.linalg.norm(x * 1.0)))(jnp.zeros(3))
    assert found.phase == "backward" and found.source.startswith(__file__)
    assert find_nonfinite(fn)(jnp.ones(3)).source == line(fn, 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_fault_on_some_devices_of_a_mesh(mesh, check_vma):
    def local(x):
        def body(c, i):
            return c + bad_log(x + 3.5 - i), None

        total = lax.scan(body, jnp.zeros_like(x), jnp.arange(5.0))[0]
        return lax.psum(total, "b")

    specs = {"in_specs": PartitionSpec("a", "b"), "out_specs": PartitionSpec("a")}
    fn = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    x = jnp.ones((4, 2))
    assert find_nonfinite(fn)(x) is None
    found = find_nonfinite(fn)(x.at[1, 1].set(0.0))
    assert found.device == {"a": 0, "b": 1}
    assert (found.iterations, found.index, found.source) == ((4,), (1, 0), line(bad_log))
    assert found.operands[0].min == -0.5
    # The finding names the device that made a bad value, even if that device sent it away.
    ring = [(0, 1), (1, 0)]

    def sent(x):
        mine = lax.ppermute(bad_log(x), "a", ring)
        return jnp.where(jnp.isnan(x + lax.axis_index("a")), 0.0, mine)

    fn = jax.shard_map(
        sent, mesh=mesh, check_vma=check_vma, **specs | {"out_specs": specs["in_specs"]}
    )
    found = find_nonfinite(fn)(x.at[3, 0].set(-1.0))
    assert (found.operation, found.device) == ("log", {"a": 1, "b": 0})


def test_fault_with_sharded_arguments():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, PartitionSpec("a")))
    fn = jax.jit(lambda x: bad_log(x).sum())
    assert find_nonfinite(fn)(x) is None
    assert find_nonfinite(fn)(x.at[6, 1].set(-1)).index == (6, 1)


def test_linear_solve_and_custom_rules():
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * bad_log(x),))
    loss = lambda x: jnp.sum(f(x))
    at = inspect.getsourcelines(loss)[1]
    found = find_nonfinite(jax.value_and_grad(loss))(jnp.array([-1.0]))
    # JAX attributes the rule to the line that calls the function.
    assert (found.operation, found.source) == ("log", f"{__file__}:{at}")
    assert find_nonfinite(loss)(jnp.array([-1.0])) is None
    solve = lambda a, b: jnp.linalg.solve(a, b)
    assert find_nonfinite(solve)(jnp.eye(2), jnp.ones(2)) is None
    assert find_nonfinite(solve)(jnp.zeros((2, 2)), jnp.ones(2)) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "float8_e5m2"])
def test_fault_in_every_float_type(dtype):
    x = jnp.array([1.0, 2.0]).astype(dtype)
    assert find_nonfinite(lambda x: x + x)(x) is None
    found = find_nonfinite(lambda x: x / (x - x))(x)
    assert (found.operation, found.dtype, found.count) == ("div", jnp.dtype(dtype), 2)


def test_nnx_step_that_returns_nothing():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return x + bad_root(self.inner(x) * 0)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x):
        optimizer.update(net, nnx.grad(lambda net: jnp.mean(net(x)))(net))

    before = jax.tree.map(np.asarray, nnx.state((net, optimizer)))
    found = find_nonfinite(step)(net, optimizer, jnp.ones((2, 3)))
    assert (found.phase, found.operation, found.path) == ("backward", "div", "Net/blocks/0")
    assert found.source == line(bad_root)
    after = jax.tree.map(np.asarray, nnx.state((net, optimizer)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_fault_in_an_equinox_step():
    class Net(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = bad_log(layer(x) ** 2)
            return x

    net = Net([eqx.nn.Linear(2, 2, key=jax.random.key(i)) for i in range(2)])

    @eqx.filter_jit
    def step(net, x):
        return eqx.filter_value_and_grad(lambda net: jnp.sum(net(x)))(net)

    found = find_nonfinite(step)(
        eqx.tree_at(lambda n: n.layers[1].weight, net, jnp.zeros((2, 2))), jnp.ones(2)
    )
    assert found is None  # the bias is not zero
    zero = eqx.tree_at(
        lambda n: (n.layers[1].weight, n.layers[1].bias), net, (jnp.zeros((2, 2)), jnp.zeros(2))
    )
    found = find_nonfinite(step)(zero, jnp.ones(2))
    assert (found.path, found.operation, found.kind) == ("Net", "log", "inf")
    assert find_nonfinite(step)(net, jnp.array([jnp.nan, 1.0])).path.endswith("x")


def test_findings_in_linen_and_haiku_name_the_module():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bad_log(nn.Dense(2)(x) * 0)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner(name="inner")(x)

    net = Net()
    params = net.init(jax.random.key(0), jnp.ones(2))
    found = find_nonfinite(jax.jit(net.apply))(params, jnp.ones(2))
    assert (found.path, found.operation, found.source) == ("Net/inner", "log", line(bad_log))
    init, apply = hk.transform(lambda x: bad_log(hk.Linear(2, name="inner")(x) * 0))
    found = find_nonfinite(apply)(init(jax.random.key(0), jnp.ones(2)), None, jnp.ones(2))
    assert (found.operation, found.source) == ("log", line(bad_log))


def test_donated_arguments_are_not_given_away():
    fn = jax.jit(lambda w, x: w * x, donate_argnums=0)
    w = jnp.ones(3)
    assert find_nonfinite(fn)(w, 2.0) is None
    assert not w.is_deleted()


def test_calls_of_one_shape_are_traced_once():
    traced = []

    @jax.jit
    def fn(x):
        traced.append(x)
        return bad_log(x)

    find = find_nonfinite(fn)
    assert [find(1.0) for _ in range(3)] == [None] * 3
    assert len(traced) == 1
    assert find(-1.0).kind == "nan" and find(0.0).kind == "inf"
    assert len(traced) == 1
    assert find_nonfinite(fn)(2.0) is None
    assert len(traced) == 1


def test_nothing_is_printed_twice(capsys):
    def fn(x):
        jax.debug.print("seen")
        return bad_log(x)

    assert find_nonfinite(fn)(-1.0).operation == "log"
    jax.effects_barrier()
    assert capsys.readouterr().out.count("seen") <= 1


def test_bad_input_of_find_nonfinite():
    with pytest.raises(TypeError, match="`find_nonfinite` takes a function, but was given 3"):
        find_nonfinite(3)
    with pytest.raises(TypeError, match="`masked` must be True or False, but is 1"):
        find_nonfinite(bad_log, masked=1)
    with pytest.raises(TypeError, match="called inside of a transformation"):
        jax.jit(find_nonfinite(bad_log))(1.0)
    with jax.disable_jit():
        assert find_nonfinite(bad_log)(-1.0).operation == "log"


@pytest.mark.parametrize("size", [0, 1])
def test_arrays_without_elements_are_clean(size):
    assert find_nonfinite(lambda x: bad_log(x))(jnp.ones(size)) is None
    assert find_nonfinite(lambda i: i + 1)(jnp.arange(size)) is None


CLOSED_OVER = np.array([1.0, np.inf, 2.0], np.float32)


@pytest.mark.parametrize(
    "program",
    [
        jax.jit(lambda x: x * 2 + CLOSED_OVER),
        lambda x: lax.scan(lambda c, _: (jax.jit(lambda c: c + CLOSED_OVER)(c), None), x, None, 3)[
            0
        ],
        lambda x: lax.cond(x[0] > 0, lambda x: x * CLOSED_OVER, lambda x: x, x),
        jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x) * CLOSED_OVER)(x))),
    ],
    ids=["jit", "jit in scan", "cond", "checkpoint"],
)
def test_constant_of_an_inner_function_is_found(program):
    found = find_nonfinite(program)(jnp.ones(3))
    assert (found.operation, found.kind, found.index, found.count) == ("constant", "inf", (1,), 1)


def test_names_of_positional_arguments():
    bad, good = jnp.array([jnp.nan]), jnp.ones(1)
    several = lambda first, *rest, last=1.0, **more: first + sum(rest) * last
    assert find_nonfinite(several)(bad, good).path == "first"
    assert find_nonfinite(several)(good, bad).path == "rest/0"
    assert find_nonfinite(jax.jit(several))(good, good, bad).path == "rest/1"
    assert find_nonfinite(several)(good, good, last=bad).path == "last"
    wrapper = lambda *args, **kwargs: several(*args, **kwargs)
    assert find_nonfinite(wrapper)(good, bad).path == "args/1"
