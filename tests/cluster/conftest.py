"""Fixtures of the tests on Ray. All but the smoke test are in the tier `cluster`."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.clusters import SETTINGS, SimulatedCluster
from helpers.fault_fixtures import reference, run

__all__ = ["reference", "run"]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """The environment of Ray, set before it is imported."""
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def new_cluster() -> Iterator[Callable[[], SimulatedCluster]]:
    """Makes clusters of this test alone."""
    made: list[SimulatedCluster] = []

    def make() -> SimulatedCluster:
        made.append(SimulatedCluster())
        return made[-1]

    yield make
    for cluster in made:
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    """Two nodes with two CPUs in all, beside the head: three nodes."""
    made = SimulatedCluster()
    for _ in range(2):
        made.add_node()
    yield made
    made.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, but leave the smoke test to the fast tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name != "test_smoke.py":
            item.add_marker(pytest.mark.cluster)
