"""Which device a worker uses: several of a kind are shared out, by the number of the worker."""

import pytest
import torch
from helpers import jobs

from simic.workers import devices
from simic.workers.devices import own_device, set_worker_number
from simic.workers.local_processes import LocalProcessPool


@pytest.fixture(autouse=True)
def worker_zero():
    yield
    set_worker_number(0)


@pytest.mark.parametrize(("number", "expected"), [(0, "cuda:0"), (1, "cuda:1"), (2, "cuda:0")])
def test_workers_share_out_the_devices(number, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    set_worker_number(number)
    assert own_device("cuda") == torch.device(expected)


def test_a_single_device_needs_no_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    set_worker_number(3)
    assert own_device("cuda") == torch.device("cuda")
    assert own_device("cpu") == torch.device("cpu")


@pytest.mark.slow
def test_every_worker_has_its_own_number():
    pool = LocalProcessPool(jobs.worker_number, 2)
    try:
        found = {number for number, _ in pool.run(None, range(8))}
    finally:
        pool.close()
    assert found == {0, 1}
    assert devices._worker_number == 0
