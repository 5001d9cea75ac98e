"""HostTapes: the tapes of N stacked hosts, made when they are first needed and kept until the plan changes.

Shapes: N hosts, S slots, B samples.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from simic.lifecycle.slots import SlotState
from simic.stacked.program import Pass, PassPlan, TrainingStep
from simic.stacked.seed_groups import SeedGroup, SlotPlan, plan_slot
from simic.stacked.structure import Structure
from simic.stacked.tape import is_known


class HostTapes:
    """Training steps and evaluations without autograd, for hosts and seeds that are made of known layers on features.

    Call it in inference mode only: its memory knows no autograd.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self.knows_hosts = (
            all(site.shape.topology == "features" for site in structure.sites)
            and all(is_known(segment) for segment in structure.segments)
            and not structure.hosts.aliases
        )
        self.clear()

    def clear(self) -> None:
        """Forget all tapes, because plans or parameters have changed their places."""
        self._step: TrainingStep | None = None
        self._evaluation: Pass | None = None
        self._measured: np.ndarray | None = None

    def knows_seeds(self) -> bool:
        """Whether all present seeds can be put on a tape."""
        return all(_is_known_group(group) for group in self._structure.groups.values())

    def differentiate(self, x: Tensor, y: Tensor, slots: list[SlotPlan], parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of every host (N,), and the gradient of their sum with respect to all parameters."""
        if self._step is None or self._step.samples != x.shape[1]:
            hosts = np.arange(len(x))
            plan = PassPlan([hosts] * len(self._structure.segments), [None] * len(slots), slots)
            self._step = TrainingStep(self._structure, plan, parameters, inputs=x.shape[2], samples=x.shape[1])
        return self._step.run(x, y), self._step.gradient

    def evaluate(self, x: Tensor, state: SlotState, measured: np.ndarray, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all hosts, then with each `measured` seed (N, S) switched, slot by slot; and the host of each row.

        A seed that is blended in is switched off; one in training is switched on at its alpha target.
        """
        known = self._measured is not None and np.array_equal(measured, self._measured)
        if self._evaluation is None or not known or self._evaluation.samples != x.shape[1]:
            self._measured = measured
            plan = self._plan_ablations(state, measured)
            self._evaluation = Pass(
                self._structure, plan, parameters, inputs=x.shape[2], samples=x.shape[1], learns=False
            )
        return self._evaluation.run(x), self._evaluation.hosts

    def _plan_ablations(self, state: SlotState, measured: np.ndarray) -> PassPlan:
        hosts, added, slots = [np.arange(len(measured))], [], []
        for slot in range(measured.shape[1]):
            rows, own = hosts[-1], np.flatnonzero(measured[:, slot])
            switched = np.where(state.alpha[own, slot] > 0, 0.0, state.alpha_target[own, slot])
            alpha = np.concatenate([state.alpha[rows, slot], switched])
            added.append(torch.from_numpy(np.concatenate([np.arange(len(rows)), own])) if own.size else None)
            hosts.append(np.concatenate([rows, own]))
            straight, like = np.zeros(len(alpha), dtype=bool), self._structure.reference
            slots.append(plan_slot(self._structure.seeds_of(slot), hosts[-1], alpha, straight, like, learns=False))
        last = len(hosts) - 1
        per_segment = [
            hosts[min(index * self._structure.seeds_per_slot, last)] for index in range(len(self._structure.segments))
        ]
        return PassPlan(per_segment, added, slots)


def _is_known_group(group: SeedGroup) -> bool:
    return not group.parameters.aliases and is_known(group.module)
