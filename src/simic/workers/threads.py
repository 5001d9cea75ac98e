"""How many threads torch uses while hosts are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_thread() -> Iterator[None]:
    """Use one torch thread, as worker processes do; the caller's number of threads is restored afterwards.

    One thread keeps the order of sums, so that results do not depend on the number of workers, and is fastest for
    many small operations.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
