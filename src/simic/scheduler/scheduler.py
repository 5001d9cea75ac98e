"""GrowthScheduler: growth as one object beside the optimizer, used like a learning-rate scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.control.baselines import Controller, Stateful, WaitController
from simic.control.facts import FIGURES, HISTORY, Facts
from simic.control.governor import GovernorConfig, Verdict
from simic.control.registry import make_controller
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import HEADS, Action
from simic.lifecycle.slots import SlotState
from simic.scheduler.acting import action_limit, take_actions
from simic.scheduler.checks import ArgumentCheck, check_parts, check_settings, refuse_distributed
from simic.scheduler.contributions import ContributionMeter, Evaluate
from simic.scheduler.decision import Decision, stage_changes
from simic.scheduler.gradients import GradientMeter
from simic.scheduler.growth_file import read_growth, save_growth
from simic.scheduler.model_governor import ModelGovernor
from simic.scheduler.parameter_groups import ParameterGroups
from simic.scheduler.scheduler_state import VERSION, check_state, upgrade
from simic.scheduler.usage import StepUsage
from simic.scheduler.validation import complete_metrics, contribution_metric, read_metrics, read_number


class GrowthScheduler:
    """Once per host epoch, `step` observes, decides and acts; the optimizer always trains what the model holds.

    `evaluate` returns {"val_loss": ..., "val_accuracy": ...} of the model on validation data (either may be missing);
    the modules it calls are in evaluation mode meanwhile. With it, contributions are measured by switching seeds off;
    without it no seed can be fossilized. `horizon` is the planned number of host epochs, if known; some controllers
    pace growth by it. A `governor` restores the last good state of a network that breaks, see `ModelGovernor`. Several
    models may share an optimizer, each with its own scheduler. A controller is asked for one action per decision; with
    `actions_per_decision`, and in a frozen host by default, it is asked again at the same decision until it waits. A
    frozen host has nothing to train without seeds, so there the first decision is taken at once.
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
        governor: bool | GovernorConfig = False,
        actions_per_decision: int | None = None,
    ) -> None:
        check_parts(model, optimizer)
        refuse_distributed(model)
        if isinstance(controller, str):
            controller = make_controller(controller, rng_seed)
        check_settings(controller, evaluate, horizon, governor, actions_per_decision)
        self.model, self.optimizer, self.controller = model, optimizer, controller
        self.lr_schedulers = (lr_schedulers,) if isinstance(lr_schedulers, LRScheduler) else tuple(lr_schedulers)
        self.horizon = horizon
        self._arguments = ArgumentCheck(optimizer, self.lr_schedulers, grows=not isinstance(controller, WaitController))
        self._arguments.warn_about_missing(evaluate)
        self.groups = ParameterGroups(model, optimizer, self.lr_schedulers)
        self.decisions: list[Decision] = []
        self._next_index = 0
        self._previous_action = np.zeros((1, len(HEADS)), dtype=np.int64)
        self._action_limit = action_limit(model, actions_per_decision)
        self._history: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._gradients = GradientMeter(model)
        self._usage = StepUsage()
        self._meter = ContributionMeter(model, evaluate, self._usage)
        config = governor if isinstance(governor, GovernorConfig) else GovernorConfig()
        self._governor = ModelGovernor(model, optimizer, config) if governor else None
        optimizer.register_step_pre_hook(self._before_optimizer_step)
        if model.freeze_host and not any(parameter.requires_grad for parameter in model.parameters()):
            self._take_first_decision()

    @property
    def evaluate(self) -> Evaluate | None:
        """The function that validates the model, called without arguments; it may be replaced at any time."""
        return self._meter.evaluate

    @evaluate.setter
    def evaluate(self, evaluate: Evaluate | None) -> None:
        self._meter.evaluate = evaluate

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of `closure`; under shadow incubation, its gradient also reaches seeds in stage training."""
        return self.model.loss(closure)

    def step(
        self, *, val_loss: float | None = None, val_accuracy: float | None = None, train_loss: float | None = None
    ) -> Decision:
        """Call once per host epoch, after validation. Without validation metrics, `evaluate` is called.

        If nothing was trained since the last call, nothing is decided and no time passes.
        """
        refuse_distributed(self.model)
        self._arguments.check_lr_schedulers()
        self.groups.sync()  # the model may have been changed in between
        self._usage.check(self._next_index, self.horizon)
        if self._usage.idle:
            metrics = complete_metrics(self._validate(val_loss, val_accuracy))
            return Decision(index=self._next_index, actions=(Action(),), changes=(), verdict=Verdict.OK, **metrics)
        train_loss = math.nan if train_loss is None else read_number("train_loss", train_loss)
        untouched, history = self.model.slot_state.copy(), self._history
        governor_history = self._governor.history() if self._governor else {}
        try:
            broken = self._governor is not None and not self._governor.weights_finite()
            metrics = {"val_loss": math.nan} if broken else self._validate(val_loss, val_accuracy)
            verdict = self._judge(metrics | {"train_loss": train_loss}, broken=broken)
            if verdict == Verdict.OK:
                # The user's own metrics may stem from other data than evaluate's, so contributions need evaluate's.
                metric = contribution_metric(metrics) if val_loss is None and val_accuracy is None else None
                metrics = complete_metrics(metrics)
                rows, before = self._decide(metrics | {"train_loss": train_loss}, metric)
            else:
                metrics = {"val_loss": math.nan, "val_accuracy": math.nan} | metrics
                rows, before = [np.zeros(len(HEADS), dtype=np.int64)], untouched
        except Exception:  # a failed step leaves no trace and can be repeated
            self.model.slot_state, self._history = untouched, history
            if self._governor:
                self._governor.set_history(governor_history)
            raise
        if self._governor and verdict != Verdict.OK:
            self._governor.restore()
        decision = self._finish(rows, before, metrics, verdict)
        if verdict != Verdict.OK:
            self._report_rollback(decision)
        return decision

    def _take_first_decision(self) -> None:
        """Plant the first seeds of a frozen host, which has nothing to train without them, before anything is measured.

        It is a decision of its own, so there is one more than host epochs.
        """
        self.horizon += 1 if self.horizon else 0
        before = self.model.slot_state.copy()
        self._finish(self._act(), before, {"val_loss": math.nan, "val_accuracy": math.nan}, Verdict.OK)

    def _decide(self, metrics: dict[str, float], metric: float | None) -> tuple[list[np.ndarray], SlotState]:
        """Measure, ask the controller and act: the rows of its actions, and the slot state before them."""
        self._gradients.report()
        self._meter.measure(metric)
        observed = metrics | {"parameters": float(sum(parameter.numel() for parameter in self.model.parameters()))}
        self._history = {name: [*self._history[name], observed[name]][-HISTORY:] for name in FIGURES}
        before = self.model.slot_state.copy()
        return self._act(), before

    def _act(self) -> list[np.ndarray]:
        """Ask the controller for its actions and carry them out; each sees what those before it have changed."""

        def ask(rows: list[np.ndarray]) -> Any:
            facts = self.facts()
            return self.controller.act(replace(facts, previous_action=rows[-1][None]) if rows else facts)

        return take_actions(self.model, ask, self._action_limit)

    def _finish(
        self, rows: list[np.ndarray], before: SlotState, metrics: dict[str, float], verdict: Verdict
    ) -> Decision:
        """Advance time by one decision, and record it."""
        self._gradients.clear()
        self.model.tick()
        self.groups.sync()
        self.groups.follow(tensors=True)
        if self._governor:
            self._governor.save_good_state()
        decision = Decision(
            index=self._next_index,
            actions=tuple(Action.decode(row, self.model.slot_names, self.model.blueprint_names) for row in rows),
            changes=stage_changes(self.model, before),
            verdict=verdict,
            **metrics,
        )
        self.decisions.append(decision)
        self._previous_action = rows[-1][None].copy()
        self._next_index += 1
        self._usage.optimizer_steps = 0
        return decision

    def _judge(self, metrics: dict[str, float], *, broken: bool) -> Verdict:
        if self._governor is None:
            return Verdict.OK
        if broken:
            return Verdict.NOT_FINITE
        if not math.isfinite(metrics.get("val_accuracy", 0.0)):
            return Verdict.OK  # not a fault of the weights; `complete_metrics` raises
        verdict = self._governor.judge(metrics)
        # A loss that was never finite may as well be a fault of the evaluation.
        return verdict if self._governor.has_reference else Verdict.OK

    def _report_rollback(self, decision: Decision) -> None:
        values = f"val_loss {decision.val_loss:.4g}, val_accuracy {decision.val_accuracy:.4g}"
        if self.evaluate is not None and not all(map(math.isfinite, self._validate(None, None).values())):
            raise ValueError(
                f"the network was {decision.verdict} ({values}), and its last good weights, which are restored, are "
                "too: the fault lies in the validation data or in evaluate"
            )
        pruned = ", ".join(change.slot for change in decision.changes)
        warnings.warn(
            f"host epoch {decision.index + 1}: the network was {decision.verdict} ({values}); its last good weights "
            f"and optimizer state are restored{f', the seeds in {pruned} pruned' if pruned else ''}; training goes on",
            stacklevel=3,
        )

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.groups.follow()
        self._gradients.observe()
        self._usage.count_optimizer_step(self._next_index)
        if self._governor:
            self._governor.before_optimizer_step()

    def facts(self) -> Facts:
        """The controller's observation at present."""
        model = self.model
        history = {
            name: np.array([[math.nan] * (HISTORY - len(values)) + values]) for name, values in self._history.items()
        }
        return Facts(
            slots=model.slot_state.copy(),
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
        """The scheduler's own state; model, optimizer and learning-rate schedulers have theirs."""
        return {
            "version": VERSION,
            "next_index": self._next_index,
            "previous_action": self._previous_action.tolist(),
            "history": {name: list(values) for name, values in self._history.items()},
            "seed_groups": self.groups.seed_order(),
            "seed_numbers": self.groups.seed_numbers(),
            "controller": type(self.controller).__name__,
            "controller_state": self.controller.state_dict() if isinstance(self.controller, Stateful) else {},
            "optimizer_steps": self._usage.optimizer_steps,
            "governor": self._governor.state_dict() if self._governor else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Load the model first: the optimizer's groups then follow its seeds."""
        state = upgrade(state)
        check_state(state, self.controller)
        slots = state["seed_groups"]
        if set(self.model.grown_slots) != set(slots):
            raise ValueError(
                f"the saved scheduler trains seeds in slots {slots}, the model holds some in {self.model.grown_slots}; "
                "load the model first"
            )
        self.groups.rebuild(slots, state.get("seed_numbers", [0] * len(slots)))
        if self._governor:
            self._governor.load_state_dict(state.get("governor"))
        self._usage.optimizer_steps = state.get("optimizer_steps")
        self._next_index = state["next_index"]
        self._previous_action = np.array(state["previous_action"])
        self._history = {name: list(values) for name, values in state["history"].items()}
        if isinstance(self.controller, Stateful):
            self.controller.load_state_dict(state["controller_state"])

    def save(self, path: str | Path) -> None:
        """Write model, optimizer, learning-rate schedulers and growth to one safetensors file."""
        self.groups.sync()
        save_growth(path, self.model, self.optimizer, self.lr_schedulers, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote: first the seeds, then weights and optimizer. A refused load changes nothing."""
        tree = read_growth(path, self.optimizer, self.lr_schedulers)
        check_state(upgrade(tree["growth"]), self.controller)
        self.model.load_state_dict(tree["model"])
        self.load_state_dict(tree["growth"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for scheduler, state in zip(self.lr_schedulers, tree["lr_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.groups.sync()

    def _validate(self, val_loss: float | None, val_accuracy: float | None) -> dict[str, float]:
        """The validation metrics given or, without any, those of `evaluate`; they may not be finite."""
        if val_loss is not None or val_accuracy is not None:
            return read_metrics({"val_loss": val_loss, "val_accuracy": val_accuracy})
        if self.evaluate is None:
            raise ValueError("step needs val_loss=... (and val_accuracy=...), or a scheduler built with evaluate=...")
        return self._meter.validate()
