"""Which variants of a test run in the fast tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize` of which those that are not `fast` belong to the slow tier."""
    return [value if value in tuple(fast) else pytest.param(value, marks=pytest.mark.slow) for value in values]
