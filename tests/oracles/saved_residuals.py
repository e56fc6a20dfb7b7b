"""JAX's list of the values that a function keeps for its backward pass."""

from collections import Counter

from jax._src.ad_checkpoint import saved_residuals


def jax_residuals(fn, *args):
    """Count the types of JAX's residuals, for computed values, and for arguments and constants.

    The counts leave out literals, which are numbers in the text of the program.
    """
    computed, given = Counter(), Counter()
    for aval, origin in saved_residuals(fn, *args):
        is_given = origin.startswith(("from the argument", "from a constant"))
        if origin != "from a literal":
            (given if is_given else computed)[aval.shape, str(aval.dtype)] += 1
    return computed, given


def table_types(table):
    """Count the types in a table of residuals."""
    parts = (
        Counter((r.shape, str(r.dtype)) for r in part if r.kept)
        for part in (table, table.arguments)
    )
    return tuple(parts)


def policy_types(table):
    """Count the types that a table says its policy keeps."""
    parts = (
        Counter((r.shape, str(r.dtype)) for r in part if r.kept_by_policy)
        for part in (table, table.arguments)
    )
    return tuple(parts)
