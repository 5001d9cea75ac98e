"""Compiled hosts against the same hosts by autograd in float64, and when which of both is used."""

from collections import OrderedDict
from copy import deepcopy
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from helpers.grown_hosts import SLOTS, STYLE_OF
from torch import nn

from simic import Action, LifecycleConfig
from simic.growth.blueprints import blueprints_for
from simic.growth.branch_layers import CentredConvolution, FullAttention
from simic.growth.slot_shape import SlotShape
from simic.lifecycle.slots import plant_fossil, to_measure
from simic.lifecycle.stages import Stage
from simic.stacked.compiled import hosts as compiled_hosts
from simic.stacked.config import HostsConfig
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig, OptimizerName
from simic.tasks.hosts import TokenEmbedding, conv_host, mlp_host, plain_mlp_host, resnet_host, transformer_host
from simic.tasks.task import accuracy, explained_variance, mean_cross_entropy, mean_squared_error

TOKENS = (6,)  # positions
SHAPES = {
    (5,): SlotShape("features", 4, in_features=4),
    (2, 9): SlotShape("conv", 4, dims=1, in_features=4, stride=(2,)),
    (2, 6, 5): SlotShape("conv", 4, dims=2, in_features=4, stride=(2, 2)),
    TOKENS: SlotShape("sequence", 8, in_features=8),
}
"""The shape of a sample -> that of the slots."""
EVERY = {sample: [*product(blueprints_for([shape]), STYLE_OF.values())] for sample, shape in SHAPES.items()}
NUM_HOSTS = max(map(len, EVERY.values())) + 1  # at least one stays without seeds


def sequential(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(zip((*SLOTS, "head"), parts, strict=True))).double()


HOSTS = {
    "plain": lambda: plain_mlp_host(5, 4, 2, 3).double(),
    "normed": lambda: mlp_host(5, 8, 2, 3).double(),
    "too wide for blocks": lambda: plain_mlp_host(5, 70, 2, 3).double(),
    "tanh": lambda: sequential(nn.Linear(5, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4, bias=False)), nn.Linear(4, 3)),
}


def misfit(action: Action, sample: tuple[int, ...]) -> bool:
    """Nothing grows beside an embedding."""
    return sample == TOKENS and action.slot == "stem" and str(action.blueprint).startswith("widen")


def grown(make_host, *, compiled=True, sample=(5,), **settings) -> StackedHosts:
    """A host per blueprint and operator, with a fossil in the stem and a germinated seed in the block."""
    settings = {"loss": mean_cross_entropy, "metric": accuracy, **settings}
    example = torch.zeros(2, *sample, dtype=torch.long if sample == TOKENS else torch.double)
    hosts = StackedHosts(make_host, SLOTS, example_input=example, rng_seeds=range(NUM_HOSTS), **settings)
    hosts.use_compiled &= compiled
    for slot, plant in zip(SLOTS, (hosts.plant, hosts.execute), strict=True):
        actions = [Action("germinate", slot, *each) for each in EVERY[sample]]
        actions = [Action() if misfit(action, sample) else action for action in actions]
        actions += [Action()] * (NUM_HOSTS - len(actions))
        plant(np.stack([action.encode(SLOTS, hosts.blueprint_names) for action in actions]))
    hosts.tick()
    return hosts


def batch(number: int, samples: int = 9, sample=(5,)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    if sample == TOKENS:
        x, y = torch.randint(7, (2, NUM_HOSTS, samples, *sample), generator=generator)
        return x, y
    x = torch.randn(NUM_HOSTS, samples, *sample, generator=generator, dtype=torch.double)
    return x, torch.randint(3, (NUM_HOSTS, samples), generator=generator)


RATE = torch.linspace(0.01, 0.1, NUM_HOSTS, dtype=torch.double)


def no_autograd(*args, **kwargs):
    raise AssertionError("autograd was used")


def check_alike(both: list[StackedHosts], number: int, monkeypatch, sample=(5,)) -> None:
    """Train, evaluate and compare; the first hosts must not use autograd."""
    seen = []
    for hosts in both:
        with monkeypatch.context() as patch:
            if hosts is both[0]:
                patch.setattr(torch.autograd, "grad", no_autograd)
            losses = [hosts.train_step(*batch(10 * number + step, sample=sample), RATE) for step in range(3)]
        parts = [*hosts.hosts.tensors(), *(group.parameters.rows for group in hosts.groups.values())]
        x, y = batch(number, 20, sample)
        exported = hosts.evaluate(x, y, exported=True)
        seen.append((losses, hosts.evaluate_and_attribute(x, y), exported, hosts.mean_gradient_norms(), parts))
    torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-10, equal_nan=True)


def check_a_life(make_host, optimizer: OptimizerName, monkeypatch, sample=(5,)) -> list[StackedHosts]:
    """Train and evaluate while seeds are blended in; returns the hosts of both kinds."""
    # With a small epsilon AdamW would magnify the rounding errors of tiny gradients.
    config = OptimizerConfig(name=optimizer, max_gradient_norm=1.0, epsilon=1e-3)
    both = [grown(make_host, compiled=compiled, sample=sample, optimizer=config) for compiled in (True, False)]
    assert [hosts.use_compiled for hosts in both] == [True, False]
    for number in range(4):
        check_alike(both, number, monkeypatch, sample)
        assert to_measure(both[0].slot_state)[: len(EVERY[sample]), 1].all()
        for hosts in both:
            hosts.tick()
    return both


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", HOSTS)
def test_compiled_hosts_and_autograd_train_and_evaluate_alike(kind, optimizer, monkeypatch):
    check_a_life(HOSTS[kind], optimizer, monkeypatch)


@pytest.mark.parametrize("sample", [(2, 9), (2, 6, 5)])
def test_compiled_convolutions_and_autograd_train_and_evaluate_alike(sample, monkeypatch):
    check_a_life(lambda: conv_host(2, 4, 1, 3, len(sample) - 1).double(), "adamw", monkeypatch, sample)


@pytest.mark.parametrize(
    ("make_host", "sample"),
    [
        (lambda: mlp_host(5, 8, 2, 3, norm="batch").double(), (5,)),
        (lambda: resnet_host(2, 4, 1, 3, 1).double(), (2, 9)),
        (lambda: resnet_host(2, 4, 1, 3, 2).double(), (2, 6, 5)),
        (lambda: conv_host(2, 4, 1, 3, 2, norm="batch").double(), (2, 6, 5)),
    ],
)
def test_compiled_batch_norms_and_autograd_train_and_evaluate_alike(make_host, sample, monkeypatch):
    for hosts in check_a_life(make_host, "adamw", monkeypatch, sample):
        kept = hosts.hosts.statistics
        assert kept["stem.1.num_batches_tracked"].eq(12).all()
        assert kept["stem.1.running_mean"].abs().min() > 0


def make_transformer() -> nn.Sequential:
    return transformer_host(7, TOKENS[0], 8, 1).double()


def test_compiled_transformers_and_autograd_train_and_evaluate_alike(monkeypatch):
    check_a_life(make_transformer, "adamw", monkeypatch, TOKENS)


@pytest.mark.parametrize(("make_host", "sample"), [(HOSTS["normed"], (5,)), (make_transformer, TOKENS)])
def test_a_batch_in_blocks_gives_what_it_gives_at_once(make_host, sample, monkeypatch):
    monkeypatch.setattr(compiled_hosts, "CACHE", 1)
    monkeypatch.setattr(compiled_hosts, "MIN_BLOCK", 4)  # of 9 and of 20 samples
    check_a_life(make_host, "adamw", monkeypatch, sample)


def test_bidirectional_seeds_are_compiled_like_modules():
    for kind in (FullAttention, CentredConvolution):
        torch.manual_seed(0)
        branch = kind(8).double()
        nn.init.normal_(branch.out.weight)
        parts = OrderedDict[str, nn.Module](stem=TokenEmbedding(7, 6, 8), block1=branch, head=nn.Linear(8, 7))
        make = partial(deepcopy, nn.Sequential(parts).double())
        hosts = StackedHosts(
            make, SLOTS[:1], example_input=torch.zeros(2, 6, dtype=torch.long), rng_seeds=[0, 1],
            loss=mean_cross_entropy, metric=accuracy,
        )  # fmt: skip
        x, y = torch.randint(7, (2, 2, 9, 6), generator=torch.Generator().manual_seed(0))
        assert hosts.use_compiled
        losses, _ = hosts.evaluate(x, y)
        expected = [mean_cross_entropy(make()(own), targets) for own, targets in zip(x, y, strict=True)]
        torch.testing.assert_close(losses, torch.stack(expected).detach())


def test_a_token_that_is_not_embedded_raises():
    hosts = grown(make_transformer, sample=TOKENS)
    x, y = batch(0, sample=TOKENS)
    x[2, 3, 1] = 7
    with pytest.raises(IndexError, match="tokens must be from 0 to 6, got 0 to 7"):
        hosts.train_step(x, y, RATE)


def test_regression_is_compiled_too(monkeypatch):
    both = [
        grown(HOSTS["normed"], compiled=compiled, loss=mean_squared_error, metric=explained_variance)
        for compiled in (True, False)
    ]
    for number in range(3):
        x, _ = batch(number)
        y = torch.stack([x.sum(2), x[..., 0] * x[..., 1], x[..., 2].abs()], 2)
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd, "grad", no_autograd)
            fast = both[0].train_step(x, y, RATE)
        torch.testing.assert_close(fast, both[1].train_step(x, y, RATE))
    torch.testing.assert_close(both[0].hosts.rows, both[1].hosts.rows)


SEATS = ("stem", "stem#2", "block1", "block1#2")
PAIRS = [("mlp", "widen"), ("widen", "glu"), ("widen_small", "widen"), ("norm", "widen_large"), ("widen", "norm")]


def grown_twice(*, compiled: bool) -> StackedHosts:
    """A host per pair and operator with both seeds in each place, the last one live."""
    pairs = [(*pair, style) for pair in PAIRS for style in STYLE_OF.values()]
    hosts = StackedHosts(
        HOSTS["plain"], SLOTS, example_input=torch.zeros(2, 5, dtype=torch.double), rng_seeds=range(NUM_HOSTS),
        loss=mean_cross_entropy, metric=accuracy, lifecycle=LifecycleConfig(seeds_per_slot=2),
        optimizer=OptimizerConfig(max_gradient_norm=1.0, epsilon=1e-3),
    )  # fmt: skip
    hosts.use_compiled &= compiled
    for number, slot in enumerate(SEATS):
        plant = hosts.execute if slot == SEATS[-1] else hosts.plant
        chosen = [Action("germinate", slot, pair[number % 2], pair[2]) for pair in pairs]
        actions = [*chosen, *[Action()] * (NUM_HOSTS - len(pairs))]
        plant(np.stack([action.encode(SEATS, hosts.blueprint_names) for action in actions]))
    hosts.tick()
    return hosts


def test_several_seeds_in_one_place_are_alike_compiled_and_by_autograd(monkeypatch):
    both = [grown_twice(compiled=compiled) for compiled in (True, False)]
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
    grown = len(EVERY[5,])
    plant_fossil(hosts.slot_state, (np.arange(grown), np.ones(grown, dtype=np.int64)))
    hosts.sync_with_slots()


def measure_the_other_fossil(hosts: StackedHosts) -> None:
    hosts.slot_state.contribution_age[:, 1] = 5


def test_compiled_hosts_follow_whatever_their_programs_are_made_from(monkeypatch):
    fast, plain = (grown(HOSTS["plain"], compiled=compiled) for compiled in (True, False))
    for hosts, step in product((fast, plain), range(5)):  # newborn seeds have no effect
        hosts.train_step(*batch(step), RATE)
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    changes = ((7, None), (8, None), (8, halve_alpha), (8, make_fossils), (8, measure_the_other_fossil))
    for number, (samples, change) in enumerate(changes):
        for hosts in (fast, plain):
            if change is not None:
                change(hosts)
        found, expected = (hosts.evaluate_and_attribute(*batch(number, samples)) for hosts in (fast, plain))
        torch.testing.assert_close(found, expected, equal_nan=True)
        losses = fast.train_step(*batch(number, samples), torch.zeros_like(RATE))
        torch.testing.assert_close(losses, expected[0])


def test_seeds_that_are_not_blended_in_leave_the_training_of_their_hosts_as_it_is():
    both = [grown(HOSTS["plain"], compiled=compiled) for compiled in (True, False)]
    for hosts in both:
        hosts.train_step(*batch(0), RATE)
        hosts.slot_state.alpha[:, 1] = 0  # of seeds behind the block and beside it
        hosts.sync_with_slots()
        for step in range(3):
            hosts.train_step(*batch(step), RATE)
    torch.testing.assert_close(both[0].hosts.rows, both[1].hosts.rows)


def test_a_broken_host_does_not_affect_others(monkeypatch):
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
def test_what_is_not_known_is_left_to_autograd(settings, monkeypatch):
    hosts = grown(HOSTS["plain"], **settings)
    if hosts.lifecycle.incubation != "direct":
        hosts.slot_state.stage[: len(EVERY[5,]), 1] = Stage.TRAINING
        hosts.sync_with_slots()
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    with pytest.raises(AssertionError, match="autograd was used"):
        hosts.train_step(*batch(0), RATE)


def test_unknown_layers_are_left_to_autograd():
    hosts = grown(lambda: sequential(nn.Linear(5, 4), nn.Sequential(nn.SiLU(), nn.Linear(4, 4)), nn.Linear(4, 3)))
    assert not hosts.use_compiled
    hosts.train_step(*batch(0), RATE)


def test_targets_to_ignore_do_not_count():
    fast, plain = (grown(HOSTS["plain"], compiled=compiled) for compiled in (True, False))
    x, y = batch(0)
    y[:, 0] = -100
    torch.testing.assert_close(fast.train_step(x, y, RATE), plain.train_step(x, y, RATE))
    torch.testing.assert_close(fast.hosts.rows, plain.hosts.rows)


def test_a_target_that_is_no_class_raises():
    hosts = grown(HOSTS["plain"])
    x, y = batch(0)
    y[1, 4] = 3
    with pytest.raises(IndexError, match="targets must be classes from 0 to 2, got 3"):
        hosts.train_step(x, y, RATE)
