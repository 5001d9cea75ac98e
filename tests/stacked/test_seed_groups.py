"""Seed groups against seeds blended one by one: the drawn example of the module, gradients included."""

import numpy as np
import pytest
import torch
from torch import nn

from simic.growth import blend
from simic.growth.blueprints import SlotShape, new_branch
from simic.growth.seed import new_gate
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import StackedParameters
from simic.stacked.seed_groups import GATE, OPERATORS, SeedGroup, SlotSeeds, blend_seeds, plan_slot
from simic.stacked.two_layer import two_layer

SHAPE = SlotShape("features", 3)
ALPHA = np.array([0.3, 0.0, 1.0, 0.7, 0.0, 0.5])
NEVER = np.zeros(6, dtype=bool)
LIKE = torch.zeros(0, dtype=torch.double)
SEEDS = {0: ("mlp", "gate"), 2: ("norm", "add"), 3: ("glu", "add"), 5: ("mlp", "multiply")}
"""The drawn example: host -> blueprint and operator."""


def randomized(module: nn.Module, host: int) -> nn.Module:
    generator = torch.Generator().manual_seed(host)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.double()


class Example:
    """Seeds in a slot of six hosts: as modules by host, and as groups whose parameters an optimizer holds."""

    def __init__(self, seeds: dict[int, tuple[str, str]], *, join: bool = True) -> None:
        self.operators = {host: operator for host, (_, operator) in seeds.items()}
        self.branches = {host: randomized(new_branch(name, SHAPE, (host,)), host) for host, (name, _) in seeds.items()}
        gated = [host for host, operator in self.operators.items() if operator == "gate"]
        self.gates = {host: randomized(new_gate(SHAPE, LIKE), host) for host in gated}
        by_name: dict[str, list[int]] = {}
        for host, (name, _) in seeds.items():
            by_name.setdefault(name, []).append(host)
        self.groups = [self._group(name, hosts, self.branches, join) for name, hosts in by_name.items()]
        self.groups.sort(key=lambda group: group.two_layer is None)
        self.gate_group = self._group(GATE, gated, self.gates, False) if gated else None
        self.vector = self._lay_out()

    def _group(self, name: str, hosts: list[int], modules: dict[int, nn.Module], join: bool) -> SeedGroup:
        parameters = StackedParameters.of_modules([modules[host] for host in hosts], LIKE)
        kind = two_layer(modules[hosts[0]]) if join else None
        return SeedGroup(0, name, modules[hosts[0]], np.array(hosts), parameters, kind)

    def _lay_out(self) -> torch.Tensor | None:
        matrices = [group.parameters for group in self.groups]
        rows = [group.hosts for group in self.groups]
        optimizer = StackedOptimizer(matrices, rows, rows, OptimizerConfig(), num_slots=0)
        joined = [group for group in self.groups if group.two_layer is not None]
        for group, after in zip(joined, joined[1:], strict=False):
            after.start = group.start + group.parameters.rows.numel()
        return optimizer.join([group.parameters for group in joined]) if joined else None

    def plan(self, hosts, alpha=ALPHA, straight=NEVER, *, learns=True):
        operator = np.array([OPERATORS.index(self.operators.get(host, "add")) for host in range(6)])
        slot = SlotSeeds(self.groups, self.gate_group, self.vector, SHAPE.features, SHAPE.rank, operator)
        return plan_slot(slot, np.array(hosts), alpha, straight, LIKE, learns=learns)

    def one_by_one(self, h: torch.Tensor, hosts: list[int]) -> torch.Tensor:
        return torch.stack([self._alone(h[row], host) for row, host in enumerate(hosts)])

    def _alone(self, h: torch.Tensor, host: int) -> torch.Tensor:
        if host not in self.branches:
            return h
        gate = self.gates[host](h) if host in self.gates else None
        return blend.OPERATORS[self.operators[host]](h, self.branches[host](h), float(ALPHA[host]), gate)


def test_the_drawn_example():
    plan = Example(SEEDS).plan(range(6))
    assert plan.blending is not None
    assert plan.blending.at.tolist() == [2, 3, 5, 0]
    assert plan.blending.alpha.flatten().tolist() == [1.0, 0.7, 0.5, 0.3]
    assert (plan.blending.multiply, plan.blending.gate) == (slice(2, 3), slice(3, 4))
    (norm,) = plan.batches
    assert norm.number is not None
    assert norm.number.tolist() == [0]
    assert plan.blocks is not None
    assert set(plan.blocks.owner.tolist()) == {1, 2, 3}
    assert plan.gates is not None
    assert plan.gates.at.tolist() == [0]


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("hosts", [[0, 1, 2, 3, 4, 5], [5, 0, 3], [2], [1, 4]])
def test_groups_blend_as_seeds_one_by_one(hosts, join):
    example = Example(SEEDS, join=join)
    h = torch.randn(len(hosts), 4, 3, dtype=torch.double, requires_grad=True)
    blended, expected = blend_seeds(h, example.plan(hosts)), example.one_by_one(h, hosts)
    torch.testing.assert_close(blended, expected)
    weights = torch.randn_like(blended)
    one, other = (torch.autograd.grad((out * weights).sum(), h, retain_graph=True)[0] for out in (blended, expected))
    torch.testing.assert_close(one, other)
    for group in filter(None, [*example.groups, example.gate_group]):
        modules = example.gates if group is example.gate_group else example.branches
        found = gradient_of((blended * weights).sum(), group, example.vector)
        for row, host in enumerate(group.hosts.tolist()):
            own = list(modules[host].parameters())
            wanted = torch.autograd.grad(
                (expected * weights).sum(), own, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            torch.testing.assert_close(found[row], torch.cat([part.flatten() for part in wanted]))


def gradient_of(total: torch.Tensor, group: SeedGroup, vector: torch.Tensor | None) -> torch.Tensor:
    """The gradient (R, P) of a group's parameters, which lies in that of the vector if its seeds are joined."""
    settings = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    if not total.requires_grad:
        return torch.zeros_like(group.parameters.rows)
    if group.two_layer is None:
        return group.parameters.flatten_gradients(
            torch.autograd.grad(total, [*group.parameters.leaves.values()], **settings)
        )
    assert vector is not None
    (whole,) = torch.autograd.grad(total, vector, **settings)
    return whole[group.start : group.start + group.parameters.rows.numel()].view_as(group.parameters.rows)


def test_all_seeds_of_a_group_run_without_selecting_rows():
    example = Example({0: ("norm", "add"), 1: ("norm", "add"), 2: ("norm", "add")})
    (every,), (some,) = (example.plan(hosts, np.ones(6)).batches for hosts in (range(3), [0, 2]))
    assert every.rows is None
    assert some.rows is not None
    assert some.rows.tolist() == [0, 2]


@pytest.mark.parametrize("join", [True, False])
def test_seeds_that_do_not_learn_are_constant(join):
    example = Example(SEEDS, join=join)
    h = torch.randn(6, 4, 3, dtype=torch.double)
    for learns in (True, False):
        assert blend_seeds(h, example.plan(range(6), learns=learns)).requires_grad == learns


def test_straight_through_seeds_learn_without_an_effect():
    example = Example({1: ("mlp", "add")}, join=False)
    h = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    out = blend_seeds(h, example.plan([0, 1], np.zeros(6), np.arange(6) == 1))
    torch.testing.assert_close(out, h)
    (group,), seed = example.groups, example.branches[1]
    expected = blend.straight_through(h[1], seed(h[1].detach()))
    found = gradient_of(out.square().sum(), group, None)[0]
    wanted = torch.autograd.grad(expected.square().sum(), [*seed.parameters()])
    torch.testing.assert_close(found, torch.cat([part.flatten() for part in wanted]))
