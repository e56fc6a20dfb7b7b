"""The adapter of Flax NNX, and its parts."""
