"""GrowthScheduler: growth as one object beside the optimizer, used like a learning-rate scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from simic.control.baselines import Controller, Stateful, WaitController
from simic.control.facts import FIGURES, HISTORY, Facts
from simic.control.governor import GovernorConfig, Verdict
from simic.control.registry import DEFAULT_CONTROLLER, make_controller
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import HEADS, Action
from simic.lifecycle.slots import SlotState
from simic.scheduler.acting import action_limit, take_actions
from simic.scheduler.checks import ArgumentCheck, check_counts, check_settings, refuse_sharded
from simic.scheduler.contributions import ContributionMeter, Evaluate
from simic.scheduler.decision import Decision, count_parameters, encode_decision, seed_parameters, stage_changes
from simic.scheduler.events import LOGGER, Announcer, Hook
from simic.scheduler.gradients import observe_gradients
from simic.scheduler.growth_file import read_growth, save_growth
from simic.scheduler.history import GrowthHistory, describe_scheduler
from simic.scheduler.log import open_log
from simic.scheduler.model_facts import model_facts
from simic.scheduler.model_governor import ModelGovernor, judge
from simic.scheduler.parameter_groups import ParameterGroups
from simic.scheduler.plot import plot_growth
from simic.scheduler.ranks import Ranks
from simic.scheduler.scheduler_state import VERSION, check_seeds, check_state, read_decisions, upgrade
from simic.scheduler.training_meter import TrainingMeter
from simic.scheduler.unwrap import unwrap
from simic.scheduler.usage import StepUsage
from simic.scheduler.validation import CountedMetric, read_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class GrowthScheduler:
    """Growth as one object beside the optimizer: once per host epoch, `step` observes, decides and acts.

    The optimizer always trains what the model holds: groups for seeds come and go, and learning-rate schedulers follow.

    Args:
        model: A GrowableModel, or what torch.compile or DistributedDataParallel made of one. Several processes each
            build a scheduler and call `step` together: metrics are averaged over them, and rank 0 decides.
        optimizer: Any torch optimizer of the model's parameters. Models may share one.
        controller: What decides: "heuristic", "pretrained" or another registered name, the path of a run, a
            controller, an ensemble or a plan, or an object with `act(facts)`.
        lr_schedulers: The learning-rate schedulers of the optimizer, built before.
        evaluate: A function without arguments that returns {"val_loss": ..., "val_accuracy": ...} of the model on
            validation data (either may be missing), or other metrics by name. Its modules are in evaluation mode
            meanwhile. It measures contributions, by switching seeds off; without it no seed can be fossilized. Several
            values instead of a number, one per batch or sample, are averaged, and contributions get standard errors.
        metric: The name of the metric that counts; by default accuracy, or the loss where there is none.
        mode: Whether `metric` is better when it is lower ("min") or higher ("max").
        evaluate_every: Measure contributions at every k-th decision only.
        max_ablations: Measure at most so many seeds per decision, in turn; by default all live ones and a fossil.
        horizon: Planned number of host epochs, 0 if not known; some controllers use it.
        train_samples: Size of the training set, if known; some controllers use it.
        rng_seed: Of controllers that draw random numbers.
        governor: True or a GovernorConfig restores the last good state of a network that breaks.
        actions_per_decision: Ask the controller again at the same decision until it waits, at most so often; by default
            once, in a frozen host without a limit. A frozen host, with little to train, decides at once.
        verbose: Print stage changes, which `logging.getLogger("simic")` gets in any case.
        log: A directory to write decisions to, for `simic watch` and `simic report`.
        on_germinate, on_fossilize, on_prune: Functions that get a `GrowthEvent`, at the end of the step.

    Raises:
        ValueError: A setting is out of range, or the optimizer does not train the model.

    Example:
        >>> growth = GrowthScheduler(model, optimizer, evaluate=validate)
        >>> for host_epoch in range(3):
        ...     train_epoch()
        ...     decision = growth.step()
        >>> decision.host_epoch, decision.evaluations >= 1
        (3, True)
    """

    def __init__(
        self,
        model: GrowableModel | nn.Module,
        optimizer: Optimizer,
        controller: str | Controller = DEFAULT_CONTROLLER,
        lr_schedulers: LRScheduler | Sequence[LRScheduler] = (),
        *,
        evaluate: Evaluate | None = None,
        metric: str | None = None,
        mode: str | None = None,
        evaluate_every: int = 1,
        max_ablations: int | None = None,
        horizon: int = 0,
        train_samples: int | None = None,
        rng_seed: int = 0,
        governor: bool | GovernorConfig = False,
        actions_per_decision: int | None = None,
        verbose: bool = False,
        log: str | Path | None = None,
        on_germinate: Hook | None = None,
        on_fossilize: Hook | None = None,
        on_prune: Hook | None = None,
    ) -> None:
        model, optimizer, self.lr_schedulers = unwrap(model, optimizer, lr_schedulers)
        if isinstance(controller, str):
            controller = make_controller(controller, rng_seed)
        check_settings(controller, evaluate, horizon, governor, actions_per_decision)
        check_counts(evaluate_every, max_ablations, train_samples)
        self._metric = CountedMetric(metric, mode)
        hooks = {"germinate": on_germinate, "fossilize": on_fossilize, "prune": on_prune}
        self._announcer = Announcer(hooks, verbose=verbose)
        self.model, self.optimizer, self.controller = model, optimizer, controller
        self.horizon, self.train_samples = horizon, train_samples
        self._arguments = ArgumentCheck(optimizer, self.lr_schedulers, grows=not isinstance(controller, WaitController))
        self._arguments.warn_about_missing(evaluate)
        self.groups = ParameterGroups(model, optimizer, self.lr_schedulers)
        self.decisions: list[Decision] = []
        self._next_index, self._early = 0, False  # early: the first decision was taken before training
        self._unplanted = model.slot_state.copy(), model.germinations  # before that decision
        self._previous_action = np.zeros((1, len(HEADS)), dtype=np.int64)
        self._action_limit = action_limit(model, actions_per_decision)
        self._history: dict[str, list[float]] = {name: [] for name in FIGURES}
        self._training = TrainingMeter(model, optimizer)
        self._usage, self._ranks = StepUsage(), Ranks(model)
        self._meter = ContributionMeter(
            model, evaluate, self._metric, self._usage, self._ranks, every=evaluate_every, max_ablations=max_ablations
        )
        config = governor if isinstance(governor, GovernorConfig) else GovernorConfig()
        self._governor = ModelGovernor(model, optimizer, config) if governor else None
        optimizer.register_step_pre_hook(self._before_optimizer_step)
        LOGGER.info("%s: %s", type(self).__name__, self._meter.cost())
        self._announcer.log = open_log(log, model, controller, metric=repr(self._metric), horizon=horizon)
        if model.freeze_host and not model.grown_slots:
            self._take_first_decision()

    @property
    def evaluate(self) -> Evaluate | None:
        """The function that validates the model, called without arguments; it may be replaced at any time."""
        return self._meter.evaluate

    @evaluate.setter
    def evaluate(self, evaluate: Evaluate | None) -> None:
        self._meter.evaluate = evaluate

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last decision, so that `step` would decide nothing."""
        return self._usage.idle

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """Compute the training loss; needed for shadow incubation, and tells controllers how noisy the loss is.

        Args:
            closure: A function without arguments that runs the model on a batch and returns the loss.

        Returns:
            The loss, for `loss.backward()`. Under shadow incubation its gradient also reaches seeds in stage training.

        Example::

            loss = growth.loss(lambda: criterion(model(x), y))
        """
        return self.model.loss(self._training.watched(closure))

    def step(
        self,
        metrics: SupportsFloat | Mapping[str, Any] | None = None,
        /,
        *,
        val_loss: SupportsFloat | None = None,
        val_accuracy: SupportsFloat | None = None,
        train_loss: SupportsFloat | None = None,
        **others: SupportsFloat | None,
    ) -> Decision:
        """Take one decision. Call it once per host epoch, after validation.

        Args:
            metrics: Validation metrics by name, or a single value: the metric that counts, by default the validation
                loss. Without any, here or as keywords, `evaluate` is called.
            val_loss, val_accuracy, others: The same as keywords.
            train_loss: Mean training loss of the host epoch; controllers and the governor use it.

        Returns:
            What was observed and done. If nothing was trained since the last call, nothing is decided and no time
            passes.

        Raises:
            ValueError: No metric was given and there is no `evaluate`, or a loss is not finite and there is no
                governor. A step that raises leaves no trace and can be repeated.
        """
        refuse_sharded(self.model)
        self._arguments.check_lr_schedulers()
        self.groups.sync()  # the model may have been changed in between
        self._usage.check(self._next_index, self._planned)
        self._ranks.check("before a decision", decision=self._next_index, trained=not self._usage.idle)
        known = {"val_loss": val_loss, "val_accuracy": val_accuracy, "train_loss": train_loss}
        given = self._metric.collect(metrics, known | others)
        train = {name: given.pop(name) for name in ("train_loss",) if name in given}
        train = self._ranks.mean("in the train_loss given", lambda: {k: read_number(k, v) for k, v in train.items()})
        if self._usage.idle:
            numbers = self._validate(given)
            by_name = self._metrics_by_name(numbers | train)
            return Decision(index=self._next_index, **self._metric.figures(numbers), **by_name)
        self._meter.start()
        sizes, errors = seed_parameters(self.model), dict(self.model.contribution_errors)
        untouched, history, metric_state = self.model.slot_state.copy(), self._history, self._metric.state_dict()
        governor_history = self._governor.history() if self._governor else {}
        try:
            broken = self._governor is not None and not self._governor.weights_finite()
            numbers = {} if broken else self._validate(given)
            verdict = Verdict.NOT_FINITE if broken else judge(self._governor, self._metric.judged(numbers | train))
            if verdict == Verdict.OK:
                figures = self._observe(numbers, train)
                # The user's own metrics may stem from other data than evaluate's, so contributions need evaluate's.
                rows, before = self._decide(None if given else self._metric.goodness(numbers))
            else:
                figures = {name: numbers.get(name, math.nan) for name in ("val_loss", "val_accuracy")}
                rows, before = [np.zeros(len(HEADS), dtype=np.int64)], untouched
        except Exception:  # a failed step leaves no trace and can be repeated
            self.model.slot_state, self.model.contribution_errors, self._history = untouched, errors, history
            self._metric.load_state_dict(metric_state)
            if self._governor:
                self._governor.set_history(governor_history)
            raise
        if self._governor and verdict != Verdict.OK:
            self._governor.restore()
        decision = self._finish(rows, before, sizes, figures | {"verdict": verdict}, numbers | train)
        self._ranks.check("after a decision")
        self._announce(decision)
        return decision

    def _take_first_decision(self) -> None:
        """Plant the first seeds of a frozen host, which has nothing but perhaps a head to train without them."""
        self._early = True
        self._announce(self._finish(self._act(), self._unplanted[0], {}, {}, {}))

    def _decide(self, goodness: float | None) -> tuple[list[np.ndarray], SlotState]:
        """Measure, ask the controller and act: the rows of its actions, and the slot state before them."""
        self._training.report()
        self._meter.forget_outdated()  # before, because held seeds that are not measured come first
        self._meter.measure(self._next_index, goodness)
        before = self.model.slot_state.copy()
        return self._act(), before

    def _act(self) -> list[np.ndarray]:
        """Ask the controller for its actions and carry them out; each sees what those before it have changed."""

        def ask(rows: list[np.ndarray]) -> Any:
            self._meter.forget_outdated()  # an action before may have made a seed held
            facts = self.facts()
            return self.controller.act(replace(facts, previous_action=rows[-1][None]) if rows else facts)

        return take_actions(self.model, ask, self._ranks, self._action_limit)

    def _observe(self, numbers: dict[str, float], train: dict[str, float]) -> dict[str, float]:
        """Add what controllers see of the metrics to their history; returns loss and accuracy."""
        figures = self._metric.figures(numbers)
        # A training loss is compared with the validation loss, whose place a metric of another scale may have taken.
        train_loss = math.nan if self._metric.relative else train.get("train_loss", math.nan)
        observed = figures | {"train_loss": train_loss, "parameters": float(count_parameters(self.model))}
        self._history = {name: [*self._history[name], observed[name]][-HISTORY:] for name in FIGURES}
        return figures

    def _finish(
        self,
        rows: list[np.ndarray],
        before: SlotState,
        sizes: dict[str, int],
        figures: dict[str, Any],
        numbers: dict[str, float],
    ) -> Decision:
        """Advance time by one decision, and record it; `sizes` are the parameters of the seeds before it."""
        self._training.clear()
        self.model.tick()
        self.groups.sync()
        self.groups.follow(tensors=True)
        if self._governor:
            self._governor.save_good_state()
        decision = Decision(
            index=self._next_index,
            actions=tuple(Action.decode(row, self.model.slot_names, self.model.blueprint_names) for row in rows),
            changes=stage_changes(self.model, before, sizes),
            early=self._early,
            evaluations=self._meter.evaluations,
            **figures,
            **self._metrics_by_name(numbers),
        )
        self.decisions.append(decision)
        self._previous_action = rows[-1][None].copy()
        self._next_index += 1
        self._usage.optimizer_steps = 0
        return decision

    def _metrics_by_name(self, numbers: dict[str, float]) -> dict[str, Any]:
        """The fields of a decision that follow from all metrics, and the size of the network."""
        return {"metrics": numbers, "metric": self._metric.name_in(numbers), "parameters": count_parameters(self.model)}

    @property
    def _planned(self) -> int:
        """Number of decisions that are planned; 0 if it is not known."""
        return self.horizon + self._early if self.horizon else 0

    def _announce(self, decision: Decision) -> None:
        """Tell users about a decision when everything is in place."""
        self._announcer.tell_decision(decision)
        try:
            if decision.verdict != Verdict.OK:
                still_broken = self.evaluate is not None and bool(self._metric.broken(self._validate({})))
                self._announcer.report_rollback(decision, still_broken=still_broken)
        finally:
            self._announcer.call_hooks(decision)

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.groups.follow()
        self._usage.count_optimizer_step(self._next_index)
        if self._governor:
            self._governor.before_optimizer_step()
        return observe_gradients(self._training.observe, args, kwargs)

    def history(self) -> GrowthHistory:
        """What happened so far, earlier runs included if this one was resumed.

        Returns:
            One row per host epoch, as dictionaries: print it, or pass it to `pandas.DataFrame`.
        """
        return GrowthHistory(self.decisions)

    def plot(self) -> Figure:
        """Draw metric, stages and parameters over host epochs.

        Returns:
            A matplotlib figure; `growth.plot().savefig("growth.png")` writes it.

        Raises:
            ImportError: matplotlib is missing (extra `report`).
            ValueError: No decision was taken yet.
        """
        return plot_growth(self.decisions, {report.slot: report.stage for report in self.model.growth()})

    def register_hook(self, kind: str, hook: Hook) -> RemovableHandle:
        """Have a function called when a seed is germinated, fossilized or pruned.

        It runs at the end of the step. If it raises, so does the step, but the decision is made and recorded.

        Args:
            kind: "germinate", "fossilize" or "prune".
            hook: A function of one `GrowthEvent`.

        Returns:
            A handle; its `remove()` ends the calls.

        Raises:
            ValueError: There is no such kind.
            TypeError: `hook` is not a function.
        """
        return self._announcer.register(kind, hook)

    def __repr__(self) -> str:
        planned = f" of {self._planned}" if self.horizon else ""
        return describe_scheduler(
            self.model,
            controller=type(self.controller).__name__,
            metric=repr(self._metric),
            decisions=f"{self._next_index}{planned}",
            cost=self._meter.cost(),
            last=str(self.decisions[-1]) if self.decisions else "no decision yet",
        )

    def facts(self) -> Facts:
        """What the controller would see at present.

        Returns:
            The observation, of this one host; see `Facts`.
        """
        return model_facts(
            self.model,
            self._history,
            decision=np.array([self._next_index]),
            horizon=np.array([self._planned]),
            previous_action=self._previous_action,
            metric_scale=self._metric.scale_of(self._history["val_loss"]),
            awaits_contribution=self._meter.awaited(),
            **self._training.facts(self._meter.metric_error, self.train_samples),
        )

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state; model, optimizer and learning-rate schedulers have theirs.

        Returns:
            Numbers, lists, dictionaries and tensors, for `torch.save`. `save` writes everything into one file instead.
        """
        return {
            "version": VERSION,
            "slots": list(self.model.slot_names),
            "next_index": self._next_index,
            "previous_action": self._previous_action.tolist(),
            "history": {name: list(values) for name, values in self._history.items()},
            "metric": self._metric.state_dict(),
            "contribution_errors": {slot: list(pair) for slot, pair in self.model.contribution_errors.items()},
            "decisions": [encode_decision(decision) for decision in self.decisions],
            "seed_groups": self.groups.seed_order(),
            "seed_numbers": self.groups.seed_numbers(),
            "controller": type(self.controller).__name__,
            "controller_state": self.controller.state_dict() if isinstance(self.controller, Stateful) else {},
            "optimizer_steps": self._usage.optimizer_steps,
            "gradients": self._training.state_dict(),
            "governor": self._governor.state_dict() if self._governor else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Load the model first, then this, then the optimizer.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state belongs to other slots, another controller or metric, or the model holds other seeds.
        """
        state = upgrade(state)
        check_state(state, self.controller, self._metric, self.model.slot_names)
        slots = state["seed_groups"]
        planted = self._early and self._next_index == 1 and self.model.grown_slots  # by this constructor
        if planted and not slots:
            self.model.set_seeds({}, *self._unplanted)
        check_seeds(slots, self.model.grown_slots)
        self.groups.rebuild(slots, state.get("seed_numbers", [0] * len(slots)))
        if self._governor:
            self._governor.load_state_dict(state.get("governor"))
        self._usage.optimizer_steps = state.get("optimizer_steps")
        self._training.load_state_dict(state.get("gradients"))
        self._next_index, self._previous_action = state["next_index"], np.array(state["previous_action"])
        self._history = {name: list(values) for name, values in state["history"].items()}
        self._metric.load_state_dict(state["metric"])
        self.model.contribution_errors = {k: tuple(v) for k, v in state.get("contribution_errors", {}).items()}
        self.decisions = read_decisions(state)
        self._early = any(decision.early for decision in self.decisions)
        if isinstance(self.controller, Stateful):
            self.controller.load_state_dict(state["controller_state"])
        self._announcer.go_back(self._next_index)

    def save(self, path: str | Path) -> None:
        """Write model, optimizer, learning-rate schedulers and growth to one safetensors file.

        Args:
            path: The file, which is replaced if it exists. `load` reads it, and so does `simic.load` without optimizer.
        """
        self.groups.sync()
        save_growth(path, self.model, self.optimizer, self.lr_schedulers, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote, into a model, optimizer and scheduler that were built in the same way.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged or does not fit; nothing changes.
        """
        tree = read_growth(path, self.optimizer, self.lr_schedulers)
        check_state(upgrade(tree["growth"]), self.controller, self._metric, self.model.slot_names)
        self.model.load_state_dict(tree["model"])
        self.load_state_dict(tree["growth"])
        self.optimizer.load_state_dict(tree["optimizer"])
        for scheduler, state in zip(self.lr_schedulers, tree["lr_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.groups.sync()

    def _validate(self, given: dict[str, Any]) -> dict[str, float]:
        """The validation metrics given or, without any, those of `evaluate`; they may not be finite."""
        if given:
            numbers = self._ranks.mean("in the metrics given", lambda: self._metric.read(given, "step must get"))
        elif self.evaluate is not None:
            numbers = self._meter.validate()
        else:
            raise ValueError(f"step needs {self._metric.keywords}, or a scheduler built with evaluate=...")
        if self._metric.observe(numbers):  # so far it was shown as an accuracy
            self._history = self._metric.restate(self._history)
        return numbers
