"""SIGTERM and SIGINT in any phase: a checkpoint of the last complete update within seconds; a second one kills."""

import os
import random
import signal
import time

import pytest
from helpers.fault_places import FINALIZER_PLACE, STOP_PLACES, UPDATES
from helpers.fault_runs import (
    DEADLINE,
    FaultRun,
    InjectedSignal,
    assert_checkpoint_of,
    assert_same_results,
    command,
    copy_of,
    events,
    finish,
    run_to_end,
    session_of,
    start,
    wait_for,
    wait_until,
    workers_of,
)

TERM, INT = signal.SIGTERM, signal.SIGINT


def assert_stopped(run: FaultRun, number: int, update: int, reference: FaultRun) -> None:
    """The last process stopped cleanly after this number of complete updates."""
    last = events(run, "run_finished")[-1]
    assert (last["status"], last["exit_code"], last["update"]) == ("stopped", 128 + number, update)
    assert "Traceback" not in run.output, run.output
    assert run.updates == update
    assert_checkpoint_of(run, update, reference)


@pytest.mark.parametrize("phase", STOP_PLACES)
def test_stopped_in_every_phase(phase, run, reference):
    place, call, update = STOP_PLACES[phase]
    number = INT if phase.startswith("b") else TERM  # both are treated alike: a few of the one kind suffice
    every = 1 if "checkpoint" in phase else 3  # so that in most cases the stop itself writes one
    code = run_to_end(run, InjectedSignal(place, call, number), checkpoint_every=every)
    assert code == 128 + number, run.output
    assert time.time() - float(run.signal_file.read_text()) < DEADLINE
    assert_stopped(run, number, update, reference)
    assert_same_results(finish(run), reference)


@pytest.mark.parametrize("chain", range(4))
def test_stopped_at_random_instants(chain, run, reference):
    rng = random.Random(100 + chain)
    for number, instant in zip([TERM, TERM, INT], sorted(rng.uniform(0, UPDATES - 0.5) for _ in range(3)), strict=True):
        begun, process = run.starts, start(run, checkpoint_every=3)
        wait_until(lambda: run.starts > begun, "the run began")  # noqa: B023 - called at once
        wait_until(lambda: run.updates >= int(instant), "the update was done")  # noqa: B023
        time.sleep(0.05 + instant % 1 * reference.update_seconds)
        os.kill(process.pid, number)
        asked = time.monotonic()
        assert wait_for(process) == 128 + number, run.output
        assert time.monotonic() - asked < DEADLINE
        assert_stopped(run, number, run.updates, reference)
    assert_same_results(finish(run), reference)


@pytest.mark.parametrize("second", [TERM, INT])
def test_a_second_signal_kills(second, run, reference):
    process = start(run, InjectedSignal("os:replace", 5, TERM, hang=100))
    wait_until(run.signal_file.exists, "the first signal came")
    time.sleep(0.3)  # the first one is deferred until the checkpoint is written
    assert process.is_alive()
    os.kill(process.pid, second)
    asked = time.monotonic()
    assert wait_for(process) == -second
    assert time.monotonic() - asked < 2
    assert_same_results(finish(run), reference)


def test_a_stop_that_python_ignores_is_not_lost(run, reference):
    """Python ignores exceptions in finalizers."""
    code = run_to_end(run, InjectedSignal(FINALIZER_PLACE, 2, TERM, in_finalizer=True))
    assert code == 128 + TERM, run.output
    assert "Traceback" not in run.output, run.output
    assert_checkpoint_of(run, 1, reference)
    assert_same_results(finish(run), reference)


# With worker processes, through the real command.


def assert_no_process_left(pid: int) -> None:
    wait_until(lambda: not session_of(pid), f"the processes {session_of(pid)} of the run ended", 30)


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_stopped_with_workers(group, run, reference):
    """The signal is sent to the process only or, as by a terminal, to the workers too."""
    process, number = command(run, workers=2), INT if group else TERM
    wait_until(lambda: run.updates >= 1, "an update was done")
    assert len(workers_of(process.pid)) == 2
    (os.killpg if group else os.kill)(process.pid, number)
    asked = time.monotonic()
    assert process.wait(DEADLINE) == 128 + number, run.output
    assert time.monotonic() - asked < DEADLINE
    assert_no_process_left(process.pid)
    assert_stopped(run, number, run.updates, reference)
    assert_same_results(finish(run), reference)


@pytest.mark.parametrize("number", [TERM, INT])
def test_stopped_while_workers_start_and_the_run_is_built(number, run, reference):
    """A signal as soon as there are workers: no error output, no process and no run left."""
    process = command(run, workers=2)
    wait_until(lambda: workers_of(process.pid), "workers were started")
    os.killpg(process.pid, number)
    assert process.wait(DEADLINE) == (128 + INT if number == INT else -TERM), run.output
    assert_no_process_left(process.pid)
    assert "Traceback" not in run.output, run.output
    assert not (run.path / "config.json").exists()
    assert_same_results(finish(run), reference)


@pytest.mark.parametrize("delay", [0.0, 0.02, 1.0])
def test_stopped_while_workers_begin_their_first_jobs(delay, run, reference):
    process = command(run, workers=2)
    wait_until(lambda: run.starts, "the run began")
    time.sleep(delay)
    os.killpg(process.pid, INT)
    assert process.wait(DEADLINE) == 128 + INT, run.output
    assert_no_process_left(process.pid)
    assert_stopped(run, INT, run.updates, reference)


def test_workers_exit_when_the_run_is_killed(run, reference):
    process = command(run, workers=2)
    wait_until(lambda: run.updates >= 1, "an update was done")
    process.kill()
    process.wait()
    assert_same_results(finish(run), reference)
    assert_no_process_left(process.pid)


def test_a_finished_run_is_not_changed(reference, tmp_path):
    again = copy_of(reference, tmp_path / "again")
    assert_same_results(finish(again), reference)
