"""Eight CPU devices for the tests of meshes; and an end to what one test leaves for the next."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import pytest

from tapax._marks.context import active_policy


def pytest_collection_modifyitems(items):
    """Leaves out what a framework cannot do under a setting of JAX's, with or without tapax."""
    for item in items:
        if "brainstate" not in item.nodeid and "frameworks.md" not in item.nodeid:
            continue
        if jax.config.jax_enable_checks:
            item.add_marker(pytest.mark.skip(reason="brainstate fails with jax_enable_checks"))
        if jax.config.jax_enable_x64 and "change_frameworks.py" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="brainstate's Linear fails with 64 bits"))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test leaves the thread without a marking context and JAX's primitives as they were."""
    from jax.extend.core import Primitive

    bind = Primitive.bind
    yield
    assert active_policy() is None
    assert Primitive.bind is bind


@pytest.fixture
def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(auto, auto))
