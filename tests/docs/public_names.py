"""Public names, and the parts that their docstrings must have.

A function or method has one sentence that starts with a verb, then `Args:` with every argument,
`Returns:`, `Raises:` and an `Example:`. A class has one sentence, `Args:` or `Attributes:`, and an
example, which also shows its properties. An instance, such as a reducer, has a docstring of its
own: one sentence, `Returns:` and an example.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import types

SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+): \S", re.MULTILINE)
NOT_A_VERB = ("A", "An", "The", "What", "Whether", "How", "Which", "This", "It")


def list_public(name, thing):
    """List what is public in `thing`: itself, or everything in a module, with dotted names."""
    if not isinstance(thing, types.ModuleType):
        is_ours = str(getattr(thing, "__module__", "")).startswith("tapax")
        if is_ours and (inspect.isclass(thing) or callable(thing)):
            yield name, thing
        return
    if not thing.__name__.startswith("tapax"):
        return
    modules = pkgutil.iter_modules(getattr(thing, "__path__", []), f"{thing.__name__}.")
    submodules = (module.name.rpartition(".")[2] for module in modules)
    for part in dict.fromkeys((*thing.__all__, *submodules)):
        if not part.startswith("_"):
            inner = getattr(thing, part, None) or importlib.import_module(f"{name}.{part}")
            yield from list_public(f"{name}.{part}", inner)


def is_instance(thing):
    """Return whether `thing` is an object with a class in tapax, such as `tapax.reduce.rms`."""
    return not inspect.isclass(thing) and type(thing).__module__.startswith("tapax")


def find_faults(name, thing):
    """List the missing parts in the docstring of a function, an instance, or a class."""
    if is_instance(thing):
        return _find_instance_faults(name, thing)
    if not inspect.isclass(thing):
        return _find_function_faults(name, thing)
    faults = _find_class_faults(name, thing)
    fields = inspect.get_annotations(thing)
    examples = inspect.getdoc(thing) or ""
    for part, member in vars(thing).items():
        if part.startswith("_") or part in fields:
            continue
        if isinstance(member, property):
            faults += _find_sentence_faults(f"{name}.{part}", inspect.getdoc(member) or "")
            if f".{part}" not in examples.partition(">>>")[2]:
                faults.append(f"{name}.{part}: no example of the class shows the property")
        elif isinstance(member, (types.FunctionType, classmethod, staticmethod)):
            faults += _find_function_faults(f"{name}.{part}", getattr(thing, part))
    return faults


def _find_function_faults(name, function):
    doc = inspect.getdoc(function) or ""
    faults = _find_sentence_faults(name, doc)
    if doc.split(" ")[0] in NOT_A_VERB:
        faults.append(f"{name}: the first sentence must start with a verb")
    signature = inspect.signature(function)
    faults += _find_argument_faults(name, doc, "Args", _list_arguments(signature))
    if signature.return_annotation not in (None, "None"):
        faults += _find_missing(name, doc, "Returns")
    if _list_arguments(signature):
        faults += _find_missing(name, doc, "Raises")
    return faults + _find_missing(name, doc, "Example")


def _find_instance_faults(name, instance):
    if instance.__doc__ == type(instance).__doc__:
        return [f"{name}: `help` shows the docstring of {type(instance).__name__} instead"]
    doc = inspect.cleandoc(instance.__doc__)
    faults = _find_sentence_faults(name, doc) + _find_missing(name, doc, "Returns")
    return faults + _find_missing(name, doc, "Example")


def _find_class_faults(name, cls):
    doc = cls.__doc__ or ""
    doc = inspect.cleandoc(doc)
    faults = _find_sentence_faults(name, doc) + _find_missing(name, doc, "Example")
    if dataclasses.is_dataclass(cls):
        fields = {field.name for field in dataclasses.fields(cls)}
        faults += _find_argument_faults(name, doc, "Attributes", fields)
    elif hasattr(cls, "_fields"):
        faults += _find_argument_faults(name, doc, "Attributes", set(cls._fields))
    elif isinstance(cls.__init__, types.FunctionType):
        arguments = _list_arguments(inspect.signature(cls.__init__))
        faults += _find_argument_faults(name, doc, "Args", arguments)
    return faults


def _list_arguments(signature):
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    arguments = (stars.get(p.kind, "") + p.name for p in signature.parameters.values())
    return {argument for argument in arguments if argument != "self"}


def _find_sentence_faults(name, doc):
    first = doc.partition("\n")[0]
    return [] if first.endswith(".") else [f"{name}: the first line must be one sentence"]


def _find_missing(name, doc, section):
    content = _split(doc).get(section, "")
    found = ">>> " in content if section == "Example" else content.strip()
    return [] if found else [f"{name}: {section} is missing"]


def _find_argument_faults(name, doc, section, expected):
    found = set(ENTRY.findall(_split(doc).get(section, "")))
    faults = [f"{name}: {section} lacks {argument}" for argument in sorted(expected - found)]
    return faults + [f"{name}: {section} has {other}" for other in sorted(found - expected)]


def _split(doc):
    """Split a docstring into its sections, by title."""
    parts = SECTIONS.split(doc)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
