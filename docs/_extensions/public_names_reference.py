"""The reference: an entry for each public name, from its docstring.

    ```{namespace} tapax.reduce
    ```

begins a namespace, with the docstring of its module;

    ```{public} tapax.reduce
    rms norm
    ```

has entries for the names of it that are listed, or for all of them if none is listed;

    ```{public-table} tapax.reduce
    ```

is a table of all names with their first sentences. A name that is public in two namespaces is
documented in the first, and the second refers to it. A public name without an entry is a warning,
and so fails the build.
"""

import functools
import importlib
import inspect
import re
import types

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import tapax
from tests.docs.public_names import list_public

logger = logging.getLogger(__name__)

PLURAL = re.compile(r"(`[^`\n]+`)s\b")


@functools.cache
def find_public():
    """Map dotted names to public things, in the order of the package."""
    return dict(list_public("tapax", tapax))


@functools.cache
def find_first_names():
    """Map the identity of a public thing to the name of its entry in the reference."""
    first = {}
    for name, thing in find_public().items():
        known = first.get(id(thing))
        if known is None or name.count(".") < known.count("."):
            first[id(thing)] = name
    return first


def find_members(cls):
    """List the public methods and properties of a class."""
    fields = inspect.get_annotations(cls)
    kinds = (property, types.FunctionType, classmethod, staticmethod)
    return [
        name
        for name, member in vars(cls).items()
        if not name.startswith("_") and name not in fields and isinstance(member, kinds)
    ]


@functools.cache
def find_targets():
    """Map all names that docstrings may refer to, with those of members, to their first names."""
    targets = {}
    for name, thing in find_public().items():
        first = find_first_names()[id(thing)]
        targets[name] = first
        if inspect.isclass(thing):
            for member in find_members(thing):
                targets[f"{name}.{member}"] = targets[f"{first}.{member}"] = f"{first}.{member}"
                targets.setdefault(f"{thing.__name__}.{member}", f"{first}.{member}")
            targets.setdefault(thing.__name__, first)
    for name in find_public():
        parent = name.rpartition(".")[0]
        targets.setdefault(parent, parent)
    return targets


def refer(name, rawtext, text, lineno, inliner, options=None, content=()):
    """Parse single backticks, which are code in docstrings: refer to public names, quote others."""
    code = rawtext.removeprefix("`").removesuffix("`").replace("\n", " ")
    env = inliner.document.settings.env
    target = find_targets().get(code.removesuffix("()"))
    if target is None and env.temp_data.get("tapax:is_namespace"):
        target = find_targets().get(f"{env.ref_context.get('py:module')}.{code}")
    literal = nodes.literal(rawtext, code)
    if target is None:
        return [literal], []
    literal["classes"] += ["xref", "py", "py-obj"]
    reference = addnodes.pending_xref(
        rawtext, literal, refdomain="py", reftype="obj", reftarget=target, refexplicit=True
    )
    reference["refdoc"] = env.docname
    return [reference], []


def allow_plurals(text):
    """Separate the code from its plural, as reStructuredText must have it: `Site`s."""
    return PLURAL.sub(r"\1\\ s", text)


def convert_docstring(app, what, name, thing, options, lines):
    """Convert a docstring to reStructuredText that napoleon takes further."""
    lines[:] = map(allow_plurals, lines)
    # Keep napoleon from reading a sentence with a colon as a type and a description.
    for number in reversed(range(len(lines))):
        if lines[number].strip() == "Returns:":
            lines.insert(number + 1, "    \\")


def skip_member(app, what, name, thing, skip, options):
    """Skip the fields of named tuples, which the docstrings of their classes describe."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def find_module(namespace):
    """Find a public module by its public name: `tapax.sink` is not the module of that name."""
    module = tapax
    for part in namespace.split(".")[1:]:
        module = getattr(module, part, None) or importlib.import_module(namespace)
    return module


class Entries(SphinxDirective):
    """A directive that writes Markdown, which is then parsed in its place."""

    required_arguments = 1
    has_content = True

    def run(self):
        names = " ".join(self.content).split()
        text = "\n".join(self.write(self.arguments[0], names))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Namespace(Entries):
    """The docstring of a module, and a target for references to the module."""

    def run(self):
        self.env.temp_data["tapax:is_namespace"] = True
        try:
            return super().run()
        finally:
            del self.env.temp_data["tapax:is_namespace"]

    def write(self, namespace, names):
        yield from ("```{eval-rst}", f".. py:module:: {namespace}", "")
        yield from allow_plurals(inspect.getdoc(find_module(namespace)) or "").split("\n")
        yield from ("", f".. py:currentmodule:: {namespace}", "```", "")


class Public(Entries):
    """Entries of public names."""

    def write(self, namespace, names):
        for name in names or list_names(namespace):
            full = f"{namespace}.{name}"
            thing = find_public().get(full)
            if thing is None:
                raise self.error(f"{full} is not a public name.")
            yield from ("```{eval-rst}", f".. py:currentmodule:: {namespace}", "")
            yield from write_entry(full, thing)
            yield from ("```", "")


def list_names(namespace):
    """List the public names of a namespace."""
    names = [name for name in find_public() if name.rpartition(".")[0] == namespace]
    return [name.rpartition(".")[2] for name in names]


def write_entry(full, thing):
    """Write the directive of one entry."""
    name = full.rpartition(".")[2]
    first = find_first_names()[id(thing)]
    is_class, is_function = inspect.isclass(thing), inspect.isroutine(thing)
    kind = "class" if is_class else "function" if is_function else "data"
    if first != full:
        yield from (f".. py:{kind}:: {name}", "", f"   An alias of :py:obj:`{first}`.", "")
        return
    yield f".. auto{kind}:: {full}"
    if is_class:
        yield f"   :members: {', '.join(find_members(thing))}"
    if kind == "data":
        yield "   :no-value:"
    yield ""


class PublicTable(Entries):
    """A table of the names of a namespace, with the first sentence of each docstring."""

    def write(self, namespace, names):
        yield from ("| name | purpose |", "|---|---|")
        for name in names or list_names(namespace):
            full = f"{namespace}.{name}"
            thing = find_public()[full]
            target = find_first_names()[id(thing)]
            sentence = (inspect.getdoc(thing) or "").partition("\n")[0].replace("|", "\\|")
            yield f"| {{py:obj}}`{full} <{target}>` | {sentence} |"
        yield ""


def check_coverage(app, env):
    """Warn of public names, and of members of public classes, that have no entry."""
    entries = env.domains["py"].objects
    for name, thing in find_public().items():
        is_first = find_first_names()[id(thing)] == name
        members = find_members(thing) if inspect.isclass(thing) and is_first else ()
        for full in (name, *(f"{name}.{member}" for member in members)):
            if full not in entries:
                logger.warning("The reference has no entry for %s.", full, type="reference")


def setup(app):
    app.add_role("code-or-name", refer)
    app.add_directive("namespace", Namespace)
    app.add_directive("public", Public)
    app.add_directive("public-table", PublicTable)
    app.connect("autodoc-process-docstring", convert_docstring, priority=100)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("env-check-consistency", check_coverage)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
