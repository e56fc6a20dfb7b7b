"""Sites: what they are, how they are named, how selections pick them, and errors about them."""

from tapax._sites.errors import SiteError as SiteError
from tapax._sites.errors import as_array as as_array
from tapax._sites.errors import name_of as name_of
from tapax._sites.errors import nearest as nearest
from tapax._sites.errors import wrong_type as wrong_type
from tapax._sites.names import join as join
from tapax._sites.names import segment as segment
from tapax._sites.selections import At as At
from tapax._sites.selections import Operation as Operation
from tapax._sites.selections import Ops as Ops
from tapax._sites.selections import Reduced as Reduced
from tapax._sites.selections import Rule as Rule
from tapax._sites.selections import Selection as Selection
from tapax._sites.selections import StepSlice as StepSlice
from tapax._sites.selections import at as at
from tapax._sites.selections import check as check
from tapax._sites.selections import flatten as flatten
from tapax._sites.selections import is_exact as is_exact
from tapax._sites.selections import lines as lines
from tapax._sites.selections import matches as matches
from tapax._sites.selections import named as named
from tapax._sites.selections import ops as ops
from tapax._sites.selections import rules as rules
from tapax._sites.site import Site as Site
