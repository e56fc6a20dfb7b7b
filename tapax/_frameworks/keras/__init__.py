"""The adapter of Keras 3 on its JAX backend."""
