"""The functions of the package that trace a function and walk it."""
