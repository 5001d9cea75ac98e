"""One host grown in a plain loop is trained as its task says."""

import dataclasses

import numpy as np
import pytest
from helpers.tiny_comparison import make_task

import simic
from simic.control.baselines import WaitController
from simic.control.facts import Facts
from simic.tasks.task import Length
from simic.telemetry.events import RunFinished
from simic.telemetry.reader import read_events
from simic.training.grow_task import Grown


class Watcher(WaitController):
    """Waits, and keeps what it was told."""

    def __init__(self) -> None:
        self.horizons, self.rates = list[int](), list[float]()

    def act(self, facts: Facts) -> np.ndarray:
        self.horizons.append(int(facts.horizon[0]))
        self.rates.append(float(facts.learning_rate[0] - facts.first_learning_rate[0]))
        return super().act(facts)


def watch(**changes) -> tuple[Watcher, Grown]:
    watcher = Watcher()
    return watcher, simic.grow(dataclasses.replace(make_task(), **changes), watcher)


def test_it_lasts_as_long_as_the_task_says_and_tells_what_is_told():
    watcher, _ = watch(length=Length(host_epochs=3, planned=6))
    assert watcher.horizons == [6, 6, 6]
    watcher, _ = watch(length=Length(host_epochs=4, told=False))
    assert watcher.horizons == [0, 0, 0, 0]


def test_the_learning_rate_falls_only_if_it_is_annealed():
    falling, _ = watch(length=Length(host_epochs=4))
    constant, _ = watch(length=Length(host_epochs=4, told=False, anneal=False))
    assert falling.rates[-1] < -0.1
    assert constant.rates == [pytest.approx(0, abs=1e-9)] * 4


def test_a_number_of_host_epochs_replaces_the_length():
    watcher = Watcher()
    simic.grow(dataclasses.replace(make_task(), length=Length(host_epochs=9, told=False)), watcher, host_epochs=2)
    assert watcher.horizons == [2, 2]
    with pytest.raises(ValueError, match="host_epochs must be at least 1, got 0"):
        simic.grow(make_task(), watcher, host_epochs=0)


def test_the_optimizer_is_that_of_the_task():
    length = Length(host_epochs=3)
    weights = [
        [parameter.detach().clone() for parameter in watch(length=length, optimizer=name)[1].plain.parameters()]
        for name in ("adamw", "sgd", "sgd")
    ]
    assert any((one != other).any() for one, other in zip(weights[0], weights[1], strict=True))
    assert all((one == other).all() for one, other in zip(weights[1], weights[2], strict=True))


def test_its_log_says_how_it_ended(tmp_path):
    """Also while the grown model lives on."""
    grown = simic.grow(make_task(), "wait", host_epochs=2, log=tmp_path / "done")
    assert [event.status for event in read_events(tmp_path / "done") if isinstance(event, RunFinished)] == ["done"]
    assert len(grown.decisions) == 2

    for error, status in ((KeyboardInterrupt(), "stopped"), (RuntimeError("no"), "failed")):

        def fail(decision: simic.Decision, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            simic.grow(make_task(), "wait", host_epochs=2, log=tmp_path / status, on_decision=fail)
        (end,) = [event for event in read_events(tmp_path / status) if isinstance(event, RunFinished)]
        assert (end.status, end.reason) == (status, "interrupted" if status == "stopped" else "RuntimeError: no")
