"""A captured function of Keras follows the settings of layers that change between calls."""

import keras
import numpy as np
import pytest
from keras import layers

import tapax
from tests.oracles.closeness import assert_close

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("keras_as_before")]

X = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)


def test_a_frozen_batch_norm_is_that_of_the_plain_call():
    model = keras.Sequential([keras.Input((2,)), layers.BatchNormalization(name="norm")])
    traces = []

    def forward(x):
        traces.append(1)
        return model(x, training=True)

    captured = tapax.capture(forward)
    captured(X)
    for trainable in (False, True, False):
        model.layers[0].trainable = trainable
        before = [np.asarray(v.value) for v in model.variables]
        out, taps = captured(X)
        after = [np.asarray(v.value) for v in model.variables]
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
        assert_close(out, model(X, training=True))
        assert_close(taps.values["sequential/norm"], out)
        assert_close(after, [np.asarray(v.value) for v in model.variables])
    assert len(traces) == 3  # the first reveals the variables; one for each setting


def test_a_function_that_makes_layers_is_traced_once_more_only():
    traces = []

    def forward(x):
        traces.append(1)
        return layers.Dense(2, name="made")(x)

    captured = tapax.capture(forward)
    for _ in range(3):
        captured(X)
    assert len(traces) <= 2
