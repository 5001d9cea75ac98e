"""Comparing controllers on hosts they never saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simic.evaluation.comparison import evaluate as evaluate

__all__ = ["evaluate"]


def __getattr__(name: str) -> object:
    if name != "evaluate":
        raise AttributeError(f"module 'simic.evaluation' has no attribute {name!r}")
    from simic.evaluation.comparison import evaluate

    return evaluate
