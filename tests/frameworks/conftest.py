"""Fixtures that check that an adapter restores its framework."""

import pytest

from tapax._frameworks.patches import subclasses


def attributes():
    """Return the attributes of all classes of Equinox, except those that `pickle` adds."""
    import equinox as eqx

    return {
        cls: {k: v for k, v in cls.__dict__.items() if k != "__slotnames__"}
        for cls in subclasses(eqx.Module)
    }


@pytest.fixture
def equinox_as_before():
    """Check that a test leaves the classes of Equinox unchanged."""
    before = attributes()
    yield
    after = attributes()
    for cls, names in before.items():
        assert {k: id(v) for k, v in names.items()} == {k: id(v) for k, v in after[cls].items()}


@pytest.fixture
def keras_as_before():
    """Reset names and seeds of Keras, and check that a test leaves its classes unchanged."""
    import keras

    keras.backend.clear_session(free_memory=False)  # collecting garbage takes a second
    keras.utils.set_random_seed(0)
    watched = [*subclasses(keras.Layer), *keras.Variable.__mro__[:-1]]
    before = {cls: {k: id(v) for k, v in cls.__dict__.items()} for cls in watched}
    yield
    for cls, names in before.items():
        assert names == {k: id(v) for k, v in cls.__dict__.items()}
    assert keras.config.dtype_policy().name == "float32"
