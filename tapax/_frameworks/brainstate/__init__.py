"""The adapter of brainstate."""
