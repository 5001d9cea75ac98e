"""Gaming in real episodes: what is planted becomes an event, healthy growth does not; nothing is said without twins."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny_run

from simic.control.baselines import RandomController, WaitController
from simic.control.heuristic import HeuristicController
from simic.control.legality import Masks
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings, Outcome
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import Stage
from simic.rewards.schemes import RewardConfig
from simic.tasks.registry import make_task
from simic.tasks.task import Task
from simic.telemetry.events import GamingSuspicion, Update
from simic.training import episodes
from simic.training.episode_events import gaming_events
from simic.training.episodes import against_twins

PLANTING = 5
HOSTS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task("teacher-mlp", width=8, num_slots=2, train_size=256)


def hosts(task: Task) -> HostTrainings:
    return HostTrainings(task, HOSTS, episode=EpisodeConfig(horizon=12, anneal=False), reward=RewardConfig())


@pytest.fixture(scope="module")
def twins(task) -> EpisodeRecord:
    return play(hosts(task), decide_by(WaitController().act))


@torch.no_grad()
def game(trainings: HostTrainings, *, erase: bool) -> None:
    """Shift what the seed in the last slot puts out, and the head's bias back: the same network, but for its need."""
    weight, bias = list(trainings.hosts.hosts.leaves.values())[-2:]
    decision = trainings.facts().decision[0]
    if decision == PLANTING:
        (group,) = trainings.hosts.groups.values()
        offset = list(group.parameters.leaves.values())[-1]
        shift = 8 * torch.randn(offset.shape, generator=torch.Generator().manual_seed(0))
        offset += shift
        bias -= torch.einsum("nkc,nc->nk", weight, shift)
    if erase and decision >= PLANTING:
        weight[:, :, :4] = 0  # what the host knew, before every host epoch


def planted(trainings: HostTrainings, *, erase: bool) -> HostTrainings:
    """Hosts that grow one seed, whatever they are told, which then begins to game."""
    step = trainings.step

    def scripted(actions: np.ndarray, masks: Masks | None = None) -> Outcome:
        game(trainings, erase=erase)
        grows = trainings.facts().decision[0] == 0
        action = Action("germinate", "block1", "low_rank", tempo=3) if grows else Action()
        row = action.encode(trainings.task.slots, trainings.hosts.blueprint_names)
        return step(np.stack([row] * trainings.num_hosts), masks)

    trainings.step = scripted
    return trainings


def reasons(record: EpisodeRecord) -> dict[str, set[int]]:
    """Which hosts were accused of what; and that of the planted seed, after the planting, only."""
    found: dict[str, set[int]] = {}
    for event in gaming_events(record, 0, 0):
        assert isinstance(event, GamingSuspicion)
        assert (event.slot, event.blueprint) == ("block1", "low_rank")
        assert event.decision >= PLANTING
        assert event.contribution > 0.1
        assert event.gain < event.contribution / 5
        found.setdefault(event.reason, set()).add(event.env)
    return found


def test_a_seed_that_is_needed_for_nothing_gained_is_found(task, twins):
    played = play(planted(hosts(task), erase=False), decide_by(WaitController().act))
    assert played.twins is None, "without the twins nothing can be said"
    found = reasons(against_twins(played, twins, 1.0))
    assert len(found["overclaiming"]) >= 2
    assert set.union(*found.values()) == set(range(4))


def test_a_seed_that_is_needed_while_the_host_gets_worse_is_found(task, twins):
    record = against_twins(play(planted(hosts(task), erase=True), decide_by(WaitController().act)), twins, 1.0)
    lived = set(np.flatnonzero(~record.verdict.any(0)).tolist())
    found = reasons(record)
    assert len(lived) >= 2
    assert len(found["indispensable"] & lived) >= 2
    assert "overclaiming" not in found


@pytest.mark.parametrize("controller", [WaitController(), HeuristicController(), RandomController(0)])
def test_healthy_episodes_stay_quiet(task, twins, controller):
    record = against_twins(play(hosts(task), decide_by(controller.act)), twins, 1.0)
    assert not list(gaming_events(record, 0, 0))
    assert record.twins is not None
    assert record.twins.gaming.keys() == {"overclaiming", "indispensable"}


def all_suspect(twins: EpisodeRecord, *, ended: int | None = None, stage: Stage = Stage.HOLDING) -> np.ndarray:
    """Flags (T, N, S) of hosts that need all their seeds and are worse than their twins; the second may end early."""
    t, n = twins.valid.shape
    decisions = np.array([t, ended or t, *[t] * (n - 2)])
    steps = np.arange(t)[:, None]
    record = tiny_run.make_record(
        steps=t,
        hosts=n,
        slots=2,
        stage=np.full((t + 1, n, 2), stage),
        alpha=np.ones((t + 1, n, 2)),
        contribution=np.full((t + 1, n, 2), 0.5),
        val_accuracy=twins.val_accuracy - 0.1,
        valid=steps < decisions,
    )
    compared = against_twins(record, twins, 1.0).twins
    assert compared is not None
    return compared.gaming["indispensable"]


def test_only_live_seeds_of_networks_that_can_be_compared_are_judged(twins):
    flags = all_suspect(twins)
    assert flags[2:-1].all()
    assert not flags[:2].any(), "it must last"
    assert not flags[-1].any(), "the exported network is another"
    assert not all_suspect(twins, stage=Stage.FOSSILIZED).any()
    flags = all_suspect(twins, ended=5)
    assert flags[3, 1].all()
    assert not flags[4:, 1].any(), "a host that broke is over"
    assert flags[4:-1, 0].all()
    valid = twins.valid.copy()
    valid[5:, 1] = False
    flags = all_suspect(replace(twins, valid=valid))
    assert not flags[4:, 1].any(), "so is one whose twin broke"


def test_a_run_tells_of_gaming_and_without_twins_of_none(tmp_path, task, learn_this, monkeypatch):
    learn_this(task)
    make = episodes.make_trainings
    monkeypatch.setattr(
        episodes,
        "make_trainings",
        lambda setup, job, device: (
            make(setup, job, device) if job.twin else planted(make(setup, job, device), erase=False)
        ),
    )
    run = {"updates": 1, "group_size": 4, "episode": {"horizon": 12, "anneal": False}, "level": "normal"}
    assert tiny_run.play_run(tmp_path / "twins", **run)[0] == 0
    events = tiny_run.told(tmp_path / "twins", GamingSuspicion)
    assert {event.slot for event in events} == {"block1"}
    assert all(np.isfinite(event.gain) for event in events)
    (update,) = tiny_run.told(tmp_path / "twins", Update)
    assert update.metrics["gaming"] == len({event.env for event in events}) / 8  # of four hosts' two slots
    assert update.metrics["gaming"] > 0
    assert tiny_run.play_run(tmp_path / "alone", twins=False, **run)[0] == 0
    assert not tiny_run.told(tmp_path / "alone", GamingSuspicion)
    (update,) = tiny_run.told(tmp_path / "alone", Update)
    assert np.isnan(update.metrics["gaming"])
