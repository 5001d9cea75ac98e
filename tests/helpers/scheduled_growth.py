"""A small model whose validation is worked out by hand, and a training loop around a GrowthScheduler."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from simic import Action, GrowableModel, GrowthScheduler, LifecycleConfig, ScriptedController
from simic.control.baselines import Controller

X = torch.linspace(-1, 1, 8 * 4).view(8, 4)
Y = torch.tensor([0, 1] * 4)


def linear_model(num_slots: int = 2, **rules: Any) -> GrowableModel:
    """Linear layers in a row, each with a slot named by its index."""
    torch.manual_seed(0)
    host = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_slots)), nn.Linear(4, 2))
    rules = {"min_prune_age": 0, "embargo_decisions": 0} | rules
    lifecycle = LifecycleConfig(**rules)
    return GrowableModel(host, [str(slot) for slot in range(num_slots)], example_input=X, lifecycle=lifecycle)


class Worth:
    """Stands in for validation: `base` plus each seed's worth times the alpha that it has now. Counts its calls."""

    def __init__(self, model: GrowableModel, worth: dict[str, float], base: float = 0.0) -> None:
        self.model, self.worth, self.base, self.calls = model, worth, base, 0

    def __call__(self) -> float:
        self.calls += 1
        total = self.base
        for slot, worth in self.worth.items():
            seed = self.model.seed(slot)
            if seed is not None:
                total += worth * (seed.alpha if seed.override is None else seed.override)
        return total


def scheduled(
    model: GrowableModel, actions: Sequence[Action] | Controller, evaluate: Callable[[], Any] | None, **settings: Any
) -> GrowthScheduler:
    """A scheduler that plays these actions, or with this controller."""
    controller = ScriptedController(actions) if isinstance(actions, Sequence) else actions
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return GrowthScheduler(model, optimizer, controller, evaluate=evaluate, **settings)


def train(scheduler: GrowthScheduler) -> None:
    """One host epoch of one batch."""
    scheduler.model.train()
    loss = scheduler.loss(lambda: nn.functional.cross_entropy(scheduler.model(X), Y))
    scheduler.optimizer.zero_grad()
    loss.backward()
    scheduler.optimizer.step()


def grow(scheduler: GrowthScheduler, host_epochs: int) -> None:
    """Train and decide."""
    for _ in range(host_epochs):
        train(scheduler)
        scheduler.step()


def to_fossil(slot: str, blueprint: str = "mlp") -> list[Action]:
    """The shortest life of a seed that is fossilized."""
    return [Action("germinate", slot, blueprint), *[Action()] * 2, Action("advance", slot), Action("fossilize", slot)]
