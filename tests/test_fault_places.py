"""The functions that the slow fault tests interrupt exist under their names."""

import pytest
from helpers.fault_places import (
    CHECKPOINT_PLACES,
    COLLECT_PLACE,
    FINALIZER_PLACE,
    KILL_PLACES,
    STOP_PLACES,
    find_place,
)

PLACES = {place for place, *_ in (*KILL_PLACES, *CHECKPOINT_PLACES, *STOP_PLACES.values())}


@pytest.mark.parametrize("place", sorted(PLACES | {COLLECT_PLACE, FINALIZER_PLACE}))
def test_the_place_exists(place):
    owner, name = find_place(place)
    assert callable(getattr(owner, name))
