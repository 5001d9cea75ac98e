"""Jobs that run in this process."""

import os

import pytest
from helpers import jobs

from simic.workers.in_process import InProcessPool


def test_jobs_run_in_this_process_and_in_order():
    pool = InProcessPool(jobs.power)
    assert pool.run(3, [2, 0, 1]) == [(9, os.getpid()), (1, os.getpid()), (3, os.getpid())]
    assert list(pool.stream(2, [5, 6])) == [(0, (32, os.getpid())), (1, (64, os.getpid()))]
    assert pool.faults == []
    pool.close()


def test_an_exception_is_the_job_s_own():
    with pytest.raises(KeyError, match="the bug"):
        InProcessPool(jobs.fail).run(None, [0, 1])
