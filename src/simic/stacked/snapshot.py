"""The last good weights of N stacked hosts: kept in place, and given back where the governor says so.

Shapes: N hosts; R rows of seeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from simic.lifecycle.slots import remove
from simic.lifecycle.stages import Stage
from simic.stacked.hosts import StackedHosts
from simic.stacked.parameters import StackedParameters
from simic.stacked.seed_groups import SeedGroup


@dataclass
class _Rows:
    """Copies of seeds of one group."""

    hosts: np.ndarray  # (R,) whose they are
    tensors: list[Tensor]  # (R, ...) weights and moments of each part


class Snapshot:
    """The last good weights of N hosts and of their seeds, with what the optimizer remembers; written in place."""

    def __init__(self, hosts: StackedHosts) -> None:
        self._hosts = [tensor.clone() for tensor in _tensors([hosts.hosts])]
        self._seeds: dict[tuple[int, str, str], _Rows] = {}
        self.save(hosts, np.ones(hosts.num_hosts, dtype=bool))

    def save(self, hosts: StackedHosts, which: np.ndarray) -> None:
        """Take the state of some hosts (mask (N,)) as good; what was known of their seeds is dropped.

        Live seeds are kept too: one that is fossilised before the next snapshot then has weights to return to.
        """
        _copy(self._hosts, _tensors([hosts.hosts]), which)
        for key in [*self._seeds, *(key for key in hosts.groups if key not in self._seeds)]:
            self._save_seeds(key, hosts.groups.get(key), which)

    def restore(self, hosts: StackedHosts, which: np.ndarray) -> None:
        """Give some hosts (mask (N,)) their last good weights back, prune their live seeds, keep their fossils.

        A fossil that is younger than the snapshot becomes the identity that it was born as.
        """
        if not which.any():
            return
        _copy(_tensors([hosts.hosts]), self._hosts, which)
        remove(hosts.slot_state, np.nonzero(hosts.slot_state.live & which[:, None]))
        hosts.sync_with_slots()
        for key, group in hosts.groups.items():
            mine = np.flatnonzero(which[group.hosts])
            owners, saved = group.hosts[mine], self._seeds.get(key)
            assert (hosts.slot_state.stage[owners, group.slot] == Stage.FOSSILIZED).all(), "a live seed survived"
            tensors = _tensors(group.matrices.values())
            for tensor in tensors:
                tensor[torch.from_numpy(mine)] = 0
            if saved is not None:
                _, to, source = np.intersect1d(owners, saved.hosts, return_indices=True)
                for tensor, good in zip(tensors, saved.tensors, strict=True):
                    tensor[torch.from_numpy(mine[to])] = good[torch.from_numpy(source)]

    def _save_seeds(self, key: tuple[int, str, str], group: SeedGroup | None, which: np.ndarray) -> None:
        saved = self._seeds.get(key)
        if saved is not None and group is not None and np.array_equal(saved.hosts, group.hosts):
            _copy(saved.tensors, _tensors(group.matrices.values()), which[group.hosts])
            return
        pieces: list[_Rows] = []
        if saved is not None:
            pieces.append(_select(saved.hosts, saved.tensors, ~which[saved.hosts]))
        if group is not None:
            pieces.append(_select(group.hosts, _tensors(group.matrices.values()), which[group.hosts]))
        owners = np.concatenate([piece.hosts for piece in pieces])
        self._seeds.pop(key, None)
        if owners.size:
            columns = zip(*(piece.tensors for piece in pieces), strict=True)
            self._seeds[key] = _Rows(owners, [torch.cat(column) for column in columns])


def _tensors(matrices: Iterable[StackedParameters]) -> list[Tensor]:
    """Weights and moments, each with one row per owner."""
    return [tensor for matrix in matrices for tensor in (matrix.rows, *matrix.moments.tensors())]


def _copy(to: list[Tensor], source: list[Tensor], which: np.ndarray) -> None:
    """Copy the rows that the mask names, in place."""
    rows = None if which.all() else torch.from_numpy(np.flatnonzero(which))
    for old, new in zip(to, source, strict=True):
        if rows is None:
            old.copy_(new)
        else:
            old[rows] = new[rows]


def _select(hosts: np.ndarray, tensors: list[Tensor], chosen: np.ndarray) -> _Rows:
    rows = torch.from_numpy(np.flatnonzero(chosen))
    return _Rows(hosts[chosen], [tensor[rows] for tensor in tensors])
