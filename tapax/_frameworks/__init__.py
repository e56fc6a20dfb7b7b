"""Frameworks: the adapters, and how the modules of a framework get their paths and become sites."""
