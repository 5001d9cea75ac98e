"""Episodes of hosts that are trained one by one through `GrowthScheduler`, as in a training loop of one's own.

They have the measures of stacked episodes, see `measures`. Two differ in how they are found: operations are counted on
a training step of the network as it is in each host epoch, and the contribution of a seed is the last one measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from simic.control.baselines import Controller
from simic.evaluation.measures import Fossil
from simic.growth.isolation import preserve_state
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import STYLES
from simic.lifecycle.stages import LIVE, LifecycleConfig, Stage
from simic.rewards.score import POINTS, score
from simic.scheduler.decision import Decision
from simic.tasks.task import Task, evaluate
from simic.training.grow_task import Grown, grow


@dataclass(frozen=True, kw_only=True)
class OwnEpisode:
    """The episode of one host."""

    measures: dict[str, Any]
    """JSON values, as `measure_episodes` gives them, without the rng seed."""
    actions: np.ndarray  # (T, H)
    fossils: list[Fossil]


def play_own_host(
    task: Task,
    controller: Controller,
    *,
    host_epochs: int | None,
    rng_seed: int,
    lifecycle: LifecycleConfig,
    host_parameters: int,
    fossils: Sequence[Fossil] = (),
) -> OwnEpisode:
    """Train a host, planted with `fossils` from the start; rent is due for parameters beyond `host_parameters`.

    Without `host_epochs` it is trained as long as its task says.
    """
    curve, sizes, operations = list[float](), list[int](), list[int]()

    def prepare(model: GrowableModel) -> None:
        for fossil in fossils:
            model.plant(model.slot_names[fossil.slot], fossil.blueprint, style=fossil.style)
        curve.append(evaluate(model, task)["accuracy"])
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))

    def on_decision(decision: Decision) -> None:
        curve.append(decision.val_accuracy)
        sizes.append(decision.parameters)

    grown = grow(
        task,
        controller,
        host_epochs=host_epochs,
        rng_seed=rng_seed,
        lifecycle=lifecycle,
        prepare=prepare,
        before_host_epoch=lambda model: operations.append(count_step_flops(model, task)),
        on_decision=on_decision,
    )
    curve[-1] = evaluate(grown.plain, task)["accuracy"]  # as of stacked hosts, that of the exported network
    flops = float(sum(operations)) * len(task.data.train_x)
    measures = _measure(grown, curve, flops, host_parameters) | {
        "parameter_curve": sizes,
        "seeds": _seed_histories(grown, fossils),
    }
    names = grown.model.slot_names, grown.model.blueprint_names
    actions = np.stack([decision.action.encode(*names) for decision in grown.decisions])
    return OwnEpisode(measures=measures, actions=actions, fossils=_fossils(grown.model))


def count_step_flops(model: GrowableModel, task: Task) -> int:
    """Operations per sample of a training step; the model, its gradients and statistics stay as they are."""
    x, y = task.data.train_x[:2], task.data.train_y[:2]  # two, because batch norm refuses one value per channel
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with preserve_state(model), FlopCounterMode(display=False) as counter:
        torch.autograd.grad(model.loss(lambda: task.loss(model(x), y)), trained, allow_unused=True)
    return counter.get_total_flops() // len(x)


def _measure(grown: Grown, curve: Sequence[float], flops: float, host_parameters: int) -> dict[str, Any]:
    """Figures in points, of curves (T + 1) of the accuracy on validation data."""
    accuracy = np.array(grown.test_accuracy)
    points = [POINTS * (value if math.isfinite(value) else 0.0) for value in curve]
    metric = POINTS * float(accuracy)
    return {
        "metric": metric,
        "score": float(score(accuracy, np.array(grown.parameters), host_parameters)),
        "area": math.fsum(points[1:]) / len(points[1:]),
        "parameters": grown.parameters,
        "host_parameters": host_parameters,
        "flops": flops,
        "accuracy_per_parameter": metric / grown.parameters,
        "val_curve": points,
    }


def _seed_histories(grown: Grown, planted: Sequence[Fossil]) -> list[dict[str, Any]]:
    """All seeds in order of germination; times are decisions, contributions points."""
    names, seeds, current = grown.model.slot_names, list[dict[str, Any]](), dict[str, dict[str, Any]]()

    def begin(slot: str, blueprint: str, time: int) -> None:
        current[slot] = {"slot": slot, "blueprint": blueprint, "germinated": time}
        current[slot] |= {"ended": None, "fate": "live", "contribution": None}
        seeds.append(current[slot])

    for fossil in planted:
        begin(names[fossil.slot], fossil.blueprint, 0)
        current[names[fossil.slot]] |= {"ended": 0, "fate": "fossilized"}
    for decision in grown.decisions:
        for change in decision.changes:
            if change.old == Stage.DORMANT:
                begin(change.slot, change.blueprint, decision.index)
            _note(current[change.slot], change.contribution)
            if change.new == Stage.FOSSILIZED:
                current[change.slot] |= {"ended": decision.index, "fate": "fossilized"}
            elif change.new not in LIVE:
                current[change.slot] |= {"ended": decision.index, "fate": "pruned"}
    for slot, contribution in zip(names, grown.model.slot_state.contribution[0].tolist(), strict=True):
        if slot in current and current[slot]["fate"] != "pruned":
            _note(current[slot], contribution)
    return seeds


def _note(seed: dict[str, Any], contribution: float) -> None:
    if math.isfinite(contribution):
        seed["contribution"] = POINTS * contribution


def _fossils(model: GrowableModel) -> list[Fossil]:
    state = model.slot_state
    return [
        Fossil(slot, model.blueprint_names[state.blueprint[0, slot]], STYLES[state.style[0, slot]].name)
        for slot in np.flatnonzero(state.stage[0] == Stage.FOSSILIZED).tolist()
    ]
