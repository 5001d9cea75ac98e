"""Keywords that integrations pass on."""

import pytest

from simic.integrations.settings import split_settings


def test_a_log_goes_to_the_scheduler():
    model, scheduler = split_settings("attach", {"log": "runs/own", "rng_seed": 3, "max_growth": 2.0})
    assert model == {"rng_seed": 3, "max_growth": 2.0}
    assert scheduler == {"log": "runs/own", "rng_seed": 3}


def test_what_neither_knows_is_refused():
    with pytest.raises(TypeError, match=r"GrowthCallback has no setting logs; those passed on are .*log.*"):
        split_settings("GrowthCallback", {"logs": "runs/own"})
