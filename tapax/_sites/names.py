"""Paths: escaping and joining names."""

import re

from tapax._jax import Value


def join(path: str, name: str) -> str:
    """Join two paths, either of which may be empty."""
    return f"{path}/{name}" if path and name else path or name


def segment(key: Value) -> str:
    """Convert a key to one segment of a path; escape characters that have a meaning in paths."""
    if type(key) is str and key.isidentifier():
        return key
    return re.sub(r"[*?@~:/%]", lambda found: f"%{ord(found.group()):02X}", str(key))
