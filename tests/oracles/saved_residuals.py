"""What JAX itself says that a function keeps for its backward pass."""

from collections import Counter

from jax._src.ad_checkpoint import saved_residuals


def jax_residuals(fn, *args):
    """Counts the types of what JAX keeps: of computed values, and of arguments and constants.

    Literals, numbers in the text of the program, are left out.
    """
    computed, given = Counter(), Counter()
    for aval, origin in saved_residuals(fn, *args):
        is_given = origin.startswith(("from the argument", "from a constant"))
        if origin != "from a literal":
            (given if is_given else computed)[aval.shape, str(aval.dtype)] += 1
    return computed, given


def table_types(table):
    """Counts the same of a table of residuals."""
    parts = (
        Counter((r.shape, str(r.dtype)) for r in part if r.kept)
        for part in (table, table.arguments)
    )
    return tuple(parts)


def policy_types(table):
    """Counts the same of what a table says that its policy keeps."""
    parts = (
        Counter((r.shape, str(r.dtype)) for r in part if r.kept_by_policy)
        for part in (table, table.arguments)
    )
    return tuple(parts)
