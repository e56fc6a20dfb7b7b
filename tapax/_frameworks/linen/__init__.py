"""The adapter of Flax Linen."""
