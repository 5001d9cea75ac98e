"""Snapshots of the weights, batch statistics and optimizer state of N stacked hosts, saved and restored host by host.

Shapes: N hosts, R seeds of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from simic.lifecycle.slots import remove
from simic.lifecycle.stages import Stage
from simic.stacked.hosts import StackedHosts
from simic.stacked.seed_groups import GroupKey, SeedGroup


@dataclass
class _Rows:
    """Copies of the seeds of one group."""

    hosts: np.ndarray  # (R,) the host of each row
    tensors: list[Tensor]  # (R, ...) weights and optimizer state


class Snapshot:
    """The last good weights and optimizer state of N hosts and their seeds; written in place, so memory stays flat."""

    def __init__(self, hosts: StackedHosts) -> None:
        self._hosts = [tensor.clone() for tensor in _host_tensors(hosts)]
        self._seeds: dict[GroupKey, _Rows] = {}
        self.save(hosts, np.ones(hosts.num_hosts, dtype=bool))

    def save(self, hosts: StackedHosts, which: np.ndarray) -> None:
        """Replace the snapshot of the hosts `which`, a mask (N,).

        Live seeds are saved too: one that is fossilized before the next snapshot then has weights to return to.
        """
        _copy(self._hosts, _host_tensors(hosts), which)
        for key in [*self._seeds, *(key for key in hosts.groups if key not in self._seeds)]:
            self._save_seeds(key, hosts.groups.get(key), which)

    def restore(self, hosts: StackedHosts, which: np.ndarray) -> None:
        """Restore the hosts `which`, a mask (N,): their weights come back, live seeds are pruned, fossils stay.

        The parameters of a fossil younger than the snapshot become zero, which makes it the identity.
        """
        if not which.any():
            return
        _copy(_host_tensors(hosts), self._hosts, which)
        remove(hosts.slot_state, np.nonzero(hosts.slot_state.live & which[:, None]))
        hosts.sync_with_slots()
        for key, group in hosts.groups.items():
            mine = np.flatnonzero(which[group.hosts])
            owners, saved = group.hosts[mine], self._seeds.get(key)
            assert (hosts.slot_state.stage[owners, group.slot] == Stage.FOSSILIZED).all(), "a live seed survived"
            tensors = group.parameters.tensors()
            rows = _on_device(mine, tensors)
            for tensor in tensors:
                tensor[rows] = 0
            if saved is not None:
                _, to, source = np.intersect1d(owners, saved.hosts, return_indices=True)
                to, source = _on_device(mine[to], tensors), _on_device(source, tensors)
                for tensor, good in zip(tensors, saved.tensors, strict=True):
                    tensor[to] = good[source]

    def copy_hosts(self, origin: Snapshot, sources: np.ndarray, targets: np.ndarray) -> None:
        """Make the snapshots of the hosts `targets` (M,) those of the hosts `sources` of `origin`."""
        rows, own = _on_device(sources, self._hosts), _on_device(targets, self._hosts)
        for tensor, other in zip(self._hosts, origin._hosts, strict=True):
            tensor[own] = other[rows]
        given = dict(origin._seeds)
        for key in list(self._seeds | given):
            pieces: list[_Rows] = []
            if (saved := self._seeds.pop(key, None)) is not None:
                pieces.append(_select(saved.hosts, saved.tensors, np.flatnonzero(~np.isin(saved.hosts, targets))))
            if (saved := given.get(key)) is not None:
                chosen, at = np.nonzero(sources[:, None] == saved.hosts)
                pieces.append(_Rows(targets[chosen], _select(saved.hosts, saved.tensors, at).tensors))
            self._keep(key, pieces)

    def _save_seeds(self, key: GroupKey, group: SeedGroup | None, which: np.ndarray) -> None:
        saved = self._seeds.get(key)
        if saved is not None and group is not None and np.array_equal(saved.hosts, group.hosts):
            _copy(saved.tensors, group.parameters.tensors(), which[group.hosts])
            return
        # The group has changed: rows of other hosts stay as they were saved, rows of `which` come from the group.
        pieces: list[_Rows] = []
        if saved is not None:
            pieces.append(_select(saved.hosts, saved.tensors, np.flatnonzero(~which[saved.hosts])))
        if group is not None:
            pieces.append(_select(group.hosts, group.parameters.tensors(), np.flatnonzero(which[group.hosts])))
        self._keep(key, pieces)

    def _keep(self, key: GroupKey, pieces: list[_Rows]) -> None:
        """Save the seeds of a group as the rows of several pieces, or none if these are empty."""
        owners = np.concatenate([piece.hosts for piece in pieces])
        self._seeds.pop(key, None)
        if owners.size:
            columns = zip(*(piece.tensors for piece in pieces), strict=True)
            self._seeds[key] = _Rows(owners, [torch.cat(column) for column in columns])


def _host_tensors(hosts: StackedHosts) -> list[Tensor]:
    return [*hosts.hosts.tensors(), *(hosts.loss_scale.tensors() if hosts.loss_scale is not None else ())]


def _on_device(rows: np.ndarray, tensors: list[Tensor]) -> Tensor:
    return torch.from_numpy(rows).to(tensors[0].device)


def _copy(to: list[Tensor], source: list[Tensor], which: np.ndarray) -> None:
    """Copy the rows of a mask, in place."""
    rows = None if which.all() else _on_device(np.flatnonzero(which), to)
    for old, new in zip(to, source, strict=True):
        if rows is None:
            old.copy_(new)
        else:
            old[rows] = new[rows]


def _select(hosts: np.ndarray, tensors: list[Tensor], rows: np.ndarray) -> _Rows:
    chosen = _on_device(rows, tensors)
    return _Rows(hosts[rows], [tensor[chosen] for tensor in tensors])
