"""A rule of thumb: grow when the loss stalls, move seeds on when ready, keep those that help, drop the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.lifecycle.actions import ALPHA_TARGETS, HEADS, STYLES, TEMPOS, Op
from simic.lifecycle.stages import Stage


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """When the rule acts; times are decisions (one host epoch each)."""

    patience: int = 1
    """Decisions without improvement after which the host counts as stalled."""
    min_improvement: float = 0.1
    """Relative fall of the best validation loss that counts as improvement."""
    holding_decisions: int = 2
    """Decisions a seed is held, and its contribution measured, before its fate is decided."""
    max_training_decisions: int = 12
    """Decisions after which a seed that is still not ready to be blended in is given up."""
    min_contribution: float = 0.0
    """A seed is kept if its contribution is above this, in the metric's unit."""
    max_live_seeds: int = 3
    """Seeds whose fate may be open at the same time."""
    max_seed_ratio: float = 2.0
    """Largest seed it plants, as a multiple of the host's parameters."""
    style: str = "linear-add"
    """How seeds are blended in."""
    tempo: int = 3
    """Decisions that the ramp takes."""

    def __post_init__(self) -> None:
        for name in ("patience", "max_live_seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.style not in [style.name for style in STYLES]:
            raise ValueError(f"style must be one of {', '.join(s.name for s in STYLES)}, got {self.style!r}")
        if self.tempo not in TEMPOS:
            raise ValueError(f"tempo must be one of {TEMPOS}, got {self.tempo}")


class HeuristicController:
    """Plateau: germinate. Ready: advance. Measured: fossilize or prune. Remembers which blueprints failed where."""

    def __init__(self, config: HeuristicConfig | None = None) -> None:
        self.config = config or HeuristicConfig()
        self._best: np.ndarray | None = None  # (N,) lowest validation loss so far
        self._stalled: np.ndarray | None = None  # (N,) decisions since it improved or the structure changed
        self._failures: np.ndarray | None = None  # (N, S, B) seeds pruned

    def act(self, facts: Facts) -> np.ndarray:
        """The rule's action for every host."""
        stalled, failures = self._remember(facts)
        masks = legal_masks(facts)
        hosts = np.arange(facts.num_hosts)
        actions = np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)

        judged = (facts.slots.stage == Stage.HOLDING) & (facts.slots.stage_age >= self.config.holding_decisions)
        overdue = (facts.slots.stage == Stage.TRAINING) & (facts.slots.stage_age >= self.config.max_training_decisions)
        overdue &= ~masks.slot[:, Op.ADVANCE]
        kept = judged & (facts.slots.contribution > self.config.min_contribution)
        # Later lines take precedence: what is decided about a seed comes before a new one.
        self._germinate(actions, facts, masks, (stalled >= self.config.patience), failures)
        for op, wanted in (
            (Op.ADVANCE, masks.slot[:, Op.ADVANCE]),
            (Op.PRUNE, (judged & ~kept) | overdue),
            (Op.FOSSILIZE, kept),
        ):
            possible = wanted & masks.slot[:, op]
            chosen = possible.any(1)
            actions[chosen] = 0
            actions[chosen, 0] = op
            actions[chosen, 1] = possible[chosen].argmax(1)

        pruned = actions[:, 0] == Op.PRUNE
        at = (hosts[pruned], actions[pruned, 1])
        failures[(*at, facts.slots.blueprint[at])] += 1
        stalled[np.isin(actions[:, 0], (Op.GERMINATE, Op.FOSSILIZE, Op.PRUNE))] = 0
        return actions

    def _remember(self, facts: Facts) -> tuple[np.ndarray, np.ndarray]:
        loss = facts.val_loss[:, -1]
        shape = (facts.num_hosts, *facts.blueprint_parameters.shape)
        if self._best is None or self._stalled is None or self._failures is None:
            self._best = np.full(facts.num_hosts, np.inf)
            self._stalled = np.zeros(facts.num_hosts, dtype=np.int64)
            self._failures = np.zeros(shape, dtype=np.int64)
        if self._failures.shape != shape:
            raise ValueError(f"this controller's memory is of {self._failures.shape}, the facts are of {shape}")
        fresh = facts.decision == 0
        self._best[fresh], self._stalled[fresh], self._failures[fresh] = np.inf, 0, 0
        margin = self.config.min_improvement * np.abs(np.where(np.isfinite(self._best), self._best, 0.0))
        improved = loss < self._best - margin
        self._stalled = np.where(improved, 0, self._stalled + 1)
        self._best = np.where(improved, loss, self._best)
        return self._stalled, self._failures

    def _germinate(
        self, actions: np.ndarray, facts: Facts, masks: Masks, stalled: np.ndarray, failures: np.ndarray
    ) -> None:
        """Plant, in the slot and of the blueprint that failed least, the largest seed that is not too large."""
        room = facts.slots.live.sum(1) < self.config.max_live_seeds
        budget = self.config.max_seed_ratio * facts.host_parameters[:, None, None]
        parameters = facts.blueprint_parameters[None]
        smallest = np.where(parameters >= 0, parameters, np.inf).min(2, keepdims=True)
        fits = (parameters >= 0) & ((parameters <= budget) | (parameters == smallest))
        possible = fits & masks.slot[:, Op.GERMINATE, :, None] & (stalled & room)[:, None, None]
        # Few failures first, then size; a slot that comes first wins a tie.
        preference = np.where(possible, parameters - 1e12 * failures, -np.inf)
        flat = preference.reshape(len(actions), -1)
        chosen = np.isfinite(flat.max(1))
        slot, blueprint = np.unravel_index(flat.argmax(1), preference.shape[1:])
        style = [style.name for style in STYLES].index(self.config.style)
        row = np.zeros_like(actions)
        row[:, 0], row[:, 1], row[:, 2] = Op.GERMINATE, slot, blueprint
        row[:, 3], row[:, 4], row[:, 5] = style, TEMPOS.index(self.config.tempo), ALPHA_TARGETS.index(1.0)
        actions[chosen] = row[chosen]

    def state_dict(self) -> dict[str, Any]:
        """Best losses, stall counters and failures of every host."""
        memory = {"best": self._best, "stalled": self._stalled, "failures": self._failures}
        return {name: None if array is None else array.tolist() for name, array in memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` said."""
        self._best, self._stalled, self._failures = (
            None if state[name] is None else np.array(state[name]) for name in ("best", "stalled", "failures")
        )
