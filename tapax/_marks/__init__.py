"""Marks: the primitives that name values in a program, their rules, and their context."""
