"""The governor: notices hosts that break, and gives them their last good weights back.

Shapes: N hosts; W remembered decisions; R rows of seeds. Losses are (N,), one per decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from simic.environment.config import GovernorConfig
from simic.growth.choir import SeedGroup
from simic.growth.matrix import ParameterMatrix
from simic.growth.stacked import StackedHosts
from simic.lifecycle import Stage
from simic.slots import remove


class Verdict(IntEnum):
    """What the governor says of a host."""

    OK = 0
    NOT_FINITE = 1
    COLLAPSED = 2
    DIVERGED = 3

    def __str__(self) -> str:
        return self.name.lower()


class Governor:
    """Judges N hosts by their losses; a host that breaks is reported once, until its next episode."""

    def __init__(self, num_hosts: int, config: GovernorConfig | None = None) -> None:
        self.config = config or GovernorConfig()
        self._history = np.full((2, num_hosts, self.config.window), np.nan)  # validation, training; the newest last
        self._best = np.full(num_hosts, np.inf)  # lowest median validation loss of the episode
        self._suspicions = np.zeros(num_hosts, dtype=np.int64)  # decisions in a row
        self._broken = np.zeros(num_hosts, dtype=bool)

    @property
    def trusted(self) -> np.ndarray:
        """Hosts neither broken nor under suspicion (N,): those whose weights are worth a snapshot."""
        return ~self._broken & (self._suspicions == 0)

    def reset(self, hosts: np.ndarray) -> None:
        """Forget some hosts (indices, or a mask): their episode begins, or a seed left them on purpose."""
        self._history[:, hosts] = np.nan
        self._best[hosts] = np.inf
        self._suspicions[hosts] = 0
        self._broken[hosts] = False

    def judge(self, val_loss: np.ndarray, train_loss: np.ndarray, random_guess_loss: np.ndarray) -> np.ndarray:
        """One verdict per host (N,), as the codes of `Verdict`."""
        losses = np.stack(self._checked(val_loss, train_loss, random_guess_loss))  # (2, N)
        finite = np.isfinite(losses).all(0)
        losses = np.where(finite, losses, np.inf)
        history = np.where(np.isnan(self._history), random_guess_loss[:, None], self._history)
        median = np.median(history, axis=-1)  # (2, N)
        self._best = np.minimum(self._best, median[0])
        diverged = (losses > self._limit(history, median, random_guess_loss)).all(0)
        had_learned = self._best < self.config.learned_share * random_guess_loss
        collapsed = had_learned & (losses.min(0) >= self.config.collapsed_share * random_guess_loss)
        # The two overlap; far beyond random guessing it is not a collapse.
        beyond = losses[0] > (1 + self.config.relative_rise) * random_guess_loss
        symptom = np.select(
            [~finite, diverged & beyond, collapsed, diverged],
            [Verdict.NOT_FINITE, Verdict.DIVERGED, Verdict.COLLAPSED, Verdict.DIVERGED],
            Verdict.OK,
        )
        healthy = symptom == Verdict.OK
        # What is under suspicion must not become the norm.
        moved = np.concatenate([self._history[..., 1:], losses[..., None]], axis=-1)
        self._history = np.where(healthy[:, None], moved, self._history)
        self._suspicions = np.where(healthy, 0, self._suspicions + 1)
        panics = ~self._broken & (~finite | (self._suspicions >= self.config.patience))
        self._broken |= panics
        return np.where(panics, symptom, Verdict.OK)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that is remembered, as copies."""
        return {name: getattr(self, f"_{name}").copy() for name in _STATE}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """The inverse of `state_dict`; a state of other hosts or another window raises and changes nothing."""
        own = {name: array.shape for name, array in self.state_dict().items()}
        given = {name: np.shape(array) for name, array in state.items()}
        if own != given:
            raise ValueError(f"the governor's state must have the shapes {own}, got {given}: use the same num_hosts")
        for name in _STATE:
            setattr(self, f"_{name}", np.array(state[name], dtype=getattr(self, f"_{name}").dtype))

    def _checked(self, *losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shapes = [np.shape(loss) for loss in losses]
        if set(shapes) != {self._best.shape}:
            raise ValueError(f"losses must have one value for each of {len(self._best)} hosts, got shapes {shapes}")
        if not (np.isfinite(losses[2]) & (losses[2] > 0)).all():
            raise ValueError(f"random_guess_loss must be positive and finite: the task states it, got {losses[2]}")
        return losses[0], losses[1]

    def _limit(self, history: np.ndarray, median: np.ndarray, random_guess_loss: np.ndarray) -> np.ndarray:
        """The losses (2, N) above which a host seems to diverge."""
        deviation = np.median(np.abs(history - median[..., None]), axis=-1)
        rises = (
            self.config.deviations * deviation,
            self.config.relative_rise * median,
            np.broadcast_to(self.config.absolute_rise * random_guess_loss, median.shape),
        )
        return median + np.maximum.reduce(rises)


_STATE = ("history", "best", "suspicions", "broken")


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
        remove(hosts.life, np.nonzero(hosts.life.live & which[:, None]))
        hosts.follow_life()
        for key, group in hosts.groups.items():
            mine = np.flatnonzero(which[group.hosts])
            owners, saved = group.hosts[mine], self._seeds.get(key)
            assert (hosts.life.stage[owners, group.slot] == Stage.FOSSILIZED).all(), "a live seed survived"
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


def _tensors(matrices: Iterable[ParameterMatrix]) -> list[Tensor]:
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
