"""Seed groups follow the slots: the drawn example, changes of the operator, and seeds that leave."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.stacked.optimizer import OptimizerConfig
from simic.stacked.seed_groups import GATE, OPERATORS
from simic.stacked.structure import Structure

STYLE = {style.operator: index for index, style in reversed(list(enumerate(STYLES)))}


def make_host() -> nn.Sequential:
    return nn.Sequential(OrderedDict(stem=nn.Linear(3, 4), block=nn.Linear(4, 4), head=nn.Linear(4, 2)))


@pytest.fixture
def drawn() -> tuple[Structure, SlotState]:
    """The example of the module: an mlp in slot 0 of hosts 0 and 2, a gated norm in slot 1 of host 1."""
    structure = Structure(make_host, ("stem", "block"), torch.randn(2, 3), (1, 2, 3))
    slots = SlotState.dormant(3, 2)
    seeds = []
    for host, slot, name, operator in ((0, 0, "mlp", "add"), (2, 0, "mlp", "add"), (1, 1, "norm", "gate")):
        index = structure.blueprint_names.index(name)
        seeds.append((slot, name, host, structure.new_seed(slot, index, (host,))))
        slots.blueprint[host, slot], slots.style[host, slot] = index, STYLE[operator]
    structure.add_seeds(seeds)
    return structure, slots


def owners(structure: Structure) -> dict:
    return {key: group.hosts.tolist() for key, group in structure.groups.items()}


def test_the_drawn_example(drawn):
    structure, slots = drawn
    assert structure.sync_with_slots(slots)
    assert owners(structure) == {(0, "mlp"): [0, 2], (1, "norm"): [1], (1, GATE): [1]}
    assert OPERATORS[structure.operator[1, 1]] == "gate"
    assert not structure.sync_with_slots(slots), "nothing changed since"
    assert structure.new_optimizer(OptimizerConfig()).num_entities == 3 + 2 * 3
    assert [(group.slot, group.name) for group in structure.ordered] == [*structure.groups]


def test_a_new_operator_keeps_a_seed_with_its_weights_and_optimizer_state(drawn):
    structure, slots = drawn
    structure.sync_with_slots(slots)
    seeds = structure.groups[0, "mlp"].parameters
    seeds.optimizer_state.steps[:] = torch.tensor([5.0, 9.0])
    weights = seeds.rows.clone()
    slots.style[2, 0] = STYLE["gate"]
    assert structure.sync_with_slots(slots)
    assert owners(structure)[0, "mlp"] == [0, 2]
    assert owners(structure)[0, GATE] == [2]
    assert [OPERATORS[operator] for operator in structure.operator[[0, 2], 0]] == ["add", "gate"]
    seeds = structure.groups[0, "mlp"].parameters
    assert torch.equal(seeds.rows, weights)
    assert seeds.optimizer_state.steps.tolist() == [5, 9]
    assert structure.groups[0, GATE].parameters.optimizer_state.steps.tolist() == [0], "a gate is new"
    slots.style[2, 0] = STYLE["multiply"]
    assert structure.sync_with_slots(slots)
    assert (0, GATE) not in structure.groups, "the gate is gone with its operator"
    assert OPERATORS[structure.operator[2, 0]] == "multiply"


def test_a_seed_that_left_its_slot_leaves_its_group(drawn):
    structure, slots = drawn
    structure.sync_with_slots(slots)
    slots.blueprint[0, 0] = slots.blueprint[1, 1] = -1
    assert structure.sync_with_slots(slots)
    assert owners(structure) == {(0, "mlp"): [2]}
    assert not structure.operator.any()


@pytest.mark.parametrize("slot_names", [("block",), ("stem", "head"), ("stem", "block", "head")])
def test_slots_are_the_first_segments(slot_names):
    with pytest.raises(ValueError, match="slots must be the first segments"):
        Structure(make_host, slot_names, torch.randn(2, 3), (1, 2))


def test_an_unknown_blueprint_index_is_refused(drawn):
    structure, _ = drawn
    with pytest.raises(ValueError, match="blueprint index must be below"):
        structure.new_seed(0, np.iinfo(np.int64).max, (0,))
