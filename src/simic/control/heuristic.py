"""HeuristicController: grow when the loss stalls, advance seeds that are ready, keep those that contribute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.control.plan import Kinds, germinate_rows
from simic.lifecycle.actions import HEAD_VALUES, TEMPOS, Column, Op
from simic.lifecycle.stages import Stage


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """Thresholds of the rules; times are decisions (one host epoch each).

    >>> rule = simic.HeuristicController(simic.HeuristicConfig(patience=3, max_live_seeds=1))
    >>> growth = GrowthScheduler(model, optimizer, rule, evaluate=validate)
    """

    patience: int = 1
    """Decisions without improvement until a host counts as stalled."""
    min_improvement: float = 0.1
    """Minimum relative decrease of the best validation loss that counts as improvement."""
    holding_decisions: int = 2
    """Decisions that a seed is held, to measure its contribution, before it is kept or pruned."""
    max_training_decisions: int = 12
    """Decisions until a seed that cannot be blended in yet is pruned."""
    min_contribution: float = 0.0
    """A seed is kept if its contribution is above this: a difference of accuracies or losses, or, for a user's own
    metric without bounds, a share of its value."""
    max_live_seeds: int = 3
    """Maximum number of live seeds of a host."""
    max_seed_ratio: float = 2.0
    """Maximum size of a seed, as a multiple of the host's parameters."""
    reads: Kinds = "both"
    """What seeds read: output (behind their submodule), input (beside it), or both: each kind is tried, then the one is
    preferred whose seeds contributed more."""
    style: str = "linear-add"
    """How seeds are blended in."""
    tempo: int = 3
    """Length of the ramp in decisions."""

    def __post_init__(self) -> None:
        for name in ("patience", "max_live_seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.reads not in get_args(Kinds):
            raise ValueError(f"reads must be one of {', '.join(get_args(Kinds))}, got {self.reads!r}")
        if self.style not in HEAD_VALUES["style"]:
            raise ValueError(f"style must be one of {', '.join(HEAD_VALUES['style'])}, got {self.style!r}")
        if self.tempo not in TEMPOS:
            raise ValueError(f"tempo must be one of {TEMPOS}, got {self.tempo}")


class HeuristicController:
    """On a plateau germinate, when ready advance, when measured fossilize or prune.

    It needs neither the length of the training nor any training of its own, and is the default of GrowthScheduler. Of
    each host it remembers how often a blueprint failed in a slot, and what seeds of either kind contributed: kind 0
    grows behind a submodule, kind 1 beside it.

    Args:
        config: Its thresholds.

    Example:
        >>> growth = GrowthScheduler(model, optimizer, simic.HeuristicController(), evaluate=validate)
    """

    def __init__(self, config: HeuristicConfig | None = None) -> None:
        self.config = config or HeuristicConfig()
        self._memory: dict[str, np.ndarray] = {}  # see `_start`
        self._decision = np.zeros(0, dtype=np.int64)  # (N,) the last one
        self._stalled = np.zeros(0, dtype=bool)  # (N,) at this decision

    def act(self, facts: Facts) -> np.ndarray:
        """The actions of the rules (N, H)."""
        # Asked again at the same decision, it has measured nothing new.
        if not np.array_equal(facts.decision, self._decision):
            self._update_memory(facts)
            self._stalled, self._decision = self._memory["stalled"] >= self.config.patience, facts.decision.copy()
        masks = legal_masks(facts)
        judged = (facts.slots.stage == Stage.HOLDING) & (facts.slots.stage_age >= self.config.holding_decisions)
        judged &= ~facts.awaits_contribution
        overdue = (facts.slots.stage == Stage.TRAINING) & (facts.slots.stage_age >= self.config.max_training_decisions)
        overdue &= ~masks.slot[:, Op.ADVANCE]
        kept = judged & (facts.slots.contribution > self.config.min_contribution)
        # Later rules take precedence: existing seeds come before new ones.
        actions = self._germinate(facts, masks)
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
        self._remember(facts, actions)
        self._memory["stalled"][np.isin(actions[:, Column.OP], (Op.GERMINATE, Op.FOSSILIZE, Op.PRUNE))] = 0
        return actions

    def _update_memory(self, facts: Facts) -> None:
        loss, start = facts.val_loss[:, -1], _start(facts)
        self._memory = start | self._memory
        shape, expected = self._memory["failures"].shape, start["failures"].shape
        if shape != expected:
            raise ValueError(f"this controller's memory is of {shape}, the facts are of {expected}")
        for name, values in self._memory.items():
            values[facts.decision == 0] = start[name][facts.decision == 0]
        best = self._memory["best"]
        margin = self.config.min_improvement * np.abs(np.where(np.isfinite(best), best, 0.0))
        improved = loss < best - margin
        self._memory["stalled"] = np.where(improved, 0, self._memory["stalled"] + 1)
        self._memory["best"] = np.where(improved, loss, best)

    def _germinate(self, facts: Facts, masks: Masks) -> np.ndarray:
        """Actions (N, H) that plant the largest seed within the limit; few failures and the better kind come first."""
        room = facts.slots.live.sum(1) < self.config.max_live_seeds
        budget = self.config.max_seed_ratio * facts.host_parameters[:, None, None]
        parameters, reads_input = facts.blueprint_parameters[None], facts.reads_input
        if self.config.reads != "both":
            parameters = np.where(reads_input == (self.config.reads == "input"), parameters, -1)
        smallest = np.where(parameters >= 0, parameters, np.inf).min(2, keepdims=True)
        fits = (parameters >= 0) & ((parameters <= budget) | (parameters == smallest))
        room &= masks.allows_style(Op.GERMINATE, HEAD_VALUES["style"].index(self.config.style))
        possible = fits & masks.slot[:, Op.GERMINATE, :, None] & (self._stalled & room)[:, None, None]
        # Few failures first, then the kind, then size; the first slot wins a tie.
        better_kind = self._prefers_beside(facts)[:, None] == reads_input  # (N, B)
        preference = parameters + 1e12 * better_kind[:, None] - 1e15 * self._memory["failures"]
        flat = np.where(possible, preference, -np.inf).reshape(facts.num_hosts, -1)
        chosen = np.isfinite(flat.max(1))
        slot, blueprint = np.unravel_index(flat.argmax(1), preference.shape[1:])
        rows = germinate_rows(slot, blueprint, self.config.style, self.config.tempo)
        return np.where(chosen[:, None], rows, 0)

    def _prefers_beside(self, facts: Facts) -> np.ndarray:
        """Whether the next seed should grow beside its submodule (N,).

        The kind that has not been tried comes first, then the one that contributed more per seed; seeds that are not
        judged yet count as tried, and as contributing nothing.
        """
        judged, gained = self._memory["judged"], self._memory["gained"]
        kind = np.where(facts.slots.live, facts.reads_input[facts.slots.blueprint], -1)
        untried = (judged == 0) & np.stack([(kind != own).all(1) for own in (0, 1)], 1)
        value = np.where(untried, np.inf, gained / np.maximum(judged, 1))
        return value[:, 1] > value[:, 0]

    def _remember(self, facts: Facts, actions: np.ndarray) -> None:
        """Note the seeds that are kept or pruned now."""
        op, reads_input = actions[:, Column.OP], facts.reads_input
        for host in np.flatnonzero(np.isin(op, (Op.FOSSILIZE, Op.PRUNE))):
            slot = actions[host, Column.SLOT]
            blueprint, contribution = facts.slots.blueprint[host, slot], facts.slots.contribution[host, slot]
            kind = int(reads_input[blueprint])
            self._memory["failures"][host, slot, blueprint] += op[host] == Op.PRUNE
            self._memory["judged"][host, kind] += 1
            self._memory["gained"][host, kind] += contribution if np.isfinite(contribution) else 0.0

    def for_hosts(self, hosts: np.ndarray) -> HeuristicController:
        """A controller that remembers of host i what this one remembers of `hosts[i]`."""
        copied = HeuristicController(self.config)
        copied._memory = {name: values[hosts] for name, values in self._memory.items()}
        copied._decision, copied._stalled = self._decision[hosts], self._stalled[hosts]
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Best losses, stall counters, failures and contributions of all hosts; empty before the first decision."""
        return {name: values.tolist() for name, values in self._memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a state without contributions starts to gather them."""
        self._memory = {name: np.array(values) for name, values in state.items() if values is not None}
        self._decision = np.zeros(0, dtype=np.int64)


def _start(facts: Facts) -> dict[str, np.ndarray]:
    """The memory of hosts that are new."""
    num_hosts = facts.num_hosts
    return {
        "best": np.full(num_hosts, np.inf),  # (N,) lowest validation loss
        "stalled": np.zeros(num_hosts, dtype=np.int64),  # (N,) decisions since it improved or the structure changed
        "failures": np.zeros((num_hosts, *facts.blueprint_parameters.shape), dtype=np.int64),  # (N, S, B) pruned
        "judged": np.zeros((num_hosts, 2), dtype=np.int64),  # (N, kinds) seeds that were kept or pruned
        "gained": np.zeros((num_hosts, 2)),  # (N, kinds) sum of their contributions
    }
