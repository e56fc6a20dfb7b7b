"""The captured sites that a selection picks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tapax._sites import At, Selection, Site, SiteError, check, flatten, matches, nearest, show


def pick_sites(selection: Selection, sites: Sequence[Site], method: str, where: str) -> list[Site]:
    """Return the sites that a selection picks, in their order; every part of it must pick one.

    Errors name the `method` that the user called, and `where`, the source of the sites.
    """
    selection = check(selection, "selection")
    picked: set[str] = set()
    for part in flatten(selection):
        if isinstance(part, At):
            raise SiteError(
                f"`{method}` takes whole sites, but {show(part)} picks a part of their values. "
                "Capture that part, or index the arrays."
            )
        found = {site.name for site in sites if _is_picked(part, site)}
        if not found and part != "**":
            raise _no_match(part, sites, method, where)
        picked |= found
    return [site for site in sites if site.name in picked]


def _is_picked(part: Any, site: Site) -> bool:
    # Globs pick whole arrays here, not single layers.
    site = dataclasses.replace(site, layers=())
    if not isinstance(part, str):
        return matches(part, site)
    # In a capture, globs do not pick operations. Here they do, because the user captured them. But
    # the weights of an attention layer are not a leaf of its result, so `**/attn` leaves them out.
    is_leaf = site.kind != "weights" or ":" in part
    path = site.path if is_leaf else site.path.replace(":", "%3A")
    return matches(part, dataclasses.replace(site, kind="sow", path=path))


def _no_match(part: Any, sites: Sequence[Site], method: str, where: str) -> SiteError:
    names = [site.name for site in sites]
    is_glob = isinstance(part, str)
    what = f"the predicate {show(part)}" if callable(part) else show(part)
    if not names:
        return SiteError(f"`{method}` was given {what}, but {where} is empty.")
    near = nearest(part if is_glob else "", names)
    return SiteError(f"`{method}` was given {what}, which matches no site in {where}. {near}")
