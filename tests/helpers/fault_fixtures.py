"""Fixtures of tests that disturb runs: one that nobody disturbs, and one to disturb."""

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
