"""Checks of the built site: links, names in the search index, and every page in Chromium.

`scripts/docs.py` runs them at the end of `make docs`.
"""

import functools
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

SIZES = ((1280, 800), (420, 900))
SEARCHED = (
    "tapax.capture",
    "tapax.reduce.rms",
    "tapax.nn.BatchEnsembleLinear",
    "tapax.Taps.select",
)
WITHOUT_LINKS = ("_frames/", "_static/")
"""Folders of documents that are not pages."""


class PageParser(HTMLParser):
    """Collects the addresses that a document refers to, and its anchors."""

    def __init__(self):
        super().__init__()
        self.addresses = []
        self.anchors = set()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.addresses.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@functools.cache
def parse(path):
    """Parse a document of the site."""
    parser = PageParser()
    parser.feed(path.read_text())
    return parser


def list_pages(site):
    """List the pages of the site, as paths relative to it."""
    found = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(page for page in found if not page.startswith(WITHOUT_LINKS))


def list_links(site, page):
    """List the files of the site that a page refers to, each with an anchor or ''."""
    for address in parse(site / page).addresses:
        if not urlsplit(address).scheme and not address.startswith("//"):
            location, anchor = urldefrag(address)
            target = (site / page).parent / unquote(urlsplit(location).path or Path(page).name)
            yield target.resolve(), unquote(anchor)


def find_broken_links(site):
    """List links to files and anchors that do not exist."""
    faults = []
    for page in list_pages(site):
        for target, anchor in list_links(site, page):
            if not target.exists():
                faults.append(f"{page}: a link to {target}, which does not exist")
            elif anchor and target.suffix == ".html" and anchor not in parse(target).anchors:
                faults.append(f"{page}: a link to {target.name}#{anchor}, which does not exist")
    return sorted(set(faults))


def find_unlinked_pages(site):
    """List pages that nobody reaches from the first page."""
    site = site.resolve()
    reached, new = {"index.html"}, ["index.html"]
    while new:
        for target, _ in list_links(site, new.pop()):
            if target.suffix == ".html" and target.is_relative_to(site):
                linked = target.relative_to(site).as_posix()
                if linked not in reached and not linked.startswith(WITHOUT_LINKS):
                    reached.add(linked)
                    new.append(linked)
    return [f"{page}: no page links to it" for page in list_pages(site) if page not in reached]


def find_missing_names(site):
    """List public names that are not in the index of the search."""
    import tapax
    from tests.docs.public_names import list_public

    text = (site / "searchindex.js").read_text()
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", text.strip(), re.DOTALL)[1])
    found = set()
    for prefix, entries in index["objects"].items():
        names = entries if isinstance(entries, dict) else (entry[4] for entry in entries)
        found.update(f"{prefix}.{name}" if prefix else name for name in names)
    missing = [name for name, _ in list_public("tapax", tapax) if name not in found]
    return [f"searchindex.js: {name} is missing" for name in missing]


def find_faults_in_chromium(site, address):
    """Visit every page in light and dark, wide and narrow; list errors and requests elsewhere."""
    from tests.viewer.chromium import Chromium

    chromium = Chromium()
    try:
        tab = chromium.open(f"{address}index.html", wait="document.readyState === 'complete'")
        faults = [fault for page in list_pages(site) for fault in visit(tab, address, page)]
        return faults + [fault for name in SEARCHED for fault in search(tab, address, name)]
    finally:
        chromium.close()


def visit(tab, address, page):
    """Open a page in all sizes and colours, and list its faults."""
    faults = []
    tab.navigate(address + page)
    for width, height in SIZES:
        tab.resize(width, height)
        for dark in (False, True):
            tab.use_dark(dark)
            theme = "dark" if dark else "light"
            tab.wait_for(f"document.documentElement.dataset.theme === '{theme}'", 10)
        tab.run("document.querySelectorAll('iframe').forEach(frame => frame.scrollIntoView())")
        wide = tab.run("document.documentElement.scrollWidth")
        if wide > width:
            faults.append(f"{page}: {wide} pixels wide in a window of {width}")
    if tab.run("document.querySelectorAll('iframe').length"):
        time.sleep(1)  # frames load when they come into view
    seen = tab.take_seen()
    faults += [f"{page}: {error}" for error in (*seen["errors"], *seen["failures"])]
    outside = [request for request in seen["requests"] if not request.startswith(address)]
    return faults + [f"{page}: a request to {request}" for request in outside]


def search(tab, address, name):
    """Search for a name, and list it if it is not among the results."""
    tab.navigate(f"{address}search.html?q={name}")
    tab.wait_for("document.querySelectorAll('ul.search li').length", 20)
    results = tab.run("document.querySelector('ul.search').textContent")
    return [] if name in results else [f"search.html: {name} was not found"]
