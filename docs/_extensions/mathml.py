"""Render formulas as MathML, which browsers show without a script: the site works offline."""

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml, pick_math_environment
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _render(node, *, block):
    """Convert the LaTeX of a node; the build warns of commands that cannot be converted."""
    source = node.astext()
    if block and pick_math_environment(source) == "align*":
        source = rf"\begin{{align*}}{source}\end{{align*}}"
    try:
        return latex2mathml.tex2mathml(source, as_block=block)
    except MathError as error:
        logger.warning("The formula %r cannot be shown: %s", source, error, location=node)
        return ""


def visit_inline(translator, node):
    translator.body.append(_render(node, block=False))
    raise nodes.SkipNode


def visit_block(translator, node):
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(_render(node, block=True))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
