"""Growth inside transformers' Trainer: `attach(trainer, slots=...)`, then `trainer.train()` as always.

Trainer keeps its model, a PreTrainedModel: seeds grow in place (`growth/in_place.py`), so that its signature, tied
weights, `generate` and `save_pretrained` stay what they are. What happens when:

    evaluation                 Trainer's own; its metrics are noted
    checkpoint                 weights with the growth record; the optimizer's file also holds the state of growth
    begin of the next step     one decision: contributions are measured, the controller acts, the optimizer follows

The decision comes after the checkpoint, so a checkpoint holds the very network whose metrics Trainer has logged, and
`load_best_model_at_end` returns it. The last evaluation of a training is followed by no decision.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from simic.control.baselines import Controller
from simic.control.registry import DEFAULT_CONTROLLER, make_controller
from simic.growth.data_parallel import link_ddp
from simic.growth.example import ExampleInput
from simic.growth.export import LiveSeeds
from simic.growth.in_place import grow_in_place
from simic.growth.model import GrowableModel
from simic.growth.slot_patterns import Slots
from simic.integrations.settings import dataset_size, split_settings
from simic.integrations.transformers_checks import check_trainer, example_of
from simic.integrations.transformers_evaluation import TrainerEvaluation
from simic.scheduler.scheduler import Decision, GrowthScheduler

_LOG = logging.getLogger("simic")
_STATE = "growth"
"""Key of the state of growth in the optimizer's state dict."""


def attach(
    trainer: Trainer,
    slots: Slots = "auto",
    controller: str | Controller = DEFAULT_CONTROLLER,
    *,
    example_input: ExampleInput | None = None,
    rng_seed: int | None = None,
    horizon: int | None = None,
    max_eval_samples: int | None = None,
    **settings: Any,
) -> TrainerGrowth:
    """Let the model of a transformers Trainer grow while it trains: one decision after every evaluation.

    Call it after the Trainer is built and before `train`, `evaluate` or a load; a script that resumes calls it the same
    way. Contributions are measured on the evaluation dataset by `metric_for_best_model` (by default the loss; any
    metric that `greater_is_better` describes), which costs one evaluation per live seed and decision.

    Args:
        trainer: The Trainer.
        slots: As for `GrowableModel`.
        controller: As for `GrowthScheduler`.
        example_input: By default two training samples.
        rng_seed: By default that of the training arguments.
        horizon: By default the number of planned evaluations.
        max_eval_samples: Measure contributions on at most so many samples.
        settings: `lifecycle`, `freeze_host`, `max_growth`, `governor`, `verbose` and so on are passed on to the one of
            `GrowableModel` and `GrowthScheduler` that has it.

    Returns:
        An object with `model` (print_growth), `scheduler` and `export`.

    Raises:
        ValueError: The Trainer cannot grow its model, for instance under FSDP or DeepSpeed; the error says why.

    Example::

        trainer = transformers.Trainer(model, args, train_dataset=train, eval_dataset=val)
        growth = attach(trainer, slots="auto", max_growth=2.0)
        trainer.train()
    """
    check_trainer(trainer)
    rng_seed = trainer.args.seed if rng_seed is None else rng_seed
    if isinstance(controller, str):
        make_controller(controller, rng_seed)  # now rather than when the training begins, if there is none of this name
    of_model, of_scheduler = split_settings("attach", settings | {"rng_seed": rng_seed})
    example = example_of(trainer) if example_input is None else example_input
    make_growable = partial(grow_in_place, slots=slots, example_input=example, **of_model)
    of_scheduler.setdefault("train_samples", dataset_size(trainer.train_dataset))
    make_scheduler = partial(GrowthScheduler, controller=controller, **of_scheduler)
    return TrainerGrowth(trainer, make_growable, make_scheduler, TrainerEvaluation(trainer, max_eval_samples), horizon)


class TrainerGrowth:
    """The growth of a Trainer's model, as `attach` returns it."""

    def __init__(
        self,
        trainer: Trainer,
        make_growable: Callable[[nn.Module], GrowableModel],
        make_scheduler: Callable[..., GrowthScheduler],
        evaluation: TrainerEvaluation,
        horizon: int | None,
    ) -> None:
        self._trainer: Any = trainer
        self._make_growable, self._make_scheduler = make_growable, make_scheduler
        self._evaluation, self._horizon = evaluation, horizon
        self.model = make_growable(self._trainer.model)
        """Manages the seeds: `growth()`, `print_growth()`, `slot_names`; its host is Trainer's model."""
        self.scheduler: GrowthScheduler | None = None
        """Takes the decisions; None until `train` has built the optimizer."""
        self._metrics: dict[str, float] | None = None  # of an evaluation that no decision has followed yet
        self._decided_at = 0  # the global step of the last decision
        self._wrap_methods()
        trainer.add_callback(_GrowthCallback(self))

    def export(self, *, live: LiveSeeds = "drop", merge: bool = False) -> nn.Module:
        """A plain copy of Trainer's model, in evaluation mode and without simic: `GrowableModel.export`.

        If nothing has grown, or all of it was folded into weights by `merge`, `save_pretrained` and `from_pretrained`
        work as always. Another grown one is more than its config class builds: keep it with `torch.save(model, path)`;
        its `save_pretrained` refuses to lose what grew.
        """
        with _plain_forward(self._trainer.model):
            plain: Any = self.model.export(live=live, merge=merge)
        if plain.is_gradient_checkpointing:
            plain.gradient_checkpointing_disable()
            plain.disable_input_require_grads()  # by a hook that cannot be saved
        return plain

    def load(self, folder: str | Path) -> None:
        """Load weights that `trainer.save_model` or a checkpoint has written, with their seeds; training may go on."""
        path = Path(folder) / "model.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: name a folder that save_model or a checkpoint has written")
        self._trainer.model.load_state_dict(load_file(path), strict=False)

    # What Trainer calls.

    def link_model(self) -> None:
        """Called when a training begins: if Trainer has wrapped the model in DDP, seeds stay out of its buckets."""
        if isinstance(self._trainer.model_wrapped, DistributedDataParallel):
            link_ddp(self.model, self._trainer.model_wrapped)

    def note_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Called after every evaluation, and for each of several datasets; the next step begins with a decision."""
        several = isinstance(self._trainer.eval_dataset, dict)
        if not self._trainer.is_in_train or (several and self._evaluation.metric not in metrics):
            return
        self._metrics = self._evaluation.needed(metrics)

    def decide(self) -> None:
        """Called when a step begins: take the decision that is due."""
        metrics, self._metrics = self._metrics, None
        if metrics is None or self.scheduler is None or self.scheduler.idle:  # idle: evaluated before the first step
            return
        self._evaluation.known = metrics
        state = self._trainer.state
        losses = [log["loss"] for log in state.log_history if "loss" in log and log["step"] > self._decided_at]
        try:
            decision = self.scheduler.step(train_loss=sum(losses) / len(losses) if losses else None)
        finally:
            self._evaluation.known = None
        self._decided_at = state.global_step
        self._trainer.log(self._logs(decision))

    def _logs(self, decision: Decision) -> dict[str, float]:
        state = self.model.slot_state
        live = int(state.live.sum())
        return {
            "growth_decision": decision.index,
            "growth_live_seeds": live,
            "growth_fossils": int(state.occupied.sum()) - live,
            "growth_parameters": sum(report.parameters for report in self.model.growth()),
        }

    def _wrap_methods(self) -> None:
        """Take part in three methods of Trainer that come where no callback does."""
        trainer = self._trainer
        create_scheduler, call_model_init, compute_loss = (
            trainer.create_scheduler,
            trainer.call_model_init,
            trainer.compute_loss,
        )

        def create_and_begin(num_training_steps: int, optimizer: Any = None) -> Any:
            # The optimizer exists, its saved state comes next: the groups of seeds must be there in between.
            lr_scheduler = create_scheduler(num_training_steps, optimizer)
            self._begin(_inner(trainer.optimizer if optimizer is None else optimizer), lr_scheduler)
            return lr_scheduler

        def init_and_grow(trial: Any = None) -> nn.Module:
            self.model = self._make_growable(call_model_init(trial))
            return self.model.host

        def loss_with_seeds(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if return_outputs:  # an evaluation
                return compute_loss(model, inputs, return_outputs=True, **kwargs)
            return self.model.loss(lambda: compute_loss(model, dict(inputs), **kwargs))

        trainer.create_scheduler, trainer.call_model_init = create_and_begin, init_and_grow
        if self.model.lifecycle.incubation == "shadow":
            trainer.compute_loss = loss_with_seeds

    def _begin(self, optimizer: Optimizer, lr_scheduler: Any) -> None:
        """A training begins, or goes on with the optimizer of the last."""
        self._metrics = None
        planned = _planned_evaluations(self._trainer) if self._horizon is None else self._horizon
        scheduler = self.scheduler
        if scheduler is None or scheduler.optimizer is not optimizer or scheduler.model is not self.model:
            self._decided_at = 0
            self.scheduler = self._make_scheduler(
                self.model,
                optimizer,
                lr_schedulers=[lr_scheduler],
                evaluate=self._evaluation,
                horizon=planned,
                **self._evaluation.counted,
            )
            optimizer.register_state_dict_post_hook(self._publish)
            optimizer.register_load_state_dict_pre_hook(self._restore)
            return
        self._decided_at = 0
        scheduler.lr_schedulers = scheduler.groups.lr_schedulers = (lr_scheduler,)
        scheduler.groups.sync()
        scheduler.horizon += planned

    def _publish(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Optimizer hook: save the state of growth with the optimizer's."""
        if self.scheduler is not None and self.scheduler.optimizer is optimizer:
            state_dict[_STATE] = {
                "scheduler": self.scheduler.state_dict(),
                "metrics": self._metrics,
                "decided_at": self._decided_at,
            }

    def _restore(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Optimizer hook: load the state of growth before the optimizer's, whose groups follow it."""
        state = state_dict.get(_STATE)
        if self.scheduler is None or self.scheduler.optimizer is not optimizer:
            return
        if state is None:
            _LOG.warning("the checkpoint was written without simic: growth begins with it")
            return
        self.scheduler.load_state_dict(state["scheduler"])
        self._metrics, self._decided_at = state["metrics"], state["decided_at"]


class _GrowthCallback(TrainerCallback):
    """Tells growth when Trainer evaluates and steps."""

    def __init__(self, growth: TrainerGrowth) -> None:
        self._growth = growth

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._growth.link_model()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._growth.note_evaluation(kwargs["metrics"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._growth.decide()


def last_complete_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint in an output folder that was written to its end, or None: for `resume_from_checkpoint`.

    A process that is killed while it saves leaves a checkpoint behind that Trainer cannot load.
    """
    paths = {int(path.name.rpartition("-")[2]): path for path in Path(folder).glob("checkpoint-[0-9]*")}
    for _, path in sorted(paths.items(), reverse=True):
        try:  # the last file that Trainer writes
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def _inner(optimizer: Any) -> Optimizer:
    """The optimizer inside accelerate's wrapper, whose `step` runs no hooks."""
    return getattr(optimizer, "optimizer", optimizer)


def _planned_evaluations(trainer: Any) -> int:
    """How often Trainer will evaluate in the training that begins."""
    args, state = trainer.args, trainer.state
    if args.eval_strategy == "steps" and state.eval_steps:
        return math.ceil(state.max_steps / state.eval_steps)
    return int(state.num_train_epochs)


@contextmanager
def _plain_forward(model: nn.Module) -> Any:
    """A model without what accelerate puts around its `forward` for mixed precision, which a copy would keep."""
    names = ("forward", "_original_forward")
    wrapped = {name: vars(model).pop(name) for name in names if name in vars(model)}
    try:
        yield
    finally:
        vars(model).update(wrapped)
