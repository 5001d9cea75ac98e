"""Series: lossless, short, and bounded whatever a file says."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simic.telemetry.series import MAX_VALUES, SeriesReader, rounded, write_series

VALUES = st.none() | st.sampled_from(["", "a", "dormant"]) | st.floats(allow_nan=False, allow_infinity=False)


def test_repeated_values_are_counted():
    assert write_series(["a", "a", "a", "b", 0.1, 0.1, None]) == [["a", 3], "b", 0.1, 0.1, None]


@given(st.lists(VALUES, max_size=30))
def test_any_series_survives(values):
    assert SeriesReader().read(json.loads(json.dumps(write_series(values)))) == values


@pytest.mark.parametrize(
    "saved",
    [
        [["a", 10**12]],
        [["a", MAX_VALUES], "b"],
        [["a", -1]],
        [["a", True]],
        [["a"]],
        [True],
        [{}],
        [[[1], 2]],
        3,
        [1e999],
    ],
)
def test_other_values_are_refused(saved):
    with pytest.raises((ValueError, TypeError)):
        SeriesReader().read(saved)


def test_the_limit_holds_for_all_series_of_a_reader():
    reader = SeriesReader()
    reader.read([["a", MAX_VALUES - 1]])
    assert reader.read(["b"]) == ["b"]
    with pytest.raises(ValueError, match="room for 0"):
        reader.read(["c"])


def test_numbers_are_rounded_by_hand():
    assert rounded([1 / 3, 123456.0, -0.0, math.nan, math.inf]) == [0.3333, 123500.0, 0.0, None, None]
    assert str(rounded([-0.0])[0]) == "0.0"
