"""Charts: labels that do not overlap, colours that never repeat."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simic.dashboard.charts import colours, spread


@given(st.lists(st.floats(0, 1), max_size=12).map(sorted), st.sampled_from([1 / 16, 1 / 30]))
def test_names_are_spread_apart(positions, gap):
    places = spread(positions, gap)
    assert all(0 <= place <= 1 + 1e-9 for place in places)
    assert all(above - below > gap - 1e-9 for below, above in pairwise(places))
    if all(above - below >= gap for below, above in pairwise(positions)):
        assert places == pytest.approx(positions)


def test_colours_never_repeat():
    assert len(set(colours([str(i) for i in range(100)]).values())) == 100
