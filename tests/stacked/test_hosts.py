"""Stacked hosts against single models in float64: parameters, losses, gradients and ablations must agree."""

from collections import OrderedDict
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from simic import Action, GrowableModel, LifecycleConfig
from simic.control.baselines import RandomController
from simic.control.facts import Facts
from simic.growth.isolation import evaluating
from simic.lifecycle.stages import Stage
from simic.stacked.config import HostsConfig
from simic.stacked.hosts import StackedHosts
from simic.stacked.optimizer import OptimizerConfig
from simic.stacked.seed_groups import GATE, OPERATORS
from simic.tasks.hosts import resnet_host
from simic.tasks.task import mean_cross_entropy

RNG_SEEDS = (3, 14, 15, 92)
SLOTS = ("stem", "block1", "block2")
RATES = (1e-2, 2e-2, 5e-3, 1e-2)


def segments(*parts: nn.Module) -> nn.Sequential:
    names = ("stem", "block1", "block2", "head")
    return nn.Sequential(OrderedDict(zip(names, parts, strict=True))).double()


def dense() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(i, 6), nn.LayerNorm(6), nn.ReLU()) for i in (5, 6, 6)]
    return segments(*layers, nn.Linear(6, 3))


def convolutional() -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Conv2d(i, 4, 3, s, 1), nn.GroupNorm(1, 4), nn.ReLU()) for i, s in ((1, 1), (4, 2), (4, 2))
    ]
    return segments(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)))


def residual() -> nn.Sequential:
    return resnet_host(1, 4, 2, 3, dims=2).double()


def normed() -> nn.Sequential:
    """Every kind of batch norm: its statistics move by a share, are means of all batches, or are not kept.

    Without biases before them, whose gradients are rounding alone, which AdamW makes a random walk of.
    """
    norms = (nn.BatchNorm1d(6, momentum=0.3), nn.BatchNorm1d(6, momentum=None, affine=False))
    last = nn.BatchNorm1d(6, track_running_stats=False)
    layers = [
        nn.Sequential(nn.Linear(i, 6, bias=False), norm, nn.ReLU())
        for i, norm in zip((5, 6, 6), (*norms, last), strict=True)
    ]
    return segments(*layers, nn.Linear(6, 3))


HOSTS = {
    "dense": (dense, (5,)),
    "convolutional": (convolutional, (1, 6, 6)),
    "residual": (residual, (1, 6, 6)),
    "normed": (normed, (5,)),
}


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).double().mean()


class Alone:
    """One host as a GrowableModel with torch's own optimizer, one group for each of its parts."""

    def __init__(self, make_host, example, rng_seed, rate, lifecycle, config):
        torch.manual_seed(rng_seed)
        self.model = GrowableModel(make_host(), SLOTS, example_input=example, lifecycle=lifecycle, rng_seed=rng_seed)
        self.config, self.rate = config, rate
        self.optimizers = {}
        self.norms = {slot: [] for slot in self.model.slot_names}

    def follow(self):
        wanted = {None: list(self.model.host.parameters())}
        wanted |= {s: list(seed.parameters()) for s in self.model.slot_names if (seed := self.model.seed(s))}
        for key, parameters in wanted.items():
            known = self.optimizers.get(key)
            kept = known.state if known else {}
            held = [p for group in known.param_groups for p in group["params"]] if known else []
            if [id(p) for p in held] == [id(p) for p in parameters]:
                continue
            if self.config.name == "adamw":
                new = torch.optim.AdamW(parameters, lr=self.rate, weight_decay=self.config.weight_decay)
            else:
                new = torch.optim.SGD(parameters, self.rate, momentum=0.9, weight_decay=self.config.weight_decay)
            new.state.update({p: kept[p] for p in parameters if p in kept})
            self.optimizers[key] = new
        self.optimizers = {key: value for key, value in self.optimizers.items() if key in wanted}

    def act(self, row):
        self.model.execute(row)
        self.model.tick()
        self.follow()

    def train(self, x, y):
        self.model.zero_grad()
        self.model.loss(lambda: cross_entropy(self.model(x), y)).backward()
        for slot in self.model.slot_names:
            seed = self.model.seed(slot)
            grads = [p.grad for p in seed.parameters() if p.grad is not None] if seed else []
            if grads:
                self.norms[slot].append(float(torch.nn.utils.get_total_norm(grads)))
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        for optimizer in self.optimizers.values():
            optimizer.step()


def facts_of(hosts: StackedHosts) -> Facts:
    n = hosts.num_hosts
    return Facts(
        slots=hosts.slot_state.copy(),
        lifecycle=hosts.lifecycle,
        slot_names=hosts.slot_names,
        blueprint_names=hosts.blueprint_names,
        blueprint_parameters=hosts.blueprint_table(),
        host_parameters=np.full(n, hosts.host_parameters),
        seed_parameters=hosts.seed_parameters(),
        decision=np.zeros(n, dtype=np.int64),
        horizon=np.zeros(n, dtype=np.int64),
        previous_action=np.zeros((n, 8), dtype=np.int64),
        random_guess_loss=np.full(n, np.log(3)),
        host_gradient_norm=np.ones(n),
        train_loss=np.zeros((n, 1)),
        val_loss=np.zeros((n, 1)),
        val_accuracy=np.zeros((n, 1)),
        parameters=np.ones((n, 1)),
    )


INCUBATIONS = ("direct", "shadow", "straight_through")
CASES = [
    *product(HOSTS, INCUBATIONS, ("adamw", "sgd"), [False]),
    *product(["dense", "convolutional"], INCUBATIONS, ("adamw", "sgd"), [True]),
]
FAST = {
    ("convolutional", "direct", "adamw", True),
    ("normed", "shadow", "sgd", False),
    ("dense", "straight_through", "adamw", True),
    ("dense", "direct", "adamw", True),
}
assert set(CASES) > FAST


EPISODES = [
    *((*case, 1) if case in FAST else pytest.param(*case, 1, marks=pytest.mark.slow) for case in CASES),
    ("dense", "direct", "adamw", True, 2),
    pytest.param("dense", "shadow", "sgd", False, 2, marks=pytest.mark.slow),
    pytest.param("convolutional", "direct", "adamw", True, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "incubation", "optimizer", "compiled", "seeds_per_slot"), EPISODES)
def test_a_long_random_episode_is_the_same_alone_and_stacked(kind, incubation, optimizer, compiled, seeds_per_slot):
    make_host, shape = HOSTS[kind]
    lifecycle = LifecycleConfig(
        incubation=incubation, min_training_decisions=1, embargo_decisions=0, seeds_per_slot=seeds_per_slot
    )
    config = OptimizerConfig(name=optimizer, max_gradient_norm=0.5)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, *shape, generator=generator, dtype=torch.double), torch.arange(64) % 3
    stacked = StackedHosts(
        make_host, SLOTS, example_input=x[:2], rng_seeds=RNG_SEEDS, loss=mean_cross_entropy, metric=accuracy,
        lifecycle=lifecycle, optimizer=config,
    )  # fmt: skip
    stacked.use_compiled &= compiled
    assert stacked.use_compiled == compiled
    alone = [Alone(make_host, x[:2], s, r, lifecycle, config) for s, r in zip(RNG_SEEDS, RATES, strict=True)]
    controller, met, both = RandomController(3), set(), False
    if seeds_per_slot == 2:  # the second seat is open then
        first = Action("germinate", SLOTS[0], "widen").encode(stacked.slot_names, stacked.blueprint_names)
        stacked.plant(np.stack([first] * len(alone)))
        for host in alone:
            host.model.plant(SLOTS[0], "widen")
    for _ in range(60):
        for host in alone:
            host.follow()
        for _ in range(2):
            batches = torch.stack([torch.randperm(64, generator=generator)[:8] for _ in RNG_SEEDS])
            stacked.train_step(x[batches], y[batches], torch.tensor(RATES, dtype=torch.double))
            for host, batch in zip(alone, batches, strict=True):
                host.train(x[batch], y[batch])
        stacked.report_gradients(stacked.mean_gradient_norms().numpy())
        compare(stacked, alone, x, y)
        met |= set(stacked.slot_state.stage.flatten().tolist())
        # What a controller would have measured, so that every operation becomes legal.
        for n, host in enumerate(alone):
            host.model.slot_state.contribution[:] = 0.1
            host.model.slot_state.counterfactual[:] = False
            host.model.slot_state.gradient_norm[0] = stacked.slot_state.gradient_norm[n]
        stacked.slot_state.contribution[:], stacked.slot_state.counterfactual[:] = 0.1, False
        actions = controller.act(facts_of(stacked))
        stacked.execute(actions)
        stacked.tick()
        for host, row in zip(alone, actions, strict=True):
            host.act(row)
            host.norms = {slot: [] for slot in stacked.slot_names}
        both |= (stacked.slot_state.occupied[:, 1::2] & (seeds_per_slot == 2)).any()
    assert both == (seeds_per_slot == 2)
    assert met >= {Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED}


def compare(stacked, alone, x, y):
    everywhere = x.expand(len(alone), *x.shape), y.expand(len(alone), *y.shape)
    losses, _, flipped = stacked.evaluate_and_attribute(*everywhere)
    flipped = flipped.numpy()
    for n, host in enumerate(alone):
        model = host.model
        assert np.array_equal(model.slot_state.stage[0], stacked.slot_state.stage[n])
        assert np.allclose(model.slot_state.alpha[0], stacked.slot_state.alpha[n])
        own = torch.cat([p.detach().flatten() for p in model.host.parameters()])
        torch.testing.assert_close(own, stacked.hosts.rows[n], rtol=1e-8, atol=1e-9)
        for (slot, name), group in stacked.groups.items():
            for row in np.flatnonzero(group.hosts == n).tolist():
                seed = model.seed(stacked.slot_names[slot])
                assert seed.operator == OPERATORS[stacked.structure.operator[n, slot]]
                assert name == GATE or seed.blueprint == name
                part = seed.gate if name == GATE else seed.branch
                weights = torch.cat([p.detach().flatten() for p in part.parameters()])
                torch.testing.assert_close(weights, group.parameters.rows[row], rtol=1e-8, atol=1e-9)
        assert {name: buffer.shape for name, buffer in model.host.named_buffers()} == {
            name: kept.shape[1:] for name, kept in stacked.hosts.statistics.items()
        }
        for name, buffer in model.host.named_buffers():
            torch.testing.assert_close(buffer, stacked.hosts.statistics[name][n], rtol=1e-8, atol=1e-9)
        assert [r.parameters for r in model.growth()] == stacked.seed_parameters()[n].tolist()
        with evaluating(model):
            torch.testing.assert_close(cross_entropy(model(x), y), losses[n], rtol=1e-8, atol=1e-9)
            for s, slot in enumerate(stacked.slot_names):
                if np.isnan(flipped[n, s]):
                    assert (
                        model.seed(slot) is None or not model.slot_state.live[0, s] or model.slot_state.alpha[0, s] == 0
                    )
                    continue
                switched = model.switched_off(slot) if model.slot_state.alpha[0, s] > 0 else model.switched_in(slot)
                with switched:
                    assert flipped[n, s] == pytest.approx(float(accuracy(model(x), y)))
                expected = np.mean(host.norms[slot]) if host.norms[slot] else np.nan
                assert stacked.slot_state.gradient_norm[n, s] == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("incubation", ["direct", "shadow"])
def test_a_long_random_episode_is_the_same_with_seeds_joined_and_apart(incubation):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 5, generator=generator, dtype=torch.double), torch.arange(64) % 3
    both = [
        StackedHosts(
            dense, SLOTS, example_input=x[:2], rng_seeds=range(8), loss=mean_cross_entropy, metric=accuracy,
            lifecycle=LifecycleConfig(incubation=incubation, min_training_decisions=1, embargo_decisions=0),
            join_seeds=join,
        )
        for join in (True, False)
    ]  # fmt: skip
    rate, controller, joined = torch.full((8,), 0.01, dtype=torch.double), RandomController(3), set()
    for _ in range(30):
        batches = torch.stack([torch.randperm(64, generator=generator)[:8] for _ in range(8)])
        everywhere = x.expand(8, *x.shape), y.expand(8, *y.shape)
        seen = [
            (hosts.train_step(x[batches], y[batches], rate), hosts.evaluate_and_attribute(*everywhere),
             hosts.mean_gradient_norms())
            for hosts in both
        ]  # fmt: skip
        torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-9, equal_nan=True)
        rows = [{key: group.parameters.rows for key, group in hosts.groups.items()} for hosts in both]
        torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(both[0].hosts.rows, both[1].hosts.rows, rtol=1e-9, atol=1e-9)
        joined |= {name for (_, name), group in both[0].groups.items() if group.two_layer is not None}
        assert all(group.two_layer is None for group in both[1].groups.values())
        for hosts in both:
            hosts.report_gradients(hosts.mean_gradient_norms().numpy())
            hosts.slot_state.contribution[:], hosts.slot_state.counterfactual[:] = 0.1, False
        actions = controller.act(facts_of(both[0]))
        for hosts in both:
            hosts.execute(actions)
            hosts.tick()
    assert joined == {"low_rank", "mlp_small", "mlp", "mlp_large", "glu", "widen_small", "widen", "widen_large"}


def test_results_do_not_depend_on_the_number_of_hosts():
    def trained_rows(rng_seeds):
        torch.manual_seed(5)
        x = torch.randn(16, 5, dtype=torch.double)
        y = torch.arange(16) % 3
        hosts = StackedHosts(
            dense, SLOTS, example_input=x[:2], rng_seeds=rng_seeds, loss=cross_entropy, metric=accuracy
        )  # fmt: skip
        row = Action("germinate", "stem", "mlp").encode(SLOTS, hosts.blueprint_names)
        hosts.execute(np.stack([row] * len(rng_seeds)))
        for _ in range(6):
            hosts.tick()
            for _ in range(3):
                hosts.train_step(
                    x.expand(len(rng_seeds), *x.shape), y.expand(len(rng_seeds), 16),
                    torch.full((len(rng_seeds),), 0.01, dtype=torch.double),
                )  # fmt: skip
        return hosts.hosts.rows

    torch.testing.assert_close(trained_rows(RNG_SEEDS)[:2], trained_rows(RNG_SEEDS[:2]), rtol=1e-10, atol=1e-10)


def test_a_broken_host_does_not_affect_others():
    x, y = torch.randn(4, 8, 5, dtype=torch.double), (torch.arange(8) % 3).expand(4, 8)
    hosts = StackedHosts(dense, SLOTS, example_input=x[0], rng_seeds=RNG_SEEDS, loss=cross_entropy, metric=accuracy)
    row = Action("germinate", "block1", "mlp").encode(SLOTS, hosts.blueprint_names)
    hosts.execute(np.stack([row] * 4))
    hosts.tick()
    hosts.hosts.rows[2] = torch.nan
    hosts.train_step(x, y, torch.full((4,), 0.01, dtype=torch.double))
    assert hosts.hosts.rows.isnan().any(1).tolist() == [False, False, True, False]


def test_a_reset_host_starts_afresh():
    x, y = torch.randn(4, 8, 5, dtype=torch.double), (torch.arange(8) % 3).expand(4, 8)
    rate = torch.full((4,), 0.01, dtype=torch.double)
    hosts = StackedHosts(dense, SLOTS, example_input=x[0], rng_seeds=RNG_SEEDS, loss=cross_entropy, metric=accuracy)
    start = hosts.hosts.rows.clone()
    row = Action("germinate", "block1", "mlp").encode(SLOTS, hosts.blueprint_names)
    hosts.execute(np.stack([row] * 4))
    hosts.tick()
    hosts.train_step(x, y, rate)
    hosts.reset(np.array([1, 3]), np.array([RNG_SEEDS[1], RNG_SEEDS[0]]))
    assert torch.equal(hosts.hosts.rows[1], start[1])
    assert torch.equal(hosts.hosts.rows[3], start[0])
    assert not torch.equal(hosts.hosts.rows[0], start[0])
    assert hosts.slot_state.occupied.sum(1).tolist() == [1, 0, 1, 0]
    assert hosts.hosts.optimizer_state.steps.tolist() == [1, 0, 1, 0]
    assert next(iter(hosts.groups.values())).hosts.tolist() == [0, 2]


def test_a_reset_host_has_the_statistics_of_a_new_one():
    x, y = torch.randn(4, 8, 5, dtype=torch.double), (torch.arange(8) % 3).expand(4, 8)
    rate = torch.full((4,), 0.01, dtype=torch.double)
    hosts = StackedHosts(normed, SLOTS, example_input=x[0], rng_seeds=RNG_SEEDS, loss=cross_entropy, metric=accuracy)
    hosts.train_step(x, y, rate)
    hosts.reset(np.array([1, 3]), np.array([5, 6]))
    hosts.train_step(x, y, rate)
    assert hosts.hosts.statistics["block1.1.num_batches_tracked"].tolist() == [2, 1, 2, 1]
    torch.manual_seed(5)
    alone = normed()
    alone(x[1])
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(hosts.hosts.statistics[name][1], buffer)


def dense_hosts(x):
    return StackedHosts(dense, SLOTS, example_input=x[0], rng_seeds=RNG_SEEDS, loss=cross_entropy, metric=accuracy)


def test_planted_hosts_equal_planted_models():
    x, y = torch.randn(4, 8, 5, dtype=torch.double), (torch.arange(8) % 3).expand(4, 8)
    hosts = dense_hosts(x)
    rows = np.zeros((4, 8), dtype=np.int64)
    for host, name in ((1, "mlp"), (3, "norm")):
        rows[host] = Action("germinate", "block1", name).encode(SLOTS, hosts.blueprint_names)
    hosts.plant(rows)
    assert hosts.slot_state.stage[:, 1].tolist() == [0, Stage.FOSSILIZED, 0, Stage.FOSSILIZED]
    rate = torch.full((4,), 0.01, dtype=torch.double)
    hosts.train_step(x, y, rate)
    assert hosts.seed_parameters()[:, 1].astype(bool).tolist() == [False, True, False, True]
    losses, _ = hosts.evaluate(x, y, exported=True)
    torch.testing.assert_close(losses, hosts.evaluate(x, y)[0])  # fossils stay in the exported network
    for host, name in ((1, "mlp"), (3, "norm")):
        alone = Alone(dense, x[0], RNG_SEEDS[host], 0.01, LifecycleConfig(), OptimizerConfig())
        alone.model.plant("block1", name)
        for field, values in vars(alone.model.slot_state).items():
            if field != "gradient_norm":
                np.testing.assert_array_equal(values[0], getattr(hosts.slot_state, field)[host], err_msg=field)
        alone.follow()
        alone.train(x[host], y[host])
        torch.testing.assert_close(cross_entropy(alone.model(x[host]), y[host]).detach(), losses[host])


def test_a_pass_can_be_continued_from_a_kept_activation():
    x = torch.randn(4, 8, 5, dtype=torch.double)
    hosts = dense_hosts(x)
    hosts.plant(np.stack([Action("germinate", "block1", "mlp").encode(SLOTS, hosts.blueprint_names)] * 4))
    hosts.train_step(x, (torch.arange(8) % 3).expand(4, 8), torch.full((4,), 0.1, dtype=torch.double))
    some = np.array([3, 1])
    rows, plan = torch.from_numpy(some), hosts.plan_pass(some, hosts.slot_state.alpha)
    whole, kept = hosts.run(x[rows], rows, plan, keep={0, 1})
    assert list(kept) == [0, 1]
    for slot in kept:
        torch.testing.assert_close(hosts.run_from(slot, kept[slot], rows, plan)[0], whole, rtol=0, atol=0)
    without = hosts.plan_pass(some, np.zeros_like(hosts.slot_state.alpha))
    ablated, _ = hosts.run_from(1, kept[1], rows, without)
    torch.testing.assert_close(ablated, hosts.run(x[rows], rows, without)[0], rtol=0, atol=0)
    assert not torch.allclose(ablated, whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the compiler itself
def test_compiled_segments_compute_the_same():
    torch.manual_seed(0)
    x, y = torch.randn(4, 8, 5, dtype=torch.double), (torch.arange(8) % 3).expand(4, 8)
    rows = []
    for config in (HostsConfig(), HostsConfig(compile=True)):
        hosts = StackedHosts(
            dense, SLOTS, example_input=x[0], rng_seeds=RNG_SEEDS, loss=cross_entropy, metric=accuracy, config=config
        )
        hosts.plant(np.stack([Action("germinate", "block1", "mlp").encode(SLOTS, hosts.blueprint_names)] * 4))
        for _ in range(3):
            hosts.train_step(x, y, torch.full((4,), 0.1, dtype=torch.double))
        rows.append(hosts.hosts.rows)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-9, atol=1e-9)
