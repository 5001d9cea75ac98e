"""What workers on other machines send back: arrays and plain data, nothing that runs code."""

import pickle
from dataclasses import asdict, dataclass

import numpy as np
import pytest
from helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from simic.evaluation.measures import Fossil
from simic.workers.plain_data import array_bytes, from_plain, to_plain

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text().filter(lambda k: k[:1] != "$"), inner)
    ),
)


@given(plain)
def test_plain_data_stay_what_they_are(value):
    assert from_plain(to_plain(value)) == value


def test_a_record_of_episodes_arrives_as_it_was():
    record = tiny_run.make_record()
    sent = pickle.loads(pickle.dumps(to_plain(record)))
    assert all(type(leaf) in (np.ndarray, bool, int, float, str, type(None)) for leaf in _leaves(sent))
    assert tiny_run.same(asdict(from_plain(sent)), asdict(record))
    assert array_bytes(sent) == sum(leaf.nbytes for leaf in _leaves(sent) if isinstance(leaf, np.ndarray))


def test_named_tuples_arrive_as_they_were():
    fossil = Fossil(1, "mlp", "residual")
    assert from_plain(to_plain([fossil])) == [fossil]
    assert type(from_plain(to_plain(fossil))) is Fossil


def test_arrays_arrive_writable_and_independent():
    array = np.arange(3)
    array.flags.writeable = False
    received = from_plain(to_plain({"a": array}))["a"]
    received[0] = 7
    assert array.tolist() == [0, 1, 2]


@dataclass
class NotOfSimic:
    """A record of somebody else."""

    x: int = 0


@pytest.mark.parametrize("value", [NotOfSimic(), {1: 2}, {"a", "b"}, np.array([object()]), print])
def test_anything_else_is_not_sent(value):
    with pytest.raises(TypeError, match="sen"):
        to_plain([value])


@pytest.mark.parametrize(
    "value",
    [
        NotOfSimic(),
        print,
        {"$class": "os:system", "fields": {"command": "true"}},
        {"$class": "simic.cli:main", "fields": {}},
        {"$class": "simic.workers.signals:signal", "fields": {}},
        {"$class": "simic.workers.ray_worker:Path", "fields": {}},
        np.array([object()]),
    ],
)
def test_anything_else_is_not_accepted(value):
    with pytest.raises(TypeError, match="a worker sent back"):
        from_plain({"result": [value]})


def _leaves(value):
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key != "$class"]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
