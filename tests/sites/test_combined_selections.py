"""Combined selections, and the errors for selections that pick nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tapax._sites import matches

X = jnp.array([[0.5, -1.0], [2.0, 0.25]])


def net(x):
    for i in range(3):
        with tapax.scope(f"block{i}"):
            with tapax.scope("attn"):
                x = tapax.sow(jnp.tanh(x @ x), "out")
            x = tapax.sow(jnp.cos(x @ x), "mlp")
    return jnp.sum(x)


def names(selection, fn=net):
    _, taps = tapax.capture(fn, values=selection, grads=None)(X)
    return list(taps.values)


MLPS = [f"block{i}/mlp" for i in range(3)]


@pytest.mark.parametrize(
    ("selection", "picked"),
    [
        (tapax.glob("**/mlp"), MLPS),
        (tapax.glob("**/mlp") & ~tapax.glob("block1/**"), ["block0/mlp", "block2/mlp"]),
        (~tapax.glob("**/out"), MLPS),
        ("**/mlp" & ~tapax.glob("block0/*"), MLPS[1:]),
        (tapax.glob("block0/mlp") | "block2/mlp", ["block0/mlp", "block2/mlp"]),
        ("block2/mlp" | tapax.glob("block0/mlp"), ["block0/mlp", "block2/mlp"]),
        (tapax.glob("**") & (lambda site: site.path.endswith("mlp")), MLPS),
        ((tapax.glob("block0/*") | "block1/*") & "**/mlp", MLPS[:2]),
        (~(tapax.glob("block0/**") | "block1/**") & "**/mlp", MLPS[2:]),
        (~~tapax.glob("block1/mlp"), ["block1/mlp"]),
        ([tapax.glob("block1/*") & "**/mlp", "block0/mlp"], MLPS[:2]),
    ],
)
def test_combinations_pick_the_sites_of_their_parts(selection, picked):
    assert names(selection) == picked


def test_globs_narrow_rules_to_the_modules_around():
    attention = tapax.ops("dot_general") & "**/attn"
    assert names(attention) == [f"block{i}/attn/dot_general" for i in range(3)]
    assert names("block1/attn" & tapax.ops("dot_general")) == ["block1/attn/dot_general"]
    outside = tapax.ops("dot_general") & ~tapax.glob("**/attn")
    assert names(outside) == [f"block{i}/dot_general" for i in range(3)]
    first = (tapax.glob("block0/attn") | "block1/attn") & tapax.ops("dot_general")
    assert names(first) == [f"block{i}/attn/dot_general" for i in range(2)]
    last = tapax.ops("dot_general") & ~(tapax.glob("**/attn") | "block0") & ~tapax.glob("block1")
    assert names(last) == ["block2/dot_general"]
    either = tapax.ops("cos") | "**/out"
    assert names(either) == [f"block{i}/{n}" for i in range(3) for n in ("attn/out", "cos")]
    both = tapax.ops("dot_general", "cos") & ~tapax.ops("cos") & "block0/**"
    assert names(both) == ["block0/attn/dot_general", "block0/dot_general"]
    line = net.__code__.co_firstlineno + 4
    here = tapax.lines(f"test_combined_selections.py:{line}") & tapax.ops("tanh") & "block2/**"
    assert names(here) == ["block2/attn/tanh"]


def test_a_complement_picks_no_operation_of_another_rule():
    picked = names([tapax.ops("cos"), ~tapax.glob("**/out")])
    assert picked == [f"block{i}/{n}" for i in range(3) for n in ("cos", "mlp")]


def test_combinations_return_the_values_of_their_sites():
    step = jax.jit(jax.grad(net))
    _, all_taps = tapax.capture(step)(X)
    chosen = tapax.glob("**/mlp") & ~tapax.glob("block1/**")
    _, taps = tapax.capture(step, values=chosen, grads=chosen)(X)
    for name in ("block0/mlp", "block2/mlp"):
        np.testing.assert_array_equal(taps.values[name], all_taps.values[name])
        np.testing.assert_array_equal(taps.grads[name], all_taps.grads[name])
    assert set(taps.values) == set(taps.grads) == {"block0/mlp", "block2/mlp"}


def test_combinations_are_edited_perturbed_and_differentiated():
    chosen = tapax.glob("**/mlp") & ~tapax.glob("block1/**")
    edited = tapax.edit(net, values={chosen: 0.0})(X)
    by_hand = tapax.edit(net, values={"block0/mlp": 0.0, "block2/mlp": 0.0})(X)
    np.testing.assert_array_equal(edited, by_hand)
    assert list(tapax.grad(net, at=chosen)(X)) == ["block0/mlp", "block2/mlp"]
    assert list(tapax.perturbations(net, at=chosen)(X)) == ["block0/mlp", "block2/mlp"]


def test_at_takes_parts_of_combinations():
    last = tapax.at(tapax.glob("**/mlp") & "block1/**", index=np.s_[-1])
    _, taps = tapax.capture(net, values=last)(X)
    assert {name: x.shape for name, x in taps.values.items()} == {"block1/mlp": (2,)}
    same = tapax.at("**/mlp", index=np.s_[-1]) & "block1/**"
    np.testing.assert_array_equal(
        tapax.capture(net, values=same)(X)[1].values["block1/mlp"], taps.values["block1/mlp"]
    )


def in_a_scan(x):
    step = lambda c, t: (tapax.sow(tapax.sow(c * t, "a") + 1, "b"), None)
    return lax.scan(step, x, jnp.arange(1.0, 4.0))[0]


@pytest.mark.parametrize(
    "inner",
    [
        ["b", tapax.at("a", index=0)],
        tapax.at("a", index=0) | "b",
        ({"b"}, [tapax.at("a", index=0)]),
    ],
)
def test_a_part_in_a_sequence_stays_a_part_in_a_step(inner):
    _, whole = tapax.capture(in_a_scan)(X)
    _, taps = tapax.capture(in_a_scan, values=tapax.at(inner, step=1))(X)
    np.testing.assert_array_equal(taps.values["a"], whole.values["a"][1, 0])
    np.testing.assert_array_equal(taps.values["b"], whole.values["b"][1])
    _, taps = tapax.capture(in_a_scan, values={tapax.at(inner, step=1): jnp.sum})(X)
    np.testing.assert_allclose(taps.values["a"], whole.values["a"][1, 0].sum(), rtol=1e-6)
    edited = tapax.edit(in_a_scan, values={tapax.at(inner, step=1): 0.0})(X)
    by_hand = tapax.edit(
        in_a_scan, values={tapax.at("a", step=1, index=0): 0.0, tapax.at("b", step=1): 0.0}
    )
    np.testing.assert_array_equal(edited, by_hand(X))


def test_a_part_of_several_sites_can_be_a_key():
    several = {tapax.at(["**/mlp", "**/out"], index=0): jnp.sum}
    _, taps = tapax.capture(net, values=several)(X)
    assert len(taps.values) == 6 and {x.shape for x in taps.values.values()} == {()}


def test_combinations_are_hashable_and_equal():
    make = lambda: tapax.ops("dot_general") & "**/attn" & ~tapax.glob("block0/**")
    assert make() == make() and hash(make()) == hash(make())
    assert make() != tapax.ops("dot_general") & "**/attn"
    assert tapax.glob("**/attn") == "**/attn"
    assert matches(tapax.glob("a/*") & "**/b", tapax.Site("a/b"))


def test_a_reducer_alone_applies_to_every_site():
    _, taps = tapax.capture(jax.grad(net), values=tapax.reduce.rms, grads=tapax.reduce.norm)(X)
    _, whole = tapax.capture(jax.grad(net))(X)
    assert list(taps.values) == list(whole.values)
    for name, value in whole.values.items():
        rms = np.sqrt(np.mean(np.square(np.asarray(value, np.float64))))
        np.testing.assert_allclose(taps.values[name], rms, rtol=1e-5)
        norm = np.linalg.norm(np.asarray(whole.grads[name], np.float64))
        np.testing.assert_allclose(taps.grads[name], norm, rtol=1e-5)
    _, several = tapax.capture(net, values=[tapax.reduce.rms, tapax.reduce.minmax])(X)
    assert "block0/mlp:rms" in several.values and "block0/mlp:minmax" in several.values


def message(call, kind=tapax.SiteError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_every_selection_that_picks_nothing_raises():
    nothing = [
        lambda site: False,
        functools.partial(lambda flag, site: flag, False),
        tapax.glob("**/mlp") & "nowhere/**",
        tapax.ops("dot_general") & "**/nowhere",
        ~tapax.glob("**"),
        tapax.at(lambda site: False, index=0),
    ]
    for selection in nothing:
        for call in (
            lambda: tapax.capture(net, values=selection)(X),  # noqa: B023
            lambda: tapax.capture(net, values=["**", selection])(X),  # noqa: B023
            lambda: tapax.capture(jax.grad(net), values=None, grads=selection)(X),  # noqa: B023
            lambda: tapax.capture(net, values={selection: tapax.reduce.rms})(X),  # noqa: B023
            lambda: tapax.edit(net, values={selection: 0.0})(X),  # noqa: B023
            lambda: tapax.grad(net, at=selection)(X),  # noqa: B023
            lambda: tapax.prefix(net, selection)(X),  # noqa: B023
        ):
            text = message(call)
            assert "picks none of the" in text or "cut needs a whole value" in text


def test_bad_combinations_raise_clear_errors():
    text = message(lambda: tapax.ops("sin") & 3, TypeError)
    assert text == (
        "`&` combines a selection with another selection: a glob, a rule such as "
        "tapax.ops('dot_general'), or a predicate on Site. It was given 3 of type int."
    )
    assert "`|` combines a selection" in message(lambda: tapax.glob("h") | None, TypeError)
    assert "`glob` takes a string" in message(lambda: tapax.glob(3), TypeError)
    text = message(lambda: tapax.capture(net, values=~tapax.at("**/mlp", index=0)))
    assert "combines tapax.at('**/mlp', index=np.s_[0]) by `~`" in text
    two = tapax.at("**/mlp", index=0) & tapax.at("block0/*", step=0)
    assert "two parts of values by `&`" in message(lambda: tapax.capture(net, values=two))
    twice = tapax.at(tapax.at("**/mlp", index=0), index=1)
    assert "gives `index` twice" in message(lambda: tapax.capture(net, values=twice))
    twice = tapax.at(["**/out", tapax.at("**/mlp", step=0)], step=1)
    assert "gives `step` twice" in message(lambda: tapax.capture(net, values=twice))


def test_messages_quote_the_combined_selection():
    text = message(lambda: tapax.capture(net, values=tapax.ops("dot_general") & "**/nowhere")(X))
    assert text.startswith("values=tapax.ops('dot_general') & '**/nowhere' picks none of the")


def test_combinations_work_in_scans_under_jit():
    def scanned(x):
        return lax.scan(lambda x, _: (net(x) * x, None), x, None, length=2)[0]

    chosen = tapax.glob("**/mlp") & ~tapax.glob("block1/**")
    captured = tapax.capture(jax.jit(scanned), values=chosen)
    _, taps = captured(X)
    assert {name: x.shape for name, x in taps.values.items()} == {
        "block0/mlp": (2, 2, 2),
        "block2/mlp": (2, 2, 2),
    }


def test_every_selector_says_whether_it_picks_a_site():
    site = tapax.Site("net/mlp", kind="value")
    assert tapax.glob("**/mlp").picks(site)
    assert not tapax.glob("**/attn").picks(site)
    assert not tapax.glob("net/*.input").admits(site)
    assert (tapax.glob("**/mlp") & ~tapax.glob("other/**")).picks(site)
