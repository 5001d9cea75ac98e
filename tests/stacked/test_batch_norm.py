"""Stacked batch norms against torch's own, one network at a time, over several batches and in both modes."""

import numpy as np
import pytest
import torch
from torch import nn

from simic.lifecycle.actions import Action
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.stacked.config import HostsConfig
from simic.stacked.hosts import StackedHosts
from simic.stacked.layers import run_stacked
from simic.stacked.parameters import StackedParameters
from simic.tasks.hosts import resnet_host, slot_names
from simic.tasks.task import accuracy, mean_cross_entropy

NORMS = {
    "default": lambda: nn.BatchNorm2d(3),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "no share": lambda: nn.BatchNorm2d(3, momentum=0.0),
    "not affine": lambda: nn.BatchNorm2d(3, affine=False, eps=0.1),
    "not kept": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "a curve": lambda: nn.BatchNorm1d(3),
    "features": lambda: nn.BatchNorm1d(3, momentum=0.5),
}
SHAPES = {"a curve": (7,), "features": ()}


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("samples_last", [False, True])
def test_each_network_is_normalized_as_alone(case, samples_last):
    torch.manual_seed(0)
    alone = [NORMS[case]().double() for _ in range(4)]
    for norm in alone:
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    stacked = StackedParameters.of_modules(alone, torch.zeros(1, dtype=torch.double))
    space = SHAPES.get(case, (2, 6))
    for training in (True, True, False, True, False):
        x = 3 * torch.randn(4, 5, 3, *space, dtype=torch.double) + torch.arange(3.0).view(3, *[1] * len(space))
        if samples_last:
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        x.requires_grad_()
        for norm in alone:
            norm.train(training)
        out = run_stacked(alone[0], stacked.by_name, x)
        expected = torch.stack([norm(own) for norm, own in zip(alone, x, strict=True)])
        torch.testing.assert_close(out, expected)
        weights, leaves = torch.randn_like(out), [x, *stacked.leaves.values()]
        own = torch.autograd.grad((out * weights).sum(), leaves)
        by_network = [[x], *([norm.get_parameter(name) for norm in alone] for name in stacked.leaves)]
        total = (expected * weights).sum()
        single = [torch.autograd.grad(total, some, retain_graph=True) for some in by_network]
        torch.testing.assert_close(
            own, tuple(some[0] if i == 0 else torch.stack(some) for i, some in enumerate(single))
        )
        for name, kept in stacked.statistics.items():
            torch.testing.assert_close(kept, torch.stack([norm.get_buffer(name) for norm in alone]))


def test_a_single_value_per_channel_is_refused():
    norm = nn.BatchNorm1d(3)
    stacked = StackedParameters.of_modules([norm, nn.BatchNorm1d(3)], torch.zeros(1))
    with pytest.raises(ValueError, match=r"at least two values per channel.*batch_size"):
        run_stacked(norm, stacked.by_name, torch.zeros(2, 1, 3))
    assert stacked.statistics["num_batches_tracked"].tolist() == [0, 0]


def resnets(number=3, **settings) -> StackedHosts:
    return StackedHosts(
        lambda: resnet_host(3, 4, 3, 5, dims=2), slot_names(4), example_input=torch.randn(2, 3, 8, 8),
        rng_seeds=range(number), loss=mean_cross_entropy, metric=accuracy, **settings,
    )  # fmt: skip


def trained(hosts: StackedHosts, steps=3):
    batches = torch.randn(steps, 3, 16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    y = (torch.arange(16) % 5).expand(3, 16)
    for x in batches:
        hosts.train_step(x, y, torch.full((3,), 1e-2))
    return [*hosts.hosts.tensors(), *hosts.evaluate(batches[-1], y)]


@pytest.mark.parametrize(("at_once", "large"), [(1, 1 << 30), (2, 1 << 30), (1, 0)])
def test_hosts_in_chunks_keep_their_own_statistics(at_once, large, monkeypatch):
    together, apart = resnets(), resnets()
    apart.hosts_at_once = at_once
    expected = trained(together)
    monkeypatch.setattr("simic.stacked.layers.LARGE", large)
    torch.testing.assert_close(trained(apart), expected, rtol=1e-3, atol=1e-4)
    assert together.hosts.statistics["block1.inner.1.num_batches_tracked"].tolist() == [3, 3, 3]


def test_evaluation_leaves_statistics_alone():
    hosts = resnets()
    trained(hosts)
    before = {name: kept.clone() for name, kept in hosts.hosts.statistics.items()}
    x, y = torch.randn(3, 16, 3, 8, 8), (torch.arange(16) % 5).expand(3, 16)
    hosts.evaluate_and_attribute(x, y)
    hosts.evaluate(x, y, exported=True)
    assert all(torch.equal(before[name], kept) for name, kept in hosts.hosts.statistics.items())


def test_the_pass_of_an_incubated_seed_leaves_statistics_alone():
    plain, incubating = resnets(), resnets(lifecycle=LifecycleConfig(incubation="shadow"))
    for action in (Action("germinate", "stem", "conv_double"), Action("advance", "stem")):
        incubating.execute(np.stack([action.encode(slot_names(4), incubating.blueprint_names)] * 3))
        incubating.tick()
    assert (incubating.slot_state.stage[:, 0] == Stage.TRAINING).all()
    trained(plain, steps=1)
    trained(incubating, steps=1)
    torch.testing.assert_close(incubating.hosts.statistics, plain.hosts.statistics)


def test_statistics_stay_precise_under_autocast():
    low, full = trained(resnets(config=HostsConfig(precision="bfloat16"))), trained(resnets())
    assert [value.dtype for value in low] == [value.dtype for value in full]
    torch.testing.assert_close(low[0], full[0], rtol=0.1, atol=0.05)
