"""TrainingFlops: the floating-point operations of training, counted by torch, not estimated.

What is counted: multiplications and additions of matrix products and convolutions (a multiply-add is two), in the
forward and backward passes over the training samples of a host: its segments, and every seed while it speaks or is in
training, fossils included, with its gate. A seed in shadow training also pays its second pass through the segments
behind its slot. Not counted: elementwise operations, norms, the optimizer, validation and the measuring of
contributions, which are the same work for every contestant but for a few percent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simic.environment.host_trainings import HostTrainings
from simic.growth.blend import OPERATORS
from simic.growth.blueprints import BLUEPRINTS, Gate
from simic.growth.isolation import preserved_rng
from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage


class TrainingFlops:
    """What one host epoch of each host costs. Host and kinds of seeds are counted once each, on one sample."""

    def __init__(self, trainings: HostTrainings) -> None:
        self._hosts, self._task = trainings.hosts, trainings.task
        self._shadow = trainings.hosts.lifecycle.incubation == "shadow"
        self._samples = trainings.data.steps_per_host_epoch * trainings.data.batch_size
        x, y = self._task.data.train_x[:1], self._task.data.train_y[:1]
        network = nn.Sequential(*copy.deepcopy(self._hosts.segments))
        self.host = _count(lambda: self._task.loss(network(x), y).backward())
        """Per sample, without seeds."""
        self.seed = cache(self._seed)
        self.behind = cache(self._behind)

    def of_host_epoch(self, slots: SlotState) -> np.ndarray:
        """Operations of every host (N,) in a host epoch with these seeds."""
        per_sample = np.full(len(slots.stage), float(self.host))
        in_training = slots.stage == Stage.TRAINING
        for host, slot in np.argwhere(slots.occupied & ((slots.alpha > 0) | in_training)).tolist():
            blueprint = self._hosts.blueprint_names[slots.blueprint[host, slot]]
            per_sample[host] += self.seed(slot, blueprint, STYLES[slots.style[host, slot]].operator)
            if self._shadow and in_training[host, slot]:
                per_sample[host] += self.behind(slot)
        return self._samples * per_sample

    def _seed(self, slot: int, blueprint: str, operator: str) -> int:
        """Per sample, of a seed of this kind in this slot."""
        site = self._hosts.sites[slot]
        with preserved_rng():
            branch = BLUEPRINTS[blueprint].build(site.shape)
            gate = Gate(site.shape) if operator == "gate" else None
        h = torch.zeros(1, *site.example_shape[1:], requires_grad=True)
        blend = OPERATORS[operator]
        return _count(lambda: blend(h, branch(h), 1.0, gate(h) if gate else None).sum().backward())

    def _behind(self, slot: int) -> int:
        """Per sample, of a pass from this slot to the loss and back that teaches none of these segments."""
        rest = nn.Sequential(*copy.deepcopy(self._hosts.segments[slot + 1 :])).requires_grad_(False)
        h = torch.zeros(1, *self._hosts.sites[slot].example_shape[1:], requires_grad=True)
        return _count(lambda: self._task.loss(rest(h), self._task.data.train_y[:1]).backward())


def _count(passes: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        passes()
    return counter.get_total_flops()
