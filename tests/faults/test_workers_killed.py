"""Workers that die change nothing but the log."""

import os
import random
import signal
import time

import pytest
from helpers.fault_runs import (
    PATIENCE,
    FaultRun,
    assert_same_results,
    command,
    events,
    session_of,
    wait_until,
    workers_of,
)


def test_workers_change_nothing(run, reference):
    process = command(run, workers=2)
    assert process.wait(PATIENCE) == 0, run.output
    assert_same_results(run, reference)
    assert not events(run, "worker_fault")


@pytest.mark.parametrize("chain", range(2))
def test_a_worker_killed_mid_rollout_changes_nothing(chain, run: FaultRun, reference):
    """Busy or starting workers are killed now and then until the run is done."""
    rng, process, killed = random.Random(chain), command(run, workers=2), []
    while process.poll() is None and len(killed) < 4:
        alive = [pid for pid in workers_of(process.pid) if pid not in killed and busy(pid)]
        if alive and run.starts:
            killed.append(rng.choice(alive))
            time.sleep(rng.uniform(0, 0.3))
            os.kill(killed[-1], signal.SIGKILL)
        time.sleep(rng.uniform(0, 0.5))
    assert process.wait(PATIENCE) == 0, run.output
    assert len(killed) >= 2
    faults = events(run, "worker_fault")
    assert {fault["worker"] for fault in faults} == set(killed)
    assert all(fault["error"] == "exit code -9" for fault in faults)
    assert any(fault["group"] >= 0 for fault in faults)
    assert_same_results(run, reference)
    wait_until(lambda: not session_of(process.pid), f"the processes {session_of(process.pid)} of the run ended", 30)


def busy(pid: int) -> bool:
    """Whether a process is running rather than waiting for work."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False
