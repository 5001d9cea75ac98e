"""SIGTERM and SIGINT in any phase: a usable checkpoint of the last whole update within seconds; a second one kills."""

import os
import random
import signal
import time

import pytest
from helpers.fault_runs import (
    DEADLINE,
    UPDATES,
    Strike,
    Trial,
    assert_checkpoint_of,
    assert_same,
    await_,
    command,
    copy_of,
    end_of,
    events,
    finish,
    launch,
    run_to_end,
    session_of,
    workers_of,
)

TERM, INT = signal.SIGTERM, signal.SIGINT
STEPS, DECISIONS = 4, 12
"""Gradient steps, and host epochs of all groups and their twins, of an update."""


def assert_stopped(trial: Trial, number: int, update: int, unharmed: Trial) -> None:
    """The last process left in good order after so many whole updates."""
    last = events(trial, "run_finished")[-1]
    assert (last["status"], last["exit_code"], last["update"]) == ("stopped", 128 + number, update)
    assert "Traceback" not in trial.told, trial.told
    assert trial.updates == update
    assert_checkpoint_of(trial, update, unharmed)


PLACES = {
    "beginning to watch": ("signal:signal", 2, 0),
    "first host epoch": ("simic.stacked.optimizer:Learner.step", 2, 0),
    "host epoch": ("simic.environment.host_trainings:HostTrainings._train", 2 * DECISIONS + 3, 2),
    "validation": ("simic.environment.host_trainings:HostTrainings._attribute", DECISIONS + 3, 1),
    "statistics": ("simic.training.run:episode_figures", 3, 2),
    "recording episodes": ("simic.training.run:save_episodes", 3, 2),
    "scales are learned": ("simic.ppo.agent:PPOAgent._anchor", 2, 1),
    "between gradient steps": ("simic.ppo.agent:PPOAgent._step", STEPS + 2, 1),
    "gradient steps are done": ("simic.ppo.agent:PPOAgent._metrics", 3, 2),
    "telling": ("simic.training.run:Update", 2, 2),
    "told": ("simic.telemetry.recorder:Recorder.end_update", 3, 3),
    "copying the state": ("simic.training.run:Run.state", 3, 2),
    "writing a checkpoint": ("simic.storage.checkpoint:_write", 2, 2),
    "naming a checkpoint": ("simic.storage.checkpoint:_publish", 2, 2),
    "removing checkpoints": ("simic.storage.checkpoint:_prune", 2, 2),
    "showing": ("simic.training.run:Run.report_progress", 2, 2),
    "saving the controller": ("simic.ppo.agent:PPOAgent.save_controller", 1, UPDATES),
}
"""Where the signal comes: function, call, and the whole updates that are then to be kept."""


@pytest.mark.parametrize("phase", PLACES)
def test_stopped_in_every_phase(phase, trial, unharmed):
    place, call, update = PLACES[phase]
    number = INT if phase.startswith("b") else TERM  # they are treated alike: some of the one kind will do
    every = 1 if "checkpoint" in phase else 3  # so that mostly the stop itself has to write one
    code = run_to_end(trial, Strike(place, call, number), checkpoint_every=every)
    assert code == 128 + number, trial.told
    assert time.time() - float(trial.struck.read_text()) < DEADLINE
    assert_stopped(trial, number, update, unharmed)
    assert_same(finish(trial), unharmed)


@pytest.mark.parametrize("chain", range(4))
def test_stopped_at_random_instants(chain, trial, unharmed):
    rng = random.Random(100 + chain)
    for number, instant in zip([TERM, TERM, INT], sorted(rng.uniform(0, UPDATES - 0.5) for _ in range(3)), strict=True):
        begun, process = trial.starts, launch(trial, checkpoint_every=3)
        await_(lambda: trial.starts > begun, "the run began")  # noqa: B023 - called at once
        await_(lambda: trial.updates >= int(instant), "the update was done")  # noqa: B023
        time.sleep(0.05 + instant % 1 * unharmed.update_seconds)
        os.kill(process.pid, number)
        asked = time.monotonic()
        assert end_of(process) == 128 + number, trial.told
        assert time.monotonic() - asked < DEADLINE
        assert_stopped(trial, number, trial.updates, unharmed)
    assert_same(finish(trial), unharmed)


@pytest.mark.parametrize("second", [TERM, INT])
def test_a_second_signal_kills(second, trial, unharmed):
    process = launch(trial, Strike("simic.storage.checkpoint:_publish", 2, TERM, hang=100))
    await_(trial.struck.exists, "the first signal came")
    time.sleep(0.3)  # the first one waits until the checkpoint is written
    assert process.is_alive()
    os.kill(process.pid, second)
    asked = time.monotonic()
    assert end_of(process) == -second
    assert time.monotonic() - asked < 2
    assert_same(finish(trial), unharmed)


def test_a_stop_that_gets_lost_is_not_forgotten(trial, unharmed):
    """Python drops what is raised while an object is finalised."""
    code = run_to_end(trial, Strike("simic.ppo.agent:PPOAgent._too_far", 2, TERM, swallowed=True))
    assert code == 128 + TERM, trial.told
    assert_checkpoint_of(trial, 1, unharmed)
    trial.log.unlink()  # Python says on its own what it dropped
    assert_same(finish(trial), unharmed)


# With worker processes, through the real command.


def assert_nobody_left(pid: int) -> None:
    await_(lambda: not session_of(pid), f"the processes {session_of(pid)} of the run ended", 30)


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_stopped_with_workers(group, trial, unharmed):
    """Whether the signal comes to the process or, as from a terminal, to the workers too."""
    process, number = command(trial, workers=2), INT if group else TERM
    await_(lambda: trial.updates >= 1, "an update was done")
    assert len(workers_of(process.pid)) == 2
    (os.killpg if group else os.kill)(process.pid, number)
    asked = time.monotonic()
    assert process.wait(DEADLINE) == 128 + number, trial.told
    assert time.monotonic() - asked < DEADLINE
    assert_nobody_left(process.pid)
    assert_stopped(trial, number, trial.updates, unharmed)
    assert_same(finish(trial), unharmed)


@pytest.mark.parametrize("delay", [0.0, 0.02, 1.0])
def test_stopped_while_workers_start(delay, trial, unharmed):
    """Ctrl-C as soon as there are any: nobody complains and nobody stays."""
    process = command(trial, workers=2)
    await_(lambda: workers_of(process.pid), "workers were started")
    time.sleep(delay)
    os.killpg(process.pid, INT)
    assert process.wait(DEADLINE) == 128 + INT, trial.told
    assert_nobody_left(process.pid)
    assert_stopped(trial, INT, 0, unharmed)


def test_workers_leave_when_the_run_is_killed(trial, unharmed):
    process = command(trial, workers=2)
    await_(lambda: trial.updates >= 1, "an update was done")
    process.kill()
    process.wait()
    assert_same(finish(trial), unharmed)
    assert_nobody_left(process.pid)


def test_a_finished_run_stays_as_it_is(unharmed, tmp_path):
    again = copy_of(unharmed, tmp_path / "again")
    assert_same(finish(again), unharmed)
