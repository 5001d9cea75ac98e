"""Fixtures of the fault tests; every test here is slow."""

from pathlib import Path

import pytest
from helpers.fault_fixtures import reference, run

__all__ = ["reference", "run"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this directory as slow."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
