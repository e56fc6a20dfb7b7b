"""The public functions that trace a user's function and walk its program."""
