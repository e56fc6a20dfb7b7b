"""Alerts name the layer, and bad arguments of a monitor raise errors in whole sentences."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapax
from tapax import alert, reduce
from tapax.monitoring._log import Log
from tapax.monitoring._monitor import monitor
from tests.models.monitored import ONES, layers, watched

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("made", "calls", "sentences"),
    [
        (
            alert.nonfinite(),
            [(ONES, 1.0), (ONES, -1.0), (ONES, -1.0), (ONES, 1.0), (ONES.at[0, 0].set(0), 1.0)],
            {
                "step 1: the value of Net/c has 8 numbers that are NaN or Inf.": 8,
                "step 4: the value of Net/c has 1 number that is NaN or Inf.": 1,
                "step 4: the gradient of Net/b has 1 number that is NaN or Inf.": 1,
                "step 4: the gradient of Net/a has 1 number that is NaN or Inf.": 1,
            },
        ),
        (alert.nonfinite("Net/b"), [(ONES, -1.0)], {}),
        (
            alert.above("**/b", value_max=10, grad_norm=1e3),
            [(ONES, 1.0), (ONES, 20.0), (ONES, 1e-4)],
            {
                "step 1: the value of Net/b has max 20, above the limit of 10.": 20.0,
                "step 2: the gradient of Net/b has norm 2.828e+04, above the limit of 1000.": 28284,
            },
        ),
        (
            alert.below("Net/b", value_rms=0.5),
            [(ONES, 1.0), (ONES, 0.25)],
            {"step 1: the value of Net/b has rms 0.25, below the limit of 0.5.": 0.25},
        ),
        (
            alert.above("Net/c", value_rms=3),
            [(ONES, -1.0)],
            {
                "step 0: the value of Net/c has rms NaN, which cannot be compared with the limit "
                "of 3.": np.nan
            },
        ),
        (
            alert.dead(0.5, at="Net/a"),
            [(jnp.array([[1.0, 0, -2, 0], [0, 1, 0, 0]]), 1.0)],
            {"step 0: the value of Net/a has 50% dead units, zero in the whole batch.": 0.5},
        ),
        (alert.dead(0.6, at="Net/a"), [(jnp.array([[1.0, 0, -2, 0], [0, 1, 0, 0]]), 1.0)], {}),
    ],
)
@pytest.mark.filterwarnings("ignore::tapax.monitoring.alert.AlertWarning")
def test_alerts_name_the_layer(made, calls, sentences):
    log, events = watched(layers, *calls, alerts=[made], values=None, grads="Net/a")
    assert {a.message for a in events} == set(sentences)
    for event in events:
        np.testing.assert_allclose(event.number, sentences[event.message], rtol=1e-4)
        assert (
            event.message.startswith(f"step {event.step}: ") and f" {event.site} " in event.message
        )
    assert log.alerts == events and log.names == ["Net/a/grad_rms"]


def test_an_alert_warns_once_for_a_layer():
    calls = [(ONES, 20.0), (ONES, 1.0), (ONES, 20.0), (ONES, 1.0)]
    with pytest.warns(alert.AlertWarning) as caught:
        _, events = watched(layers, *calls, alerts=[alert.above("Net/b", value_rms=10)])
    assert [str(w.message) for w in caught] == [events[0].message]
    assert [a.step for a in events] == [0, 2]


def test_many_layers_with_one_alert_warn_once():
    step = lambda x: [tapax.sow(x * jnp.nan, f"h{i}") for i in range(9)]
    with pytest.warns(alert.AlertWarning) as caught:
        watched(step, (1.0,), alerts=[alert.nonfinite(), alert.nonfinite("h8")])
    assert [str(w.message) for w in caught] == [
        "step 0: the value of h0 has 1 number that is NaN or Inf. The same holds for h1, h2, h3, "
        "h4, h5 and 3 more.",
        "step 0: the value of h8 has 1 number that is NaN or Inf.",
    ]


def test_alerts_see_each_iteration_and_every_statistic():
    def step(x):
        x = lax.scan(lambda c, _: (tapax.sow(c * 10, "h"), None), x, length=4)[0]
        return tapax.sow(jnp.zeros(()), "scalar") + jnp.sum(x)

    limits = dict.fromkeys(["value_sum", "value_mean", "value_norm", "value_rms", "value_max"], 500)
    with pytest.warns(alert.AlertWarning):
        _, events = watched(
            step,
            (jnp.ones(1),),
            alerts=[alert.above("h", **limits), alert.below("h", value_min=5), alert.dead()],
        )
    assert {(a.site, a.stat) for a in events} == {
        (f"h[{i}]", stat) for i in (2, 3) for stat in limits
    }
    step = jax.grad(lambda x: jnp.sum(-2 * tapax.sow(x, "h")))
    with pytest.warns(alert.AlertWarning):
        _, events = watched(
            step, (jnp.ones(4),), alerts=alert.below("h", grad_cosine=0, grad_update_ratio=3)
        )
    assert [(a.stat, a.number) for a in events] == [
        ("grad_cosine", -1.0),
        ("grad_update_ratio", 2.0),
    ]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: alert.above("**"), TypeError, "takes limits as keywords, such as grad_norm=1e3"),
        (
            lambda: alert.above("**", rms=1),
            TypeError,
            "the limit 'rms', but a limit is 'value_' or",
        ),
        (lambda: alert.below("**", value_cosine=1), TypeError, "'grad_' and one of cosine, update"),
        (
            lambda: alert.below("**", grad_rms="1"),
            TypeError,
            "grad_rms='1', but a limit is a number",
        ),
        (lambda: alert.above(5, grad_rms=1), TypeError, "`at` must be a selection of sites"),
        (lambda: alert.dead(0), ValueError, "`fraction` must be a number above 0 and at most 1"),
        (lambda: monitor(5), TypeError, "`monitor` takes a function, but was given 5"),
        (lambda: monitor(layers, every=0), ValueError, "`every` must be at least 1"),
        (lambda: monitor(layers, every=1.5), TypeError, "`every` must be a number of steps"),
        (lambda: monitor(layers, every=True), TypeError, "`every` must be a number of steps"),
        (lambda: monitor(layers, values=5), TypeError, "`values` must be a selection of sites"),
        (lambda: monitor(layers, values={"h": 3}), TypeError, "which is neither a reducer nor"),
        (
            lambda: monitor(layers, values={"h": lambda x, site: x.max()}),
            TypeError,
            "takes a value and a site. A monitor passes only the value",
        ),
        (
            lambda: monitor(layers, values={"h": [reduce.minmax, jnp.max]}),
            TypeError,
            "two reducers with the name 'max'",
        ),
        (lambda: monitor(layers, values={"h": reduce.cosine}), TypeError, "use it in `grads`"),
        (lambda: monitor(layers, values=""), tapax.SiteError, "`values` is an empty string"),
        (lambda: monitor(layers, values=None, grads=None), ValueError, "is nothing to monitor"),
        (
            lambda: monitor(layers, alerts=["nan"]),
            TypeError,
            "`alerts` must be alerts of tapax.alert",
        ),
        (
            lambda: monitor(layers, to="run.txt"),
            ValueError,
            "to='run.txt' does not say what to write",
        ),
        (lambda: monitor(layers, to="/dev/null/run.jsonl"), OSError, "cannot be written"),
    ],
)
def test_wrong_arguments_raise_before_anything_runs(call, error, words):
    before = threading.active_count()
    with pytest.raises(error, match=re.escape(words)):
        call()
    assert threading.active_count() == before


def test_two_reducers_of_one_name_need_two_names():
    bins = [reduce.histogram([0.0, 1.0]), reduce.histogram([0.0, 2.0])]
    with pytest.raises(
        TypeError, match="two reducers with the name 'histogram', which a record cannot tell apart"
    ):
        monitor(layers, values={"**": bins})


def test_a_site_that_is_not_there_is_told_at_the_first_call():
    for options in ({"values": "Net/d"}, {"alerts": alert.above("Net/d", value_rms=1)}):
        m = monitor(layers, **options)
        with pytest.raises(
            tapax.SiteError, match=r"no site with that name.*nearest names are 'Net/"
        ):
            m(ONES, 1.0)
        m.close()


def test_a_step_that_cannot_be_traced_says_what_to_do():
    m = monitor(lambda x: print(float(jnp.sum(x))))
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        m(ONES)
    assert "Monitor the jitted function that it calls" in "".join(caught.value.__notes__)
    m.close()


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.make_jaxpr])
def test_a_monitor_is_not_traced(transform):
    m = monitor(lambda x: tapax.sow(x, "h") ** 2, every=10)
    if transform is jax.jit:
        m(1.0)  # a plain call before does not help
    with pytest.raises(RuntimeError, match="was called inside a function that JAX traces"):
        transform(m)(jnp.ones(2) if transform is jax.vmap else 1.0)
    m.close()


def test_a_failure_later_turns_the_monitor_off_and_the_training_goes_on():
    @jax.jit
    def step(x):
        if x.shape == (3,):
            tapax.sow(x, "late")
        return tapax.sow(2 * x, "h")

    def at_most_two(site):
        if site.path == "late":
            raise MemoryError("too much")
        return True

    log = Log()
    m = monitor(step, every=1, values=at_most_two, to=log)
    m(jnp.ones(2))
    with pytest.warns(UserWarning, match="is off") as caught:
        outs = [m(jnp.ones(3)).tolist() for _ in range(3)]
    assert outs == [[2.0] * 3] * 3
    assert [str(w.message) for w in caught] == [
        f"The monitor of {step.__qualname__} is off, and the training goes on: the watched step 1 "
        "failed with MemoryError: too much"
    ]
    m.close()
    assert log.steps.tolist() == [0] and m.step_number == 4


def test_an_error_of_the_device_does_not_stop_the_training(monkeypatch):
    m = monitor(layers, every=1)

    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(m, "_watched", full)
    with pytest.warns(UserWarning, match="JaxRuntimeError: RESOURCE_EXHAUSTED"):
        assert m(ONES, 1.0).shape == (2, 4)
    m.close()


def test_limits_may_be_scalars_of_numpy():
    rules = [alert.above("h", value_rms=np.float32(1.5)), alert.dead(np.float32(0.5))]
    assert [type(limit.limit) for rule in rules for limit in rule.limits] == [float, float]
    assert [limit.limit for rule in rules for limit in rule.limits] == [1.5, 0.5]
    with pytest.raises(TypeError, match="but a limit is a number"):
        alert.above("h", value_rms=np.float32(np.nan))


def test_a_step_without_gradients_warns():
    m = monitor(lambda x: tapax.sow(2 * x, "h"), values=None)
    with pytest.warns(UserWarning, match="records nothing: no gradient reaches a site"):
        m(1.0)
    m.close()


def test_a_step_without_sites_warns():
    m = monitor(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="records nothing: the step has no sites") as caught:
        m(1.0)
    assert caught[0].filename == __file__
    m.close()
