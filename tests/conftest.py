"""Eight CPU devices for the tests of meshes, and a check that tests leave nothing behind."""

import functools
import gc
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np
import pytest

from tapax._marks.context import active_policy

if jax.config.jax_enable_x64:
    import brainstate  # noqa: F401  (the import of older versions turns 64 bits off)

    jax.config.update("jax_enable_x64", True)


def pytest_collection_modifyitems(items):
    """Skip tests of framework features that a JAX setting breaks, with or without tapax."""
    for item in items:
        if "brainstate" not in item.nodeid and "braintrace" not in item.nodeid:
            continue
        if jax.config.jax_enable_checks:
            item.add_marker(pytest.mark.skip(reason="brainstate fails with jax_enable_checks"))
        if jax.config.jax_enable_x64 and "change_frameworks.py" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="brainstate's Linear fails with 64 bits"))


@functools.cache
def compiles_float16():
    """Return whether XLA compiles float16 here; some processors lack the conversions."""
    try:
        jax.block_until_ready(jax.jit(lambda x: x.astype("float16"))(np.ones(2, np.float32)))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def pytest_collection_finish():
    """Collect garbage rarely: the modules that the tests import have a million objects."""
    gc.freeze()
    gc.set_threshold(100_000, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test of float16 or float8 that XLA cannot compile on this processor."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        # The error may leave a block of `pytest.warns`, which then raises its own error.
        raised = (
            x for x in (error, error.__context__) if isinstance(x, jax.errors.JaxRuntimeError)
        )
        is_symbol = any("Failed to materialize symbols" in str(x) for x in raised)
        if is_symbol and not compiles_float16():
            pytest.skip("XLA compiles no float16 for this processor")
        raise


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Check that a test leaves no marking context, and leaves JAX's primitives unchanged."""
    from jax.extend.core import Primitive

    bind = Primitive.bind
    yield
    assert active_policy() is None
    assert Primitive.bind is bind


@pytest.fixture(scope="module", autouse=True)
def few_executables():
    """Drop compiled programs before their memory maps exceed what Linux allows a process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(auto, auto))
