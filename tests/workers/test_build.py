"""Which backend runs the jobs."""

import pytest
from helpers import jobs

from simic.workers import build
from simic.workers.build import make_pool
from simic.workers.in_process import InProcessPool
from simic.workers.local_processes import LocalProcessPool


def test_the_number_of_workers_selects_the_backend():
    assert isinstance(make_pool(jobs.power), InProcessPool)
    pool = make_pool(jobs.power, workers=3)
    assert isinstance(pool, LocalProcessPool)
    assert pool.num_workers == 3


def test_negative_workers_and_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="workers must not be negative, got -1"):
        make_pool(jobs.power, workers=-1)
    with pytest.raises(ValueError, match="one of in_process, local_processes, got 'cloud'"):
        make_pool(jobs.power, backend="cloud")


def test_a_backend_is_one_entry_in_the_table(monkeypatch):
    monkeypatch.setitem(build.BACKENDS, "reverse", lambda function, workers: Reverse(function))
    assert make_pool(jobs.add, backend="reverse").run(10, [1, 2, 3]) == [11, 12, 13]


class Reverse(InProcessPool):
    """Finishes the last job first."""

    def stream(self, common, jobs):
        return ((index, self.function(common, jobs[index])) for index in reversed(range(len(jobs))))
