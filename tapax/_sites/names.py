"""Paths: how names are escaped and joined."""

import re

from tapax._jax import Value


def join(path: str, name: str) -> str:
    """Two paths as one, where either may be empty."""
    return f"{path}/{name}" if path and name else path or name


def segment(key: Value) -> str:
    """A key as one segment of a path; characters that mean something else are escaped."""
    if type(key) is str and key.isidentifier():
        return key
    return re.sub(r"[*?@~:/%]", lambda found: f"%{ord(found.group()):02X}", str(key))
