"""Impossible changes raise errors in whole sentences that name site, types and line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tapax
from tests.oracles.closeness import assert_close

X = jnp.array([1.0, 2.0, 3.0], jnp.float32)


@pytest.fixture(autouse=True)
def of_32_bits():
    """Disable 64 bits, so that messages name types of 32 bits."""
    with jax.enable_x64(False):
        yield


def loss(x):
    return jnp.sum(tapax.sow(jnp.sin(x), "h") * 2)


def chain(x):
    return lax.scan(lambda c, t: (tapax.sow(jnp.sin(c * t), "h"), None), x, X)[0]


def loop(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: tapax.sow(2 * c, "h"), x)


def branch(x):
    return lax.cond(x[0] > 0, lambda x: tapax.sow(2 * x, "h"), lambda x: x, x)


def dropped(x):
    tapax.sow(2 * x, "d")
    return jnp.sum(tapax.sow(x, "h"))


def mapped(x):
    return jnp.sum(jax.vmap(lambda x: tapax.sow(jnp.sin(x), "h"))(jnp.stack([x, x])))


def twice(x):
    layer = jax.jit(lambda x: tapax.sow(jnp.sin(x), "h"))
    return layer(layer(x))


LINES = {f: f"{__file__}:{f.__code__.co_firstlineno + 1}" for f in (loss, chain, loop, branch)}
LINES |= {f: f"{__file__}:{f.__code__.co_firstlineno + 1}" for f in (dropped, mapped, twice)}
AT = {f: f"marked at {line}," for f, line in LINES.items()}


def message(call, *args, kind=tapax.SiteError):
    with pytest.raises(kind) as error:
        call(*args)
    return str(error.value)


@pytest.mark.parametrize(
    ("edit", "type_"),
    [
        (lambda h: h[:2], "float32[2]"),
        (lambda h: h.astype(jnp.bfloat16), "bfloat16[3]"),
        (lambda h: jnp.sum(h), "float32[]"),
        (lambda h: h[None], "float32[1, 3]"),
        (lambda h: h > 0, "bool[3]"),
    ],
)
def test_an_edit_of_another_type(edit, type_):
    expected = (
        f"The edit of the site 'h', {AT[loss]} returns {type_}, but the value is float32[3]. "
        "An edit must keep the shape and the dtype."
    )
    for f in (loss, jax.jit(loss)):
        assert message(tapax.edit(f, {"h": edit}), X) == expected
        assert message(jax.jit(tapax.edit(f, {"h": edit})), X) == expected
    assert "returns" in message(tapax.edit(jax.grad(loss), grads={"h": edit}), X)
    assert "returns" in message(tapax.edit(mapped, {"h": edit}), X)


@pytest.mark.parametrize("made", [None, (X,), {"h": X}, "text"])
def test_an_edit_that_returns_no_array(made):
    assert message(tapax.edit(loss, {"h": lambda h: made}), X) == (
        f"The edit of the site 'h', {AT[loss]} returns {type(made).__name__}, but must return one "
        "array like the value, of type float32[3]."
    )


def test_an_array_of_another_type():
    begin = f"values='h' replaces the site 'h', {AT[loss]} by an array of"
    assert message(tapax.edit(loss, {"h": jnp.zeros(4)}), X) == (
        f"{begin} shape [4], but the value has shape [3]."
    )
    assert message(tapax.edit(loss, {"h": jnp.arange(3)}), X) == (
        f"{begin} type int32, but the value is float32[3]. An edit must keep the dtype: cast the "
        "array."
    )
    for new in (jnp.zeros(1), jnp.zeros((1, 3)), jnp.zeros((3, 1)), jnp.zeros(0)):
        assert "the value has shape [3]" in message(tapax.edit(loss, {"h": new}), X)
    counted = lambda x: tapax.sow(x * 2, "i")
    assert "type float32" in message(tapax.edit(counted, {"i": 1.5}), jnp.arange(3))
    assert "type complex64" in message(tapax.edit(loss, {"h": 1j}), X)
    text = message(tapax.edit(chain, {"h": jnp.zeros((4, 3))}), X)
    assert text.endswith("but the value has shape [3], or [3, 3] with its loops and maps.")
    for new in (jnp.zeros((3, 3)), jnp.zeros((2, 4))):
        text = message(tapax.edit(mapped, {"h": new}), X)
        assert text.endswith("but the value has shape [3], or [2, 3] with its loops and maps.")
    one = {tapax.at("h", step=0): jnp.zeros((3, 3))}
    assert message(tapax.edit(chain, one), X).endswith("but the value has shape [3].")


@pytest.mark.parametrize("new", ["text", None, {"a": 1}, object()])
def test_an_edit_of_a_wrong_type(new):
    assert message(tapax.edit, loss, {"h": new}, kind=TypeError) == (
        "values['h'] must be an array, a number, or a function of the value, but is "
        f"{new!r} of type {type(new).__name__}."
    )


@pytest.mark.parametrize("edits", ["h", ["h"], [("h",)], [("h", 0.0, 1)], 3.0])
def test_edits_must_be_pairs(edits):
    with pytest.raises(TypeError, match="`values` must map selections of sites to edits"):
        tapax.edit(loss, edits)


def test_sites_that_are_not_there():
    begin = "picks nothing: tracing the function reached no site with that name."
    for name in ("hh", "h@1", "H"):
        assert f"values={name!r} {begin}" in message(tapax.edit(loss, {name: 0.0}), X)
        assert f"at={name!r} {begin}" in message(tapax.grad(loss, name), X)
        assert f"at={name!r} {begin}" in message(tapax.perturbations(loss, name), X)
        assert name in message(tapax.prefix(loss, name), X)
        assert name in message(tapax.suffix(loss, name), X, X)
        assert name in message(tapax.jacobian(loss, of=None, wrt=name), X)
        assert name in message(tapax.jacobian(loss, of=name, wrt="h"), X)
    assert "The nearest names are 'h'." in message(tapax.edit(loss, {"hh": 0.0}), X)
    for call in (
        lambda: tapax.edit(loss, {"q*": 0.0})(X),
        lambda: tapax.edit(loss, {"h": 0.0, "q*": 0.0})(X),
        lambda: tapax.edit(loss, {tapax.ops("cos"): 0.0})(X),
        lambda: tapax.edit(loss, {tapax.lines("no_file.py:3"): 0.0})(X),
        lambda: tapax.edit(jax.grad(loss), grads={"q*": 0.0})(X),
        lambda: tapax.grad(loss, "q*")(X),
        lambda: tapax.grad(loss, tapax.ops("cos"))(X),
        lambda: tapax.perturbations(loss, "q*")(X),
        lambda: tapax.prefix(loss, "q*")(X),
        lambda: tapax.prefix(loss, tapax.ops("cos"))(X),
        lambda: tapax.prefix(loss, lambda site: False)(X),
        lambda: tapax.suffix(loss, "q*")(X, X),
        lambda: tapax.jacobian(loss, of=None, wrt="q*")(X),
    ):
        message(call)


def test_gradients_that_are_not_taken():
    assert message(tapax.edit(loss, grads={"h": 0.0}), X) == (
        f"grads='h' picks the site 'h', {AT[loss]} which has no gradient: the program takes no "
        "gradient, or its gradients reach no marked value. Take the gradient inside the captured "
        "function, as a train step does, and use the value that tapax.sow returns."
    )
    # The gradient is taken around the edited function, which takes no gradient itself.
    assert "has no gradient" in message(jax.grad(tapax.edit(loss, grads={"h": 0.0})), X)
    message(tapax.edit(loss, grads={"**": 0.0}), X)
    cut = lambda x: jnp.sum(x * lax.stop_gradient(tapax.sow(jnp.sin(x), "h")))
    assert "has no gradient" in message(tapax.edit(jax.grad(cut), grads={"h": 0.0}), X)


def test_values_that_reach_no_result():
    expected = (
        f"The edit of the value of the site 'd', {AT[dropped]} would do nothing, because the value "
        "never reaches a result of the function. Use the value that tapax.sow returns, instead of "
        "the value passed to it."
    )
    for f in (dropped, jax.jit(dropped), jax.checkpoint(dropped), jax.grad(dropped)):
        assert message(tapax.edit(f, {"d": 0.0}), X) == expected
    assert message(tapax.edit(dropped, {"h": 0.0, "d*": 0.0}), X) == expected
    in_a_scan = lambda x: lax.scan(lambda c, t: (tapax.sow(c, "d") * 0 + t, c), x, X)[0]
    tapax.edit(in_a_scan, {"d": 0.0})(X)  # it reaches the result, times zero
    aside = lambda x: lax.scan(lambda c, t: (c * t, tapax.sow(c, "d")), x, X)[0]
    assert "never reaches" in message(tapax.edit(aside, {"d": 0.0}), X)
    assert "never reaches" in message(tapax.suffix(dropped, "d"), X, X)
    assert "result of the function does not depend on it" in message(tapax.grad(dropped, "d"), X)
    assert_close(tapax.prefix(dropped, "d")(X), 2 * X)


@pytest.mark.parametrize("step", [3, -4, 100, np.int64(3), np.array(3), jnp.array(-4)])
def test_an_iteration_that_there_is_not(step):
    expected = f"step={step} was given for the site 'h', {AT[chain]} but its loop has 3 iterations."
    for edit in (0.0, lambda h: h):
        edited = tapax.edit(chain, {tapax.at("h", step=step): edit})
        assert message(edited, X) == expected
        assert message(edited, X) == expected
    known = {tapax.at("h", step=step): 0.0}
    if not isinstance(step, jax.Array):
        assert message(jax.jit(lambda x: tapax.edit(chain, known)(x)), X) == expected
    with jax.disable_jit():
        assert message(tapax.edit(chain, known), X) == expected
    text = message(tapax.prefix(chain, tapax.at("h", step=int(step))), X)
    assert "its loop has 3 iterations" in text
    assert text == message(tapax.suffix(chain, tapax.at("h", step=int(step))), X, X)


def test_a_good_iteration_and_then_a_bad_one():
    # Both calls share one compiled program, so every call checks the number.
    f = jax.jit(chain)
    sweep = lambda i: tapax.edit(f, {tapax.at("h", step=i): 0.5})(X)
    assert np.isfinite(sweep(2)).all()
    message(sweep, 3)
    message(sweep, -4)
    assert np.isfinite(sweep(-3)).all()


@pytest.mark.parametrize("edit", [0.5, lambda h: h])
def test_a_traced_iteration_that_there_is_not(edit):
    sweep = lambda i: tapax.edit(chain, {tapax.at("h", step=i): edit})(X)
    for transformed in (jax.vmap(sweep), jax.jit(jax.vmap(sweep)), lambda i: lax.map(sweep, i)):
        bad = np.isnan(transformed(jnp.array([-4, -3, 0, 2, 3, 100]))).all(axis=1)
        assert bad.tolist() == [True, False, False, False, True, True]
    assert np.isnan(jax.jit(sweep)(jnp.uint8(255))).all()
    assert np.isnan(jax.jit(sweep)(jnp.int8(-128))).all()
    step = jax.grad(lambda x: jnp.sum(chain(x)))
    sweep = lambda i: tapax.edit(step, grads={tapax.at("h", step=i): edit})(X)
    assert np.isnan(jax.jit(sweep)(3)).all() and not np.isnan(jax.jit(sweep)(2)).any()


def test_iterations_out_of_range_or_without_a_loop():
    expected = f"`step` was given for the site 'h', {AT[loss]} which is in no loop. Leave it out."
    for step in (0, jnp.array(0), slice(0, 1)):
        assert message(tapax.edit(loss, {tapax.at("h", step=step): 0.0}), X) == expected
    assert message(tapax.prefix(loss, tapax.at("h", step=0)), X) == expected
    assert message(tapax.edit(chain, {tapax.at("h", step=slice(3, 9)): 0.0}), X) == (
        "step=slice(3, 9, None) selects none of the 3 iterations of the loop around the site 'h', "
        f"{AT[chain].removesuffix(',')}. Iterations count from 0."
    )
    message(lambda: tapax.edit(chain, {tapax.at("h", step=jnp.array([0, 1])): 0.0}))
    message(lambda: tapax.edit(chain, {tapax.at("h", step=1.0): 0.0}), kind=TypeError)
    message(lambda: tapax.edit(chain, {tapax.at("h", step=True): 0.0}), kind=TypeError)


def test_iterations_of_a_while_loop():
    for step in (-1, slice(-1, None), slice(None, -1)):
        text = message(tapax.edit(loop, {tapax.at("h", step=step): 0.0}), X)
        assert AT[loop] in text
    assert "while loop" in message(tapax.prefix(loop, tapax.at("h", step=1)), X)


def test_perturbations_of_another_type():
    begin = f"The perturbation of the site 'h', {AT[loss]}"
    shape = lambda n: (
        f"{begin} has shape {n}, but its values have shape [3]. Make perturbations with the "
        "arguments of this call."
    )
    add = tapax.perturbed(loss)
    assert message(add, {"h": jnp.zeros(4)}, X) == shape([4])
    assert message(add, {"h": jnp.zeros((2, 3))}, X) == shape([2, 3])
    assert message(add, {"h": 0.0}, X) == shape([])
    for dtype in ("bfloat16", "int32"):
        assert message(add, {"h": jnp.zeros(3, dtype)}, X) == (
            f"{begin} is of type {dtype}, but its values are of type float32: adding it could "
            "change the type of the value. Cast the perturbation."
        )
    # The batch size differs from that of the perturbations.
    batch = lambda xs: jnp.sum(jax.vmap(loss)(xs))
    zeros = tapax.perturbations(batch)(jnp.ones((4, 3)))
    text = message(tapax.perturbed(batch), zeros, jnp.ones((2, 3)))
    assert "has shape [4, 3], but its values have shape [2, 3]" in text
    assert text == message(jax.jit(tapax.perturbed(batch)), zeros, jnp.ones((2, 3)))
    message(tapax.perturbed(chain), {"h": jnp.zeros(3)}, X)


def test_perturbations_of_sites_that_have_none():
    assert message(tapax.perturbed(loss), {"q": X}, X) == (
        "There is a perturbation of 'q', but the function did not reach such a site. The sites are "
        "'h'."
    )
    assert "'h@2'" in message(tapax.perturbed(twice), {"h@2": X}, X)
    counted = lambda x: jnp.sum(x) * tapax.sow(jnp.arange(3), "i")[1]
    reason = "its values are of type int32, which cannot be differentiated"
    assert reason in message(tapax.grad(counted, "i"), X)
    assert reason in message(tapax.perturbations(counted, "i"), X)
    assert reason in message(tapax.perturbed(counted), {"i": jnp.arange(3)}, X)
    assert reason in message(tapax.jacobian(counted, of=None, wrt="i"), X)
    total = lambda x: jnp.sum(loop(x))
    for call in (
        lambda: tapax.grad(total, "h")(X),
        lambda: tapax.perturbations(total, "h")(X),
        lambda: tapax.perturbed(total)({"h": X}, X),
        lambda: tapax.jacobian(loop, of=None, wrt="h")(X),
    ):
        assert "it is in a while loop, whose number of iterations is not known" in message(call)
    for given in ([X], X, None):
        text = message(tapax.perturbed(loss), given, X, kind=TypeError)
        assert text.startswith("The first argument of a perturbed function must be a dict")
    assert "'h'" in message(
        tapax.perturbed(loss), {"h": None}, X, kind=(TypeError, tapax.SiteError)
    )


@pytest.mark.parametrize("wrap", [jax.custom_jvp, jax.custom_vjp])
def test_inside_of_a_function_with_a_rule(wrap):
    inner = wrap(lambda x: tapax.sow(jnp.sin(x), "h") * 2)
    if wrap is jax.custom_jvp:
        inner.defjvps(lambda t, out, x: t)
    else:
        inner.defvjp(lambda x: (inner(x), None), lambda _, ct: (ct,))
    f = lambda x: jnp.sum(inner(x))
    expected = "'h' is inside a function with a custom derivative rule"
    assert expected in message(tapax.grad(f), X)
    assert expected in message(jax.grad(tapax.perturbed(f)), {"h": X}, X)
    replaced = lambda s: tapax.edit(f, {"h": lambda h: h * s})(X)
    assert expected in message(jax.grad(replaced), 2.0)
    assert_close(tapax.perturbed(f)({"h": X}, X), 2 * jnp.sum(jnp.sin(X) + X))


def test_gradients_that_no_site_has_are_refused():
    counted = lambda x: jnp.sum(x) * tapax.sow(jnp.arange(3), "a/i")[1] * tapax.sow(2, "a/j")
    begin = (
        "There is no derivative with respect to any site that at='a/*' picks. For the site 'a/i', "
        "marked at"
    )
    for take in (tapax.grad, tapax.value_and_grad, tapax.perturbations):
        text = message(take(counted, "a/*"), X)
        assert text.startswith(begin)
        assert text.endswith("its values are of type int32, which cannot be differentiated.")
    total = lambda x: jnp.sum(loop(x)) + loss(x)
    assert "at=('*',)" not in message(tapax.grad(lambda x: jnp.sum(loop(x)), ["*"]), X)
    assert set(tapax.grad(total, "*")(X)) == {"h@1"}


def test_gradients_of_nothing_are_refused():
    for at in ((), None, "**"):
        assert "picks no site, so there is no gradient" in message(tapax.grad(jnp.sum, at), X)
    assert "picks none of the 0 sites" in message(tapax.grad(jnp.sum, lambda site: False), X)


def test_only_real_scalar_losses_have_gradients():
    first = "A gradient needs a loss, one real number, but the function returns"
    for f, what in (
        (lambda x: tapax.sow(x, "h"), "float32[3]"),
        (lambda x: jnp.sum(tapax.sow(x, "h")).astype(int), "int32[]"),
        (lambda x: jnp.sum(tapax.sow(x, "h")) * 1j, "complex64[]"),
        (lambda x: None, "no array"),
    ):
        for take in (tapax.grad, tapax.value_and_grad):
            assert message(take(f), X, kind=TypeError).startswith(f"{first} {what} first.")
    pair = lambda x: (jnp.sum(tapax.sow(x, "h")), x)
    assert "must return the loss alone" in message(tapax.grad(pair), X, kind=TypeError)
    text = message(tapax.grad(loss, has_aux=True), X, kind=TypeError)
    assert "must return (loss, aux), because has_aux=True" in text


def test_cuts_that_are_crossed_more_than_once():
    expected = (
        "A cut needs one site, but 'h' picks 2: 'h', 'h@1'. Name one of them: the first, "
        f"{AT[twice]} is 'h@0'."
    )
    for call in (lambda: tapax.prefix(twice, "h")(X), lambda: tapax.suffix(twice, "h")(X, X)):
        assert message(call) == expected
    for call in (lambda: tapax.prefix(chain, "h")(X), lambda: tapax.suffix(chain, "h")(X, X)):
        assert message(call) == (
            f"The site 'h', {AT[chain]} is in the loops scan[3], so the program crosses it more "
            "than once. Cut at one iteration of a scan: tapax.at('h', step=0)."
        )
    for call in (lambda: tapax.prefix(branch, "h")(X), lambda: tapax.suffix(branch, "h")(X, X)):
        assert message(call) == (
            f"The site 'h', {AT[branch]} is in a branch, which may not run, so the function cannot "
            "be cut there. Mark a value outside of the conditional."
        )
    assert "is in the loops while" in message(tapax.prefix(loop, "h"), X)
    inner = lambda c, t: (chain(c * t), None)
    text = message(tapax.prefix(lambda x: lax.scan(inner, x, X)[0], tapax.at("h", step=0)), X)
    assert "is in the loops scan[3]" in text
    for step in (jnp.array(1), slice(0, 2)):
        text = message(tapax.prefix, chain, tapax.at("h", step=step))
        assert "but a cut needs a whole value, in one iteration whose number is known" in text


def test_a_start_of_another_type():
    for value, type_ in ((X[:2], "float32[2]"), (jnp.arange(3), "int32[3]"), (0.0, "float32[]")):
        assert message(tapax.suffix(loss, "h"), value, X) == (
            f"The first argument is {type_}, but the values of the site 'h', {AT[loss]} are "
            "float32[3]. Pass a value of that shape and dtype."
        )


def test_jacobians_of_several_sites():
    assert message(tapax.jacobian(twice, of=None, wrt="h"), X) == (
        "wrt='h' picks 2 sites, but a Jacobian needs one site with all of its iterations. The "
        "sites are 'h@0', 'h@1'."
    )


def test_predicates_of_while_loops():
    test = lambda c: tapax.sow(jnp.sum(c), "p") < 10
    f = lambda x: lax.while_loop(test, lambda c: c + 1, x)
    text = message(tapax.edit(f, {"p": 0.0}), X)
    assert "is in the predicate of a while loop, where it cannot be edited" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda f: tapax.edit(f, {"h": 0.0}),
        tapax.grad,
        tapax.value_and_grad,
        tapax.perturbations,
        tapax.perturbed,
        lambda f: tapax.jacobian(f, of=None, wrt="h"),
        lambda f: tapax.prefix(f, "h"),
        lambda f: tapax.suffix(f, "h"),
    ],
)
def test_only_functions_are_accepted(make):
    text = message(make, 3, kind=TypeError)
    assert "takes a function, but was given 3 of type int" in text
    text = message(make, jax.jit(loss).lower(X).compile(), kind=TypeError)
    assert "ahead of time: there is nothing left to trace" in text


@pytest.mark.parametrize(
    "make", [tapax.find_nonfinite, tapax.monitor, lambda f: tapax.harvest(f, [X], to="unused")]
)
def test_compiling_the_result_is_advised_only_where_it_is_a_function(make):
    text = message(make, jax.jit(loss).lower(X).compile(), kind=TypeError)
    assert text.endswith("there is nothing left to trace. Give it the function itself.")


def test_an_error_leaves_nothing_behind():
    f = jax.jit(loss)
    expected = f(X)
    for call in (
        lambda: tapax.edit(f, {"h": jnp.zeros(4)})(X),
        lambda: tapax.grad(f, "q")(X),
        lambda: tapax.perturbed(f)({"h": jnp.zeros(4)}, X),
        lambda: tapax.prefix(f, "q")(X),
    ):
        message(call)
        assert_close(f(X), expected)
    assert_close(tapax.edit(f, {"h": 0.0})(X), 0)


def test_an_array_with_a_device_axis_for_a_value_equal_on_all_devices_says_so():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        def body(carry):
            return carry + 1 + jnp.sum(tapax.sow(jnp.arange(3), "k"))

        return lax.while_loop(lambda c: c[0] < 5, body, x)

    f = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    x = jnp.arange(4.0)
    # The loop ends at different times, so the last values that a capture returns could differ.
    assert tapax.sites(f)(x)["k"].shape == (4, 3)
    wrong = tapax.edit(f, values={"k": jnp.zeros((4, 3), jnp.int32)})
    assert message(wrong, x).endswith(
        "but the value has shape [3]. The value is the same on all devices of the mesh axis 'd', "
        "so an array that replaces it has no axis for the devices."
    )
    right = tapax.edit(f, values={"k": jnp.zeros(3, jnp.int32)})
    assert_close(right(x), jnp.full(4, 5.0))
