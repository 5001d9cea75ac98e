"""GrowthScheduler: growth as one object beside the optimizer, used like a learning-rate scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
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
from simic.scheduler.checks import check_parts, check_settings, refuse_distributed
from simic.scheduler.gradients import GradientMeter
from simic.scheduler.growth_file import read_growth, save_growth
from simic.scheduler.model_governor import ModelGovernor
from simic.scheduler.parameter_groups import ParameterGroups
from simic.scheduler.usage import StepUsage
from simic.scheduler.validation import complete_figures, read_figures, read_number
from simic.scheduler.validation import metric_of as _metric

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
    """What one `step` saw and did."""

    index: int
    val_loss: float
    val_accuracy: float
    action: Action
    changes: tuple[StageChange, ...]
    verdict: Verdict = Verdict.OK
    """Anything else: the network broke, and the governor gave its last good state back instead of deciding."""


class GrowthScheduler:
    """Once per host epoch, `step` observes, decides and acts; the optimizer always trains what the model holds.

    `evaluate` returns {"val_loss": ..., "val_accuracy": ...} of the model on validation data (either may be missing).
    With it, contributions are measured by switching seeds off; without it no seed can be fossilized. While it runs, the
    modules that it calls are in evaluation mode. `horizon` is the number of host epochs planned, if that is known: some
    controllers pace themselves by it. A `governor` gives a network that breaks its last good state back, see
    `ModelGovernor`. Models may share an optimizer, each with its scheduler.
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
    ) -> None:
        check_parts(model, optimizer)
        refuse_distributed(model)
        if isinstance(controller, str):
            controller = make_controller(controller, rng_seed)
        check_settings(controller, evaluate, horizon, governor)
        self.lr_schedulers = (lr_schedulers,) if isinstance(lr_schedulers, LRScheduler) else tuple(lr_schedulers)
        self._grows = not isinstance(controller, WaitController)
        self._driven_from_outside = _driven(optimizer) and not self.lr_schedulers
        self._warn_of_what_is_missing(evaluate)
        self.model = model
        self.optimizer = optimizer
        self.controller = controller
        self.decisions: list[Decision] = []
        self._evaluate = None if evaluate is None else _calmly(evaluate, model)
        self._groups = ParameterGroups(model, optimizer, self.lr_schedulers)
        self.horizon = horizon
        self._next_index = 0
        self._previous_action = np.zeros((1, len(HEADS)), dtype=np.int64)
        self._history: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._gradients = GradientMeter(model)
        self._usage = StepUsage()
        config = governor if isinstance(governor, GovernorConfig) else GovernorConfig()
        self._governor = ModelGovernor(model, optimizer, config) if governor else None
        optimizer.register_step_pre_hook(self._before_optimizer_step)

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of `closure`, computed so that seeds in training learn too; `shadow` incubation needs it."""
        return self.model.loss(closure)

    def step(
        self, *, val_loss: float | None = None, val_accuracy: float | None = None, train_loss: float | None = None
    ) -> Decision:
        """Call once per host epoch, after validation. Validation figures that are not given come from `evaluate`.

        If nothing was trained since the call before, nothing is decided and no time passes.
        """
        refuse_distributed(self.model)
        self._check_schedulers()
        self._groups.sync()  # somebody else may have changed the model since
        self._usage.check(self._next_index, self.horizon)
        if self._usage.idle:
            figures = complete_figures(self._figures(val_loss, val_accuracy))
            return Decision(index=self._next_index, action=Action(), changes=(), verdict=Verdict.OK, **figures)
        trained = math.nan if train_loss is None else read_number("train_loss", train_loss)
        untouched, earlier = self.model.slot_state.copy(), self._history
        memory = self._governor.memory() if self._governor else {}
        try:
            broken = self._governor is not None and not self._governor.weights_finite()
            numbers = {"val_loss": math.nan} if broken else self._figures(val_loss, val_accuracy)
            verdict = self._judge(numbers | {"train_loss": trained}, broken=broken)
            if verdict == Verdict.OK:
                own = _metric(numbers) if val_loss is None and val_accuracy is None else None
                row, before, figures = self._decide(complete_figures(numbers), trained, own)
            else:
                row, before = np.zeros(len(HEADS), dtype=np.int64), untouched
                figures = {"val_loss": math.nan, "val_accuracy": math.nan} | numbers
        except Exception:  # a refused step leaves no trace and can be repeated
            self.model.slot_state, self._history = untouched, earlier
            if self._governor:
                self._governor.set_memory(memory)
            raise
        if self._governor and verdict != Verdict.OK:
            self._governor.restore()
        decision = self._finish(row, before, figures, verdict)
        if verdict != Verdict.OK:
            self._tell_of_rollback(decision)
        return decision

    def _decide(
        self, figures: dict[str, float], train_loss: float, metric: float | None
    ) -> tuple[np.ndarray, SlotState, dict[str, float]]:
        """Measure, ask the controller and act: its action, the slots before it, and the figures."""
        self._gradients.report(self.model)
        self._measure_contributions(metric)
        seen = figures | {"train_loss": train_loss}
        seen["parameters"] = float(sum(parameter.numel() for parameter in self.model.parameters()))
        self._history = {name: [*self._history[name], seen[name]][-HISTORY:] for name in FIGURES}
        before = self.model.slot_state.copy()
        row = encode_answer(self.controller.act(self.facts()), self.model.slot_names, self.model.blueprint_names)
        self.model.execute(row)
        return row, before, figures

    def _finish(self, row: np.ndarray, before: SlotState, figures: dict[str, float], verdict: Verdict) -> Decision:
        """Let time pass, and record the decision."""
        self._gradients.clear()
        self.model.tick()
        self._groups.sync()
        self._groups.follow(tensors=True)
        if self._governor:
            self._governor.keep()
        decision = Decision(
            index=self._next_index,
            action=Action.decode(row, self.model.slot_names, self.model.blueprint_names),
            changes=self._changes(before),
            verdict=verdict,
            **figures,
        )
        self.decisions.append(decision)
        self._previous_action = row[None].copy()
        self._next_index += 1
        self._usage.decided()
        return decision

    def _judge(self, numbers: dict[str, float], *, broken: bool) -> Verdict:
        if self._governor is None:
            return Verdict.OK
        if broken:
            return Verdict.NOT_FINITE
        if not math.isfinite(numbers.get("val_accuracy", 0.0)):
            return Verdict.OK  # it says nothing about the weights, and is refused
        verdict = self._governor.judge(numbers)
        # Before any good loss was seen, a loss that is not finite may as well be the evaluation's fault.
        return verdict if self._governor.settled else Verdict.OK

    def _tell_of_rollback(self, decision: Decision) -> None:
        told = f"val_loss {decision.val_loss:.4g}, val_accuracy {decision.val_accuracy:.4g}"
        if self._evaluate is not None and not all(map(math.isfinite, self._figures(None, None).values())):
            raise ValueError(
                f"the network was {decision.verdict} ({told}), and its last good weights, which are restored, are too: "
                "the fault lies in the validation data or in evaluate"
            )
        pruned = ", ".join(change.slot for change in decision.changes)
        warnings.warn(
            f"host epoch {decision.index + 1}: the network was {decision.verdict} ({told}); its last good weights and "
            f"optimizer state are restored{f', the seeds in {pruned} pruned' if pruned else ''}; training goes on",
            stacklevel=3,
        )

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._groups.follow()
        self._gradients.observe(optimizer, args, kwargs)
        self._usage.count_optimizer_step(self._next_index)
        if self._governor:
            self._governor.before_optimizer_step()

    def _warn_of_what_is_missing(self, evaluate: Evaluate | None) -> None:
        if evaluate is None and self._grows:
            warnings.warn(
                "without evaluate=... contributions cannot be measured, so no seed will be fossilized", stacklevel=3
            )
        if self._driven_from_outside and self._grows:
            warnings.warn(
                "a learning-rate scheduler drives the optimizer but was not passed; many of them fail once a seed "
                "brings a parameter group of its own: pass it as lr_schedulers=[...]",
                stacklevel=3,
            )

    def _check_schedulers(self) -> None:
        if self._grows and not self.lr_schedulers and not self._driven_from_outside and _driven(self.optimizer):
            raise ValueError(
                "a learning-rate scheduler was built after the GrowthScheduler, and would fail once a seed brings a "
                "parameter group of its own: build it first and pass it as lr_schedulers=[...]"
            )

    def facts(self) -> Facts:
        """What the controller sees now."""
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
        """What the scheduler itself remembers; model, optimizer and learning-rate schedulers have their own."""
        return {
            "version": VERSION,
            "next_index": self._next_index,
            "previous_action": self._previous_action.tolist(),
            "history": {name: list(values) for name, values in self._history.items()},
            "seed_groups": self._groups.seed_order(),
            "seed_numbers": self._groups.seed_numbers(),
            "controller": type(self.controller).__name__,
            "controller_state": self.controller.state_dict() if isinstance(self.controller, Stateful) else {},
            "optimizer_steps": self._usage.optimizer_steps,
            "governor": self._governor.state_dict() if self._governor else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Load the model first: the optimizer's groups then follow its seeds."""
        state = upgrade(state)
        self._check_state(state)
        grown = [slot for slot in self.model.slot_names if self.model.seed(slot) is not None]
        if set(grown) != set(state["seed_groups"]):
            raise ValueError(
                f"the saved scheduler trains seeds in slots {state['seed_groups']}, the model holds some in {grown}; "
                "load the model first"
            )
        slots = state["seed_groups"]
        self._groups.rebuild(slots, state.get("seed_numbers", [0] * len(slots)))
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
        self._groups.sync()
        save_growth(path, self.model, self.optimizer, self.lr_schedulers, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote: first the topology, then weights and optimizer. A refusal changes nothing."""
        tree = read_growth(path, self.optimizer, self.lr_schedulers)
        self._check_state(upgrade(tree["growth"]))
        self.model.load_state_dict(tree["model"])
        self.load_state_dict(tree["growth"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for scheduler, state in zip(self.lr_schedulers, tree["lr_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self._groups.sync()

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
        """The validation figures that are known, given or evaluated; they may not be finite."""
        if val_loss is None and val_accuracy is None:
            if self._evaluate is None:
                raise ValueError(
                    "step needs val_loss=... (and val_accuracy=...), or a scheduler built with evaluate=..."
                )
            with preserve_state(self.model), evaluating(self.model):
                return read_figures(self._evaluate())
        return read_figures({"val_loss": val_loss, "val_accuracy": val_accuracy})

    def _measure_contributions(self, now: float | None) -> None:
        """Metric with the seed minus metric without it; at alpha 0, what the alpha target would give.

        `now` is the metric of the network as it is, if it is known.
        """
        slot_state = self.model.slot_state
        measured = to_measure(slot_state)
        if self._evaluate is None or not measured.any():
            return
        switched = np.full(measured.shape, math.nan)
        with preserve_state(self.model), evaluating(self.model):
            now = _metric(self._evaluate()) if now is None else now
            for index in np.flatnonzero(measured[0]):
                slot = self.model.slot_names[index]
                blended_in = slot_state.alpha[0, index] > 0
                with self.model.switched_off(slot) if blended_in else self.model.switched_in(slot):
                    switched[0, index] = _metric(self._evaluate())
                self._usage.check_ablation(self.model, slot)
        note_contributions(slot_state, measured, np.array([now]), switched)

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
    """The saved state of a scheduler in today's format: version 1 knew one controller by another name."""
    if state.get("version") != 1:
        return state
    name = {"ScheduleController": "ScriptedController"}.get(state["controller"], state["controller"])
    return state | {"version": VERSION, "controller": name}


def _calmly(evaluate: Evaluate, model: GrowableModel) -> Evaluate:
    """The same evaluation, with modules outside the model in evaluation mode too."""

    def run() -> Mapping[str, float]:
        with evaluating_others(model):
            return evaluate()

    return run


def _driven(optimizer: Optimizer) -> bool:
    """Whether a learning-rate scheduler of torch was built on it; the mark is torch's own."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
