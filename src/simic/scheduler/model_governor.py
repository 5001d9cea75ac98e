"""The governor of one model beside the user's own optimizer: notices that it broke, and gives back what was good."""

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
    """Judges one model by the rule for N hosts, and keeps its last good state.

    The loss of a random guess is not known here. What stands in is the validation loss at the first decision; where
    only accuracies are given, the error rate counts as the loss. Collapse and divergence need a second witness, or
    overfitting would pass for them: the training loss where `step` is given one, else the error rate. With a
    validation loss alone only numbers that are not finite count.
    """

    def __init__(self, model: GrowableModel, optimizer: Optimizer, config: GovernorConfig | None = None) -> None:
        self._model = model
        self._judge = Governor(1, config)
        self._snapshot = ModelSnapshot(model, optimizer)
        self._snapshot.save()
        self._present_good = True  # nothing was trained since the snapshot
        self._begun = False  # nothing was trained since construction or loading
        self._fresh = True  # nothing was loaded either
        self._first: dict[str, float] = {}
        """Each figure when it was first seen: what its later values are measured by."""
        self._alpha = model.slot_state.alpha.copy()  # when figures were last judged

    @property
    def settled(self) -> bool:
        """Whether a good loss was ever seen."""
        return bool(self._first)

    def before_optimizer_step(self) -> None:
        """Before the first step take the snapshot again: weights or optimizer may have been loaded after this object.

        Buffers have seen a batch by then, which may be a bad one, or one that a resumed run must not count.
        """
        if not self._begun:
            buffers = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
            self._snapshot.save(buffers=self._fresh and _all_finite(buffers))
        self._begun, self._present_good = True, False

    def weights_finite(self) -> bool:
        """Whether the host and its fossils are free of NaN and infinity. Live seeds may break without the host."""
        seeds = [self._model.seed(index) for index in np.flatnonzero(self._model.slot_state.live[0]).tolist()]
        live = {parameter for seed in seeds if seed is not None for parameter in seed.parameters()}
        return _all_finite([parameter for parameter in self._model.parameters() if parameter not in live])

    def judge(self, figures: Mapping[str, float]) -> Verdict:
        """What to think of "val_loss", "val_accuracy" and "train_loss", as far as they are given."""
        if (self._model.slot_state.alpha < self._alpha).any():
            # A seed that leaves may take much of the host's skill with it, on purpose.
            self._judge.reset(np.array([0]))
        self._alpha = self._model.slot_state.alpha.copy()
        if not math.isfinite(figures.get("val_loss", 0.0)):
            return Verdict.NOT_FINITE
        pair = self._witnesses(figures)
        if pair is None:
            return Verdict.OK
        return Verdict(int(self._judge.judge(np.array(pair[:1]), np.array(pair[1:]), np.ones(1))[0]))

    def keep(self) -> None:
        """A decision ended: take its state as the last good one, unless the host is under suspicion."""
        if self._judge.trusted[0]:
            self._snapshot.save()
            self._begun = self._present_good = True

    def restore(self) -> None:
        """Take live seeds out, give back the last good state, and judge from then on as if nothing had been seen."""
        self._model.remove_live_seeds()
        self._snapshot.restore()
        self._judge.reset(np.array([0]))
        self._alpha, self._present_good = self._model.slot_state.alpha.copy(), True

    def memory(self) -> dict[str, Any]:
        """What is remembered of figures, as JSON values; the last good state is not part of it."""
        return {
            "judge": {name: values.tolist() for name, values in self._judge.state_dict().items()},
            "first": dict(self._first),
            "alpha": self._alpha.tolist(),
        }

    def set_memory(self, memory: dict[str, Any]) -> None:
        """Remember what `memory` said."""
        self._judge.load_state_dict({name: np.array(values) for name, values in memory["judge"].items()})
        self._first = dict(memory["first"])
        self._alpha = np.array(memory["alpha"])

    def state_dict(self) -> dict[str, Any]:
        """The memory, and the last good state if it is another than the present one."""
        return self.memory() | {"snapshot": None if self._present_good else self._snapshot.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from `state_dict`; None stands for a run without a governor: what is here now is good."""
        saved = state["snapshot"] if state is not None else None
        if saved is None:
            self._snapshot.save()
        else:
            self._snapshot.load_state_dict(saved)
        if state is not None:
            self.set_memory(state)
        self._present_good, self._begun, self._fresh = saved is None, saved is not None, False

    def _witnesses(self, figures: Mapping[str, float]) -> tuple[float, float] | None:
        """Two figures that must both look broken, as multiples of the first ones seen; None if there are none."""
        given = {
            name: figures[name] for name in ("val_loss", "train_loss") if math.isfinite(figures.get(name, math.nan))
        }
        if "val_accuracy" in figures:
            given["error"] = 1 - figures["val_accuracy"]
        for name, value in given.items():
            self._first.setdefault(name, value)
        main = "val_loss" if "val_loss" in given else "error"
        second = "train_loss" if "train_loss" in given else "error"
        if second not in given or min(self._first[main], self._first[second]) <= 0:
            return None
        # Losses are measured by the first validation loss, as by the random guess of a task; an error rate by its own.
        scale = self._first[main if second == "train_loss" and main == "val_loss" else second]
        return given[main] / self._first[main], given[second] / scale


def _all_finite(tensors: list[Tensor]) -> bool:
    if not tensors:
        return True
    with torch.no_grad():  # the largest magnitudes: sums of squares would overflow in half precision
        largest = torch._foreach_norm(tensors, math.inf)  # pyright: ignore[reportPrivateImportUsage]
        return bool(torch.stack([value.to(largest[0].device, torch.float32) for value in largest]).isfinite().all())
