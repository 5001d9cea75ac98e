"""The governor of one model: detects that training broke it and restores its last good state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from simic.control.governor import Governor, GovernorConfig, Verdict
from simic.growth.model import GrowableModel
from simic.scheduler.model_snapshot import ModelSnapshot


class ModelGovernor:
    """Judges one model by the rules for N hosts, and keeps a snapshot of its last good state.

    Those rules compare losses with that of a random guess, which is not known here: the validation loss at the first
    decision is used instead or, if only accuracies are given, the error rate. Collapse and divergence need two metrics
    that agree, or overfitting would count as collapse: validation loss and training loss (if `step` gets one) or error
    rate. With a validation loss alone only values that are not finite count.
    """

    def __init__(self, model: GrowableModel, optimizer: Optimizer, config: GovernorConfig | None = None) -> None:
        self._model = model
        self._judge = Governor(1, config)
        self._snapshot = ModelSnapshot(model, optimizer)
        self._snapshot.save()
        self._snapshot_current = True  # nothing was trained since the snapshot
        self._trained = False  # an optimizer step was made since construction or loading
        self._loaded = False  # a state was loaded
        self._first: dict[str, float] = {}
        """The first value of each metric, the scale of its later values."""
        self._alpha = model.slot_state.alpha.copy()  # when metrics were last judged

    @property
    def has_reference(self) -> bool:
        """Whether a finite loss was ever seen."""
        return bool(self._first)

    def before_optimizer_step(self) -> None:
        """Before the first step, save again: weights or optimizer may have been loaded after construction.

        Buffers have seen a batch by then. They are left out if it was a bad one, or if a run is resumed, whose buffers
        must not contain a batch more.
        """
        if not self._trained:
            buffers = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
            self._snapshot.save(buffers=not self._loaded and _all_finite(buffers))
        self._trained, self._snapshot_current = True, False

    def weights_finite(self) -> bool:
        """Whether host and fossils are free of NaN and infinity. A live seed that breaks can simply be removed."""
        seeds = [self._model.seed(index) for index in np.flatnonzero(self._model.slot_state.live[0]).tolist()]
        live = {parameter for seed in seeds if seed is not None for parameter in seed.parameters()}
        return _all_finite([parameter for parameter in self._model.parameters() if parameter not in live])

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """Judge the model by "val_loss", "val_accuracy" and "train_loss", as far as they are given."""
        if (self._model.slot_state.alpha < self._alpha).any():
            # A seed that is blended out may make the model much worse, on purpose.
            self._judge.reset(np.array([0]))
        self._alpha = self._model.slot_state.alpha.copy()
        if not math.isfinite(metrics.get("val_loss", 0.0)):
            return Verdict.NOT_FINITE
        pair = self._relative_losses(metrics)
        if pair is None:
            return Verdict.OK
        return Verdict(int(self._judge.judge(np.array(pair[:1]), np.array(pair[1:]), np.ones(1))[0]))

    def save_good_state(self) -> None:
        """After a decision: take the present state as the last good one, unless the model is under suspicion."""
        if self._judge.trusted[0]:
            self._snapshot.save()
            self._trained = self._snapshot_current = True

    def restore(self) -> None:
        """Remove live seeds, restore the last good state, and forget the history of metrics."""
        self._model.remove_live_seeds()
        self._snapshot.restore()
        self._judge.reset(np.array([0]))
        self._alpha, self._snapshot_current = self._model.slot_state.alpha.copy(), True

    def history(self) -> dict[str, Any]:
        """The history of metrics as JSON values, without the last good state."""
        return {
            "judge": {name: values.tolist() for name, values in self._judge.state_dict().items()},
            "first": dict(self._first),
            "alpha": self._alpha.tolist(),
        }

    def set_history(self, history: dict[str, Any]) -> None:
        """Set what `history` returned."""
        self._judge.load_state_dict({name: np.array(values) for name, values in history["judge"].items()})
        self._first = dict(history["first"])
        self._alpha = np.array(history["alpha"])

    def state_dict(self) -> dict[str, Any]:
        """The history, and the last good state if it differs from the present one."""
        return self.history() | {"snapshot": None if self._snapshot_current else self._snapshot.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `state_dict`; None, from a run without a governor, takes the present state as good."""
        saved = state["snapshot"] if state is not None else None
        if saved is None:
            self._snapshot.save()
        else:
            self._snapshot.load_state_dict(saved)
        if state is not None:
            self.set_history(state)
        self._snapshot_current, self._trained, self._loaded = saved is None, saved is not None, True

    def _relative_losses(self, metrics: Mapping[str, float]) -> tuple[float, float] | None:
        """Two losses that must both look broken, relative to the first ones seen; None if they are not given."""
        given = {
            name: metrics[name] for name in ("val_loss", "train_loss") if math.isfinite(metrics.get(name, math.nan))
        }
        if "val_accuracy" in metrics:
            given["error"] = 1 - metrics["val_accuracy"]
        for name, value in given.items():
            self._first.setdefault(name, value)
        main = "val_loss" if "val_loss" in given else "error"
        second = "train_loss" if "train_loss" in given else "error"
        if second not in given or min(self._first[main], self._first[second]) <= 0:
            return None
        # Both losses are relative to the first validation loss; an error rate is relative to its own first value.
        scale = self._first[main if second == "train_loss" and main == "val_loss" else second]
        return given[main] / self._first[main], given[second] / scale


def judge(governor: ModelGovernor | None, metrics: Mapping[str, float]) -> Verdict:
    """The verdict on a decision's metrics, see `CountedMetric.judged`; OK without a governor."""
    if governor is None:
        return Verdict.OK
    if not math.isfinite(metrics.get("val_accuracy", 0.0)):
        return Verdict.OK  # not a fault of the weights; `CountedMetric.figures` raises
    verdict = governor.judge(metrics)
    # A loss that was never finite may as well be a fault of the evaluation.
    return verdict if governor.has_reference else Verdict.OK


def _all_finite(tensors: list[Tensor]) -> bool:
    if not tensors:
        return True
    with torch.no_grad():  # maximum norms, because sums of squares would overflow in half precision
        largest = torch._foreach_norm(tensors, math.inf)  # pyright: ignore[reportPrivateImportUsage]
        return bool(torch.stack([value.to(largest[0].device, torch.float32) for value in largest]).isfinite().all())
