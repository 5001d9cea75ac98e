"""GrowthCallback: a network that grows in Lightning's Trainer.

    trainer = Trainer(callbacks=[GrowthCallback(slots=["block1", "block2"])], max_epochs=50)

Between a validation and the next training batch the callback makes one decision, so that a checkpoint written at the
end of a validation holds the very network that was validated:

    training ... validation   checkpoints, early stopping   decision   training ...
                 val_loss                                   (first batch)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
except ImportError as error:
    raise ImportError(
        "simic.integrations.lightning needs lightning >= 2.6.6: pip install 'simic-rl[lightning]'"
    ) from error

from simic.control.baselines import Controller
from simic.control.registry import DEFAULT_CONTROLLER
from simic.growth.data_parallel import link_ddp
from simic.growth.example import ExampleInput
from simic.growth.model import GrowableModel
from simic.growth.state_dict import GROWTH_KEY
from simic.integrations.lightning_validation import read_metrics, run_validation
from simic.integrations.lightning_wrapping import (
    check_slots,
    choose_part,
    describe_build,
    find_example,
    find_growable,
    rebuild,
    wrap_part,
)
from simic.integrations.settings import dataset_size, split_settings
from simic.lifecycle.stages import LIVE, Stage
from simic.scheduler.scheduler import Decision, GrowthScheduler
from simic.scheduler.validation import check_metric

VERSION = 1
Module = TypeVar("Module", bound=LightningModule)


class GrowthCallback(Callback):
    """Grows a submodule of the LightningModule: one decision after every validation.

    After the start, `model` is the GrowableModel and `growth` its GrowthScheduler, with the decisions of this run.

    Args:
        slots, controller, rng_seed: As for `GrowableModel` and `GrowthScheduler`.
        module: The name of the submodule. Without it, it is the GrowableModel that the LightningModule holds, or else
            its only submodule with parameters, which is wrapped when a run starts.
        example_input: By default the module's `example_input_array`, or found by a step on the first batch.
        monitor: The logged value by which seeds are judged, any metric.
        mode: "min", or "max", which is the default of "val_accuracy".
        max_batches: To measure a seed's contribution, the validation is run again without it, on at most so many
            batches of every dataloader.
        optimizer: Where several optimizers train the submodule, the index of the one that trains seeds too.
        horizon: Follows from the trainer's limits by default.
        log: Log the number of parameters, seeds by stage, and alpha and contribution of every seed as growth/....
        log_directory: The `log` of GrowthScheduler: a run that `simic watch` shows.
        settings: Passed on: `lifecycle` to `GrowableModel`, `governor` to `GrowthScheduler`, and every further keyword
            to the one that has it.

    Raises:
        ValueError, TypeError: A setting is out of range or belongs to neither.

    Example:
        >>> from simic.integrations.lightning import GrowthCallback
        >>> callback = GrowthCallback(slots="linear", monitor="val_accuracy")  # lightning.Trainer(callbacks=[callback])
    """

    def __init__(
        self,
        slots: Any = None,
        controller: str | Controller = DEFAULT_CONTROLLER,
        *,
        module: str | None = None,
        example_input: ExampleInput | None = None,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] | None = None,
        max_batches: int | None = None,
        optimizer: int | None = None,
        horizon: int | None = None,
        rng_seed: int = 0,
        log: bool = True,
        log_directory: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(log, bool):
            raise TypeError(f"log is True or False, got {log!r}; a directory for simic watch is log_directory")
        mode = mode or ("max" if monitor == "val_accuracy" else "min")
        check_metric(monitor, mode)
        if max_batches is not None and max_batches < 1:
            raise ValueError(f"max_batches must be at least 1, or None for all, got {max_batches}")
        self.slots, self.controller, self.module, self.example_input = slots, controller, module, example_input
        self.monitor, self.mode, self.max_batches = monitor, mode, max_batches
        self._is_loss = mode == "min" and "loss" in monitor.lower()
        self.optimizer, self.horizon, self.log_growth = optimizer, horizon, log
        self._model_settings, self._scheduler_settings = split_settings(
            "GrowthCallback", settings | {"rng_seed": rng_seed, "log": log_directory}
        )
        self._name = ""  # of the growing submodule
        self._model: GrowableModel | None = None
        self._growth: GrowthScheduler | None = None
        self._loaded: dict[str, Any] | None = None  # state of the scheduler from a checkpoint
        self._pending: dict[str, float] | None = None  # what the last validation logged, until it is decided on
        self._measured: dict[str, float] | None = None  # the same during a decision, until it is used

    @property
    def model(self) -> GrowableModel:
        """The growing submodule."""
        if self._model is None:
            raise RuntimeError("the callback has no model yet: it is found or wrapped when the trainer starts")
        return self._model

    @property
    def growth(self) -> GrowthScheduler:
        """The scheduler of the present or last fit."""
        if self._growth is None:
            raise RuntimeError("the callback has no GrowthScheduler yet: it is built when trainer.fit starts")
        return self._growth

    @property
    def state_key(self) -> str:
        return self._generate_state_key(module=self.module)

    # Building.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the submodule, before weights are loaded and optimizers built."""
        if not isinstance(trainer, Trainer):
            raise TypeError("GrowthCallback is for lightning.pytorch; use its Trainer, not pytorch_lightning's")
        _refuse_impossible(trainer, wrapped=find_growable(pl_module, self.module) is not None)
        self._attach(pl_module, trainer)

    def _attach(self, pl_module: LightningModule, trainer: Trainer | None) -> None:
        found = find_growable(pl_module, self.module)
        if found is None:
            name = choose_part(pl_module, self.module)
            example = self.example_input
            if example is None:
                assert trainer is not None
                example = find_example(trainer, pl_module, name)
            slots = "auto" if self.slots is None else self.slots
            model = wrap_part(pl_module, name, slots, example, self._model_settings)
        else:
            name, model = found
            if model is not self._model:
                check_slots(model, self.slots)
        if model is not self._model:
            self._name, self._model = name, model
            self._growth = self._loaded = self._pending = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the scheduler, once optimizers exist and before their state is loaded."""
        if not trainer.enable_validation:
            raise ValueError(
                "GrowthCallback decides after every validation, but this trainer runs none: give it validation data "
                "and a validation_step that logs what monitor names"
            )
        if isinstance(trainer.model, DistributedDataParallel):
            link_ddp(self.model, trainer.model)
        state = self._loaded or self._earlier_state()
        optimizer = self._choose_optimizer(trainer.optimizers)
        self._growth = GrowthScheduler(
            self.model,
            optimizer,
            self.controller,
            _lr_schedulers(trainer, optimizer),
            evaluate=lambda: self._evaluate(trainer),
            metric="val_loss" if self._is_loss else self.monitor,
            mode=self.mode,
            horizon=self.horizon or 0,
            **self._scheduler_settings,
        )
        if state is not None:
            self._growth.load_state_dict(state)
        self._loaded = None

    def _earlier_state(self) -> dict[str, Any] | None:
        """The state of the last fit, to continue from, unless other weights were loaded into the model since."""
        state = self._growth.state_dict() if self._growth is not None else None
        return state if state is not None and set(state["seed_groups"]) == set(self.model.grown_slots) else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan for as many decisions as validations are expected, and count the samples: now the data are loaded."""
        if self.horizon is None:
            self.growth.horizon = count_validations(trainer)
        if "train_samples" not in self._scheduler_settings:
            self.growth.train_samples = count_samples(trainer)

    def _choose_optimizer(self, optimizers: Sequence[Optimizer]) -> Optimizer:
        own = set(self.model.parameters())
        holding = [
            index
            for index, optimizer in enumerate(optimizers)
            if any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
        ]
        if self.optimizer is not None:
            if self.optimizer not in holding:
                raise ValueError(
                    f"optimizer={self.optimizer} does not train the growing submodule; those that do: {holding}"
                )
            return optimizers[self.optimizer]
        if len(holding) != 1:
            raise ValueError(
                f"{len(holding)} of {len(optimizers)} optimizers train the growing submodule, {holding}: "
                + ("say which one trains seeds too with GrowthCallback(optimizer=index)" if holding else "one has to")
            )
        return optimizers[holding[0]]

    # Deciding.

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that a decision is due; checkpoints of this validation are written before it is made."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.growth.idle:
            self._pending = self._read(read_metrics(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make the decision that is due."""
        if self._pending is not None:
            self._decide()

    def _decide(self) -> Decision:
        # The validation that Lightning ran need not be repeated, unless contributions are measured on fewer batches.
        self._measured = self._pending if self.max_batches is None else None
        try:
            decision = self.growth.step()
        finally:
            self._measured = None
        self._pending = None
        return decision

    def _evaluate(self, trainer: Trainer) -> dict[str, float]:
        if self._measured is not None:
            measured, self._measured = self._measured, None
            return measured
        return self._read(run_validation(trainer, self.max_batches))

    def _read(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Logged values as the scheduler takes them."""
        if self.monitor not in logged:
            names = ", ".join(sorted(name for name in logged if not name.startswith("growth/"))) or "nothing"
            raise ValueError(
                f"GrowthCallback judges seeds by {self.monitor!r}, but the validation logged {names}: log it with "
                f"self.log({self.monitor!r}, ...) in validation_step, or name another one with monitor=..."
            )
        if self._is_loss:  # of whatever name, so that contributions are differences of losses
            return {"val_loss": logged[self.monitor]}
        return {name: logged[name] for name in (self.monitor, "val_loss") if name in logged}

    # Logging.

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the growth of the network that was validated."""
        if self.log_growth:
            pl_module.log_dict(growth_metrics(self.model), sync_dist=trainer.world_size > 1)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "build": describe_build(self._name, self.model, self.slots, self._model_settings),
            "growth": self._loaded or (self._growth.state_dict() if self._growth else None),
            "pending": self._pending,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["version"] != VERSION:
            found = state_dict["version"]
            raise ValueError(f"the checkpoint's GrowthCallback has format version {found}, this simic reads {VERSION}")
        self._loaded, self._pending = state_dict["growth"], state_dict["pending"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that holds seeds, but no state of this callback."""
        known = checkpoint.get("callbacks", {})
        if trainer.state.fn == "fit" and self.model.grown_slots and self.state_key not in known:
            others = [key for key in known if key.startswith("GrowthCallback")]
            raise ValueError(
                f"the checkpoint holds seeds in slots {', '.join(self.model.grown_slots)}, but no state of "
                f"{self.state_key}{f', only of {others[0]}' if others else ''}: use the same module=... as then"
            )


def growth_metrics(model: GrowableModel) -> dict[str, float]:
    """Size of a network, seeds by stage, and alpha and contribution of every seed, by the names they are logged by."""
    reports = [report for report in model.growth() if report.blueprint is not None]
    metrics = {"growth/parameters": float(sum(parameter.numel() for parameter in model.parameters()))}
    for stage in (*LIVE, Stage.FOSSILIZED):
        metrics[f"growth/{stage}"] = float(sum(report.stage == stage for report in reports))
    for report in reports:
        metrics[f"growth/alpha/{report.slot}"] = report.alpha
        if report.contribution == report.contribution:  # measured
            metrics[f"growth/contribution/{report.slot}"] = report.contribution
    return metrics


def count_validations(trainer: Trainer) -> int:
    """Validations until the trainer's limits are reached; 0 if that is not known."""
    batches, every = trainer.num_training_batches, trainer.val_check_batch
    if not isinstance(every, int) or batches == float("inf"):
        return 0
    limits, epochs = [], trainer.max_epochs if trainer.max_epochs is not None else -1
    per_epoch = batches // every
    if epochs >= 0:
        period = trainer.check_val_every_n_epoch
        limits.append(epochs * batches // every if period is None else epochs // period * per_epoch)
    if trainer.max_steps >= 0:
        steps_per_epoch = -(-batches // trainer.accumulate_grad_batches)
        limits.append(trainer.max_steps * batches // (steps_per_epoch * every))
    return int(min(limits, default=0))


def count_samples(trainer: Trainer) -> int | None:
    """Samples that an epoch trains on, over all processes; None if that is not known, as with several dataloaders."""
    loader, batches = trainer.train_dataloader, trainer.num_training_batches
    size, batch_size = dataset_size(getattr(loader, "dataset", None)), getattr(loader, "batch_size", None)
    if size is None or batch_size is None or batches == float("inf"):
        return size
    return min(size, int(batches) * batch_size * trainer.world_size)


def load_from_checkpoint(
    module_class: type[Module], path: str | Path, *, callback: GrowthCallback | None = None, **kwargs: Any
) -> Module:
    """As `module_class.load_from_checkpoint(path, **kwargs)`, for a module whose network the callback has wrapped.

    The checkpoint says how it was wrapped, unless it holds weights only: then give a `callback` like that of the
    training, with its `example_input`.
    """

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        _wrap_as_saved(self, checkpoint, callback)
        module_class.on_load_checkpoint(self, checkpoint)

    # Lightning builds the object and loads its weights in one call; this hook is the only place in between.
    loader: Any = type(module_class.__name__, (module_class,), {"on_load_checkpoint": on_load_checkpoint})
    module = loader.load_from_checkpoint(path, **kwargs)
    module.__class__ = module_class
    return module


def _wrap_as_saved(module: LightningModule, checkpoint: dict[str, Any], callback: GrowthCallback | None) -> None:
    """Wrap the submodules that were wrapped when the checkpoint was written."""
    if callback is not None:
        if callback.example_input is None and find_growable(module, callback.module) is None:
            raise ValueError("the callback needs example_input=... to wrap a module without a trainer")
        callback._attach(module, None)
        return
    states = [state for key, state in checkpoint.get("callbacks", {}).items() if key.startswith("GrowthCallback")]
    for state in states:
        rebuild(module, state["build"])
    grown = [name for name in checkpoint["state_dict"] if name.rpartition(".")[2] == GROWTH_KEY]
    if grown and not states and find_growable(module, None) is None:
        raise ValueError(
            f"the checkpoint holds {grown[0]}, but not how the network was wrapped, as is the case if it was saved "
            "with weights only: pass callback=GrowthCallback(slots=..., example_input=...) as in the training"
        )


def _refuse_impossible(trainer: Trainer, *, wrapped: bool) -> None:
    """Raise where seeds would be lost or mixed up; `wrapped` if the module holds a GrowableModel already."""
    strategy = trainer.strategy
    if strategy.restore_checkpoint_after_setup:
        name = type(strategy).__name__
        raise ValueError(f"{name} shards or converts parameters before seeds exist; use one device or DDP")
    if isinstance(strategy.launcher, _MultiProcessingLauncher) and not wrapped:
        raise ValueError(
            "this strategy trains in processes that it starts itself, and afterwards loads their weights into a "
            'module without seeds: use strategy="ddp", or let the module build its GrowableModel in __init__'
        )
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and trainer.state.fn == "fit":
            raise ValueError(
                f"{type(callback).__name__} averages into a copy of the network, whose parameters no longer match once "
                "it grows: average in a later run, without GrowthCallback, of a module that holds its export()"
            )


def _lr_schedulers(trainer: Trainer, optimizer: Optimizer) -> list[LRScheduler]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [each for each in schedulers if isinstance(each, LRScheduler) and each.optimizer is optimizer]
