"""Masks and what is made of them, by hand."""

import numpy as np

from simic.control.legality import Masks, flat_mask, replace_illegal
from simic.lifecycle.actions import Op


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
