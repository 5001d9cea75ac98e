"""HeuristicController: grow when the loss stalls, advance seeds that are ready, keep those that contribute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.control.plan import germinate_rows
from simic.lifecycle.actions import HEAD_VALUES, TEMPOS, Column, Op
from simic.lifecycle.stages import Stage


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """Thresholds of the rules; times are decisions (one host epoch each)."""

    patience: int = 1
    """Decisions without improvement until a host counts as stalled."""
    min_improvement: float = 0.1
    """Minimum relative decrease of the best validation loss that counts as improvement."""
    holding_decisions: int = 2
    """Decisions that a seed is held, to measure its contribution, before it is kept or pruned."""
    max_training_decisions: int = 12
    """Decisions until a seed that cannot be blended in yet is pruned."""
    min_contribution: float = 0.0
    """A seed is kept if its contribution is above this, in units of the metric."""
    max_live_seeds: int = 3
    """Maximum number of live seeds of a host."""
    max_seed_ratio: float = 2.0
    """Maximum size of a seed, as a multiple of the host's parameters."""
    style: str = "linear-add"
    """How seeds are blended in."""
    tempo: int = 3
    """Length of the ramp in decisions."""

    def __post_init__(self) -> None:
        for name in ("patience", "max_live_seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.style not in HEAD_VALUES["style"]:
            raise ValueError(f"style must be one of {', '.join(HEAD_VALUES['style'])}, got {self.style!r}")
        if self.tempo not in TEMPOS:
            raise ValueError(f"tempo must be one of {TEMPOS}, got {self.tempo}")


class HeuristicController:
    """On a plateau germinate, when ready advance, when measured fossilize or prune. Counts failures per blueprint."""

    def __init__(self, config: HeuristicConfig | None = None) -> None:
        self.config = config or HeuristicConfig()
        self._best: np.ndarray | None = None  # (N,) lowest validation loss so far
        self._stalled: np.ndarray | None = None  # (N,) decisions since it improved or the structure changed
        self._failures: np.ndarray | None = None  # (N, S, B) seeds pruned

    def act(self, facts: Facts) -> np.ndarray:
        """The actions of the rules (N, H)."""
        stalled, failures = self._update_memory(facts)
        masks, hosts = legal_masks(facts), np.arange(facts.num_hosts)

        judged = (facts.slots.stage == Stage.HOLDING) & (facts.slots.stage_age >= self.config.holding_decisions)
        overdue = (facts.slots.stage == Stage.TRAINING) & (facts.slots.stage_age >= self.config.max_training_decisions)
        overdue &= ~masks.slot[:, Op.ADVANCE]
        kept = judged & (facts.slots.contribution > self.config.min_contribution)
        # Later rules take precedence: existing seeds come before new ones.
        actions = self._germinate(facts, masks, stalled >= self.config.patience, failures)
        for op, wanted in (
            (Op.ADVANCE, masks.slot[:, Op.ADVANCE]),
            (Op.PRUNE, (judged & ~kept) | overdue),
            (Op.FOSSILIZE, kept),
        ):
            possible = wanted & masks.slot[:, op]
            chosen = possible.any(1)
            actions[chosen] = 0
            actions[chosen, Column.OP] = op
            actions[chosen, Column.SLOT] = possible[chosen].argmax(1)

        pruned = actions[:, Column.OP] == Op.PRUNE
        at = (hosts[pruned], actions[pruned, Column.SLOT])
        failures[(*at, facts.slots.blueprint[at])] += 1
        stalled[np.isin(actions[:, Column.OP], (Op.GERMINATE, Op.FOSSILIZE, Op.PRUNE))] = 0
        return actions

    def _update_memory(self, facts: Facts) -> tuple[np.ndarray, np.ndarray]:
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

    def _germinate(self, facts: Facts, masks: Masks, stalled: np.ndarray, failures: np.ndarray) -> np.ndarray:
        """Actions (N, H) that plant the largest seed within the limit, of the slot and blueprint that failed least."""
        room = facts.slots.live.sum(1) < self.config.max_live_seeds
        budget = self.config.max_seed_ratio * facts.host_parameters[:, None, None]
        parameters = facts.blueprint_parameters[None]
        smallest = np.where(parameters >= 0, parameters, np.inf).min(2, keepdims=True)
        fits = (parameters >= 0) & ((parameters <= budget) | (parameters == smallest))
        possible = fits & masks.slot[:, Op.GERMINATE, :, None] & (stalled & room)[:, None, None]
        # Few failures first, then size; the first slot wins a tie.
        preference = np.where(possible, parameters - 1e12 * failures, -np.inf)
        flat = preference.reshape(facts.num_hosts, -1)
        chosen = np.isfinite(flat.max(1))
        slot, blueprint = np.unravel_index(flat.argmax(1), preference.shape[1:])
        rows = germinate_rows(slot, blueprint, self.config.style, self.config.tempo)
        return np.where(chosen[:, None], rows, 0)

    def state_dict(self) -> dict[str, Any]:
        """Best losses, stall counters and failures of all hosts."""
        memory = {"best": self._best, "stalled": self._stalled, "failures": self._failures}
        return {name: None if array is None else array.tolist() for name, array in memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best, self._stalled, self._failures = (
            None if state[name] is None else np.array(state[name]) for name in ("best", "stalled", "failures")
        )
