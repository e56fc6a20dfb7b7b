"""The adapter of Flax NNX, and the parts it is made of."""
