"""What all tests share: one thread, so that runs on a busy machine are quick and sums come in one order; fixtures."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import tiny_comparison, tiny_run

from simic import api
from simic.control.registry import CONTROLLERS
from simic.evaluation.parsing import NamedTask
from simic.growth.blueprints import BLUEPRINTS
from simic.policy.registry import POLICIES
from simic.rewards.schemes import SCHEMES, TERMS
from simic.tasks.registry import FAMILIES, TASKS
from simic.tasks.task import Task
from simic.training import build, episodes

torch.set_num_threads(1)


def pytest_configure() -> None:
    """Let commands that tests start be stopped by SIGINT, which a shell's background job and its children ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def learn_this(monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], None]:
    """Let all groups of runs in this process learn a task of the test's own."""

    def use(task: Task) -> None:
        for module in (build, episodes):
            monkeypatch.setattr(module, "find_task", lambda name, **settings: task)

    return use


@pytest.fixture
def tiny_task(learn_this: Callable[[Task], None]) -> Task:
    """Runs in this process learn a task whose host epochs take a millisecond."""
    task = tiny_run.make_task()
    learn_this(task)
    return task


@pytest.fixture
def compete_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], None]:
    """Let contests in this process be about a task of the test's own, whatever they are told."""

    def use(task: Task) -> None:
        monkeypatch.setattr(NamedTask, "find", lambda self: task)

    return use


@pytest.fixture
def tiny_comparison_task(compete_on: Callable[[Task], None], monkeypatch: pytest.MonkeyPatch) -> Task:
    """Contests in this process are about a tiny task, and end without a report, which takes seconds."""
    task = tiny_comparison.make_task()
    compete_on(task)
    monkeypatch.setattr(api, "write_report", lambda comparison, path: "")
    return task


@pytest.fixture
def grower(tmp_path: Path) -> str:
    """The path of a learned controller that plants wherever it can, and keeps it."""
    return tiny_comparison.save_network(tmp_path / "grower.safetensors", tiny_comparison.EAGER)


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register blueprints, tasks, controllers and so on of its own."""
    for registry in (BLUEPRINTS, TASKS, FAMILIES, CONTROLLERS, POLICIES, SCHEMES, TERMS):
        monkeypatch.setattr(registry, "_entries", dict(registry))
        monkeypatch.setattr(registry, "_homes", dict(registry._homes))  # pyright: ignore[reportPrivateUsage]
