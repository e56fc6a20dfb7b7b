"""Adapters of frameworks, and the paths and sites of their modules."""
