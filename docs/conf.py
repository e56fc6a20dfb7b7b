"""The site of the documentation: `make docs` builds it into build/docs, every page executed.

Pages are MyST Markdown. The cells of a page run in one kernel, in an empty temporary folder; an
error in a cell fails the build, and so does every warning. Outputs are cached below build/ until
the code of the page or of tapax changes.

To embed a live page of `tapax.view`, end a cell with `tapax.view(...)`. Its output in a notebook is
a frame that contains the page; `_extensions/embedded_pages.py` moves the content of the frame into
a file of the site.
"""

import hashlib
import inspect
import os
import re
import shutil
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_extensions")]

from public_names_reference import find_module  # noqa: E402

import tapax  # noqa: E402

# Kernels import this checkout, examples/ included, and read no settings of the user.
os.environ["PYTHONPATH"] = str(ROOT)
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
os.environ["IPYTHONDIR"] = str(BUILD / "docs-ipython")
_profile = BUILD / "docs-ipython" / "profile_default"
(_profile / "startup").mkdir(parents=True, exist_ok=True)
(_profile / "ipython_kernel_config.py").write_text('get_config().Application.log_level = "ERROR"\n')
shutil.copy(ROOT / "docs" / "_extensions" / "name_cells.py", _profile / "startup")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes more time than running small models, so let XLA optimise less.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

project = "tapax"
author = "The tapax authors"
project_copyright = "The tapax authors"
version = release = tapax.__version__
language = "en"
smartquotes = False  # they would turn --version into a dash

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_sitemap",
    "sphinxext.opengraph",
    "embedded_pages",
    "folder_indexes",
    "mathml",
    "public_names_reference",
]
exclude_patterns = ["_extensions", "_static"]
templates_path = []

default_role = "code-or-name"  # of docstrings; pages are Markdown

# Every name of tapax that a page refers to must be in the reference.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!tapax\b).*"), (r"py:.*", r"tapax\.(\w+\.)*_.*")]


def _digest_sources():
    """Compute a digest of all files that may change the output of a cell."""
    digest = hashlib.sha256()
    for folder in ("tapax", "examples", "constraints", "docs/_extensions"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".txt") or path.name == "stamp":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILD / "docs-outputs" / _digest_sources())
nb_execution_in_temp = True
nb_execution_timeout = 300
# A failure is a warning, which fails the build at its end. If a process raised, Sphinx could wait
# for its other processes forever.
nb_execution_raise_on_error = False
nb_execution_show_tb = True
nb_merge_streams = True
# A widget needs a kernel and scripts from a CDN; the HTML beside it needs neither.
nb_ipywidgets_js = {}
nb_mime_priority_overrides = [("*", "application/vnd.jupyter.widget-view+json", None)]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

_INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
    "equinox": "https://docs.kidger.site/equinox/",
    "optax": "https://optax.readthedocs.io/en/latest/",
}


def _fetch_inventory(name):
    """Return the path of an inventory that was fetched, now or before; None without a network."""
    path = BUILD / "docs-inventories" / f"{name}.inv"
    if not path.exists():
        try:
            with urllib.request.urlopen(_INVENTORIES[name] + "objects.inv", timeout=10) as answer:
                content = answer.read()
        except OSError:
            print(f"No inventory of {name}: names of {name} are not links.")
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(path)


with ThreadPoolExecutor() as _threads:
    _fetched = dict(zip(_INVENTORIES, _threads.map(_fetch_inventory, _INVENTORIES), strict=True))
intersphinx_mapping = {
    name: (_INVENTORIES[name], path) for name, path in _fetched.items() if path is not None
}

html_theme = "sphinx_book_theme"
html_title = "tapax"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "https://tapax.readthedocs.io/")
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_domain_indices = False
html_logo = "_static/favicon.svg"
html_favicon = "_static/favicon.svg"
html_copy_source = True
html_theme_options = {
    "repository_url": "https://github.com/tapax/tapax",
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_edit_page_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "logo": {"text": "tapax"},
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_math_renderer = "mathml"
html_permalinks_icon = "#"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

sitemap_url_scheme = "{link}"
sitemap_show_lastmod = False
ogp_site_url = html_baseurl
ogp_site_name = "tapax"
ogp_description_length = 200
ogp_social_cards = {"line_color": "#2563eb", "image": "_static/card.png"}


def linkcode_resolve(domain, info):
    """Return the address of the source of a name."""
    thing = find_module(info["module"])
    for part in info["fullname"].split("."):
        thing = getattr(thing, part, None)
    thing = inspect.unwrap(thing.fget if isinstance(thing, property) else thing)
    try:
        path = Path(inspect.getsourcefile(thing)).relative_to(ROOT)
        lines, first = inspect.getsourcelines(thing)
    except (TypeError, ValueError, OSError):
        return None
    return f"https://github.com/tapax/tapax/blob/main/{path}#L{first}-L{first + len(lines) - 1}"


linkcheck_anchors = False
linkcheck_ignore = [r"https://github\.com/tapax/tapax.*", re.escape(html_baseurl) + ".*"]
