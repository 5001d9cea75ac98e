"""Which stage may follow which, and which settings are refused."""

import math

import pytest

from simic.lifecycle.stages import NEXT, LifecycleConfig

EDGES = {
    "dormant": "germinated",
    "germinated": "training blending pruned",
    "training": "blending pruned",
    "blending": "holding pruned",
    "holding": "blending fossilized pruned",
    "fossilized": "",
    "pruned": "embargoed",
    "embargoed": "resetting",
    "resetting": "dormant",
}


def test_the_transition_table_is_as_drawn():
    assert {str(old): {str(new) for new in following} for old, following in NEXT.items()} == {
        old: set(following.split()) for old, following in EDGES.items()
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"incubation": "direkt"}, "incubation must be one of direct, shadow, straight_through, got 'direkt'"),
        ({"max_seeds": 0}, "max_seeds must be at least 1 or None, got 0"),
        ({"embargo_decisions": -1}, "embargo_decisions must not be negative, got -1"),
        ({"min_gradient_norm": -1.0}, "min_gradient_norm must not be negative"),
        ({"min_gradient_norm": math.nan}, "min_gradient_norm must be finite, got nan"),
        ({"max_seeds": 1.5}, "max_seeds must be an integer, got 1.5"),
        ({"embargo_decisions": 1.5}, "embargo_decisions must be an integer, got 1.5"),
    ],
)
def test_wrong_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        LifecycleConfig(**wrong)
