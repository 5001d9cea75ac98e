"""Which backend runs the jobs."""

import importlib.util
import re
from typing import Any

import pytest
from helpers import jobs

from simic.workers import build
from simic.workers.build import make_pool
from simic.workers.in_process import InProcessPool
from simic.workers.local_processes import LocalProcessPool
from simic.workers.placement import Placement


def test_the_number_of_workers_selects_the_backend():
    assert isinstance(make_pool(jobs.power), InProcessPool)
    assert isinstance(make_pool(jobs.power, Placement(workers=0)), InProcessPool)
    for workers, started in ((3, 3), (None, 2)):
        pool = make_pool(jobs.power, Placement(workers=workers))
        assert isinstance(pool, LocalProcessPool)
        assert pool.num_workers == started


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": -1}, "workers must not be negative, got -1"),
        ({"backend": "ray", "workers": 0}, "at least one worker, got workers = 0"),
        ({"backend": "ray", "address": "10.0.0.1"}, "auto or HOST:PORT, such as 10.0.0.1:6379, got '10.0.0.1'"),
        ({"backend": "ray", "address": "ray://10.0.0.1:10001"}, "auto or HOST:PORT"),
        ({"gpus_per_worker": -0.5}, "gpus_per_worker must not be negative, got -0.5"),
        ({"backend": "cloud"}, "one of local, ray, got 'cloud'"),
    ],
)
def test_a_placement_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_pool(jobs.power, Placement(**settings))


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'simic-rl[cluster]'")):
        make_pool(jobs.power, Placement(backend="ray"))


def test_a_backend_is_one_entry_in_the_table(monkeypatch):
    monkeypatch.setitem(build.BACKENDS, "reverse", lambda function, placement, check: Reverse(function))
    backend: Any = "reverse"
    assert make_pool(jobs.add, Placement(backend=backend)).run(10, [1, 2, 3]) == [11, 12, 13]


class Reverse(InProcessPool):
    """Finishes the last job first."""

    def stream(self, common, jobs):
        return ((index, self.function(common, jobs[index])) for index in reversed(range(len(jobs))))
