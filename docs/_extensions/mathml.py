"""Render formulas as MathML, which browsers show without a script: the site works offline."""

from docutils import nodes
from docutils.utils.math import latex2mathml, pick_math_environment


def _render(source, *, block):
    if block:
        environment = pick_math_environment(source)
        source = rf"\begin{{{environment}}}{source}\end{{{environment}}}"
    return latex2mathml.tex2mathml(source, as_block=block)


def visit_inline(translator, node):
    translator.body.append(_render(node.astext(), block=False))
    raise nodes.SkipNode


def visit_block(translator, node):
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(_render(node.astext(), block=True))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
