"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings


def warn_user(message: str) -> None:
    """Warn at the line of the first caller outside simic and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("simic", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
