"""TrainingFlops: floating-point operations of training, counted by torch's FlopCounterMode.

Counted are multiplications and additions of matrix products and convolutions (a multiply-add is two) in the forward and
backward passes over the training samples: those of the host, and of every seed, with its gate, while its alpha is above
0 or it is in training. A seed in shadow training adds a second pass through the segments behind its slot. Not counted
are elementwise operations, normalisation, the optimizer, validation and ablations: for all controllers the same within
a few percent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simic.control.governor import Verdict
from simic.environment.episodes import EpisodeRecord
from simic.environment.host_trainings import HostTrainings
from simic.growth.blend import OPERATORS
from simic.growth.blueprints import BLUEPRINTS
from simic.growth.branch_layers import Gate
from simic.growth.isolation import preserved_rng
from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage


class TrainingFlops:
    """Operations of host epochs. The host and each kind of seed are counted once, on one sample."""

    def __init__(self, trainings: HostTrainings) -> None:
        self._hosts, self._task = trainings.hosts, trainings.task
        self._shadow = trainings.hosts.lifecycle.incubation == "shadow"
        self._samples = trainings.data.steps_per_host_epoch * trainings.data.batch_size
        x, y = self._task.data.train_x[:1], self._task.data.train_y[:1]
        network = nn.Sequential(*copy.deepcopy(self._hosts.segments))
        self.host = _count(lambda: self._task.loss(network(x), y).backward())
        """Operations per sample of the host without seeds."""
        self.seed = cache(self._seed)
        self.behind = cache(self._behind)

    def of_episodes(self, record: EpisodeRecord) -> np.ndarray:
        """Operations of every host (N,) until its episode ended."""
        per_state = self.of_host_epochs(record.slots)
        # A rollback removes live seeds after the host epoch, which was trained with the seeds of the state before.
        broken = record.verdict != Verdict.OK
        return (record.valid * np.where(broken, per_state[:-1], per_state[1:])).sum(0)

    def of_host_epochs(self, slots: SlotState) -> np.ndarray:
        """Operations (...) of one host epoch with these seeds (..., S)."""
        per_sample = np.full(slots.stage.shape[:-1], float(self.host))
        in_training = slots.stage == Stage.TRAINING
        for at in map(tuple, np.argwhere(slots.occupied & ((slots.alpha > 0) | in_training)).tolist()):
            host, slot = at[:-1], at[-1]
            operator = STYLES[slots.style[at]].operator
            per_sample[host] += self.seed(slot, self._hosts.blueprint_names[slots.blueprint[at]], operator)
            if self._shadow and in_training[at]:
                per_sample[host] += self.behind(slot)
        return self._samples * per_sample

    def _seed(self, slot: int, blueprint: str, operator: str) -> int:
        """Operations per sample of a seed of this kind in this slot."""
        site = self._hosts.sites[slot]
        with preserved_rng():
            branch = BLUEPRINTS[blueprint].build(site.shape)
            gate = Gate(site.shape) if operator == "gate" else None
        reads = BLUEPRINTS[blueprint].reads
        h = torch.zeros(1, *site.example_shape[1:], requires_grad=True)
        read = h if reads == "output" else torch.zeros(1, *site.read_shape(reads)[1:], requires_grad=True)
        blend = OPERATORS[operator]
        return _count(lambda: blend(h, branch(read), 1.0, gate(h) if gate else None).sum().backward())

    def _behind(self, slot: int) -> int:
        """Operations per sample of a pass from this slot to the loss and back, without gradients of the weights."""
        behind = self._hosts.segments[self._hosts.structure.segment_of(slot) + 1 :]
        rest = nn.Sequential(*copy.deepcopy(behind)).requires_grad_(False)
        h = torch.zeros(1, *self._hosts.sites[slot].example_shape[1:], requires_grad=True)
        return _count(lambda: self._task.loss(rest(h), self._task.data.train_y[:1]).backward())


def _count(passes: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        passes()
    return counter.get_total_flops()
