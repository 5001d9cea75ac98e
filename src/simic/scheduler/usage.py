"""Warnings about the use of `GrowthScheduler.step`, which is to be called once per host epoch. Each is given once."""

from __future__ import annotations

import warnings

from simic.growth.model import GrowableModel

SINGLE_STEPS = 30
"""Decisions in a row, each after a single optimizer step, that suggest a call for every batch."""
UNCALLED_STEPS = 20_000
"""Optimizer steps without any decision that suggest that `step` was forgotten."""


class StepUsage:
    """Counts optimizer steps between decisions."""

    def __init__(self) -> None:
        self.optimizer_steps: int | None = 0
        """Since the last decision; None if a checkpoint does not contain it."""
        self._single_steps = 0
        self._given: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last decision."""
        return self.optimizer_steps == 0

    def count_optimizer_step(self, decisions: int) -> None:
        """Called before every optimizer step."""
        self.optimizer_steps = (self.optimizer_steps or 0) + 1
        if decisions == 0 and self.optimizer_steps == UNCALLED_STEPS:
            self._warn(
                f"{UNCALLED_STEPS:,} optimizer steps have passed and the GrowthScheduler's step() was never called, so "
                "nothing grows: call it once per host epoch, after validation"
            )

    def check(self, decisions: int, horizon: int) -> None:
        """Called by every `step`, before it decides."""
        if self.idle:
            self._warn(
                "step() was called, but the optimizer has not made a step since the call before, so nothing is decided "
                "and no time passes for seeds: call step() once per host epoch, after training"
            )
            return
        self._single_steps = self._single_steps + 1 if self.optimizer_steps == 1 else 0
        if self._single_steps == SINGLE_STEPS:
            self._warn(
                f"step() was called after every single optimizer step, {SINGLE_STEPS} times in a row: call it once per "
                "host epoch, not for every batch (ignore this if a host epoch is one batch)"
            )
        if 0 < horizon <= decisions:
            self._warn(
                f"step() is called beyond the horizon of {horizon} host epochs, which controllers use to pace growth: "
                "give GrowthScheduler the number of host epochs that are planned"
            )

    def check_ablation(self, model: GrowableModel, slot: str) -> None:
        """Called after an evaluation with a seed switched off or in, which holds for the calling thread only."""
        seed = model.seed(slot)
        if seed is not None and seed.override_used is False:
            self._warn(
                f"evaluate() ran the seed in slot {slot!r} in another thread than step(), where it is not switched "
                "off, so its contribution cannot be measured: evaluate in the thread that calls step()"
            )

    def _warn(self, text: str) -> None:
        if text not in self._given:
            self._given.add(text)
            warnings.warn(text, stacklevel=4)
