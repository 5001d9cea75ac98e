"""SIGKILL at any moment, then resume: the result equals that of an undisturbed run, bit for bit."""

import random
import signal
import time

import pytest
from helpers.fault_places import CHECKPOINT_PLACES, KILL_PLACES, UPDATES
from helpers.fault_runs import (
    PATIENCE,
    FaultRun,
    InjectedSignal,
    assert_same_results,
    finish,
    run_to_end,
    start,
    wait_for,
    wait_until,
)

from simic.storage.checkpoint import list_checkpoints

CHAINS, KILLS = 10, 5


def kill_at(run: FaultRun, instant: float, update_seconds: float) -> bool:
    """Resume a run and kill it after `instant` updates, a fraction included; return whether it was still alive."""
    process, begun = start(run), run.starts
    if instant % 1 > 0.1:  # otherwise it may be killed before it begins
        wait_until(lambda: run.starts > begun or not process.is_alive(), "the run began")
    wait_until(lambda: run.updates >= int(instant) or not process.is_alive(), f"update {int(instant)} was done")
    time.sleep(instant % 1 * update_seconds)
    process.kill()
    code = wait_for(process)
    assert code in (0, -signal.SIGKILL), run.output
    return code == -signal.SIGKILL


@pytest.mark.parametrize("chain", range(CHAINS))
def test_killed_again_and_again(chain, tmp_path, reference):
    """At random times from the start of the run to its end."""
    rng, kills, runs = random.Random(chain), 0, 0
    while kills < KILLS:  # a kill that came too late is repeated in another run
        run = FaultRun(tmp_path / f"run{runs}")
        for instant in sorted(rng.uniform(0, UPDATES + 0.1) for _ in range(KILLS - kills)):
            kills += kill_at(run, instant, reference.update_seconds)
        assert_same_results(finish(run), reference)
        runs += 1


@pytest.mark.parametrize(("place", "call"), CHECKPOINT_PLACES)
def test_killed_while_checkpointing(place, call, run, reference):
    assert run_to_end(run, InjectedSignal(place, call, signal.SIGKILL), keep=1) == -signal.SIGKILL, run.output
    assert_same_results(finish(run), reference)


def test_killed_while_replacing_a_checkpoint(run, reference):
    """One is replaced only if no checkpoint is usable: the run starts again."""
    assert run_to_end(run, updates=2) == 0
    for path in list_checkpoints(run.checkpoints):
        path.write_bytes(b"{}")
    replace = InjectedSignal("os:replace", 2, signal.SIGKILL)  # 1 is of the episodes; the config is unchanged
    assert run_to_end(run, replace) == -signal.SIGKILL, run.output
    assert_same_results(finish(run), reference)


@pytest.mark.parametrize(("place", "call"), KILL_PLACES)
def test_killed_between_writes(place, call, run, reference):
    assert run_to_end(run, InjectedSignal(place, call, signal.SIGKILL)) == -signal.SIGKILL, run.output
    assert_same_results(finish(run), reference)


def test_a_kill_releases_the_lock_at_once(run, reference):
    process = start(run)
    wait_until(lambda: run.updates >= 1, "an update was done", PATIENCE)
    process.kill()
    wait_for(process)
    assert_same_results(finish(run), reference)
