"""Fixtures of the fault tests; every test here is slow."""

from pathlib import Path

import pytest
from helpers.fault_runs import FaultRun, finish


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    """A run that is never disturbed."""
    return finish(FaultRun(tmp_path_factory.mktemp("reference") / "run"))


@pytest.fixture
def run(tmp_path: Path) -> FaultRun:
    """A run that has not started yet."""
    return FaultRun(tmp_path / "run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this directory as slow."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
