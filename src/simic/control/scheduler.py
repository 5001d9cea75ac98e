"""GrowthScheduler: growth as one object beside the optimizer, used like a learning-rate scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.actions import HEADS, Action
from simic.bundle import load_bundle, save_bundle
from simic.control.baselines import Controller, Remembering, WaitController, check_controller
from simic.control.facts import FIGURES, HISTORY, Facts
from simic.control.gradients import GradientMeter
from simic.control.named import make_controller
from simic.control.parameter_groups import SLOT_KEY, ParameterGroups
from simic.growth.model import GrowableModel
from simic.growth.topology import GROWTH_KEY, growth_record
from simic.lifecycle import IllegalActionError, Stage
from simic.passes import evaluating, undisturbed
from simic.slots import note_contributions, to_measure

VERSION = 1
Evaluate = Callable[[], Mapping[str, float]]
_FIGURES_RETURNED = '{"val_loss": ..., "val_accuracy": ...}'


@dataclass(frozen=True, kw_only=True)
class StageChange:
    """A slot that moved from one stage to another."""

    slot: str
    blueprint: str
    old: Stage
    new: Stage
    contribution: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one `step` saw and did."""

    index: int
    val_loss: float
    val_accuracy: float
    action: Action
    changes: tuple[StageChange, ...]


class GrowthScheduler:
    """Once per host epoch, `step` observes, decides and acts; the optimizer always trains what the model holds.

    `evaluate` returns {"val_loss": ..., "val_accuracy": ...} of the model on validation data (either may be missing).
    With it, contributions are measured by switching seeds off; without it no seed can be fossilized. `horizon` is the
    number of host epochs planned, if that is known: some controllers pace themselves by it. Models may share an
    optimizer, each with its scheduler.
    """

    def __init__(
        self,
        model: GrowableModel,
        optimizer: Optimizer,
        controller: str | Controller = "heuristic",
        lr_schedulers: LRScheduler | Sequence[LRScheduler] = (),
        *,
        evaluate: Evaluate | None = None,
        horizon: int = 0,
        rng_seed: int = 0,
    ) -> None:
        if isinstance(controller, str):
            controller = make_controller(controller, rng_seed)
        _check_settings(controller, evaluate, horizon)
        self.lr_schedulers = (lr_schedulers,) if isinstance(lr_schedulers, LRScheduler) else tuple(lr_schedulers)
        if evaluate is None and not isinstance(controller, WaitController):
            warnings.warn(
                "without evaluate=... contributions cannot be measured, so no seed will be fossilized", stacklevel=2
            )
        driven = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # torch's mark
        if driven and not self.lr_schedulers and not isinstance(controller, WaitController):
            warnings.warn(
                "a learning-rate scheduler drives the optimizer but was not passed; many of them fail once a seed "
                "brings a parameter group of its own: pass it as lr_schedulers=[...]",
                stacklevel=2,
            )
        self.model = model
        self.optimizer = optimizer
        self.controller = controller
        self.decisions: list[Decision] = []
        self._evaluate = evaluate
        self._groups = ParameterGroups(model, optimizer, self.lr_schedulers)
        self.horizon = horizon
        self._next_index = 0
        self._previous_action = np.zeros((1, len(HEADS)), dtype=np.int64)
        self._history: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._gradients = GradientMeter(model)
        optimizer.register_step_pre_hook(self._gradients.observe)

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of `closure`, computed so that seeds in training learn too; `shadow` incubation needs it."""
        return self.model.loss(closure)

    def step(
        self, *, val_loss: float | None = None, val_accuracy: float | None = None, train_loss: float | None = None
    ) -> Decision:
        """Call once per host epoch, after validation. Validation figures that are not given come from `evaluate`."""
        self._groups.sync()  # somebody else may have changed the model since
        untouched, earlier = self.model.life.copy(), self._history
        try:
            figures = self._figures(val_loss, val_accuracy)
            self._gradients.report(self.model)
            self._measure_contributions(_metric(figures) if val_loss is None and val_accuracy is None else None)
            seen = figures | {"train_loss": math.nan if train_loss is None else _number("train_loss", train_loss)}
            seen["parameters"] = float(sum(parameter.numel() for parameter in self.model.parameters()))
            self._history = {name: [*earlier[name], seen[name]][-HISTORY:] for name in FIGURES}
            before = self.model.life.copy()
            row = self._decide()
            self.model.execute(row)
        except Exception:  # a refused step leaves no trace and can be repeated
            self.model.life, self._history = untouched, earlier
            raise
        self._gradients.clear()
        self.model.tick()
        self._groups.sync()
        decision = Decision(
            index=self._next_index,
            action=Action.decode(row, self.model.slot_names, self.model.blueprint_names),
            changes=self._changes(before),
            **figures,
        )
        self.decisions.append(decision)
        self._previous_action = row[None].copy()
        self._next_index += 1
        return decision

    def _decide(self) -> np.ndarray:
        actions = np.asarray(self.controller.act(self.facts()))
        if actions.shape != (1, len(HEADS)):
            raise IllegalActionError(f"actions must have shape {(1, len(HEADS))}, got {actions.shape}")
        return actions[0]

    def facts(self) -> Facts:
        """What the controller sees now."""
        model = self.model
        history = {
            name: np.array([[math.nan] * (HISTORY - len(values)) + values]) for name, values in self._history.items()
        }
        return Facts(
            slots=model.life.copy(),
            lifecycle=model.lifecycle,
            slot_names=model.slot_names,
            blueprint_names=model.blueprint_names,
            blueprint_parameters=model.blueprint_table(),
            host_parameters=np.array([sum(p.numel() for p in model.host.parameters())]),
            seed_parameters=np.array([[report.parameters for report in model.growth()]]),
            decision=np.array([self._next_index]),
            horizon=np.array([self.horizon]),
            previous_action=self._previous_action,
            random_guess_loss=np.array([math.nan]),
            host_gradient_norm=np.array([self._gradients.host_norm()]),
            **history,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the scheduler itself remembers; model, optimizer and learning-rate schedulers have their own."""
        return {
            "version": VERSION,
            "next_index": self._next_index,
            "previous_action": self._previous_action.tolist(),
            "history": {name: list(values) for name, values in self._history.items()},
            "seed_groups": self._groups.seed_order(),
            "seed_numbers": self._groups.seed_numbers(),
            "controller": type(self.controller).__name__,
            "controller_state": self.controller.state_dict() if isinstance(self.controller, Remembering) else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Load the model first: the optimizer's groups then follow its seeds."""
        self._check_state(state)
        grown = [slot for slot in self.model.slot_names if self.model.seed(slot) is not None]
        if set(grown) != set(state["seed_groups"]):
            raise ValueError(
                f"the saved scheduler trains seeds in slots {state['seed_groups']}, the model holds some in {grown}; "
                "load the model first"
            )
        slots = state["seed_groups"]
        self._groups.rebuild(slots, state.get("seed_numbers", [0] * len(slots)))
        self._next_index = state["next_index"]
        self._previous_action = np.array(state["previous_action"])
        self._history = {name: list(values) for name, values in state["history"].items()}
        if isinstance(self.controller, Remembering):
            self.controller.load_state_dict(state["controller_state"])

    def save(self, path: str | Path) -> None:
        """Write model, optimizer, learning-rate schedulers and growth to one safetensors file."""
        self._groups.sync()
        self._check_alone()
        tree = {
            "kind": "growth",
            "model": {GROWTH_KEY: growth_record(self.model), **self.model.state_dict()},
            "optimizer_class": type(self.optimizer).__name__,
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler_classes": [_class_name(scheduler) for scheduler in self.lr_schedulers],
            "lr_schedulers": [scheduler.state_dict() for scheduler in self.lr_schedulers],
            "growth": self.state_dict(),
        }
        save_bundle(path, tree)

    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote: first the topology, then weights and optimizer. A refusal changes nothing."""
        tree = load_bundle(path)
        if not isinstance(tree, dict) or tree.get("kind") != "growth":
            raise ValueError(f"{path} does not hold a growing model")
        self._check_state(tree["growth"])
        here = {
            "optimizer_class": type(self.optimizer).__name__,
            "lr_scheduler_classes": [_class_name(scheduler) for scheduler in self.lr_schedulers],
        }
        for name, value in here.items():
            if tree[name] != value:
                raise ValueError(f"the checkpoint's {name} is {tree[name]}, here it is {value}")
        saved = tree["optimizer"]["param_groups"]
        sizes = [len(group["params"]) for group in saved if SLOT_KEY not in group]
        own = [len(group["params"]) for group in self.optimizer.param_groups if SLOT_KEY not in group]
        if sizes != own:
            raise ValueError(f"the checkpoint's optimizer has groups of {sizes} host parameters, this one of {own}")
        self.model.load_state_dict(tree["model"])
        self.load_state_dict(tree["growth"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for scheduler, state in zip(self.lr_schedulers, tree["lr_schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def _check_alone(self) -> None:
        known = set(self.model.parameters())
        others = [p for group in self.optimizer.param_groups for p in group["params"] if p not in known]
        if others:
            raise ValueError(
                f"the optimizer trains {len(others)} parameter tensors that are not this model's, so one file would "
                "not hold everything: wrap the whole network in one GrowableModel, or, as where models share an "
                "optimizer, save the state_dict() of each model, scheduler and optimizer"
            )

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ValueError(
                f"the saved scheduler has format version {state.get('version')}, this simic reads {VERSION}"
            )
        if state["controller"] != type(self.controller).__name__:
            raise ValueError(
                f"the checkpoint was written with a {state['controller']}, this scheduler has a "
                f"{type(self.controller).__name__}; build it with the same controller"
            )

    def _figures(self, val_loss: float | None, val_accuracy: float | None) -> dict[str, float]:
        if val_loss is None and val_accuracy is None:
            if self._evaluate is None:
                raise ValueError(
                    "step needs val_loss=... (and val_accuracy=...), or a scheduler built with evaluate=..."
                )
            with undisturbed(self.model), evaluating(self.model):
                return self._checked(self._evaluate())
        return self._checked({"val_loss": val_loss, "val_accuracy": val_accuracy})

    def _checked(self, figures: Mapping[str, float | None]) -> dict[str, float]:
        checked = _numbers(figures)
        for name, value in checked.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}: the host diverged; restore a checkpoint")
        # Where only an accuracy is known, the error rate stands in for the loss.
        return {
            "val_loss": checked["val_loss"] if "val_loss" in checked else -checked["val_accuracy"],
            "val_accuracy": checked.get("val_accuracy", math.nan),
        }

    def _measure_contributions(self, now: float | None) -> None:
        """Metric with the seed minus metric without it; at alpha 0, what the alpha target would give.

        `now` is the metric of the network as it is, if it is known.
        """
        life = self.model.life
        measured = to_measure(life)
        if self._evaluate is None or not measured.any():
            return
        switched = np.full(measured.shape, math.nan)
        with undisturbed(self.model), evaluating(self.model):
            now = _metric(self._evaluate()) if now is None else now
            for index in np.flatnonzero(measured[0]):
                slot = self.model.slot_names[index]
                blended_in = life.alpha[0, index] > 0
                with self.model.switched_off(slot) if blended_in else self.model.switched_in(slot):
                    switched[0, index] = _metric(self._evaluate())
        note_contributions(life, measured, np.array([now]), switched)

    def _changes(self, before: Any) -> tuple[StageChange, ...]:
        after = self.model.life
        return tuple(
            StageChange(
                slot=self.model.slot_names[index],
                blueprint=self.model.blueprint_names[max(before.blueprint[0, index], after.blueprint[0, index])],
                old=Stage(before.stage[0, index]),
                new=Stage(after.stage[0, index]),
                contribution=float(before.contribution[0, index]),
            )
            for index in np.flatnonzero(before.stage[0] != after.stage[0])
            if before.blueprint[0, index] >= 0 or after.blueprint[0, index] >= 0
        )


def _check_settings(controller: Any, evaluate: Any, horizon: Any) -> None:
    check_controller(controller)
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function that returns {_FIGURES_RETURNED}, got {evaluate!r}")
    if not isinstance(horizon, Integral) or horizon < 0:
        raise ValueError(f"horizon must be a number of host epochs, 0 if it is not known, got {horizon!r}")


def _numbers(figures: Any) -> dict[str, float]:
    """The validation figures that are there, as floats; one that is None is not there."""
    names = ("val_loss", "val_accuracy")
    given = [name for name in names if figures.get(name) is not None] if isinstance(figures, Mapping) else []
    if not given:
        raise ValueError(f"evaluate must return {_FIGURES_RETURNED}, got {figures!r}")
    return {name: _number(name, figures[name]) for name in given}


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str):  # which float() would read
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, for a tensor of many
        pass
    raise TypeError(f"{name} must be one number, got {value!r}; give float(...) of it")


def _metric(figures: Any) -> float:
    """Accuracy where there is one, else minus the loss; of a network that is broken, minus infinity."""
    numbers = _numbers(figures)
    accuracy = numbers.get("val_accuracy", math.nan)
    metric = -numbers.get("val_loss", math.nan) if math.isnan(accuracy) else accuracy
    return metric if math.isfinite(metric) else -math.inf


def _class_name(scheduler: LRScheduler) -> str:
    members = ", ".join(_class_name(member) for member in getattr(scheduler, "_schedulers", ()))
    return f"{type(scheduler).__name__}({members})" if members else type(scheduler).__name__
