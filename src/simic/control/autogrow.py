"""AutoGrowController: periodic growth until it brings no gain, after AutoGrow (Wen et al. 2020).

AutoGrow adds a layer of the host's own kind every few epochs, slot by slot, and stops when the last one did not raise
the validation accuracy. Its authors found that rapid growth works best, so the period is short.

Shapes: N hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import legal_masks
from simic.control.plan import move_on, pick_blueprints, plant
from simic.lifecycle.actions import Column, Op


@dataclass(frozen=True, kw_only=True)
class AutoGrowConfig:
    """When growth continues."""

    period: int = 3
    """Decisions between two seeds, and before the first: the length of the ramp."""
    min_gain: float = 0.005
    """Minimum rise of the best validation metric since the last growth, in units of `Facts.metric_scale`."""
    blueprints: tuple[str, ...] = ("mlp", "conv")
    """The first that fits is planted: a layer like those of the host."""

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period must be at least 1, got {self.period}")


class AutoGrowController:
    """Plants a seed in the next empty slot every period, until a period brings no gain."""

    def __init__(self, config: AutoGrowConfig | None = None) -> None:
        self.config = config or AutoGrowConfig()
        self._memory: dict[str, np.ndarray] = {}  # (N,) each

    def act(self, facts: Facts) -> np.ndarray:
        """Move seeds on, and plant one when a period has passed with gain (N, H)."""
        memory, masks = self._update_memory(facts), legal_masks(facts)
        over = facts.decision - memory["grown_at"] >= self.config.period
        gained = memory["best"] >= memory["reference"] + self.config.min_gain * facts.metric_scale
        memory["stopped"] |= over & ~gained
        due = over & ~memory["stopped"]
        actions = plant(move_on(masks), facts, masks, due, pick_blueprints(facts, self.config.blueprints, 0.5))
        grows = actions[:, Column.OP] == Op.GERMINATE
        memory["grown_at"] = np.where(grows, facts.decision, memory["grown_at"])
        memory["reference"] = np.where(grows, memory["best"], memory["reference"])
        return actions

    def _update_memory(self, facts: Facts) -> dict[str, np.ndarray]:
        fresh = facts.decision == 0
        start = {"best": -np.inf, "reference": -np.inf, "grown_at": 0, "stopped": False}
        if not self._memory or len(self._memory["best"]) != facts.num_hosts:
            self._memory = {name: np.full(facts.num_hosts, value) for name, value in start.items()}
        self._memory = {name: np.where(fresh, start[name], values) for name, values in self._memory.items()}
        self._memory["best"] = np.fmax(self._memory["best"], facts.metric[:, -1])
        return self._memory

    def for_hosts(self, hosts: np.ndarray) -> AutoGrowController:
        """A controller that remembers of host i what this one remembers of `hosts[i]`."""
        copied = AutoGrowController(self.config)
        copied._memory = {name: values[hosts] for name, values in self._memory.items()}
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Best metrics, and the decisions of the last growth."""
        return {name: values.tolist() for name, values in self._memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._memory = {name: np.array(values) for name, values in state.items()}
