"""Move the content of frames into files: a page of `tapax.view` is embedded, and loads lazily.

A cell that ends with `tapax.view(...)` outputs a frame with a whole document in its attribute
`srcdoc`, about two megabytes. Readers should not load it before they scroll to it.
"""

import hashlib
import html
import re
from pathlib import Path

FRAME = re.compile(r'<iframe([^>]*?) srcdoc="([^"]*)"')


def move_frames(app, pagename, templatename, context, doctree):
    """Write the document of each frame to a file, and let the frame refer to the file."""

    def move(match):
        document = html.unescape(match[2]).encode()
        name = f"_frames/{hashlib.sha256(document).hexdigest()[:16]}.html"
        path = Path(app.outdir) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(document)
        address = context["pathto"](name, resource=True)
        return f'<iframe{match[1]} class="tapax-page" loading="lazy" src="{address}"'

    if "srcdoc=" in context.get("body", ""):
        context["body"] = FRAME.sub(move, context["body"])


def setup(app):
    app.connect("html-page-context", move_frames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
