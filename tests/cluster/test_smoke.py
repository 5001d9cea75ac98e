"""The Ray backend with one worker: quick enough for the fast tier, where Ray is installed."""

import os
from importlib.util import find_spec

import pytest
from helpers import jobs

from simic.workers.build import make_pool
from simic.workers.placement import Placement


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_local_ray_of_one_worker_runs_jobs():
    pool = make_pool(jobs.power, Placement(backend="ray", workers=1))
    try:
        (facts,) = pool.start().values()
        assert (facts["cpus"], pool.warning()) == (1, None)
        first, second = pool.run(2, range(5)), pool.run(3, range(2))
        assert ([result for result, _ in first], [result for result, _ in second]) == ([1, 2, 4, 8, 16], [1, 3])
        (pid,) = {pid for _, pid in first + second}
        assert pid != os.getpid()
        assert str(pool.status()) == ""  # one node in good order is not worth a word
        assert pool.faults == []
    finally:
        pool.close()
