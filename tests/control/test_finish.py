"""FinishController: seeds that are worth their parameters become fossils, the others leave."""

import numpy as np
import pytest
from helpers.facts import make_facts, one_slot_in, says

from simic.control.finish import FinishController
from simic.lifecycle.stages import Stage


@pytest.mark.parametrize(
    ("contribution", "op"),
    [
        # A seed of 100 parameters doubles the host of 100: its rent is one point, 0.01 of accuracy.
        (0.011, "fossilize"),
        (0.009, "prune"),
        (-0.5, "prune"),
    ],
)
def test_a_held_seed_is_kept_if_it_earns_its_rent(contribution, op):
    facts = make_facts(slots=one_slot_in(Stage.HOLDING, contribution=contribution, alpha=1.0))
    facts.seed_parameters[0, 0] = 100
    action = says(FinishController(), facts)
    assert (action.op, action.slot) == (op, "a")


def test_it_advances_but_plants_nothing():
    facts = make_facts(slots=one_slot_in(Stage.BLENDING, slot=1, alpha=1.0))
    assert (says(FinishController(), facts).op, says(FinishController(), facts).slot) == ("advance", "b")
    assert not FinishController().act(make_facts(num_hosts=2)).any()


def test_hosts_are_judged_one_by_one():
    facts = make_facts(slots=one_slot_in(Stage.HOLDING, slot=slice(None), contribution=np.array([0.5, -0.5])))
    action = says(FinishController(), facts)
    assert (action.op, action.slot) == ("prune", "b")
