"""Modules beside these tests can be imported by name: `arena`. And contests whose hosts learn in a millisecond."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import arena

from simic.evaluation import contest, contestants
from simic.tasks.task import Task


@pytest.fixture
def compete_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], None]:
    """Let contests in this process be about a task of the test's own, whatever they are told."""

    def use(task: Task) -> None:
        for module in (contest, contestants):
            monkeypatch.setattr(module, "find_task", lambda name: task)

    return use


@pytest.fixture
def tiny_task(compete_on: Callable[[Task], None], monkeypatch: pytest.MonkeyPatch) -> Task:
    """Contests in this process are about a tiny task, and end without a report, which takes seconds."""
    task = arena.make_task()
    compete_on(task)
    monkeypatch.setattr(contest, "write_report", lambda results, path, teller: None)
    return task


@pytest.fixture
def grower(tmp_path: Path) -> str:
    """The path of a learned controller that plants wherever it can, and keeps it."""
    return arena.save_network(tmp_path / "grower.safetensors", arena.EAGER)
