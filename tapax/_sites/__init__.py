"""Sites: what they are, how they are named, how selections pick them, and errors about them."""

from tapax._sites.errors import SiteError, as_array, name_of, nearest, wrong_type
from tapax._sites.names import join, segment
from tapax._sites.selections import (
    At,
    Operation,
    Ops,
    Reduced,
    Rule,
    Selection,
    StepSlice,
    at,
    check,
    flatten,
    is_exact,
    lines,
    matches,
    named,
    ops,
    rules,
)
from tapax._sites.site import Site
