"""Masks and what is made of them, by hand."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from helpers.facts import MIDDLE, make_facts, one_slot_in, random_facts, says
from torch import nn

from simic import (
    Action,
    GrowableModel,
    HeuristicConfig,
    HeuristicController,
    LifecycleConfig,
    Op,
    RandomController,
    Stage,
)
from simic.control.learned import row_masks
from simic.control.legality import Masks, flat_mask, legal_masks, replace_illegal
from simic.control.plan import Plan, PlanController
from simic.lifecycle.actions import HEAD_USED, HEADS, STYLES, Column
from simic.policy.network import GROWTH_TREE

GATED = [style.name for style in STYLES].index("gated")


def test_a_blueprint_that_does_not_fit_its_slot_by_hand():
    slot = np.zeros((3, len(Op), 2), dtype=bool)
    slot[:, Op.WAIT] = True
    slot[0, Op.GERMINATE] = [True, True]
    slot[1, Op.GERMINATE] = [True, False]
    masks = Masks(
        op=np.asarray(slot.any(2)), slot=slot, blueprint=np.array([[False, True, False], [False, False, True]])
    )
    heads = np.split(flat_mask(masks).astype(int), np.cumsum([6, 2, 3, 4, 3, 3, 4]), axis=1)
    assert heads[1].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert heads[2].tolist() == [[0, 1, 1], [0, 1, 0], [1, 0, 0]]
    assert heads[3].tolist() == [[1] * 4, [1] * 4, [1, 0, 0, 0]]  # style: germination alone uses it
    assert heads[6].tolist() == [[1, 0, 0, 0]] * 3  # alpha speed: no legal operation does
    # Each choice is in the mask of host 0, but blueprint 2 fits the other slot only.
    actions = np.array([[Op.GERMINATE, 0, 2, 3, 2, 2, 0, 0]] * 3)
    rows, illegal = replace_illegal(actions, masks)
    assert illegal.all()
    assert not rows.any()
    actions[:, 2] = 1
    rows, illegal = replace_illegal(actions, masks)
    assert illegal.tolist() == [False, False, True]
    assert np.array_equal(rows[:2], actions[:2])


def test_waiting_is_always_allowed():
    rng = np.random.default_rng(3)
    for decision in range(200):
        masks = legal_masks(random_facts(rng, decision))
        assert masks.op[:, Op.WAIT].all()
        np.testing.assert_array_equal(masks.op, masks.slot.any(2))


def test_no_room_no_germination():
    full = one_slot_in(Stage.FOSSILIZED)
    masks = legal_masks(make_facts(slots=full, lifecycle=LifecycleConfig(max_seeds=1)))
    assert not masks.op[0, Op.GERMINATE]
    assert legal_masks(make_facts(slots=full)).slot[0, Op.GERMINATE].tolist() == [False, True]


def test_blueprints_are_masked_by_topology():
    host = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 6), nn.Linear(6, 2))
    model = GrowableModel(host, ["0", "2"], example_input=torch.zeros(2, 1, 6, 6))
    facts = dataclasses.replace(
        make_facts(), blueprint_names=model.blueprint_names, blueprint_parameters=model.blueprint_table()
    )
    mask = legal_masks(facts).blueprint
    fits = [{name for name, ok in zip(model.blueprint_names, row, strict=True) if ok} for row in mask]
    assert fits[0] & fits[1] == {"norm", "low_rank"}
    assert fits[0] - fits[1] == {"squeeze_excite", "pointwise", "depthwise", "bottleneck", "conv", "conv_double"}
    widening = {"widen_small", "widen", "widen_large"}  # the convolution has no padding: nothing grows beside it
    assert fits[1] - fits[0] == {"mlp_small", "mlp", "mlp_large", "glu", *widening}
    for slot, row in zip(model.slot_names, mask, strict=True):
        for blueprint, ok in zip(model.blueprint_names, row, strict=True):
            if ok:
                own = copy.deepcopy(host)
                GrowableModel(own, ["0", "2"], example_input=torch.zeros(2, 1, 6, 6)).plant(slot, blueprint)
            else:
                with pytest.raises(ValueError, match="does not fit"):
                    model.execute(Action("germinate", slot, blueprint))


def _without_gates(facts):
    """The facts where a budget has no room for gates under any operation that has a style."""
    styles = np.ones((facts.num_hosts, len(Op), len(STYLES)), dtype=bool)
    styles[:, [Op.GERMINATE, Op.SET_ALPHA_TARGET], GATED] = False
    return dataclasses.replace(facts, legal_styles=styles)


def test_styles_that_do_not_fit_into_a_budget_are_not_chosen():
    rng, controller = np.random.default_rng(0), RandomController(0)
    drawn = set()
    for decision in range(60):
        facts = _without_gates(random_facts(rng, decision))
        actions = controller.act(facts)
        has_style = HEAD_USED[actions[:, Column.OP], Column.STYLE]
        drawn |= set(actions[has_style, Column.STYLE].tolist())
        assert not replace_illegal(actions, legal_masks(facts))[1].any()
    assert drawn == set(range(len(STYLES))) - {GATED}
    facts = _without_gates(make_facts())
    action = Action("germinate", 0, MIDDLE, style="gated").encode(facts.slot_names, facts.blueprint_names)
    assert replace_illegal(action[None], legal_masks(facts))[1].all()
    rows = row_masks(legal_masks(facts))
    style_rows = [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == "style"]
    assert not rows[:, style_rows, GATED].any()
    assert rows[:, style_rows, :GATED].all()


@pytest.mark.parametrize("style", ["gated", "linear-add"])
def test_rules_with_a_style_that_does_not_fit_into_a_budget_wait(style):
    controllers = (
        HeuristicController(HeuristicConfig(style=style, patience=1)),
        PlanController(Plan(first=0, max_seeds=2, style=style)),
    )
    for controller in controllers:
        facts = [_without_gates(make_facts(decision)) for decision in range(3)]
        ops = {str(says(controller, own).op) for own in facts}
        assert ops == ({"wait"} if style == "gated" else ops | {"germinate"})
