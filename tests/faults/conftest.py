"""Runs to harm; every test here is slow."""

from pathlib import Path

import pytest
from helpers.fault_runs import Trial, finish


@pytest.fixture(scope="session")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The run that nothing happens to."""
    return finish(Trial(tmp_path_factory.mktemp("unharmed") / "run"))


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A run to harm: not begun yet."""
    return Trial(tmp_path / "run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these are slow."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
