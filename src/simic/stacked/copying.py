"""Exact copies of stacked hosts: the same future as their sources, if they get the same batches and actions.

Shapes: M hosts are copied. Sources and targets may lie in the same stack or in two stacks of one task; targets differ
from each other, sources need not:

    sources     0  0  2        of `origin`
    targets     4  5  0        of `hosts`: 4 and 5 become host 0, and 0 becomes host 2 as it was before
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from simic.stacked.hosts import StackedHosts


def copy_hosts(hosts: StackedHosts, origin: StackedHosts, sources: np.ndarray, targets: np.ndarray) -> None:
    """Make `targets` (M,) of `hosts` copies of `sources` (M,) of `origin`; between host epochs only."""
    hosts.structure.copy_hosts(origin.structure, sources, targets)
    arrays = [(getattr(hosts.slot_state, f.name), getattr(origin.slot_state, f.name)) for f in fields(hosts.slot_state)]
    arrays += [(getattr(hosts, name), getattr(origin, name)) for name in _PER_HOST]
    for own, other in arrays:
        own[targets] = other[sources]
    if hosts.loss_scale is not None and origin.loss_scale is not None:
        to, rows = hosts.index(targets), hosts.index(sources)
        for tensor, other in zip(hosts.loss_scale.tensors(), origin.loss_scale.tensors(), strict=True):
            tensor[to] = other[rows]
    hosts.sync_with_slots()


_PER_HOST = ("rng_seeds", "germinations", "host_gradient_norm")
