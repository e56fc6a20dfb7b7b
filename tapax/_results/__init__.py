"""Results: the values that public functions return, and the tables that they print as."""

from tapax._results.difference import Difference, SiteDifference
from tapax._results.residual import Residual
from tapax._results.residual_table import ResidualGroups, ResidualTable
from tapax._results.site_table import SiteTable
from tapax._results.tabular import Tabular
from tapax._results.taps import SiteDict, Taps, load_taps
