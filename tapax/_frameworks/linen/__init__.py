"""The adapter of Flax Linen, and the parts it is made of."""
