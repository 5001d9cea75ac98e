"""Hosts on tapes against the same hosts by autograd in float64, and when which of both is used."""

from collections import OrderedDict
from itertools import product

import numpy as np
import pytest
import torch
from helpers.grown_hosts import SLOTS, STYLE_OF
from torch import nn

from simic import Action, LifecycleConfig
from simic.growth.blueprints import blueprints_for
from simic.growth.slot_shape import SlotShape
from simic.lifecycle.slots import plant_fossil, to_measure
from simic.lifecycle.stages import Stage
from simic.stacked.config import HostsConfig
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig
from simic.tasks.hosts import mlp_host, plain_mlp_host
from simic.tasks.task import accuracy, mean_cross_entropy

EVERY = [*product(blueprints_for([SlotShape("features", 4, in_features=4)]), STYLE_OF.values())]
NUM_HOSTS = len(EVERY) + 1  # one stays without seeds


def sequential(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(zip((*SLOTS, "head"), parts, strict=True))).double()


HOSTS = {
    "plain": lambda: plain_mlp_host(5, 4, 2, 3).double(),
    "normed": lambda: mlp_host(5, 8, 2, 3).double(),
    "too wide for blocks": lambda: plain_mlp_host(5, 70, 2, 3).double(),
    "tanh": lambda: sequential(nn.Linear(5, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4, bias=False)), nn.Linear(4, 3)),
}


def grown(make_host, *, tapes=True, **settings) -> StackedHosts:
    """A host per blueprint and operator, with a fossil in the stem and a germinated seed in the block."""
    settings = {"loss": mean_cross_entropy, "metric": accuracy, **settings}
    example = torch.zeros(2, 5, dtype=torch.double)
    hosts = StackedHosts(make_host, SLOTS, example_input=example, rng_seeds=range(NUM_HOSTS), **settings)
    hosts.use_tapes &= tapes
    for slot, plant in zip(SLOTS, (hosts.plant, hosts.execute), strict=True):
        actions = [*(Action("germinate", slot, *each) for each in EVERY), Action()]
        plant(np.stack([action.encode(SLOTS, hosts.blueprint_names) for action in actions]))
    hosts.tick()
    return hosts


def batch(number: int, samples: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(NUM_HOSTS, samples, 5, generator=generator, dtype=torch.double)
    return x, torch.randint(3, (NUM_HOSTS, samples), generator=generator)


RATE = torch.linspace(0.01, 0.1, NUM_HOSTS, dtype=torch.double)


def no_autograd(*args, **kwargs):
    raise AssertionError("autograd was used")


def check_alike(both: list[StackedHosts], number: int, monkeypatch) -> None:
    """Train, evaluate and compare; the first hosts must not use autograd."""
    seen = []
    for hosts in both:
        with monkeypatch.context() as patch:
            if hosts is both[0]:
                patch.setattr(torch.autograd, "grad", no_autograd)
            losses = [hosts.train_step(*batch(10 * number + step), RATE) for step in range(3)]
        parts = [hosts.hosts.rows, *(group.parameters.rows for group in hosts.groups.values())]
        seen.append((losses, hosts.evaluate_and_attribute(*batch(number, 20)), hosts.mean_gradient_norms(), parts))
    torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", HOSTS)
def test_tapes_and_autograd_train_and_evaluate_alike(kind, optimizer, monkeypatch):
    # With a small epsilon AdamW would magnify the rounding errors of tiny gradients.
    config = OptimizerConfig(name=optimizer, max_gradient_norm=1.0, epsilon=1e-3)
    both = [grown(HOSTS[kind], tapes=tapes, optimizer=config) for tapes in (True, False)]
    for number in range(4):
        check_alike(both, number, monkeypatch)
        assert to_measure(both[0].slot_state).sum(0).tolist() == [NUM_HOSTS - 1] * 2
        for hosts in both:
            hosts.tick()


SEATS = ("stem", "stem#2", "block1", "block1#2")
PAIRS = [("mlp", "widen"), ("widen", "glu"), ("widen_small", "widen"), ("norm", "widen_large"), ("widen", "norm")]


def grown_twice(*, tapes: bool) -> StackedHosts:
    """A host per pair and operator with both seeds in each place, the last one live."""
    pairs = [(*pair, style) for pair in PAIRS for style in STYLE_OF.values()]
    hosts = StackedHosts(
        HOSTS["plain"], SLOTS, example_input=torch.zeros(2, 5, dtype=torch.double), rng_seeds=range(NUM_HOSTS),
        loss=mean_cross_entropy, metric=accuracy, lifecycle=LifecycleConfig(seeds_per_slot=2),
        optimizer=OptimizerConfig(max_gradient_norm=1.0, epsilon=1e-3),
    )  # fmt: skip
    hosts.use_tapes &= tapes
    for number, slot in enumerate(SEATS):
        plant = hosts.execute if slot == SEATS[-1] else hosts.plant
        chosen = [Action("germinate", slot, pair[number % 2], pair[2]) for pair in pairs]
        actions = [*chosen, *[Action()] * (NUM_HOSTS - len(pairs))]
        plant(np.stack([action.encode(SEATS, hosts.blueprint_names) for action in actions]))
    hosts.tick()
    return hosts


def test_several_seeds_in_one_place_are_alike_on_tapes_and_by_autograd(monkeypatch):
    both = [grown_twice(tapes=tapes) for tapes in (True, False)]
    assert to_measure(both[0].slot_state).any(0).sum() == 2
    for number in range(5):
        check_alike(both, number, monkeypatch)
        for hosts in both:
            hosts.tick()
            hosts.slot_state.contribution_age[:] = np.roll(np.arange(4), number)  # fossils of all places are measured


def halve_alpha(hosts: StackedHosts) -> None:
    hosts.slot_state.alpha[:, 1] *= 0.5
    hosts.sync_with_slots()


def make_fossils(hosts: StackedHosts) -> None:
    plant_fossil(hosts.slot_state, (np.arange(NUM_HOSTS - 1), np.ones(NUM_HOSTS - 1, dtype=np.int64)))
    hosts.sync_with_slots()


def measure_the_other_fossil(hosts: StackedHosts) -> None:
    hosts.slot_state.contribution_age[:, 1] = 5


def test_a_tape_follows_whatever_its_plan_is_made_from(monkeypatch):
    on_tape, plain = (grown(HOSTS["plain"], tapes=tapes) for tapes in (True, False))
    for hosts, step in product((on_tape, plain), range(5)):  # newborn seeds have no effect
        hosts.train_step(*batch(step), RATE)
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    changes = ((7, None), (8, None), (8, halve_alpha), (8, make_fossils), (8, measure_the_other_fossil))
    for number, (samples, change) in enumerate(changes):
        for hosts in (on_tape, plain):
            if change is not None:
                change(hosts)
        found, expected = (hosts.evaluate_and_attribute(*batch(number, samples)) for hosts in (on_tape, plain))
        torch.testing.assert_close(found, expected, equal_nan=True)
        losses = on_tape.train_step(*batch(number, samples), torch.zeros_like(RATE))
        torch.testing.assert_close(losses, expected[0])


def test_a_broken_host_on_a_tape_does_not_affect_others(monkeypatch):
    hosts = grown(HOSTS["normed"])
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    hosts.hosts.rows[2] = torch.nan
    hosts.train_step(*batch(0), RATE)
    assert hosts.hosts.rows.isnan().any(1).nonzero().flatten().tolist() == [2]
    for group in hosts.groups.values():
        broken = group.hosts[group.parameters.rows.isnan().any(1).numpy()]
        assert set(broken.tolist()) <= {2}


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": lambda logits, targets: mean_cross_entropy(logits, targets)},
        {"lifecycle": LifecycleConfig(incubation="shadow")},
        {"lifecycle": LifecycleConfig(incubation="straight_through")},
        {"config": HostsConfig(precision="bfloat16")},
    ],
)
def test_what_a_tape_does_not_know_is_left_to_autograd(settings, monkeypatch):
    hosts = grown(HOSTS["plain"], **settings)
    if hosts.lifecycle.incubation != "direct":
        hosts.slot_state.stage[:-1, 1] = Stage.TRAINING
        hosts.sync_with_slots()
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    with pytest.raises(AssertionError, match="autograd was used"):
        hosts.train_step(*batch(0), RATE)


def test_unknown_layers_are_left_to_autograd():
    hosts = grown(lambda: sequential(nn.Linear(5, 4), nn.Sequential(nn.SiLU(), nn.Linear(4, 4)), nn.Linear(4, 3)))
    assert not hosts.use_tapes
    hosts.train_step(*batch(0), RATE)


def test_targets_to_ignore_are_left_to_autograd():
    on_tape, plain = (grown(HOSTS["plain"], tapes=tapes) for tapes in (True, False))
    x, y = batch(0)
    y[:, 0] = -100
    torch.testing.assert_close(on_tape.train_step(x, y, RATE), plain.train_step(x, y, RATE))
    torch.testing.assert_close(on_tape.hosts.rows, plain.hosts.rows)
