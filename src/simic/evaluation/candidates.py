"""How each kind of candidate plays a task: a pure function of the task, the settings and the candidate's inputs.

Shapes: T decisions, N hosts (one per rng seed), H heads of an action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from simic.control.baselines import WaitController
from simic.control.facts import Facts
from simic.control.learned import (
    LearnedController,
    known_blueprints,
    load_network,
    load_pretrained,
    network_input,
    network_of,
    row_masks,
)
from simic.control.legality import legal_masks, replace_illegal
from simic.control.observation import observe
from simic.control.plan import PlanController, load_plan
from simic.control.registry import make_controller
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.episodes import EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.environment.seeding import task_rng_seed
from simic.evaluation.flops import TrainingFlops
from simic.evaluation.measures import Fossil, fossils, measure_episodes
from simic.evaluation.own_loop import play_own_host
from simic.evaluation.parsing import SCALED, Candidate, NamedTask
from simic.evaluation.scale import Scale, load_scale
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import LifecycleConfig
from simic.policy.acting import choose
from simic.policy.network import ActorCritic
from simic.storage.checkpoint import find_checkpoint, is_checkpoint
from simic.storage.run_directory import RunDirectory
from simic.tasks.task import Task
from simic.training.episodes import PolicyWeights

EVALUATION = 0xE7A1
"""Makes the hosts of evaluations differ from those of training runs with the same rng seed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all candidates share."""

    rng_seeds: tuple[int, ...]
    """One host of every task for each."""
    episode: EpisodeConfig
    lifecycle: LifecycleConfig
    governor: GovernorConfig
    greedy: bool = True
    """Whether learned controllers take the most likely action instead of sampling."""

    def trainings(self, task: Task, rng_seeds: Sequence[int] | None = None) -> HostTrainings:
        """Fresh hosts: task and rng seed alone determine their data, initial weights and batches."""
        return HostTrainings(
            task,
            [task_rng_seed(rng_seed, EVALUATION) for rng_seed in rng_seeds or self.rng_seeds],
            episode=self.episode,
            lifecycle=self.lifecycle,
            governor=self.governor,
        )


class Unit(NamedTuple):
    """One candidate on one task, with the candidate's inputs: a plan, weights, fossils, ..."""

    task: NamedTask
    kind: str
    inputs: Any = None


def play_unit(settings: Settings, unit: Unit) -> dict[str, Any]:
    """The measured episodes of a unit as JSON values; of a learned controller also the inputs of its ablations."""
    task = unit.task.find()
    if unit.task.own_loop:
        return _play_own_loop(settings, task, unit)
    if unit.kind in WIDER:
        return _play_wide(settings, task, unit)
    trainings = settings.trainings(task)
    if unit.kind == "static_final":
        plant_fossils(trainings, unit.inputs)
    controller = _make_controller(settings, unit)
    own = trainings.hosts.host_parameters
    record, episodes = evaluate_episodes(trainings, controller.act, settings.rng_seeds, own)
    part: dict[str, Any] = {"episodes": episodes}
    if unit.kind == "learned":
        part["actions"] = record.action.tolist()
        part["fossils"] = [fossils(record, host) for host in range(trainings.num_hosts)]
    return part


def evaluate_episodes(
    trainings: HostTrainings, act: Callable[[Facts], np.ndarray], rng_seeds: Sequence[int], host_parameters: int
) -> tuple[EpisodeRecord, list[dict[str, Any]]]:
    """Play whole episodes and measure them: the record, and a dict of JSON values per host."""
    record = play(trainings, decide_by(act), evaluate=True)
    flops = TrainingFlops(trainings).of_episodes(record)
    return record, measure_episodes(record, flops, rng_seeds, host_parameters)


def inputs_of(candidate: Candidate) -> Any:
    """What a contestant comes with: a plan, a scale, or the weights of the controller that it is or derives from."""
    if candidate.kind == "plan":
        return load_plan(candidate.path)
    if candidate.kind == SCALED:
        return candidate.scale or load_scale(candidate.path)
    if candidate.kind == "learned" or candidate.of is not None:
        given = candidate.controller
        return PolicyWeights.of(_find_network(candidate.path) if given is None else given.network)
    return candidate.controller


def inputs_from_episodes(kind: str, part: dict[str, Any]) -> Any:
    """What an ablation is given by the learned controller's episodes on the same task."""
    if kind == "static_final":
        return [[Fossil(*fossil) for fossil in fossils] for fossils in part["fossils"]]
    if kind == "static_wide":
        return [episode["parameters"] for episode in part["episodes"]]
    assert kind == "replay"
    return most_frequent(np.array(part["actions"], dtype=np.int64))


def _find_network(path: Path | None) -> ActorCritic:
    """From a saved controller, a checkpoint or a run; a run that is not done gives its newest checkpoint."""
    if path is None:
        return load_pretrained()
    if path.is_file() or is_checkpoint(path):
        return load_network(path)
    run = RunDirectory(path)
    if run.controller.is_file():
        return load_network(run.controller)
    found = find_checkpoint(run.checkpoints).checkpoint
    if found is None:
        raise ValueError(f"{path} holds neither a controller nor a whole checkpoint")
    return network_of(found.agent, found.path)


# Contestants that lead a host from its start.


class ReplayController:
    """Plays one list of actions (T, H) on all hosts, whatever happens; waits where an action is illegal."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def act(self, facts: Facts) -> np.ndarray:
        """The rows that are due (N, H)."""
        return replace_illegal(self.rows[facts.decision], legal_masks(facts))[0]


class ShuffledController:
    """A network that sees other hosts than those it leads; masks are their own, its memory is of what it saw."""

    def __init__(self, network: ActorCritic, num_hosts: int, *, greedy: bool = True) -> None:
        self.network, self.greedy = network.eval(), greedy
        self.seen = derangement(num_hosts)
        self._state = network.initial_state(num_hosts)
        self._generator = torch.Generator().manual_seed(EVALUATION)

    def act(self, facts: Facts) -> np.ndarray:
        """Actions chosen from another host's observation (N, H)."""
        facts = known_blueprints(self.network, facts)
        masks = legal_masks(facts)
        observed = {name: part[self.seen] for name, part in network_input(observe(facts, masks)).items()}
        choice = choose(
            self.network, observed, row_masks(masks), self._state, greedy=self.greedy, generator=self._generator
        )
        self._state = choice.state
        return choice.action.numpy()


def derangement(size: int) -> np.ndarray:
    """For every host another one, always the same: a random cycle through all."""
    if size < 2:
        raise ValueError(f"observations of another host need at least 2 rng seeds, got {size}")
    cycle = np.random.default_rng(EVALUATION).permutation(size)
    other = np.empty(size, dtype=np.int64)
    other[cycle] = np.roll(cycle, 1)
    return other


def most_frequent(actions: np.ndarray) -> np.ndarray:
    """The sequence (T, H) that most hosts had, of (T, N, H); the first of equals."""
    sequences = [actions[:, host].tobytes() for host in range(actions.shape[1])]
    common = Counter(sequences).most_common(1)[0][0]
    return actions[:, sequences.index(common)]


def _learned(settings: Settings, weights: PolicyWeights) -> LearnedController:
    return LearnedController(weights.network(), greedy=settings.greedy, rng_seed=EVALUATION)


def _shuffled(settings: Settings, weights: PolicyWeights) -> ShuffledController:
    return ShuffledController(weights.network(), len(settings.rng_seeds), greedy=settings.greedy)


WITH_INPUTS: dict[str, Callable[[Settings, Any], Any]] = {
    "plan": lambda settings, plan: PlanController(plan),
    "learned": _learned,
    "replay": lambda settings, rows: ReplayController(rows),
    "shuffled": _shuffled,
    "static_final": lambda settings, inputs: WaitController(),
    "object": lambda settings, controller: deepcopy(controller),  # each task starts without memory of another
}
"""Controllers that are made from inputs; the others come from the registry."""


def _make_controller(settings: Settings, unit: Unit) -> Any:
    if unit.kind in WITH_INPUTS:
        return WITH_INPUTS[unit.kind](settings, unit.inputs)
    return make_controller(unit.kind, EVALUATION)


# Hosts that are trained one by one.


def _play_own_loop(settings: Settings, task: Task, unit: Unit) -> dict[str, Any]:
    if unit.kind == "shuffled":
        note = f"the hosts of task {task.name} are trained one after the other: no shuffled observations"
        return {"episodes": [], "note": note}
    if unit.kind in WIDER and task.host_of_width is None:
        return _one_width(task, unit)
    num_hosts, own = len(settings.rng_seeds), count_parameters(task.make_host)
    tasks, planted = [task] * num_hosts, [[]] * num_hosts
    if unit.kind in WIDER:
        tasks = [task.widened(width) for width in _widths(task, unit.inputs, num_hosts)]
    elif unit.kind == "static_final":
        planted = unit.inputs
    episodes = [
        play_own_host(
            its_task,
            WaitController() if unit.kind in WIDER else _make_controller(settings, unit),
            host_epochs=settings.episode.horizon if task.length is None else None,
            rng_seed=task_rng_seed(rng_seed, EVALUATION),
            lifecycle=settings.lifecycle,
            host_parameters=own,
            fossils=its_fossils,
        )
        for its_task, its_fossils, rng_seed in zip(tasks, planted, settings.rng_seeds, strict=True)
    ]
    measured = zip(settings.rng_seeds, episodes, strict=True)
    part: dict[str, Any] = {"episodes": [{"rng_seed": rng_seed} | own.measures for rng_seed, own in measured]}
    if unit.kind == "learned":
        part["actions"] = np.stack([own.actions for own in episodes], axis=1).tolist()
        part["fossils"] = [own.fossils for own in episodes]
    return part


# Networks that do not grow.


def plant_fossils(trainings: HostTrainings, fossils: Sequence[Sequence[Fossil]]) -> None:
    """Give fresh hosts the architecture of others: seeds newborn, at alpha 1 and fossils from the start."""
    hosts = trainings.hosts
    for slot in range(len(hosts.sites)):
        rows = np.zeros_like(trainings.facts().previous_action)
        for host, own in enumerate(fossils):
            for fossil in own:
                if fossil.slot == slot:
                    action = Action("germinate", slot, fossil.blueprint, fossil.style)
                    rows[host] = action.encode(hosts.slot_names, hosts.blueprint_names)
        hosts.plant(rows)
    trainings.snapshot.save(hosts, np.ones(hosts.num_hosts, dtype=bool))


WIDER = ("static_wide", SCALED)
"""Hosts that are wider from the start: static_wide has given numbers of parameters, static_scaled a `Scale`."""


def _play_wide(settings: Settings, task: Task, unit: Unit) -> dict[str, Any]:
    """Hosts of the least width that has so many parameters; those of one width are stacked."""
    if task.host_of_width is None:
        return _one_width(task, unit)
    own, results = count_parameters(task.make_host), {}
    widths = _widths(task, unit.inputs, len(settings.rng_seeds))
    for width in sorted(set(widths)):
        rng_seeds = [seed for seed, its in zip(settings.rng_seeds, widths, strict=True) if its == width]
        trainings = settings.trainings(task.widened(width), rng_seeds)
        episodes = evaluate_episodes(trainings, WaitController().act, rng_seeds, own)[1]
        results |= {episode["rng_seed"]: episode for episode in episodes}
    return {"episodes": [results[rng_seed] for rng_seed in settings.rng_seeds]}


def _one_width(task: Task, unit: Unit) -> dict[str, Any]:
    return {"episodes": [], "note": f"task {task.name} has hosts of one width only: no {unit.kind}"}


def _widths(task: Task, wanted: Scale | Sequence[int], num_hosts: int) -> list[int]:
    """The width of every host."""
    if isinstance(wanted, Scale):
        return [scaled_width(task, wanted)] * num_hosts
    assert task.host_of_width is not None
    return [width_for(task.host_of_width, parameters) for parameters in wanted]


def scaled_width(task: Task, scale: Scale) -> int:
    """The width of the task's hosts under a scale."""
    if task.host_of_width is None:
        raise ValueError(f"hosts of task {task.name} come in one width, which cannot be scaled; leave it out")
    return width_for(task.host_of_width, scale.parameter_factor * count_parameters(task.make_host))


def width_for(host_of_width: Callable[[int], Callable[[], nn.Module]], parameters: float) -> int:
    """The least width whose host has at least so many parameters."""
    low, high = 0, 1
    while count_parameters(host_of_width(high)) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if count_parameters(host_of_width(middle)) >= parameters else (middle, high)
    return high


def count_parameters(make_host: Callable[[], nn.Module]) -> int:
    """Of a host, without drawing its weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_host().parameters())
