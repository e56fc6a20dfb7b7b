"""Warnings that point at the user's code, however deep in tapax and JAX they are raised."""

import sys
import warnings

from tapax._marks.source_folders import JAX_FOLDER, TAPAX_FOLDER


def warn_user(message: str) -> None:
    """Warn at the line that called tapax: the innermost frame outside of tapax and of JAX."""
    level, frame = 2, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_code.co_filename.startswith((TAPAX_FOLDER, JAX_FOLDER)):
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
