"""Stacked hosts on another device: all their work runs on `meta`, where a tensor left on the CPU is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.grown_hosts import KINDS, grown_hosts
from helpers.one_device import OneDevice
from helpers.tiers import slow_but

from simic.lifecycle.stages import INCUBATIONS, Stage
from simic.stacked.data import StackedData
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig, StackedOptimizer
from simic.stacked.parameters import StackedParameters
from simic.stacked.precision import LossScale
from simic.stacked.seed_groups import OPERATORS
from simic.stacked.snapshot import Snapshot
from simic.tasks.registry import make_task

META = torch.device("meta")


def test_data_come_in_batches_from_their_device():
    task = make_task("teacher-mlp")
    other = replace(task.data, train_y=task.data.train_y.flip(0))
    for own in ([task.data] * 2, [task.data, other]):
        data = StackedData(own, [1, 2], batch_size=50, device=META)
        with OneDevice(nothing_on_cpu=True) as watch:
            for x, y in [*data.batches(), data.split("validation", slice(0, 9)), data.split("test", slice(2, 3))]:
                assert x.is_meta
                assert y.is_meta
        assert watch.reads == 0


def tensors_of(hosts: StackedHosts) -> list[torch.Tensor]:
    """Parameters and optimizer state of hosts and seeds, and what the segments hold."""
    matrices = [hosts.hosts, *(group.parameters for group in hosts.groups.values())]
    rows = [tensor for own in matrices for tensor in (own.rows, *own.optimizer_state.tensors(), *own.leaves.values())]
    return rows + [tensor for segment in hosts.segments for tensor in segment.state_dict().values()]


@pytest.mark.parametrize("hosts_at_once", slow_but([5], [None, 5]))
@pytest.mark.parametrize("incubation", slow_but(["shadow"], INCUBATIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_step_stays_on_its_device(kind, incubation, hosts_at_once):
    hosts = grown_hosts(kind, incubation, device="meta")
    hosts.hosts_at_once = hosts_at_once or hosts.hosts_at_once
    x, y = (tensor.to(META) for tensor in KINDS[kind].draw(hosts.num_hosts, 4))
    rate, which = torch.full((hosts.num_hosts,), 0.01, device=META), np.arange(hosts.num_hosts) % 2 == 0
    stages = [Stage.TRAINING, Stage.BLENDING] if hosts.lifecycle.has_training_stage else [Stage.BLENDING]
    with OneDevice(nothing_on_cpu=True) as watch:
        snapshot = Snapshot(hosts)
        for stage in stages:
            hosts.slot_state.stage[:-1, 1], hosts.slot_state.alpha[:-1, 1] = stage, 0.5 * (stage == Stage.BLENDING)
            hosts.sync_with_slots()
            results = [hosts.train_step(x, y, rate), *hosts.evaluate(x, y), *hosts.evaluate(x, y, exported=True)]
            results += [*hosts.evaluate_and_attribute(x, y), hosts.mean_gradient_norms()]
            assert all(result.is_meta for result in results)
            snapshot.save(hosts, which)
        snapshot.restore(hosts, ~which)
        hosts.train_step(x, y, rate)
    assert watch.reads == 0
    assert hosts.slot_state.stage[0].tolist() == [Stage.FOSSILIZED, Stage.BLENDING]
    assert hosts.slot_state.stage[1].tolist() == [Stage.FOSSILIZED, Stage.PRUNED]
    assert set(hosts.structure.operator.flatten().tolist()) == set(range(len(OPERATORS)))
    assert all(tensor.is_meta for tensor in tensors_of(hosts))


def test_a_scaled_step_stays_on_its_device():
    """Autocast does not know this device, so the optimizer is given scaled gradients."""
    matrices = [StackedParameters(torch.ones(*size, device=META), {"w": torch.Size([3])}) for size in ((2, 3), (1, 3))]
    owners = [np.arange(2), np.array([1])]
    optimizer = StackedOptimizer(matrices, [owners[0], owners[1] + 2], owners, OptimizerConfig(), num_slots=1)
    scale = LossScale(2, META)
    with OneDevice(nothing_on_cpu=True) as watch:
        norms = optimizer.step(torch.ones(9, device=META), torch.ones(2, device=META), None, scale)
        scale.reset(torch.zeros(1, dtype=torch.long, device=META))
    assert norms.is_meta
    assert watch.reads == 0


def test_a_reset_host_and_new_seeds_are_on_the_device():
    hosts = grown_hosts("features", device="meta")
    x, y = (tensor.to(META) for tensor in KINDS["features"].draw(hosts.num_hosts, 4))
    hosts.reset(np.array([0, 2]), np.array([7, 8]))
    with OneDevice(nothing_on_cpu=True):
        hosts.train_step(x, y, torch.full((hosts.num_hosts,), 0.01, device=META))
    assert all(tensor.is_meta for tensor in tensors_of(hosts))


def test_a_number_computed_on_the_cpu_is_found():
    with OneDevice(nothing_on_cpu=True):
        torch.arange(3).to(META)  # indices may come from the CPU
        torch.from_numpy(np.ones(3)).to(META)
        with pytest.raises(AssertionError, match="on the CPU"):
            torch.zeros(3)
