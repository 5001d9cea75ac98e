"""AdapterController: a rule for frozen hosts with many slots. Small seeds everywhere, larger ones where gradients ask.

It works beside one model, and is to be asked until it waits (see `GrowthScheduler`). With LoRA of ranks 2, 8 and 32:

    decision 0   rank 2 beside every layer
    decision 1   the gradients of these seeds rank the layers; those that contribute become fossils
    then         a second seed beside the layers with the largest gradients: rank 32 for the first, rank 8 for others;
                 seeds that do not contribute for some decisions are pruned

Shapes: S slots (with k seeds per slot, columns k i to k i + k - 1 belong to one submodule), B blueprints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import Masks, legal_masks
from simic.control.plan import germinate_rows
from simic.lifecycle.actions import HEADS, Op
from simic.lifecycle.stages import Stage


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """How much grows, and where."""

    grow_share: float = 0.75
    """Share of the submodules that get a second, larger seed: those whose first has the largest gradient."""
    large_share: float = 0.25
    """Share of the submodules whose second seed is the largest there is."""
    min_contribution: float = 0.0
    """A seed is kept if its contribution is above this, in units of the metric."""
    patience: int = 4
    """Decisions that a seed is held before it is pruned because it does not contribute, by two standard errors if these
    are known."""

    def __post_init__(self) -> None:
        for name in ("grow_share", "large_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")


class AdapterController:
    """Plants the smallest seed in every slot, keeps what contributes, and adds larger ones where gradients are large.

    A slot that had a seed does not get another.
    """

    def __init__(self, config: AdapterConfig | None = None) -> None:
        self.config = config or AdapterConfig()
        self._tried: set[int] = set()  # slots that had a seed
        self._order: list[int] = []  # first seats, by the gradients of their seeds, the largest first

    def act(self, facts: Facts) -> np.ndarray:
        """The next action (1, H); wait when all is done for this decision."""
        if facts.num_hosts != 1:
            raise ValueError(f"the adapter rule works beside one model, got {facts.num_hosts} hosts")
        masks = legal_masks(facts)
        if facts.decision[0] == 0 and not facts.slots.occupied.any():  # a new model
            self._tried, self._order = set(), []
        if not self._order and np.isfinite(facts.slots.gradient_norm[0]).any():
            self._order = self._by_gradient(facts)
        action = np.zeros((1, len(HEADS)), dtype=np.int64)
        chosen = self._move_on(facts, masks) or self._plant(facts, masks)
        if chosen is not None:
            action[:] = chosen
        return action

    def _move_on(self, facts: Facts, masks: Masks) -> list[int] | None:
        """Advance, keep or prune the first seed that is ready."""
        state = facts.slots
        judged = (state.stage[0] == Stage.HOLDING) & np.isfinite(state.contribution[0]) & ~state.counterfactual[0]
        kept = judged & (state.contribution[0] > self.config.min_contribution)
        kept[self._to_grow(facts)] |= judged[self._to_grow(facts)]  # a single measurement is noisy, the gradient is not
        overdue = judged & ~self._may_contribute(facts) & ~kept & (state.stage_age[0] >= self.config.patience)
        for op, wanted in ((Op.ADVANCE, True), (Op.FOSSILIZE, kept), (Op.PRUNE, overdue)):
            possible = np.flatnonzero(wanted & masks.slot[0, op])
            if possible.size:
                return [int(op), int(possible[0])] + [0] * (len(HEADS) - 2)
        return None

    def _may_contribute(self, facts: Facts) -> np.ndarray:
        """Seeds (S,) whose contribution is enough within two standard errors, as far as these are known."""
        if facts.contribution_error is None:
            return np.zeros(facts.slots.stage.shape[1], dtype=bool)
        likely = facts.slots.contribution[0] + 2 * facts.contribution_error[0]  # NaN compares as False
        return likely >= self.config.min_contribution

    def _plant(self, facts: Facts, masks: Masks) -> np.ndarray | None:
        """A seed in the first slot that wants one: first seats once, then second ones in order of gradients."""
        per_slot, empty = facts.lifecycle.seeds_per_slot, masks.slot[0, Op.GERMINATE]
        firsts = range(0, len(empty), per_slot)
        wanted = [(slot, 0.0) for slot in firsts]
        if per_slot > 1 and (not facts.horizon[0] or facts.decision[0] <= facts.horizon[0] / 2):
            large = round(self.config.large_share * len(firsts))
            wanted += [(slot + 1, 1.0 if rank < large else 0.5) for rank, slot in enumerate(self._to_grow(facts))]
        for slot, size in wanted:
            if empty[slot] and slot not in self._tried:
                self._tried.add(slot)
                blueprint = _by_size(facts, slot, size)
                return germinate_rows(np.array([slot]), np.array([blueprint]), "linear-add", 3)[0]
        return None

    def _by_gradient(self, facts: Facts) -> list[int]:
        """First seats by the gradient of their submodule's weight, the largest first, as far as their seeds show it.

        At birth B of a LoRA x -> B A x is zero and A has variance 1 / (3 in), so B's gradient G A^T is smaller than the
        weight's gradient G by a factor that goes with the root of the number of inputs.
        """
        firsts = np.arange(0, facts.slots.stage.shape[1], facts.lifecycle.seeds_per_slot)
        inputs = np.ones(len(firsts)) if facts.in_features is None else np.maximum(facts.in_features[firsts], 1)
        gradients = np.nan_to_num(facts.slots.gradient_norm[0, firsts] * np.sqrt(inputs), nan=-1.0)
        return [int(slot) for slot in firsts[np.argsort(-gradients, kind="stable")]]

    def _to_grow(self, facts: Facts) -> list[int]:
        """First seats whose submodules get a second seed, in order."""
        num_submodules = facts.slots.stage.shape[1] // facts.lifecycle.seeds_per_slot
        return self._order[: round(self.config.grow_share * num_submodules)]

    def state_dict(self) -> dict[str, Any]:
        """Slots that had a seed, and the order of the others."""
        return {"tried": sorted(self._tried), "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._tried, self._order = set(state["tried"]), list(state["order"])


def _by_size(facts: Facts, slot: int, size: float) -> int:
    """The blueprint of this rank by size among those that fit, 0 the smallest; beside the submodule if possible."""
    parameters = facts.blueprint_parameters[slot]
    fitting = np.flatnonzero(parameters >= 0)
    beside = fitting[facts.reads_input[fitting]]
    fitting = beside if beside.size else fitting
    by_size = fitting[np.argsort(parameters[fitting], kind="stable")]
    return int(by_size[round(size * (len(by_size) - 1))])
