"""The seeds of one slot as modules, host by host, and as groups whose parameters an optimizer holds, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth import blend
from simic.growth.blueprints import SlotShape
from simic.growth.seed import new_gate
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import StackedParameters
from simic.stacked.seed_groups import GATE, OPERATORS, SeedGroup, SlotPlan, SlotSeeds, plan_slot
from simic.stacked.two_layer import two_layer

LIKE = torch.zeros(0, dtype=torch.double)


class Planted(NamedTuple):
    """A seed; seeds of one name have the same structure."""

    name: str
    branch: nn.Module
    operator: str


def randomized(module: nn.Module, rng_seed: int) -> nn.Module:
    """The module with random parameters in float64; newborn ones would put out zeros."""
    generator = torch.Generator().manual_seed(rng_seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.double()


class SlotExample:
    """Seeds by host in a slot of some features; `join` runs those with one hidden layer in blocks."""

    def __init__(self, features: int, seeds: dict[int, Planted], alpha: Sequence[float], *, join: bool = True) -> None:
        self.features, self.alpha = features, np.array(alpha)
        self.operators = {host: seed.operator for host, seed in seeds.items()}
        self.branches = {host: randomized(seed.branch, host) for host, seed in seeds.items()}
        gated = [host for host, operator in self.operators.items() if operator == "gate"]
        self.gates = {host: randomized(new_gate(SlotShape("features", features), LIKE), 99 + host) for host in gated}
        by_name: dict[str, list[int]] = {}
        for host, seed in seeds.items():
            by_name.setdefault(seed.name, []).append(host)
        groups = [self._group(name, hosts, self.branches, join) for name, hosts in by_name.items()]
        self.groups = sorted(groups, key=lambda group: group.two_layer is None)
        self.gate_group = self._group(GATE, gated, self.gates, False) if gated else None
        self.vector = self._lay_out()

    def _group(self, name: str, hosts: list[int], modules: dict[int, nn.Module], join: bool) -> SeedGroup:
        parameters = StackedParameters.of_modules([modules[host] for host in hosts], LIKE)
        kind = two_layer(modules[hosts[0]]) if join else None
        return SeedGroup(0, name, modules[hosts[0]], np.array(hosts), parameters, kind)

    def _lay_out(self) -> Tensor | None:
        if not self.groups:
            return None
        matrices, rows = [group.parameters for group in self.groups], [group.hosts for group in self.groups]
        optimizer = StackedOptimizer(matrices, rows, rows, OptimizerConfig(), num_slots=0)
        joined = [group for group in self.groups if group.two_layer is not None]
        for group, after in pairwise(joined):
            after.start = group.start + group.parameters.rows.numel()
        return optimizer.join([group.parameters for group in joined]) if joined else None

    def plan(
        self,
        hosts: Sequence[int],
        *,
        alpha: np.ndarray | None = None,
        straight: np.ndarray | None = None,
        learns: bool = True,
    ) -> SlotPlan:
        """The plan of a pass of these hosts."""
        total = len(self.alpha)
        operator = np.array([OPERATORS.index(self.operators.get(host, "add")) for host in range(total)])
        slot = SlotSeeds(self.groups, self.gate_group, self.vector, self.features, True, 2, operator)
        straight = np.zeros(total, dtype=bool) if straight is None else straight
        alpha = self.alpha if alpha is None else alpha
        return plan_slot(slot, np.array(hosts, dtype=np.int64), alpha, straight, LIKE, learns=learns)

    def one_by_one(self, h: Tensor, hosts: Sequence[int]) -> Tensor:
        """What the modules of each host compute from its activation."""
        return torch.stack([self._alone(h[row], host) for row, host in enumerate(hosts)])

    def _alone(self, h: Tensor, host: int) -> Tensor:
        if host not in self.branches or not self.alpha[host]:
            return h
        gate = self.gates[host](h) if host in self.gates else None
        return blend.OPERATORS[self.operators[host]](h, self.branches[host](h), float(self.alpha[host]), gate)

    def gradients(self, total: Tensor) -> dict[int, Tensor]:
        """Gradient of the parameters of each host's seed, its gate's at the end; `total` comes from the groups."""
        found: dict[int, Tensor] = {}
        for group in [*self.groups, *([self.gate_group] if self.gate_group else [])]:
            for host, row in zip(group.hosts.tolist(), self._gradient(total, group), strict=True):
                found[host] = torch.cat([found[host], row]) if host in found else row
        return found

    def _gradient(self, total: Tensor, group: SeedGroup) -> Tensor:
        own = group.parameters
        if group.two_layer is None:
            return own.flatten_gradients(gradients_of(total, [*own.leaves.values()]))
        assert self.vector is not None
        (whole,) = gradients_of(total, [self.vector])
        return whole[group.start : group.start + own.rows.numel()].view_as(own.rows)

    def gradients_one_by_one(self, total: Tensor) -> dict[int, Tensor]:
        """The same, where `total` comes from the modules."""
        found = {}
        for host, branch in self.branches.items():
            parameters = [*branch.parameters(), *(self.gates[host].parameters() if host in self.gates else ())]
            found[host] = torch.cat([part.flatten() for part in gradients_of(total, parameters)])
        return found


def gradients_of(total: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients, zeros where `total` does not depend on a tensor."""
    if not total.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in tensors)
    return torch.autograd.grad(total, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
