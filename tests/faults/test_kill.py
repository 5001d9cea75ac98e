"""SIGKILL at any moment, then resume: bit for bit the run that was never killed."""

import random
import signal
import time

import pytest
from helpers.fault_runs import PATIENCE, UPDATES, Strike, Trial, assert_same, await_, end_of, finish, launch, run_to_end

from simic.storage.checkpoint import CRASH_POINTS, list_checkpoints

CHAINS, KILLS = 10, 5


def kill_at(trial: Trial, instant: float, update_seconds: float) -> bool:
    """Go on with a run and kill it when so many updates, and a part of the next, are done; whether it was alive."""
    process, begun = launch(trial), trial.starts
    if instant % 1 > 0.1:  # the others may die before they have begun
        await_(lambda: trial.starts > begun or not process.is_alive(), "the run began")
    await_(lambda: trial.updates >= int(instant) or not process.is_alive(), f"update {int(instant)} was done")
    time.sleep(instant % 1 * update_seconds)
    process.kill()
    code = end_of(process)
    assert code in (0, -signal.SIGKILL), trial.told
    return code == -signal.SIGKILL


@pytest.mark.parametrize("chain", range(CHAINS))
def test_killed_again_and_again(chain, tmp_path, unharmed):
    """Instants are spread over the whole life of the run, its start and end included."""
    rng, kills, runs = random.Random(chain), 0, 0
    while kills < KILLS:  # a kill that came too late is made up for in another run
        trial = Trial(tmp_path / f"run{runs}")
        for instant in sorted(rng.uniform(0, UPDATES + 0.1) for _ in range(KILLS - kills)):
            kills += kill_at(trial, instant, unharmed.update_seconds)
        assert_same(finish(trial), unharmed)
        runs += 1


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_while_checkpointing(point, trial, unharmed):
    """At every step of the first checkpoint, or of the first that removes or replaces one."""
    if point == "moved_old_aside":  # a checkpoint is replaced only where none of those on disk can be used
        assert run_to_end(trial, updates=2) == 0
        for path in list_checkpoints(trial.checkpoints):
            (path / "state.json").write_bytes(b"{}")
    code = run_to_end(trial, environment={"SIMIC_CRASH_AT": point}, keep=1)
    assert code == -signal.SIGKILL, trial.told
    assert_same(finish(trial), unharmed)


PLACES = (
    ("simic.training.build:write_config", 1),
    ("simic.training.run:Run.state", 1),
    ("simic.environment.host_trainings:HostTrainings._train", 15),
    ("simic.training.run:save_episodes", 3),
    ("simic.ppo.agent:PPOAgent._step", 6),
    ("simic.telemetry.recorder:Recorder.end_update", 3),
    ("simic.training.run:Run.state", 3),
    ("simic.training.run:Run.report_progress", 2),
    ("simic.ppo.agent:PPOAgent.save_controller", 1),
    ("os:replace", 1),  # of the config
    ("os:replace", 2),  # of recorded episodes
    ("os:replace", UPDATES + 2),  # of the controller
)


@pytest.mark.parametrize(("place", "call"), PLACES)
def test_killed_deliberately(place, call, trial, unharmed):
    """Between any two things that a run writes."""
    assert run_to_end(trial, Strike(place, call, signal.SIGKILL)) == -signal.SIGKILL, trial.told
    assert_same(finish(trial), unharmed)


def test_a_kill_leaves_the_run_free_at_once(trial, unharmed):
    process = launch(trial)
    await_(lambda: trial.updates >= 1, "an update was done", PATIENCE)
    process.kill()
    end_of(process)
    assert_same(finish(trial), unharmed)
