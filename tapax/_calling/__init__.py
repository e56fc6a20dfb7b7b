"""From a user's call to a walked program: arguments, tracing, compilation and caches."""
