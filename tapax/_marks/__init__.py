"""Marks: the primitives that name values in a program, the rules of JAX for them, and scopes."""
