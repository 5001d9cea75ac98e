"""Modules beside these tests can be imported by name: `tiny`. And the task of tiny runs."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny

from simic.tasks.task import Task
from simic.training import build, episodes


@pytest.fixture
def learn_this(monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], None]:
    """Let all groups of runs in this process learn a task of the test's own."""

    def use(task: Task) -> None:
        for module in (build, episodes):
            monkeypatch.setattr(module, "group_task", lambda name, split, rng_seed, data_dir=None: task)

    return use


@pytest.fixture
def tiny_task(learn_this: Callable[[Task], None]) -> Task:
    """Runs in this process learn a task whose host epochs take a millisecond."""
    task = tiny.make_task()
    learn_this(task)
    return task
