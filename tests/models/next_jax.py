"""Settings that will be the defaults of the next JAX."""

import contextlib

import jax

FLAGS = (
    "jax_remat3",
    "jax_custom_vjp3",
    "jax_custom_jvp3",
    "jax_scan3",
    "jax_remat_barrier_no_cotangents",
)


@contextlib.contextmanager
def next_flags(flags=FLAGS):
    """Turn on the settings that this version of JAX has."""
    before = {flag: getattr(jax.config, flag) for flag in flags if hasattr(jax.config, flag)}
    for flag in before:
        jax.config.update(flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)
