"""Fixtures that check that an adapter left its framework as it was."""

import pytest

from tapax._frameworks.patches import subclasses


def attributes():
    """The attributes of all classes of Equinox, except what `pickle` keeps in them."""
    import equinox as eqx

    return {
        cls: {k: v for k, v in cls.__dict__.items() if k != "__slotnames__"}
        for cls in subclasses(eqx.Module)
    }


@pytest.fixture
def equinox_as_before():
    """A test leaves the classes of Equinox as they were."""
    before = attributes()
    yield
    after = attributes()
    for cls, names in before.items():
        assert {k: id(v) for k, v in names.items()} == {k: id(v) for k, v in after[cls].items()}


@pytest.fixture
def keras_as_before():
    """Names and weights do not depend on other tests, and a test leaves the classes of Keras."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    watched = [*subclasses(keras.Layer), *keras.Variable.__mro__[:-1]]
    before = {cls: {k: id(v) for k, v in cls.__dict__.items()} for cls in watched}
    yield
    for cls, names in before.items():
        assert names == {k: id(v) for k, v in cls.__dict__.items()}
    assert keras.config.dtype_policy().name == "float32"
