"""The adapter of brainstate, and the parts it is made of."""
