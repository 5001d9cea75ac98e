"""Peak memory of this process and its workers."""

import multiprocessing
import sys

import pytest
from helpers import jobs

from simic.telemetry.memory import peak_memory

MEGABYTES = 64


def test_the_learner_alone():
    found = peak_memory()
    assert found.keys() == {"learner"}
    assert 5 < found["learner"] < 1e6


def test_the_peak_grows_with_what_was_held():
    before = peak_memory()["learner"]
    held = bytearray(b"x") * (int(before + MEGABYTES) << 20)
    del held
    assert peak_memory()["learner"] > before + MEGABYTES / 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_workers_are_added_up():
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    worker = context.Process(target=jobs.hold, args=(MEGABYTES, ready, done), daemon=True)
    worker.start()
    try:
        assert ready.wait(60)
        assert peak_memory()["workers"] > MEGABYTES
    finally:
        done.set()
        worker.join()
    assert "workers" not in peak_memory()
