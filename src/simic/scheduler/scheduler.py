"""GrowthScheduler: growth as one object beside the optimizer, used like a learning-rate scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.control.baselines import Controller, Stateful, WaitController, encode_answer
from simic.control.facts import FIGURES, HISTORY, Facts
from simic.control.governor import GovernorConfig, Verdict
from simic.control.registry import make_controller
from simic.growth.isolation import evaluating, evaluating_others, preserve_state
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import HEADS, Action
from simic.lifecycle.slots import SlotState, note_contributions, to_measure
from simic.lifecycle.stages import Stage
from simic.scheduler.checks import check_settings, refuse_sharded
from simic.scheduler.gradients import GradientMeter, observe_gradients
from simic.scheduler.growth_file import read_growth, save_growth
from simic.scheduler.model_governor import ModelGovernor
from simic.scheduler.parameter_groups import ParameterGroups
from simic.scheduler.ranks import Ranks
from simic.scheduler.unwrap import unwrap
from simic.scheduler.usage import StepUsage
from simic.scheduler.validation import complete_metrics, contribution_metric, read_metrics, read_train_loss

VERSION = 2
Evaluate = Callable[[], Mapping[str, float]]


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
    """What one `step` observed and did."""

    index: int
    val_loss: float
    val_accuracy: float
    action: Action
    changes: tuple[StageChange, ...]
    verdict: Verdict = Verdict.OK
    """If not OK, the network broke and the governor restored its last good state instead of deciding."""


class GrowthScheduler:
    """Once per host epoch, `step` observes, decides and acts; the optimizer always trains what the model holds.

    `model` may also be what torch.compile or DistributedDataParallel made of a GrowableModel. Several processes then
    each build a scheduler and call `step` together: metrics are averaged over them, and rank 0 decides (see `Ranks`).
    `evaluate` returns {"val_loss": ..., "val_accuracy": ...} of the model on validation data (either may be missing);
    the modules it calls are in evaluation mode meanwhile. With it, contributions are measured by switching seeds off;
    without it no seed can be fossilized. `horizon` is the planned number of host epochs, if known; some controllers
    pace growth by it. A `governor` restores the last good state of a network that breaks, see `ModelGovernor`. Several
    models may share an optimizer, each with its own scheduler.
    """

    def __init__(
        self,
        model: GrowableModel | nn.Module,
        optimizer: Optimizer,
        controller: str | Controller = "heuristic",
        lr_schedulers: LRScheduler | Sequence[LRScheduler] = (),
        *,
        evaluate: Evaluate | None = None,
        horizon: int = 0,
        rng_seed: int = 0,
        governor: bool | GovernorConfig = False,
    ) -> None:
        model, optimizer, self.lr_schedulers = unwrap(model, optimizer, lr_schedulers)
        if isinstance(controller, str):
            controller = make_controller(controller, rng_seed)
        check_settings(controller, evaluate, horizon, governor)
        self.model, self.optimizer, self.controller = model, optimizer, controller
        self.evaluate, self.horizon = evaluate, horizon
        self._grows = not isinstance(controller, WaitController)
        self._has_unknown_lr_scheduler = _has_lr_scheduler(optimizer) and not self.lr_schedulers
        self._warn_about_missing_arguments()
        self.groups = ParameterGroups(model, optimizer, self.lr_schedulers)
        self.decisions: list[Decision] = []
        self._next_index = 0
        self._previous_action = np.zeros((1, len(HEADS)), dtype=np.int64)
        self._history: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._gradients = GradientMeter(model)
        self._usage = StepUsage()
        self._ranks = Ranks(model)
        config = governor if isinstance(governor, GovernorConfig) else GovernorConfig()
        self._governor = ModelGovernor(model, optimizer, config) if governor else None
        optimizer.register_step_pre_hook(self._before_optimizer_step)

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last decision, so that `step` would decide nothing."""
        return self._usage.idle

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of `closure`; under shadow incubation, its gradient also reaches seeds in stage training."""
        return self.model.loss(closure)

    def step(
        self, *, val_loss: float | None = None, val_accuracy: float | None = None, train_loss: float | None = None
    ) -> Decision:
        """Call once per host epoch, after validation. Without validation metrics, `evaluate` is called.

        If nothing was trained since the last call, nothing is decided and no time passes.
        """
        refuse_sharded(self.model)
        self._check_lr_schedulers()
        self.groups.sync()  # the model may have been changed in between
        self._usage.check(self._next_index, self.horizon)
        self._ranks.check("before a decision", decision=self._next_index, trained=not self._usage.idle)
        if self._usage.idle:
            metrics = complete_metrics(self._validate(val_loss, val_accuracy))
            return Decision(index=self._next_index, action=Action(), changes=(), verdict=Verdict.OK, **metrics)
        train_loss = self._ranks.mean("in the train_loss given", partial(read_train_loss, train_loss))["train_loss"]
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
                row, before = self._decide(metrics | {"train_loss": train_loss}, metric)
            else:
                metrics = {"val_loss": math.nan, "val_accuracy": math.nan} | metrics
                row, before = np.zeros(len(HEADS), dtype=np.int64), untouched
        except Exception:  # a failed step leaves no trace and can be repeated
            self.model.slot_state, self._history = untouched, history
            if self._governor:
                self._governor.set_history(governor_history)
            raise
        if self._governor and verdict != Verdict.OK:
            self._governor.restore()
        decision = self._finish(row, before, metrics, verdict)
        self._ranks.check("after a decision")
        if verdict != Verdict.OK:
            self._report_rollback(decision)
        return decision

    def _decide(self, metrics: dict[str, float], metric: float | None) -> tuple[np.ndarray, SlotState]:
        """Measure, ask the controller and act: the row of its action, and the slot state before it."""
        self._gradients.report()
        self._measure_contributions(metric)
        observed = metrics | {"parameters": float(sum(parameter.numel() for parameter in self.model.parameters()))}
        self._history = {name: [*self._history[name], observed[name]][-HISTORY:] for name in FIGURES}
        before = self.model.slot_state.copy()
        names, blueprints = self.model.slot_names, self.model.blueprint_names
        row = self._ranks.first(
            "in the controller", lambda: encode_answer(self.controller.act(self.facts()), names, blueprints)
        )
        self.model.execute(row)
        return row, before

    def _finish(self, row: np.ndarray, before: SlotState, metrics: dict[str, float], verdict: Verdict) -> Decision:
        """Advance time by one decision, and record it."""
        self._gradients.clear()
        self.model.tick()
        self.groups.sync()
        self.groups.follow(tensors=True)
        if self._governor:
            self._governor.save_good_state()
        decision = Decision(
            index=self._next_index,
            action=Action.decode(row, self.model.slot_names, self.model.blueprint_names),
            changes=self._changes(before),
            verdict=verdict,
            **metrics,
        )
        self.decisions.append(decision)
        self._previous_action = row[None].copy()
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

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.groups.follow()
        self._usage.count_optimizer_step(self._next_index)
        if self._governor:
            self._governor.before_optimizer_step()
        return observe_gradients(self._gradients, args, kwargs)

    def _warn_about_missing_arguments(self) -> None:
        if self.evaluate is None and self._grows:
            warnings.warn(
                "without evaluate=... contributions cannot be measured, so no seed will be fossilized", stacklevel=3
            )
        if self._has_unknown_lr_scheduler and self._grows:
            warnings.warn(
                "a learning-rate scheduler drives the optimizer but was not passed; many of them fail once a seed "
                "brings a parameter group of its own: pass it as lr_schedulers=[...]",
                stacklevel=3,
            )

    def _check_lr_schedulers(self) -> None:
        known = self.lr_schedulers or self._has_unknown_lr_scheduler
        if self._grows and not known and _has_lr_scheduler(self.optimizer):
            raise ValueError(
                "a learning-rate scheduler was built after the GrowthScheduler, and would fail once a seed brings a "
                "parameter group of its own: build it first and pass it as lr_schedulers=[...]"
            )

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
            host_parameters=np.array([sum(p.numel() for p in model.host_parameters())]),
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
            "gradients": self._gradients.state_dict(),
            "governor": self._governor.state_dict() if self._governor else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Load the model first: the optimizer's groups then follow its seeds."""
        state = upgrade(state)
        self._check_state(state)
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
        self._gradients.load_state_dict(state.get("gradients"))
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
        self._check_state(upgrade(tree["growth"]))
        self.model.load_state_dict(tree["model"])
        self.load_state_dict(tree["growth"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for scheduler, state in zip(self.lr_schedulers, tree["lr_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.groups.sync()

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

    def _validate(self, val_loss: float | None, val_accuracy: float | None) -> dict[str, float]:
        """The validation metrics given or, without any, those of `evaluate`; they may not be finite."""
        if val_loss is not None or val_accuracy is not None:
            given = {"val_loss": val_loss, "val_accuracy": val_accuracy}
            return self._ranks.mean("in the metrics given", partial(read_metrics, given))
        if self.evaluate is None:
            raise ValueError("step needs val_loss=... (and val_accuracy=...), or a scheduler built with evaluate=...")
        with preserve_state(self.model), evaluating(self.model):
            return self._run_evaluate()

    def _run_evaluate(self) -> dict[str, float]:
        evaluate = self.evaluate
        assert evaluate is not None
        with evaluating_others(self.model):
            return self._ranks.mean("in evaluate", lambda: read_metrics(evaluate()))

    def _measure_contributions(self, metric: float | None) -> None:
        """Metric with the seed minus metric without it; at alpha 0, what the alpha target would give.

        `metric` is that of the network as it is, if it is known.
        """
        slot_state = self.model.slot_state
        measured = to_measure(slot_state)
        if self.evaluate is None or not measured.any():
            return
        switched = np.full(measured.shape, math.nan)
        with preserve_state(self.model), evaluating(self.model):
            metric = contribution_metric(self._run_evaluate()) if metric is None else metric
            for index in np.flatnonzero(measured[0]):
                slot = self.model.slot_names[index]
                blended_in = slot_state.alpha[0, index] > 0
                with self.model.switched_off(slot) if blended_in else self.model.switched_in(slot):
                    switched[0, index] = contribution_metric(self._run_evaluate())
                self._usage.check_ablation(self.model, slot)
        note_contributions(slot_state, measured, np.array([metric]), switched)

    def _changes(self, before: SlotState) -> tuple[StageChange, ...]:
        after = self.model.slot_state
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


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A saved state in the present format: in version 1 one controller had another name."""
    if state.get("version") != 1:
        return state
    name = {"ScheduleController": "ScriptedController"}.get(state["controller"], state["controller"])
    return state | {"version": VERSION, "controller": name}


def _has_lr_scheduler(optimizer: Optimizer) -> bool:
    """Whether one of torch's learning-rate schedulers was built on an optimizer; torch marks it so."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
