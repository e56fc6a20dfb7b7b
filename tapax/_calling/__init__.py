"""From a user's call to a walked program: its arguments, its trace, what is compiled and kept."""
