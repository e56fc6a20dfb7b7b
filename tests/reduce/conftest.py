"""The mesh for the tests of reducers."""

import jax
import pytest


@pytest.fixture
def wide():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(auto, auto))
