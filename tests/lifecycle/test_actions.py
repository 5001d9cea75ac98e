"""Actions: the one causal table, words to indices and back, and errors that help."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simic.lifecycle.actions import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    HEAD_USED,
    HEAD_VALUES,
    HEADS,
    HEADS_USED_BY,
    STYLES,
    TEMPOS,
    Action,
    Op,
)
from simic.lifecycle.ramps import CURVES

SLOTS = ("stem", "block1", "block2")
BLUEPRINTS = ("norm", "low_rank", "mlp", "mlp_large")
OPS = [str(op) for op in Op]

# Heads in order: op, slot, blueprint, style, tempo, alpha_target, alpha_speed, alpha_curve.
CAUSAL_TABLE = {
    "wait": "1.......",
    "germinate": "111111..",
    "set_alpha_target": "11.1.111",
    "prune": "11....11",
    "fossilize": "11......",
    "advance": "11......",
}


def actions() -> st.SearchStrategy[Action]:
    """Actions of any operation, with any words in all heads."""
    return st.builds(
        Action,
        op=st.sampled_from(OPS),
        slot=st.sampled_from(SLOTS),
        blueprint=st.sampled_from(BLUEPRINTS),
        style=st.sampled_from([style.name for style in STYLES]),
        tempo=st.sampled_from(TEMPOS),
        alpha_target=st.sampled_from(ALPHA_TARGETS),
        alpha_speed=st.sampled_from(ALPHA_SPEEDS),
        alpha_curve=st.sampled_from(CURVES),
    )


def test_the_causal_table_has_the_row_of_every_operation():
    assert HEADS_USED_BY.keys() == set(Op)
    assert [str(op) for op in Op] == list(CAUSAL_TABLE)
    expected = [[mark == "1" for mark in row] for row in CAUSAL_TABLE.values()]
    np.testing.assert_array_equal(HEAD_USED, expected)


def test_every_head_of_fixed_size_has_its_values():
    sizes = {head: len(values) for head, values in HEAD_VALUES.items()}
    assert sizes == {"op": 6, "style": 4, "tempo": 3, "alpha_target": 3, "alpha_speed": 4, "alpha_curve": 5}
    assert set(HEADS) - set(sizes) == {"slot", "blueprint"}


@given(actions())
def test_what_matters_survives_encoding(action):
    decoded = Action.decode(action.encode(SLOTS, BLUEPRINTS), SLOTS, BLUEPRINTS)
    default = Action()
    for head, mark in zip(HEADS, CAUSAL_TABLE[action.op], strict=True):
        kept = action if mark == "1" else default
        assert getattr(decoded, head) == getattr(kept, head)


@given(actions())
def test_a_row_survives_decoding(action):
    row = action.encode(SLOTS, BLUEPRINTS)
    assert row.dtype == np.int64
    np.testing.assert_array_equal(Action.decode(row, SLOTS, BLUEPRINTS).encode(SLOTS, BLUEPRINTS), row)


@given(actions())
def test_heads_that_do_not_matter_are_zero_in_the_row_and_absent_from_the_text(action):
    row, text = action.encode(SLOTS, BLUEPRINTS), str(action)
    for index, (head, mark) in enumerate(zip(HEADS, CAUSAL_TABLE[action.op], strict=True)):
        if mark != "1":
            assert row[index] == 0
            assert f"{head}=" not in text


def test_a_row_by_hand():
    action = Action("germinate", "block2", "mlp", style="gated", tempo=8, alpha_target=0.7)
    assert action.encode(SLOTS, BLUEPRINTS).tolist() == [1, 2, 2, 3, 2, 1, 0, 0]
    action = Action("set_alpha_target", "block1", alpha_target=0.5, alpha_speed=5, alpha_curve="sigmoid-24")
    assert action.encode(SLOTS, BLUEPRINTS).tolist() == [2, 1, 0, 0, 0, 0, 2, 4]


@pytest.mark.parametrize("one", [1, np.int64(1)], ids=["int", "numpy"])
def test_slot_and_blueprint_may_be_given_by_index(one):
    by_index = Action("germinate", one, one).encode(SLOTS, BLUEPRINTS)
    by_name = Action("germinate", "block1", "low_rank").encode(SLOTS, BLUEPRINTS)
    np.testing.assert_array_equal(by_index, by_name)


def test_text_names_the_heads_that_matter():
    assert str(Action("prune", "stem", alpha_speed=3)) == "prune slot=stem alpha_speed=3 alpha_curve=linear"
    assert str(Action()) == "wait"


@pytest.mark.parametrize(
    ("wrong", "rule", "hint"),
    [
        ({"op": "germinat"}, "op must be one of wait, germinate", "did you mean germinate"),
        ({"slot": "block"}, "slot must be one of stem, block1, block2, got 'block'", "block1|block2"),
        ({"blueprint": "mlp_larg"}, "blueprint must be one of norm", "mlp_large"),
        ({"style": "linear"}, "style must be one of linear-add", "did you mean linear-add"),
        ({"tempo": 4}, "tempo must be one of 3, 5, 8, got 4", ""),
        ({"alpha_target": 0.6}, "alpha_target must be one of 0.5, 0.7, 1.0, got 0.6", "did you mean 0.7 or 0.5"),
        ({"slot": 3}, "slot must be one of", ""),
        ({"slot": -1}, "slot must be one of", ""),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_wrong_word_is_refused_with_the_rule_and_close_matches(wrong, rule, hint):
    with pytest.raises(ValueError, match=rule) as error:
        Action(**({"op": "germinate"} | wrong)).encode(SLOTS, BLUEPRINTS)
    assert error.match(hint)
    assert ("did you mean" in str(error.value)) == bool(hint)


def test_the_text_of_an_unknown_operation_is_refused_likewise():
    with pytest.raises(ValueError, match=r"op must be one of wait, germinate, .*, got 'prun'; did you mean prune"):
        str(Action("prun"))


def test_a_wrong_word_in_a_head_that_does_not_matter_is_ignored():
    assert Action("wait", slot="nowhere", tempo=99).encode(SLOTS, BLUEPRINTS).tolist() == [0] * 8
