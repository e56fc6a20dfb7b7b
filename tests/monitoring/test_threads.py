"""A monitor that several threads call."""

import threading

import jax
import jax.numpy as jnp

import tapax


def test_calls_of_several_threads_have_numbers_of_their_own():
    log = tapax.Log()
    step = jax.jit(lambda x: tapax.sow(2 * x, "h").sum())
    with tapax.monitor(step, every=10, values=tapax.reduce.rms, grads=None, to=log) as watched:
        watched(jnp.ones(3))

        def call():
            for _ in range(50):
                watched(jnp.ones(3))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert watched.step_number == 201
    assert log["h/value_rms"].steps.tolist() == list(range(0, 201, 10))
